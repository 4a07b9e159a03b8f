"""Compressions, the names of methods behind their entry point, as fastsync takes them: ``fp16``, ``int8+ef``, ``auto``.

The wire comes first, and behind it what is not as by default. ``auto``, which measures and chooses, has neither.
"""

WIRE_BYTES = {"none": 4, "fp16": 2, "bf16": 2, "int8": 132 / 128}
"""That a float32 value takes on the wire. Of int8, 128 values share a scale of 4 bytes."""
DEFAULT = ("none", "fp16", "bf16", "fp16+fp32", "bf16+fp32", "int8", "int8+ef")
ON_REQUEST = (
    *(f"{wire}+{algorithm}" for wire in WIRE_BYTES for algorithm in ("one_shot", "two_shot")),
    *("int8+ef+one_shot", "int8+ef+two_shot", "auto", "auto:int8"),
)
APPROXIMATE = ("int4+ef", "lowrank:1", "lowrank")
"""On request, too. Each step loses so much that its error is told and not judged."""
CHOSEN = {"auto": "bf16", "auto:int8": "int8+ef+two_shot"}
"""What is chosen by measurement, and the coarsest that may be."""


def split(name: str) -> tuple[str, list[str]]:
    """The wire, and the options behind it."""
    wire, *options = name.split("+")
    return wire, options


def algorithm(name: str, num_ranks: int) -> str:
    """Names who adds, all_reduce, one_shot or two_shot, as the engine decides for buckets that are not small."""
    wire, options = split(name)
    for chosen in ("one_shot", "two_shot"):
        if chosen in options:
            return chosen
    if not options and wire != "int8":
        return "all_reduce"
    return "one_shot" if num_ranks == 2 else "two_shot"


def half_steps(name: str) -> float | None:
    """Bounds the error of a value in halves of the wire's step; None where it is added on the wire.

    It is rounded once on its way in, and in two_shot the sum once on its way out, by half a step.
    With error feedback there is as much more of it from the step before.
    """
    wire, options = split(name)
    if wire == "none" or (not options and wire != "int8"):
        return None
    times = 1 if "one_shot" in options else 2
    return float(times * (2 if "ef" in options else 1))

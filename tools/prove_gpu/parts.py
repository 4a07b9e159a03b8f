"""What is to be proved, part by part: the commands, their time limits, and what they need."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.prove_gpu.running import Command
from tools.prove_gpu.wheels import ROOT

TESTS = ROOT / "tests"
OF_RANKS = ("test_nccl_algorithms.py", "test_fp32_sums.py", "test_two_level.py")
OPERATOR_TESTS = ("test_ops.py", "test_ops_int8.py", "test_ops_residuals.py")
# On buckets that have one of every kind; random ones by the hundred would take too long there.
SANITIZED = {"memcheck": "samples or sizes", "racecheck": "samples", "synccheck": "samples"}
CAPTURED = "captur"
WAYS = (
    "ddp",
    "ddp/fp16_compress_hook",
    "fastsync.register_comm_hook/none",
    "fastsync.register_comm_hook/fp16",
    "fastsync.attach/none",
    "fastsync.attach/fp16",
    "fastsync.attach/int8+ef",
)


@dataclass(frozen=True)
class Part:
    """Commands that belong together. ``limit`` is for all of them, in seconds."""

    name: str
    proves: str
    limit: float
    commands: Callable[[Path], Sequence[Command]]
    """Given the folder to leave results in."""
    needs: str = "a GPU"
    """"nothing", "torch with CUDA", "a GPU", or a program that also has to be on the PATH."""


def files_of(name: str) -> list[str]:
    """The files with tests that need a GPU which belong to the part ``name``, relative to the repository."""
    texts = {path: path.read_text() for path in sorted(TESTS.glob("test_*.py"))}
    files = {path: ast.parse(text) for path, text in texts.items() if "gpu" in text or "device" in text}
    marked = {path: tree for path, tree in files.items() if any(map(_asks_for_a_gpu, ast.walk(tree)))}
    if name == "captured":
        chosen = [path for path, tree in marked.items() if CAPTURED in path.name or any(map(_captures, ast.walk(tree)))]
    else:
        others = [path for path in marked if CAPTURED not in path.name]
        chosen = [path for path in others if (path.name in OF_RANKS) == (name == "ranks")]
    return [str(path.relative_to(ROOT)) for path in chosen]


def _asks_for_a_gpu(node: ast.AST) -> bool:
    """``pytest.mark.gpu``, or a test that runs on each ``device`` of tests/conftest.py, of which one is marked so."""
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
        own = any(getattr(part, "value", None) == "device" for mark in node.decorator_list for part in ast.walk(mark))
        return not own and any(argument.arg == "device" for argument in node.args.args)
    return isinstance(node, ast.Attribute) and node.attr == "gpu" and getattr(node.value, "attr", None) == "mark"


def _captures(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and CAPTURED in node.name


def _pytest(file: str, keywords: str, folder: Path, limit: float, before: Sequence[str] = ()) -> Command:
    """One file's tests in a process of their own: a kernel that fails spoils all that comes after it there."""
    words = [
        *before, sys.executable, "-m", "pytest", file, "-m", "gpu", "-k", keywords, "-p", "pytest_timeout",
        "-p", "pytest_benchmark.plugin", "-p", "no:cacheprovider", "--timeout", "150", "--tb", "short", "-q", "-rfEs",
        "--junit-xml", str(folder / f"{Path(file).stem}.xml"),
    ]  # fmt: skip
    # What else is installed there shall not take part.
    environment = {"FAIL_WITHOUT_CUDA": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if Path(file).name in OPERATOR_TESTS:
        environment["TESTS_WITHOUT_RANKS"] = "1"
    return Command(tuple(words), limit, environment)


def _tests(name: str, keywords: str, limit: float) -> Callable[[Path], list[Command]]:
    return lambda folder: [_pytest(file, keywords, folder, limit) for file in files_of(name)]


def _sanitizer(folder: Path) -> list[Command]:
    commands = []
    for tool, keywords in SANITIZED.items():
        checker = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--target-processes",
            "application-only",
            "--error-exitcode",
            "9",
        ]
        command = _pytest("tests/test_ops.py", keywords, folder / tool, 150, checker)
        # With an allocation for each tensor, what lies behind one is nobody's.
        environment = {**command.environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        commands.append(replace(command, environment=environment))
    return commands


def _benchmark(folder: Path, name: str, limit: float, *words: str) -> Command:
    command, *_ = name.split("-")
    rows = str(folder / f"{name}.json")
    return Command((sys.executable, "-m", "benchmarks", command, *words, "--json", rows), limit)


def _on_one_and_two_ranks(folder: Path, command: str, limit: float, *words: str) -> list[Command]:
    """Two ranks share a GPU where there is but one. Without any, none is measured in its place."""
    return [
        _benchmark(folder, f"{command}-{nproc}", limit, "--nproc", str(nproc), "--share-gpus", *words)
        for nproc in (1, 2)
    ]


def _build(folder: Path) -> list[Command]:
    del folder
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    environment = {"FASTSYNC_CUDA": "1", "MAX_JOBS": jobs}
    before = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "fastsync").glob("_*.so"))]
    return [
        # Where the build fails, nothing that follows may run with what an earlier one has made.
        *([Command(("rm", "-f", *before), 10)] if before else []),
        Command((sys.executable, "setup.py", "build_ext", "--inplace"), 450, environment),
        Command((sys.executable, "-m", "fastsync.cli", "doctor"), 60),
    ]


def _carry(folder: Path) -> list[Command]:
    del folder
    return [Command((sys.executable, "-m", "tools.prove_gpu.wheels", "fill"), 420)]


def _ops(folder: Path) -> list[Command]:
    words = ("--device", "cuda", "--sizes", "1MiB", "25MiB", "256MiB", "--tensors", "1", "160")
    return [_benchmark(folder, "ops", 240, *words)]


def _sync(folder: Path) -> list[Command]:
    words = ("--sizes", "0.5m", "12m", "100MiB", "--repetitions", "20", "--ways", *WAYS)
    return _on_one_and_two_ranks(folder, "sync", 150, *words)


def _ddp(folder: Path) -> list[Command]:
    words = ("--models", "resnet50", "gpt2", "--scale", "full", "--ways", *WAYS)
    return _on_one_and_two_ranks(folder, "ddp", 210, *words)


def _ppo(folder: Path) -> list[Command]:
    words = ("--device", "cuda", "--nproc", "1", "--repetitions", "1", "--hyperparameters", "fastsync")
    return [_benchmark(folder, "ppo", 300, *words, "--timeout", "100")]


def _cost(folder: Path) -> list[Command]:
    return _on_one_and_two_ranks(folder, "overhead", 120, "--sizes", "5k", "0.5m", "12m", "--ways", *WAYS)


REST = f"not {CAPTURED}"
ALL = (
    Part("carry", "a folder of wheels for a machine without a network", 420, _carry, needs="nothing"),
    Part("build", "the extension compiles and loads with CUDA", 470, _build, needs="torch with CUDA"),
    Part("tests", "every test that needs a GPU, but for those below", 450, _tests("tests", REST, 240)),
    Part("ranks", "wires and algorithms on NCCL ranks, against the CPU's results", 450, _tests("ranks", REST, 300)),
    Part("captured", "steps captured in CUDA graphs", 240, _tests("captured", CAPTURED, 180)),
    Part("sanitizer", "nothing out of bounds, no race, no barrier amiss", 460, _sanitizer, needs="compute-sanitizer"),
    Part("ops", "pack and unpack against a device copy", 240, _ops),
    Part("sync", "what synchronisation adds to a step, against DDP", 300, _sync),
    Part("ddp", "whole steps of ResNet-50 and a GPT, against DDP", 420, _ddp),
    Part("ppo", "environment steps per second on the GPU, against CleanRL's loop", 300, _ppo),
    Part("cost", "host time, launches, calls and memory of a step, against DDP", 240, _cost),
)
PARTS = {part.name: part for part in ALL}


def obstacle(part: Part, machine: Mapping[str, object]) -> str | None:
    """Why a part cannot run on this machine; None where it can."""
    if part.needs == "nothing":
        return None
    if machine["cuda"] is None:
        return f"no GPU: {machine['torch']}"
    if part.needs == "torch with CUDA":
        return None
    if not machine["gpus"]:
        return "no GPU: torch sees none"
    if not machine["built"]:
        return "the extension is not built with CUDA: run the part build first"
    if part.needs != "a GPU" and shutil.which(part.needs) is None:
        return f"{part.needs} is not on the PATH"
    return None

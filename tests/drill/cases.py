"""Random cases of an entry point: the model, what it is compressed with, and what happens in each step, from a seed."""

from __future__ import annotations

import math
import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastsync.compression import parse_compression

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = ((3,), (300,), (7, 40), (2, 130), (1,), (5, 6, 7), (1000,))
WEIGHTS = (0.0, 0.5, 1.0, 1.0, 2.0, 3.0)
CAPS = (1e-4, 1e-3, 4e-3, 25.0)  # MiB
LOSSLESS = ("none", "none+fp32", "none+one_shot", "none+two_shot")
LOSSY = ("bf16", "fp16", "int8", "fp16+fp32", "fp16+two_shot", "bf16+two_shot", "int8+one_shot", "int4")
FEEDBACK = ("int8+ef", "int4+ef", "int8+ef+two_shot", "int8+ef+one_shot", "bf16+ef+two_shot", "fp16+ef")
NODES = ("int8@nodes", "int8+ef@nodes", "fp16+ef@nodes", "bf16@nodes")
"""Of four ranks, two share one."""
WIRES = {"sharded": ("none", "bf16", "fp16", "int8", "int4", "int8+ef"), "drop-in hook": ("none", "bf16", "fp16")}
"""All that these entry points take."""


@dataclass(frozen=True)
class Parameter:
    """What a parameter is, and how large its gradients are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_transposed: bool = False
    is_tied: bool = False
    is_frozen: bool = False
    exponent: int = 0

    def make(self) -> nn.Parameter:
        values = torch.zeros(self.shape[::-1] if self.is_transposed else self.shape, dtype=self.dtype)
        return nn.Parameter(values.mT if self.is_transposed else values, requires_grad=not self.is_frozen)

    @property
    def takes_part(self) -> bool:
        return not self.is_frozen and 0 not in self.shape


@dataclass
class Step:
    """What happens in a step. What may be left out has a value that is false."""

    use_group: bool | None
    """From here on the last rank is not of the group."""
    fails: list[int] | None
    """Ranks whose backward fails, before that which is synchronised."""
    weights: list[float] | None
    zero: list[str]
    """Of each parameter: keep, none or zero."""
    accumulate: list[list[bool]] | None
    """Which are used by a backward under no_sync, of each rank and parameter."""
    use: list[list[bool]]
    spoil: tuple[int, int, float] | None
    """Rank and parameter of a value that is not finite."""
    piggybacks: bool | None
    reduces: bool | None
    """Whether the user has a collective of his own under way meanwhile."""


class Case:
    """All of a case, from its seed; without some of what would happen in it, where that is named."""

    def __init__(self, entry_point: str, seed: int, without: Sequence[str] = ()) -> None:
        self.draw = draw = random.Random(f"{entry_point} {seed}")
        self.entry_point, self.seed, self.without = entry_point, seed, tuple(without)
        self.is_attached = entry_point in ("attach", "synchronize")
        self.is_ddp, self.is_sharded = "hook" in entry_point, entry_point == "sharded"
        self.is_called = entry_point in ("synchronize", "all_reduce")  # by the user, after backward
        self.world_size = draw.choice((2, 2, 3, 4, 5))
        self.shares_memory = draw.random() < 0.5
        self.op = "sum" if self.is_attached and draw.random() < 0.25 else "mean"
        self.cap = draw.choice(CAPS)
        self.assigns = self.is_called and draw.random() < 0.5
        some = draw.choice((LOSSLESS, LOSSLESS, LOSSY, FEEDBACK, NODES if self.world_size == 4 else LOSSY))
        self.compression = draw.choice(WIRES.get(entry_point, some))
        self.wire = self.compression.removesuffix("@nodes").split("+")[0]
        self.has_feedback = "+ef" in self.compression
        self.is_weighted = self.is_attached and draw.random() < 0.25
        self.joins = [draw.randint(0, 3) for _ in range(self.world_size)]
        """At the end, the steps that each rank has within join()."""
        self.may_join = self.is_attached and self.wire == "none" and draw.random() < 0.3
        self.parameters = self._parameters()
        self.steps = [self._step(index) for index in range(draw.randint(2, 6))]
        for part in without:
            self._leave_out(part)

    def __str__(self) -> str:
        return shlex.join((self.entry_point, str(self.seed), *self.without))

    def smaller(self) -> Iterator[Case]:
        """Cases that lack one thing more: the last step, the last parameter, or a thing that steps do."""
        parts = [part for part in vars(self.steps[0]) if any(getattr(step, part) for step in self.steps)]
        parts = [part for part in parts if part not in ("zero", "use")] + ["join"] * self.may_join
        for part in (f"step{len(self.steps)}", f"parameter{len(self.parameters)}", *parts):
            case = Case(self.entry_point, self.seed, (*self.without, part))
            if case.steps and all(case._reaches(row) for step in case.steps for row in step.use):
                yield case

    def _leave_out(self, part: str) -> None:
        if part.startswith("parameter"):
            for step in self.steps:
                for row in (self.parameters, step.zero, *(step.accumulate or ()), *step.use):
                    del row[int(part.removeprefix("parameter")) - 1 :]
                if step.spoil and step.spoil[1] == len(self.parameters):
                    step.spoil = None
        elif part.startswith("step"):
            self.steps.pop()
        elif part == "join":
            self.may_join = False
        else:
            for step in self.steps:
                setattr(step, part, None)

    def _reaches(self, used: Sequence[bool]) -> bool:
        return any(use and each.takes_part for use, each in zip(used, self.parameters, strict=True))

    def _parameters(self) -> list[Parameter]:
        draw, found = self.draw, []
        dtypes, shapes = DTYPES, (*SHAPES, (), (2,), (0, 3))
        if self.is_sharded:  # which takes one dtype, and neither strides nor scalars
            dtypes, shapes = (draw.choice(DTYPES),), SHAPES
        elif self.wire == "none" and draw.random() < 0.3:
            dtypes = (*DTYPES, torch.complex64, torch.complex128)
        for _ in range(draw.randint(1, 7)):
            shape = draw.choice(shapes)
            is_transposed = not self.is_sharded and len(shape) == 2 and draw.random() < 0.3
            odds = [draw.random() < 0.2, draw.random() < 0.08]
            found.append(Parameter(draw.choice(dtypes), shape, is_transposed, *odds, exponent=draw.randint(-1, 1)))
        if not self.is_sharded and draw.random() < 0.1:
            found.append(Parameter(torch.int64, (5,), is_frozen=True))
        return [*found, Parameter(dtypes[0], (300,))] if not any(each.takes_part for each in found) else found

    def _step(self, index: int) -> Step:
        draw, ranks, numbers = self.draw, range(self.world_size), range(len(self.parameters))

        def may(chance: float, is_possible: bool = True) -> bool:
            return draw.random() < chance and is_possible

        use, accumulate = self._uses(), self._uses() if may(0.2, self.entry_point != "all_reduce") else None
        if accumulate and not self.is_attached:  # DDP and fully_shard average what the last backward reaches
            pairs = zip(use, accumulate, strict=True)
            use = [[one or other for one, other in zip(*pair, strict=True)] for pair in pairs]
        kinds = ("none", "zero") if self.is_sharded else ("none", "zero", "keep")
        zero = [draw.choice(kinds)] * len(numbers) if may(0.5) else [draw.choice(kinds) for _ in numbers]
        keeps_nothing = not self.has_feedback and "@nodes" not in self.compression and self.world_size > 2
        fails = draw.choice(([*ranks], [draw.choice(ranks)]))
        return Step(
            use_group=may(0.08, self.is_attached and keeps_nothing and index > 0),
            fails=fails if may(0.15, self.entry_point == "attach" and not self.has_feedback) else None,
            weights=[draw.choice(WEIGHTS) for _ in ranks] if may(0.7, self.is_weighted) else None,
            zero=zero,
            accumulate=accumulate,
            use=use,
            spoil=(draw.choice(ranks), draw.choice(numbers), draw.choice((math.nan, math.inf))) if may(0.04) else None,
            piggybacks=may(0.1, self.is_attached),
            reduces=may(0.15),
        )

    def _uses(self) -> list[list[bool]]:
        """Used on all ranks, on none, or on some; on each rank, some parameter is."""
        draw = self.draw
        kinds = [draw.choice(("all", "all", "none", "none" if self.is_sharded else "some")) for _ in self.parameters]
        first = next(index for index, each in enumerate(self.parameters) if each.takes_part)
        uses = []
        for _ in range(self.world_size):
            used = [kind == "all" or (kind == "some" and draw.random() < 0.5) for kind in kinds]
            used = [use and not each.is_frozen for use, each in zip(used, self.parameters, strict=True)]
            used[first] |= not self._reaches(used)
            uses.append(used)
        return uses

    def gradient(self, rank: int, step: int, index: int, part: int) -> Tensor:
        """Whole numbers at full width, so that sums are exact; else any."""
        parameter = self.parameters[index]
        generator = torch.Generator().manual_seed(hash((self.seed, rank, step, index, part)) % 2**63)
        if self.wire == "none":
            draw = torch.randint(-4, 5, (2, *parameter.shape), generator=generator).double()
        else:  # means that are not near zero, for float16 goes by them
            draw = 0.5 + torch.rand((2, *parameter.shape), generator=generator, dtype=torch.float64)
        values = torch.complex(*draw) if parameter.dtype.is_complex else draw[0]
        return (values * 2.0**parameter.exponent).to(parameter.dtype)

    def asked(self) -> Any:
        """What an entry point takes for the compression."""
        plain: Any = parse_compression(self.compression.removesuffix("@nodes"))
        if self.compression.endswith("@nodes"):
            return replace(plain, reduce="fp32", ranks_per_node=2)
        return self.compression if self.compression in ("none", "bf16", "fp16") else plain


class Model(nn.Module):
    """Takes the gradients of its parameters, in any order. One that is tied is of two modules, and used in both."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(each.make() for each in parameters)
        tied = [weight for weight, each in zip(self.weights, parameters, strict=True) if each.is_tied]
        self.also = nn.ParameterList(tied)

    def forward(self, grads: Sequence[tuple[int, Tensor]]) -> Tensor:
        return torch.stack([loss_of(self.weights[index], grad) for index, grad in grads]).sum()


def loss_of(weight: Tensor, gradient: Tensor) -> Tensor:
    product = weight * gradient.conj()
    return (torch.view_as_real(product)[..., 0] if product.is_complex() else product).sum().double()

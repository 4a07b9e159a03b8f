"""Random cases of an entry point: the model, what it is compressed with, and what happens in each step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastsync.sync.compression import parse_compression
from tests.models import Fails

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = ((3,), (300,), (7, 40), (2, 130), (1,), (5, 6, 7), (1000,))
WEIGHTS = (1.0, 1.0, 0.0, 0.5, 2.0, 3.0)
CAPS = (25.0, 1e-4, 1e-3, 4e-3)  # MiB
EXTREMES = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e30, 65520.0, 65504.0, 1e-38, 1e-45, -0.0)
LOSSLESS = ("none", "none+fp32", "none+one_shot", "none+two_shot")
LOSSY = ("bf16", "fp16", "int8", "fp16+fp32", "fp16+two_shot", "bf16+two_shot", "int8+one_shot", "int4")
FEEDBACK = ("int8+ef", "int4+ef", "int8+ef+two_shot", "int8+ef+one_shot", "bf16+ef+two_shot", "fp16+ef")
NODES = ("int8", "int8+ef", "fp16+ef", "bf16+fp32")
"""Of four ranks, two share one."""
WIRES = {"sharded": ("none", "bf16", "fp16", "int8", "int4", "int8+ef"), "drop-in hook": ("none", "bf16", "fp16")}
"""All that these entry points take."""


def may(draw: random.Random, percent: int) -> bool:
    """Whether it happens. What is drawn low is simple: so Hypothesis makes a case that fails smaller."""
    return draw.randrange(100) >= 100 - percent


class Case:
    """All of a case."""

    def __init__(self, entry_point: str, draw: random.Random) -> None:
        self.entry_point, self.seed = entry_point, draw.randrange(2**16)
        self.is_attached = entry_point in ("attach", "synchronize")
        self.is_ddp, self.is_sharded = "hook" in entry_point, entry_point == "sharded"
        self.is_called = entry_point in ("synchronize", "all_reduce")  # by the user, after backward
        self.reads_grad = not self.is_ddp and not self.is_sharded
        """Whether what is averaged is ``.grad`` itself."""
        self.world_size, self.cap = draw.choice((2, 2, 3, 4, 5)), draw.choice(CAPS)
        wires = WIRES.get(entry_point) or draw.choice((LOSSLESS, LOSSLESS, LOSSY, FEEDBACK))
        self.compression: Any = parse_compression(draw.choice(wires))
        if self.world_size == 4 and entry_point not in WIRES and may(draw, 20):
            self.compression = replace(parse_compression(draw.choice(NODES)), ranks_per_node=2)
        self.wire, self.has_feedback = self.compression.wire, self.compression.error_feedback
        self.joins = [draw.randint(0, 3) for _ in range(self.world_size)]
        """At the end, the steps that each rank has within join()."""
        self.may_join = self.is_attached and self.wire == "none" and may(draw, 30)
        self.shares_memory = may(draw, 50)
        self.op = "sum" if self.is_attached and may(draw, 25) else "mean"
        if entry_point == "attach" and self.op == "mean" and may(draw, 33):
            self.op = "mean_of_used"
        self.is_weighted = self.is_attached and may(draw, 25)
        dtypes, shapes = DTYPES, (*SHAPES, (), (2,), (0, 3), (4, 3, 5, 5))
        if self.is_sharded:  # which takes one dtype, and neither strides nor scalars
            dtypes, shapes = (draw.choice(DTYPES),), SHAPES
        elif self.wire == "none" and may(draw, 30):
            dtypes = (*DTYPES, torch.complex64, torch.complex128)
        self.parameters = [Parameter(self, draw, dtypes, shapes) for _ in range(draw.randint(1, 7))]
        if not any(each.takes_part for each in self.parameters):
            one = self.parameters[0]
            one.dtype = one.grad_dtype = dtypes[0]
            one.shape, one.is_frozen, one.is_sparse = (7, 40), False, False
        # PyTorch's Adam, which steps inside join(), takes no gradients of another dtype.
        self.may_join = self.may_join and all(each.grad_dtype == each.dtype for each in self.parameters)
        self.takes_part = [at for at, each in enumerate(self.parameters) if each.takes_part]
        self.steps = [Step(self, draw, is_first=at == 0) for at in range(draw.randint(1, 9))]

    def gradient(self, rank: int, step: int, index: int, part: int) -> Tensor:
        """A sparse one has up to four rows, and perhaps one of them twice."""
        parameter = self.parameters[index]
        generator = torch.Generator().manual_seed(hash((self.seed, rank, step, index, part)) % 2**63)
        if not parameter.is_sparse:
            return self.values(parameter, parameter.shape, generator)
        num_rows, width = parameter.shape
        count = int(torch.randint(5, (), generator=generator)) if num_rows else 0
        rows = torch.randint(max(1, num_rows), (1, count), generator=generator)
        return torch.sparse_coo_tensor(rows, self.values(parameter, (count, width), generator), parameter.shape)

    def values(self, parameter: Parameter, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Whole numbers at full width, so that sums are exact; else any."""
        if self.wire == "none":
            draw = torch.randint(-4, 5, (2, *shape), generator=generator).double()
        else:  # means that are not near zero, for float16 goes by them
            draw = 0.5 + torch.rand((2, *shape), generator=generator, dtype=torch.float64)
        values = torch.complex(*draw) if parameter.dtype.is_complex else draw[0]
        return (values * 2.0**parameter.exponent).to(parameter.grad_dtype)


class Parameter:
    """What a parameter is, and how large its gradients are."""

    def __init__(
        self, case: Case, draw: random.Random, dtypes: Sequence[Any], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self.dtype, self.shape, self.exponent = draw.choice(dtypes), draw.choice(shapes), draw.randint(-1, 1)
        self.is_transposed = not case.is_sharded and len(self.shape) == 2 and may(draw, 30)
        self.is_tied, self.is_frozen = may(draw, 20), may(draw, 8)
        # Autograd cannot add sparse float16 tensors on a CPU.
        may_be_sparse = self.dtype in (torch.float32, torch.float64, torch.bfloat16) and len(self.shape) == 2
        may_be_sparse &= case.op == "mean" and not case.is_sharded and not self.is_frozen
        self.is_sparse = may_be_sparse and may(draw, 60)
        """Whether it is of an embedding with ``sparse=True``."""
        is_narrow = self.dtype in (torch.float16, torch.bfloat16) and not self.is_frozen
        self.grad_dtype = torch.float32 if is_narrow and case.reads_grad and may(draw, 30) else self.dtype
        if self.is_frozen and not case.is_sharded and may(draw, 50):
            self.dtype = torch.int64

    def make(self) -> nn.Parameter:
        values = torch.zeros(self.shape[::-1] if self.is_transposed else self.shape, dtype=self.dtype)
        parameter = nn.Parameter(values.mT if self.is_transposed else values, requires_grad=not self.is_frozen)
        if self.grad_dtype != self.dtype and not self.is_frozen:
            parameter.grad_dtype = self.grad_dtype
        return parameter

    @property
    def takes_part(self) -> bool:
        return not self.is_frozen and 0 not in self.shape


class Step:
    """What happens in a step, in this order."""

    def __init__(self, case: Case, draw: random.Random, is_first: bool) -> None:
        ranks, numbers = range(case.world_size), range(len(case.parameters))
        keeps_nothing = not case.has_feedback and case.compression.ranks_per_node == 1
        may_leave = case.is_attached and keeps_nothing and case.world_size > 2 and not is_first
        self.leaves_group = may_leave and may(draw, 8)
        """From here on the last rank is not of the group."""
        self.weights = [draw.choice(WEIGHTS) for _ in ranks] if case.is_weighted and may(draw, 70) else None
        kinds = ("none", "zero") if case.is_sharded else ("none", "zero", "zero in place", "keep")
        self.zero = [draw.choice(kinds)] * len(numbers) if may(draw, 50) else [draw.choice(kinds) for _ in numbers]
        self.use, self.accumulate = used(case, draw), used(case, draw)
        """By a second backward, and by one before it under no_sync: which are used, of each rank and parameter."""
        self.accumulates = case.entry_point != "all_reduce" and may(draw, 20)
        if self.accumulates and not case.is_attached:  # DDP and fully_shard average what the last backward reaches
            self.use = [one | other for one, other in zip(self.use, self.accumulate, strict=True)]
        may_fail = case.entry_point == "attach" and not case.has_feedback and may(draw, 15)
        self.fails = draw.choice(([*ranks], [draw.choice(ranks)])) if may_fail else []
        """Ranks whose backward fails, before that which is synchronised."""
        self.reorders = case.reads_grad and may(draw, 8)
        """Whether the model gets another memory format first."""
        self.piggybacks = case.is_attached and may(draw, 10)
        self.reduces = may(draw, 15)
        """Whether the user has a collective of his own under way meanwhile."""
        extreme = draw.choice(ranks), draw.choice(numbers), draw.choice(EXTREMES)
        self.extreme = extreme if may(draw, 6) else None
        """Rank, parameter, and a value of its gradient."""


def used(case: Case, draw: random.Random) -> list[set[int]]:
    """Parameters used on all ranks, on none, or on some; of each rank."""
    rows: list[set[int]] = [set() for _ in range(case.world_size)]
    for index, parameter in enumerate(case.parameters):
        kind = draw.choice(("all", "all", "none", "none" if case.is_sharded else "some"))
        if case.is_ddp and parameter.is_sparse:
            kind = "all"  # DDP needs a sparse gradient on each rank
        for row in rows if not parameter.is_frozen else ():
            row |= {index} if kind == "all" or (kind == "some" and may(draw, 50)) else set()
    return [row if row & {*case.takes_part} else row | {case.takes_part[0]} for row in rows]


class Model(nn.Module):
    """Takes the gradients of its parameters, in any order. One that is tied is of two modules, and used in both."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        weights = [each.make() for each in parameters]
        self.embeddings = nn.ModuleList(  # DDP asks a weight's first module whether its gradients are sparse
            embedding_of(weight) for weight, each in zip(weights, parameters, strict=True) if each.is_sparse
        )
        self.weights = nn.ParameterList(weights)
        self.also = nn.ParameterList(self.weights[at] for at, each in enumerate(parameters) if each.is_tied)

    def forward(self, grads: Sequence[tuple[int, Tensor]], fails: bool = False) -> Tensor:
        losses = []
        for index, grad in grads:
            weight = Fails.apply(self.weights[index]) if fails and not losses else self.weights[index]
            if grad.is_sparse:
                product = functional.embedding(grad._indices()[0], weight, sparse=True) * grad._values()
            else:
                product = weight * grad.conj()  # the oldest node comes last
            losses.append((torch.view_as_real(product)[..., 0] if product.is_complex() else product).sum().double())
        return torch.stack(losses).sum()


def embedding_of(weight: nn.Parameter) -> nn.Embedding:
    embedding = nn.Embedding(*weight.shape, sparse=True)
    embedding.weight = weight
    return embedding

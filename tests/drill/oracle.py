"""Random cases of ``attach`` against float64: every rank has the mean, its norm, and None where no rank has any.

Between steps backwards fail, on all ranks or on one, and handles are detached and attached again.

    python -m tests.drill.oracle --cases 2000 --seed 0

A case follows from its seed alone: what fails prints its seed, and ``--cases 1 --seed`` with that one runs it again.
The oracle is plain PyTorch in float64 over the gradients of all ranks, which every rank knows, for they follow from the
seed, too. With error feedback it also adds up all that has come: that and what is kept is what was sent.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pprint import pformat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync.compression import parse_compression
from tests.models import Fails
from tests.ranks import RankError, RankTimeoutError, run_ranks

WORLD_SIZES = (2, 3, 4)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = ((3,), (300,), (7, 40), (2, 130), (1,), (), (5, 6, 7), (1000,))
WEIGHTS = (0.0, 0.5, 1.0, 1.0, 2.0, 3.0)
CAPS = (1e-4, 1e-3, 4e-3, 25.0)  # MiB
LOSSLESS = ("none", "none+fp32", "none+one_shot", "none+two_shot")
LOSSY = ("bf16", "fp16", "int8", "fp16+fp32", "fp16+two_shot", "bf16+two_shot", "int8+one_shot", "int4")
FEEDBACK = ("int8+ef", "int4+ef", "int8+ef+two_shot", "int8+ef+one_shot", "bf16+ef+two_shot", "fp16+ef")
NODES = ("int8@nodes", "int8+ef@nodes", "fp16+ef@nodes", "bf16@nodes")
"""Of four ranks, two share one."""

WIRE_ERROR = {"none": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10, "int8": 2.0**-6, "int4": 2.0**-2}
"""Of the largest gradient: half a step for each rank's rounding, as much for the sum's, and what that adds."""
FEEDBACK_FACTOR = 3.0
"""What two steps before have lost comes on top."""

BATCH = 60
"""Cases that one start of the ranks does."""
BATCH_SECONDS = 200.0


@dataclass(frozen=True)
class Parameter:
    """What a parameter is, and how large its gradients are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_transposed: bool
    is_tied: bool
    is_frozen: bool
    exponent: int

    def make(self) -> nn.Parameter:
        if self.is_transposed:
            values = torch.zeros(self.shape[::-1], dtype=self.dtype).permute(*reversed(range(len(self.shape))))
        else:
            values = torch.zeros(self.shape, dtype=self.dtype)
        return nn.Parameter(values, requires_grad=not self.is_frozen)


@dataclass
class Step:
    """What happens in a step, each part in this order."""

    reattach: bool
    fails: list[int]
    """Ranks whose backward fails, before that which is synchronised."""
    freeze: int | None
    weights: list[float] | None
    zero: list[list[str]]
    """Of each rank and parameter: keep, none or zero."""
    accumulate: list[list[bool]] | None
    """Which are used by a backward under no_sync, of each rank and parameter."""
    use: list[list[bool]]
    layouts: list[list[str]]
    """How gradients lie that are assigned."""
    synchronizes: bool
    spoil: tuple[int, int, float] | None
    """Rank and parameter of a value that is not finite."""
    clip: float | None
    rides: bool
    compress: Any = None


class Case:
    """All of a case, from its seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.world_size = draw.choice(WORLD_SIZES)
        self.shares_memory = draw.random() < 0.5
        self.op = "sum" if draw.random() < 0.25 else "mean"
        self.cap = draw.choice(CAPS)
        self.overlaps = draw.random() < 0.6
        self.assigns = not self.overlaps and draw.random() < 0.5
        compressions = self._compressions(draw)
        self.compression = compressions[0]
        self.names = set(compressions)
        self.is_lossless = all(_wire(name) == "none" for name in self.names)
        self.has_feedback = any("ef" in _words(name) for name in self.names)
        self.loses_nothing = all("ef" in _words(name) or _wire(name) == "none" for name in self.names)
        self.may_restart = not isinstance(self.compression, dict)  # whose steps would be others
        is_weighted = draw.random() < 0.25
        allow_complex = self.is_lossless and draw.random() < 0.3
        self.parameters = [self._parameter(draw, allow_complex) for _ in range(draw.randint(1, 7))]
        if all(each.is_frozen or 0 in each.shape for each in self.parameters):
            self.parameters.append(Parameter(torch.float32, (300,), False, False, False, 0))
        self.frozen = [each.is_frozen for each in self.parameters]
        self.steps: list[Step] = []
        for index in range(draw.randint(2, 6)):
            step = self._step(draw, index, is_weighted)
            if index < len(compressions) and index > 0:
                step.compress = compressions[index]
            self.steps.append(step)
        self.is_weighted = is_weighted

    def _compressions(self, draw: random.Random) -> list[str]:
        """Of each step; then the last one."""
        kind = draw.random()
        if kind < 0.4:
            return [draw.choice(LOSSLESS)]
        if kind < 0.65:
            return [draw.choice(LOSSY)]
        if kind < 0.85:
            return [draw.choice(FEEDBACK + NODES if self.world_size == 4 else FEEDBACK)]
        if kind < 0.93:
            return [draw.choice(("none", "bf16")), *[draw.choice(FEEDBACK)] * 2, draw.choice(LOSSLESS)]
        return [draw.choice(LOSSLESS + LOSSY + FEEDBACK) for _ in range(3)]

    def _parameter(self, draw: random.Random, allow_complex: bool) -> Parameter:
        dtype = draw.choice(DTYPES)
        if allow_complex and draw.random() < 0.4:
            dtype = draw.choice((torch.complex64, torch.complex128))
        shape = draw.choice(SHAPES)
        if draw.random() < 0.04:
            shape = (0, 3)
        return Parameter(
            dtype,
            shape,
            is_transposed=len(shape) > 1 and draw.random() < 0.3,
            is_tied=draw.random() < 0.2,
            is_frozen=draw.random() < 0.08,
            exponent=draw.randint(-1, 1),
        )

    def _step(self, draw: random.Random, index: int, is_weighted: bool) -> Step:
        def now_and_then(chance: float, *what: Any) -> Any:
            return draw.choice(what) if draw.random() < chance else None

        ranks, numbers = range(self.world_size), range(len(self.parameters))
        can_fail = self.may_restart and self.overlaps and not self.has_feedback
        spoilt = now_and_then(0.04, math.nan, math.inf)
        layouts = ("plain", "plain", "transposed", "sliced", "expanded")
        return Step(
            reattach=self.may_restart and bool(now_and_then(0.08, True)),
            fails=(now_and_then(0.15, [*ranks], [draw.choice(ranks)]) if can_fail else None) or [],
            freeze=now_and_then(0.06, *numbers) if index > 0 else None,
            weights=[draw.choice(WEIGHTS) for _ in ranks] if is_weighted and draw.random() < 0.7 else None,
            zero=self._zero(draw),
            accumulate=now_and_then(0.2, self._uses(draw)),
            use=self._uses(draw),
            layouts=[[draw.choice(layouts) for _ in numbers] for _ in ranks],
            synchronizes=not self.overlaps or bool(now_and_then(0.1, True)),
            spoil=spoilt and (draw.choice(ranks), draw.choice(numbers), spoilt),
            clip=now_and_then(0.15, 0.25, 1.0, 1e6),
            rides=bool(now_and_then(0.1, True)),
        )

    def _zero(self, draw: random.Random) -> list[list[str]]:
        kind = draw.random()
        numbers = range(len(self.parameters))
        if kind < 0.45:
            of_all = [draw.choice(("none", "zero"))] * len(numbers)
        elif kind < 0.55:
            of_all = ["keep" for _ in numbers]
        else:
            of_all = [draw.choice(("none", "zero", "keep", "keep")) for _ in numbers]
        of_ranks = [list(of_all) for _ in range(self.world_size)]
        if draw.random() < 0.12:
            of_ranks[draw.randrange(self.world_size)] = [self._otherwise(draw, what) for what in of_all]
        return of_ranks

    def _otherwise(self, draw: random.Random, what: str) -> str:
        """What one rank does where the others do that.

        Of a sum, and of what error feedback adds to, each rank counts its own gradient that is kept, if all have one.
        So where one alone has zeroed it, ranks differ in the norm, as they do in the gradient.
        """
        if self.has_feedback or self.op == "sum":
            return draw.choice(("none", "keep" if what == "none" else what))
        return draw.choice(("none", "zero", "keep"))

    def _uses(self, draw: random.Random) -> list[list[bool]]:
        """Used on all ranks, on none, or on some."""
        numbers = range(len(self.parameters))
        kinds = [draw.choice(("all", "all", "none", "some")) for _ in numbers]
        return [
            [kind == "all" or (kind == "some" and draw.random() < 0.5) for kind in kinds]
            for _ in range(self.world_size)
        ]

    def gradient(self, rank: int, step: int, index: int, part: int) -> Tensor:
        """Whole numbers at full width, so that sums are exact; else any."""
        parameter = self.parameters[index]
        seed = hash((self.seed, rank, step, index, part)) % 2**63
        generator = torch.Generator().manual_seed(seed)
        if self.is_lossless:
            draw = torch.randint(-4, 5, (2, *parameter.shape), generator=generator).double()
        else:  # means that are not near zero, for float16 goes by them
            draw = 0.5 + torch.rand((2, *parameter.shape), generator=generator, dtype=torch.float64)
        values = torch.complex(*draw) if parameter.dtype.is_complex else draw[0]
        return (values * 2.0**parameter.exponent).to(parameter.dtype)

    def __repr__(self) -> str:
        return pformat(vars(self), width=200)


def _wire(name: str) -> str:
    return _words(name)[0]


def _words(name: str) -> list[str]:
    return name.removesuffix("@nodes").split("+")


def _asked(compression: str) -> Any:
    """What attach takes for a name."""
    if compression.endswith("@nodes"):
        plain = parse_compression(compression.removesuffix("@nodes"))
        return replace(plain, reduce="fp32", ranks_per_node=2)
    return parse_compression(compression)


class _Model(nn.Module):
    """A tied parameter is one of two modules, and used in both."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(each.make() for each in parameters)
        tied = [weight for weight, each in zip(self.weights, parameters, strict=True) if each.is_tied]
        self.also = nn.ParameterList(tied)


def _loss(weight: Tensor, gradient: Tensor) -> Tensor:
    product = weight * gradient.conj()
    return (torch.view_as_real(product)[..., 0] if product.is_complex() else product).sum().double()


def _lying(gradient: Tensor, layout: str) -> Tensor:
    if layout == "transposed" and gradient.dim() > 1:
        return gradient.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        wide = torch.zeros((*gradient.shape, 2), dtype=gradient.dtype)
        wide[..., 1] = gradient
        return wide[..., 1]
    if layout == "expanded" and gradient.numel() > 0:
        return gradient.flatten()[0].expand(gradient.shape)
    return gradient


class _Oracle:
    """What every rank's gradients are, in float64, and what the next sync makes of them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mine: list[list[Tensor | None]] = [[None] * len(case.parameters) for _ in range(case.world_size)]
        self.is_new = [[False] * len(case.parameters) for _ in range(case.world_size)]
        self.weights = [1.0] * case.world_size
        self.largest = 0.0  # of what was sent so far
        self.is_whole = case.is_lossless and not case.is_weighted  # so that sums are exact

    def takes_part(self, index: int) -> bool:
        return not self.case.frozen[index] and 0 not in self.case.parameters[index].shape

    def zero(self, how: Sequence[Sequence[str]]) -> None:
        for of_rank, of_parameters in zip(self.mine, how, strict=True):
            for index, what in enumerate(of_parameters):
                grad = of_rank[index]
                if grad is not None and what != "keep":
                    of_rank[index] = None if what == "none" else torch.zeros_like(grad)

    def add(self, rank: int, index: int, gradient: Tensor) -> None:
        before = self.mine[rank][index]
        wide = gradient.to(torch.complex128 if gradient.is_complex() else torch.float64, copy=True)
        if before is not None:  # rounded as autograd does
            wide = (before + wide).to(gradient.dtype).to(wide.dtype)
        self.mine[rank][index] = wide
        self.is_new[rank][index] = True

    def all_are_new(self) -> None:
        for of_rank, new in zip(self.mine, self.is_new, strict=True):
            new[:] = [grad is not None for grad in of_rank]

    def exists(self, index: int) -> bool:
        return any(
            new[index] and of_rank[index] is not None for new, of_rank in zip(self.is_new, self.mine, strict=True)
        )

    def average(self, index: int) -> Tensor:
        like = next(of_rank[index] for of_rank in self.mine if of_rank[index] is not None)
        grads = [torch.zeros_like(like) if of_rank[index] is None else of_rank[index] for of_rank in self.mine]
        total = sum(w * g for w, g in zip(self.weights, grads, strict=True) if w > 0)
        if not isinstance(total, Tensor):
            return torch.zeros_like(like)
        return total if self.case.op == "sum" else total / sum(self.weights)

    def clip(self, coefficient: Tensor) -> None:
        self.is_whole = False
        for of_rank in self.mine:
            for index, grad in enumerate(of_rank):
                if grad is not None and not self.case.frozen[index]:
                    dtype = self.case.parameters[index].dtype
                    of_rank[index] = grad.to(dtype).mul(coefficient.to(dtype)).to(grad.dtype)

    def error(self, index: int) -> float:
        """How far an average may be from that."""
        case = self.case
        dtype = case.parameters[index].dtype
        grads = [grad for of_rank in self.mine for grad in of_rank if grad is not None]
        finite = [grad.abs()[grad.abs().isfinite()] for grad in grads]
        self.largest = max([self.largest, *(float(each.max()) for each in finite if each.numel())])
        total = sum(self.weights) or 1.0
        share = max(1.0, case.world_size * max(self.weights) / (total if case.op == "mean" else 1.0))
        wire = max(WIRE_ERROR[_wire(name)] for name in case.names) * (FEEDBACK_FACTOR if case.has_feedback else 1.0)
        average = self.average(index)
        is_exact = case.world_size != 3 and torch.equal(average.to(dtype).to(average.dtype), average)
        own = 0.0 if self.is_whole and is_exact else 4.0 * torch.finfo(dtype).eps
        return (wire + own) * share * self.largest


class _Run:
    """One rank's part of a case."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.oracle = _Oracle(case)
        self.model = _Model(case.parameters)
        self.compression = case.compression
        self.attach()
        self.problems: list[str] = []
        self.inexact: list[str] = []  # which are none where float16 was saturated, as it may be
        self.must_agree: list[tuple[str, Any]] = []
        self.was_spoiled = False
        self.was_saturated = False

    def attach(self) -> None:
        case = self.case
        self.sync = fastsync.attach(
            *(self.model, _asked(self.compression)), op=case.op, bucket_cap_mb=case.cap, overlap=case.overlaps
        )
        self.missing = [torch.zeros(each.shape, dtype=torch.float64) for each in case.parameters]

    def detach(self) -> None:
        if self.case.loses_nothing and self.case.has_feedback:
            self.check_nothing_is_lost()
        self.sync.detach()

    def run(self) -> None:
        for number, step in enumerate(self.case.steps):
            self.prepare(step)
            if step.accumulate is not None:
                with self.sync.no_sync():
                    self.backward(number, step, step.accumulate, part=0)
            if step.fails:
                self.fail(number, step)
            self.sync_step(number, step)
        self.detach()

    def weights(self) -> list[nn.Parameter]:
        return list(self.model.weights)

    def prepare(self, step: Step) -> None:
        if step.reattach:
            self.detach()
            self.forget(range(self.case.world_size))
            self.attach()
            self.oracle.weights = [1.0] * self.case.world_size
        if step.freeze is not None:
            self.freeze(step.freeze)
        if step.compress is not None:
            self.compression = step.compress
            self.sync.compression = _asked(step.compress)
        if step.weights is not None:
            self.oracle.weights = step.weights
            self.sync.set_weight(step.weights[self.rank])
        self.oracle.zero(step.zero)
        for weight, what in zip(self.weights(), step.zero[self.rank], strict=True):
            if weight.grad is not None and what == "none":
                weight.grad = None
            elif weight.grad is not None and what == "zero":
                if weight.grad.requires_grad:
                    weight.grad = weight.grad.detach()
                if weight.grad.dim() and 0 in weight.grad.stride():
                    weight.grad = torch.zeros_like(weight)
                else:
                    weight.grad.zero_()

    def forget(self, ranks: Iterable[int]) -> None:
        """No gradients are left, and those ranks' engines do not know of any."""
        self.model.zero_grad()
        for of_rank in self.oracle.mine:
            of_rank[:] = [None] * len(of_rank)
        for rank in ranks:
            self.oracle.is_new[rank] = [False] * len(self.case.parameters)

    def fail(self, number: int, step: Step) -> None:
        """A backward that raises on some ranks when a gradient is there, and that the others notice."""
        there = [index for index in range(len(self.case.parameters)) if self.oracle.takes_part(index)]
        if len(there) < 2:
            return
        weights = self.weights()
        fails = self.rank in step.fails
        used = {there[0], there[-1]} if fails else {i for i in there if self.used(step.use)[self.rank][i]}
        first = Fails.apply(weights[there[0]]) if fails else weights[there[0]]  # the oldest node comes last
        losses = [
            _loss(first if i == there[0] else weights[i], self.case.gradient(self.rank, number, i, 4))
            for i in sorted(used)
        ]
        noticed = fails
        try:
            torch.stack(losses).sum().backward()
        except (ArithmeticError, RuntimeError):
            noticed = True
        noticed |= any(bool(weight.grad.isnan().any()) for weight in weights if weight.grad is not None)
        if not noticed:
            self.problems.append(f"rank {self.rank}, step {number}: it does not notice that {step.fails} failed")
        self.forget(step.fails)

    def freeze(self, index: int) -> None:
        frozen = [*self.case.frozen]
        frozen[index] = not frozen[index]
        if not any(not f and 0 not in p.shape for f, p in zip(frozen, self.case.parameters, strict=True)):
            return
        self.case.frozen = frozen
        self.weights()[index].requires_grad_(not frozen[index])
        if frozen[index]:
            self.weights()[index].grad = None
            for of_rank in self.oracle.mine:
                of_rank[index] = None

    def used(self, uses: Sequence[Sequence[bool]]) -> list[list[bool]]:
        """Backward has to reach a parameter that is synchronised, on every rank."""
        found = []
        for of_rank in uses:
            used = [use and not frozen for use, frozen in zip(of_rank, self.case.frozen, strict=True)]
            if not any(use and self.oracle.takes_part(index) for index, use in enumerate(used)):
                used[next(i for i in range(len(used)) if self.oracle.takes_part(i))] = True
            found.append(used)
        return found

    def backward(self, number: int, step: Step, uses: Sequence[Sequence[bool]], part: int) -> None:
        case, oracle = self.case, self.oracle
        losses = []
        for rank, used in enumerate(self.used(uses)):
            for index, use in enumerate(used):
                if not use:
                    continue
                parameter = case.parameters[index]
                parts = [case.gradient(rank, number, index, 2 * part + i) for i in range(1 + parameter.is_tied)]
                if step.spoil and part == 1 and step.spoil[:2] == (rank, index) and parts[0].numel():
                    parts[0].view(-1)[-1] = step.spoil[2]
                if case.assigns:
                    self.assign(rank, index, parts[0], step.layouts[rank][index])
                    continue
                total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
                oracle.add(rank, index, total)
                if rank == self.rank:
                    weight = self.weights()[index]
                    losses += [_loss(weight, gradient) for gradient in parts]
        if losses:
            torch.stack(losses).sum().backward()

    def assign(self, rank: int, index: int, gradient: Tensor, layout: str) -> None:
        gradient = _lying(gradient, layout)
        self.oracle.mine[rank][index] = None
        self.oracle.add(rank, index, gradient)
        if rank == self.rank:
            self.weights()[index].grad = gradient.clone() if layout == "plain" else gradient

    def sync_step(self, number: int, step: Step) -> None:
        if step.spoil is not None:
            self.was_spoiled = True
        if step.synchronizes:
            with self.sync.no_sync():
                self.backward(number, step, step.use, part=1)
            self.oracle.all_are_new()
        if step.rides:
            self.sync.piggyback("rank", torch.tensor([1.0, float(self.rank)]))
        before = self.copies()
        if step.synchronizes:
            self.sync.synchronize()
        else:
            self.backward(number, step, step.use, part=1)
        if step.rides and self.sync.piggybacked()["rank"].tolist() != [1.0, (self.case.world_size - 1) / 2]:
            self.problems.append(f"rank {self.rank}, step {number}: {self.sync.piggybacked()} rode along")
        self.check(number, before)
        if step.clip is not None:
            norm = fastsync.clip_grad_norm_(self.sync, step.clip)
            self.must_agree.append((f"step {number}: the norm that clips", repr(norm.item())))
            self.oracle.clip((norm + 1e-6).div(step.clip).clamp(min=1.0).reciprocal())
        self.follow()

    def copies(self) -> list[Tensor | None]:
        return [None if weight.grad is None else weight.grad.detach().clone() for weight in self.weights()]

    def check(self, number: int, before: Sequence[Tensor | None]) -> None:
        where = f"rank {self.rank}, step {number}"
        oracle = self.oracle
        for index, weight in enumerate(self.weights()):
            if not oracle.takes_part(index):
                continue
            what = f"{where}, parameter {index}"
            if not oracle.exists(index):
                self.check_kept(what, weight.grad, before[index])
                continue
            if weight.grad is None:
                self.problems.append(f"{what}: its gradient is None, and some rank has one")
                continue
            actual = weight.grad.detach()
            expected, error = oracle.average(index), oracle.error(index)
            finite = expected.abs().isfinite()
            off = (actual.to(expected.dtype) - expected).abs()[finite]
            if self.case.is_lossless and not (actual.abs().isfinite() == finite).all():
                self.problems.append(f"{what}: other values are finite")
            elif finite.any() and not self.was_spoiled and not bool((off <= error).all()):
                self.inexact.append(f"{what}: off by {off.max():.3g}, and may be by {error:.3g}")
            if self.case.loses_nothing and self.case.has_feedback:
                self.missing[index] += torch.where(finite, expected.real - actual.double(), 0.0)
            digest = _digest(actual)
            self.must_agree.append((f"step {number}, parameter {index}", digest))
        self.check_statistics(number, where)

    def check_kept(self, what: str, grad: Tensor | None, before: Tensor | None) -> None:
        if (grad is None) != (before is None):
            self.problems.append(f"{what}: {before is not None} before, {grad is not None} after, and no rank has any")
        elif grad is not None and before is not None and not _all_same([grad.detach(), before]):
            self.problems.append(f"{what}: what was kept has changed")

    def check_statistics(self, number: int, where: str) -> None:
        case, oracle = self.case, self.oracle
        stats = self.sync.grad_stats()
        norm, num_nonfinite = stats.grad_norm.item(), stats.num_nonfinite.item()
        self.must_agree.append((f"step {number}: grad_norm", repr(norm)))
        self.must_agree.append((f"step {number}: num_nonfinite", num_nonfinite))
        self.was_saturated |= bool(stats.num_saturated.item())
        indices = [i for i in range(len(case.parameters)) if oracle.takes_part(i)]
        kept = [[of_rank[i] for of_rank in oracle.mine] for i in indices if not oracle.exists(i)]
        if any(not _all_same(of_ranks) for of_ranks in kept):
            return  # there is no norm that is every rank's
        if kept and (case.is_weighted or not (case.is_lossless or case.loses_nothing)):
            return  # what no rank has a new one of counts as it has traveled
        grads = [self.weights()[i].grad for i in indices]
        wide = [grad.detach().abs().double().flatten() for grad in grads if grad is not None]
        expected = torch.cat(wide) if wide else torch.zeros(1)
        right = expected.square().sum().sqrt().item()
        is_close = abs(norm - right) <= 2e-6 * right if math.isfinite(right) else not math.isfinite(norm)
        if not is_close:
            self.problems.append(f"{where}: the norm is {right:.9g}, said to be {norm:.9g}")
        here = sum(int((~_reals(grad).isfinite()).sum()) for grad in grads if grad is not None)
        if num_nonfinite != here:
            self.problems.append(f"{where}: {here} values are not finite, said to be {num_nonfinite}")

    def follow(self) -> None:
        """From here on the oracle goes by what is there, so that no error counts twice."""
        oracle = self.oracle
        for index, weight in enumerate(self.weights()):
            if oracle.takes_part(index) and oracle.exists(index) and weight.grad is not None:
                grad = weight.grad.detach()
                for of_rank in oracle.mine:
                    of_rank[index] = grad.to(torch.complex128 if grad.is_complex() else torch.float64, copy=True)
        for new in oracle.is_new:
            new[:] = [False] * len(new)

    def check_nothing_is_lost(self) -> None:
        """What is missing so far is what all ranks keep, of the units that are handed out."""
        case = self.case
        if self.was_spoiled:
            return
        residuals = self.sync.state_dict()["residuals"]
        for index, parameter in enumerate(case.parameters):
            if 0 in parameter.shape:
                continue
            kept = torch.zeros(parameter.shape, dtype=torch.float64).flatten()
            residual = residuals.get(f"weights.{index} of rank {self.rank}")
            if residual is not None:
                kept += residual["own"].double() / case.world_size
                if residual["of_sums"] is not None:
                    kept += residual["of_sums"].double()
            dist.all_reduce(kept)
            kept *= case.world_size if case.op == "sum" else 1
            missing = self.missing[index]
            if parameter.is_transposed:
                missing = missing.permute(*reversed(range(missing.dim())))
            off = (missing.flatten() - kept).abs().max().item()
            may_be = 16 * len(case.steps) * torch.finfo(parameter.dtype).eps * max(self.oracle.largest, 1e-30)
            may_be *= case.world_size if case.op == "sum" else 1
            if not off <= may_be:
                self.inexact.append(
                    f"rank {self.rank}: of parameter {index} {off:.3g} was lost, more than {may_be:.3g}; "
                    f"missing {missing.abs().max():.3g}, kept {kept.abs().max():.3g}"
                )


def _digest(tensor: Tensor) -> str:
    bits = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return hashlib.sha1(bits.numpy().tobytes()).hexdigest()


def _reals(grad: Tensor) -> Tensor:
    return torch.view_as_real(grad.detach().contiguous()) if grad.is_complex() else grad.detach()


def _all_same(of_ranks: Sequence[Tensor | None]) -> bool:
    first = of_ranks[0]
    if first is None:
        return all(each is None for each in of_ranks)
    return all(each is not None and torch.allclose(each, first, rtol=0, atol=0, equal_nan=True) for each in of_ranks)


def _run_case(seed: int, rank: int) -> list[str]:
    run = _Run(Case(seed), rank)
    run.run()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (run.problems, run.inexact, run.was_saturated, run.must_agree))
    problems = [problem for of_rank in of_ranks for problem in of_rank[0]]
    if not any(of_rank[2] for of_rank in of_ranks):
        problems += [problem for of_rank in of_ranks for problem in of_rank[1]]
    elif not any(_wire(name) == "fp16" for name in run.case.names) and not run.was_spoiled:
        problems.append("values were saturated, and no wire is fp16")
    for values in zip(*(of_rank[3] for of_rank in of_ranks), strict=True):
        if len({value for _, value in values}) > 1:
            problems.append(f"{values[0][0]}: ranks differ: {[value for _, value in values]}")
    return problems


def _serve(rank: int, world_size: int, seeds: Sequence[int], at: str) -> dict[int, list[str]]:
    failed = {}
    for seed in seeds:
        if rank == 0:
            Path(at).write_text(str(seed))
        if problems := _run_case(seed, rank):
            failed[seed] = problems
    return failed


def run_cases(seeds: Iterable[int]) -> dict[int, list[str]]:
    """Runs the cases of these seeds. Returns what was wrong, by seed; where ranks end, the rest of their batch is."""
    places: dict[tuple[int, bool], list[int]] = {}
    for seed in seeds:
        case = Case(seed)
        places.setdefault((case.world_size, case.shares_memory), []).append(seed)
    failed: dict[int, list[str]] = {}
    for (world_size, shares_memory), of_place in sorted(places.items()):
        for batch in (of_place[i : i + BATCH] for i in range(0, len(of_place), BATCH)):
            with tempfile.NamedTemporaryFile() as at:
                limits: Any = {"timeout": BATCH_SECONDS, "shared_memory": shares_memory}
                try:
                    failed |= run_ranks(_serve, world_size, batch, at.name, **limits)[0]
                except (RankError, RankTimeoutError) as error:
                    left = batch[batch.index(int(Path(at.name).read_text())) :]
                    failed |= {seed: ["was not run"] for seed in left} | {left[0]: [str(error)]}
    return failed


def main() -> int:
    """Returns 1 where a case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    arguments = parser.parse_args()
    failed = run_cases(range(arguments.seed, arguments.seed + arguments.cases))
    for seed, problems in sorted(failed.items()):
        print(Case(seed) if arguments.cases == 1 else f"seed {seed}:", *problems[:4], sep="\n  ", file=sys.stderr)
    print(f"{arguments.cases} cases, {len(failed)} wrong: {sorted(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random cases of every entry point against float64: averages, norm, and the same bits on all ranks.

Ranks record what their gradients were before each sync, as a twin of the model has them whose gradients nothing
averages, and what they are after it. The oracle is plain PyTorch in float64 over the records of all ranks. Hypothesis
makes a case that fails smaller, and shows the smallest.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.drill.cases import Case, Model, Step
from tests.engine.entry_points import ALL, average, whole
from tests.engine.optimizer_shards import train_both
from tests.engine.test_optimizer_masters import train_both as train_masters
from tests.ranks import run_ranks

ROUNDING = {"none": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 1 / 254, "int4": 1 / 14}
"""Of a value, or of the largest one of its block: what one encoding is off by."""
BLOCKS = ("int8", "int4")
BLOCK = 128
ENCODINGS_OF_BLOCKS = 2.5
"""Each rank's, as much for the sum's, and what that adds. Others' sums may be rounded with each rank's value."""
FEEDBACK_FACTOR = 3.0
"""What two steps before have lost comes on top."""
EXTREME = 1e4
FITS = 2.0**127
"""Beyond it, in float32, what a wire has to hold may saturate."""
SMALLEST = 2.0**-100
SECONDS = 240.0


@dataclass
class Record:
    """A rank's step."""

    number: int
    weight: float
    held: list[Tensor | None]
    """Sums that an earlier sync has left, to which this one adds."""
    local: list[Tensor | None]
    """Other gradients before the sync."""
    is_new: list[bool]
    """Whether the sync has to average the rank's gradient, of each parameter."""
    averages: list[Tensor | None]
    statistics: tuple[float, int, int] | None = None
    """The norm, and how many values are not finite, or were saturated. Within join() they are not checked."""


class Run:
    """One rank's part of a case."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.number, self.weight = case, rank, 0, 1.0
        self.ranks, self.group = list(range(case.world_size)), dist.group.WORLD
        self.model, self.twin = Model(case.parameters), Model(case.parameters)
        self.new: set[int] = set()
        self.held: list[Tensor | None] = [None] * len(case.parameters)
        self.records: list[Record] = []
        options: dict[str, Any] = {"op": case.op} if case.is_attached else {}
        options |= {"find_unused_parameters": True} if case.is_ddp else {}
        compression = case.wire if case.entry_point == "drop-in hook" else case.compression
        self.averaged = average(case.entry_point, self.model, compression, bucket_cap_mb=case.cap, **options)
        self.handle = self.averaged.handle

    def run(self) -> list[Record]:
        for step in self.case.steps:
            if step.leaves_group and len(self.ranks) == self.case.world_size:
                self.ranks.pop()
                self.group = dist.new_group(self.ranks)
                if self.rank in self.ranks:
                    self.handle.use_group(self.group)
            if self.rank in self.ranks:
                self.step(step)
            self.number += 1
        if self.case.may_join and self.rank in self.ranks:
            self.join(self.case.joins[self.rank])
        return self.records

    def step(self, step: Step) -> None:
        if step.reorders:
            for model in (self.model, self.twin):
                model.to(memory_format=torch.channels_last if self.number % 2 else torch.contiguous_format)
        self.zero(step.zero)
        if step.weights:
            self.weight = step.weights[self.rank]
            self.handle.set_weight(self.weight)
        if step.accumulates:
            with self.averaged.no_sync():
                self.backward(self.grads(step.accumulate[self.rank], (0, 1)))
        if step.fails:
            self.fail(step)
        theirs = torch.full((3,), 1.0 + self.rank)
        if step.piggybacks:
            self.handle.piggyback("rank", torch.tensor(float(self.rank)))
        work = dist.all_reduce(theirs, group=self.group, async_op=True) if step.reduces else None
        grads = self.grads(step.use[self.rank], (2, 3))
        for index, gradient in grads:
            if step.extreme and step.extreme[:2] == (self.rank, index):
                (gradient._values() if gradient.is_sparse else gradient).view(-1)[-1:] = step.extreme[2]
        record = self.sync(grads)
        if work is not None:
            work.wait()
            assert theirs.tolist() == [sum(self.ranks) + len(self.ranks)] * 3, "the user's own sum is wrong"
        if step.piggybacks:
            mean = self.handle.piggybacked()["rank"].item()
            assert math.isclose(mean, sum(self.ranks) / len(self.ranks), rel_tol=1e-6), f"piggybacked: {mean}"
        stats, norm = self.handle.grad_stats(), self.averaged.grad_norm().item()
        record.statistics = norm, stats.num_nonfinite.item(), stats.num_saturated.item()

    def zero(self, how: Sequence[str]) -> None:
        for index, what in enumerate(how):
            if what == "keep":
                continue
            if self.held[index] is not None:
                self.twin.weights[index].grad, self.held[index] = self.held[index], None
            for model in (self.model, self.twin):
                weight = model.weights[index]
                if weight.grad is not None and what == "zero in place":
                    weight.grad.zero_()
                elif weight.grad is not None:
                    like = weight.grad if weight.grad.is_sparse else weight
                    weight.grad = None if what == "none" else torch.zeros_like(like, dtype=weight.grad.dtype)

    def grads(self, use: Iterable[int], parts: Sequence[int]) -> list[tuple[int, Tensor]]:
        """New ones of these parameters, in an order of this rank. A tied parameter has both parts."""
        pairs = [(index, part) for index in sorted(use) for part in parts[: 1 + self.case.parameters[index].is_tied]]
        random.Random(f"{self.case.seed} {self.number} {self.rank}").shuffle(pairs)
        return [(index, self.case.gradient(self.rank, self.number, index, part)) for index, part in pairs]

    def backward(self, grads: Sequence[tuple[int, Tensor]]) -> None:
        self.new |= {index for index, _ in grads}
        for model in (self.twin, self.averaged.model):
            model(grads).backward()

    def fail(self, step: Step) -> None:
        """A backward that raises on some ranks when a gradient is there, and that the others notice."""
        there, noticed = self.case.takes_part, self.rank in step.fails
        if len(there) < 2:
            return
        use = {there[0], there[-1]} if noticed else step.use[self.rank] & {*there}
        try:
            self.averaged.model(self.grads(use, (4,)), noticed).backward()
        except (ArithmeticError, RuntimeError):
            noticed = True
        noticed |= any(grad is not None and bool(widened(grad).isnan().any()) for grad in grads_of(self.model))
        assert noticed or not {*step.fails} & {*self.ranks}, f"does not notice that {step.fails} failed"
        self.zero(["none"] * len(self.case.parameters))
        self.new.clear()

    def join(self, left: int) -> None:
        """Ranks that run out of batches at different times, in two epochs."""
        trained = [weight for weight in self.model.weights if weight.requires_grad]
        has_sparse = any(each.is_sparse for each in self.case.parameters)  # with which Adam does not go
        optimizer = (torch.optim.SGD if has_sparse else torch.optim.Adam)(trained, lr=0.1)
        takes_scale = all(weight.is_floating_point() and weight.dtype != torch.float16 for weight in trained)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=takes_scale)
        scaler.scale(torch.zeros(()))
        for first in (100, 200):
            with self.handle.join(optimizer, scaler):
                for self.number in range(first, first + left):
                    self.zero(["none"] * len(self.case.parameters))
                    self.sync(self.grads(self.case.takes_part, (0,)))
                    scaler.step(optimizer)
                    scaler.update()
            mine = [*trained, *(value for each in trained for value in optimizer.state[each].values())]
            everyones: list[Any] = [None] * len(self.ranks)
            digest = [each.detach().numpy().tobytes() for each in map(widened, mine)], scaler.state_dict()
            dist.all_gather_object(everyones, pickle.dumps(digest), group=self.group)
            assert len({*everyones}) == 1, f"after the joint steps from {first} on, ranks hold different states"

    def sync(self, grads: Sequence[tuple[int, Tensor]]) -> Record:
        """From here on the twin goes by what is there, so that no error counts twice."""
        self.backward(grads)
        self.averaged.finish()
        local, averages = grads_of(self.twin), grads_of(self.model)
        is_new = [grad is not None if self.case.is_called else at in self.new for at, grad in enumerate(local)]
        self.records.append(Record(self.number, self.weight, self.held, local, is_new, averages))
        self.new.clear()
        sums = self.case.op == "sum"
        self.held = grads_of(self.model) if sums else [None] * len(local)
        for weight, grad in zip(self.twin.weights, grads_of(self.model), strict=True):
            weight.grad = None if sums else grad
        return self.records[-1]


def grads_of(model: Model) -> list[Tensor | None]:
    """Copies, of whole gradients. Under fully_shard a model has other parameters than it began with."""
    grads = [None if weight.grad is None else whole(weight.grad).detach() for weight in model.weights]
    return [None if grad is None else copied(grad) for grad in grads]


def copied(gradient: Tensor) -> Tensor:
    return gradient.clone() if gradient.is_sparse else gradient.clone(memory_format=torch.contiguous_format)


class Oracle:
    """What the records of a case have to be. Raises AssertionError."""

    def __init__(self, case: Case, of_ranks: Sequence[Sequence[Record]]) -> None:
        self.case, self.largest, self.is_extreme = case, 0.0, False
        self.reach: dict[int, Tensor] = {}
        """How large values have been that a parameter's were encoded with, up to now."""
        everything = [record for records in of_ranks for record in records]
        for number in sorted({record.number for record in everything}):
            self.step, self.records = f"step {number}", [each for each in everything if each.number == number]
            self.check()

    def check(self) -> None:
        """A step of all ranks that took part."""
        sent = [widened(grad) for record in self.records for grad in record.local if grad is not None]
        values = torch.cat([torch.zeros(1), *(grad[finite(grad)].abs().flatten() for grad in sent)])
        self.largest, self.is_finite = max(self.largest, float(values.max())), all(bool(finite(x).all()) for x in sent)
        self.is_extreme |= self.largest > EXTREME or not self.is_finite
        has_kept = False
        for index in self.case.takes_part:
            averages = [record.averages[index] for record in self.records]
            if any(record.is_new[index] for record in self.records):
                self.check_average(index, averages)
                continue
            has_kept |= self.case.is_ddp or any(grad is not None for grad in averages)  # DDP sends zeros, for nothing
            before = [
                record.held[index] if record.local[index] is None else record.local[index] for record in self.records
            ]
            same = [same_bits(was, now) for was, now in zip(before, averages, strict=True)]
            assert all(same), f"{self.step}, parameter {index} is not as it was"
        if self.records[0].statistics is not None:
            self.check_statistics(has_kept)

    def check_average(self, index: int, averages: Sequence[Tensor | None]) -> None:
        """Of one parameter."""
        case, first, what = self.case, averages[0], f"{self.step}, parameter {index}"
        assert first is not None, f"{what} has no gradient"
        assert all(same_bits(first, other) for other in averages), f"{what} is not the same on all ranks"
        if case.parameters[index].is_sparse:
            self.check_rows(first, [each.local[index] for each in self.records if each.weight > 0], what)
        actual = first.to_dense()
        weights, wide = [record.weight for record in self.records], widened(actual).dtype
        counts = [case.op != "mean_of_used" or record.is_new[index] for record in self.records]
        grads = [(each.weight, each.local[index]) for each, does in zip(self.records, counts, strict=True) if does]
        parts = [weight * widened(grad) for weight, grad in grads if grad is not None and weight > 0]
        num_parts = 1.0 if case.op == "sum" else sum(weight for weight, _ in grads) or 1.0
        multiplied = max(1.0, sum(weights) / num_parts) if case.op == "mean_of_used" else 1.0  # after it has traveled
        held = next((record.held[index] for record in self.records if record.held[index] is not None), None)
        zeros = torch.zeros(actual.shape, dtype=wide)
        new = torch.stack([zeros, *parts])
        everyones = torch.cat([new, (zeros if held is None else widened(held))[None]])
        expected = everyones.sum(dim=0) / num_parts
        was_finite = finite(everyones).all(dim=0)
        assert not (finite(actual) & ~was_finite).any(), f"{what} has lost an inf or nan"
        if case.wire == "none" or self.is_finite:
            overflows = ~finite(everyones.abs().sum(dim=0).to(actual.dtype))
            assert (finite(actual) | ~was_finite | overflows).all(), f"{what} did not stay finite"
        is_whole = case.wire == "none" and not case.is_weighted and not case.may_join and len(weights) in (2, 4)
        # A mean over three or five ranks is no whole number, and later steps of fewer ranks may add to it.
        is_whole &= len(weights) == case.world_size
        is_exact = is_whole and case.op != "mean_of_used" and torch.equal(expected.to(actual.dtype).to(wide), expected)
        error = self.wire_error(index, new.abs().amax(dim=0) * len(weights) / num_parts / multiplied)
        limits = torch.finfo(actual.dtype)
        if not is_exact:
            error = error + 4.0 * (limits.eps * everyones.abs().sum(dim=0) + limits.smallest_normal * limits.eps)
        error = error * multiplied
        if multiplied > 1.0 and case.is_weighted:  # the weights of the ranks that use it are added in float32
            error = error + 2.0**-22 * everyones.abs().sum(dim=0)
        off = (widened(actual) - expected).abs()
        fits = everyones.abs().sum(dim=0) < min(limits.max, FITS) / 4  # also in between
        if index in self.reach:  # what was saturated comes with later steps
            self.reach[index] = self.reach[index].masked_fill(~fits, math.inf)
        wrong = fits & ~(off <= error) & error.isfinite()
        assert not wrong.any(), f"{what} is off by {off[wrong].max():.3g}, and may be by {error[wrong].min():.3g}"

    def check_rows(self, mean: Tensor, of_ranks: Sequence[Tensor | None], what: str) -> None:
        """A sparse mean has each row that some rank has, once."""
        rows = {row for grad in of_ranks if grad is not None for row in grad._indices()[0].tolist()}
        assert mean.is_coalesced(), f"{what} is not coalesced"
        assert mean.indices()[0].tolist() == sorted(rows), f"{what} has other rows than the ranks have"

    def wire_error(self, index: int, magnitudes: Tensor) -> Tensor:
        """How far off the wire may leave each value, of what the ranks have added these magnitudes for."""
        case = self.case
        if case.parameters[index].is_sparse:  # whose values are rounded once, or not at all
            rounding, least = 0.0 if case.wire in BLOCKS else ROUNDING[case.wire], 2.0**-20 * self.largest
            return rounding * (magnitudes + (least if case.wire == "fp16" else 0.0) + SMALLEST)
        if case.wire in BLOCKS and case.is_sharded:  # any of the bucket's values may be of the block
            magnitudes = torch.full_like(magnitudes, self.largest if self.is_finite else math.inf)
        elif case.wire in BLOCKS:
            magnitudes = largest_of_blocks(magnitudes, case.parameters[index].is_transposed)
        else:
            magnitudes = magnitudes.nan_to_num(nan=math.inf, posinf=math.inf)
        if case.wire == "fp16":  # whose scale follows the bucket's largest value
            magnitudes = (
                torch.full_like(magnitudes, math.inf) if self.is_extreme else magnitudes + 2.0**-20 * self.largest
            )
        if case.has_feedback:
            magnitudes = self.reach[index] = torch.maximum(magnitudes, self.reach.get(index, magnitudes))
        encodings = ENCODINGS_OF_BLOCKS if case.wire in BLOCKS else case.world_size + 1.0
        factor = ROUNDING[case.wire] * encodings * (FEEDBACK_FACTOR if case.has_feedback else 1.0)
        return factor * (magnitudes + SMALLEST) if factor else torch.zeros_like(magnitudes)

    def check_statistics(self, has_kept: bool) -> None:
        """Against the first rank's averages, which are those of all."""
        case, of_ranks = self.case, [record.statistics or (0.0, 0, 0) for record in self.records]
        norm, num_nonfinite, num_saturated = of_ranks[0]
        assert not num_saturated or self.is_extreme, f"{self.step}: {num_saturated} saturated"
        assert len({repr(each[0]) for each in of_ranks}) == 1, f"{self.step}: norms {of_ranks} differ"
        if case.is_sharded:  # whose counts are of shards
            num_nonfinite = sum(each[1] for each in of_ranks)
            if case.parameters[0].dtype in (torch.float16, torch.float64):
                return  # of which fully_shard divides the sums once more, after the norm is known
        rounds = case.wire != "none" or any(each.grad_dtype.itemsize < 4 for each in case.parameters)
        travels = not case.has_feedback or any(each.is_sparse for each in case.parameters)
        if has_kept and (case.is_weighted or (rounds and (case.is_ddp or travels))):
            return  # what no rank has a new one of counts as it has traveled
        averages = [self.records[0].averages[index] for index in case.takes_part]
        dense = [grad.to_dense() for grad in averages if grad is not None]
        grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in dense]
        wide = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        right = torch.tensor(wide, dtype=torch.float32).item()  # as the norm is, so it may be inf where no gradient is
        is_close = abs(norm - right) <= 2e-6 * right if math.isfinite(right) else not math.isfinite(norm)
        assert is_close, f"{self.step}: the norm is {norm} in place of {right}"
        nonfinite = sum(int((~grad.isfinite()).sum()) for grad in grads)
        spreads = case.is_sharded and case.wire in ("int8", "int4")  # a nan over its block, which may end in padding
        right_count = num_nonfinite == nonfinite or (spreads and num_nonfinite > nonfinite > 0)
        assert right_count, f"{self.step}: num_nonfinite is {num_nonfinite} in place of {nonfinite}"


def largest_of_blocks(magnitudes: Tensor, is_transposed: bool) -> Tensor:
    """In each value's place. A block is of neighbours in memory, and begins with the gradient."""
    magnitudes = magnitudes.nan_to_num(nan=math.inf, posinf=math.inf)
    if magnitudes.dim() == 4:  # which may have got another memory format
        return magnitudes.max().expand_as(magnitudes)
    in_memory = magnitudes.mT if is_transposed else magnitudes
    flat = in_memory.flatten()
    padded = nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    of_each = padded.amax(dim=1, keepdim=True).expand_as(padded).flatten()[: flat.numel()].view(in_memory.shape)
    return of_each.mT if is_transposed else of_each


def widened(gradient: Tensor) -> Tensor:
    """Dense. A sparse one's values for the same row are added in its own dtype, as they are before they travel."""
    dense = gradient.coalesce().to_dense() if gradient.is_sparse else gradient
    return dense.to(torch.complex128 if gradient.is_complex() else torch.float64)


def finite(values: Tensor) -> Tensor:
    return torch.view_as_real(values).isfinite().all(dim=-1) if values.is_complex() else values.isfinite()


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.is_sparse:
        return torch.equal(one._indices(), other._indices()) and same_bits(one._values(), other._values())
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def record(rank: int, world_size: int, case: Case) -> list[Record]:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # of DDP's warnings
    return Run(case, rank).run()


@settings(max_examples=10, deadline=None, database=None)
@given(draw=st.randoms(use_true_random=False))
def check(entry_point: str, draw: random.Random) -> None:
    case = Case(entry_point, draw)
    described = json.dumps(case, default=lambda thing: getattr(thing, "__dict__", repr(thing)))
    note(described)
    try:
        Oracle(case, run_ranks(record, case.world_size, case, timeout=SECONDS, shared_memory=case.shares_memory))
    except Exception as error:
        print(f"{described}\n{error}")  # Hypothesis says nothing of a case that fails only once
        raise


@pytest.mark.parametrize("entry_point", ALL)
def test_random_cases(entry_point: str, seeds: Iterable[int]) -> None:
    for number in seeds:
        seed(number)(check)(entry_point)


def test_optimizer_steps(seeds: Iterable[int]) -> None:
    """``shard_optimizer`` against attach and every rank's own step, bit for bit."""
    for number in seeds:
        run_ranks(train_both, 2 + number % 4, number, 50, timeout=5 * SECONDS, shared_memory=number % 8 < 4)


def test_masters(seeds: Iterable[int]) -> None:
    """``shard_optimizer`` with masters against float32 copies, bit for bit."""
    for number in seeds:
        wire = "bf16" if number % 3 == 0 else "none"
        run_ranks(train_masters, 1 + number % 4, number, wire, timeout=5 * SECONDS, shared_memory=number % 8 < 4)

"""Random cases of every entry point against float64: averages, norm, and the same bits on all ranks.

The oracle is plain PyTorch in float64 over the gradients of all ranks, which every rank knows, for they follow from the
seed. A case that fails loses what it does not need to fail, and is then a line that runs it again:

    python -m tests.drill.oracle attach 17 piggybacks step5
"""

from __future__ import annotations

import math
import os
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.drill.cases import Case, Model, Step, loss_of
from tests.drill.rows import Row
from tests.engine.entry_points import ALL, average, whole
from tests.models import Fails
from tests.ranks import RankError, RankTimeoutError, run_ranks

WIRE_ERROR = {"none": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10, "int8": 2.0**-6, "int4": 2.0**-2}
"""Of the largest gradient: half a step for each rank's rounding, as much for the sum's, and what that adds."""
FEEDBACK_FACTOR = 3.0
"""What two steps before have lost comes on top."""
BATCH = 24
"""Cases of an entry point between two looks at the time."""
BATCH_SECONDS = 200.0


class Oracle:
    """What every rank's gradients are, in float64, and what the next sync makes of them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ranks = list(range(case.world_size))
        self.weights = [1.0] * case.world_size
        self.largest = 0.0  # of what was sent so far
        self.forget()

    def forget(self) -> None:
        self.mine: list[list[Tensor | None]] = [[None] * len(self.case.parameters) for _ in range(self.case.world_size)]
        self.is_new = [[False] * len(row) for row in self.mine]

    def zero(self, how: Sequence[str]) -> None:
        for row in self.mine:
            for index, (grad, what) in enumerate(zip(row, how, strict=True)):
                if grad is not None and what != "keep":
                    row[index] = None if what == "none" else torch.zeros_like(grad)

    def add(self, rank: int, index: int, gradient: Tensor) -> None:
        before, wide = self.mine[rank][index], widened(gradient)
        if before is not None and not self.case.assigns:  # rounded as autograd does
            wide = (before + wide).to(gradient.dtype).to(wide.dtype)
        self.mine[rank][index] = wide
        self.is_new[rank][index] = True

    def exists(self, index: int) -> bool:
        return any(self.is_new[rank][index] for rank in self.ranks)

    def average(self, index: int) -> Tensor:
        pairs = [(self.weights[rank], self.mine[rank][index]) for rank in self.ranks]
        like = next(grad for _, grad in pairs if grad is not None)
        total = sum(
            (weight * grad for weight, grad in pairs if weight > 0 and grad is not None), torch.zeros_like(like)
        )
        return total if self.case.op == "sum" else total / (sum(weight for weight, _ in pairs) or 1.0)

    def error(self, dtype: torch.dtype, average: Tensor) -> float:
        """How far an average may be from that."""
        case, weights = self.case, [self.weights[rank] for rank in self.ranks]
        grads = [grad[grad.abs().isfinite()].abs() for row in self.mine for grad in row if grad is not None]
        self.largest = max([self.largest, *(float(grad.max()) for grad in grads if grad.numel())])
        share = max(1.0, len(weights) * max(weights) / ((sum(weights) or 1.0) if case.op == "mean" else 1.0))
        wire = WIRE_ERROR[case.wire] * (FEEDBACK_FACTOR if case.has_feedback else 1.0)
        is_whole = case.wire == "none" and not case.is_weighted and len(weights) in (2, 4)
        is_exact = is_whole and torch.equal(average.to(dtype).to(average.dtype), average)
        return (wire + (0.0 if is_exact else 4.0 * torch.finfo(dtype).eps)) * share * self.largest

    def follow(self, grads: Sequence[Tensor | None]) -> None:
        """From here on the oracle goes by what is there, so that no error counts twice."""
        for index, grad in enumerate(grads):
            for rank in self.ranks if self.exists(index) and grad is not None else ():
                self.mine[rank][index] = widened(grad)
        self.is_new = [[False] * len(row) for row in self.mine]


class Run:
    """One rank's part of a case."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.number = case, rank, 0
        self.oracle, self.model = Oracle(case), Model(case.parameters)
        self.group: dist.ProcessGroup | None = None
        self.problems: list[str] = []
        self.inexact: list[str] = []  # which are none where float16 was saturated, as it may be
        self.must_agree: list[tuple[str, object]] = []
        self.was_spoiled = self.was_saturated = False
        options: dict[str, Any] = {"op": case.op} if case.is_attached else {}
        options |= {"find_unused_parameters": True} if case.is_ddp else {}
        self.averaged = average(case.entry_point, self.model, case.asked(), bucket_cap_mb=case.cap, **options)

    def run(self) -> None:
        for number, step in enumerate(self.case.steps):
            self.number = number
            if step.use_group and self.group is None:
                self.oracle.ranks.pop()
                self.group = dist.new_group(self.oracle.ranks)
                if self.rank in self.oracle.ranks:
                    self.averaged.handle.use_group(self.group)
            if self.rank in self.oracle.ranks:
                self.step(step)
        if self.case.may_join and self.rank in self.oracle.ranks:
            self.join()

    def step(self, step: Step) -> None:
        self.prepare(step)
        if step.accumulate:
            with self.averaged.no_sync():
                self.backward(step, step.accumulate, part=0)
        if step.fails:
            self.fail(step, step.fails)
        ranks, theirs = self.oracle.ranks, torch.full((3,), 1.0 + self.rank)
        if step.piggybacks:
            self.averaged.handle.piggyback("rank", torch.tensor(float(self.rank)))
        work = dist.all_reduce(theirs, group=self.group, async_op=True) if step.reduces else None
        before = self.grads(copies=True)
        self.backward(step, step.use, part=1)
        if self.case.is_called:
            self.oracle.is_new = [[grad is not None for grad in row] for row in self.oracle.mine]
            self.averaged.finish()
        if work is not None:
            work.wait()
            self.expect("the user's own sum", theirs.tolist(), [float(sum(ranks) + len(ranks))] * 3)
        if step.piggybacks:
            self.expect("piggybacked", self.averaged.handle.piggybacked()["rank"].item(), sum(ranks) / len(ranks))
        self.check(before)
        self.oracle.follow(self.grads())

    def prepare(self, step: Step) -> None:
        if step.weights:
            self.oracle.weights = step.weights
            self.averaged.handle.set_weight(step.weights[self.rank])
        self.oracle.zero(step.zero)
        for weight, what in zip(self.weights, step.zero, strict=True):
            if weight.grad is not None and what != "keep":
                weight.grad = None if what == "none" else torch.zeros_like(weight)

    def backward(self, step: Step, uses: Sequence[Sequence[bool]], part: int) -> None:
        case, found = self.case, []
        for rank, index in [(rank, index) for rank, row in enumerate(uses) for index, use in enumerate(row) if use]:
            parts = range(2 * part, 2 * part + 1 + case.parameters[index].is_tied)
            grads = [case.gradient(rank, self.number, index, each) for each in parts]
            if step.spoil and part == 1 and step.spoil[:2] == (rank, index) and grads[0].numel():
                grads[0].view(-1)[-1] = step.spoil[2]
                self.was_spoiled = True
            if case.assigns:
                grads = [laid_out(grads[0], random.Random(f"{self.number} {rank} {index}").randrange(5))]
            self.oracle.add(rank, index, grads[0] if len(grads) == 1 else grads[0] + grads[1])
            if rank == self.rank and case.assigns:
                self.weights[index].grad = grads[0]
            elif rank == self.rank:
                found += [(index, gradient) for gradient in grads]
        if found:
            random.Random(f"{case} {self.number} {self.rank}").shuffle(found)  # ranks differ in the order
            self.averaged.model(found).backward()

    def fail(self, step: Step, ranks: Sequence[int]) -> None:
        """A backward that raises on some ranks when a gradient is there, and that the others notice."""
        there = [index for index, each in enumerate(self.case.parameters) if each.takes_part]
        if len(there) < 2:
            return
        fails, first = self.rank in ranks, self.weights[there[0]]
        used = [there[0], there[-1]] if fails else [index for index in there if step.use[self.rank][index]]
        first = Fails.apply(first) if fails else first  # the oldest node comes last
        weights = [first if index == there[0] else self.weights[index] for index in used]
        grads = [self.case.gradient(self.rank, self.number, index, 4) for index in used]
        noticed = fails
        try:
            sum(map(loss_of, weights, grads)).backward()
        except (ArithmeticError, RuntimeError):
            noticed = True
        noticed |= any(grad is not None and bool(grad.isnan().any()) for grad in self.grads())
        self.expect(f"notices that {ranks} failed", noticed or not set(ranks) & set(self.oracle.ranks), True)
        self.model.zero_grad()
        self.oracle.forget()

    def join(self) -> None:
        """Ranks that run out of batches at different times."""
        left, everyone = self.case.joins, self.oracle.ranks
        self.case.is_weighted = True  # by 1 and 0
        used = [index for index, each in enumerate(self.case.parameters) if each.takes_part]
        with self.averaged.handle.join():
            for number in range(left[self.rank]):
                self.number = 100 + number
                self.model.zero_grad()
                self.oracle.forget()
                self.oracle.ranks = [rank for rank in everyone if left[rank] > number]
                for rank in self.oracle.ranks:
                    for index in used:
                        self.oracle.add(rank, index, self.case.gradient(rank, self.number, index, 0))
                grads = [(index, self.case.gradient(self.rank, self.number, index, 0)) for index in used]
                self.averaged.backward(self.model(grads))
                for index in used:
                    self.check_average(f"parameter {index}", index, self.grads()[index])
        self.oracle.ranks = everyone

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.weights)  # others under fully_shard

    def grads(self, copies: bool = False) -> list[Tensor | None]:
        grads = [None if weight.grad is None else whole(weight.grad).detach() for weight in self.weights]
        return [grad if grad is None or not copies else grad.clone() for grad in grads]

    def expect(self, what: str, actual: object, expected: object) -> None:
        if not torch.equal(torch.tensor(actual), torch.tensor(expected)):
            self.problems.append(f"rank {self.rank}, step {self.number}: {what}: {actual} in place of {expected}")

    # ---- what has come -----------------------------------------------------------------------------------------------

    def check(self, before: Sequence[Tensor | None]) -> None:
        grads, has_kept = self.grads(), False
        for index, grad in enumerate(grads):
            what = f"parameter {index}"
            if not self.case.parameters[index].takes_part:
                grads[index] = None
            elif self.oracle.exists(index):
                self.check_average(what, index, grad)
                values = torch.zeros(0) if grad is None else grad.clone(memory_format=torch.contiguous_format)
                bits = values.view(-1).view(torch.uint8).numpy().tobytes()
                self.must_agree.append((f"step {self.number}, {what}", zlib.crc32(bits)))
            else:
                has_kept |= grad is not None or self.case.is_ddp  # which sends zeros and throws away what comes
                same = torch.allclose(grad, before[index], 0, 0, equal_nan=True) if grad is not None else True
                self.expect(f"{what} is as it was", same and (grad is None) == (before[index] is None), True)
        self.check_statistics([grad for grad in grads if grad is not None], has_kept)

    def check_average(self, what: str, index: int, actual: Tensor | None) -> None:
        if actual is None:
            self.problems.append(f"rank {self.rank}, step {self.number}: {what} has no gradient")
            return
        expected = self.oracle.average(index)
        error, finite = self.oracle.error(actual.dtype, expected), expected.abs().isfinite()
        off = (actual.to(expected.dtype) - expected).abs()[finite]
        if self.case.wire == "none":
            self.expect(f"{what}, finite values", actual.abs().isfinite().tolist(), finite.tolist())
        if not self.was_spoiled and not bool((off <= error).all()):
            at = f"rank {self.rank}, step {self.number}, {what}"
            self.inexact.append(f"{at}: off by {off.max():.3g}, and may be by {error:.3g}")

    def check_statistics(self, grads: Sequence[Tensor], has_kept: bool) -> None:
        case, stats = self.case, self.averaged.handle.grad_stats()
        norm, num_nonfinite = self.averaged.grad_norm().item(), stats.num_nonfinite.item()
        self.was_saturated |= bool(stats.num_saturated.item())
        if not case.is_sharded:
            self.must_agree.append((f"step {self.number}: the norm and num_nonfinite", (repr(norm), num_nonfinite)))
        elif case.parameters[0].dtype in (torch.float16, torch.float64):
            return  # of which fully_shard divides the sums once more, after the norm is known
        if has_kept and (case.is_weighted or (case.wire != "none" and (case.is_ddp or not case.has_feedback))):
            return  # what no rank has a new one of counts as it has traveled
        right = math.sqrt(sum(float(grad.abs().double().square().sum()) for grad in grads))
        is_close = abs(norm - right) <= 2e-6 * right if math.isfinite(right) else not math.isfinite(norm)
        self.expect(f"the norm, {norm} in place of {right}", is_close, True)
        reals = [torch.view_as_real(grad.contiguous()) if grad.is_complex() else grad for grad in grads]
        nonfinite = sum(int((~each.isfinite()).sum()) for each in reals)
        self.expect("num_nonfinite", num_nonfinite if not case.is_sharded else nonfinite, nonfinite)


def widened(gradient: Tensor) -> Tensor:
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64, copy=True)


def laid_out(gradient: Tensor, layout: int) -> Tensor:
    """The same in one of several memory layouts, or one value everywhere."""
    if layout == 0 and gradient.dim() > 1:
        return gradient.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 1:
        return torch.stack([torch.zeros_like(gradient), gradient], dim=-1)[..., 1]
    return gradient.flatten()[0].expand(gradient.shape) if layout == 2 and gradient.numel() else gradient


def problems_of(case: Case, rank: int) -> list[str]:
    run = Run(case, rank)
    run.run()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (run.problems, run.inexact, run.was_saturated, run.must_agree))
    problems = [problem for of_rank in of_ranks for problem in of_rank[0]]
    if not any(of_rank[2] for of_rank in of_ranks):
        problems += [problem for of_rank in of_ranks for problem in of_rank[1]]
    elif case.wire != "fp16" and not run.was_spoiled:
        problems.append("values were saturated, and the wire is not fp16")
    for values in zip(*(of_ranks[rank][3] for rank in run.oracle.ranks), strict=True):
        if len(set(values)) > 1:
            problems.append(f"ranks differ: {values}")
    return problems


def serve(rank: int, world_size: int, names: Sequence[tuple[Any, ...]], at: str) -> dict[str, list[str]]:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # of DDP's warnings
    failed = {}
    for case in (Case(*name) for name in names):
        if rank == 0:
            Path(at).write_text(str(case))
        if problems := problems_of(case, rank):
            failed[str(case)] = problems
    return failed


def run_cases(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Runs these cases. Returns what was wrong, by case; what comes after one that ends a rank is not run."""
    places: dict[tuple[int, bool], list[tuple[Any, ...]]] = {}
    for case in cases:
        name = (case.entry_point, case.seed, case.without)
        places.setdefault((case.world_size, case.shares_memory), []).append(name)
    failed: dict[str, list[str]] = {}
    for (world_size, shares_memory), names in sorted(places.items()):
        with tempfile.NamedTemporaryFile() as at:
            limits: Any = {"timeout": BATCH_SECONDS, "shared_memory": shares_memory}
            try:
                failed |= run_ranks(serve, world_size, names, at.name, **limits)[0]
            except (RankError, RankTimeoutError) as error:
                failed[Path(at.name).read_text()] = [str(error)]
    return failed


def shrunk(case: Case, problems: list[str], deadline: float) -> str:
    """A line that runs what is left of a case that fails, and the first thing that is wrong."""
    for smaller in case.smaller() if time.monotonic() < deadline else ():
        if still := run_cases([smaller]):
            return shrunk(smaller, next(iter(still.values())), deadline)
    return f"python -m tests.drill.oracle {case}: {problems[0].strip().splitlines()[-1]}"


def drill(seed: int, deadline: float) -> list[Row]:
    """As many batches of every entry point as there is time for."""
    rows = {entry_point: Row(f"{entry_point} against float64") for entry_point in ALL}
    first = 1_000_000 * seed
    while first == 1_000_000 * seed or time.monotonic() < deadline:
        for entry_point, row in rows.items():
            cases = [Case(entry_point, first + index) for index in range(BATCH)]
            failed = run_cases(cases)
            for case in cases:
                row.add([shrunk(case, failed[str(case)], deadline)] if str(case) in failed else [])
        first += BATCH
    return list(rows.values())


if __name__ == "__main__":
    found = run_cases([Case(sys.argv[1], int(sys.argv[2]), sys.argv[3:])])
    print(found or "nothing is wrong")
    sys.exit(1 if found else 0)

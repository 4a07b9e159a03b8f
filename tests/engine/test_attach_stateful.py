"""Anything that may be done with an attached model, in any order: always the mean, or an error, on all ranks."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.engine.stateful_ranks import SHAPES, WORLD_SIZE, Grads, Ranks

# Small whole numbers, so that means are exact at full width.
VALUES = st.one_of(st.none(), st.integers(-3, 3).filter(bool).map(float))
OF_RANK = st.lists(VALUES, min_size=len(SHAPES), max_size=len(SHAPES))
BOTH = st.lists(OF_RANK, min_size=WORLD_SIZE, max_size=WORLD_SIZE)
WIRES = st.sampled_from(["none", "bf16", "fp16", "int8"])
INDICES = st.integers(0, len(SHAPES) - 1)
RANKS = st.integers(0, WORLD_SIZE - 1)

MEAN_ERROR = {"none": 0.0, "bf16": 2.0**-6, "fp16": 2.0**-9, "int8": 2.0**-6}
"""Of the largest gradient: for each rank's rounding, and for that of the sum."""


class Machine(RuleBasedStateMachine):
    """The plain reference, and two ranks that do the same.

    Every rank must run as many backwards that reach any parameter, so each reaches at least one.
    """

    ranks: Ranks

    @initialize(wire=WIRES)
    def attach(self, wire: str) -> None:
        self.wire = wire
        self.frozen = [False] * len(SHAPES)
        self.mine: list[list[float | None]] = [[None] * len(SHAPES) for _ in range(WORLD_SIZE)]
        self.is_new = [[False] * len(SHAPES) for _ in range(WORLD_SIZE)]
        self.error = 0.0  # of roundings since the gradients were last zero
        self._tell("attach", [wire])

    @rule(values=BOTH)
    def backward(self, values: list[list[float | None]]) -> None:
        used = [self._reaching(of_rank) for of_rank in values]
        self._add(used)
        self._average(self.is_new)
        self._tell("backward", *([of_rank] for of_rank in used))

    @rule(values=BOTH)
    def accumulate(self, values: list[list[float | None]]) -> None:
        used = [self._reaching(of_rank) for of_rank in values]
        self._add(used)
        self._tell("accumulate", *([of_rank] for of_rank in used))

    @rule()
    def synchronize(self) -> None:
        self._average([[grad is not None for grad in of_rank] for of_rank in self.mine])
        self._tell("synchronize", [])

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        for of_rank in self.mine:
            of_rank[:] = [None if set_to_none or grad is None else 0.0 for grad in of_rank]
        self.error = 0.0
        self._tell("zero_grad", [set_to_none])

    @rule(index=INDICES)
    def freeze_or_unfreeze(self, index: int) -> None:
        self.frozen[index] = not self.frozen[index]
        if all(self.frozen):
            self.frozen[(index + 1) % len(SHAPES)] = False
        for of_rank in self.mine:
            of_rank[:] = [None if frozen else grad for frozen, grad in zip(self.frozen, of_rank, strict=True)]
        self._tell("freeze", [self.frozen])

    @rule(wire=WIRES)
    def compress(self, wire: str) -> None:
        self.wire = wire
        self._tell("compress", [wire])

    @rule(wire=WIRES)
    def detach_and_attach(self, wire: str) -> None:
        self.wire = wire
        self._nothing_is_left()
        self.is_new = [[False] * len(SHAPES) for _ in range(WORLD_SIZE)]
        self._tell("reattach", [wire])

    @rule(values=BOTH, then=BOTH, at=INDICES)
    def fail_on_all_ranks(self, values: list[list[float | None]], then: list[list[float | None]], at: int) -> None:
        self._fail(values, then, at, list(range(WORLD_SIZE)))

    @rule(values=BOTH, then=BOTH, at=INDICES, rank=RANKS)
    def fail_on_one_rank(
        self, values: list[list[float | None]], then: list[list[float | None]], at: int, rank: int
    ) -> None:
        self._fail(values, then, at, [rank])

    def _fail(
        self, values: list[list[float | None]], then: list[list[float | None]], at: int, failing: Sequence[int]
    ) -> None:
        at = next(i % len(SHAPES) for i in range(at, at + len(SHAPES)) if not self.frozen[i % len(SHAPES)])
        first, second = ([self._reaching(of_rank) for of_rank in each] for each in (values, then))
        for rank in failing:
            first[rank][at] = 1.0
            # Another one, so that a gradient is there when backward fails, and the engine knows of it.
            others = [i for i, frozen in enumerate(self.frozen) if not frozen and i != at]
            if not others:
                return
            first[rank][others[-1]] = 1.0
        self._nothing_is_left()
        for rank in failing:
            self.is_new[rank] = [False] * len(SHAPES)
        self._add(second)
        self._average(self.is_new)
        noticed = self._tell(
            "fail", *([first[rank], at if rank in failing else None, second[rank]] for rank in range(WORLD_SIZE))
        )
        assert all(noticed), f"only some ranks noticed that backward failed on {failing}: {noticed}"

    def _reaching(self, values: Sequence[float | None]) -> list[float | None]:
        """Frozen parameters get nothing, and at least one other gets something."""
        used = [None if frozen else value for frozen, value in zip(self.frozen, values, strict=True)]
        if all(value is None for value in used):
            used[self.frozen.index(False)] = 1.0
        return used

    def _nothing_is_left(self) -> None:
        for of_rank in self.mine:
            of_rank[:] = [None] * len(SHAPES)
        self.error = 0.0

    def _add(self, used: list[list[float | None]]) -> None:
        for rank, of_rank in enumerate(used):
            for index, value in enumerate(of_rank):
                if value is not None:
                    self.mine[rank][index] = (self.mine[rank][index] or 0.0) + value
                    self.is_new[rank][index] = True

    def _average(self, takes_part: list[list[bool]]) -> None:
        for index, frozen in enumerate(self.frozen):
            if frozen:
                continue
            grads = [of_rank[index] for of_rank in self.mine]
            if any(part[index] and grad is not None for part, grad in zip(takes_part, grads, strict=True)):
                mean = sum(grad or 0.0 for grad in grads) / WORLD_SIZE
                for of_rank in self.mine:
                    of_rank[index] = mean
            for of_rank in self.is_new:
                of_rank[index] = False
        largest = max((abs(grad) for of_rank in self.mine for grad in of_rank if grad is not None), default=0.0)
        self.error += MEAN_ERROR[self.wire] * (largest + 3.0)

    def _tell(self, name: str, *of_rank: Sequence[object]) -> list[object]:
        returned, grads, saturated = self.ranks.tell(name, *of_rank)
        assert not saturated, f"{name}: values were saturated"
        for rank, (actual, expected) in enumerate(zip(grads, self.mine, strict=True)):
            self._assert_equal(actual, expected, f"rank {rank} after {name}")
        return returned

    def _assert_equal(self, actual: Grads, expected: Sequence[float | None], where: str) -> None:
        for index, (values, value) in enumerate(zip(actual, expected, strict=True)):
            what = f"{where}: the gradient of parameter {index} is {values}, and should be {value} (±{self.error})"
            assert (values is None) == (value is None), what
            if values is not None and value is not None:
                assert all(math.isclose(each, value, rel_tol=0.0, abs_tol=self.error) for each in values), what


@contextmanager
def _ranks() -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(folder, timeout=200)
        try:
            yield ranks
        finally:
            ranks.close()


@pytest.mark.timeout(300)
def test_whatever_is_done_all_ranks_have_the_mean() -> None:
    """Always the same sequences: what has failed once fails again."""
    with _ranks() as ranks:

        class OnTheseRanks(Machine):
            pass

        OnTheseRanks.ranks = ranks
        run_state_machine_as_test(
            OnTheseRanks,
            settings=settings(
                derandomize=True,
                max_examples=200,
                stateful_step_count=25,
                deadline=None,
                database=None,
                phases=(Phase.generate,),  # smaller ones need ranks that still live
                suppress_health_check=list(HealthCheck),
            ),
        )

"""Choosing by measurement: predictions, the rule, the table, and what ranks decide."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import fastsync
from fastsync import Compression
from fastsync.autotune import Auto, GroupProfile, measure, measure_group
from fastsync.autotune.choose import SIZES, TOLERANCE, Candidate, choices, choose, compressions, explain
from fastsync.autotune.measure import candidates_of
from fastsync.sync.stats import BucketStats
from tests.engine.entry_points import average
from tests.models import assert_same_on_all_ranks, group_of_one
from tests.ranks import on_ranks
from tests.refused import refused

NONE, FP16, BF16 = Compression(), Compression("fp16"), Compression("bf16")
INT8 = Compression("int8", error_feedback=True, algorithm="two_shot")


def line(compression: Compression, latency: float, per_value: float) -> Candidate:
    return Candidate(compression, tuple((numel, latency + per_value * numel) for numel in (1000, SIZES[-1])))


PROFILE = GroupProfile(
    candidates=(
        line(NONE, 1e-3, 4e-8),
        line(FP16, 1.1e-3, 2e-8),
        line(INT8, 3e-3, 1e-8),
    )
)


def test_a_prediction_lies_between_the_points_beside_it() -> None:
    candidate = Candidate(NONE, ((100, 1.0), (200, 2.0), (400, 2.5)))
    assert [candidate.predict(numel) for numel in (100, 150, 200, 300, 400)] == [1.0, 1.5, 2.0, 2.25, 2.5]
    assert candidate.predict(1) == 1.0, "no sync is faster than the smallest that was measured"
    assert Candidate(NONE).predict(100) == 0.0


def test_a_lossier_candidate_has_to_earn_its_place() -> None:
    def chosen(none: float, fp16: float, bf16: float) -> Compression:
        times = zip((NONE, FP16, BF16), (none, fp16, bf16), strict=True)
        candidates = [Candidate(compression, ((1, seconds),)) for compression, seconds in times]
        return choose(candidates, 5).compression

    assert chosen(1.0, 1.0, 1.0) == NONE
    assert chosen(TOLERANCE, 1.0, 1.0) == NONE
    assert chosen(1.04, 1.0, 0.98) == FP16
    assert chosen(1.04, 1.0, 0.9) == BF16
    assert chosen(1.0, 2.0, 3.0) == NONE


def test_a_lossier_candidate_has_to_gain_more_than_the_noise_of_measuring() -> None:
    slow_none = Compression(reduce="fp32", algorithm="one_shot")

    def chosen(*noise: float) -> Compression:
        times = zip((slow_none, NONE, FP16, INT8), (1.3, 1.2, 1.02, 1.0), noise, strict=True)
        candidates = [Candidate(each, ((1, seconds),), ((1, part),)) for each, seconds, part in times]
        assert choose(candidates, 5).compression == choices(candidates)[0][1].compression
        return choose(candidates, 5).compression

    assert chosen(0.0, 0.0, 0.0, 0.0) == chosen(0.0, 0.05, 0.05, 0.05) == FP16
    assert chosen(0.15, 0.15, 0.15, 0.15) == NONE
    # Within a wire noise decides nothing: the fastest one loses as little.
    assert chosen(9.0, 9.0, 0.1, 0.1) == NONE


def test_candidates_come_from_the_least_lossy_to_the_lossiest() -> None:
    ways = (None, "one_shot", "two_shot")
    found = [(each.wire, each.algorithm, each.error_feedback) for each in compressions(["int8", "bf16", "none"], 4)]
    expected = [*(("none", way, False) for way in ways), *(("bf16", way, False) for way in ways)]
    assert found == [*expected, *(("int8", way, True) for way in ways[1:])]
    assert [each.wire for each in compressions(["bf16", "fp16"], 4)] == ["fp16"] * 3 + ["bf16"]
    assert {str(each) for each in compressions(["fp16"], 2)} == {"fp16, all_reduce", "fp16, one_shot"}
    for wires in (["fp8"], []):
        refused(lambda: compressions(wires, 4), "wires:")


def test_each_run_of_equal_buckets_is_explained_as_the_engine_sends_it() -> None:
    because = "1.6% slower than fp16, all_reduce, but loses less"
    assert explain(PROFILE.candidates, [250_000, 250_000, 6000], "shared memory").splitlines() == [
        "through: shared memory",
        "buckets 0-1, 250,000 values: int8, error feedback, two_shot; 5.500 ms predicted; the fastest",
        f"bucket 2, 6,000 values: none, all_reduce; 1.240 ms predicted; {because}",
    ]
    assert explain([Candidate(FP16)], [7], "process group").splitlines()[1:] == [
        "bucket 0, 7 values: fp16, all_reduce; given"
    ]
    border = choices(PROFILE.candidates)[0][0]
    for numel, wire in ((border, "none"), (border + 1, "fp16")):
        assert f" values: {wire}, " in explain(PROFILE.candidates, [numel], "")
        assert PROFILE.choose(numel).wire == wire


@contextmanager
def measured(profile: GroupProfile) -> Iterator[None]:
    """In place of measuring, for what is decided to be known."""

    def measure_group(group: object, *, wires: Sequence[str], **options: object) -> GroupProfile:
        return replace(profile, candidates=tuple(each for each in profile.candidates if each.compression.wire in wires))

    with mock.patch.object(measure, "measure_group", measure_group):
        yield


def test_what_is_not_allowed_is_not_chosen_and_complex_gradients_stay_whole() -> None:
    with group_of_one():
        measured_alone = measure_group(wires=(wire for wire in ("none", "int8"))).candidates
        assert [candidate.points for candidate in measured_alone] == [()] * len(measured_alone)

        def wires(compression: Auto, parameter: torch.Tensor) -> set[str]:
            candidates = candidates_of(compression, dist.group.WORLD, {"weight": parameter})
            return {candidate.compression.wire for candidate in candidates}

        real = torch.ones(3, requires_grad=True)
        assert wires(Auto(), real) == {"none", "fp16", "bf16"}
        assert wires(Auto(("int8",)), real) == {"none", "fp16", "bf16", "int8"}
        whole = torch.ones(3, dtype=torch.complex64, requires_grad=True)
        assert wires(Auto(("int8",)), whole) == {"none"}


RISES = st.lists(st.floats(1.0, 13.0), min_size=1, max_size=4)
"""How many times as long eight times as many values take."""


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1e-6, 1.0), RISES), min_size=1, max_size=5), st.integers(1, SIZES[-1]))
def test_what_is_chosen_is_nearly_as_fast_as_the_fastest_at_every_size(
    times: list[tuple[float, list[float]]], some_numel: int
) -> None:
    candidates = []
    for compression, (first, rises) in zip(compressions(["none", "fp16", "bf16"], world_size=4), times, strict=False):
        seconds = itertools.accumulate([first, *rises], operator.mul)
        candidates.append(Candidate(compression, tuple((4096 * 8**index, each) for index, each in enumerate(seconds))))
    rows = choices(candidates)
    borders = [numel for numel, _ in rows]
    assert borders == sorted(set(borders))
    assert borders[-1] == SIZES[-1]
    numels = np.array([1, some_numel, *borders, *(border + 1 for border in borders[:-1])])
    seconds = np.stack([candidate.predict(numels) for candidate in candidates])
    for numel, of_each in zip(numels, seconds.T, strict=True):
        chosen = candidates.index(next(candidate for most, candidate in rows if numel <= most))
        assert of_each[chosen] <= 1.05 * of_each.min()
        assert all(of_each[:chosen] > 1.01 * of_each.min()), "a less lossy one is as fast"


@on_ranks(2)
def test_each_bucket_travels_as_was_chosen_for_its_size(rank: int, world_size: int) -> None:
    profile = replace(
        PROFILE, candidates=(*PROFILE.candidates[:2], Candidate(BF16, ((1, 1.0),)), PROFILE.candidates[2])
    )
    model = torch.nn.Sequential(torch.nn.Linear(10, 100, bias=False), torch.nn.Linear(100, 300, bias=False))
    for name in ("hook", "attach"):
        with measured(profile):
            given = average(name, copy.deepcopy(model), Auto(("int8",)))
        sync, forward = given.handle, given.model
        refused(lambda: sync.explain(), "buckets are made when the first backward is", kind=RuntimeError)
        for _ in range(3):  # DDP makes other buckets after the first
            forward(torch.full((4, 10), 1.0 + rank)).sum().backward()
        assert sync.explain().splitlines()[1:] == [
            "bucket 0, 30,000 values: fp16, all_reduce; 1.700 ms predicted; the fastest",
            "bucket 1, 1,000 values: none, all_reduce; 1.040 ms predicted; the fastest",
        ]
        width = {bucket.numel: bucket.wire_bytes / bucket.numel for bucket in _newest_step(sync, forward)}
        assert width[1000] == pytest.approx(4, abs=0.2)
        assert width[30_000] == pytest.approx(2, abs=0.1)

        sync.compression = "auto"
        assert sync.compression == Auto()
        assert "1.040" not in sync.explain(), "the time that was measured before"
        forward(torch.full((4, 10), 1.0 + rank)).sum().backward()
        assert_same_on_all_ranks([parameter.grad for parameter in forward.parameters()])


def _newest_step(sync: Any, forward: torch.nn.Module) -> list[BucketStats]:
    """The buckets of one more step, with what that step alone has sent."""
    before = sync.stats().buckets
    forward(torch.ones(4, 10)).sum().backward()
    after = sync.stats().buckets
    return [
        replace(late, wire_bytes=late.wire_bytes - early.wire_bytes) for early, late in zip(before, after, strict=True)
    ]


@on_ranks(2)
def test_gradients_are_averaged_at_once_as_was_chosen(rank: int, world_size: int) -> None:
    """What travels shows in the result: 1 + 2**-12 takes more bits than fp16 has."""
    profile = replace(PROFILE, candidates=(*PROFILE.candidates[:2], Candidate(BF16, ((1, 1.0),))))
    for numel, expected in ((1000, 2.0 + 2.0**-11), (30_000, 2.0)):
        weight = torch.zeros(numel, requires_grad=True)
        for _ in range(2):
            weight.grad = torch.full((numel,), (1.0 + 2.0**-12) * (1 + 2 * rank))
            with measured(profile):
                fastsync.all_reduce_gradients([weight], "auto")
            assert weight.grad.unique().tolist() == [expected]


@on_ranks(2)
def test_ranks_hold_the_same_profile(rank: int, world_size: int) -> None:
    before = torch.random.get_rng_state()
    profile = measure_group()
    assert torch.equal(before, torch.random.get_rng_state()), "training would see other random numbers"
    weight = torch.zeros(1000, requires_grad=True)
    weight.grad = torch.full((1000,), 1.0 + rank)
    fastsync.all_reduce_gradients([weight], "auto")  # which measures
    assert weight.grad.unique().tolist() == [1.5]
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, profile)
    assert everyones == [profile] * world_size
    sizes = {tuple(numel for numel, _ in candidate.points) for candidate in profile.candidates}
    assert len(sizes) == 1, "every candidate has a time at every size"
    assert min(seconds for candidate in profile.candidates for _, seconds in candidate.points) > 0


@on_ranks(2, timeout=60)
def test_a_rank_that_measures_alone_is_told_when_the_time_limit_is_over(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank == 0:
        refused(lambda: measure_group(group), "fastsync: measuring failed on rank 0 of 2; does", kind=RuntimeError)
    dist.barrier()

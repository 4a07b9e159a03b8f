"""The state and the statistics of an attached engine: a resumed run is the run that was not interrupted, to the bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import fastsync
from fastsync.autotune.candidates import Candidate, compressions, engine_schedule
from fastsync.autotune.plan import Plan
from fastsync.stats import BucketStats
from tests.models import (
    SMALL_BUCKETS,
    STAMP,
    Given,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    batch,
    grads_of,
    group_of_one,
    random_grads,
)
from tests.ranks import run_ranks

SHAPES = [(300,), (260,), (100, 4)]


def _wide(rank: int, step: int) -> list[Tensor]:
    """Gradients of such a range that the scale decides about how the small ones are rounded to fp16."""
    first, second, third = random_grads(rank, step, SHAPES, torch.float32)
    return [1e3 * first, second * torch.logspace(0, -8, 260), 1e-6 * third]


def _attached(bucket_cap_mb: float) -> tuple[Given, fastsync.GradientSynchronizer]:
    model = Given(_wide(0, 0))
    return model, fastsync.attach(model, "fp16", bucket_cap_mb=bucket_cap_mb)


def _run(model: Given, rank: int, steps: range) -> list[list[Tensor]]:
    grads = []
    for step in steps:
        model.zero_grad()
        # Large at first, so that the scales are still on their way up when the state is saved.
        model([grad * (2.0**12 if step == 0 else 1.0) for grad in _wide(rank, step)]).backward()
        grads.append([grad.clone() for grad in grads_of(model)])
    return grads


def _save(rank: int, world_size: int) -> list[dict[str, Any]]:
    saved = []
    for cap in (SMALL_BUCKETS, 25):
        model, sync = _attached(cap)
        _run(model, rank, range(4))
        state = copy.deepcopy(sync.state_dict())
        saved.append({"cap": cap, "state": state, "grads": _run(model, rank, range(4, 7))})
        fresh, _ = _attached(cap)
        without_state = _run(fresh, rank, range(4, 5))
        assert not torch.equal(without_state[0][1], saved[-1]["grads"][0][1]), "the scales do not matter here"
    return saved


def _resume(rank: int, world_size: int, saved_by_rank: list[list[dict[str, Any]]]) -> None:
    for saved in saved_by_rank[rank]:
        model, sync = _attached(saved["cap"])
        sync.load_state_dict(saved["state"])
        assert sync.state_dict() == saved["state"]
        for step, (actual, expected) in enumerate(zip(_run(model, rank, range(4, 7)), saved["grads"], strict=True)):
            assert_all_bitwise_equal(actual, expected, f"cap {saved['cap']}, step {step}")


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped() -> None:
    run_ranks(_resume, 2, run_ranks(_save, 2))


def _steps(model: nn.Module, rank: int, steps: range) -> list[list[Tensor]]:
    grads = []
    for step in steps:
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        grads.append([grad.clone() for grad in grads_of(model) if grad is not None])
    return grads


def _distributed_checkpoint(rank: int, world_size: int, folder: str, compression: Any, door: str) -> None:
    """Each rank gets back what it has not sent itself, into an engine that has not begun."""

    def begin() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        if door == "attach":
            model: nn.Module = Mlp()
            return model, fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS)
        model = DistributedDataParallel(Mlp())
        return model, fastsync.register_comm_hook(model, compression)

    model, sync = begin()
    _steps(model, rank, range(4))
    state = sync.state_dict()
    assert len(state["residuals"]) == len(list(model.parameters()))
    dcp.save({"sync": state}, checkpoint_id=folder)
    expected = _steps(model, rank, range(4, 7))

    resumed, sync = begin()
    resumed.load_state_dict(model.state_dict())
    loaded = {"sync": sync.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    sync.load_state_dict(loaded["sync"])
    for name, residual in sync.state_dict()["residuals"].items():
        assert torch.equal(residual["own"], state["residuals"][name]["own"])
    if door == "hook":
        return  # DDP regroups its buckets after one backward
    for step, (actual, grads) in enumerate(zip(_steps(resumed, rank, range(4, 7)), expected, strict=True)):
        assert_all_bitwise_equal(actual, grads, f"step {step}")

    older = {name.split(" of ")[0]: residual for name, residual in state["residuals"].items()}
    again, sync = begin()
    sync.load_state_dict(state | {"residuals": older})
    for actual, grads in zip(_steps(again, rank, range(4, 7)), expected, strict=True):
        assert_all_bitwise_equal(actual, grads, "without ranks in names")
    others = {name.replace(f"rank {rank}", f"rank {1 - rank}"): kept for name, kept in state["residuals"].items()}
    with pytest.warns(UserWarning, match=f"of rank {1 - rank}'. and nothing of rank {rank}, which begins without"):
        sync.load_state_dict(state | {"residuals": others})
    elsewhere = {f"no_{name}": kept for name, kept in others.items()}
    with pytest.raises(ValueError, match=f"of rank {1 - rank}'; is it another model's state"):
        sync.load_state_dict(state | {"residuals": elsewhere})


@pytest.mark.parametrize("door", ["attach", "hook"])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_a_distributed_checkpoint_keeps_ranks_apart(tmp_path: Path, algorithm: str, door: str) -> None:
    compression = fastsync.Compression("bf16", reduce="fp32", error_feedback=True, algorithm=algorithm)
    run_ranks(_distributed_checkpoint, 2, str(tmp_path), compression, door)


def _before_error_feedback(rank: int, world_size: int, folder: str) -> None:
    """A checkpoint has no place for what a schedule begins later."""
    schedule = {0: "bf16", 2: "int8+ef"}
    model = Mlp()
    sync = fastsync.attach(model, schedule)
    _steps(model, rank, range(1))
    dcp.save({"sync": sync.state_dict()}, checkpoint_id=folder)
    resumed = fastsync.attach(Mlp(), schedule)
    loaded = {"sync": resumed.state_dict()}
    dcp.load(loaded, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    resumed.load_state_dict(loaded["sync"])
    assert resumed.state_dict()["step"] == 1
    assert resumed.state_dict()["residuals"] == {}


def test_a_distributed_checkpoint_before_error_feedback_begins(tmp_path: Path) -> None:
    run_ranks(_before_error_feedback, 2, str(tmp_path))


def _of_rank_0_alone(rank: int, world_size: int, file: str, compression: str) -> None:
    model = Mlp()
    sync = fastsync.attach(model, compression)
    _steps(model, rank, range(3))
    if rank == 0:
        torch.save({"model": model.state_dict(), "sync": sync.state_dict()}, file)
    dist.barrier()
    saved = torch.load(file)
    for resumed_with in (compression, "none"):
        resumed = Mlp()
        resumed.load_state_dict(saved["model"])
        again = fastsync.attach(resumed, resumed_with)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again.load_state_dict(saved["sync"])
        said = [str(warning.message) for warning in caught]
        assert len(said) == (0 if rank == 0 else 1), said
        assert all(f"nothing of rank {rank}, which begins without" in each for each in said)
        assert bool(again.state_dict()["residuals"]) == (rank == 0)
        assert again.state_dict()["step"] == 3
        _steps(resumed, rank, range(3, 5))
        assert_same_on_all_ranks(grads_of(resumed))
        again.detach()


@pytest.mark.parametrize("compression", ["int8+ef", "bf16+ef+two_shot"])
def test_what_rank_0_has_saved_loads_on_all(tmp_path: Path, compression: str) -> None:
    run_ranks(_of_rank_0_alone, 2, str(tmp_path / "state.pt"), compression)


def _without_zeros(rank: int, world_size: int) -> None:
    points = {"none": 1e-6, "int8": 1.0}
    profile_of = [Candidate(each, ((1, points[each.wire]),)) for each in compressions(("none", "int8"), world_size)]
    for asked in ({0: "none", 100: "int8+ef"}, "int8+ef", "auto:int8"):
        used, unused = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(300))
        sync = fastsync.attach([used, unused], "none" if asked == "auto:int8" else asked)
        if asked == "auto:int8":  # as if it had measured that full width is the fastest
            sync._plan = Plan(((0, tuple(profile_of)),))
            sync._engine.set_schedule(engine_schedule(sync._plan.phases))
        assert sync.state_dict()["residuals"].keys() == {f"{name} of rank {rank}" for name in ("0", "1")}
        (used * torch.linspace(-1.0, 1.0, 300)).sum().backward()
        expected = {f"0 of rank {rank}"} if asked == "int8+ef" else set()
        assert sync.state_dict()["residuals"].keys() == expected, asked


def test_zeros_are_not_saved() -> None:
    """Where the schedule has not come to error feedback, where auto has chosen none, and of what is not used."""
    run_ranks(_without_zeros, 2)


def test_bad_states_are_refused() -> None:
    with group_of_one():
        model = nn.Linear(2, 2)
        sync = fastsync.attach(model, "fp16")
        for state, message in (
            ({}, "expected what state_dict"),
            ({"scales": {"bias": 3.0}}, "the scale of 'bias' is 3.0, not a power of two"),
            ({"scales": {"layer.bias": 2.0}}, "no parameter named 'layer.bias'"),
        ):
            with pytest.raises(ValueError, match=message):
                sync.load_state_dict(state)
        sync.load_state_dict({"scales": {"weight": 4.0}})
        assert sync.state_dict()["scales"] == {"weight": 4.0}


def _stats_add_up(rank: int, world_size: int) -> None:
    for wire, itemsize in {"none": 4, "bf16": 2, "fp16": 2}.items():
        model = Mlp()
        sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
        empty = sync.stats()
        assert (empty.num_steps, empty.num_syncs, empty.elements, empty.wire_bytes, empty.buckets) == (0, 0, 0, 0, ())
        for step in range(1, 4):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            stats = sync.stats()
            num_flags = len(list(model.parameters())) + STAMP * world_size
            assert stats.num_steps == step
            assert stats.elements == sum(bucket.elements for bucket in stats.buckets) == 8082
            assert stats.num_syncs == step * len(stats.buckets)
            assert stats.wire_bytes == step * (_num_on_wire(stats.buckets) + num_flags) * itemsize
        for bucket in stats.buckets:
            assert bucket.num_syncs == 3
            assert min(bucket.pack_time, bucket.collective_time, bucket.unpack_time) > 0
        for part in ("wire_bytes", "pack_time", "collective_time", "unpack_time"):
            assert getattr(stats, part) == pytest.approx(sum(getattr(bucket, part) for bucket in stats.buckets))
        assert 0 < stats.exposed_time < stats.pack_time + stats.collective_time + stats.unpack_time
        # What is laid out anew keeps its totals.
        model.layers[0].requires_grad_(False)
        model.zero_grad()
        model(batch(rank, 4)).square().mean().backward()
        later = sync.stats()
        assert later.elements == 8082 - 64 * 33
        num_sent = _num_on_wire(later.buckets) + num_flags - 2
        assert later.wire_bytes - stats.wire_bytes == num_sent * itemsize


def _num_on_wire(buckets: Sequence[BucketStats]) -> int:
    """Each bucket has at most one gradient whose size is no multiple of 8, and it is not the last."""
    return sum(-(-bucket.elements // 8) * 8 for bucket in buckets)


def test_stats_add_up() -> None:
    run_ranks(_stats_add_up, 2, shared_memory=False)


def _norm_of_all_gradients(rank: int, world_size: int) -> None:
    model = Given(_wide(0, 0))
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(3):
        grads: list[Tensor | None] = list(_wide(rank, step))
        if step == 1 and rank == 0:
            grads[0] = None
        if step == 2:
            grads[2] = None  # it keeps the gradient of the step before
        else:
            model.zero_grad()
        model(grads).backward()
        expected = nn.utils.get_total_norm([grad.double() for grad in grads_of(model)])
        torch.testing.assert_close(sync.grad_stats.grad_norm.double(), expected, rtol=1e-6, atol=0.0)


def test_the_norm_is_that_of_all_gradients() -> None:
    run_ranks(_norm_of_all_gradients, 2)


def _profile_each_part(rank: int, world_size: int) -> dict[str, int]:
    model = Given([torch.ones(300), torch.ones(300)])
    sync = fastsync.attach(model, "fp16", bucket_cap_mb=SMALL_BUCKETS)
    for _ in range(2):
        loss = model([torch.ones(300), torch.ones(300)])
        with profile() as profiler:
            loss.backward()
    assert (sync.stats().wire_bytes > 0) == (world_size > 1)
    return {event.key: event.count for event in profiler.key_averages()}


PARTS = ("fastsync::pack", "fastsync::wait", "fastsync::unpack")


def test_the_profiler_shows_each_part() -> None:
    for counts in run_ranks(_profile_each_part, 2, shared_memory=False):
        assert {part: counts.get(part) for part in (*PARTS, "gloo:all_reduce")} == dict.fromkeys(
            (*PARTS, "gloo:all_reduce"), 2
        )


def test_a_rank_alone_sends_nothing() -> None:
    with group_of_one():
        counts = _profile_each_part(0, 1)
    assert {part: counts.get(part) for part in PARTS} == dict.fromkeys(PARTS, 2)
    assert "gloo:all_reduce" not in counts


def test_a_scale_that_was_loaded_is_no_longer_saved_after_zeros() -> None:
    with group_of_one():
        model = Given([torch.zeros(3)])
        sync = fastsync.attach(model, "fp16")
        sync.load_state_dict({"scales": {"weights.0": 4.0}})
        model([torch.zeros(3)]).backward()
        assert sync.state_dict()["scales"] == {}

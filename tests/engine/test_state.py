"""state_dict: a run that is resumed in a new process goes on, to the bit, as the run that was not interrupted."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fastsync
from fastsync.sync.compression import AnyCompression
from tests.engine.entry_points import Averaged, average
from tests.engine.same_data import same_data_is_meant
from tests.engine.stderr import NOTHING_UNUSED, expected_on_stderr
from tests.models import (
    Given,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    backward_of,
    batch,
    given_ddp,
    grads_of,
    group_of_one,
    random_grads,
)
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

SHAPES = [(300,), (260,), (100, 4)]
FEEDBACK = fastsync.Compression("int8", error_feedback=True)
WITH_STATE = ["hook", "attach", "synchronize"]
each_with_state = pytest.mark.parametrize("entry_point", WITH_STATE)


def _wide(rank: int, step: int) -> list[Tensor]:
    """Gradients of such a range that the scale decides about how the small ones are rounded to fp16."""
    first, second, third = random_grads(rank, step, SHAPES, torch.float32)
    large = 2.0**12 if step == 0 else 1.0  # so that the scales are still on their way up when the state is saved
    return [large * 1e3 * first, large * second * torch.logspace(0, -8, 260), large * 1e-6 * third]


def _begin(entry_point: str, cap: float, compression: AnyCompression) -> Averaged:
    options = {"find_unused_parameters": True} if "hook" in entry_point else {}
    return average(entry_point, Given(_wide(0, 0)), compression, bucket_cap_mb=cap, **options)


def _steps_of(given: Averaged, rank: int, steps: range) -> list[list[Tensor | None]]:
    return [given.step(_wide(rank, step)) for step in steps]


def _warning_of(entry_point: str) -> AbstractContextManager[None]:
    return expected_on_stderr(NOTHING_UNUSED) if "hook" in entry_point else nullcontext()


RESUMED: dict[int, list[tuple[str, AnyCompression]]] = {
    2: [(each, "fp16") for each in WITH_STATE],
    4: [("attach", replace(FEEDBACK, ranks_per_node=2))],
}
CAPS = (2.0**-20, 25)


def _save(rank: int, world_size: int) -> list[dict[str, Any]]:
    saved = []
    for entry_point, compression in RESUMED[world_size]:
        with _warning_of(entry_point):
            for cap in CAPS:
                given = _begin(entry_point, cap, compression)
                _steps_of(given, rank, range(4))
                state = copy.deepcopy(given.handle.state_dict())
                saved.append({"state": state, "grads": _steps_of(given, rank, range(4, 7))})
                without_state = _steps_of(_begin(entry_point, cap, compression), rank, range(4, 5))
                assert not torch.equal(without_state[0][1], saved[-1]["grads"][0][1]), "the state does not matter here"
    return saved


def _resume(rank: int, world_size: int, saved_by_rank: list[list[dict[str, Any]]]) -> None:
    of_rank = iter(saved_by_rank[rank])
    for entry_point, compression in RESUMED[world_size]:
        with _warning_of(entry_point):
            for cap in CAPS:
                saved, given = next(of_rank), _begin(entry_point, cap, compression)
                given.handle.load_state_dict(saved["state"])
                assert given.handle.state_dict()["scales"] == saved["state"]["scales"]
                for step, expected in enumerate(saved["grads"]):
                    averaged = given.step(_wide(rank, 4 + step))
                    what = f"{entry_point}, cap {cap}, step {step}"
                    assert_all_bitwise_equal(averaged, expected, what)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", RESUMED)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(world_size: int) -> None:
    saved = run_ranks(_save, world_size)
    for of_ranks in zip(*saved, strict=True):
        scales = [each["state"]["scales"] for each in of_ranks]
        assert scales[0] == scales[1]
        assert all(math.frexp(scale)[0] == 0.5 for scale in scales[0].values())
    run_ranks(_resume, world_size, saved)


ODD_SHAPES = [(3,), (5, 7), (9,)]  # of no multiples of what gradients are aligned to on the wire


@on_ranks(2, cases={"shared_memory": [True, False]}, timeout=40.0)
def test_a_compression_without_error_feedback_drops_residuals(rank: int, world_size: int) -> None:
    """What a rank holds does not change where gradients lie on the wire, nor the means."""
    same_data_is_meant()
    for wire in ("bf16", "fp16", "none"):
        for reduce in ("wire", "fp32"):
            ddp = given_ddp([torch.ones(shape) for shape in ODD_SHAPES])
            hook = fastsync.register_comm_hook(ddp, fastsync.Compression(wire, reduce))
            kept = {
                f"weights.{index} of rank 1": torch.full((math.prod(shape),), 64.0)
                for index, shape in enumerate(ODD_SHAPES)
            }
            hook.load_state_dict({**hook.state_dict(), "residuals": kept if rank == 1 else {}})
            # Whole numbers that are powers of two, which every wire carries.
            grads = [torch.full(shape, 2.0 ** (index + 1)) for index, shape in enumerate(ODD_SHAPES)]
            for step in range(3):
                assert_all_bitwise_equal(backward_of(ddp, grads), grads, f"{wire}, {reduce}, step {step}: gradient")
            assert hook.state_dict()["residuals"] == {}


def _steps(model: nn.Module, rank: int, steps: range) -> list[list[Tensor]]:
    grads = []
    for step in steps:
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        grads.append([grad.clone() for grad in grads_of(model)])
    return grads


@on_ranks(2, cases={"algorithm": ["one_shot", "two_shot"], "entry_point": ["attach", "hook"]})
def test_a_distributed_checkpoint_keeps_ranks_apart(
    rank: int, world_size: int, algorithm: Any, entry_point: str, tmp_path: Path
) -> None:
    """Each rank gets back what it has not sent itself, into an engine that has not begun."""
    compression = fastsync.Compression("bf16", reduce="fp32", error_feedback=True, algorithm=algorithm)
    folder = tmp_path / f"{algorithm} {entry_point}"

    def begin() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        given = average(entry_point, Mlp(), compression)
        return given.model, given.handle

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
        assert torch.equal(residual, state["residuals"][name])
    if entry_point == "hook":
        return  # DDP regroups its buckets after one backward
    for step, (actual, grads) in enumerate(zip(_steps(resumed, rank, range(4, 7)), expected, strict=True)):
        assert_all_bitwise_equal(actual, grads, f"step {step}")

    others = {name.replace(f"rank {rank}", f"rank {1 - rank}"): kept for name, kept in state["residuals"].items()}
    _, sync = begin()
    with pytest.warns(UserWarning, match=f"of rank {1 - rank}'. and none of rank {rank}, which begins with zeros"):
        sync.load_state_dict(state | {"residuals": others})
    elsewhere = {f"no_{name}": kept for name, kept in others.items()}
    with pytest.raises(ValueError, match=f"of rank {1 - rank}'; is it another model's state"):
        sync.load_state_dict(state | {"residuals": elsewhere})


@on_ranks(2)
def test_what_rank_0_has_saved_loads_on_all(rank: int, world_size: int, tmp_path: Path) -> None:
    model, file = Mlp(), tmp_path / "state.pt"
    sync = fastsync.attach(model, FEEDBACK)
    _steps(model, rank, range(3))
    if rank == 0:
        torch.save({"model": model.state_dict(), "sync": sync.state_dict()}, file)
    dist.barrier()
    saved = torch.load(file)
    for resumed_with in (FEEDBACK, "none"):
        resumed = Mlp()
        resumed.load_state_dict(saved["model"])
        again = fastsync.attach(resumed, resumed_with)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again.load_state_dict(saved["sync"])
        said = [str(warning.message) for warning in caught]
        assert len(said) == (0 if rank == 0 else 1), said
        assert all(f"none of rank {rank}, which begins with zeros" in each for each in said)
        assert bool(again.state_dict()["residuals"]) == (rank == 0)
        assert again.state_dict()["step"] == 3
        _steps(resumed, rank, range(3, 5))
        assert_same_on_all_ranks(grads_of(resumed))
        again.detach()


@on_ranks(2)
def test_zeros_are_not_saved(rank: int, world_size: int) -> None:
    """Of what is not used, once the sync has begun."""
    same_data_is_meant()
    used, unused = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(300))
    sync = fastsync.attach([used, unused], FEEDBACK)
    assert sync.state_dict()["residuals"].keys() == {f"{name} of rank {rank}" for name in ("0", "1")}
    (used * torch.linspace(-1.0, 1.0, 300)).sum().backward()
    assert sync.state_dict()["residuals"].keys() == {f"0 of rank {rank}"}


# ---- what a state does to scales ------------------------------------------------------------------------------------


def test_a_bucket_takes_the_smallest_scale_that_was_saved_for_its_parameters() -> None:
    with group_of_one():
        for large in (0, 1):
            ddp = given_ddp([torch.ones(3), torch.ones(3)])
            hook = fastsync.register_comm_hook(ddp, "fp16")
            scales = {f"weights.{index}": 2.0**-4 if index == large else 2.0**10 for index in range(2)}
            hook.load_state_dict({"scales": scales})
            # One bucket: with the scale 2^10 of the other parameter, 4096 would saturate.
            averaged = backward_of(ddp, [torch.full((3,), 4096.0 if index == large else 1.0) for index in range(2)])
            assert averaged[large].tolist() == [4096.0] * 3
            assert hook.grad_stats().num_saturated.item() == 0
            assert hook.state_dict()["scales"] == {"weights.0": 2.0**-3, "weights.1": 2.0**-3}


@each_with_state
def test_a_state_replaces_all_that_was_there(entry_point: str) -> None:
    with group_of_one():
        given = average(
            entry_point,
            Given([torch.ones(2), torch.ones(3)]),
            "fp16",
            bucket_cap_mb=2.0**-20,
            **({"find_unused_parameters": True} if "hook" in entry_point else {}),
        )
        handle = given.handle
        assert handle.state_dict()["scales"] == {}
        handle.load_state_dict({"scales": {"weights.0": 2.0, "weights.1": 4.0}})
        handle.load_state_dict({"scales": {"weights.1": 8.0}})
        assert handle.state_dict()["scales"] == {"weights.1": 8.0}
        given.step([torch.tensor([1.0, -2.0]), torch.zeros(3)])
        # 2 goes to 2^9; after nothing but zeros the scale is found out with the next step.
        assert handle.state_dict()["scales"] == {"weights.0": 2.0**8}
        handle.load_state_dict({"scales": {"weights.0": 2.0, "weights.1": 4.0}})
        assert handle.state_dict()["scales"] == {"weights.0": 2.0, "weights.1": 4.0}, "lost with what went before"
        given.step([torch.ones(2), torch.ones(3)])
        handle.load_state_dict({"scales": {"weights.0": 2.0**-8, "weights.1": 4.0}})
        assert handle.state_dict()["scales"] == {"weights.0": 2.0**-8, "weights.1": 4.0}
        given.step([torch.ones(2), torch.ones(3)])
        assert handle.state_dict()["scales"] == {"weights.0": 2.0**-7, "weights.1": 8.0}


@each_with_state
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(entry_point: str) -> None:
    with group_of_one():
        given = average(entry_point, Given([torch.ones(2), torch.ones(3)]), "fp16")
        given.step([torch.ones(2), torch.ones(3)])
        before = given.handle.state_dict()
        scales = {"weights.0": 2.0, "weights.7": 2.0}
        refused(lambda: given.handle.load_state_dict({"scales": scales}), "no parameter named 'weights.7'")
        assert given.handle.state_dict() == before
        for state in ({}, {"scales": None}):
            refused(lambda: given.handle.load_state_dict(state), "state_dict:")


@on_ranks(2, cases={"entry_point": WITH_STATE, "without": [{"residuals": {}}, {"residuals": None}, {}]})
def test_residuals_may_be_taken_out_of_a_state(
    rank: int, world_size: int, entry_point: str, without: dict[str, Any]
) -> None:
    """As with another number of ranks. The scales go on."""
    grads = random_grads(rank, 0, SHAPES, torch.float32)
    given = average(entry_point, Given(grads), "fp16")
    given.step(grads)
    state = given.handle.state_dict()
    assert state["scales"]
    del state["residuals"]
    handle = average(entry_point, Given(grads), "fp16").handle
    handle.load_state_dict(state | without)
    assert handle.state_dict()["scales"] == state["scales"]

"""state_dict: a run that is resumed in a new process goes on with the scales it had."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.models import (
    SMALL_BUCKETS,
    Given,
    Mlp,
    assert_all_bitwise_equal,
    backward_of,
    batch,
    given_ddp,
    grads_of,
    group_of_one,
    random_grads,
    train_step,
)
from tests.ranks import run_ranks

SHAPES = [(300,), (260,), (400,)]
# DDP keeps these buckets from the first step on, one for each parameter.
KEPT_BUCKETS = {"find_unused_parameters": True, "bucket_cap_mb": 2.0**-20}


def _wide(rank: int, step: int) -> list[Tensor]:
    """Gradients of such a range that the scale decides about how the small ones are rounded to fp16."""
    grads = random_grads(rank, step, SHAPES, torch.float32)
    shrink = torch.logspace(0, -8, 260)
    return [1e3 * grads[0], grads[1] * shrink, 1e-6 * grads[2]]


def _save(rank: int, world_size: int) -> dict[str, Any]:
    ddp = given_ddp(_wide(rank, 0), **KEPT_BUCKETS)
    hook = fastsync.register_comm_hook(ddp, "fp16")
    # Large at first, so that the scales are still on their way up when the state is saved.
    backward_of(ddp, [2.0**12 * grad for grad in _wide(rank, 0)])
    for step in range(1, 4):
        backward_of(ddp, _wide(rank, step))
    saved = {"kept": copy.deepcopy(hook.state_dict())}
    saved["kept steps"] = [backward_of(ddp, _wide(rank, step)) for step in range(4, 7)]

    fresh = given_ddp(_wide(rank, 0), **KEPT_BUCKETS)
    fastsync.register_comm_hook(fresh, "fp16")
    without_state = backward_of(fresh, _wide(rank, 4))
    assert not torch.equal(without_state[1], saved["kept steps"][0][1]), "the scales do not matter: nothing is shown"

    torch.manual_seed(1)
    ddp = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL_BUCKETS)
    hook = fastsync.register_comm_hook(ddp, "fp16")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        train_step(ddp, optimizer, batch(rank, step))
    saved["model"] = copy.deepcopy(ddp.module.state_dict())
    saved["rebuilt"] = hook.state_dict()
    saved["rebuilt steps"] = []
    for step in range(4, 7):
        train_step(ddp, optimizer, batch(rank, step))
        saved["rebuilt steps"].append([grad.clone() for grad in grads_of(ddp)])
    return saved


def _resume(rank: int, world_size: int, saved_by_rank: list[dict[str, Any]]) -> None:
    saved = saved_by_rank[rank]
    ddp = given_ddp(_wide(rank, 0), **KEPT_BUCKETS)
    hook = fastsync.register_comm_hook(ddp, "fp16")
    hook.load_state_dict(saved["kept"])
    assert hook.state_dict() == saved["kept"]
    for number, expected in enumerate(saved["kept steps"]):
        assert_all_bitwise_equal(backward_of(ddp, _wide(rank, 4 + number)), expected, f"kept: step {number}, gradient")

    # Here the buckets that were saved are not those that DDP starts with. The values are the same all the same, as long
    # as none is so small beside its bucket that the scale decides about its rounding.
    model = Mlp()
    model.load_state_dict(saved["model"])
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    hook = fastsync.register_comm_hook(ddp, "fp16")
    hook.load_state_dict(saved["rebuilt"])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number, expected in enumerate(saved["rebuilt steps"]):
        train_step(ddp, optimizer, batch(rank, 4 + number))
        assert_all_bitwise_equal(grads_of(ddp), expected, f"rebuilt: step {number}, gradient")


def test_a_run_resumed_in_new_processes_is_bitwise_the_uninterrupted_one() -> None:
    saved_by_rank = run_ranks(_save, 2)
    for kind in ("kept", "rebuilt"):
        scales = [saved[kind]["scales"] for saved in saved_by_rank]
        assert scales[0] == scales[1]
        assert len(set(scales[0].values())) > 1
        assert all(math.frexp(scale)[0] == 0.5 for scale in scales[0].values())
    run_ranks(_resume, 2, saved_by_rank)


ODD_SHAPES = [(3,), (5, 7), (9,)]  # of no multiples of what gradients are aligned to on the wire


def _residuals_of_one_rank(rank: int, world_size: int) -> None:
    """What a rank holds does not change where gradients lie on the wire; it is sent with the next step, as ever."""
    for wire in ("bf16", "fp16", "none"):
        for reduce in ("wire", "fp32"):
            ddp = given_ddp([torch.ones(shape) for shape in ODD_SHAPES])
            hook = fastsync.register_comm_hook(ddp, fastsync.Compression(wire, reduce))
            kept = {
                f"weights.{index} of rank 1": {"own": torch.full((math.prod(shape),), 64.0), "of_sums": None}
                for index, shape in enumerate(ODD_SHAPES)
            }
            hook.load_state_dict({**hook.state_dict(), "residuals": kept if rank == 1 else {}})
            # Whole numbers that are powers of two, which every wire carries.
            grads = [torch.full(shape, 2.0 ** (index + 1)) for index, shape in enumerate(ODD_SHAPES)]
            for step in range(3):
                mean = backward_of(ddp, grads)
                expected = [grad + (32.0 if step == 0 else 0.0) for grad in grads]
                assert_all_bitwise_equal(mean, expected, f"{wire}, {reduce}, step {step}: gradient")
            assert hook.state_dict()["residuals"] == {}


@pytest.mark.parametrize("shared_memory", [True, False])
def test_residuals_of_one_rank_alone_are_sent(shared_memory: bool) -> None:
    run_ranks(_residuals_of_one_rank, 2, shared_memory=shared_memory, timeout=40.0)


def test_state_dict_names_the_parameters_that_have_a_scale() -> None:
    with group_of_one():
        ddp = given_ddp([torch.ones(2), torch.ones(3)], **KEPT_BUCKETS)
        hook = fastsync.register_comm_hook(ddp, "fp16")
        assert hook.state_dict()["scales"] == {}
        backward_of(ddp, [torch.tensor([1.0, -2.0]), torch.zeros(3)])
        # 2 goes to 2^9; after nothing but zeros the scale is found out with the next step.
        assert hook.state_dict()["scales"] == {"weights.0": 2.0**8}
        assert fastsync.HookState(module=ddp.module).state_dict()["scales"] == {}


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


def test_a_state_replaces_all_that_was_there() -> None:
    with group_of_one():
        ddp = given_ddp([torch.ones(2), torch.ones(3)], **KEPT_BUCKETS)
        hook = fastsync.register_comm_hook(ddp, "fp16")
        hook.load_state_dict({"scales": {"weights.0": 2.0, "weights.1": 4.0}})
        hook.load_state_dict({"scales": {"weights.1": 8.0}})
        assert hook.state_dict()["scales"] == {"weights.1": 8.0}
        grads = [torch.ones(2), torch.ones(3)]
        for _ in range(2):
            backward_of(ddp, grads)
        hook.load_state_dict({"scales": {"weights.0": 2.0**-8, "weights.1": 4.0}})
        assert hook.state_dict()["scales"] == {"weights.0": 2.0**-8, "weights.1": 4.0}
        backward_of(ddp, grads)
        assert hook.state_dict()["scales"] == {"weights.0": 2.0**-7, "weights.1": 8.0}


def test_scales_live_with_a_hook_state_for_the_drop_in_hooks() -> None:
    with group_of_one():
        ddp = given_ddp([torch.ones(2)])
        state = fastsync.HookState(module=ddp.module)
        state.load_state_dict({"scales": {"weights.0": 4.0}})
        ddp.register_comm_hook(state, fastsync.fp16_compress_hook)
        backward_of(ddp, [torch.ones(2)])
        assert state.state_dict()["scales"] == {"weights.0": 8.0}


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    with group_of_one():
        ddp = given_ddp([torch.ones(2), torch.ones(3)])
        hook = fastsync.register_comm_hook(ddp, "fp16")
        backward_of(ddp, [torch.ones(2), torch.ones(3)])
        before = hook.state_dict()
        for scales, message in (
            ({"weights.0": 2.0, "weights.7": 2.0}, r"no parameter named 'weights\.7'; is it another model's state\?"),
            ({"weights.0": 3.0}, r"the scale of 'weights\.0' is 3\.0, not a power of two"),
            ({"weights.0": 0.0}, r"the scale of 'weights\.0' is 0\.0, not a power of two"),
            ({"weights.1": -2.0}, r"the scale of 'weights\.1' is -2\.0, not a power of two"),
            ({"weights.1": math.inf}, r"the scale of 'weights\.1' is inf"),
            ({"weights.1": math.nan}, r"the scale of 'weights\.1' is nan"),
            ({"weights.1": 2.0**-1000}, r"the scale of 'weights\.1' is 9\.33.*e-302"),
            ({"weights.1": 2.0**1000}, r"the scale of 'weights\.1' is 1\.07.*e\+301"),
        ):
            with pytest.raises(ValueError, match=message):
                hook.load_state_dict({"scales": scales})
            assert hook.state_dict() == before
        for state in ({}, {"scales": None}):
            with pytest.raises(ValueError, match="state_dict: expected what state_dict\\(\\) returns"):
                hook.load_state_dict(state)


def test_a_hook_state_without_its_model_says_so() -> None:
    with group_of_one():
        state = fastsync.HookState()
        message = r"does not know its model: create it with HookState\(module=model\)"
        with pytest.raises(ValueError, match=message):
            state.state_dict()
        with pytest.raises(ValueError, match=message):
            state.load_state_dict({"scales": {}})
        state = fastsync.HookState(module=Given([torch.ones(2)]))
        assert state.state_dict()["scales"] == {}

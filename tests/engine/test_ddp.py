"""What the DDP hook computes: the mean, bit for bit where that is promised, on every rank the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import reference
from tests.models import (
    SMALL_BUCKETS,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    backward_of,
    batch,
    given_ddp,
    grads_of,
    random_grads,
    train_step,
)
from tests.ranks import run_ranks

WIRES = ["none", "bf16", "fp16"]
WIRE_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
HOOKS = {
    "none": fastsync.allreduce_hook,
    "bf16": fastsync.bf16_compress_hook,
    "fp16": fastsync.fp16_compress_hook,
}
FORMS = ["register_comm_hook", "ddp.register_comm_hook"]
SHAPES = [(7, 33), (5,), (300,), (), (2, 3, 4), (1,)]


def _register(form: str, ddp: DistributedDataParallel, wire: str) -> fastsync.HookState:
    if form == "register_comm_hook":
        return fastsync.register_comm_hook(ddp, wire)
    state = fastsync.HookState()
    ddp.register_comm_hook(state, HOOKS[wire])
    return state


def _trains_like_ddp(rank: int, world_size: int) -> None:
    for form in FORMS:
        torch.manual_seed(1)
        model = Mlp()
        plain = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS)
        hooked = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
        state = _register(form, hooked, "none")
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, hooked)]
        num_buckets = []
        for step in range(20):
            for each, optimizer in zip((plain, hooked), optimizers, strict=True):
                train_step(each, optimizer, batch(rank, step))
            assert_all_bitwise_equal(grads_of(hooked), grads_of(plain), f"{form}: step {step}, gradient")
            assert_all_bitwise_equal(
                list(hooked.parameters()), list(plain.parameters()), f"{form}: step {step}, parameter"
            )
            num_buckets.append(len(state.stats().buckets))
        assert num_buckets[0] == 1
        assert num_buckets[1:] == [num_buckets[-1]] * 19
        assert num_buckets[-1] >= 3, "DDP did not rebuild its buckets: the test shows less than it says"
        assert_same_on_all_ranks(grads_of(hooked))


@pytest.mark.parametrize("world_size", [2, 4])
def test_none_is_bitwise_ddp_without_a_hook(world_size: int) -> None:
    run_ranks(_trains_like_ddp, world_size, shared_memory=world_size == 2)


def _three_ranks_within_a_rounding(rank: int, world_size: int) -> None:
    # DDP multiplies by 1/3 where it copies into a bucket, and divides by 3 where the gradient lies in it already.
    for keeps_views in (False, True):
        options = {"bucket_cap_mb": SMALL_BUCKETS, "gradient_as_bucket_view": keeps_views}
        like = random_grads(0, 0, SHAPES, torch.float32)
        plain, hooked = given_ddp(like, **options), given_ddp(like, **options)
        fastsync.register_comm_hook(hooked)
        for step in range(4):
            mine = random_grads(rank, step, SHAPES, torch.float32)
            everyone = [random_grads(other, step, SHAPES, torch.float32) for other in range(world_size)]
            for ddp in (plain, hooked):
                ddp.zero_grad(set_to_none=not keeps_views)
                ddp(mine).backward()
            for index, (actual, expected) in enumerate(zip(grads_of(hooked), grads_of(plain), strict=True)):
                # With u = 2^-24 and m the mean magnitude: g·fl(1/3) is off by 2u·|g|/3 at most, g/3 by u·|g|/3, and
                # each of the two additions on each side by u·m. In all (3 + 2 + 2)·u·m, to first order in u.
                magnitude = sum(grads[index].abs() for grads in everyone) / world_size
                bound = 7 * 2.0**-24 * 1.001 * magnitude
                assert bool(((actual - expected).abs() <= bound).all()), f"step {step}, gradient {index}"
            assert_same_on_all_ranks(grads_of(hooked))


def test_none_on_three_ranks_is_ddp_without_a_hook_within_one_rounding() -> None:
    run_ranks(_three_ranks_within_a_rounding, 3)


def _is_the_reference(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        everyone = [random_grads(other, 0, SHAPES, dtype) for other in range(world_size)]
        for form in FORMS:
            for wire in WIRES:
                # The buckets DDP starts with are one bucket, as the reference has it.
                ddp = given_ddp(everyone[0])
                _register(form, ddp, wire)
                actual = backward_of(ddp, everyone[rank])
                expected = reference.all_reduce_mean(everyone, WIRE_DTYPES[wire])
                assert_all_bitwise_equal(actual, expected, f"{form}: {dtype} over {wire}, gradient")


def test_two_ranks_are_bitwise_the_reference() -> None:
    run_ranks(_is_the_reference, 2, shared_memory=False)


def _all_ranks_agree(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for wire in WIRES:
            torch.manual_seed(1)
            ddp = DistributedDataParallel(Mlp(dtype=dtype), bucket_cap_mb=SMALL_BUCKETS)
            hook = fastsync.register_comm_hook(ddp, wire)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(4):
                train_step(ddp, optimizer, batch(rank, step, dtype=dtype))
                assert_same_on_all_ranks(grads_of(ddp))
                assert_same_on_all_ranks([hook.grad_stats().grad_norm, hook.grad_stats().num_nonfinite])
            assert_same_on_all_ranks(list(ddp.parameters()))


def test_after_a_sync_all_ranks_hold_the_same_bits() -> None:
    run_ranks(_all_ranks_agree, 3)


def _large_gradients_do_not_overflow(rank: int, world_size: int) -> None:
    mine = [torch.tensor([[1e5, 1.2e5], [-5e4, 0.0]][rank])]
    theirs = given_ddp(mine)
    theirs.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert backward_of(theirs, mine)[0].isinf().all(), "torch's hook has changed: it no longer overflows here"

    ours = given_ddp(mine)
    fastsync.register_comm_hook(ours, "fp16")
    drop_in = given_ddp(mine)
    drop_in.register_comm_hook(None, fastsync.fp16_compress_hook)
    for ddp in (ours, drop_in):
        for _ in range(3):
            assert backward_of(ddp, mine)[0].tolist() == [24992.0, 60000.0]


def _small_gradients_survive(rank: int, world_size: int) -> None:
    tiny = torch.full((3,), 8e-8)
    for form in FORMS:
        ddp = given_ddp([tiny])
        _register(form, ddp, "fp16")
        for _ in range(3):
            (averaged,) = backward_of(ddp, [tiny])
            torch.testing.assert_close(averaged, tiny, rtol=2.0**-11, atol=0.0)

        # Behind a scale that fits 1e6 they are lost at first; it rises by a factor of two a step.
        ddp = given_ddp([tiny])
        _register(form, ddp, "fp16")
        backward_of(ddp, [torch.full((3,), 1e6)])
        (averaged,) = backward_of(ddp, [tiny])
        assert averaged.tolist() == [0.0, 0.0, 0.0]
        for _ in range(44):  # from 2^-10 to 2^33, which brings 8e-8 to 2^9 and more
            (averaged,) = backward_of(ddp, [tiny])
        torch.testing.assert_close(averaged, tiny, rtol=2.0**-11, atol=0.0)


def _a_jump_saturates_and_recovers(rank: int, world_size: int) -> None:
    small = torch.tensor([1.0, -1.0, 0.5, 1e-3])
    large = 1e6 * small
    for form in FORMS:
        ddp = given_ddp([small])
        state = _register(form, ddp, "fp16")
        assert backward_of(ddp, [small])[0][:3].tolist() == [1.0, -1.0, 0.5]
        assert state.grad_stats().num_saturated.item() == 0

        # At 1, the scale is 2^9: two ranks may send no more than about 2^15 each, which is 2^7 in the sum.
        (averaged,) = backward_of(ddp, [large])
        sent = reference.saturation_limit(torch.float16, world_size) / 2**9
        assert averaged[:3].tolist() == [2 * sent, -2 * sent, 2 * sent]
        assert state.grad_stats().num_saturated.item() == 4
        assert state.grad_stats().num_nonfinite.item() == 0
        _assert_recovers(ddp, state, large)


def _assert_recovers(ddp: DistributedDataParallel, state: fastsync.HookState, grad: Tensor) -> None:
    for _ in range(4):
        (averaged,) = backward_of(ddp, [grad])
        assert averaged.isfinite().all()
    torch.testing.assert_close(averaged, grad, rtol=2.0**-11, atol=0.0)
    assert state.grad_stats().num_saturated.item() == 0


def _counts_saturation_of_this_rank(rank: int, world_size: int) -> None:
    ddp = given_ddp([torch.ones(3)])
    hook = fastsync.register_comm_hook(ddp, "fp16")
    backward_of(ddp, [torch.ones(3)])
    backward_of(ddp, [torch.tensor([1.0, 1e6, -1e6]) if rank == 1 else torch.ones(3)])
    assert hook.grad_stats().num_saturated.item() == [0, 2][rank]


def _fp16_fits_every_magnitude(rank: int, world_size: int) -> None:
    _large_gradients_do_not_overflow(rank, world_size)
    _small_gradients_survive(rank, world_size)
    _a_jump_saturates_and_recovers(rank, world_size)
    _counts_saturation_of_this_rank(rank, world_size)


def test_fp16_keeps_large_and_small_gradients_and_saturates_where_it_cannot() -> None:
    run_ranks(_fp16_fits_every_magnitude, 2, shared_memory=False)


def _nonfinite_is_seen_by_all(rank: int, world_size: int) -> None:
    broken = torch.tensor([1.0, float("nan"), float("inf"), float("-inf"), 2.0, 3.0])
    whole = torch.tensor([1.0, 1.0, 1.0, 1.0, float("nan"), 3.0])
    last = world_size - 1
    mine = broken if rank == last else whole
    healthy = torch.arange(1.0, 7.0)
    for form in FORMS:
        for wire in WIRES:
            ddp = given_ddp([mine])
            state = _register(form, ddp, wire)
            for _ in range(2):
                (averaged,) = backward_of(ddp, [mine])
                assert averaged.isfinite().tolist() == [True, False, False, False, False, True], f"{form}, {wire}"
                assert averaged[[0, 5]].tolist() == [1.0, 3.0]
                assert averaged[2:4].tolist() == [float("inf"), float("-inf")]
                assert state.grad_stats().num_nonfinite.item() == 4
                assert state.grad_stats().num_saturated.item() == 0
                assert not state.grad_stats().grad_norm.isfinite()
            (averaged,) = backward_of(ddp, [healthy])
            assert averaged.tolist() == healthy.tolist()
            assert state.grad_stats().num_nonfinite.item() == 0


def test_inf_and_nan_of_one_rank_reach_all_and_are_counted() -> None:
    run_ranks(_nonfinite_is_seen_by_all, 3)

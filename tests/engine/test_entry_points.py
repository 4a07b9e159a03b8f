"""What every entry point promises: the mean over the ranks, the same bits on each, and which gradients there are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tests import reference
from tests.bitwise import assert_bitwise_equal
from tests.engine.entry_points import ALL, AVERAGING, average, mean_of, whole, whole_numbers
from tests.engine.same_data import same_data_is_meant
from tests.models import (
    SMALL_BUCKETS,
    Given,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    backward_of,
    batch,
    given_ddp,
    grads_of,
    random_grads,
)
from tests.ranks import on_ranks

WIRES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = [(7, 33), (5,), (300,), (1,), (2, 3, 4), (250,)]
WITH_A_SCALAR = [*SHAPES, ()]


def _there(grads: list[Tensor | None]) -> list[Tensor]:
    return [grad for grad in grads if grad is not None]


# ---- the mean -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 4])
@on_ranks(cases={"entry_point": ALL})
def test_means_are_exact_where_floats_are(rank: int, world_size: int, entry_point: str) -> None:
    for wire in WIRES if world_size > 1 or entry_point in AVERAGING else ():
        for cap in (SMALL_BUCKETS, 25.0) if wire == "fp16" else (SMALL_BUCKETS,):  # whose scale is a bucket's
            given = average(entry_point, Given(whole_numbers(0, 0, SHAPES)), wire, bucket_cap_mb=cap)
            for step in range(3):
                everyone = [whole_numbers(other, step, SHAPES) for other in range(world_size)]
                expected = _there(mean_of(everyone))
                what = f"{wire}, {cap} MiB, step {step}"
                assert_all_bitwise_equal(_there(given.step(everyone[rank])), expected, what)
                norm = torch.cat([grad.flatten() for grad in expected]).norm()
                torch.testing.assert_close(given.grad_norm(), norm, rtol=1e-6, atol=0)
            assert given.handle.grad_stats().num_saturated == 0
            assert given.handle.grad_stats().num_nonfinite == 0


@on_ranks(2, cases={"entry_point": AVERAGING}, shared_memory=False)
def test_two_ranks_are_bitwise_the_reference(rank: int, world_size: int, entry_point: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        everyone = [random_grads(other, 0, WITH_A_SCALAR, dtype) for other in range(world_size)]
        for wire, wire_dtype in WIRES.items():
            given = average(entry_point, Given(everyone[0]), wire, bucket_cap_mb=25)  # one bucket, as the reference has
            expected = reference.all_reduce_mean(everyone, wire_dtype)
            assert_all_bitwise_equal(_there(given.step(everyone[rank])), expected, f"{dtype} over {wire}, gradient")


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (4, False)])
@on_ranks(cases={"entry_point": AVERAGING}, parametrized=["shared_memory"])
def test_training_is_as_with_ddp(rank: int, world_size: int, entry_point: str) -> None:
    torch.manual_seed(rank)  # DDP and attach begin with rank 0's parameters
    model = Mlp()
    if entry_point == "all_reduce":
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    plain = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS)
    ours = average(entry_point, model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(batch(rank, step)).square().mean().backward()
        ours.backward(ours.model(batch(rank, step)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
        if world_size == 2 or "hook" in entry_point:  # more summands are added in an order that the buckets decide
            assert_all_bitwise_equal(grads_of(model), grads_of(plain), f"step {step}, gradient")
            assert_all_bitwise_equal(list(model.parameters()), list(plain.parameters()), f"step {step}, parameter")
        assert_same_on_all_ranks([*grads_of(model), *model.parameters()])
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()], rtol=1e-5, atol=1e-6)
    if entry_point != "all_reduce":
        assert len(ours.handle.stats().buckets) >= 3
        assert ours.handle.stats().num_steps == 6


@on_ranks(4, cases={"entry_point": ALL})
def test_each_process_group_averages_over_its_own_ranks(rank: int, world_size: int, entry_point: str) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group, members in ((groups[rank // 2], (rank // 2 * 2, rank // 2 * 2 + 1)), (None, range(4))):
        for wire in ("none", "fp16"):
            everyone = [whole_numbers(other, 0, SHAPES) for other in members]
            given = average(entry_point, Given(everyone[0]), wire, group=group)
            for _ in range(2):
                averaged = _there(given.step(everyone[rank - members[0]]))
                assert_all_bitwise_equal(averaged, _there(mean_of(everyone)), f"{wire}, of ranks {members}")


# ---- finite stays finite, and the rest arrives ----------------------------------------------------------------------


@on_ranks(2, cases={"entry_point": ALL})
def test_fp16_fits_large_and_small_gradients(rank: int, world_size: int, entry_point: str) -> None:
    same_data_is_meant()
    # A gradient that float16 does not hold; and one that it holds as zero.
    mine = [torch.tensor([[1e5, 1.2e5], [-5e4, 0.0]][rank])]
    given = average(entry_point, Given(mine), "fp16")
    for _ in range(3):
        assert _there(given.step(mine))[0].tolist() == [24992.0, 60000.0]
    if entry_point == "hook":
        theirs = given_ddp(mine)
        theirs.register_comm_hook(None, default_hooks.fp16_compress_hook)
        assert backward_of(theirs, mine)[0].isinf().all(), "torch's hook has changed: it no longer overflows here"
    tiny = [torch.full((3,), 8e-8)]
    given = average(entry_point, Given(tiny), "fp16")
    for _ in range(3):
        torch.testing.assert_close(_there(given.step(tiny)), tiny, rtol=2.0**-11, atol=0.0)
    assert given.handle.grad_stats().num_nonfinite == 0


@on_ranks(2, cases={"entry_point": AVERAGING}, shared_memory=False)
def test_the_fp16_scale_follows_the_gradients(rank: int, world_size: int, entry_point: str) -> None:
    same_data_is_meant()
    small = torch.tensor([1.0, -1.0, 0.5, 1e-3])
    given = average(entry_point, Given([small]), "fp16")
    assert _there(given.step([small]))[0][:3].tolist() == [1.0, -1.0, 0.5]
    assert given.handle.grad_stats().num_saturated == 0
    # At 1, the scale is 2^9: two ranks may send no more than about 2^15 each, which is 2^7 in the sum.
    sent = reference.saturation_limit(torch.float16, world_size) / 2**9
    assert _there(given.step([1e6 * small]))[0][:3].tolist() == [2 * sent, -2 * sent, 2 * sent]
    assert given.handle.grad_stats().num_saturated == 4
    assert given.handle.grad_stats().num_nonfinite == 0
    for _ in range(4):
        averaged = _there(given.step([1e6 * small]))
        assert averaged[0].isfinite().all()
    torch.testing.assert_close(averaged[0], 1e6 * small, rtol=2.0**-11, atol=0.0)
    assert given.handle.grad_stats().num_saturated == 0

    given = average(entry_point, Given([small]), "fp16")
    given.step([torch.ones(4)])
    given.step([torch.tensor([1.0, 1e6, -1e6, 1.0]) if rank == 1 else torch.ones(4)])
    assert given.handle.grad_stats().num_saturated == [0, 2][rank], "counted on the rank that could not send them"


@on_ranks(2, cases={"entry_point": AVERAGING})
def test_fp16_finds_its_scale_anew_after_zeros_and_nan(rank: int, world_size: int, entry_point: str) -> None:
    same_data_is_meant()
    for spoil in (0.0, float("nan")):
        ones = torch.ones(300)
        given = average(entry_point, Given([ones, ones]), "fp16")
        for grads in ([ones, ones], *[[ones * spoil, ones]] * 12, [ones, ones]):
            averaged = given.step(grads)
        for grad in _there(averaged):
            assert_bitwise_equal(grad, ones)
        assert given.handle.grad_stats().num_saturated == 0


@on_ranks(3, cases={"entry_point": ALL})
def test_inf_and_nan_of_one_rank_reach_all_and_are_counted(rank: int, world_size: int, entry_point: str) -> None:
    nan, inf = float("nan"), float("inf")
    broken = [torch.tensor([1.0, nan, inf, -inf, 2.0, 3.0])]
    other = [torch.tensor([1.0, 1.0, 1.0, 1.0, nan, 3.0])]
    healthy = [torch.arange(1.0, 7.0)]
    for wire in WIRES:
        given = average(entry_point, Given(healthy), wire)
        for _ in range(2):
            (averaged,) = _there(given.step(broken if rank == world_size - 1 else other))
            assert averaged.isfinite().tolist() == [True, False, False, False, False, True], wire
            assert averaged[[0, 5]].tolist() == [1.0, 3.0]
            assert averaged[2:4].tolist() == [inf, -inf]
            assert not given.grad_norm().isfinite()
            stats = given.handle.grad_stats()
            assert stats.num_saturated == 0
            number = 4 if entry_point != "sharded" else [1, 2, 1][rank]
            assert stats.num_nonfinite == number
        (averaged,) = _there(given.step(healthy))
        assert averaged.tolist() == healthy[0].tolist()
        assert given.handle.grad_stats().num_nonfinite == 0
        assert stats.num_nonfinite == number, "the statistics of a step have become those of the next"


@on_ranks(2, cases={"entry_point": AVERAGING})
def test_a_grad_scaler_skips_the_same_step_everywhere(rank: int, world_size: int, entry_point: str) -> None:
    same_data_is_meant()
    for wire in WIRES:
        torch.manual_seed(0)
        ours = average(entry_point, nn.Linear(4, 1), wire)
        optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales = []
        for step in range(4):
            before = [whole(parameter).clone() for parameter in ours.model.parameters()]
            optimizer.zero_grad()
            loss = F.mse_loss(ours.model(torch.ones(2, 4)), torch.zeros(2, 1))
            ours.backward(scaler.scale(loss * float("inf") if step == 2 and rank == 1 else loss))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            after = [whole(parameter) for parameter in ours.model.parameters()]
            assert all(map(torch.equal, before, after)) == (step == 2), f"step {step}"
            assert_same_on_all_ranks(after)
        assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9]

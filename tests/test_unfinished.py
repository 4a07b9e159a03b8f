"""Engines that go while messages are under way: the group goes on."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression
from tests.models import SMALL_BUCKETS, Fails, Given, grads_of
from tests.ranks import open_group, run_ranks
from tests.sharded import batch_of, loss_of, sharded, step_of

COMPRESSIONS = {
    "one_shot": "none",
    "all_reduce": "bf16",
    "two_shot": Compression("bf16", reduce="fp32", algorithm="two_shot"),
    "error feedback": "int8+ef",
}


def _backward(model: Given, grads: list[Tensor], *, fails: bool = False) -> None:
    """One that fails does so when all gradients but the first are there."""
    model.zero_grad()
    weights = [Fails.apply(weight) if fails and index == 0 else weight for index, weight in enumerate(model.weights)]
    loss = sum((weight * grad).sum() for weight, grad in zip(weights, grads, strict=True))
    if fails:
        with pytest.raises(ArithmeticError, match="as told"):
            loss.backward()
    else:
        loss.backward()


def _assert_group_is_free(rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
    dist.barrier(group)
    total = torch.full((5,), float(rank + 1))
    dist.all_reduce(total, group=group)
    assert total.tolist() == [sum(range(1, world_size + 1))] * 5


def _drops_its_model_after_an_error(rank: int, world_size: int) -> None:
    grads = [torch.full((numel,), 1.0 + rank) for numel in (7, 300, 700)]
    mean = sum(range(1, world_size + 1)) / world_size
    for compression in COMPRESSIONS.values():
        for _ in range(2):  # "catch out-of-memory, make the model anew"
            model = Given(grads)
            fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS)
            _backward(model, grads)
            torch.testing.assert_close(
                grads_of(model), [torch.full_like(each, mean) for each in grads], rtol=1e-2, atol=0
            )
            if rank == 1:
                time.sleep(0.5)  # so that what the others expect has not come when they drop their models
            _backward(model, grads, fails=True)
            del model
            gc.collect()
            _assert_group_is_free(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shared_memory", [False, True])
def test_models_that_go_after_an_error_leave_the_group_free(world_size: int, shared_memory: bool) -> None:
    run_ranks(_drops_its_model_after_an_error, world_size, timeout=90, shared_memory=shared_memory)


def _one_rank_drops_its_model(rank: int, world_size: int) -> None:
    grads = [torch.full((numel,), 1.0 + rank) for numel in (7, 300, 700)]
    for compression in COMPRESSIONS.values():
        model = Given(grads)
        fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS)
        _backward(model, grads)
        if rank == 0:
            time.sleep(0.5)
        _backward(model, grads, fails=rank == 1)
        assert rank == 1 or all(grad.isnan().all() for grad in grads_of(model)[:1])
        del model
        gc.collect()
        _assert_group_is_free(rank, world_size)


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_rank_that_fails_and_drops_its_model_gives_the_others_nan(shared_memory: bool) -> None:
    """It goes on to add up its part of what the others have sent."""
    run_ranks(_one_rank_drops_its_model, 2, timeout=90, shared_memory=shared_memory)


# ---- fully_shard ----------------------------------------------------------------------------------------------------


def _drops_its_shards_after_an_error(rank: int, world_size: int, calls_detach: bool) -> None:
    for _ in range(2):
        model = sharded(init_device_mesh("cpu", (world_size,)), reshard_after_forward=False)
        handle = fastsync.register_reduce_scatter(model)
        step_of(model, 0, rank, world_size)
        model.zero_grad()
        model.blocks[0].narrow.register_forward_hook(lambda module, inputs, output: Fails.apply(output))
        loss = loss_of(model, *batch_of(1))
        if rank == 1:
            time.sleep(0.5)
        with pytest.raises(ArithmeticError, match="as told"):
            loss.backward()  # when the reduce-scatter of blocks.1 is under way
        if calls_detach:
            handle.detach()
        gone = weakref.ref(handle)
        del model, handle, loss
        gc.collect()
        assert gone() is None
        _assert_group_is_free(rank, world_size)


@pytest.mark.parametrize("calls_detach", [False, True])
def test_sharded_models_that_go_after_an_error_leave_the_group_free(calls_detach: bool) -> None:
    run_ranks(_drops_its_shards_after_an_error, 2, calls_detach, timeout=60, shared_memory=False)


# ---- DDP ------------------------------------------------------------------------------------------------------------


def _fail(_: Tensor) -> None:
    raise ArithmeticError("as told")


def _drops_ddp_after_an_error(rank: int, world_size: int, is_python_hook: bool, folder: str) -> None:
    grads = [torch.full((numel,), 1.0 + rank) for numel in (7, 300, 700)]
    for number in range(2):
        ddp = DistributedDataParallel(Given(grads), bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=True)
        if is_python_hook:
            ddp.register_comm_hook(None, fastsync.bf16_compress_hook)
        else:
            fastsync.register_comm_hook(ddp, "bf16")
        for _ in range(2):  # DDP regroups its buckets after the first
            ddp.zero_grad()
            ddp(grads).backward()
        handle = ddp.module.weights[0].register_hook(_fail)
        loss = ddp(grads)
        if rank == 1:
            time.sleep(0.5)  # so that what rank 0 has begun is under way when it drops all it has
        with pytest.raises(ArithmeticError, match="as told"):
            loss.backward()
        gone = weakref.ref(ddp)
        dist.destroy_process_group()
        del loss, handle, ddp  # the last owner of the group
        gc.collect()
        assert gone() is None
        open_group(f"{folder}/{number}", rank, world_size)
        _assert_group_is_free(rank, world_size)


@pytest.mark.parametrize("is_python_hook", [False, True])
def test_models_under_ddp_and_their_group_may_go_after_an_error(is_python_hook: bool, tmp_path: Path) -> None:
    """torch's Reducer ends the group with the GIL, and waits for a thread that may want it."""
    run_ranks(_drops_ddp_after_an_error, 2, is_python_hook, str(tmp_path), timeout=60, shared_memory=False)

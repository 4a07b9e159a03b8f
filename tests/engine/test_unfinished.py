"""Engines that go while messages are under way, and buckets that fail while they are sent: the group goes on."""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fastsync
from fastsync import Compression
from tests.engine.attached import backward_of_given
from tests.engine.failing_passes import FailingPass
from tests.engine.sharded import batch_of, loss_of, sharded, step_of
from tests.models import SMALL_BUCKETS, Fails, Given, grads_of
from tests.ranks import GLOO_TIMED_OUT, on_ranks, open_group, run_ranks
from tests.refused import refused

COMPRESSIONS = {
    "one_shot": "none",
    "all_reduce": "bf16",
    "two_shot": Compression("bf16", reduce="fp32", algorithm="two_shot"),
    "error feedback": Compression("int8", error_feedback=True),
}


def _assert_group_is_free(rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
    dist.barrier(group)
    total = torch.full((5,), float(rank + 1))
    dist.all_reduce(total, group=group)
    assert total.tolist() == [sum(range(1, world_size + 1))] * 5


@on_ranks(3, cases={"shared_memory": [False, True]}, timeout=90)
def test_models_that_go_after_an_error_leave_the_group_free(rank: int, world_size: int) -> None:
    grads = [torch.full((numel,), 1.0 + rank) for numel in (7, 300, 700)]
    mean = sum(range(1, world_size + 1)) / world_size
    for compression in COMPRESSIONS.values():
        for _ in range(2):  # "catch out-of-memory, make the model anew"
            model = Given(grads)
            fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS)
            backward_of_given(model, grads)
            torch.testing.assert_close(
                grads_of(model), [torch.full_like(each, mean) for each in grads], rtol=1e-2, atol=0
            )
            if rank == 1:
                time.sleep(0.2)  # so that what the others expect has not come when they drop their models
            backward_of_given(model, grads, fails=True)
            del model
            gc.collect()
            _assert_group_is_free(rank, world_size)


# ---- fully_shard ----------------------------------------------------------------------------------------------------


@on_ranks(2, cases={"calls_detach": [False, True]}, timeout=60, shared_memory=False)
def test_sharded_models_that_go_leave_the_group_free(rank: int, world_size: int, calls_detach: bool) -> None:
    for _ in range(2):
        model = sharded(init_device_mesh("cpu", (world_size,)), reshard_after_forward=False)
        handle = fastsync.register_fsdp(model)
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
        refused(loss.backward, "as told", kind=ArithmeticError)
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


# ---- a bucket that fails while it is sent ---------------------------------------------------------------------------


class _FailsToPack(TorchDispatchMode):
    """After so many messages there is no memory for the next one."""

    def __init__(self, num_messages: int) -> None:
        super().__init__()
        self._left = num_messages
        self._pack = FailingPass("pack")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_message = func.name() == "c10d::send"
        self._left -= is_message
        self._pack.set_failing(is_message and self._left == 0)  # and not after that
        return func(*args, **(kwargs or {}))


@on_ranks(2, timeout=60, shared_memory=False)
def test_a_bucket_that_fails_while_it_is_sent_is_not_sent_again(rank: int, world_size: int) -> None:
    """Its messages would be taken for other ones. The other rank waits until the time-out."""
    numel = 3 * 2**20  # of three pieces at 32 bits
    for algorithm in ("one_shot", "two_shot"):
        group = dist.new_group(timeout=timedelta(seconds=2))
        model = Given([torch.zeros(numel), torch.zeros(numel)])
        compression = Compression("none", reduce="fp32", algorithm=algorithm)  # type: ignore[arg-type]
        fastsync.attach(model, compression, bucket_cap_mb=14, process_group=group)
        grads = [torch.full((numel,), float(rank + index)) for index in range(2)]
        model(grads).backward()
        loss = model(grads)
        if rank == 1:
            # It asks nobody where the ranks are.
            with (
                _FailsToPack(4),
                pytest.raises(torch.OutOfMemoryError, match=r"on rank 1 of 2: std::bad_alloc$"),
            ):
                loss.backward()
            refused(model(grads).backward, "it has failed before, while it was sent", kind=RuntimeError)
        else:
            with pytest.raises(RuntimeError, match=f"{GLOO_TIMED_OUT}|rank 1"):
                loss.backward()
        dist.barrier()
        del model, loss
        gc.collect()

"""What the DDP hook refuses, each with its reason; and that models, hooks and interpreters end in any order."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import fastsync
from fastsync.sync.ddp import HookState
from tests.models import backward_of, given_ddp
from tests.ranks import on_ranks
from tests.refused import refused


@pytest.mark.usefixtures("one_rank")
def test_models_that_are_refused() -> None:
    """Those without DDP, and those whose DDP keeps buckets or parameters from the hook."""
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    late: dict[str, Any] = {"delay_all_reduce_named_params": [("1.weight", two[1].weight)]}
    for wrong in (
        nn.Linear(1, 1), None, "model", DistributedDataParallel(nn.Linear(2, 2), skip_all_reduce_unused_params=True),
        DistributedDataParallel(two, param_to_hook_all_reduce=two[0].weight, **late),
    ):  # fmt: skip
        refused(lambda: fastsync.register_comm_hook(wrong), "ddp_model:")


@pytest.mark.usefixtures("one_rank")
def test_a_second_hook_is_refused_and_the_first_goes_on() -> None:
    ours = given_ddp([torch.ones(2)])
    hook = fastsync.register_comm_hook(ours, "fp16")
    refused(lambda: fastsync.register_comm_hook(ours, "bf16"), "it has a communication hook already")
    with pytest.raises(RuntimeError, match="register_comm_hook or register_builtin_comm_hook can only be called once"):
        ours.register_comm_hook(None, default_hooks.allreduce_hook)
    backward_of(ours, [torch.ones(2)])
    assert hook.stats().num_syncs == 1

    theirs = given_ddp([torch.ones(2)])
    theirs.register_comm_hook(None, default_hooks.allreduce_hook)
    refused(lambda: fastsync.register_comm_hook(theirs), "it has a communication hook already")

    builtin = given_ddp([torch.ones(2)])
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    refused(lambda: fastsync.register_comm_hook(builtin), "can only be called once", kind=RuntimeError)


@on_ranks(2, timeout=60)
def test_gradients_that_one_rank_alone_refuses_are_refused_on_all(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=10))
    options: dict[str, Any] = {"process_group": group, "init_sync": False}
    like = [torch.ones(2, dtype=torch.complex64 if rank else torch.float32)]
    ddp = given_ddp(like, **options)
    ddp.register_comm_hook(group, fastsync.bf16_compress_hook)
    refused(lambda: backward_of(ddp, like), "; rank 1: bucket 0 with 4")

    embedding = DistributedDataParallel(nn.Embedding(10, 2, sparse=rank == 1), **options)
    embedding.register_comm_hook(group, fastsync.allreduce_hook)
    refused(lambda: embedding(torch.tensor([[1, 2]])).sum().backward(), "rank 1: bucket 0 with 20 elements of Float,")


@pytest.mark.usefixtures("one_rank")
def test_ddp_with_the_python_reducer_is_refused() -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = given_ddp([torch.ones(2)])
    refused(lambda: fastsync.register_comm_hook(ddp), "optimize_ddp='python_reducer'", kind=RuntimeError)


@pytest.mark.usefixtures("one_rank")
def test_names_of_a_compiled_model_are_those_of_the_plain_one() -> None:
    hook = fastsync.register_comm_hook(DistributedDataParallel(torch.compile(nn.Linear(2, 2))), "int8+ef")
    assert list(hook._named_parameters()) == hook._names == ["weight", "bias"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a torch with CUDA cannot build such a DDP where there is no GPU",
)
def test_mixed_precision_of_ddp_is_refused() -> None:
    mixed = DistributedDataParallel(nn.Linear(2, 2), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    refused(lambda: fastsync.register_comm_hook(mixed), "has a communication hook already")


@pytest.mark.usefixtures("one_rank")
def test_a_state_of_another_type_is_refused() -> None:
    for state in ("state", 1, nn.Linear(1, 1)):
        ddp = given_ddp([torch.ones(2)])
        ddp.register_comm_hook(state, fastsync.fp16_compress_hook)
        refused(lambda: backward_of(ddp, [torch.ones(2)]), "state:")


@pytest.mark.usefixtures("one_rank")
def test_a_hook_outlives_its_model_and_a_state_does_not_keep_it() -> None:
    ddp = given_ddp([torch.ones(2)])
    hook = fastsync.register_comm_hook(ddp, "fp16")
    backward_of(ddp, [torch.ones(2)])
    reference = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert reference() is None
    assert hook.stats().num_steps == 1
    assert hook.grad_stats().grad_norm.item() == pytest.approx(2**0.5)
    assert list(hook.state_dict()["scales"]) == ["weights.0"]

    state = HookState()
    for number in range(20):  # models come and go at the same addresses
        numel = 2 + number % 3
        ddp = given_ddp([torch.ones(numel)])
        ddp.register_comm_hook(state, fastsync.fp16_compress_hook)
        assert backward_of(ddp, [torch.full((numel,), 10.0**number)])[0].tolist() == pytest.approx(
            [10.0**number] * numel, rel=2.0**-11
        )
        assert state.grad_stats().num_saturated.item() == 0
        parameter = weakref.ref(ddp.module.weights[0])
        del ddp
        gc.collect()
        assert parameter() is None
    assert state.stats().num_steps == 20


@on_ranks(2, timeout=60)
def test_a_hook_may_be_the_last_owner_of_its_group(rank: int, world_size: int) -> None:
    for _ in range(50):
        group = dist.new_group()
        ddp = given_ddp([torch.ones(2)], process_group=group)
        hook = fastsync.register_comm_hook(ddp, "fp16")
        backward_of(ddp, [torch.full((2,), 1.0 + rank)])
        dist.destroy_process_group(group)
        del group, ddp
        assert hook.stats().num_steps == 1
        del hook


# The thread of a Gloo group lets go of its last work a moment after backward() has returned, and takes the GIL for it.
# torch does not survive the end of the interpreter, or of the group's last owner, within this moment.
EXIT = """
import gc, os, signal, sys, time
import torch, torch.distributed as dist
import fastsync
from tests.models import backward_of, given_ddp

for ending in sys.argv[1:]:
    if (child := os.fork()) == 0:
        signal.alarm(100)  # which ends the child where it hangs
        break  # what follows happens in the child, up to the interpreter's exit
    _, status = os.waitpid(child, 0)
    assert status == 0, (ending, status)
else:
    sys.exit()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp, drop_in = given_ddp([torch.ones(2)]), given_ddp([torch.ones(2)])
hook = fastsync.register_comm_hook(ddp, "fp16")
drop_in.register_comm_hook(None, fastsync.bf16_compress_hook)
for each in (ddp, drop_in):
    backward_of(each, [torch.ones(2)])
time.sleep(0.2)
exec(ending)
print("done", flush=True)
"""


@pytest.mark.end_to_end
def test_the_interpreter_exits_cleanly() -> None:
    """However it comes to its end: each way in a process of its own, forked from one that has only imported."""
    endings = ["", "dist.destroy_process_group()", "del ddp, drop_in, each", "del hook; gc.collect()"]
    program = [sys.executable, "-W", "ignore", "-c", EXIT, *endings]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n" * len(endings)), ended.stderr
    assert "fastsync" not in ended.stderr
    assert "terminate" not in ended.stderr

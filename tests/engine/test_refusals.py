"""What no entry point takes, and says why; ranks that mean different things; ranks that are lost."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.engine.entry_points import ALL, AVERAGING, average
from tests.models import Given, Mlp, backward_of, given_ddp, group_of_one
from tests.ranks import on_ranks, run_ranks

CALLS: dict[str, Callable[..., object]] = {
    "module_or_params": fastsync.attach,
    "params": fastsync.all_reduce_gradients,
    "ddp_model": lambda model, *args, **options: fastsync.register_comm_hook(
        DistributedDataParallel(model, init_sync=False) if isinstance(model, nn.Module) else model, *args, **options
    ),
}
TAKE_PARAMETERS = ("module_or_params", "params")
each_call = pytest.mark.parametrize("argument", CALLS)


@pytest.fixture
def one_rank() -> Iterator[None]:
    with group_of_one():
        yield


def _with(dtype: torch.dtype) -> nn.Module:
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(torch.ones(2).to(dtype))
    return model


MODELS: dict[str, tuple[Callable[[], object], str]] = {
    "sparse": (
        lambda: nn.ModuleDict({"dense": nn.Linear(2, 2), "words": nn.EmbeddingBag(3, 2, sparse=True)}),
        r"words\.weight gets sparse gradients \(EmbeddingBag with sparse=True\)",
    ),
    "float8": (lambda: _with(torch.float8_e4m3fn), r"parameter odd is torch\.float8_e4m3fn; fastsync handles float32"),
    "string": (lambda: "model", "a str|got str"),
}
PARAMETERS: dict[str, tuple[Callable[[], object], str]] = {
    "ddp": (lambda: DistributedDataParallel(Mlp()), "the module is wrapped in DistributedDataParallel.*register_comm"),
    "ddp inside": (lambda: nn.Sequential(DistributedDataParallel(Mlp())), "0 is wrapped in DistributedDataParallel"),
    "lazy": (lambda: nn.LazyLinear(3), "parameter weight is not initialised yet; run a forward first"),
    "frozen": (lambda: nn.Linear(2, 2).requires_grad_(False), "none of its 2 parameters requires a gradient"),
    "nothing": (list, "none of its 0 parameters requires a gradient"),
    "named": (lambda: Mlp().named_parameters(), "number 0 is a tuple; pass the module or its parameters, not"),
    "optimizer": (
        lambda: torch.optim.SGD(Mlp().parameters()),
        "expected a module or tensors, got SGD; pass the module",
    ),
    "optimizer's groups": (lambda: torch.optim.SGD(Mlp().parameters()).param_groups, "number 0 is a dict"),
    "expanded": (
        lambda: [nn.Parameter(torch.zeros(1, 6).expand(4, 6))],
        r"elements of parameter 0 share memory \(shape \[4, 6\], strides \[0, 1\]\).*attach what it was expanded from",
    ),
    "no leaf": (lambda: [torch.ones(2, requires_grad=True) * 2], "tensor 0 is no leaf of the graph.*MulBackward"),
    "dtensor": (
        lambda: [nn.Parameter(distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,))))],
        "parameter 0 is a DTensor, which wraps other tensors",
    ),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("argument", "what"),
    [(argument, what) for argument in CALLS for what in MODELS]
    + [(argument, what) for argument in TAKE_PARAMETERS for what in PARAMETERS],
)
def test_what_cannot_be_synchronised_is_refused(argument: str, what: str) -> None:
    make, message = (MODELS | PARAMETERS)[what]
    with pytest.raises(ValueError, match=f"{argument}: .*({message})"):
        CALLS[argument](make())


@pytest.mark.usefixtures("one_rank")
@each_call
def test_bad_settings_are_refused_and_leave_nothing_behind(argument: str) -> None:
    call, model = CALLS[argument], Mlp()
    for compression in ("fp32", "fp8", None):
        with pytest.raises(ValueError, match="compression: expected one of 'none', 'bf16', 'fp16'"):
            call(model, compression)
    for wire in ("bf16", "fp16"):
        with pytest.raises(ValueError, match=rf"'{wire}' cannot carry parameter odd, which is torch\.complex64"):
            call(_with(torch.complex64), wire)
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "pp", "tp"))
    with pytest.raises(ValueError, match=r"process_group: the DeviceMesh has 3 dimensions .*as in mesh\['dp'\]"):
        call(model, process_group=mesh)
    for group in ("world", 0):
        message = r"process_group: expected a ProcessGroup that this rank is a member of, a one-dimensional DeviceMesh"
        with pytest.raises(ValueError, match=f"{message}, or None, got {group!r}"):
            call(model, process_group=group)
    with pytest.raises(ValueError, match=r"process_group: it serves .*cpu.*, but parameter weight is on meta"):
        call(nn.Linear(2, 2, device="meta"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    call(model)


@pytest.mark.usefixtures("one_rank")
def test_a_compression_that_is_refused_changes_nothing() -> None:
    for cap in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"bucket_cap_mb: expected a positive number of MiB, got {cap!r}"):
            fastsync.attach(Mlp(), bucket_cap_mb=cap)
    for entry_point in ("hook", "attach", "sharded"):
        handle = average(entry_point, Mlp(), "bf16").handle
        with pytest.raises(ValueError, match="compression: expected one of"):
            handle.compression = "int3"
        assert handle.compression.wire == "bf16"
    for entry_point in ("hook", "attach"):
        handle = average(entry_point, _with(torch.complex64)).handle
        with pytest.raises(ValueError, match="'fp16' cannot carry parameter odd"):
            handle.compression = "fp16"
        assert handle.compression.wire == "none"


@pytest.mark.usefixtures("one_rank")
def test_drop_in_hooks_refuse_in_the_first_backward() -> None:
    ddp = DistributedDataParallel(nn.Embedding(10, 2, sparse=True))
    ddp.register_comm_hook(None, fastsync.allreduce_hook)
    with pytest.raises(ValueError, match="bucket 0 holds a sparse gradient, which fastsync does not handle"):
        ddp(torch.tensor([[1, 2]])).sum().backward()
    like = [torch.ones(2, dtype=torch.complex64)]
    for wire, hook in (("fp16", fastsync.fp16_compress_hook), ("bf16", fastsync.bf16_compress_hook)):
        ddp = given_ddp(like)
        ddp.register_comm_hook(None, hook)
        with pytest.raises(ValueError, match=rf"ComplexFloat.* cannot travel with compression {wire}; use"):
            backward_of(ddp, like)


def test_without_a_process_group() -> None:
    for call in (
        lambda: fastsync.attach(Mlp()),
        lambda: fastsync.all_reduce_gradients(Mlp()),
        lambda: fastsync.HookState(),
    ):
        with pytest.raises(ValueError, match="process_group: None stands for the default group, and there is none yet"):
            call()


@on_ranks(2)
def test_sharded_models_are_refused_before_and_after(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    calls = [
        *(CALLS[argument] for argument in TAKE_PARAMETERS),
        lambda model: fastsync.attach(model.parameters()),
        fastsync.register_comm_hook,
        fastsync.check_consistency,
    ]
    ways: list[tuple[Callable[[nn.Module], nn.Module], str]] = [
        (lambda model: fully_shard(model, mesh=mesh), "is a DTensor.*fully_shard"),
        (
            lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")),
            "is sharded by FullyShardedDataParallel.* averages",
        ),
        (
            lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
            "is sharded by FullyShardedDataParallel.* averages",
        ),
    ]
    for shard, message in ways:
        model = shard(Mlp())
        for call in calls:
            with pytest.raises(ValueError, match=f"parameter .* {message}"):
                call(model)
    partly = nn.Sequential(nn.Linear(2, 2), fully_shard(nn.Linear(2, 2), mesh=mesh))
    with pytest.raises(ValueError, match=r"parameter 1\.weight is a DTensor"):
        fastsync.attach(partly)
    for shard, _ in ways:  # after attach it is noticed
        model = Mlp()
        sync = fastsync.attach(model)
        sharded = shard(model)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        sharded(torch.ones(2, 32)).sum().backward()
        for late in (optimizer.step, sync.synchronize, lambda sync=sync: fastsync.clip_grad_norm_(sync, 1.0)):
            with pytest.raises(RuntimeError, match=r"the model has other parameters .*call fully_shard"):
                late()
        sync.detach()
        optimizer.step()  # as FSDP does by itself
    dist.barrier()


# ---- ranks that mean different things -------------------------------------------------------------------------------

DISAGREE = "the ranks do not agree on what to synchronise: "


@pytest.mark.parametrize("entry_point", ALL)
@on_ranks(3)
def test_ranks_that_differ_are_told_on_every_rank(rank: int, world_size: int, entry_point: str) -> None:
    """They are told on every rank, with who has what, and go on with what they agree on."""
    grads = [torch.full((300,), 1.0 + rank)]

    def begin(wire: str, numel: int) -> None:
        average(entry_point, Given([torch.ones(numel)]), wire).step([torch.ones(numel)])

    is_odd = rank == 1
    settings = r"rank 0, 2: compression fp16.*; rank 1: compression none|rank 1: compression none.*; rank 0, 2: .*fp16"
    with pytest.raises(ValueError, match=f"{DISAGREE}.*({settings})"):
        begin("none" if is_odd else "fp16", 300)
    if "hook" not in entry_point:  # of which DDP itself says it
        with pytest.raises(ValueError, match=DISAGREE + r".*\[300\].*\[200\]|.*\[200\].*\[300\]|.*(300|600) "):
            begin("none", 200 if is_odd else 300)
    if entry_point in ("drop-in hook", "all_reduce"):
        return
    for wires in (["fp16", "bf16", "fp16"], ["fp16", "none", "fp16"], ["none", "fp16", "bf16"]):
        given = average(entry_point, Given(grads))
        for _ in range(3):
            given.step(grads)
        given.handle.compression = wires[rank]
        with pytest.raises(ValueError, match=DISAGREE) as error:
            given.step(grads)
        for other in range(world_size):
            assert re.search(rf"rank [\d, ]*{other}[\d, ]*: compression {wires[other]}", str(error.value))
    if entry_point == "hook":  # the error comes before DDP has copied anything back
        assert [grad.unique().tolist() for grad in given.grads() if grad is not None] == [[1.0 + rank]]
    if entry_point in ("attach", "synchronize"):
        given.handle.compression = "bf16"
        assert [grad.unique().tolist() for grad in given.step(grads) if grad is not None] == [[2.0]]


@on_ranks(2)
def test_models_that_differ_are_told_when_they_are_attached(rank: int, world_size: int) -> None:
    def attach(**options: Any) -> Callable[[], object]:
        return lambda: fastsync.attach(nn.Linear(2, 3), **options)

    def frozen() -> object:
        model = nn.Linear(2, 3)
        model.bias.requires_grad_(rank == 0)
        return fastsync.attach(model)

    def buffer(value: torch.Tensor) -> Callable[[], object]:
        model = nn.Linear(2, 3)
        model.register_buffer("table", value)
        return lambda: fastsync.attach(model)

    number = [nn.Parameter(torch.ones(2)) for _ in range(1 + rank)]
    expected: dict[str, Callable[[], object]] = {
        "rank 0: bucket_cap_mb 1; rank 1: bucket_cap_mb 2": attach(bucket_cap_mb=1 + rank),
        "bias of shape .*frozen": frozen,
        r"buffer table of shape \[1\].*buffer table of shape \[2\]": buffer(torch.zeros(1 + rank)),
        r"buffer table of shape .*strides \[1, 2\].*strides \[3, 1\]": buffer(
            torch.zeros(2, 3) if rank else torch.zeros(3, 2).t()
        ),
        "rank 0: nothing; rank 1: parameter 1 of|rank 1: parameter 1 of.*; rank 0: nothing": lambda: fastsync.attach(
            number
        ),
    }
    for message, call in expected.items():
        with pytest.raises(ValueError, match=f"{DISAGREE}.*({message})"):
            call()
    # Without a broadcast nothing is sent by attach: each backward tells.
    model = nn.Linear(2, 3 + rank)
    fastsync.attach(model, init_sync=False)
    for _ in range(2):
        with pytest.raises(ValueError, match=DISAGREE):
            model(torch.ones(1, 2)).sum().backward()


# ---- ranks that are lost --------------------------------------------------------------------------------------------

SECONDS = 5


def _loses_a_rank(rank: int, world_size: int, entry_point: str, num_good_steps: int, dies: bool) -> None:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    grads = [torch.full((300,), 1.0 + rank), torch.full((400,), 1.0)]
    given = average(entry_point, Given(grads), "bf16", group=group)
    for _ in range(num_good_steps):
        given.step(grads)
    if entry_point == "sharded":
        given.model.set_reshard_after_forward(False)
    loss = given.model(grads)  # in which DDP may rebuild its buckets
    if rank == 1 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        dist.barrier()  # of the default group: this rank lives, but does not come
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(averaging|agreement).* failed on rank 0 of 2: "):
        given.backward(loss)
    assert time.monotonic() - began < 10 * SECONDS
    if not dies:
        dist.barrier()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("entry_point", ALL)
def test_a_rank_that_is_killed_is_an_error_of_the_others(entry_point: str, shared_memory: bool) -> None:
    run_ranks(_loses_a_rank, 2, entry_point, 3, True, shared_memory=shared_memory, lost={1}, timeout=60)


@pytest.mark.parametrize("num_good_steps", [0, 1, 3])
@pytest.mark.parametrize("entry_point", AVERAGING)
def test_a_rank_that_does_not_come_is_an_error_within_the_timeout(entry_point: str, num_good_steps: int) -> None:
    """In the first sync, in that after DDP has rebuilt its buckets, in an ordinary one."""
    run_ranks(_loses_a_rank, 2, entry_point, num_good_steps, False, shared_memory=False, timeout=100)

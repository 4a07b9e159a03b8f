"""What no entry point takes, and says why; ranks that mean different things; ranks that are lost."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import _C
from fastsync.autotune import measure_group
from fastsync.outer.surviving_group import SurvivingGroup
from fastsync.sync.ddp import HookState
from tests.engine.entry_points import ALL, average
from tests.models import SMALL_BUCKETS, Given, Mlp, backward_of, given_ddp, random_grads
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

CALLS: dict[str, Callable[..., object]] = {
    "module_or_params": fastsync.attach,
    "params": fastsync.all_reduce_gradients,
    "ddp_model": lambda model, *args, **options: fastsync.register_comm_hook(
        DistributedDataParallel(model, init_sync=False) if isinstance(model, nn.Module) else model, *args, **options
    ),
}
each_call = pytest.mark.parametrize("argument", CALLS)


def _with(dtype: torch.dtype) -> nn.Module:
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(torch.ones(2).to(dtype))
    return model


@pytest.mark.usefixtures("one_rank")
@each_call
def test_what_cannot_be_synchronised_is_refused(argument: str) -> None:
    given: list[object] = ["model"]
    if argument != "ddp_model":
        model, ddp, optimizer = Mlp(), DistributedDataParallel(Mlp()), torch.optim.SGD(Mlp().parameters())
        given += [
            optimizer,
            optimizer.param_groups,
            ddp,
            nn.Sequential(ddp),
            nn.Linear(2, 2, device="meta"),
            nn.Linear(2, 2).requires_grad_(False),
            model.named_parameters(),
            [],
            [torch.ones(2)],
            [torch.ones(2, requires_grad=True) * 2],
            [nn.Linear(1, 1), nn.Linear(1, 1)],
            [nn.Parameter(distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,))))],
        ]
    for each in given:
        refused(lambda: CALLS[argument](each), f"{argument}:")


@pytest.mark.usefixtures("one_rank")
@each_call
def test_bad_settings_are_refused_and_leave_nothing_behind(argument: str) -> None:
    call, model = CALLS[argument], Mlp()
    for compression in ("fp32", "fp8", None):
        refused(lambda: call(model, compression), "compression:")
    for wire in ("bf16", "fp16"):
        refused(lambda: call(_with(torch.complex64), wire), f"'{wire}' cannot carry parameter odd")
    for group in (init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), "world", 0):
        refused(lambda: call(model, process_group=group), "process_group:")
    of_gpus, gloo = dist.ProcessGroup(dist.HashStore(), 0, 1), dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    of_gpus._register_backend(torch.device("cuda"), gloo, backend)
    refused(lambda: call(model, process_group=of_gpus), "process_group:")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    call(model)


@pytest.mark.usefixtures("one_rank")
def test_a_compression_that_is_refused_changes_nothing() -> None:
    for wrong in (torch.optim.SGD(Mlp().parameters()), fastsync.TopK()):
        refused(lambda: fastsync.attach(Mlp(), wrong), "compression:")  # type: ignore[arg-type]
    for cap in (0, -1.0, float("nan"), float("inf"), "25"):
        refused(lambda: fastsync.attach(Mlp(), bucket_cap_mb=cap), "bucket_cap_mb:")
    for entry_point in ("hook", "attach", "sharded"):
        given = average(entry_point, Mlp(), "bf16")
        argument = "gradients" if entry_point == "sharded" else "compression"
        refused(partial(setattr, given, "compression", "int3"), f"{argument}:")
        assert given.compression.wire == "bf16"
    for entry_point in ("hook", "attach"):
        handle = average(entry_point, _with(torch.complex64)).handle
        refused(partial(setattr, handle, "compression", "fp16"), "'fp16' cannot carry parameter odd")
        assert handle.compression.wire == "none"
    like = [torch.ones(2, dtype=torch.complex64)]
    for wire, hook in (("fp16", fastsync.fp16_compress_hook), ("bf16", fastsync.bf16_compress_hook)):
        ddp = given_ddp(like)
        ddp.register_comm_hook(None, hook)
        refused(lambda: backward_of(ddp, like), f"cannot travel with compression {wire}")


def test_without_a_process_group() -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters())
    calls: list[Callable[[], object]] = [
        partial(fastsync.attach, model),
        partial(fastsync.all_reduce_gradients, model),
        HookState,
        partial(fastsync.check_consistency, model),
        partial(fastsync.sync_weights, model),
        partial(fastsync.DiLoCo, model, optimizer),
        partial(fastsync.LocalSGD, model, optimizer),
        measure_group,
        partial(fastsync.register_fsdp, model),
        partial(fastsync.distributed.dist_sum, torch.ones(1)),
        partial(fastsync.distributed.dist_mean, torch.ones(1)),
    ]
    for call in calls:
        refused(call)
    refused(calls[0], "there is no process group yet", "fastsync.distributed.process_group(")


@on_ranks(2)
def test_sharded_models_are_refused_before_and_after(rank: int, world_size: int) -> None:
    mesh, cpu = init_device_mesh("cpu", (world_size,)), torch.device("cpu")
    calls = [
        fastsync.attach,
        fastsync.all_reduce_gradients,
        lambda model: fastsync.attach(model.parameters()),
        fastsync.register_comm_hook,
        fastsync.check_consistency,
    ]
    flat = "is sharded by FullyShardedDataParallel"
    ways: list[tuple[Callable[[nn.Module], nn.Module], str]] = [
        (lambda model: fully_shard(model, mesh=mesh), "is a DTensor"),
        (lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu), flat),
        (lambda model: FullyShardedDataParallel(model, device_id=cpu), flat),
    ]
    for shard, message in ways:
        model = shard(Mlp())
        for call in calls:
            refused(lambda: call(model), message)
    partly = nn.Sequential(nn.Linear(2, 2), fully_shard(nn.Linear(2, 2), mesh=mesh))
    refused(lambda: fastsync.attach(partly), "parameter 1.weight is a DTensor")
    for index, (shard, _) in enumerate(ways):  # after attach: FSDP averages by itself
        model = Mlp()
        sync = fastsync.attach(model)
        sharded = shard(model)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        sharded(torch.ones(2, 32)).sum().backward()
        keeps_parameters = index == 1  # which fastsync averages no more
        message = "no rank has averaged" if keeps_parameters else "no gradients have been synchronised yet"
        refused(optimizer.step, message, kind=RuntimeError) if keeps_parameters else optimizer.step()
        refused(lambda: fastsync.clip_grad_norm_(sync, 1.0), message, kind=RuntimeError)
    dist.barrier()


# ---- what is noticed later ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_a_parameter_is_averaged_by_one_engine() -> None:
    """Not by two of attach, nor by attach and by DDP's hook, in whatever order they come."""
    model = Mlp()
    weight = model.layers[0].weight
    sync = fastsync.attach(model)
    for again in (model, [weight], nn.Sequential(model)):
        refused(lambda: fastsync.attach(again), "is averaged already, by attach(); call detach()")
    sync.detach()
    for overlap in (False, True):
        sync = fastsync.attach([weight], overlap=overlap)
        refused(lambda: fastsync.attach(model), "parameter layers.0.weight is averaged already,")
        sync.detach()
    ddp = DistributedDataParallel(model)
    hook = fastsync.register_comm_hook(ddp)
    for again in (model, model.layers[2], [model.layers[4].bias]):
        refused(lambda: fastsync.attach(again), "averaged already, by register_comm_hook")
    del ddp, hook
    gc.collect()
    sync = fastsync.attach(model.layers[2])  # the wrapper is gone, and its hook with it
    ddp = DistributedDataParallel(model)
    refused(lambda: fastsync.register_comm_hook(ddp), "ddp_model:")
    sync.detach()
    fastsync.register_comm_hook(ddp)


@pytest.mark.usefixtures("one_rank")
def test_plain_ddp_and_attach_are_not_for_one_model() -> None:
    """Or gradients would be averaged twice: with op="sum" they were multiplied by the number of ranks."""
    model, other = Mlp(), Mlp()
    ddp = DistributedDataParallel(model)
    for inside in (model, list(model.parameters())):
        refused(lambda: fastsync.attach(inside), "module_or_params:")
    model.later = nn.Linear(6, 6)
    fastsync.attach(model.later)  # DDP does not know of it
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(other, ["layers.0.weight"])
    around_other = DistributedDataParallel(other)
    fastsync.attach([other.layers[0].weight])
    with patch.object(torch._dynamo.config, "optimize_ddp", "python_reducer"):
        by_python = DistributedDataParallel(third := Mlp())
    refused(lambda: fastsync.attach(third), "is in a DistributedDataParallel")
    del ddp, around_other, by_python
    sync = fastsync.attach(model.layers)  # the wrapper is gone
    model.layers(torch.ones(1, 32)).sum().backward()
    torch.optim.SGD(model.layers.parameters()).step()
    ddp = DistributedDataParallel(model.layers)
    optimizer = torch.optim.Adam(model.layers.parameters())
    optimizer.zero_grad()
    ddp(torch.ones(1, 32)).sum().backward()
    for _ in range(2):
        refused(optimizer.step, "is in a DistributedDataParallel")
    sync.detach()
    optimizer.step()


@pytest.mark.usefixtures("one_rank")
def test_sparse_gradients_that_show_up_late() -> None:
    embedding = nn.Embedding(3, 2)
    sync = fastsync.attach(embedding)
    for sparse in (True, False):
        embedding.sparse = sparse
        embedding.zero_grad()
        message = r"parameter weight got a sparse gradient.*use sparse=False"
        with pytest.raises(ValueError, match=message) if sparse else nullcontext():
            embedding(torch.tensor([1])).sum().backward()
    assert embedding.weight.grad.sum() == 2
    assert sync.stats().num_steps == 2


@pytest.mark.usefixtures("one_rank")
def test_a_gradient_that_is_used_up_inside_backward() -> None:
    model = Mlp()
    fastsync.attach(model)
    hook = model.layers[0].weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    refused(lambda: model(torch.ones(1, 32)).sum().backward(), "gradient of layers.0.weight was gone")
    hook.remove()
    model.zero_grad()
    model(torch.ones(1, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.usefixtures("one_rank")
def test_compiled_autograd_is_refused_where_it_would_skip_the_hooks() -> None:
    model = nn.Linear(2, 2)
    compiled = partial(compiled_autograd._enable, torch.compile(backend="eager"))
    sync = fastsync.attach(model)
    with compiled(), pytest.raises(RuntimeError, match=r"compiled autograd does not run the hooks.*overlap=False"):
        model(torch.ones(1, 2)).sum().backward()
    sync.detach()
    sync = fastsync.attach(model, overlap=False)
    model.zero_grad()
    with compiled():
        model(torch.ones(1, 2)).sum().backward()
    sync.synchronize()
    assert sync.stats().num_steps == 1


@pytest.mark.usefixtures("one_rank")
def test_calls_inside_a_backward_are_refused() -> None:
    grads = [torch.ones(3), torch.ones(2)]
    model = Given(grads)
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    calls = []

    def hook(_: torch.Tensor) -> None:
        for call in ("synchronize", "detach"):
            refused(getattr(sync, call), f"{call}() was called inside a backward", kind=RuntimeError)
            calls.append(call)

    for weight in model.weights:
        weight.register_post_accumulate_grad_hook(hook)
    model(grads).backward()
    assert calls == ["synchronize", "detach"] * 2
    assert sync.stats().num_steps == 1


# ---- ranks that mean different things -------------------------------------------------------------------------------

DISAGREE = "the ranks do not agree on what to synchronise: "


@on_ranks(3, cases={"entry_point": ALL})
def test_ranks_that_differ_are_told_on_every_rank(rank: int, world_size: int, entry_point: str) -> None:
    """They are told on every rank, with who has what, and go on with what they agree on."""
    grads = [torch.full((300,), 1.0 + rank)]

    def begin(wire: str, numel: int) -> None:
        average(entry_point, Given([torch.ones(numel)]), wire).step([torch.ones(numel)])

    is_odd = rank == 1
    refused(lambda: begin("none" if is_odd else "fp16", 300), DISAGREE, "rank 0, 2: ", "rank 1: compression none")
    if "hook" not in entry_point:  # of which DDP itself says it
        refused(lambda: begin("none", 200 if is_odd else 300), DISAGREE, "rank 0, 2: ", "rank 1: ")
    if entry_point in ("drop-in hook", "all_reduce"):
        return
    for wires in (["fp16", "bf16", "fp16"], ["fp16", "none", "fp16"], ["none", "fp16", "bf16"]):
        given = average(entry_point, Given(grads))
        for _ in range(3):
            given.step(grads)
        given.compression = wires[rank]
        text = refused(lambda: given.step(grads), DISAGREE)
        for other in range(world_size):
            assert re.search(rf"rank [\d, ]*{other}[\d, ]*: compression {wires[other]}", text)
    if entry_point == "hook":  # the error comes before DDP has copied anything back
        assert [grad.unique().tolist() for grad in given.grads() if grad is not None] == [[1.0 + rank]]
    if entry_point in ("attach", "synchronize"):
        given.compression = "bf16"
        assert [grad.unique().tolist() for grad in given.step(grads) if grad is not None] == [[2.0]]


@on_ranks(2)
def test_models_that_differ_are_told_when_they_are_attached(rank: int, world_size: int) -> None:
    def with_table(table: torch.Tensor | None) -> None:
        model = nn.Linear(2, 3)
        model.register_buffer("table", table)
        fastsync.attach(model)

    frozen = nn.Linear(2, 3)
    frozen.bias.requires_grad_(rank == 0)
    number = [nn.Parameter(torch.ones(2)) for _ in range(1 + rank)]
    expected: dict[str, Callable[[], object]] = {
        "bucket_cap_mb 2": lambda: fastsync.attach(Mlp(), bucket_cap_mb=1 + rank),
        "bias of shape": lambda: fastsync.attach(frozen),
        "buffer table of shape [2]": lambda: with_table(torch.zeros(1 + rank)),
        "strides [3, 1]": lambda: with_table(torch.zeros(2, 3) if rank else torch.zeros(3, 2).t()),
        "parameter 1 of": lambda: fastsync.attach(number),
        "buffer table of": lambda: with_table(torch.zeros(1) if rank else None),
    }
    for named, call in expected.items():
        refused(call, DISAGREE, "rank 0: ", "rank 1: ", named)
    # Without a broadcast nothing is sent by attach: each backward tells.
    model = nn.Linear(2, 3 + rank)
    fastsync.attach(model, init_sync=False)
    for _ in range(2):
        refused(lambda: model(torch.ones(1, 2)).sum().backward(), DISAGREE)


@on_ranks(2, cases={"entry_point": ["attach", "synchronize"]})
def test_ranks_of_which_one_alone_takes_over_weights_are_told(rank: int, world_size: int, entry_point: str) -> None:
    grads = [torch.ones(3)]
    named = f"{DISAGREE}rank 1: init_sync False; rank 0: init_sync True"
    refused(lambda: average(entry_point, Given(grads), init_sync=rank == 0).step(grads), named)


def _agrees_as_another_version(lines: str, group: dist.ProcessGroup, end: bytes = b"\0") -> None:
    """What a build does that has such a description where it agrees on what it synchronises."""

    def all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
        of_all = [torch.empty_like(mine) for _ in range(group.size())]
        group.allgather(of_all, mine).wait()
        return of_all

    text = lines.encode()
    hashed = 0xCBF29CE484222325
    for byte in text:
        hashed = (hashed ^ byte) * 0x100000001B3 % 2**64
    of_all = all_gather(torch.tensor([hashed - 2**64 * (hashed >> 63), len(text), 0]))
    padded = torch.full((max(int(theirs[1]) for theirs in of_all) + 1,), end[0], dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    all_gather(padded)


@on_ranks(2)
def test_a_text_that_does_not_end_is_read_no_further(rank: int, world_size: int) -> None:
    group = dist.distributed_c10d._get_default_group()
    if rank == 0:
        _agrees_as_another_version("fastsync's protocol " + "0" * 1000, group, end=b"x")
        return
    refused(lambda: _C.check_agreement(group, "lines", torch.device("cpu")), "x; rank 1: fastsync's protocol")


@on_ranks(2, cases={"entry_point": ["attach", "synchronize", "all_reduce", "DiLoCo"]})
def test_hosts_with_different_versions_are_told(rank: int, world_size: int, entry_point: str) -> None:
    model, is_outer = Given([torch.ones(3)]), entry_point == "DiLoCo"
    group = dist.distributed_c10d._get_default_group()
    if rank == 1:
        group = SurvivingGroup(group, timedelta(seconds=60)).group if is_outer else group
        _agrees_as_another_version("fastsync's protocol 0\nsomething", group)
        return
    message = "rank 1: fastsync's protocol 0; rank 0: fastsync's protocol .*; install the same version of fastsync"
    with pytest.raises(ValueError, match=DISAGREE + message):
        average(entry_point, model).step([torch.ones(3)]) if not is_outer else fastsync.DiLoCo(
            model, torch.optim.SGD(model.parameters())
        )


@on_ranks(3)
def test_saved_scales_that_differ_are_told_with_who_has_what(rank: int, world_size: int) -> None:
    grads = random_grads(rank, 0, [(300,), (200,), (400,)], torch.float32)
    names = [f"weights.{index}" for index in range(3)]
    states = [{"scales": dict.fromkeys(names, scale)} for scale in (8.0, 8.0, 4.0)]

    for number, state in enumerate((states[rank], {"scales": {}} if rank == 2 else states[0])):
        ddp = given_ddp(grads)
        hook = fastsync.register_comm_hook(ddp, "fp16")
        hook.load_state_dict(state)
        text = refused(lambda: backward_of(ddp, grads), DISAGREE)
        ranks = re.findall(r"rank ([\d, ]+): saved scales of (\d) parameters", text)
        assert sorted(ranks) == [("0, 1", "3"), ("2", "30"[number])]

    ddp = given_ddp(grads)
    hook = fastsync.register_comm_hook(ddp, "fp16")
    for _ in range(3):
        backward_of(ddp, grads)
    hook.load_state_dict(states[rank])  # in the middle of training
    refused(lambda: backward_of(ddp, grads), DISAGREE + "rank 2: saved scales of 3 parameters")


@on_ranks(2, timeout=30.0)
def test_ranks_agree_on_a_number_where_one_has_made_more_engines_before(rank: int, world_size: int) -> None:
    groups = [dist.new_group([other]) for other in range(world_size)]
    alone, model = Given([torch.ones(3)]), Given([torch.ones(3)])
    if rank == 1:
        fastsync.attach(alone, process_group=groups[rank])
        alone([torch.ones(3)]).backward()
    fastsync.attach(model)
    for step in range(3):
        model.zero_grad()
        model([torch.full((3,), float(step + 2 * rank))]).backward()
        assert model.weights[0].grad.tolist() == [step + 1.0] * 3


# ---- ranks that are lost --------------------------------------------------------------------------------------------

SECONDS = 2


def _loses_a_rank(rank: int, world_size: int, cases: Sequence[tuple[str, int]], dies: bool) -> None:
    """Each case has two ranks, of which the second does not come, so that all wait at the same time."""
    limit = timedelta(seconds=SECONDS)
    pairs = [dist.new_group([first, first + 1], timeout=limit) for first in range(0, world_size, 2)]
    (entry_point, num_good_steps), group = cases[rank // 2], pairs[rank // 2]
    grads = [torch.full((300,), 1.0 + rank % 2), torch.full((400,), 1.0)]
    given = average(entry_point, Given(grads), "bf16", group=group)
    for _ in range(num_good_steps):
        given.step(grads)
    given.model.zero_grad()
    if entry_point == "sharded":
        given.model.set_reshard_after_forward(False)
    loss = given.model(grads)  # in which DDP may rebuild its buckets
    if rank % 2 == 1 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    if rank % 2 == 0:
        refused(lambda: given.backward(loss), "failed on rank 0 of 2:", kind=RuntimeError)
        if entry_point == "synchronize":
            assert all(map(torch.equal, given.grads(), grads)), "a sync that has failed has changed gradients"
    assert time.monotonic() - began < 10 * SECONDS
    if not dies:
        dist.barrier()  # of the default group: the second ranks live


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_that_is_killed_is_an_error_of_the_others(shared_memory: bool) -> None:
    cases = [(entry_point, 3) for entry_point in ALL]
    lost = range(1, 2 * len(cases), 2)
    run_ranks(_loses_a_rank, 2 * len(cases), cases, True, shared_memory=shared_memory, lost=lost, timeout=100)


def test_a_rank_that_does_not_come_is_an_error_within_the_timeout() -> None:
    """In the first sync, in that after DDP has rebuilt its buckets, in an ordinary one."""
    cases = [("hook", 0), ("hook", 1), ("hook", 3), ("drop-in hook", 1), ("attach", 0), ("attach", 3)]
    cases += [("synchronize", 0), ("synchronize", 3), ("all_reduce", 0), ("all_reduce", 3)]
    run_ranks(_loses_a_rank, 2 * len(cases), cases, False, shared_memory=False, timeout=100)

"""What attach and all_reduce_gradients refuse, and how they say it; and what happens where the ranks do not agree."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.models import SMALL_BUCKETS, Fails, Given, Mlp, grads_of, group_of_one
from tests.ranks import run_ranks


@pytest.fixture
def one_rank() -> Iterator[None]:
    with group_of_one():
        yield


def _linear_in(dtype: torch.dtype) -> nn.Module:
    return nn.Linear(2, 2, dtype=dtype)


def _frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "ddp": (lambda: DistributedDataParallel(Mlp()), "the module is wrapped in DistributedDataParallel.*register_comm"),
    "ddp inside": (lambda: nn.Sequential(DistributedDataParallel(Mlp())), "0 is wrapped in DistributedDataParallel"),
    "sparse": (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), r"0\.weight gets sparse gradients"),
    "float8": (
        lambda: [nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))],
        r"parameter 0 is torch\.float8_e4m3fn; fastsync handles float32",
    ),
    "lazy": (lambda: nn.LazyLinear(3), "parameter weight is not initialised yet; run a forward first"),
    "frozen": (_frozen, "none of its 2 parameters requires a gradient"),
    "nothing": (list, "none of its 0 parameters requires a gradient"),
    "string": (lambda: "model", "is a str; pass the module or its parameters, not"),
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
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("call", [fastsync.attach, fastsync.all_reduce_gradients])
def test_what_cannot_be_synchronised_is_refused(call: Callable[..., object], what: str) -> None:
    make, message = REFUSED[what]
    argument = "module_or_params" if call is fastsync.attach else "params"
    with pytest.raises(ValueError, match=f"{argument}: .*{message}"):
        call(make())


@pytest.mark.usefixtures("one_rank")
def test_bad_settings_are_refused() -> None:
    model = Mlp()
    for cap in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"bucket_cap_mb: expected a positive number of MiB, got {cap!r}"):
            fastsync.attach(model, bucket_cap_mb=cap)
    with pytest.raises(ValueError, match="compression: expected one of 'none', 'bf16', 'fp16'"):
        fastsync.attach(model, "fp32")
    with pytest.raises(ValueError, match=r"'bf16' cannot carry parameter weight, which is torch\.complex64"):
        fastsync.attach(_linear_in(torch.complex64), "bf16")
    sync = fastsync.attach(_linear_in(torch.complex64))
    with pytest.raises(ValueError, match="'fp16' cannot carry parameter weight"):
        sync.compression = "fp16"
    assert sync.compression.wire == "none"
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "pp", "tp"))
    with pytest.raises(ValueError, match=r"process_group: the DeviceMesh has 3 dimensions .*as in mesh\['dp'\]"):
        fastsync.attach(model, process_group=mesh)
    with pytest.raises(ValueError, match="process_group: expected a ProcessGroup"):
        fastsync.attach(model, process_group="world")
    # None of these left anything behind.
    fastsync.attach(model)


def test_without_a_process_group() -> None:
    for call in (fastsync.attach, fastsync.all_reduce_gradients):
        with pytest.raises(ValueError, match="process_group: None stands for the default group, and there is none yet"):
            call(Mlp())


@pytest.mark.usefixtures("one_rank")
def test_a_parameter_is_attached_once() -> None:
    model = Mlp()
    sync = fastsync.attach(model)
    weight = model.layers[0].weight
    for again in (model, [weight], nn.Sequential(model)):
        with pytest.raises(ValueError, match=re.escape("attached already (as layers.0.weight); call detach()")):
            fastsync.attach(again)
    sync.detach()
    for overlap in (False, True):
        sync = fastsync.attach([weight], overlap=overlap)
        with pytest.raises(ValueError, match=r"parameter layers\.0\.weight is attached already"):
            fastsync.attach(model)
        sync.detach()
    fastsync.attach(model)


@pytest.mark.usefixtures("one_rank")
def test_one_model_is_averaged_by_one_engine() -> None:
    """Not by attach and by DDP's hook, in whatever order they come."""
    model = Mlp()
    ddp = DistributedDataParallel(model)
    hook = fastsync.register_comm_hook(ddp)
    for again in (model, model.layers[2], [model.layers[4].bias]):
        with pytest.raises(ValueError, match=r"parameter .* averaged already, by register_comm_hook .*; leave one"):
            fastsync.attach(again)
    del ddp, hook
    gc.collect()
    sync = fastsync.attach(model.layers[2])  # the wrapper is gone, and its hook with it
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"ddp_model: parameter layers\.2\.weight is attached already .*detach\(\)"):
        fastsync.register_comm_hook(ddp)
    sync.detach()
    fastsync.register_comm_hook(ddp)


@pytest.mark.usefixtures("one_rank")
def test_what_attach_returns_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"returns no model; call the one that you gave it"):
        fastsync.attach(Mlp())(torch.ones(1, 32))


@pytest.mark.usefixtures("one_rank")
def test_parameters_in_the_places_of_those_that_were_attached() -> None:
    """Also once these have been averaged."""
    model, unrelated = Mlp(), nn.Linear(2, 2)
    sync = fastsync.attach(model)
    for step in range(2):
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(1, 32)).sum().backward()
        with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\)") if step else nullcontext():
            optimizer.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    torch.optim.SGD(unrelated.parameters()).step()
    sync.detach()
    fastsync.attach(model)
    torch.optim.SGD(model.parameters()).step()
    torch.optim.SGD(unrelated.parameters()).step()


@pytest.mark.usefixtures("one_rank")
def test_parameters_that_the_model_got_later_are_told_of() -> None:
    model, unrelated = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Linear(2, 2)
    fastsync.attach(model)
    model[1] = nn.Linear(2, 1)
    model[0].adapter = nn.Linear(2, 2)
    model[0].adapter.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*model.parameters(), *unrelated.parameters()])
    told = r"3 of the optimizer's parameters .*: 0\.adapter\.weight, 1\.weight, 1\.bias; call detach\(\)"
    with pytest.warns(UserWarning, match=told) as warned:
        optimizer.step()
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]
    optimizer.step()  # once
    fastsync.attach([*model[1].parameters(), model[0].adapter.weight])
    torch.optim.SGD(model.parameters()).step()


@pytest.mark.usefixtures("one_rank")
def test_sparse_gradients_that_show_up_late() -> None:
    embedding = nn.Embedding(3, 2)
    sync = fastsync.attach(embedding)
    embedding.sparse = True
    with pytest.raises(ValueError, match=r"parameter weight got a sparse gradient.*use sparse=False"):
        embedding(torch.tensor([1])).sum().backward()
    embedding.sparse = False
    embedding.zero_grad()
    embedding(torch.tensor([1])).sum().backward()
    assert embedding.weight.grad.sum() == 2
    assert sync.stats().num_steps == 2


@pytest.mark.usefixtures("one_rank")
def test_a_gradient_that_is_used_up_inside_backward() -> None:
    model = Mlp()
    fastsync.attach(model)
    weight = model.layers[0].weight

    def step(_: torch.Tensor) -> None:
        weight.data.sub_(weight.grad)
        weight.grad = None

    hook = weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(ValueError, match=r"gradient of layers\.0\.weight was gone.*optimizer step inside.*step after"):
        model(torch.ones(1, 32)).sum().backward()
    hook.remove()
    model.zero_grad()
    model(torch.ones(1, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def _ends_of_two_engines(rank: int, world_size: int) -> None:
    used, idle, other = (nn.Parameter(torch.zeros(40)) for _ in range(3))
    fastsync.attach([used, idle])
    fastsync.attach([other])
    if rank == 0:
        idle.grad = torch.ones(40).to_sparse()
    loss = ((used + other) * (1.0 + rank)).sum()
    if rank == 0:
        with pytest.raises(ValueError, match="parameter 1 got a sparse gradient"):
            loss.backward()
    else:
        loss.backward()
        assert used.grad is not None
        assert used.grad.isnan().all()
    assert other.grad is not None
    assert other.grad.tolist() == [1.5] * 40


def test_an_error_in_one_of_several_engines_keeps_no_rank_waiting() -> None:
    run_ranks(_ends_of_two_engines, 2)


class _GivesDTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(grad, init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("one_rank")
def test_gradients_without_memory_of_their_own() -> None:
    parameter = nn.Parameter(torch.zeros(8))
    fastsync.attach([parameter])
    with pytest.raises(ValueError, match=r"parameter 0 got a gradient of a tensor subclass.*DTensor.*to_local"):
        _GivesDTensors.apply(parameter).sum().backward()


STRIDES: dict[str, Callable[[], nn.Parameter]] = {
    "channels_last 1x1": lambda: nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last).weight,
    "channels_last depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4).to(memory_format=torch.channels_last).weight,
    "transposed row": lambda: nn.Parameter(torch.ones(1, 7).t()),
    "every second column": lambda: nn.Parameter(torch.ones(4, 6)[:, ::2]),
    "gaps": lambda: nn.Parameter(torch.empty_strided((3, 2), (4, 1)).fill_(1.0)),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("what", STRIDES)
def test_parameters_of_any_strides(what: str) -> None:
    parameter = STRIDES[what]()
    fastsync.attach([parameter])
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.unique().tolist() == [2.0]


@pytest.mark.usefixtures("one_rank")
def test_more_buckets_than_there_are_tags_for() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4097)]
    fastsync.attach(parameters, bucket_cap_mb=1e-6)
    with pytest.raises(ValueError, match=r"gradients in 4097 buckets, but there may be 4096.*larger bucket_cap_mb"):
        torch.stack(parameters).sum().backward()


@pytest.mark.usefixtures("one_rank")
def test_sharded_parameters_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh))
    with pytest.raises(ValueError, match="parameter 0 is a DTensor, which wraps other tensors"):
        fastsync.attach([weight])


@pytest.mark.usefixtures("one_rank")
def test_compiled_autograd_is_refused_where_it_would_skip_the_hooks() -> None:
    model = nn.Linear(2, 2)
    sync = fastsync.attach(model)
    compiled = partial(compiled_autograd._enable, torch.compile(backend="eager"))
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
def test_statistics_before_the_first_sync() -> None:
    sync = fastsync.attach(Mlp())
    with pytest.raises(RuntimeError, match="no gradients have been synchronised yet"):
        _ = sync.grad_stats()
    with pytest.raises(RuntimeError, match="no gradients have been synchronised yet"):
        fastsync.clip_grad_norm_(sync, 1.0)
    assert sync.stats().num_steps == 0


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("call", ["synchronize", "detach"])
def test_calls_inside_a_backward_are_refused(call: str) -> None:
    model = Given([torch.ones(3), torch.ones(2)])
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    refused = []

    def hook(_: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=rf"{call}\(\) was called inside a backward; call it after"):
            getattr(sync, call)()
        refused.append(call)

    for weight in model.weights:
        weight.register_post_accumulate_grad_hook(hook)
    model([torch.ones(3), torch.ones(2)]).backward()
    assert refused == [call] * 2
    assert sync.stats().num_steps == 1


# ---- ranks that differ ------------------------------------------------------------------------------------------


def _differences(rank: int, world_size: int) -> None:
    def other_shape() -> object:
        return fastsync.attach(nn.Linear(2, 3 + rank))

    def other_compression() -> object:
        return fastsync.attach(nn.Linear(2, 3), ["none", "fp16"][rank])

    def other_cap() -> object:
        return fastsync.attach(nn.Linear(2, 3), bucket_cap_mb=1 + rank)

    def other_frozen() -> object:
        model = nn.Linear(2, 3)
        model.bias.requires_grad_(rank == 0)
        return fastsync.attach(model)

    def other_buffer() -> object:
        model = nn.Linear(2, 3)
        model.register_buffer("count", torch.zeros(1 + rank))
        return fastsync.attach(model)

    def other_strides() -> object:
        model = nn.Linear(2, 3)
        model.register_buffer("table", torch.zeros(2, 3) if rank else torch.zeros(3, 2).t())
        return fastsync.attach(model)

    def other_number() -> object:
        return fastsync.attach([nn.Parameter(torch.ones(2)) for _ in range(1 + rank)])

    expected = {
        other_shape: r"rank 0: parameter weight of shape \[3, 2\].*; rank 1: parameter weight of shape \[4, 2\]",
        other_compression: "rank 1: compression fp16; rank 0: compression none|rank 0: .*none; rank 1: .*fp16",
        other_cap: "rank 0: bucket_cap_mb 1; rank 1: bucket_cap_mb 2",
        other_frozen: "bias of shape .*frozen",
        other_buffer: r"buffer count of shape \[1\].*buffer count of shape \[2\]",
        other_strides: r"buffer table of shape .*strides \[1, 2\].*strides \[3, 1\]",
        other_number: "rank 0: nothing; rank 1: parameter 1 of shape|rank 1: parameter 1 of shape.*; rank 0: nothing",
    }
    for attach, message in expected.items():
        with pytest.raises(ValueError, match=f"the ranks do not agree on what to synchronise: .*({message})"):
            attach()
    # Without a broadcast nothing is sent by attach: the first backward tells.
    model = nn.Linear(2, 3 + rank)
    sync = fastsync.attach(model, init_sync=False)
    for _ in range(2):
        with pytest.raises(ValueError, match="the ranks do not agree on what to synchronise"):
            model(torch.ones(1, 2)).sum().backward()
    sync.detach()
    # The same ranks go on with what they agree on, and notice where compression is set to different values.
    model = nn.Linear(2, 3)
    sync = fastsync.attach(model)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.weight.grad.unique().tolist() == [1.5]
    sync.compression = ["bf16", "fp16"][rank]
    with pytest.raises(ValueError, match=r"compression bf16.*compression fp16"):
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
    sync.compression = "bf16"
    model.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.weight.grad.unique().tolist() == [1.5]


def test_ranks_that_differ_are_told_on_every_rank() -> None:
    run_ranks(_differences, 2)


def _lost_peer(rank: int, world_size: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = Mlp()
    fastsync.attach(model, process_group=group)
    model(torch.ones(1, 32)).sum().backward()
    if rank == 1:
        dist.barrier()  # of the default group: this rank lives, but does not come
        return ""
    with pytest.raises(RuntimeError, match="fastsync: averaging bucket 0 failed on rank 0 of 2: ") as error:
        model(torch.ones(1, 32)).sum().backward()
    dist.barrier()
    return str(error.value)


def test_a_rank_that_does_not_come_ends_in_an_error_that_says_what_was_waited_for() -> None:
    message, _ = run_ranks(_lost_peer, 2)
    assert "the process group's time-out" in message


def _step(model: Given, grads: list[torch.Tensor], *, fails: bool, set_to_none: bool = True) -> None:
    """A backward that fails does so when all gradients but the first are there."""
    model.zero_grad(set_to_none=set_to_none)
    weights = [Fails.apply(weight) if fails and index == 0 else weight for index, weight in enumerate(model.weights)]
    loss = sum((weight * grad).sum() for weight, grad in zip(weights, grads, strict=True))
    if fails:
        with pytest.raises(ArithmeticError, match="as told"):
            loss.backward()
    else:
        loss.backward()


def _fails_then_recovers(rank: int, world_size: int) -> None:
    grads = [torch.full((300,), 1.0 + rank) for _ in range(3)]
    for wire in ("none", "fp16"):
        for set_to_none in (True, False):
            model = Given(grads)
            sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
            for fails in (True, False, True, True, False, False):
                if fails and rank == 1:
                    time.sleep(0.1)  # what the other rank has sent is still on its way when it goes on
                _step(model, grads, fails=fails, set_to_none=set_to_none)
                if not fails:
                    assert [grad.unique().tolist() for grad in grads_of(model)] == [[1.5]] * 3
            assert sync.grad_stats().num_nonfinite == 0


def test_a_backward_that_fails_on_all_ranks_spoils_nothing() -> None:
    run_ranks(_fails_then_recovers, 2)


def _fails_on_one_rank(rank: int, world_size: int) -> None:
    """The others get nan, for they cannot know; then all go on in step, with the same scales."""
    for wire in ("none", "bf16", "fp16"):
        for failing_step in (0, 2):
            model = Given([torch.zeros(300)] * 3)
            sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
            for step in range(6):
                fails = step == failing_step
                sync.piggyback("step", torch.tensor(float(step)))
                # Smaller from the failing step on, so that fp16's scales have reason to move.
                size = 2.0**-10 if step >= failing_step else 1.0
                _step(model, [torch.full((300,), (1.0 + rank) * size)] * 3, fails=fails and rank == 1)
                if fails:
                    assert rank == 1 or any(grad.isnan().all() for grad in grads_of(model))
                    assert rank == 1 or sync.piggybacked()["step"].isnan() or failing_step == 0
                    continue
                assert [grad.unique().tolist() for grad in grads_of(model)] == [[1.5 * size]] * 3, f"{wire}, {step}"
                assert sync.piggybacked()["step"] == step
            states: list[object] = [None, None]
            dist.all_gather_object(states, sync.state_dict())
            assert states[0] == states[1]


def test_a_backward_that_fails_on_one_rank_is_noticed_on_the_others() -> None:
    run_ranks(_fails_on_one_rank, 2)


def _goes_on_with_others_collectives(rank: int, world_size: int) -> None:
    for wire in (
        "none",
        "fp16",
        fastsync.Compression("bf16", reduce="fp32"),
        fastsync.Compression("int8", error_feedback=True),
    ):
        for failing_step in (0, 2):
            model, other = Given([torch.zeros(700)] * 3), Given([torch.zeros(2)])
            for attached in (model, other):
                fastsync.attach(attached, wire, bucket_cap_mb=SMALL_BUCKETS)
            for step in range(4):
                other([torch.ones(2)]).backward()
                fails = step == failing_step and rank == 1
                _step(model, [torch.full((700,), 1.0 + rank)] * 3, fails=fails)
                total = torch.full((5,), float(rank + 1))
                dist.all_reduce(total)
                assert total.tolist() == [sum(range(1, world_size + 1))] * 5
                if step != failing_step:
                    mean = sum(range(1, world_size + 1)) / world_size
                    torch.testing.assert_close(grads_of(model), [torch.full((700,), mean)] * 3, rtol=1e-2, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_after_a_failed_backward_the_group_is_free_for_other_collectives(world_size: int) -> None:
    run_ranks(_goes_on_with_others_collectives, world_size)


def _changes_after_a_failed_backward(rank: int, world_size: int, change: str) -> None:
    grads = [torch.full((300,), 1.0 + rank)] * 3
    model = Given(grads)
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(5):
        fails = step == 2
        if fails and rank == 0:
            time.sleep(0.2)  # so that the other one changes it first
        _step(model, grads, fails=fails and rank == 1)
        if not fails:
            assert [grad.unique().tolist() for grad in grads_of(model)] == [[1.5]] * 3, f"step {step}"
        elif change == "compression":
            sync.compression = "bf16"
        elif change == "weight":
            sync.set_weight(2.0)
        elif change == "rider":
            sync.piggyback("new", torch.tensor(1.0 + rank))
        elif change == "state":
            states: list[Any] = [None] * world_size
            dist.all_gather_object(states, sync.state_dict())
            assert states[0] == states[1]
            sync.load_state_dict({**states[rank], "step": 7})
    assert change != "rider" or sync.piggybacked() == {} or sync.piggybacked()["new"] == 1.5


@pytest.mark.parametrize("change", ["compression", "weight", "rider", "state"])
def test_what_changes_after_a_failed_backward_is_for_the_next_step(change: str) -> None:
    run_ranks(_changes_after_a_failed_backward, 2, change, timeout=60)


def _refused_on_one_rank(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=10))
    for dtype, compression in ((torch.float8_e4m3fn, "none"), (torch.complex64, "bf16")):
        parameter = nn.Parameter(torch.zeros(8))
        sync = fastsync.attach([parameter], compression, process_group=group, overlap=False, init_sync=False)
        whole = parameter.data
        if rank == 1:
            parameter.data = whole.to(dtype)
        with pytest.raises(ValueError, match=r"the ranks do not agree .*: parameter 0 of shape"):
            sync.synchronize()
        parameter.data = whole.to(dtype)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"parameter 0 is .*, which cannot be synchronised with compression"):
                sync.synchronize()
        parameter.data = whole
        parameter.grad = torch.full((8,), 1.0 + rank)
        sync.synchronize()
        assert parameter.grad.tolist() == [1.5] * 8
        sync.detach()


def test_a_dtype_that_one_rank_alone_refuses_is_refused_on_all() -> None:
    run_ranks(_refused_on_one_rank, 2, timeout=60)


class _Wrapped(torch.Tensor):
    """Of no memory of its own, and nothing can be asked of it."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> _Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a wrapper")


def _wrapped_on_one_rank(rank: int, world_size: int) -> None:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    fastsync.attach(parameters, process_group=dist.new_group(timeout=timedelta(seconds=10)))
    if rank == 1:
        # A hook of the user's, before this one's engine looks.
        parameters[0].register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", _Wrapped(each.detach())))
    loss = sum(each.sum() * (1.0 + rank) for each in parameters)
    if rank == 1:
        with pytest.raises(ValueError, match="parameter 0 got a gradient of a tensor subclass that has no memory"):
            loss.backward()
    else:
        loss.backward()
        assert any(each.grad.isnan().all() for each in parameters)


def test_a_gradient_without_memory_on_one_rank_keeps_no_rank_waiting_in_the_first_step() -> None:
    run_ranks(_wrapped_on_one_rank, 2, timeout=60)

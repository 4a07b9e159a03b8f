"""What attach and all_reduce_gradients refuse, and how they say it; and what happens where the ranks do not agree."""

from __future__ import annotations

import gc
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
from tests.ranks import on_ranks


@pytest.fixture
def one_rank() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.mark.usefixtures("one_rank")
def test_a_parameter_is_attached_once() -> None:
    model = Mlp()
    sync = fastsync.attach(model)
    weight = model.layers[0].weight
    for again in (model, [weight], nn.Sequential(model)):
        with pytest.raises(ValueError, match=r"parameter .* is averaged already, by attach\(\); call detach\(\)"):
            fastsync.attach(again)
    sync.detach()
    for overlap in (False, True):
        sync = fastsync.attach([weight], overlap=overlap)
        with pytest.raises(ValueError, match=r"parameter layers\.0\.weight is averaged already, by attach\(\)"):
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
    with pytest.raises(ValueError, match=r"ddp_model: parameter layers\.2\.weight is averaged already, by attach"):
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


@on_ranks(2)
def test_an_error_in_one_of_several_engines_keeps_no_rank_waiting(rank: int, world_size: int) -> None:
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


@on_ranks(2)
def test_a_backward_that_fails_on_one_rank_is_noticed_on_the_others(rank: int, world_size: int) -> None:
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


@pytest.mark.parametrize("change", ["compression", "weight", "rider", "state"])
@on_ranks(2, timeout=60)
def test_what_changes_after_a_failed_backward_is_for_the_next_step(rank: int, world_size: int, change: str) -> None:
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


@on_ranks(2, timeout=60)
def test_a_dtype_that_one_rank_alone_refuses_is_refused_on_all(rank: int, world_size: int) -> None:
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


class _Wrapped(torch.Tensor):
    """Of no memory of its own, and nothing can be asked of it."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> _Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a wrapper")


@on_ranks(2, timeout=60)
def test_a_gradient_without_memory_on_one_rank_keeps_no_rank_waiting(rank: int, world_size: int) -> None:
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

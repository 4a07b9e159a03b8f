"""An optimizer that steps inside backward, with gradients that nobody has averaged yet, is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.engine.entry_points import average
from tests.models import Mlp, assert_same_on_all_ranks, batch
from tests.ranks import on_ranks
from tests.refused import refused


def _steps_in_a_hook(model: nn.Module) -> None:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()

        parameter.register_post_accumulate_grad_hook(step)


def _pytorchs_own(model: nn.Module) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


@on_ranks(2, cases={"entry_point": ["attach", "synchronize", "hook"], "way": [_steps_in_a_hook, _pytorchs_own]})
def test_a_step_inside_backward_is_refused(rank: int, world_size: int, entry_point: str, way: Any) -> None:
    torch.manual_seed(0)
    model = average(entry_point, Mlp()).model
    before = [parameter.detach().clone() for parameter in model.parameters()]
    way(model)
    # DDP knows PyTorch's own and wants a hook of its own for it, which it cannot have any more.
    message = r"can only be called once|stepped inside backward\(\).*step after backward\(\) has returned"
    with pytest.raises(RuntimeError, match=message):
        model(batch(rank, 0)).square().mean().backward()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert_same_on_all_ranks(list(model.parameters()))


@pytest.mark.usefixtures("one_rank")
def test_hooks_that_only_look_and_steps_of_other_models_are_let_through() -> None:
    model, other = Mlp(), Mlp()
    sync = fastsync.attach(model)
    other(batch(0, 0)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # before the first backward
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.norm()))
    _steps_in_a_hook(other)  # in the same backward, and nobody averages these
    (model(batch(0, 0)) + other(batch(0, 0))).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert len(seen) == 6
    assert sync.stats().num_steps == 1
    sync.detach()
    _pytorchs_own(model)
    model.zero_grad()
    model(batch(0, 0)).square().mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- gradients that no rank has averaged ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_clipped", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.usefixtures("one_rank")
def test_a_backward_after_the_sync_is_noticed(overlap: bool, is_clipped: bool) -> None:
    """The last micro-batch is inside ``no_sync``, or comes after ``synchronize()``: its gradients are this rank's."""
    model = Mlp()
    sync = fastsync.attach(model, overlap=overlap)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def average() -> None:
        model(batch(0, 0)).square().mean().backward()
        if not overlap:
            sync.synchronize()

    def backward() -> None:
        with sync.no_sync():
            model(batch(0, 1)).square().mean().backward()

    for order in ([backward, average], [average, backward]):
        for call in order:
            call()
        is_right = order[-1] is average
        if is_clipped and (overlap or is_right):  # Python has seen the gradients then
            fastsync.clip_grad_norm_(sync, 1.0)
        message = r"gradients that no rank has averaged, such as that of layers\.0\.weight; (run the last|call sync)"
        with nullcontext() if is_right else pytest.raises(RuntimeError, match=message):
            optimizer.step()
        optimizer.zero_grad()
    average()
    backward()
    with sync.no_sync():
        optimizer.step()
    backward()
    optimizer.zero_grad()  # these do not count
    average()
    fastsync.clip_grad_norm_(sync, 1.0)
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 8  # what the ranks do alike
    optimizer.step()


@on_ranks(2, cases={"entry_point": ["hook", "attach"]})
def test_a_second_step_with_the_same_gradients_is_refused(rank: int, world_size: int, entry_point: str) -> None:
    given = average(entry_point, Mlp())
    optimizer = torch.optim.Adam(given.model.parameters())
    for number in range(2):
        given.backward(given.model(batch(rank, number)).square().mean())
        optimizer.step()
        refused(lambda: optimizer.step(), "Adam has stepped with these gradients already,", kind=RuntimeError)
        optimizer.zero_grad()
        optimizer.step()


# ---- hooks that run more than once, or for no step of the training --------------------------------------------------


class Clipped(torch.optim.Adam):
    """Clips, as many a project's optimizer does. It may be told to fail."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        if self.fails:
            raise ArithmeticError("as told")
        return super().step(closure)


class ClippedTwice(Clipped):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@on_ranks(2, cases={"entry_point": ["attach", "synchronize", "hook"]})
def test_an_optimizer_that_calls_super_steps_once(rank: int, world_size: int, entry_point: str) -> None:
    torch.manual_seed(0)
    given = average(entry_point, Mlp())
    others = [torch.optim.Adam(Mlp().parameters()), Clipped(Mlp().parameters())]  # PyTorch then wraps their step too
    optimizer = ClippedTwice(given.model.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        given.backward(given.model(batch(rank, step)).square().mean())
        optimizer.fails = step == 1
        with pytest.raises(ArithmeticError, match="as told") if optimizer.fails else nullcontext():
            optimizer.step()
    assert_same_on_all_ranks(list(given.model.parameters()))
    if entry_point != "hook":
        optimizer.zero_grad()
        with given.no_sync():
            given.model(batch(rank, 0)).square().mean().backward()
        refused(lambda: optimizer.step(), "ClippedTwice was about to step with gradients", kind=RuntimeError)
    del others


@on_ranks(
    2,
    cases={"entry_point": ["attach", "synchronize", "hook"], "kind": [torch.optim.SGD, torch.optim.Adam, ClippedTwice]},
)
def test_a_checkpoint_may_make_an_optimizers_state(rank: int, world_size: int, entry_point: str, kind: Any) -> None:
    """It steps with zeros. One without a state may do so on one rank alone: the ranks need not agree on such steps."""
    torch.manual_seed(0)
    given = average(entry_point, Mlp())
    optimizer, others = kind(given.model.parameters(), lr=1e-2), [torch.optim.Adam(Mlp().parameters())]
    given.backward(given.model(batch(rank, 0)).square().mean())
    optimizer.zero_grad()
    if rank == 0 or kind is not torch.optim.SGD:
        state = get_optimizer_state_dict(given.model, optimizer)
        set_optimizer_state_dict(given.model, optimizer, state)
    for step in range(20):  # the hook tells in one of 16
        optimizer.zero_grad()
        given.backward(given.model(batch(rank, step)).square().mean())
        optimizer.step()
    assert_same_on_all_ranks(list(given.model.parameters()))
    del others


# ---- parameters that came too late ----------------------------------------------------------------------------------


def _unfreeze(model: Mlp) -> None:
    model.layers[0].requires_grad_(True)


def _replace(model: Mlp) -> None:
    model.layers[0] = nn.Linear(32, 64)


def _load_by_assignment(model: Mlp) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    _unfreeze(model)


def _add(model: Mlp) -> None:
    model.layers.append(nn.Linear(6, 6))


@on_ranks(
    2,
    cases={"entry_point": ["hook", "attach", "synchronize"], "late": [_unfreeze, _replace, _load_by_assignment, _add]},
)
def test_a_parameter_that_came_too_late_is_averaged_or_refused(
    rank: int, world_size: int, entry_point: str, late: Any
) -> None:
    """Or else ranks would drift apart without a word."""
    torch.manual_seed(0)
    model = Mlp()
    model.layers[0].requires_grad_(False)
    given = average(entry_point, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        given.backward(given.model(batch(rank, number)).square().mean())
        optimizer.step()

    step(0)
    late(model)
    step(1) if entry_point != "hook" and late is _unfreeze else None
    if late is not _unfreeze:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if entry_point != "hook" and late is _unfreeze:
        step(2)
        assert_same_on_all_ranks(list(model.parameters()))
        return
    for _ in range(2):
        refused(lambda: step(2), ".weight, whose gradient no rank", kind=RuntimeError)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    with given.no_sync():
        optimizer.step()


@on_ranks(2, cases={"entry_point": ["hook", "attach"], "late": [_unfreeze, _add]})
def test_gradients_that_a_closure_makes_are_checked_in_their_first_step(
    rank: int, world_size: int, entry_point: str, late: Any
) -> None:
    """As Lightning steps: before the closure there are none, or those of the step before."""
    if (entry_point, late) == ("attach", _unfreeze):
        return  # it is averaged
    torch.manual_seed(0)
    model = Mlp()
    model.layers[0].requires_grad_(late is _add)
    given = average(entry_point, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = given.model(batch(rank, 0)).square().mean()
        loss.backward()
        return loss.detach()

    assert optimizer.step(closure=closure) is not None
    assert optimizer.step(closure) is not None
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert_same_on_all_ranks(before)
    late(model)
    if late is _add:
        optimizer.add_param_group({"params": list(model.layers[-1].parameters())})
    refused(lambda: optimizer.step(closure), ".weight, whose gradient no rank has averaged", kind=RuntimeError)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=False))


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_no_sync_that_a_closure_makes() -> None:
    model = Mlp()
    sync = fastsync.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure(averages: bool) -> Tensor:
        optimizer.zero_grad()
        with nullcontext() if averages else sync.no_sync():
            loss = model(batch(0, 0)).square().mean()
            loss.backward()
        return loss.detach()

    optimizer.step(lambda: closure(averages=True))
    with pytest.raises(RuntimeError, match="was about to step with gradients that no rank has averaged"):
        optimizer.step(lambda: closure(averages=False))
    with sync.no_sync():
        optimizer.step(lambda: closure(averages=False))
    optimizer.step(lambda: closure(averages=True))  # what the step before has left does not count


@on_ranks(2)
def test_parameters_that_are_averaged_otherwise_are_not_late(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, other = Mlp(), Mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own"])
    ddp = DistributedDataParallel(model)
    fastsync.register_comm_hook(ddp)
    fastsync.attach(other)
    model.own, model.called = nn.Linear(6, 6).weight, nn.Linear(6, 6).weight
    model.attached = nn.Linear(6, 6)
    fastsync.attach(model.attached)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters(), nn.Parameter(torch.ones(6))], lr=0.1)
    for number in range(2):
        optimizer.zero_grad()
        out = model.attached(ddp(batch(rank, number)) + other(batch(rank, number)))
        (out @ model.own @ model.called @ optimizer.param_groups[0]["params"][-1]).square().mean().backward()
        fastsync.all_reduce_gradients([model.called])
        optimizer.step()


@pytest.mark.usefixtures("one_rank")
def test_late_parameters_of_models_in_a_container_made_for_the_call() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    fastsync.attach(nn.ModuleList([first, second]))
    second.extra = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    (second(first(torch.ones(1, 2))) * second.extra).sum().backward()
    refused(optimizer.step, "about to step extra, whose gradient no rank has", kind=RuntimeError)
    actor, critic = (nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))  # without parameters of their own
    fastsync.attach(nn.ModuleList([actor, critic]))
    actor.append(nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    (actor(torch.ones(1, 2)) + critic(torch.ones(1, 2))).sum().backward()
    refused(optimizer.step, "about to step 2.weight, whose gradient no rank", kind=RuntimeError)

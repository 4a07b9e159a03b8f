"""An optimizer that steps inside backward, with gradients that nobody has averaged yet, is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import fastsync
from tests.models import Mlp, assert_same_on_all_ranks, batch, group_of_one
from tests.ranks import on_ranks

MESSAGE = r"stepped inside backward\(\).*step after backward\(\) has returned"


def _steps_in_a_hook(model: nn.Module) -> None:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()

        parameter.register_post_accumulate_grad_hook(step)


def _pytorchs_own(model: nn.Module) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


WAYS: dict[str, Callable[[nn.Module], None]] = {"hook": _steps_in_a_hook, "_apply_optimizer": _pytorchs_own}


def _entry_points() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    def attached(**options: Any) -> tuple[nn.Module, Any]:
        model = Mlp()
        return model, fastsync.attach(model, **options)

    def hooked() -> tuple[nn.Module, Any]:
        ddp = DistributedDataParallel(Mlp())
        return ddp, fastsync.register_comm_hook(ddp)

    return {"attach": attached, "attach(overlap=False)": lambda: attached(overlap=False), "hook": hooked}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entry_point", _entry_points())
@on_ranks(2)
def test_a_step_inside_backward_is_refused(rank: int, world_size: int, entry_point: str, way: str) -> None:
    torch.manual_seed(0)
    model, _ = _entry_points()[entry_point]()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    WAYS[way](model)
    # DDP knows PyTorch's own and wants a hook of its own for it, which it cannot have any more.
    message = "can only be called once" if (entry_point, way) == ("hook", "_apply_optimizer") else MESSAGE
    with pytest.raises(RuntimeError, match=message):
        model(batch(rank, 0)).square().mean().backward()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert_same_on_all_ranks(list(model.parameters()))


def test_what_is_known_to_step_inside_backward_is_refused_at_once() -> None:
    with group_of_one():
        model = Mlp()
        _pytorchs_own(model.layers[2])
        with pytest.raises(
            ValueError, match=r"parameter layers\.2\.weight has an optimizer that steps inside backward"
        ):
            fastsync.attach(model)
        with pytest.raises(ValueError, match=r"parameter 0 has an optimizer that steps inside backward"):
            fastsync.attach(model.layers[2].parameters())


def test_hooks_that_only_look_are_let_through() -> None:
    with group_of_one():
        model, other = Mlp(), Mlp()
        sync = fastsync.attach(model)
        seen = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.norm()))
        _steps_in_a_hook(other)  # in the same backward, and nobody averages these
        (model(batch(0, 0)) + other(batch(0, 0))).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert len(seen) == 6
        sync.detach()
        _pytorchs_own(model)
        model(batch(0, 0)).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())


# ---- how long optimizers are watched --------------------------------------------------------------------------------


def _num_hooks() -> tuple[int, int]:
    return len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)


@on_ranks(1)
def test_hooks_come_with_the_first_handle_and_go_with_the_last(rank: int, world_size: int) -> None:
    assert _num_hooks() == (0, 0)
    first, second = fastsync.attach(Mlp().layers), fastsync.attach([nn.Parameter(torch.ones(2))])
    ddp = DistributedDataParallel(Mlp())
    hook = fastsync.register_comm_hook(ddp)
    present = _num_hooks()
    assert present == (1, 1)
    del first
    gc.collect()
    second.detach()
    second.detach()
    assert _num_hooks() == present
    del ddp, hook
    gc.collect()
    assert _num_hooks() == (0, 0)
    sync = fastsync.attach(Mlp().layers)
    assert _num_hooks() == present
    del sync
    gc.collect()
    assert _num_hooks() == (0, 0)


def test_another_thread_may_attach_while_an_optimizer_steps() -> None:
    """Inside of a backward as well, where parameters are looked for."""
    with group_of_one(), ThreadPoolExecutor(1) as pool:
        model, alone = Mlp(), Mlp()
        sync = fastsync.attach(model)
        look = sync.parameters
        others = []

        def attach_meanwhile() -> Any:
            others.append(pool.submit(fastsync.attach, Mlp(), init_sync=False).result(timeout=20))
            return look()

        sync.parameters = attach_meanwhile
        optimizer = torch.optim.SGD(alone.parameters())
        next(alone.parameters()).register_post_accumulate_grad_hook(lambda _: optimizer.step())
        alone(batch(0, 0)).sum().backward()
        assert len(others) >= 2


@on_ranks(2)
def test_steps_of_other_models_and_of_models_changed_in_part_are_let_through(rank: int, world_size: int) -> None:
    """Optimizers of other models before the first backward, and models that were only changed in part."""
    model, other = Mlp(), Mlp()
    sync = fastsync.attach(model)
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    other(batch(0, 0)).sum().backward()
    of_other.step()
    model.layers[0].weight = nn.Parameter(torch.zeros(64, 32))
    model(batch(rank, 0)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert sync.stats().num_steps == 1
    loose = [nn.Parameter(torch.ones(2))]
    fastsync.attach(loose)
    loose[0].sum().backward()
    torch.optim.SGD(loose).step()
    ddp = DistributedDataParallel(Mlp())
    fastsync.register_comm_hook(ddp)
    ddp(batch(rank, 0)).sum().backward()
    torch.optim.SGD(ddp.parameters()).step()

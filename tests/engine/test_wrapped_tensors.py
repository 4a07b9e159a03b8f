"""Tensors that wrap others, as quantised ones do: frozen ones are left alone, and begin as rank 0's where all do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.engine.entry_points import AVERAGING, average
from tests.engine.wrappers import Opaque, OpaqueOfLibrary, OpaqueWithoutPointer, Quantised
from tests.models import assert_same_on_all_ranks
from tests.ranks import on_ranks
from tests.refused import refused


class Lora(nn.Module):
    """A frozen base, a quantised table that is a buffer, and adapters that are trained."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.base = nn.Parameter(_quantised(generator), requires_grad=False)
        self.register_buffer("table", _quantised(generator))
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        for parameter in (self.down.weight, self.up.weight):
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.base.t() + self.up(self.down(inputs + self.table.sum(0)))

    def inside(self) -> list[Tensor]:
        return [self.base.q, self.base.scale, self.table.q, self.table.scale]


def _quantised(generator: torch.Generator) -> Quantised:
    return Quantised(
        torch.randint(-100, 100, (8, 8), dtype=torch.int8, generator=generator), torch.rand((), generator=generator)
    )


def _inputs(rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 + rank))


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(cases={"entry_point": AVERAGING})
def test_adapters_over_a_frozen_base_are_averaged(rank: int, world_size: int, entry_point: str) -> None:
    begins_alike = entry_point in ("attach", "synchronize")
    model, of_rank_0 = Lora(rank if begins_alike else 0), Lora(0)
    inside = model.inside()
    if "hook" in entry_point:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["base", "table"])
    given = average(entry_point, model)
    for mine, same, theirs in zip(inside, model.inside(), of_rank_0.inside(), strict=True):
        assert mine is same, "it was replaced"
        assert torch.equal(mine, theirs)
    for _ in range(2):
        given.model.zero_grad()
        given.backward(given.model(_inputs(rank)).square().mean())
    for name in ("down", "up"):
        grads = [torch.autograd.grad(of_rank_0(_inputs(other)).square().mean(), getattr(of_rank_0, name).weight)[0]
                 for other in range(world_size)]  # fmt: skip
        torch.testing.assert_close(getattr(model, name).weight.grad, torch.stack(grads).mean(0))
    assert model.base.grad is None
    if entry_point != "all_reduce":
        assert given.handle.stats().num_steps == 2
    torch.optim.Adam([p for p in model.parameters() if p.requires_grad]).step()
    fastsync.check_consistency(model)


def _attach(model: nn.Module) -> None:
    fastsync.attach(model)


def _sites(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with fastsync.LocalSGD(model, optimizer, sync_every=1):
        model(_inputs(dist.get_rank())).square().mean().backward()
        optimizer.step()


@on_ranks(2, cases={"call": [fastsync.sync_weights, _attach, _sites]})
def test_all_ranks_take_what_is_inside_rank_0s(rank: int, world_size: int, call: Callable[[nn.Module], object]) -> None:
    model = Lora(rank)
    inside = model.inside()
    with pytest.raises(RuntimeError, match=r"(base|table)\.(q|scale)|down\.weight"):
        fastsync.check_consistency(model)
    call(model)
    assert_same_on_all_ranks(inside)
    for mine, same, expected in zip(inside, model.inside(), Lora(0).inside(), strict=True):
        assert mine is same, "it was replaced"
        assert torch.equal(mine, expected)
    fastsync.check_consistency(model)
    model.base.q[0, 0] += rank
    with pytest.raises(RuntimeError, match=r"rank 0: base\.q .*; rank 1: base\.q|rank 1: base\.q .*; rank 0: base\.q"):
        fastsync.check_consistency(model)


@on_ranks(2)
def test_what_is_inside_has_to_be_alike(rank: int, world_size: int) -> None:
    model = Lora(0)
    if rank == 1:
        model.base = nn.Parameter(Quantised(model.base.q, torch.rand(8, 1)), requires_grad=False)
    for call in (fastsync.attach, fastsync.sync_weights):
        refused(lambda: call(model), "do not agree on")


@pytest.mark.usefixtures("one_rank")
def test_one_that_is_trained_is_refused_with_a_way_out() -> None:
    model = Lora(0)
    model.base.requires_grad_(True)
    for call in (fastsync.attach, fastsync.all_reduce_gradients, fastsync.sync_weights, fastsync.check_consistency):
        refused(lambda: call(model), "parameter base is a Quantised, which wraps")
    model.base.requires_grad_(False)
    fastsync.attach(model)


def _opaque_lora(kind: Callable[[Tensor, Tensor], Tensor], rank: int) -> Lora:
    """A ``Lora`` whose base does not tell what is inside: equal on all ranks, as it has been loaded everywhere."""
    model, base = Lora(rank), Lora(0).base
    model.base = nn.Parameter(kind(base.q, base.scale), requires_grad=False)
    return model


@on_ranks(2, cases={"kind": [Opaque, OpaqueOfLibrary, OpaqueWithoutPointer]})
def test_one_that_does_not_tell_what_is_inside_is_left_alone(rank: int, world_size: int, kind: type[Opaque]) -> None:
    for entry_point in AVERAGING:
        model = _opaque_lora(kind, 0)
        inside, of_rank_0 = (model.base.q.clone(), model.base.scale.clone()), Lora(0)
        if "hook" in entry_point:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["base", "table"])
        given = average(entry_point, model)
        given.backward(given.model(_inputs(rank)).square().mean())
        losses = [of_rank_0(_inputs(other)).square().mean() for other in range(world_size)]
        (torch.stack(losses).mean()).backward()
        for name in ("down", "up"):
            torch.testing.assert_close(getattr(model, name).weight.grad, getattr(of_rank_0, name).weight.grad)
        assert model.base.grad is None
        fastsync.check_consistency(model)
        assert torch.equal(model.base.q, inside[0])
        assert torch.equal(model.base.scale, inside[1])
    for call in (fastsync.sync_weights, _attach, _sites):
        model = _opaque_lora(kind, rank)
        call(model)
        fastsync.check_consistency(model)
        assert_same_on_all_ranks([p for name, p in model.named_parameters() if name != "base"])
    with pytest.raises(ValueError, match=rf"base is a {kind.__name__}, which wraps other tensors .*freeze it"):
        fastsync.attach(_trained(model))


def _trained(model: Lora) -> Lora:
    model.base.requires_grad_(True)
    return model


@on_ranks(2, cases={"call": [fastsync.sync_weights, _attach, _sites]})
def test_a_single_value_inside_may_have_any_stride(
    rank: int, world_size: int, call: Callable[[nn.Module], object]
) -> None:
    """As a scale of torchao's NF4 has it, which is cut from a larger tensor."""
    model = Lora(rank)
    model.base = nn.Parameter(Quantised(model.base.q, (torch.rand(64) + rank)[::64]), requires_grad=False)
    assert model.base.scale.stride() == (64,)
    call(model)
    assert_same_on_all_ranks([model.base.scale])
    fastsync.check_consistency(model)


@on_ranks(2)
def test_a_frozen_one_under_shards_of_an_optimizer(rank: int, world_size: int) -> None:
    """The ranks share one copy of the adapters, and not of the base."""
    for make in (Lora, partial(_opaque_lora, Opaque)):
        model = make(rank)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        fastsync.shard_optimizer(fastsync.attach(model), optimizer)
        model(_inputs(rank)).square().mean().backward()
        optimizer.step()
        fastsync.check_consistency(model)

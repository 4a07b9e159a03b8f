"""attach under every way of running backward: accumulation, branches, checkpoints, frozen layers, several engines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastsync
from tests.models import (
    SMALL_BUCKETS,
    Given,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    batch,
    grads_of,
    random_grads,
)
from tests.ranks import on_ranks, run_ranks

SHAPES = [(7, 33), (300,), (2, 3, 4), (250,)]


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """Of as many tensors as there are ranks, two here: exactly what the engine computes."""
    return reduce(torch.add, [tensor / len(tensors) for tensor in tensors])


def _whole(rank: int, step: int, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
    """Gradients of whole numbers, whose sums and means are exact."""
    return [grad.mul(8).round() for grad in random_grads(rank, step, shapes, torch.float32)]


# ---- accumulation -----------------------------------------------------------------------------------------------


def _forgotten(rank: int, world_size: int) -> None:
    everyone = [_whole(other, 0) for other in range(world_size)]
    model = Given(everyone[0])
    sync = fastsync.attach(model, overlap=False)
    actor, critic = (torch.optim.SGD(list(model.parameters())[part], lr=0.1) for part in (slice(2), slice(2, 4)))
    actor.step()  # without a gradient
    for _ in range(3):
        model.zero_grad()
        with sync.no_sync():
            model(everyone[rank]).backward()
        model(everyone[rank]).backward()
        sync.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        actor.step()
        critic.step()
    model(everyone[rank]).backward()
    before = [parameter.clone() for parameter in model.parameters()]
    for optimizer, name in ((actor, "0"), (critic, "2")):
        with pytest.raises(RuntimeError, match=rf"SGD was about to step .* of weights\.{name} .*call synchronize\(\)"):
            optimizer.step()
    assert_all_bitwise_equal(list(model.parameters()), before, "it stepped all the same")
    with sync.no_sync():
        actor.step()
    sync.synchronize()
    critic.step()
    sync.detach()
    critic.step()


def test_a_forgotten_synchronize_is_noticed() -> None:
    run_ranks(_forgotten, 2)


# ---- which parameters get gradients -----------------------------------------------------------------------------


class Ordered(nn.Module):
    """Uses its layers in the order it is told, so that their gradients get ready in the reverse of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False, dtype=torch.float64) for _ in range(4))

    def forward(self, inputs: Tensor, order: Sequence[int]) -> Tensor:
        total = torch.zeros(1, dtype=torch.float64)
        for index in order:
            inputs = inputs + 0.1 * self.layers[index](inputs.detach())
            total = total + inputs.sum()
        return total


@on_ranks(2)
def test_ranks_whose_gradients_get_ready_in_other_orders(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Ordered()
    alone = copy.deepcopy(model)
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(4):
        orders = [[0, 1, 2, 3], [3, 1, 0, 2]] if step % 2 else [[2, 3, 0, 1], [0, 2, 1, 3]]
        inputs = [torch.full((2, 16), 1.0 + other, dtype=torch.float64) for other in range(2)]
        for each in (model, alone):
            each.zero_grad()
        model(inputs[rank], orders[rank]).backward()
        for other in range(2):
            (alone(inputs[other], orders[other]) / 2).backward()
        for mine, theirs in zip(grads_of(model), grads_of(alone), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        assert_same_on_all_ranks(grads_of(model))
    assert len(sync.stats().buckets) == 4


@on_ranks(2)
def test_frozen_and_newly_unfrozen_parameters(rank: int, world_size: int) -> None:
    everyone = [_whole(other, 0) for other in range(world_size)]
    expected = [_mean(same) for same in zip(*everyone, strict=True)]
    model = Given(everyone[0])
    model.weights[0].requires_grad_(False)
    sync = fastsync.attach(model, "fp16", bucket_cap_mb=SMALL_BUCKETS)
    sizes = []
    for frozen in ([0], [0], [], [], [1, 3], [0, 1, 2], []):
        for index, weight in enumerate(model.weights):
            weight.requires_grad_(index not in frozen)
        model.zero_grad()
        model(everyone[rank]).backward()
        assert [weight.grad is None for weight in model.weights] == [index in frozen for index in range(4)]
        thawed = [mean for index, mean in enumerate(expected) if index not in frozen]
        assert_all_bitwise_equal(grads_of(model), thawed, f"without {frozen}")
        sizes.append(sync.stats().numel)
    numels = [grad.numel() for grad in everyone[0]]
    assert sizes == [sum(numels[1:])] * 2 + [sum(numels)] * 2 + [numels[0] + numels[2], numels[3], sum(numels)]
    assert sorted(sync.state_dict()["scales"]) == [f"weights.{index}" for index in range(4)]


# ---- kinds of graphs --------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Layers of which some are run under a checkpoint; ``shared`` ones use one and the same layer."""

    def __init__(self, num_layers: int, run: Callable[..., Tensor], *, shared: bool = False, ends: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(32, 16) if ends else nn.Identity()
        layers = [nn.Linear(16 if ends else 32, 16 if ends else 32) for _ in range(1 if shared else num_layers)]
        self.layers = nn.ModuleList(layers * num_layers if shared else layers)
        self.last = nn.Linear(16, 3) if ends else nn.Identity()
        self.run = run

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.requires_grad_())
        for layer in self.layers:
            hidden = self.run(layer, hidden).tanh()
        return self.last(hidden)


def _plainly(layer: nn.Module, inputs: Tensor) -> Tensor:
    return layer(inputs)


_NON_REENTRANT = partial(checkpoint, use_reentrant=False)
_REENTRANT = partial(checkpoint, use_reentrant=True)


@on_ranks(2)
def test_gradient_checkpoints(rank: int, world_size: int) -> None:
    for run in (_NON_REENTRANT, _REENTRANT):
        for shared in (False, True):
            for ends in (False, True):
                torch.manual_seed(0)
                model = Blocks(3, run, shared=shared, ends=ends)
                alone = copy.deepcopy(model)
                alone.run = _plainly
                plain = DistributedDataParallel(alone, bucket_cap_mb=SMALL_BUCKETS)
                sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
                for step in range(3):
                    for each in (model, plain):
                        each.zero_grad()
                        each(batch(rank, step)).square().mean().backward()
                    what = f"{run.keywords}, shared {shared}, ends {ends}, step {step}"
                    for mine, theirs in zip(grads_of(model), grads_of(plain), strict=True):
                        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8, msg=what)
                    assert sync.stats().num_steps == step + 1, f"{what}: more than one sync"
                    assert_same_on_all_ranks(grads_of(model))


@on_ranks(2)
def test_ways_to_call_backward(rank: int, world_size: int) -> None:
    everyone = [_whole(other, 0) for other in range(world_size)]
    expected = [_mean(same) for same in zip(*everyone, strict=True)]
    model = Given(everyone[0])
    fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    # A graph that is gone through twice: each time the local gradient is added to the mean of before.
    loss = model(everyone[rank])
    loss.backward(retain_graph=True)
    assert_all_bitwise_equal(grads_of(model), expected, "retain_graph, first")
    loss.backward()
    assert_all_bitwise_equal(grads_of(model), [2 * mean for mean in expected], "retain_graph, second")
    # Several losses at once, and gradients without accumulation, which are nobody's .grad.
    model.zero_grad()
    torch.autograd.backward([model(everyone[rank]), model(everyone[rank])])
    assert_all_bitwise_equal(grads_of(model), [2 * mean for mean in expected], "two losses")
    torch.autograd.grad(model(everyone[rank]), list(model.parameters()))
    assert_all_bitwise_equal(grads_of(model), [2 * mean for mean in expected], "after autograd.grad")
    # Only some of the parameters.
    model.zero_grad()
    model(everyone[rank]).backward(inputs=[model.weights[2], model.weights[0]])
    assert [weight.grad is None for weight in model.weights] == [False, True, False, True]
    assert_all_bitwise_equal(grads_of(model), expected[::2], "inputs=")
    # A graph of the gradients themselves.
    model.zero_grad()
    model(everyone[rank]).backward(create_graph=True)
    assert_all_bitwise_equal([grad.detach() for grad in grads_of(model)], expected, "create_graph")


@on_ranks(2)
def test_backward_inside_autocast(rank: int, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        model = Mlp()
        plain = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS)
        fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
        for step in range(3):
            for each in (model, plain):
                each.zero_grad()
                with torch.autocast("cpu", dtype):
                    each(batch(rank, step)).square().mean().backward()
            assert_all_bitwise_equal(grads_of(model), grads_of(plain), f"{dtype}, step {step}")


@on_ranks(2)
def test_a_compiled_module(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Mlp()
    plain = DistributedDataParallel(copy.deepcopy(model))
    compiled = torch.compile(model, backend="aot_eager")
    sync = fastsync.attach(compiled, "fp16")
    for step in range(3):
        for each in (compiled, plain):
            each.zero_grad()
            each(batch(rank, step)).square().mean().backward()
        for mine, theirs in zip(grads_of(model), grads_of(plain), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-5)
        assert_same_on_all_ranks(grads_of(model))
    assert sync.stats().num_steps == 3
    assert list(sync.state_dict()["scales"]) == [name for name, _ in model.named_parameters()]


class Fails(torch.autograd.Function):
    """Raises in backward while it is told to."""

    now = False

    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        if Fails.now:
            raise ArithmeticError("as told")
        return grad


@on_ranks(2)
def test_a_checkpointed_backward_that_fails_spoils_nothing(rank: int, world_size: int) -> None:
    """The parameter that a reentrant checkpoint takes as its input outlives the graph in which backward failed."""
    direct, last, layer = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(3)), nn.Linear(16, 300, bias=False)
    nn.init.ones_(layer.weight)  # so that every gradient is a whole number
    parameters = [direct, last, layer.weight]
    sync = fastsync.attach(parameters, bucket_cap_mb=SMALL_BUCKETS)

    def loss_of(run: Callable[..., Tensor]) -> Tensor:
        return (last * direct[:3]).sum() + Fails.apply(direct).sum() + run(layer, direct).sum()

    for step in range(5):
        for parameter in parameters:
            parameter.grad = None
        Fails.now = False
        of_one = torch.autograd.grad(loss_of(_plainly), parameters)
        Fails.now = step == 2
        loss = (1 + 2 * rank) * loss_of(_REENTRANT)  # so that the mean is twice rank 0's
        if Fails.now:
            with pytest.raises(ArithmeticError, match="as told"):
                loss.backward()
        else:
            loss.backward()
            expected = [2 * gradient for gradient in of_one]
            assert_all_bitwise_equal([p.grad for p in parameters], expected, f"step {step}: gradient")  # type: ignore[misc]
    assert sync.stats().num_steps == 5


class _GivesNone(torch.autograd.Function):
    """Takes a parameter, and has no gradient for it."""

    @staticmethod
    def forward(context: Any, parameter: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        return None, *grads


@on_ranks(2)
def test_an_operator_without_a_gradient_for_a_parameter(rank: int, world_size: int) -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    fastsync.attach(parameters)
    _GivesNone.apply(parameters[0], (1 + rank) * parameters[1]).sum().backward()
    assert parameters[1].grad.eq(1.5).all()


# ---- several engines --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_several_engines(rank: int, world_size: int) -> None:
    """Two engines on one group, in one backward and apart, each with gradients that get ready in other orders."""
    everyone = [_whole(other, 0) for other in range(world_size)]
    expected = [_mean(same) for same in zip(*everyone, strict=True)]
    for groups in ("one", "two"):
        actor, critic = Given(everyone[0]), Given(everyone[0])
        syncs = [
            fastsync.attach(
                model, bucket_cap_mb=SMALL_BUCKETS, process_group=None if groups == "one" else dist.new_group()
            )
            for model in (actor, critic)
        ]
        for step in range(4):
            losses = [model(everyone[rank]) for model in (actor, critic)]
            if (step + rank) % 2:
                losses.reverse()
            if step < 2:
                for model in (actor, critic):
                    model.zero_grad()
                (losses[0] + losses[1]).backward()
            else:
                for model in (actor, critic):
                    model.zero_grad()
                    model(everyone[rank]).backward()
            for model in (actor, critic):
                assert_all_bitwise_equal(grads_of(model), expected, f"{groups} group, step {step}")
        assert [sync.stats().num_steps for sync in syncs] == [4, 4]


@on_ranks(4)
def test_a_dimension_of_a_device_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    shapes = SHAPES[:2]
    for dim, peers in (("dp", [rank % 2, rank % 2 + 2]), ("other", [rank // 2 * 2, rank // 2 * 2 + 1])):
        for group in (mesh[dim], mesh.get_group(dim)):
            model = Given(_whole(rank, 1, shapes))
            with torch.no_grad():
                model.weights[0].fill_(rank)
            fastsync.attach(model, process_group=group)
            assert model.weights[0][0, 0] == peers[0], "parameters come from the first rank of the group"
            model(_whole(rank, 1, shapes)).backward()
            expected = [_mean(same) for same in zip(*(_whole(peer, 1, shapes) for peer in peers), strict=True)]
            assert_all_bitwise_equal(grads_of(model), expected, dim)
            assert_same_on_all_ranks(grads_of(model), mesh.get_group(dim))


@on_ranks(2)
def test_a_model_that_is_cast(rank: int, world_size: int) -> None:
    """A model that is cast is laid out anew; its parameters have other accumulators then, or some of them have."""
    for overlap in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sync = fastsync.attach(model, overlap=overlap)
        for step, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16)):
            (model[0] if step == 1 else model).to(dtype)
            model.zero_grad()
            for layer in model:
                layer(torch.full((2, 4), rank + 1.0, dtype=layer.weight.dtype)).sum().backward()
                if not overlap:
                    sync.synchronize()
            for layer in model:
                assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 3.0))
        assert sync.stats().num_steps == 6
        sync.detach()
        model.zero_grad()
        model[0](torch.full((2, 4), rank + 1.0, dtype=torch.bfloat16)).sum().backward()
        assert model[0].weight.grad.unique().tolist() == [2.0 * (rank + 1)], "a hook was left behind"

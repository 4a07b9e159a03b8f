"""attach: buckets, kinds of parameters, and every way of running backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastsync
from tests.engine.entry_points import mean_of, whole_numbers
from tests.models import (
    SMALL_BUCKETS,
    Given,
    assert_all_bitwise_equal,
    batch,
    grads_of,
)
from tests.ranks import on_ranks
from tests.refused import refused


@on_ranks(2)
def test_a_gradient_with_the_conjugate_bit(rank: int, world_size: int) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    fastsync.attach([weight])
    (weight.conj() * torch.tensor(1.0 + 2.0j * (rank + 1))).real.sum().backward()
    assert torch.equal(weight.grad.resolve_conj(), torch.full((3,), 1.0 + 3.0j))


@on_ranks(2)
def test_buckets_follow_the_first_backward(rank: int, world_size: int) -> None:
    """Whatever the order in which the parameters come: of weights that are used last gradients are ready first."""
    parameters = {size: nn.Parameter(torch.ones(size * 256)) for size in (2, 4, 1, 3)}
    sync = fastsync.attach(list(parameters.values()), bucket_cap_mb=SMALL_BUCKETS)  # 256 elements
    for _ in range(2):
        sums = torch.stack([parameters[size].sum() for size in (1, 2, 3, 4)])
        (sums.sum() * (1.0 + rank)).backward()
        assert [bucket.numel for bucket in sync.stats().buckets] == [4 * 256, 3 * 256, 2 * 256, 256]


# ---- what every rank gets from rank 0 -----------------------------------------------------------------------------

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def _of_every_dtype(rank: int) -> nn.Module:
    model = nn.Linear(2, 2)
    for index, dtype in enumerate(DTYPES):
        values = torch.full((3, 2), (rank + index) % 2 + 1, dtype=torch.uint8).to(torch.float32)
        frozen = values.t() if index % 2 else values  # contiguous or not
        model.register_parameter(f"frozen_{index}", nn.Parameter(frozen.to(dtype), requires_grad=False))
        model.register_buffer(f"buffer_{index}", values.to(dtype))
        model.register_buffer(f"scalar_{index}", values[0, 0].to(dtype))
    return model


def _bytes(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@on_ranks(2)
def test_rank_0s_parameters_and_buffers_are_everybodys_whatever_their_dtype(rank: int, world_size: int) -> None:
    model, expected = _of_every_dtype(rank), _of_every_dtype(0)
    fastsync.attach(model)
    for name, tensor in expected.state_dict().items():
        if name not in ("weight", "bias"):
            assert _bytes(model.state_dict()[name]) == _bytes(tensor), f"rank {rank}: {name}"
    fastsync.check_consistency(model)

    loose = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), rank), requires_grad=False)]
    fastsync.attach(loose)
    assert loose[1].tolist() == [0, 0]

    model = nn.Linear(2, 2)
    model.register_parameter("table", nn.Parameter(torch.zeros(2 + rank, dtype=torch.int64), requires_grad=False))
    refused(lambda: fastsync.attach(model), "rank 0: parameter table of shape [2],")


SHAPES = [(7, 33), (300,), (2, 3, 4), (250,)]


def _of_all(world_size: int, step: int = 0) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Gradients of each rank, and their exact means."""
    everyone = [whole_numbers(other, step, SHAPES) for other in range(world_size)]
    return everyone, [mean for mean in mean_of(everyone) if mean is not None]


@on_ranks(2)
def test_a_forgotten_synchronize_is_noticed(rank: int, world_size: int) -> None:
    everyone, _ = _of_all(world_size)
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
        with pytest.raises(RuntimeError, match=rf"SGD .* of weights\.{name}.*; call synchronize\(\)"):
            optimizer.step()
    assert_all_bitwise_equal(list(model.parameters()), before, "it stepped all the same")
    with sync.no_sync():
        actor.step()
    sync.synchronize()
    critic.step()
    sync.detach()
    critic.step()


@on_ranks(2)
def test_what_only_a_backward_inside_no_sync_has_used_is_averaged(rank: int, world_size: int) -> None:
    everyone, means = _of_all(world_size)
    model = Given(everyone[0])
    sync = fastsync.attach(model)
    for step in range(2):
        model.zero_grad()
        with sync.no_sync():
            model([*everyone[rank][:2], None, None]).backward()
        model([None, None, *everyone[rank][2:]]).backward()
        assert_all_bitwise_equal([weight.grad for weight in model.parameters()], means, f"step {step}")


# ---- kinds of graphs ------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Layers that are run under a checkpoint; ``shared`` ones use one and the same layer."""

    def __init__(self, run: Callable[..., Tensor], *, shared: bool = False, ends: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32) if ends else nn.Identity()
        layers = [nn.Linear(32, 32) for _ in range(1 if shared else 3)]
        self.layers = nn.ModuleList(layers * 3 if shared else layers)
        self.last = nn.Linear(32, 3) if ends else nn.Identity()
        self.run = run

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.requires_grad_())
        for layer in self.layers:
            hidden = self.run(layer, hidden).tanh()
        return self.last(hidden)


@on_ranks(2, cases={"use_reentrant": [False, True]})
def test_gradient_checkpoints(rank: int, world_size: int, use_reentrant: bool) -> None:
    for shared in (False, True):
        for ends in (False, True):
            torch.manual_seed(0)
            model = Blocks(partial(checkpoint, use_reentrant=use_reentrant), shared=shared, ends=ends)
            alone = copy.deepcopy(model)
            alone.run = lambda layer, inputs: layer(inputs)
            plain = DistributedDataParallel(alone, bucket_cap_mb=SMALL_BUCKETS)
            sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
            for step in range(3):
                for each in (model, plain):
                    each.zero_grad()
                    each(batch(rank, step)).square().mean().backward()
                what = f"shared {shared}, ends {ends}, step {step}"
                assert_all_bitwise_equal(grads_of(model), grads_of(plain), what)
                assert sync.stats().num_steps == step + 1, f"{what}: more than one sync"


@on_ranks(2)
def test_a_weight_that_is_shared_between_checkpoints_later(rank: int, world_size: int) -> None:
    """The bucket waits for all of its gradients in the first such step, too: two come before the bucket's other one."""
    weight, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    fastsync.attach([weight, other])
    product = partial(checkpoint, weight.mul, use_reentrant=True)
    for is_shared in (False, True, True):
        weight.grad = other.grad = None
        hidden = other * product(torch.full((3,), rank + 1.0, requires_grad=True))
        (product(product(hidden)) if is_shared else hidden).sum().backward()
        assert [each.grad.unique().tolist() for each in (weight, other)] == [[4.5 if is_shared else 1.5], [1.5]]


@on_ranks(2)
def test_ways_to_call_backward(rank: int, world_size: int) -> None:
    everyone, expected = _of_all(world_size)
    twice = [2 * mean for mean in expected]
    model = Given(everyone[0])
    fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    # A graph that is gone through twice: each time the local gradient is added to the mean of before.
    loss = model(everyone[rank])
    loss.backward(retain_graph=True)
    assert_all_bitwise_equal(grads_of(model), expected, "retain_graph, first")
    loss.backward()
    assert_all_bitwise_equal(grads_of(model), twice, "retain_graph, second")
    # Several losses at once, and gradients without accumulation, which are nobody's .grad.
    model.zero_grad()
    torch.autograd.backward([model(everyone[rank]), model(everyone[rank])])
    assert_all_bitwise_equal(grads_of(model), twice, "two losses")
    torch.autograd.grad(model(everyone[rank]), list(model.parameters()))
    assert_all_bitwise_equal(grads_of(model), twice, "after autograd.grad")
    # Only some of the parameters.
    model.zero_grad()
    model(everyone[rank]).backward(inputs=[model.weights[2], model.weights[0]])
    assert [weight.grad is None for weight in model.weights] == [False, True, False, True]
    assert_all_bitwise_equal(grads_of(model), expected[::2], "inputs=")
    # A graph of the gradients themselves.
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"Using backward\(\) with create_graph=True"):
        model(everyone[rank]).backward(create_graph=True)
    assert_all_bitwise_equal([grad.detach() for grad in grads_of(model)], expected, "create_graph")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs).tanh()


@on_ranks(2)
def test_autocast_and_compiled_modules(rank: int, world_size: int) -> None:
    """Compiled whole or block by block, and without a graph break."""
    for way in (torch.bfloat16, "whole", "blocks"):
        torch.manual_seed(0)
        net = nn.Sequential(Block(), Block(), Block())
        plain = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=SMALL_BUCKETS)
        if way == "blocks":
            for block in net:
                block.compile(backend="aot_eager", fullgraph=True)
        model = torch.compile(net, backend="aot_eager", fullgraph=True) if way == "whole" else net
        sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
        dtype = way if isinstance(way, torch.dtype) else None
        for step in range(3):
            for each in (model, plain):
                each.zero_grad()
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    each(batch(rank, step)).square().mean().backward()
            assert_all_bitwise_equal(grads_of(net), grads_of(plain), f"{way}, step {step}")
        assert sync.stats().num_steps == 3


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


# ---- several engines, groups and dtypes -----------------------------------------------------------------------------


@on_ranks(2, cases={"num_groups": [1, 2], "shared_memory": [False, True]})
def test_several_engines(rank: int, world_size: int, num_groups: int) -> None:
    """In one backward and apart, each with gradients that get ready in other orders.

    Without shared memory the process group adds fp16, and pairs its collectives by their order alone.
    """
    everyone, expected = zip(*(_of_all(world_size, step) for step in range(2)), strict=True)
    models = [Given(grads[0]) for grads in everyone]
    groups = [dist.new_group() if num_groups == 2 else None for _ in models]
    syncs = [
        fastsync.attach(model, compression="fp16", bucket_cap_mb=SMALL_BUCKETS, process_group=group)
        for model, group in zip(models, groups, strict=True)
    ]
    for step in range(4):
        for model in models:
            model.zero_grad()
        pairs = list(zip(models, everyone, strict=True))
        losses = [model(grads[rank]) for model, grads in (reversed(pairs) if (step + rank) % 2 else pairs)]
        if step < 2:
            torch.stack(losses).sum().backward()
        else:
            for model, grads in pairs:
                model(grads[rank]).backward()
        for model, means in zip(models, expected, strict=True):
            assert_all_bitwise_equal(grads_of(model), means, f"step {step}")
    assert [sync.stats().num_steps for sync in syncs] == [4, 4]


@on_ranks(2, cases={"overlap": [False, True]})
def test_a_model_that_is_cast(rank: int, world_size: int, overlap: bool) -> None:
    """It is laid out anew; its parameters have other accumulators then, or some of them have."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sync = fastsync.attach(model, overlap=overlap)
    for step, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16)):
        (model[0] if step == 1 else model).to(dtype)
        model.zero_grad()
        for layer in model:
            layer(torch.full((2, 4), rank + 1.0, dtype=layer.weight.dtype)).sum().backward()
            if not overlap:
                sync.synchronize()
            assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 3.0))
    assert sync.stats().num_steps == 6
    sync.detach()
    model.zero_grad()
    model[0](torch.full((2, 4), rank + 1.0, dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad.unique().tolist() == [2.0 * (rank + 1)], "a hook was left behind"

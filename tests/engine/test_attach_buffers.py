"""Buffers that are brought together with each sync."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastsync
from fastsync.distributed import as_bytes
from tests.models import SMALL_BUCKETS, Fails, assert_same_on_all_ranks
from tests.ranks import on_ranks
from tests.refused import refused


class Normed(nn.Module):
    """Buffers of several dtypes, some of which each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        self.register_buffer("samples", torch.tensor(2**40, dtype=torch.int64))
        self.register_buffer("precise", torch.full((2, 2), 1 / 3, dtype=torch.float64))
        self.register_buffer("extreme", torch.tensor([-0.0, torch.inf, torch.nan], dtype=torch.float16))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 1j]))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.samples += int(inputs[0, 0].abs() * 1000)
            self.precise += inputs[:2, :2].double() / 7
            self.mask ^= inputs[0, :3] > 0
            self.phase *= torch.complex(inputs[0, 1], inputs[0, 2])
        return self.layers(inputs)


def _inputs(rank: int, step: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


@on_ranks(2, cases={"wire, shared_memory": [("none", True), ("int8", True), ("bf16", False)]})
def test_broadcast_is_what_ddp_does(rank: int, world_size: int, wire: str) -> None:
    """Before each forward buffers are what DDP has broadcast by then, and never what other dtypes would round."""
    ddp = DistributedDataParallel(Normed())
    model = Normed()
    sync = fastsync.attach(model, wire, broadcast_buffers=True)
    for step in range(4):
        if step == 2:
            sync.piggyback("one more", torch.tensor(1.0))  # so that complex numbers lie at odd places, too
        for each in (ddp, model):
            for again in range(2):
                sync.set_weight(1.0)  # which is the gradients' alone
                sync.piggyback("step", torch.tensor(float(step)))
                each(_inputs(rank, 10 * step + again)).square().mean().backward()
        assert_same_on_all_ranks([buffer.float().view(-1) for buffer in model.buffers() if not buffer.is_complex()])
    inputs = _inputs(rank, 1000)
    ddp(inputs)
    model(inputs)
    for name, buffer in model.named_buffers():
        assert torch.equal(as_bytes(buffer), as_bytes(dict(ddp.module.named_buffers())[name])), name


@on_ranks(2)
def test_a_failed_backward_leaves_rank_0s(rank: int, world_size: int) -> None:
    model, first = Normed(), Normed()
    fastsync.attach(model, broadcast_buffers=True)
    for each in (model, first):
        each.phase = each.phase.conj()
    model(_inputs(rank, 0)).sum().backward()
    first(_inputs(0, 0))
    before = [as_bytes(buffer).clone() for buffer in first.buffers()]
    assert all(map(torch.equal, map(as_bytes, model.buffers()), before))
    with pytest.raises(ArithmeticError) if rank == 0 else torch.enable_grad():
        first, last = model.layers[0].weight, model.layers[2].weight
        late = (Fails.apply(first) if rank == 0 else first).sum()
        (late + last.sum()).backward()
    assert all(map(torch.equal, map(as_bytes, model.buffers()), before))


class Averaging(nn.Module):
    """Puts new tensors in the places of its buffers; again where a checkpoint repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("average", torch.zeros(5))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        self.average = 0.5 * self.average + inputs.mean(dim=0).detach()
        self.seen = self.seen + 1
        return self.linear(inputs)


@on_ranks(2, cases={"checkpointed": [False, True]})
def test_other_tensors_in_their_places(rank: int, world_size: int, checkpointed: bool) -> None:
    model, first = Averaging(), Averaging()
    sync = fastsync.attach(model, broadcast_buffers=True, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(3):
        inputs = _inputs(rank, step).requires_grad_()
        (checkpoint(model, inputs, use_reentrant=False) if checkpointed else model(inputs)).sum().backward()
        for _ in range(1 + checkpointed):
            first(_inputs(0, step))
        assert torch.equal(model.average, first.average)
        assert model.seen == first.seen
    model.average = torch.full((5,), float(rank))
    sync.use_group(dist.new_group())
    assert not model.average.any(), "not rank 0's"
    model.average = torch.zeros(4)  # on all ranks
    model.linear(_inputs(rank, 9)).sum().backward()
    model.average = torch.zeros(2 + rank)
    refused(lambda: model.linear(_inputs(rank, 9)).sum().backward(), "rank 0: buffer of shape [2]")


@on_ranks(2)
def test_several_backwards_of_one_graph(rank: int, world_size: int) -> None:
    """Of one graph, and of several forwards before them."""
    model = Normed()
    sync = fastsync.attach(model, broadcast_buffers=True)
    graphs = [model.layers(_inputs(rank, step)) for step in range(2)]
    with sync.no_sync():
        for graph in graphs:
            graph.sum().backward(retain_graph=True)
    (graphs[0] * graphs[1]).sum().backward()
    assert sync.stats().num_steps == 1
    assert_same_on_all_ranks([parameter.grad for parameter in model.parameters()])
    assert_same_on_all_ranks([model.layers[1].running_mean])


@on_ranks(2)
def test_two_forwards_before_their_backwards(rank: int, world_size: int) -> None:
    """The buffers that arrive with the first backward lie in the graph of the second."""
    model, reference = Normed(), Normed()
    fastsync.attach(model, broadcast_buffers=True)
    for again in range(2):
        for other in range(2):
            (reference.layers(_inputs(other, again)).square().sum() / 2).backward()
    losses = [model.layers(_inputs(rank, again)).square().sum() for again in range(2)]
    for loss in losses:
        loss.backward()
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-5, atol=1e-5)
    assert_same_on_all_ranks([model.layers[1].running_mean])


class Positions(nn.Module):
    """A table that grows with the longest input, and that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.shared = nn.Module()
        self.grow(2)

    def grow(self, length: int) -> None:
        table = torch.arange(4.0 * length).view(length, 4) + 10 * dist.get_rank()
        self.register_buffer("table", table)
        self.shared.register_buffer("table", table)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > len(self.table):
            self.grow(len(inputs))
        return self.linear(inputs + self.table[: len(inputs)])


@on_ranks(2, cases={"broadcasts": [False, True]})
def test_buffers_made_under_inference_mode(rank: int, world_size: int, broadcasts: bool) -> None:
    model = Positions()
    with torch.inference_mode():
        model(torch.ones(3, 4))
    sync = fastsync.attach(model, broadcast_buffers=broadcasts)
    assert torch.equal(model.table, torch.arange(12.0).view(3, 4)), "not rank 0's"
    with torch.inference_mode():
        model(torch.ones(5, 4))
    if broadcasts:
        model.linear(torch.ones(4)).sum().backward()
    fastsync.sync_weights(model)
    assert torch.equal(model.table, torch.arange(20.0).view(5, 4)), "not rank 0's"
    assert model.table is model.shared.table
    with torch.inference_mode():
        model(torch.ones(6, 4))
        sync.use_group(dist.new_group())
    assert torch.equal(model.table, torch.arange(24.0).view(6, 4)), "not rank 0's"


@on_ranks(2)
def test_parameters_made_under_inference_mode_are_named(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.inference_mode():
        made = nn.Linear(2, 2)
    model.append(made)
    refused(lambda: fastsync.attach(model), "parameter 2.weight was made under")
    made.requires_grad_(False)
    for call in (fastsync.attach, fastsync.sync_weights):
        refused(lambda: call(model), "2.weight was made under torch.inference_mode")


@on_ranks(2)
def test_a_buffer_that_modules_share_travels_once(rank: int, world_size: int) -> None:
    sent = []
    for second in (torch.zeros(1000), None):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        model[0].register_buffer("table", torch.full((1000,), float(rank)))
        model[1].register_buffer("table", model[0].table if second is None else second)
        sync = fastsync.attach(model, broadcast_buffers=True)
        model(_inputs(rank, 0)).sum().backward()
        assert not model[0].table.any(), "not rank 0's"
        sent.append(sync.stats().wire_bytes)
    assert sent[0] > sent[1] + 3000


@pytest.mark.usefixtures("one_rank")
def test_what_is_refused() -> None:
    refused(lambda: fastsync.attach(Normed(), broadcast_buffers="mean"), "broadcast_buffers:")  # type: ignore[arg-type]
    refused(lambda: fastsync.attach(Normed().parameters(), broadcast_buffers=True), "broadcast_buffers:")

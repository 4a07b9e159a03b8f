"""attach(ignored_states=): parameters and buffers of a model that are left to each rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from tests.engine.same_data import same_data_is_meant
from tests.engine.wrappers import Opaque
from tests.models import assert_same_on_all_ranks
from tests.ranks import on_ranks
from tests.refused import refused


class Mixture(nn.Module):
    """Dense layers that all ranks share, and an expert of which each rank has its own, of its own width."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.dense = nn.Linear(4, 6)
        self.expert = nn.Sequential(nn.Linear(6, 5 + rank), nn.BatchNorm1d(5 + rank), nn.Linear(5 + rank, 6))
        self.scale = nn.Parameter(torch.ones(6) + rank)
        self.register_buffer("seen", torch.zeros(1) + rank)
        self.register_buffer("shared", torch.zeros(1) + rank)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen + len(inputs)  # another tensor in its place
        hidden = self.norm(self.dense(inputs))
        return (self.scale * (hidden + self.expert(hidden))).square().mean()

    def own(self) -> list[nn.Module | Tensor]:
        return [self.expert, self.scale, self.seen]

    def states(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}


OF_EACH_RANK = ("expert.", "scale", "seen")


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))


@on_ranks(2, cases={"overlap": [True, False]})
def test_they_are_not_averaged_nor_broadcast_nor_compared(rank: int, world_size: int, overlap: bool) -> None:
    model, alone = Mixture(rank), Mixture(rank)
    sync = fastsync.attach(model, ignored_states=model.own(), broadcast_buffers=True, overlap=overlap)
    of_rank_0 = Mixture(0).states()
    for name, value in model.states().items():
        assert torch.equal(value, (alone.states() if name.startswith(OF_EACH_RANK) else of_rank_0)[name]), name
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for each in (model, alone):
            each.zero_grad()
            each(inputs(rank, step)).backward()
        if not overlap:
            sync.synchronize()
        for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            expected = other.grad.clone()
            if not name.startswith(OF_EACH_RANK):
                dist.all_reduce(expected)
                expected /= world_size
            torch.testing.assert_close(parameter.grad, expected, msg=lambda text, name=name: f"{name}: {text}")
        shared = [p.grad for name, p in model.named_parameters() if not name.startswith(OF_EACH_RANK)]
        assert_same_on_all_ranks(shared)
        # The norm is that of the averaged gradients, and only these are clipped.
        own = [p.grad.clone() for name, p in model.named_parameters() if name.startswith(OF_EACH_RANK)]
        expected = nn.utils.get_total_norm(shared)
        torch.testing.assert_close(sync.grad_stats().grad_norm, expected)
        torch.testing.assert_close(fastsync.clip_grad_norm_(sync, 1e-3), expected)
        now = [p.grad for name, p in model.named_parameters() if name.startswith(OF_EACH_RANK)]
        assert all(map(torch.equal, own, now))
        optimizer.step()
        alone.load_state_dict(model.state_dict())
        assert model.shared == 0.0
        assert model.seen == rank + 8 * (1 + step)
    fastsync.check_consistency(model)
    fastsync.check_consistency(model.dense)
    with torch.no_grad():
        model.dense.bias += rank
    refused(lambda: fastsync.check_consistency(model), "dense.bias", kind=RuntimeError)
    fastsync.sync_weights(model)
    fastsync.check_consistency(model)
    assert model.expert[0].weight.shape == (5 + rank, 6)
    sync.detach()
    refused(lambda: fastsync.check_consistency(model), "rank 1: scale", kind=RuntimeError)


@on_ranks(2)
def test_join_and_another_group_leave_them_alone(rank: int, world_size: int) -> None:
    model = Mixture(rank)
    sync = fastsync.attach(model, "int8+ef", ignored_states=model.own())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with sync.join(optimizer):
        for step in range(1 + rank):
            optimizer.zero_grad()
            model(inputs(rank, step)).backward()
            optimizer.step()
    sync.use_group(dist.new_group(), init_sync=True)
    fastsync.check_consistency(model)
    assert model.seen == rank + 8 * (1 + rank)
    assert model.expert[0].weight.shape == (5 + rank, 6)
    assert optimizer.state[model.dense.weight]["step"] == 2
    assert optimizer.state[model.scale]["step"] == 1 + rank
    assert not [name for name in sync.state_dict()["residuals"] if name.startswith(OF_EACH_RANK)]


@on_ranks(4)
def test_experts_with_a_handle_of_their_own(rank: int, world_size: int) -> None:
    """Ranks 0 and 2 have the same expert, and so do ranks 1 and 3."""
    model = Mixture(rank % 2)
    copies = [dist.new_group([first, first + 2]) for first in range(2)][rank % 2]
    of_dense = fastsync.attach(model, ignored_states=[model.expert, model.scale, model.seen])
    of_expert = fastsync.attach(model.expert, process_group=copies)
    assert fastsync.handle_of(model) is of_dense
    assert fastsync.handle_of(model.dense) is of_dense
    assert fastsync.handle_of(model.expert) is of_expert
    assert fastsync.handle_of(model.expert[0]) is of_expert
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(inputs(rank, step)).backward()
        fastsync.clip_grad_norm_([of_dense, of_expert], 1.0, process_group=dist.group.WORLD)
        optimizer.step()
    fastsync.check_consistency(model, buffers=False)
    fastsync.check_consistency(model.expert, process_group=copies, buffers=False)
    with torch.no_grad():
        model.expert[0].bias += rank
    with pytest.raises(RuntimeError, match=r"0\.bias"):
        fastsync.check_consistency(model.expert, process_group=copies, buffers=False)
    fastsync.sync_weights(model.expert, process_group=copies)
    fastsync.check_consistency(model.expert, process_group=copies)


@on_ranks(2)
def test_two_handles_of_one_module(rank: int, world_size: int) -> None:
    """Each group compares what its handle averages."""
    same_data_is_meant()
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    other = dist.new_group()
    fastsync.attach(model, ignored_states=model[1])
    fastsync.attach(model, ignored_states=model[0].parameters(), process_group=other)
    fastsync.check_consistency(model)
    with torch.no_grad():
        model[1].bias += rank
    fastsync.check_consistency(model)
    refused(lambda: fastsync.check_consistency(model, process_group=other), "1.bias", kind=RuntimeError)
    refused(lambda: fastsync.check_consistency(model[1]), "rank 0: bias", kind=RuntimeError)


@on_ranks(2)
def test_what_comes_into_an_ignored_place_later(rank: int, world_size: int) -> None:
    """It is ignored, too. What comes into another place is refused, with this option as a way out."""
    model = Mixture(rank)
    fastsync.attach(model, ignored_states=model.own())
    model.load_state_dict(model.states(), assign=True)
    fastsync.check_consistency(model, buffers=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(OF_EACH_RANK))
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(inputs(rank, 0)).backward()
    torch.optim.SGD(own, lr=0.1).step()
    model.dense.weight = nn.Parameter(torch.ones(6, 4))
    model.zero_grad()
    model(inputs(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"step dense\.weight.*name it in ignored_states"):
        torch.optim.SGD([model.dense.weight], lr=0.1).step()


@on_ranks(2)
def test_a_container_that_was_made_for_the_call(rank: int, world_size: int) -> None:
    """It is gone after it, and the modules in it are attached as before."""
    same_data_is_meant()
    model, head = Mixture(rank), nn.Linear(4, 1)
    fastsync.attach(nn.ModuleList([model, head]), ignored_states=model.own(), broadcast_buffers=True)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    (model(inputs(rank, 0)) + head(inputs(0, 0)).sum()).backward()
    optimizer.step()
    for module in (model, nn.ModuleList([model]), head):
        fastsync.check_consistency(module)
    assert fastsync.handle_of(model) is fastsync.handle_of(head)
    assert model.seen == rank + 8


@on_ranks(2)
def test_one_copy_of_the_others(rank: int, world_size: int) -> None:
    """shard_optimizer has one copy of what is attached, and each rank steps its own of the rest."""
    model = Mixture(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fastsync.shard_optimizer(fastsync.attach(model, ignored_states=model.own()), optimizer)
    before = model.expert[0].weight.clone()
    for step in range(2):
        optimizer.zero_grad()
        model(inputs(rank, step)).backward()
        optimizer.step()
    fastsync.check_consistency(model, buffers=False)
    assert not torch.equal(before, model.expert[0].weight)


@on_ranks(2)
def test_what_could_not_be_sent_may_be_ignored(rank: int, world_size: int) -> None:
    model = nn.ModuleDict({"plain": nn.Linear(2, 2), "odd": nn.Module()})
    odd = nn.Parameter(Opaque(torch.ones(3, dtype=torch.int8), torch.ones(())), requires_grad=True)
    model["odd"].register_parameter("weight", odd)
    refused(lambda: fastsync.attach(model), "odd.weight is a", "Opaque")
    fastsync.attach(model, ignored_states=[odd])


@on_ranks(4)
def test_diloco_does_not_make_them_alike(rank: int, world_size: int) -> None:
    """Between ranks of one site it is refused. Sites may average what each rank has with its like."""
    place, first = rank % 2, rank // 2 * 2
    sites, across = ([dist.new_group(ranks) for ranks in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    model = Mixture(place)
    fastsync.attach(model, process_group=sites[rank // 2], ignored_states=model.own())
    own = model.states()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(lambda: fastsync.LocalSGD(model, optimizer), "model: ", f"over ranks [{first}, ")
    assert all(torch.equal(value, own[name]) for name, value in model.states().items())
    with fastsync.LocalSGD(model, optimizer, sync_every=1, process_group=across[place]):
        model(inputs(rank, 0)).backward()
        optimizer.step()
    assert_same_on_all_ranks([*model.dense.parameters()])
    theirs = [torch.empty_like(model.scale) for _ in range(world_size)]
    dist.all_gather(theirs, model.scale.detach())
    assert torch.equal(theirs[place], theirs[place + 2])
    assert not torch.equal(theirs[0], theirs[1])


@on_ranks(1)
def test_what_is_refused(rank: int, world_size: int) -> None:
    model = Mixture(0)
    own = ("expert", ["expert.0.weight"], None, model.named_parameters(), nn.Linear(2, 2), [torch.zeros(3)], model)
    for wrong in own:
        refused(lambda: fastsync.attach(model, ignored_states=wrong), "ignored_states:")  # type: ignore[arg-type]
    refused(lambda: fastsync.attach(model.parameters(), ignored_states=model.expert), "ignored_states:")
    fastsync.attach(model, ignored_states=nn.ReLU())  # which has none


@on_ranks(2)
def test_ranks_that_ignore_others_are_told(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(ValueError, match=r"rank 1: nothing; rank 0: parameter 1\.weight of"):
        fastsync.attach(model, ignored_states=model[1] if rank == 1 else ())

"""``shard_optimizer``: the bits of attach and torch's own step on every rank, in both of its ways.

Ranks that share memory have one copy of everything. Others have all parameters, and the state of their own shard.
"""

from __future__ import annotations

import copy
import io
import itertools
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import fastsync
from fastsync import _C
from fastsync.errors import SyncError
from fastsync.optimizer import register_elementwise, register_tensorwise
from fastsync.optimizer.owners import deal
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.engine.optimizer_shards import FURTHER, OF_WHOLE, OPTIMIZERS, train_both
from tests.engine.test_hosts import ALTERNATING, PAIRS, THREE, UNEQUAL, Nodes, run_on_hosts
from tests.models import assert_same_on_all_ranks
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

BOTH_WAYS = {"shared_memory": [True, False]}
in_both_ways = on_ranks(2, cases=BOTH_WAYS)
"""Makes a test of what each of two ranks does that share memory, and then of what two do that do not."""


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@on_ranks(cases=BOTH_WAYS)
def test_steps_are_those_of_every_rank(rank: int, world_size: int) -> None:
    """Random trainings; of two ranks also by optimizers that need whole tensors, of three by all that there are."""
    for seed in range(6 if world_size < 4 else 4):
        train_both(rank, world_size, 10 * world_size + seed, 6)
    further = {2: [*OF_WHOLE] * 2, 3: [*FURTHER, *OF_WHOLE]}
    for seed, optimizer in enumerate(further.get(world_size, [])):
        train_both(rank, world_size, 200 + seed, 4, optimizer)


@pytest.mark.parametrize("nodes", [[[0], [1]], PAIRS, ALTERNATING, UNEQUAL, THREE], ids=str)
def test_each_host_steps_its_own_copy(nodes: Nodes) -> None:
    run_on_hosts(train_on_hosts, nodes)


def train_on_hosts(rank: int, world_size: int, nodes: Nodes) -> None:
    for seed in range(2):
        train_both(rank, world_size, 10 * world_size + seed, 4)
        train_both(rank, world_size, 10 * world_size + seed, 3, "Muon")
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    assert_same_on_all_ranks(values(model))
    backward(model, rank)
    assert_same_on_all_ranks(list(sync.averaged_gradients().values()))
    stats = sync.stats()
    has_rank_each = len(nodes) == world_size
    assert (stats.transport, stats.num_hosts) == (("process_group", 1) if has_rank_each else ("two_level", len(nodes)))


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 70), nn.ReLU(), nn.Linear(70, 3))


def loss_of(model: nn.Module, rank: int, number: int = 0) -> Tensor:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(inputs.to(model[0].weight.dtype)).square().mean()


def step(model: nn.Module, optimizer: Optimizer, rank: int, number: int = 0) -> None:
    loss_of(model, rank, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def attached(shared: bool = True, **options: Any) -> tuple[nn.Module, AdamW, GradientSynchronizer]:
    model = two_layers()
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    sync = fastsync.attach(model, **options)
    if shared:
        fastsync.shard_optimizer(sync, optimizer)
    return model, optimizer, sync


def twins(**options: Any) -> list[tuple[nn.Module, AdamW, GradientSynchronizer]]:
    """A training with shards, and the same one in which every rank steps."""
    return [attached(**options), attached(shared=False, **options)]


def step_alike(trainings: Any, rank: int, number: int = 0) -> None:
    """Takes a step of each, after which all have the same weights."""
    for model, optimizer, *_ in trainings:
        step(model, optimizer, rank, number)
    assert_alike(trainings)


def assert_alike(trainings: Any) -> None:
    for model, *_ in trainings[1:]:
        same(values(trainings[0][0]), values(model))


def backward(model: nn.Module, rank: int) -> None:
    model(torch.full((1, 5), 1.0 + rank)).sum().backward()


def after_attach(**options: Any) -> tuple[nn.Module, GradientSynchronizer]:
    model = two_layers()
    return model, fastsync.attach(model, **options)


def assert_averages(model: nn.Module, rank: int, world_size: int) -> None:
    """Raises AssertionError unless ``.grad`` is the mean over ranks, as with ``attach`` alone."""
    each = [copy.deepcopy(model) for _ in range(world_size)]
    for of_rank, trained in [*enumerate(each), (rank, model)]:
        trained(torch.full((1, 5), 1.0 + of_rank)).sum().backward()
    for name, parameter in model.named_parameters():
        mean = torch.stack([of_rank.get_parameter(name).grad for of_rank in each]).double().mean(0)
        torch.testing.assert_close(parameter.grad.double(), mean, rtol=1e-6, atol=1e-6)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# ---- what is one, and what is each rank's own -----------------------------------------------------------------------


@on_ranks(2)
def test_parameters_and_state_are_in_one_memory(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    dist.barrier()
    weight = model[0].weight
    if rank == 1:
        weight.data.fill_(5.0)
        optimizer.state[weight]["exp_avg"].fill_(7.0)
    dist.barrier()
    assert weight.eq(5.0).all()
    assert optimizer.state[weight]["exp_avg"].eq(7.0).all()


@on_ranks(2)
def test_where_memory_has_no_room_for_the_parameters_each_rank_has_its_own(rank: int, world_size: int) -> None:
    shared, calls = _C.SharedTensors, itertools.count()

    def has_room_for_one(*args: Any) -> _C.SharedTensors:
        if next(calls) > 0:
            error = ValueError("the ranks cannot have one copy")
            error.reason = "no room"  # type: ignore[attr-defined]
            raise error
        return shared(*args)

    with (
        patch("fastsync._C.SharedTensors", side_effect=has_room_for_one),
        warnings.catch_warnings(record=True) as warned,
    ):
        model, optimizer, sync = attached()
    assert len(warned) == (1 if rank == 0 else 0)
    for each in warned:
        assert str(each.message).startswith("fastsync.shard_optimizer: ranks share no memory, because no room. So")
        assert each.filename == __file__
    trainings = [(model, optimizer, sync), attached(shared=False)]
    for number in range(3):
        step_alike(trainings, rank, number)
    assert trainings[1][2].stats().transport == "shared_memory", "gradients alone would have room"
    assert optimizer.state[model[0].weight]["exp_avg"].is_meta


@in_both_ways
def test_gradients_stay_this_rank_s_own(rank: int, world_size: int) -> None:
    (model, optimizer, sync), (plain, _, of_plain) = twins()
    for each in (model, plain):
        backward(each, rank)
    own, kept = model[0].weight.grad.clone(), model[0].weight.grad
    theirs = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(theirs, own)
    assert not torch.equal(*theirs)
    same(sync.averaged_gradients(), {name: parameter.grad for name, parameter in plain.named_parameters()})
    same(sync.grad_stats().grad_norm.item(), of_plain.grad_stats().grad_norm.item())
    optimizer.step()
    assert model[0].weight.grad is kept
    same(kept, own)
    before = values(model)  # what all ranks drop is not stepped
    backward(model, rank)
    model[0].weight.grad = None
    optimizer.step()
    same(model[0].weight.data, before[0])
    assert not torch.equal(model[2].weight, before[2])


@in_both_ways
def test_kept_gradients_count_again(rank: int, world_size: int) -> None:
    """Without zero_grad a backward adds to ``.grad``, and so do the means; what it does not reach counts as it was."""
    model, plain = (nn.ParameterList(torch.zeros(3) for _ in range(2)) for _ in range(2))
    optimizer = SGD(model.parameters(), 1.0)
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    plain_optimizer = SGD(plain.parameters(), 1.0)
    fastsync.attach(plain)
    for number in range(3):
        for each, own in ((model, optimizer), (plain, plain_optimizer)):
            sum((weight * (4.0 * rank + 2.0)).sum() for weight in list(each)[number % 2 :]).backward()
            own.step()
        same(values(model), values(plain))


@in_both_ways
def test_other_parameters_of_the_optimizer_are_stepped_as_ever(rank: int, world_size: int) -> None:
    model, own, empty = two_layers(), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))
    model.register_parameter("empty", empty)
    optimizer = SGD([{"params": model.parameters()}, {"params": [own]}], lr=1.0)
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    (model(torch.full((1, 5), 1.0 + rank)).sum() + (rank * own).sum() + empty.sum()).backward()
    optimizer.step()
    assert own.tolist() == [1.0 - rank] * 3


def held_bytes(optimizer: Optimizer) -> int:
    """The bytes of state that this rank has for itself."""
    tensors = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    return sum(each.nbytes for each in tensors if not each.is_meta and each.dim() > 0)


@on_ranks(3, shared_memory=False)
def test_without_shared_memory_a_rank_has_the_state_of_its_shard(rank: int, world_size: int) -> None:
    """And both halves of a step send the bytes of an all-reduce."""
    model, num_values = nn.Linear(300, 100), 300 * 100 + 100
    optimizer = AdamW(model.parameters())
    sync = fastsync.attach(model)
    fastsync.shard_optimizer(sync, optimizer)
    model(torch.full((1, 300), 1.0 + rank)).sum().backward()
    optimizer.step()
    assert held_bytes(optimizer) == 0
    assert abs(held_bytes(sync._optimizer_shards._pieces.inner) / (8 * num_values) - 1 / 3) < 0.02
    stats = sync.stats()
    of_all_reduce = 2 * (world_size - 1) / world_size * 4 * num_values
    assert of_all_reduce < stats.wire_bytes + stats.parameter_wire_bytes < 1.02 * of_all_reduce
    assert sum(each.nbytes for each in optimizer.state_dict()["state"][0].values()) == 8 * 300 * 100 + 4
    assert optimizer.state[model.weight]["exp_avg"].is_meta


@on_ranks(2, shared_memory=False)
def test_a_rank_that_asks_alone_for_the_state_is_told(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    model, optimizer, _ = attached(process_group=group)
    step(model, optimizer, rank)
    if rank == 0:
        refused(lambda: optimizer.state_dict(), "as state_dict() and detach() do on every rank,", kind=RuntimeError)
    dist.barrier()


# ---- freezing, and other shards -------------------------------------------------------------------------------------


@on_ranks(2, cases=BOTH_WAYS | {"overlap": [True, False]})
def test_frozen_parameters_and_another_compression(rank: int, world_size: int, overlap: bool) -> None:
    """The shards are others afterwards, and the state is not lost."""
    trainings = twins(overlap=overlap)
    for number in range(12):
        for model, optimizer, sync in trainings:
            model[0].weight.requires_grad_(number not in (3, 4, 5))
            if number == 8:
                sync.compression = fastsync.Compression("int8", algorithm="two_shot")
            loss_of(model, rank, number).backward()
            if not overlap:
                sync.synchronize()
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(trainings)
    same(*(optimizer.state_dict()["state"] for _, optimizer, _ in trainings))


# ---- owners of whole tensors, and optimizers of the user's own ------------------------------------------------------


def test_costly_matrices_are_dealt_first() -> None:
    shapes = [(2, 2), (100, 10), (10, 10), (50, 20), (3, 3, 2)]
    owner_of = deal({index: torch.empty(shape, device="meta") for index, shape in enumerate(shapes)}, 2)
    assert owner_of == {3: 0, 1: 1, 2: 1, 4: 1, 0: 1}


def of_muon(shared: bool) -> tuple[nn.Module, list[Optimizer], list[GradientSynchronizer]]:
    """Muon steps the matrices, and AdamW the rest."""
    model = nn.Sequential(nn.Linear(40, 70), nn.ReLU(), nn.Linear(70, 30), nn.ReLU(), nn.Linear(30, 20))
    torch.manual_seed(0)
    for weight in model.parameters():
        nn.init.normal_(weight)
    parts = [[p for p in model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False)]
    optimizers: list[Optimizer] = [torch.optim.Muon(parts[0], lr=0.02), AdamW(parts[1], lr=0.01)]
    handles = [fastsync.attach(part) for part in parts]
    if shared:
        for handle, optimizer in zip(handles, optimizers, strict=True):
            fastsync.shard_optimizer(handle, optimizer)
    return model, optimizers, handles


@in_both_ways
def test_muon_beside_adamw(rank: int, world_size: int) -> None:
    """Clipped together, with a matrix frozen and not, another compression, and detached in the end."""
    trainings = of_muon(shared=True), of_muon(shared=False)
    for number in range(10):
        norms = []
        for model, optimizers, handles in trainings:
            model[2].weight.requires_grad_(number not in (2, 3, 4))
            if number == 6:
                for handle in handles:
                    handle.compression = fastsync.Compression("int8", algorithm="two_shot")
            if number == 8:
                for handle in handles:
                    handle.detach()
                handles[:] = [fastsync.attach(list(each.parameters())) for each in handles]
            inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * number + rank))
            model(inputs).square().mean().backward()
            norms.append(fastsync.clip_grad_norm_(handles, 1e9))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(*norms)
        (own, of_own, _), (plain, of_plain, _) = trainings
        same(values(own), values(plain))
        for mine, theirs in zip(of_own, of_plain, strict=True):
            same(mine.state_dict()["state"], theirs.state_dict()["state"])


@on_ranks(2, shared_memory=False)
def test_a_rank_has_the_state_of_its_matrices(rank: int, world_size: int) -> None:
    model = nn.ParameterList(torch.randn(60, 50) for _ in range(4))
    optimizer = torch.optim.Muon(model.parameters())
    sync = fastsync.attach(model, bucket_cap_mb=0.02)
    fastsync.shard_optimizer(sync, optimizer)
    sum(weight.square().sum() * (rank + 1) for weight in model).backward()
    optimizer.step()
    assert held_bytes(optimizer) == 0
    inner = sync._optimizer_shards._pieces.inner
    assert [tuple(parameter.shape) for parameter in inner.state] == [(60, 50)] * 2
    assert held_bytes(inner) == 2 * 4 * 60 * 50


class Odd(SGD):
    """Keeps more than it tells of, or sets what is the user's."""

    def __init__(self, params: Any, keeps: str = "", sets: str = "") -> None:
        super().__init__(params, lr=0.1)
        self.keeps, self.sets = keeps, sets

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update({self.keeps: torch.zeros_like(parameter)} if self.keeps else {})
            group.update({self.sets: 1.0} if self.sets else {})


@on_ranks(
    2,
    cases=BOTH_WAYS
    | {
        "register, told, keeps, sets, reason": [
            (register_elementwise, (), "ema", "", "the state of Odd is not .* 'ema' is not among the names"),
            (register_elementwise, ("ema",), "", "", "'ema' has no tensor"),
            (register_elementwise, (), "", "k", r"Odd\.step\(\) has changed 'k' in param_groups"),
            (register_tensorwise, ("a",), "", "", "'a' has no tensor"),
        ]
    },
)
def test_what_a_class_keeps_beside_what_was_told(
    rank: int, world_size: int, register: Any, told: tuple[str, ...], keeps: str, sets: str, reason: str
) -> None:
    register(Odd, state=told)
    model = two_layers()
    optimizer = Odd(model.parameters(), keeps, sets)
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    backward(model, rank)
    with pytest.raises(RuntimeError, match=reason):
        optimizer.step()


@pytest.mark.parametrize("register", [register_elementwise, register_tensorwise])
def test_what_a_registry_refuses(register: Any) -> None:
    with pytest.raises(ValueError, match="optimizer_class: expected a class"):
        register(Odd(two_layers().parameters()), state=())
    for state in ("exp_avg", ("step",), (1,)):
        with pytest.raises(ValueError, match="state: expected names"):
            register(Odd, state=state)


# ---- saved and loaded -----------------------------------------------------------------------------------------------


@in_both_ways
def test_a_resumed_training_has_the_same_bits(rank: int, world_size: int) -> None:
    """The files are those of a plain training: each of the two resumes the other's."""
    saved: dict[bool, bytes] = {}
    ends = []
    for shared in (True, False):
        model, optimizer, _ = attached(shared)
        for number in range(3):
            step(model, optimizer, rank, number)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved[shared] = file.getvalue()
        for number in range(3, 6):
            step(model, optimizer, rank, number)
        ends.append(values(model))
    same(*ends)
    assert abs(len(saved[True]) - len(saved[False])) < 2000, "a view has saved its whole memory"
    for shared, before in ((True, False), (False, True), (True, True)):
        model, optimizer, _ = attached(shared)
        if before:
            step(model, optimizer, rank, 9)
        state = torch.load(io.BytesIO(saved[not shared]))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for number in range(3, 6):
            step(model, optimizer, rank, number)
        same(values(model), ends[0])


@in_both_ways
def test_state_that_was_loaded_before_attach(rank: int, world_size: int) -> None:
    plain, own, _ = attached(shared=False)
    for number in range(2):
        step(plain, own, rank, number)
    model = two_layers()
    model.load_state_dict(plain.state_dict())
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    for number in range(2, 4):
        step_alike([(model, optimizer), (plain, own)], rank, number)


@in_both_ways
def test_distributed_checkpoint_makes_the_state(rank: int, world_size: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def of(kind: str) -> tuple[nn.Module, Optimizer]:
        model = two_layers()
        optimizer = (OPTIMIZERS | OF_WHOLE)[kind](model.parameters())
        fastsync.shard_optimizer(fastsync.attach(model), optimizer)
        return model, optimizer

    for kind in ("AdamW", "Normalized"):
        model, optimizer = of(kind)
        step(model, optimizer, rank)
        weights, state = (copy.deepcopy(each) for each in get_state_dict(model, optimizer))
        step(model, optimizer, rank, 1)
        end = values(model)
        fresh, of_fresh = of(kind)
        set_state_dict(fresh, of_fresh, model_state_dict=weights, optim_state_dict=state)
        step(fresh, of_fresh, rank, 1)
        same(values(fresh), end)


@in_both_ways
def test_copies_have_memory_of_their_own(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    before = values(model)
    copies = [copy.deepcopy(model), torch.load(_saved(model), weights_only=False)]
    average = torch.optim.swa_utils.AveragedModel(model)
    for each in (*copies, average.module):
        same(values(each), before)
        with torch.no_grad():
            each[0].weight.fill_(9.0)
    dist.barrier()
    same(values(model), before)


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


@in_both_ways
def test_a_forked_child_reads_the_parameters(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    total = model[0].weight.sum().item()
    if (child := os.fork()) == 0:
        is_right = model[0].weight.detach().sum().item() == total
        try:
            optimizer.step()
        except RuntimeError as error:
            os._exit(0 if is_right and "this process was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    step(model, optimizer, rank)


@in_both_ways
def test_detach_gives_each_rank_its_own_copy(rank: int, world_size: int) -> None:
    trainings = (model, optimizer, sync), (plain, own, _) = twins()
    step_alike(trainings, rank)
    sync.detach()
    assert_alike(trainings)
    same(optimizer.state_dict()["state"], own.state_dict()["state"])
    with torch.no_grad():
        model[0].weight.fill_(float(rank))
    dist.barrier()
    assert model[0].weight.eq(rank).all()
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    with torch.no_grad():
        model[0].weight.copy_(plain[0].weight)
    dist.barrier()
    step_alike(trainings, rank, 1)


# ---- what is refused ------------------------------------------------------------------------------------------------

REFUSED: list[Callable[[Any], Any]] = [
    lambda p: "AdamW",
    torch.optim.Adafactor,
    lambda p: AdamW(p, differentiable=True),
    lambda p: AdamW(p[1:]),
]


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_arguments_that_are_refused(rank: int, world_size: int) -> None:
    """They leave nothing behind."""
    model, sync = after_attach()
    for make in REFUSED:
        refused(lambda: fastsync.shard_optimizer(sync, make(list(model.parameters()))), "optimizer:")
    flat = torch.zeros(6)
    for parameters in (
        [nn.Parameter(flat[:3]), nn.Parameter(flat[3:])],
        [nn.Parameter(torch.zeros(3, dtype=torch.complex64))],
        [nn.Parameter(torch.zeros(3, 4)[:, :2])],
    ):
        handle = fastsync.attach(parameters)
        refused(lambda: fastsync.shard_optimizer(handle, SGD(parameters, 0.1)), "parameter")
    assert_averages(model, rank, world_size)
    model, sync = after_attach()
    optimizer = SGD(model.parameters(), 0.1)
    refused(lambda: fastsync.shard_optimizer(model, optimizer), "sync:")  # type: ignore[arg-type]
    joined = after_attach()[1]
    with joined.join(), pytest.raises(ValueError, match=r"sync: inside join\(\)"):
        fastsync.shard_optimizer(joined, optimizer)
    fastsync.shard_optimizer(sync, optimizer)
    refused(lambda: fastsync.shard_optimizer(sync, optimizer), "sync:")
    sync.detach()
    refused(lambda: fastsync.shard_optimizer(sync, optimizer), "sync:")
    sync = fastsync.attach(model)
    assert_averages(model, rank, world_size)
    refused(lambda: fastsync.shard_optimizer(sync, optimizer), "sync:")
    model.zero_grad()
    assert_averages(model, rank, world_size)


@in_both_ways
def test_a_rank_without_the_optimizer_is_named(rank: int, world_size: int) -> None:
    """In its first backward."""
    model, sync = after_attach()
    optimizer, loss = SGD(model.parameters(), 0.1), model(torch.ones(1, 5)).sum()
    with pytest.raises(ValueError, match="optimizer SGD of parameters 0 1 2 3"):
        fastsync.shard_optimizer(sync, optimizer) if rank == 0 else loss.backward()


@in_both_ways
def test_ranks_with_different_optimizers_may_call_it_again(rank: int, world_size: int) -> None:
    for goes_on_without in (True, False):
        model, sync = after_attach()
        other = (SGD, AdamW)[rank](model.parameters(), lr=0.1)
        refused(lambda: fastsync.shard_optimizer(sync, other), "optimizer SGD of parameters 0 1 2 3", "rank 1: ")
        if goes_on_without:
            assert_averages(model, rank, world_size)
    optimizer = SGD(model.parameters(), lr=0.1)
    fastsync.shard_optimizer(sync, optimizer)
    plain = after_attach()[0]
    step_alike([(model, optimizer), (plain, SGD(plain.parameters(), lr=0.1))], rank)


@in_both_ways
def test_what_was_set_between_attach_and_shards_counts(rank: int, world_size: int) -> None:
    """Also gradients of ``no_sync``, and residuals that were loaded."""
    states: list[dict[str, Any]] = []
    trained = []
    for loads in (False, True):
        for shards_first in (True, False):
            model, optimizer, sync = attached(shared=shards_first, compression="int8+ef")
            sync.set_weight(1.0 + rank)
            with sync.no_sync():
                model(torch.full((1, 5), 3.0 + rank)).sum().backward()
            sync.piggyback("rank", torch.tensor([float(rank)]))
            if loads:
                sync.load_state_dict(states[0])
            if not shards_first:
                fastsync.shard_optimizer(sync, optimizer)
            step(model, optimizer, rank)
            assert sync.piggybacked()["rank"].item() == 0.5
            step(model, optimizer, rank, 1)
            trained.append(values(model))
            states.append(sync.state_dict())
    same(trained[0], trained[1])
    same(trained[2], trained[3])
    assert not torch.equal(trained[0][0], trained[2][0])


@in_both_ways
def test_calls_that_are_refused(rank: int, world_size: int) -> None:
    trainings = (model, optimizer, sync), _ = twins()
    with pytest.raises(RuntimeError, match=r"join\(\) does not work with shard_optimizer"), sync.join():
        pass
    refused(lambda: sync.use_group(dist.new_group()), "use_group() does not work", kind=RuntimeError)
    refused(lambda: attached(op="sum"), "sync:")
    model(torch.full((1, 5), torch.inf if rank == 0 else 1.0)).sum().backward()
    clip = partial(fastsync.clip_grad_norm_, sync, 1e-6)
    refused(lambda: clip(error_if_nonfinite=True), "the norm of the gradients is", kind=RuntimeError)
    optimizer.zero_grad()
    backward(model, rank)
    refused(lambda: clip(norm_type=1.0), "norm_type 1.0")
    with sync.no_sync(), pytest.raises(RuntimeError, match=r"inside no_sync\(\)"):
        optimizer.step()
    clip()
    refused(clip, "each synchronised backward", kind=RuntimeError)
    optimizer.zero_grad()
    step_alike(trainings, rank)  # the clip is forgotten
    backward(model, rank)
    model[2].bias.data = torch.zeros(3)
    refused(lambda: optimizer.step(), "parameter 2.bias left the memory", kind=RuntimeError)


@on_ranks(4, cases=BOTH_WAYS)
def test_two_levels_are_refused(rank: int, world_size: int, shared_memory: bool) -> None:
    """Where ranks share memory in the first backward, else at once."""
    levels = fastsync.Compression("none", ranks_per_node=2)
    if shared_memory:
        model, _, _ = attached(compression=levels)
        for _ in range(2):
            refused(lambda: backward(model, rank), "shard_optimizer takes a ranks_per_node that is", kind=RuntimeError)
        return
    model, sync = after_attach(compression=levels)
    refused(lambda: fastsync.shard_optimizer(sync, AdamW(model.parameters())), "ranks_per_node=2 does not go with")
    assert_averages(model, rank, world_size)
    model, optimizer, sync = attached()
    refused(lambda: setattr(sync, "compression", levels), "ranks_per_node=2 does not go with")
    sync.compression = fastsync.Compression("bf16", ranks_per_node=4)  # a single node
    step(model, optimizer, rank)


@on_ranks(2, shared_memory=False)
def test_ranks_that_ask_for_the_state_of_different_parameters(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    if rank == 1:
        del optimizer.state[model[0].weight]
    with pytest.raises(SyncError, match="ranks have state of different parameters") as raised:
        optimizer.state_dict()
    assert raised.value.rank == 1


@in_both_ways
def test_an_optimizer_with_other_parameters_is_told(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    backward(model, rank)
    refused(lambda: optimizer.step(), "the optimizer got other parameters", kind=RuntimeError)
    if rank == 0:
        del optimizer.param_groups[1]
    else:
        optimizer.param_groups.clear()
    backward(model, rank)
    with pytest.raises(RuntimeError, match="rank 1 refuses" if rank == 0 else "the optimizer got other parameters"):
        optimizer.step()


@on_ranks(2, cases=BOTH_WAYS | {"what": ["settings", "lr", "gradients", "state", "clips", "scales"]})
def test_ranks_that_would_step_in_different_ways(rank: int, world_size: int, what: str) -> None:
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**rank, enabled=what == "scales")
    scaler.scale(model(torch.full((1, 5), 1.0 + rank)).sum()).backward()
    saved = copy.deepcopy(optimizer.state_dict())
    if what == "lr":  # a tensor prints four digits
        what = "settings"
        optimizer.param_groups[0]["lr"] = torch.tensor(0.00102 + 0.00002 * rank)
    elif rank == 1:
        if what == "settings":
            optimizer.param_groups[0]["lr"] = 0.2
        elif what == "clips":
            fastsync.clip_grad_norm_(sync, 1e-3)
        elif what == "gradients":
            model[0].bias.grad = None
        elif what == "state":
            optimizer.load_state_dict(saved)
    before = values(model)
    with pytest.raises(RuntimeError, match=f"different .*{what}.*: rank 1 is not as rank 0"):
        scaler.step(optimizer)
    same(values(model), before)


@on_ranks(2, cases=BOTH_WAYS)
def test_statistics_that_one_rank_alone_asks_for(rank: int, world_size: int) -> None:
    """With micro-batches they are of all means, which ranks gather for it."""
    model = two_layers()
    optimizer = AdamW(model.parameters())
    sync = fastsync.attach(model, micro_batches=2)
    fastsync.shard_optimizer(sync, optimizer)
    for _ in sync.micro_batches():
        model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(RuntimeError, match="another rank is not there"):
        _ = sync.grad_stats() if rank == 1 else optimizer.step()


@on_ranks(2, cases=BOTH_WAYS | {"micro_batches": [None, 2]})
def test_inf_in_a_gradient_that_is_not_averaged_is_told(rank: int, world_size: int, micro_batches: int | None) -> None:
    model, own = two_layers(), nn.Parameter(torch.ones(3))
    optimizer = AdamW([*model.parameters(), own], fused=True)
    sync = fastsync.attach(model, micro_batches=micro_batches)
    fastsync.shard_optimizer(sync, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for finds in (True, False):
        factor = torch.inf if finds and rank == 1 else 1.0
        optimizer.zero_grad()
        for _ in sync.micro_batches() if micro_batches else range(1):
            scaler.scale(model(torch.full((1, 5), 1.0 + rank)).sum() + (own * factor).sum()).backward()
        if finds:
            refused(lambda: scaler.step(optimizer), "different finds of a GradScaler", kind=RuntimeError)
            assert not hasattr(optimizer, "grad_scale"), "the next step would multiply by it"
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        else:
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 4.0


@in_both_ways
def test_a_scaler_skips_all_parameters_of_an_optimizer(rank: int, world_size: int) -> None:
    """Also those of another handle, whose means are finite."""
    models = two_layers(), two_layers()
    optimizer = AdamW([parameter for model in models for parameter in model.parameters()], fused=True)
    for model in models:
        fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    before = [values(model) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for model, factor in zip(models, (1.0, torch.inf if rank == 1 else 1.0), strict=True):
        scaler.scale(model(torch.full((1, 5), 1.0 + rank)).sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    same([values(model) for model in models], before)


@in_both_ways
def test_momentum_that_was_loaded_as_none_begins(rank: int, world_size: int) -> None:
    """Older versions of torch have saved that of SGD without momentum."""
    trainings = [(model, SGD(model.parameters(), 0.1), sync) for model, sync in (after_attach(), after_attach())]
    fastsync.shard_optimizer(trainings[0][2], trainings[0][1])
    for _, each, _ in trainings:
        saved = each.state_dict()
        saved["state"] = {index: {"momentum_buffer": None} for index in range(4)}
        each.load_state_dict(saved)
        each.param_groups[0]["momentum"] = 0.9
    for number in range(3):
        step_alike(trainings, rank, number)
    same(*(optimizer.state_dict()["state"] for _, optimizer, _ in trainings))


@in_both_ways
def test_scalers_agree_even_without_gradients(rank: int, world_size: int) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))])
    optimizer = AdamW(model.parameters(), fused=True)
    sync = fastsync.attach(model)
    fastsync.shard_optimizer(sync, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if rank == 0:
        scaler.scale(model[0].sum() * torch.inf).backward()
    else:
        scaler.scale(model[1].sum()).backward()
    assert sync.grad_stats().num_nonfinite > 0
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert model[0].tolist() == [1.0] * 3


# ---- ranks that fail ------------------------------------------------------------------------------------------------


def go_on_without_rank_1(rank: int, world_size: int) -> list[str]:
    """Returns the texts of the errors of the step that rank 1 is lost in, and of detach(), if it raises one."""
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    before = values(model)
    backward(model, rank)
    if rank == 1:
        os.kill(os.getpid(), 9)
    said = [refused(optimizer.step, kind=RuntimeError)]
    same(values(model), before)
    try:
        sync.detach()
    except RuntimeError as error:
        said.append(str(error))
        assert not optimizer.state
    step(model, optimizer, rank)
    assert not torch.equal(values(model)[0], before[0])
    return said


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_lost_rank_is_named_and_takes_with_it_what_it_had_alone(shared_memory: bool) -> None:
    said = run_ranks(go_on_without_rank_1, 2, lost=(1,), shared_memory=shared_memory)[0]
    assert "the step of the optimizer failed on rank 0 of 2: " in said[0]
    assert ("rank 1 has ended" if shared_memory else "rank 1: no answer") in said[0]
    assert len(said) == (1 if shared_memory else 2)
    assert all("so the optimizer's state is lost: go on from a checkpoint" in each for each in said[1:])


@in_both_ways
def test_a_step_that_fails_on_one_rank_is_told(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    backward(model, rank)
    if rank == 1:
        fastsync.handle_of(model)._optimizer_shards._pieces.inner.step = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    else:
        refused(lambda: optimizer.step(), "rank 1 has failed", kind=RuntimeError)
    dist.barrier()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"has failed|has ended"):
        step(model, optimizer, rank, 1)


@in_both_ways
def test_a_backward_that_fails_on_one_rank_holds_nobody_up(rank: int, world_size: int) -> None:
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    output = model(torch.full((1, 5), 1.0 + rank))
    if rank == 1:
        failing = model[2].weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        failing.remove()
    else:
        output.sum().backward()
        assert sync.grad_stats().num_nonfinite > 0
        assert sync.grad_stats().grad_norm.isnan()
    optimizer.zero_grad()
    step(model, optimizer, rank, 1)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@in_both_ways
def test_adam_counts_in_the_default_dtype(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    model, sync = after_attach()
    optimizer = Adam(model.parameters())
    fastsync.shard_optimizer(sync, optimizer)
    backward(model, rank)
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"].dtype == torch.float64


@in_both_ways
def test_what_no_rank_has_is_not_in_the_norm(rank: int, world_size: int) -> None:
    """Error feedback sends residuals in its place, and ranks may have kept a gradient of an earlier step."""
    model = nn.ParameterList(torch.ones(300) for _ in range(2))
    optimizer = AdamW(model.parameters(), lr=0.1)
    sync = fastsync.attach(model, "int4+ef")
    fastsync.shard_optimizer(sync, optimizer)
    noise = torch.randn(300, generator=torch.Generator().manual_seed(rank))
    (model[0] * noise + model[1] * noise).sum().backward()
    optimizer.step()
    model[0].grad = None
    if rank == 0:
        model[1].grad = None
    model[0].sum().backward()
    assert abs(sync.grad_stats().grad_norm.item() - 300**0.5) < 2.0
    assert sync.averaged_gradients().keys() == {"0"}

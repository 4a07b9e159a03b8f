"""Ranks of several hosts: they add in memory inside each, and one sum a host travels."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync import Compression
from fastsync.autotune import measure_group
from fastsync.sync.compression import Wire
from fastsync.sync.stats import SyncStats
from tests import reference
from tests.engine.hosts import entered, host_of, hosts
from tests.models import assert_same_on_all_ranks, random_grads
from tests.ranks import run_ranks

WIRES: list[Wire] = ["none", "fp16", "bf16", "int8"]
Nodes = Sequence[Sequence[int]]
PAIRS: Nodes = [[0, 1], [2, 3]]
ALTERNATING: Nodes = [[0, 2], [1, 3]]
UNEQUAL: Nodes = [[0], [1, 2, 3]]
THREE: Nodes = [[0, 4], [1, 2], [3]]
TIMEOUT = timedelta(seconds=6)


def run_on_hosts(fn: object, nodes: Nodes, *args: object) -> list[object]:
    with hosts(len(nodes)) as names:
        return run_ranks(_on_host, sum(map(len, nodes)), fn, nodes, names, args)


def _on_host(rank: int, world_size: int, fn: object, nodes: Nodes, names: list[str], args: Sequence[object]) -> object:
    with entered(names[host_of(nodes, rank)]):
        return fn(rank, world_size, nodes, *args)


def _random_layouts(rank: int, world_size: int, nodes: Nodes) -> None:
    chance = random.Random(world_size)
    for case, algorithm in enumerate((None, "one_shot", "two_shot") * 4):
        wire = WIRES[case % 4]
        most = chance.choice([3, 300, 40_000, 900_000])
        sizes = [chance.choice([0, 1, chance.randrange(most)]) for _ in range(chance.randrange(1, 6))] + [1]
        grads = [random_grads(peer, case, [(size,) for size in sizes], torch.float32) for peer in range(world_size)]
        parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        sync = fastsync.attach(parameters, Compression(wire, reduce="fp32", algorithm=algorithm), overlap=False)
        for parameter, grad in zip(parameters, grads[rank], strict=True):
            parameter.grad = grad.clone()
        sync.synchronize()
        mean = [parameter.grad for parameter in parameters]
        assert_same_on_all_ranks(mean)
        means = [
            reference.two_level_mean(grads, nodes, reference.WIRE_DTYPE[wire], algorithm=each)
            for each in (["one_shot", "two_shot"] if algorithm is None else [algorithm])
        ]
        assert any(all(map(torch.equal, mean, each)) for each in means), f"{wire}, {sizes}"
        stats = sync.stats()
        assert (stats.transport, stats.num_hosts) == ("two_level", len(nodes))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("nodes", [ALTERNATING, UNEQUAL, THREE], ids=str)
def test_random_layouts_give_what_the_reference_gives(nodes: Nodes) -> None:
    run_on_hosts(_random_layouts, nodes)


def _many_steps(rank: int, world_size: int, nodes: Nodes) -> None:
    chance = random.Random(rank)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (5, 3000)]
    syncs = [fastsync.attach([parameter], overlap=False) for parameter in parameters]
    for step in range(150):
        for parameter, sync in zip(parameters, syncs, strict=True):
            if chance.random() < 0.05:
                time.sleep(chance.random() * 0.01)
            parameter.grad = torch.full_like(parameter, float(rank * step))
            sync.synchronize()
            assert torch.equal(parameter.grad, torch.full_like(parameter, step * (world_size - 1) / 2))


def test_no_row_is_read_too_early_or_written_too_late() -> None:
    run_on_hosts(_many_steps, UNEQUAL)


def _values_beside_presence_and_one_call(rank: int, world_size: int, nodes: Nodes) -> None:
    model = nn.ModuleDict({"all": nn.Linear(40, 30), "some": nn.Linear(40, 30), "none": nn.Linear(4, 3)})
    sync = fastsync.attach(model, "fp16")
    for step in range(3):
        model.zero_grad()
        sync.piggyback("loss", torch.tensor([float(rank + step)]))
        x = torch.full((2, 40), float(rank + 1))
        used = model["all"](x).sum() + (model["some"](x).sum() if rank == world_size - 1 else 0.0)
        used.backward()
        mean = sum(range(1, world_size + 1)) / world_size
        everywhere, somewhere = model.get_parameter("all.weight").grad, model.get_parameter("some.weight").grad
        assert everywhere is not None
        assert somewhere is not None
        assert torch.allclose(everywhere, torch.full((30, 40), 2 * mean), rtol=1e-3)
        assert torch.allclose(somewhere, torch.full((30, 40), 2.0), rtol=1e-3)
        assert model.get_parameter("none.weight").grad is None
        assert sync.piggybacked()["loss"].item() == (world_size - 1) / 2 + step
    assert sync.stats().num_hosts == len(nodes)
    assert f"{len(nodes)} hosts" in str(sync.explain())
    grads = [nn.Parameter(torch.zeros(70_001))]
    grads[0].grad = torch.full((70_001,), float(rank))
    fastsync.all_reduce_gradients(grads)
    assert torch.allclose(grads[0].grad, torch.full((70_001,), (world_size - 1) / 2))


def test_piggybacked_values_presence_and_one_call() -> None:
    run_on_hosts(_values_beside_presence_and_one_call, THREE)


def test_groups_of_some_ranks_take_what_their_own_ranks_have() -> None:
    with hosts(2) as names:
        # New groups connect through the network, so these ranks enter their hosts once they have them.
        found = run_ranks(_on_a_mesh, 4, names)
    for inside, between in found:
        assert inside.transport == "shared_memory"
        assert between.transport == "process_group"
        assert "no two ranks are on one host" in between.transport_reason


def _on_a_mesh(rank: int, world_size: int, names: list[str]) -> list[SyncStats]:
    found = []
    for groups in (PAIRS, ALTERNATING):
        mine = next(ranks for ranks in groups if rank in ranks)
        group = [dist.new_group(list(ranks)) for ranks in groups][groups.index(mine)]
        parameter = nn.Parameter(torch.zeros(1000))
        sync = fastsync.attach([parameter], process_group=group, overlap=False)
        parameter.grad = torch.full((1000,), float(rank))
        with entered(names[host_of(PAIRS, rank)]):
            sync.synchronize()
        assert torch.equal(parameter.grad, torch.full((1000,), sum(mine) / 2))
        found.append(sync.stats())
    return found


def _nodes_that_are_named(rank: int, world_size: int, nodes: Nodes) -> str:
    parameter = nn.Parameter(torch.zeros(1000))
    sync = fastsync.attach([parameter], Compression("bf16", ranks_per_node=2), overlap=False)
    parameter.grad = torch.full((1000,), float(rank))
    sync.synchronize()
    assert torch.equal(parameter.grad, torch.full((1000,), 1.5))
    return sync.stats().transport


def test_nodes_that_are_named_share_memory_where_they_are_the_hosts() -> None:
    assert set(run_on_hosts(_nodes_that_are_named, PAIRS)) == {"two_level"}
    assert set(run_on_hosts(_nodes_that_are_named, ALTERNATING)) == {"process_group"}


# ---- a rank that is lost --------------------------------------------------------------------------------------------


LOST = {
    "first": (PAIRS, [0], signal.SIGKILL),
    "last": (PAIRS, [3], signal.SIGKILL),
    "alone": (UNEQUAL, [0], signal.SIGKILL),
    "one of three": (UNEQUAL, [3], signal.SIGKILL),
    "stopped": (PAIRS, [1], signal.SIGSTOP),
    "a host": (PAIRS, [2, 3], signal.SIGSTOP),
}


def _some_are_lost(rank: int, world_size: int, names: list[str]) -> str:
    """Each case has four ranks of its own, so that all of them wait at the same time. What the error says."""
    groups = [dist.new_group(range(first, first + 4), timeout=TIMEOUT) for first in range(0, world_size, 4)]
    case, rank = divmod(rank, 4)
    nodes, lost, how = list(LOST.values())[case]
    parameter = nn.Parameter(torch.zeros(200_000))
    sync = fastsync.attach([parameter], overlap=False, process_group=groups[case])
    for step in range(10):
        parameter.grad = torch.full((200_000,), float(rank))
        with entered(names[host_of(nodes, rank)]) if step == 0 else nullcontext():
            sync.synchronize()
        assert torch.equal(parameter.grad, torch.full((200_000,), 1.5))
    dist.barrier()  # before any is lost
    if rank in lost:
        os.kill(os.getpid(), how)
    with pytest.raises(RuntimeError) as error:
        sync.synchronize()
    return str(error.value)


def test_ranks_that_are_lost_are_noticed_on_all_hosts() -> None:
    lost_ranks = [4 * index + rank for index, (_, lost, _) in enumerate(LOST.values()) for rank in lost]
    with hosts(2) as names:
        said = run_ranks(_some_are_lost, 4 * len(LOST), names, lost=lost_ranks)
    for index, (case, (_, lost, _)) in enumerate(LOST.items()):
        for rank in set(range(4)) - set(lost):
            assert f"failed on rank {rank} of 4" in said[4 * index + rank], f"{case}: {said[4 * index + rank]}"


def _one_is_lost_while_memory_is_made(rank: int, world_size: int, names: list[str]) -> str:
    """Rank 2 makes memory of its host for a wider wire, and may have no file of that size. What the error says."""
    parameter = nn.Parameter(torch.zeros(200_000))
    group = dist.new_group(timeout=TIMEOUT)
    sync = fastsync.attach([parameter], "int8", overlap=False, process_group=group)
    parameter.grad = torch.full((200_000,), float(rank))
    with entered(names[host_of(PAIRS, rank)]):
        sync.synchronize()
    dist.barrier()
    sync.compression = fastsync.Compression("none")
    if rank == 2:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
    with pytest.raises(RuntimeError) as error:
        sync.synchronize()
    return str(error.value)


def test_a_rank_that_is_lost_while_memory_is_made_is_noticed_on_all_hosts() -> None:
    with hosts(2) as names:
        said = run_ranks(_one_is_lost_while_memory_is_made, 4, names, lost=[2])
    for rank in (0, 1, 3):
        assert f"failed on rank {rank} of 4" in said[rank], said[rank]
        assert "no answer" in said[rank], said[rank]


def _profile_of_hosts(rank: int, world_size: int, nodes: Nodes) -> None:
    profile = measure_group()
    assert all(candidate.compression.algorithm != "two_shot" for candidate in profile.candidates), "two hosts add"


def test_a_profile_tells_hosts_apart() -> None:
    run_on_hosts(_profile_of_hosts, PAIRS)

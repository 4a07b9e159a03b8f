"""Collectives of the backend fastsync, at random: right results, or an error that names the rank that is lost."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tests.engine.collectives import call_at_random, call_in_trouble, check_trouble
from tests.engine.hosts import hosts
from tests.engine.test_backend import BETWEEN_HOSTS, group_between
from tests.ranks import run_ranks

SIZES = (1, 2, 3, 4, 5)
TIMEOUT = 3.0


def call_in_threads(rank: int, world_size: int, seed: int) -> None:
    """Two threads, each with groups of its own: all ranks, and some of them."""
    draws = random.Random(seed)
    of_threads: list[list[Any]] = []
    for _ in range(2):
        some = sorted(draws.sample(range(world_size), draws.randint(1, world_size)))
        groups = [dist.new_group(backend="fastsync"), dist.new_group(some, backend="fastsync")]
        of_threads.append([groups[0], *groups[1:] * (rank in some)])

    def run(index: int) -> None:
        for turn in range(3):
            for group in of_threads[index]:
                call_at_random(group, hash((seed, index, turn, group.size())), 30)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))  # raises a thread's error


def test_right_results(seeds: Iterable[int]) -> None:
    for seed in seeds:
        run_ranks(call_in_threads, random.Random(seed).choice(SIZES), seed, backend="fastsync")


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_in_trouble(what: signal.Signals, seeds: Iterable[int]) -> None:
    def files() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}  # others' semaphores

    before = files()
    for seed in seeds:
        size = random.Random(seed).choice(SIZES[1:])
        victim = random.Random(seed).randrange(size)
        ended = run_ranks(call_in_trouble, size, seed, what, victim, TIMEOUT, lost=[victim], backend="fastsync")
        check_trouble(ended, what, victim, TIMEOUT)
    assert files() <= before


def call_between(rank: int, world_size: int, names: Sequence[str], nodes: list[list[int]], seed: int) -> None:
    with group_between(rank, names, nodes) as group:
        call_at_random(group, seed, 60, BETWEEN_HOSTS)


def test_between_hosts(seeds: Iterable[int]) -> None:
    with hosts(3) as names:
        for seed in seeds:
            draws = random.Random(seed)
            ranks = list(range(draws.choice(SIZES[2:])))
            host_of_ranks = [0, 0, *(draws.randrange(3) for _ in ranks[2:])]  # else Gloo takes everything
            draws.shuffle(host_of_ranks)
            nodes = [[rank for rank in ranks if host_of_ranks[rank] == host] for host in range(3)]
            run_ranks(call_between, len(ranks), names, nodes, seed)

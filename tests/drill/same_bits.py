"""Micro-batches on any number of ranks, which die and join at random: each training ends with one digest."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.engine.test_hosts import ALTERNATING, UNEQUAL, Nodes, run_on_hosts
from tests.engine.trained_by_micro_batches import (
    MICRO_BATCHES,
    MODELS,
    NUM_STEPS,
    OPTIMIZERS,
    train,
    train_a_part,
    train_elastic,
)
from tests.ranks import run_ranks

LONGEST = 0.05
"""Seconds within which a rank dies after a step has begun."""


@cache
def alone(kind: str, optimizer: str) -> str:
    (digest,) = run_ranks(train, 1, kind, optimizer)
    return digest


def on_host(rank: int, world_size: int, nodes: Nodes, kind: str, optimizer: str) -> str:
    return train(rank, world_size, kind, optimizer)


def trainings(kind: str, optimizer: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields ways to train, and the digests that their ranks end with."""
    what = kind, optimizer
    for world_size in (1, 2, 3, 4, 8):
        yield f"{world_size} ranks in shared memory", run_ranks(train, world_size, *what)
    for world_size in (2, 3, 4, 8):
        yield f"{world_size} ranks by messages", run_ranks(train, world_size, *what, shared_memory=False)
    for nodes in (ALTERNATING, UNEQUAL):
        yield f"hosts {nodes}", run_on_hosts(on_host, nodes, *what)
    for size, lost, joins_at in [(3, {1: (1, 3)}, {}), (3, {0: (2, 1)}, {}), (4, {}, {1: 0, 2: 1, 3: 2})]:
        store = str(folder / f"{kind} {optimizer} {lost} {joins_at}")
        digests = run_ranks(train_elastic, size, store, lost, joins_at, *what, lost=[*lost])
        yield f"lost {lost}, joins {joins_at}", [each for rank, each in enumerate(digests) if rank not in lost]
    file = str(folder / f"{kind} {optimizer} checkpoint")
    run_ranks(train_a_part, 3, file, 0, 2, *what)
    yield "resumed on 2 ranks in place of 3", run_ranks(train_a_part, 2, file, 2, NUM_STEPS, *what)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_table(kind: str, optimizer: str, tmp_path: Path) -> None:
    for way, digests in trainings(kind, optimizer, tmp_path):
        assert {*digests} == {alone(kind, optimizer)}, way


def test_deaths_and_joins(seeds: Iterable[int], kills: list[tuple[int, str]], tmp_path: Path) -> None:
    for seed in seeds:
        draw = random.Random(f"{seed} same bits")
        kind, optimizer, size = draw.choice(MODELS), draw.choice(OPTIMIZERS), draw.choice((2, 3, 4, 5))
        new = draw.sample(range(1, size), draw.randrange(size))
        first = [each for each in range(size) if each not in new]
        joins_at = {each: draw.randrange(NUM_STEPS - 1) for each in new}
        victims = draw.sample(range(size), draw.randrange(size))
        lost = {
            each: (
                draw.randrange(joins_at.get(each, -1) + 1, NUM_STEPS),
                draw.choice((draw.randrange(MICRO_BATCHES), draw.uniform(0.0, LONGEST))),
            )
            for each in victims
        }
        if {*first} <= {*lost}:
            del lost[first[0]]
        shared_memory = draw.random() < 0.7
        print(f"{kind}, {optimizer}, {size} ranks, {shared_memory=}, lost {lost}, joins {joins_at}")
        store = str(tmp_path / f"store{seed}")
        given = (store, lost, joins_at, kind, optimizer)
        digests = run_ranks(train_elastic, size, *given, shared_memory=shared_memory, lost=[*lost])
        kills += [(each, "in a step") for each in lost]
        left = [each for rank, each in enumerate(digests) if rank not in lost]
        assert left == [alone(kind, optimizer)] * len(left)

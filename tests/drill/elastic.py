"""Ranks of an elastic training that die, stop and join at random: the others end bit for bit as without a loss."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed import TCPStore

from benchmarks.network.namespaces import Network
from tests.engine.hosts import entered
from tests.engine.test_elastic import NUM_STEPS, Changes, Moment, check, go_on
from tests.ranks import run_ranks

SHARED, MESSAGES, HOSTS = "shared memory", "messages", "two hosts"
PLACES = ("forward", "backward", "optimizer", "between")
LONGEST_STEP = 0.01
"""Seconds within which a rank dies after a step has begun: some of them in a later step."""
PATIENCE, SILENCE = 20.0, 4.0
"""Seconds that a silent rank is waited for, and that a stopped one is."""


def take(rank: int, world_size: int, *given: Any) -> tuple[Changes, list[Tensor]] | None:
    """Takes steps. Returns None if the others have gone on without this rank."""
    try:
        return go_on(rank, world_size, *given)
    except RuntimeError as error:
        if "have gone on without" not in str(error):
            raise
        return None


def on_host(rank: int, world_size: int, keepers: Sequence[int], fn: Callable[..., Any], *given: Any) -> Any:
    """Calls the function on the host of this rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with entered(f"/proc/{keepers[rank % 2]}/ns/net"):
        return fn(rank, world_size, *given)


def between(keepers: Sequence[int]) -> Callable[..., list[Any]]:
    """Makes a function that runs ranks on these hosts."""
    return lambda fn, size, *given, **options: run_ranks(on_host, size, keepers, fn, *given, **options)


def moments(draw: random.Random, way: str, old: Sequence[int]) -> dict[int, Moment]:
    """Which ranks are lost, and when. One of them stays."""
    if way == HOSTS and draw.random() < 0.3:  # a whole host
        moment = (draw.randrange(NUM_STEPS), draw.uniform(0.0, LONGEST_STEP))
        return dict.fromkeys(old[draw.randrange(2) :: 2], moment)
    victims = draw.sample(old, draw.choice((1, 1, 2)))
    return {
        victim: (
            draw.randrange(NUM_STEPS),
            draw.choice((draw.choice(PLACES), draw.uniform(0.0, LONGEST_STEP), draw.uniform(0.0, LONGEST_STEP))),
        )
        for victim in victims
    }


@pytest.mark.parametrize("way", [SHARED, MESSAGES, HOSTS])
def test_losses(way: str, seeds: Iterable[int], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if way == HOSTS:
        request.getfixturevalue("namespaces")
    for seed in seeds:
        draw = random.Random(f"{seed} {way}")
        size = draw.choice((3, 4, 5))
        new = [size - 1] if size > 3 and draw.random() < 0.4 else []
        lost = moments(draw, way, range(size - len(new)))
        if way == SHARED and draw.random() < 0.1:
            lost = {draw.randrange(size - len(new)): (draw.randrange(NUM_STEPS), "stop")}
        compression = draw.choice(("none", "fp16", "int8+ef"))
        print(f"{size} ranks, {compression}, lost {lost}, new {new}")
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with Network(2, 10**9) if way == HOSTS else nullcontext() as network:
            run = between(network.keepers) if network else partial(run_ranks, shared_memory=way == SHARED)
            store = str(tmp_path / f"store{seed}") if network else server.port
            stops = "stop" in str(lost)
            timeout = SILENCE if stops else PATIENCE
            ran = run(take, size, store, compression, lost, new, timeout, lost=[] if stops else lost)
            check(ran, list(range(size - len(new))), compression, run)

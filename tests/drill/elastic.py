"""Ranks of an elastic training that die, stop and join at random: the others end bit for bit as without a loss."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

import fastsync
from benchmarks.network.namespaces import Network
from fastsync.elastic.members_store import JOINS, STORE
from tests.engine import elastic
from tests.engine.elastic import NUM_STEPS, Changes, Moment, Result, Training, check, go_on
from tests.engine.hosts import entered
from tests.engine.sites import make_model, make_optimizer, train_step
from tests.ranks import run_ranks

SHARED, MESSAGES, HOSTS = "shared memory", "messages", "two hosts"
PLACES = ("forward", "backward", "optimizer", "between")
LONGEST_STEP = 0.01
"""Seconds within which a rank dies after a step has begun: some of them in a later step."""
ATTACHING, JOINING = 0.02, 0.5
"""Seconds within which a rank that joins dies: amid its attach(), or later."""
PATIENCE, SILENCE = 20.0, 4.0
"""Seconds that a silent rank is waited for, and that a stopped one is."""


class Watched(Training):
    """A training that knows how far its backward is."""

    has_all_gradients = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.model[0].weight.register_hook(lambda gradient: setattr(Watched, "has_all_gradients", True))

    def step(self, *given: Any) -> None:
        Watched.has_all_gradients = False
        super().step(*given)


def moment_of(frame: FrameType | None) -> str:
    """What the main thread is doing."""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if name == "_engine_run_backward":
            return "averaging" if Watched.has_all_gradients else "mid-backward"
        if file.endswith("fastsync/outer/surviving_group.py"):
            return "agreeing"
        if file.endswith("fastsync/outer/fragment.py"):
            return "averaging"
        if "torch/optim" in file:
            return "in the optimizer"
        if file.endswith("torch/nn/modules/module.py"):
            return "in forward"
        if file.endswith("fastsync/elastic/elastic.py") and name in ("_begin", "_agree", "_move"):
            return "agreeing"
        if name in ("attach", "__init__") and file.endswith(("fastsync/sync/attach.py", "fastsync/elastic/elastic.py")):
            return "attaching"
        frame = frame.f_back
    return "between"


def note_and_end(kills: str, rank: int) -> None:
    """Dies, and leaves behind what it was doing."""
    own = threading.main_thread().ident
    assert own is not None
    with open(kills, "a") as file:
        file.write(f"{rank} {moment_of(sys._current_frames()[own])}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def take(rank: int, world_size: int, kills: str, *given: Any) -> tuple[Changes, Result] | None:
    """Takes steps. Returns None if the others have gone on without this rank."""
    elastic.end_now, elastic.Training = partial(note_and_end, kills, rank), Watched
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


def moments(draw: random.Random, way: str, old: Sequence[int], new: Sequence[int]) -> dict[int, Moment]:
    """Which ranks are lost, and when. One of them stays."""
    if new and draw.random() < 0.3:
        return {new[0]: (-1, draw.uniform(0.0, draw.choice((ATTACHING, JOINING))))}
    if way == HOSTS and draw.random() < 0.3:  # a whole host
        moment = (draw.randrange(NUM_STEPS), draw.uniform(0.0, LONGEST_STEP))
        return dict.fromkeys(old[draw.randrange(2) :: 2], moment)
    lost: dict[int, Moment] = {}
    for victim in draw.sample(old, draw.choice((1, 1, 2))):
        step, seconds = draw.randrange(-1, NUM_STEPS), draw.uniform(0.0, LONGEST_STEP)
        lost[victim] = step, seconds if step < 0 else draw.choice((draw.choice(PLACES), seconds, seconds))
    return lost


@pytest.mark.parametrize("way", [SHARED, MESSAGES, HOSTS])
def test_losses(
    way: str,
    seeds: Iterable[int],
    kills: list[tuple[int, str]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    said = tmp_path / "kills"
    if way == HOSTS:
        request.getfixturevalue("namespaces")
    for seed in seeds:
        draw = random.Random(f"{seed} {way}")
        size = draw.choice((3, 4, 5))
        new = [size - 1] if size > 3 and draw.random() < 0.4 else []
        lost = moments(draw, way, range(size - len(new)), new)
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
            said.write_text("")
            ran = run(take, size, str(said), store, compression, lost, new, timeout, lost=[] if stops else lost)
            kills += [(int(line.split()[0]), line.partition(" ")[2]) for line in said.read_text().splitlines()]
            check(ran, list(range(size - len(new))), compression, run, plays=way == SHARED)


SITE_STEPS, SYNC_EVERY = 60, 3


def train_site(
    rank: int, world_size: int, kills: str, port: int, options: dict[str, Any], lost: dict[int, float], new: int
) -> list[Tensor]:
    """Trains as a site, of which some die so many seconds after their start, and one joins the others."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    if rank == new:
        os.environ[JOINS] = "1"
    members = [rank] if rank == new else [each for each in range(world_size) if each != new]
    group = dist.new_group(members, use_local_synchronization=True)
    model = make_model()
    optimizer = make_optimizer(model)
    if rank in lost and rank == new:
        threading.Timer(lost[rank], note_and_end, (kills, rank)).start()
    sync = fastsync.DiLoCo(model, optimizer, sync_every=SYNC_EVERY, process_group=group, timeout=PATIENCE, **options)
    if rank in lost and rank != new:
        threading.Timer(lost[rank], note_and_end, (kills, rank)).start()
    with sync:
        for step in range(sync.num_steps, SITE_STEPS):
            train_step(model, optimizer, rank, step)
            time.sleep(0.002)
    return [weight.detach() for fragment in sync._state.fragments for weight in fragment.outer.values()]


@pytest.mark.filterwarnings("ignore:fastsync. ranks")
def test_sites(seeds: Iterable[int], kills: list[tuple[int, str]], tmp_path: Path) -> None:
    """Those that are left have equal weights in the end, also with one that has joined."""
    said = tmp_path / "kills"
    for seed in seeds:
        draw = random.Random(f"{seed} sites")
        size = draw.choice((3, 4, 5))
        new = size - 1
        options = {
            "compression": draw.choice(("none", "int8+ef", fastsync.TopK())),
            "fragments": draw.choice((1, 3)),
            "fragment_sync_delay": draw.choice((0, 0, 1)),
        }
        victims = draw.sample(range(size), draw.choice((1, 2)))
        lost = {victim: draw.uniform(0.0, 1.0) for victim in victims[: size - 2]}
        print(f"{size} sites, {options}, lost {lost}")
        said.write_text("")
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ran = run_ranks(train_site, size, str(said), server.port, options, lost, new, lost=[*lost])
        kills += [(int(line.split()[0]), line.partition(" ")[2]) for line in said.read_text().splitlines()]
        first, *others = (each for rank, each in enumerate(ran) if rank not in lost)
        for each in others:
            torch.testing.assert_close(each, first, rtol=0, atol=0)

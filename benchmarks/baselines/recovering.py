"""A rank of a training that is to lose ranks, by each of the methods that ``python -m benchmarks recovery`` compares.

    python -m benchmarks.baselines.recovering METHOD FOLDER OPTIONS

It ends when it is told to, or after a time. Until then it writes what it begins and ends to a diary in FOLDER.
"""

import json
import os
import signal
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam

import fastsync
from benchmarks.harness.diaries import Diary

NUM_STEPS = 10**9
BATCH_SIZE, FEATURES = 32, 64


@dataclass(frozen=True)
class Settings:
    """What the ranks of a training are told."""

    numel: int
    """Number of parameters, about."""
    seconds: float
    """After which a rank ends, whatever happens."""
    checkpoint_every: int = 1
    lighthouse: str = ""
    """Its address, for torchft."""
    store: str = ""
    """The file of a FileStore, which fastsync takes if ranks are on several hosts."""


class Work:
    """A model that learns a linear function, slowly. A step's data depend on its number and on the rank's place."""

    def __init__(self, settings: Settings) -> None:
        width = max(1, isqrt(settings.numel) - FEATURES // 2)
        torch.manual_seed(1)
        self._weights = torch.randn(FEATURES, 1)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.optimizer = Adam(self.model.parameters(), lr=5e-6)

    def loss(self, step: int, rank: int, num_ranks: int, model: nn.Module | None = None) -> Tensor:
        data = torch.Generator().manual_seed(step * num_ranks + rank)
        inputs = torch.randn(BATCH_SIZE, FEATURES, generator=data)
        loss: Tensor = ((model or self.model)(inputs) - inputs @ self._weights).square().mean()
        return loss

    def digest(self) -> int:
        """Of the parameters' bits."""
        digest = 0
        for parameter in self.model.parameters():
            digest = zlib.crc32(parameter.detach().numpy(), digest)
        return digest


def elastic(settings: Settings, diary: Diary) -> None:
    """``fastsync.Elastic``."""
    with fastsync.distributed.process_group(timeout=settings.seconds):
        work = Work(settings)
        store = dist.FileStore(settings.store, -1) if settings.store else None
        sync = fastsync.attach(work.model)
        elastic = fastsync.Elastic(work.model, work.optimizer, sync, timeout=settings.seconds, store=store)
        for step in elastic.steps(NUM_STEPS):
            with step:
                diary.begin(step.index)
                loss = work.loss(step.index, elastic.rank, elastic.num_ranks)
                work.optimizer.zero_grad()
                loss.backward()
                work.optimizer.step()
                diary.end(step.index, elastic.num_ranks, loss.item(), work.digest)


def restart(settings: Settings, diary: Diary) -> None:
    """A plain script that begins at its newest checkpoint. torchrun starts it again."""
    checkpoint = diary.folder / "checkpoint.pt"
    with fastsync.distributed.process_group(timeout=settings.seconds):
        work, first = Work(settings), 0
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            first = saved["step"] + 1
            work.model.load_state_dict(saved["model"])
            work.optimizer.load_state_dict(saved["optimizer"])
        fastsync.attach(work.model)
        for step in range(first, NUM_STEPS):
            diary.begin(step)
            loss = work.loss(step, rank, num_ranks)
            work.optimizer.zero_grad()
            loss.backward()
            work.optimizer.step()
            diary.end(step, num_ranks, loss.item(), work.digest)
            if rank == 0 and (step + 1) % settings.checkpoint_every == 0:
                state = {
                    "step": step,
                    "model": work.model.state_dict(),
                    "optimizer": work.optimizer.state_dict(),
                }
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)  # whole, or as it was


def torchft(settings: Settings, diary: Diary) -> None:
    """torchft's DDP (https://pypi.org/project/torchft) on Gloo. Each rank is a replica, as its example has it.

    The hook of its DDP is repaired. That of version 0.2.0 raises an AssertionError on the ranks that are left if an
    all-reduce fails on a CPU, which ends them.
    """
    from torchft import DistributedDataParallel, Manager, ProcessGroupGloo
    from torchft import Optimizer as ManagedOptimizer

    class RepairedDDP(DistributedDataParallel):  # type: ignore[misc]
        @staticmethod
        def _comm_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            work = state.allreduce(bucket.buffer())
            if work.wait() and (done := getattr(work.get_future(), "_fut", None)) is not None:
                return done  # type: ignore[no-any-return]
            given_up: torch.futures.Future[Tensor] = torch.futures.Future()
            given_up.set_result(bucket.buffer())  # the manager drops the step
            return given_up

    work, rank = Work(settings), int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        work.model.load_state_dict(state["model"])
        work.optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=settings.lighthouse,
        replica_id=f"rank{rank}",
        hostname="127.0.0.1",
    )
    model, optimizer = RepairedDDP(manager, work.model), ManagedOptimizer(manager, work.optimizer)
    for batch in range(NUM_STEPS):
        diary.begin(batch)
        finished = manager.current_step()
        optimizer.zero_grad()
        loss = work.loss(batch, rank, int(os.environ["WORLD_SIZE"]), model)
        loss.backward()
        optimizer.step()
        if manager.current_step() > finished:
            diary.end(manager.current_step(), manager.num_participants(), loss.item(), work.digest)
        else:
            diary.drop(batch)


METHODS: dict[str, Callable[[Settings, Diary], None]] = {"elastic": elastic, "restart": restart, "torchft": torchft}


def lighthouse(**milliseconds: int) -> None:
    """Runs what torchft's replicas agree by, until its standard input is closed. Prints its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("[::]:0", min_replicas=1, **milliseconds)
    port = server.address().rpartition(":")[2]
    print(f"http://127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.shutdown()


def words(method: str, folder: Path, settings: Settings) -> list[str]:
    """Of a command line that runs this module."""
    return ["-m", "benchmarks.baselines.recovering", method, str(folder), json.dumps(asdict(settings))]


def main(method: str, folder: str, options: str) -> None:
    if method == "lighthouse":
        lighthouse(**json.loads(options))
        return
    settings = Settings(**json.loads(options))
    signal.alarm(round(settings.seconds) + 1)  # nothing is left of a run that was broken off
    METHODS[method](settings, Diary(Path(folder), int(os.environ["RANK"])))


if __name__ == "__main__":
    main(*sys.argv[1:])

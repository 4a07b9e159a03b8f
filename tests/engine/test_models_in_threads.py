"""Several models, each trained by a thread of its own over a group of its own, as in population-based training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.models import Mlp, assert_same_on_all_ranks, batch
from tests.ranks import run_ranks

ENTRY_POINTS = ("attach", "hook", "sharded optimizer", "diloco")
LONGEST = 120.0
"""Seconds that the threads may take before the test says that they are stuck."""


def train(entry_point: str, rank: int, group: dist.ProcessGroup, num_steps: int) -> list[Tensor]:
    """Trains a model, and returns its parameters."""
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call: Callable[[Tensor], Tensor] = model
    block: Any = contextlib.nullcontext()
    if entry_point == "attach":
        fastsync.attach(model, process_group=group)
    elif entry_point == "hook":
        ddp = DistributedDataParallel(model, process_group=group)
        fastsync.register_comm_hook(ddp)
        call = ddp
    elif entry_point == "sharded optimizer":
        fastsync.shard_optimizer(fastsync.attach(model, process_group=group), optimizer)
    else:
        block = fastsync.LocalSGD(model, optimizer, sync_every=5, process_group=group)
    with block:
        for number in range(num_steps):
            optimizer.zero_grad()
            call(batch(rank, number)).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_in_threads(rank: int, world_size: int, entry_points: list[str], num_steps: int) -> None:
    """Trains a model of each entry point at the same time, and compares the ranks afterwards."""
    groups = [dist.new_group() for _ in entry_points]
    ends: dict[int, list[Tensor]] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        torch.set_num_threads(1)
        try:
            ends[index] = train(entry_points[index], rank, groups[index], num_steps)
        except BaseException as error:  # told by the main thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(entry_points))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
    if errors:
        raise errors[0]
    stuck = [entry_points[index] for index, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"stuck: {stuck}"
    for index in range(len(entry_points)):
        assert_same_on_all_ranks(ends[index])


def test_models_in_threads() -> None:
    """Engines' locks are held while ranks wait for each other, so a step must not ask the engine of another model."""
    run_ranks(train_in_threads, 2, ["attach", *ENTRY_POINTS], 100)

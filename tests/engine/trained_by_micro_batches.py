"""Trainings by micro-batches: each ends with one digest, whatever the ranks were, or died of."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import fastsync
from fastsync.elastic.members_store import JOINS
from fastsync.sync.micro_batches import seed_of
from tests import reference

MICRO_BATCHES, NUM_STEPS, SEED, MAX_NORM = 8, 5, 3, 0.5
SMALL_BUCKETS = 0.01
REACHED_BY = (2, 5)
"""The micro-batches that reach the parameter ``rare``."""

MODELS = ("mlp", "cnn", "gpt")
OPTIMIZERS = ("AdamW", "SGD")


class Attention(nn.Module):
    """A block of a small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs, src_mask=nn.Transformer.generate_square_subsequent_mask(inputs.shape[1]))


class Model(nn.Module):
    """Has dropout, a parameter that few micro-batches reach, and one that none reaches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = {
            "mlp": lambda: nn.Sequential(nn.Linear(120, 400), nn.Tanh(), nn.Dropout(0.2), nn.Linear(400, 4)),
            "cnn": lambda: nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 4)
            ),
            "gpt": lambda: nn.Sequential(nn.Embedding(50, 16), Attention(), Attention(), nn.Linear(16, 50)),
        }[kind]()
        self.rare = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(4))

    def loss(self, step: int, index: int) -> Tensor:
        """The mean loss over a micro-batch."""
        data = torch.Generator().manual_seed(1000 * step + index)
        if self.kind == "gpt":
            tokens = torch.randint(50, (2, 9), generator=data)
            loss = nn.functional.cross_entropy(self.layers(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        else:
            shape = (4, 120) if self.kind == "mlp" else (2, 3, 8, 8)
            loss = self.layers(torch.randn(shape, generator=data)).square().mean()
        return loss + (self.rare * loss.detach()).square().sum() if index in REACHED_BY else loss


def end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make_optimizer(model: nn.Module, kind: str) -> Optimizer:
    if kind == "Muon":
        return torch.optim.Muon([each for each in model.parameters() if each.dim() == 2], lr=0.01)
    if kind == "SGD":
        return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return AdamW(model.parameters(), lr=0.01)


class Norm:
    """The newest norm, which a rank that joins takes over."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.value = state["value"]


class Training:
    """A model and its optimizer, trained by all ranks of a group."""

    def __init__(
        self,
        kind: str = "mlp",
        optimizer: str = "AdamW",
        members: Sequence[int] | None = None,
        in_shards: bool = False,
    ) -> None:
        torch.manual_seed(1)
        self.model = Model(kind)
        self.optimizer = make_optimizer(self.model, optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        group = None if members is None else dist.new_group(list(members), use_local_synchronization=True)
        stepped = self.optimizer.param_groups[0]["params"]
        self.sync = fastsync.attach(
            stepped if optimizer == "Muon" else self.model,  # which other optimizers step as a whole
            micro_batches=MICRO_BATCHES,
            bucket_cap_mb=SMALL_BUCKETS,
            process_group=group,
        )
        self.norm = Norm()
        if in_shards:
            fastsync.shard_optimizer(self.sync, self.optimizer)

    def step(self, step: int, dies_before: int | None = None) -> None:
        self.optimizer.zero_grad()
        for index in self.sync.micro_batches(SEED):
            if index == dies_before:
                end_now()
            self.model.loss(step, index).backward()
        self.norm.value = fastsync.clip_grad_norm_(self.sync, MAX_NORM)
        self.optimizer.step()
        self.scheduler.step()

    def digest(self) -> str:
        """Returns the sha256 of weights, optimizer state and the norm of the last step."""
        by_parameter = self.optimizer.state_dict()["state"]
        state = [value for _, of_one in sorted(by_parameter.items()) for value in of_one.values() if value is not None]
        tensors = [*self.model.parameters(), *state, self.norm.value]
        return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()


def train(rank: int, world_size: int, kind: str = "mlp", optimizer: str = "AdamW", in_shards: bool = False) -> str:
    training = Training(kind, optimizer, in_shards=in_shards)
    for step in range(NUM_STEPS):
        training.step(step)
    return training.digest()


def train_a_part(
    rank: int, world_size: int, file: str, first: int, last: int, kind: str = "mlp", optimizer: str = "AdamW"
) -> str | None:
    """Trains from one step to another, from a checkpoint or to one."""
    training = Training(kind, optimizer)
    parts = (training.model, training.optimizer, training.scheduler, training.sync, training.norm)
    if first > 0:
        for part, state in zip(parts, torch.load(file), strict=True):
            part.load_state_dict(state)
    for step in range(first, last):
        training.step(step)
    if rank == 0 and last < NUM_STEPS:
        torch.save([part.state_dict() for part in parts], file)
    return training.digest() if last == NUM_STEPS else None


def train_elastic(
    rank: int,
    world_size: int,
    store: str,
    lost: Mapping[int, tuple[int, int | float]],
    joins_at: Mapping[int, int] | None = None,
    kind: str = "mlp",
    optimizer: str = "AdamW",
) -> str:
    """Trains beside losses.

    Args:
        store: the file of a FileStore.
        lost: the step in which a rank dies, and the micro-batch before which it does if it has that one, or the seconds
            after the step's begin, as a float.
        joins_at: ranks that join, and the step that waits for them.
    """
    joins_at = joins_at or {}
    if rank in joins_at:
        os.environ[JOINS] = "1"
    first = [each for each in range(world_size) if each not in joins_at]
    training = Training(kind, optimizer, [rank] if rank in joins_at else first)
    elastic = fastsync.Elastic(
        training.model,
        training.optimizer,
        training.sync,
        state=[training.scheduler, training.norm],
        timeout=20.0,
        store=dist.FileStore(store, -1),
    )
    joined: set[int] = set()
    for step in elastic.steps(NUM_STEPS):
        with step:
            joined |= {*elastic.members} - {*range(len(first))}  # new numbers, in the order in which they came
            dies_in, moment = lost.get(rank, (-1, -1))
            dies = step.index == dies_in
            if dies and isinstance(moment, float):
                threading.Timer(moment, end_now).start()
            training.step(step.index, moment if dies and isinstance(moment, int) else None)
            until = time.monotonic() + 60
            num_awaited = sum(at <= step.index for at in joins_at.values())
            while len(joined) < num_awaited and elastic.rank == 0 and not elastic._step.wants_change:
                assert time.monotonic() < until, (step.index, elastic.members, num_awaited)
                time.sleep(0.01)
    return training.digest()


def plain(kind: str, optimizer_kind: str) -> list[Tensor | None]:
    """The specification: weights, optimizer state and gradients, without clipping."""
    torch.manual_seed(1)
    model = Model(kind)
    optimizer = make_optimizer(model, optimizer_kind)
    for step in range(NUM_STEPS):
        grads = []
        for index in range(MICRO_BATCHES):
            optimizer.zero_grad()
            torch.manual_seed(seed_of(SEED, step, index))
            model.loss(step, index).backward()
            grads.append([parameter.grad for parameter in model.parameters()])
        for parameter, grad in zip(model.parameters(), reference.mean_of_micro_batches(grads), strict=True):
            parameter.grad = grad
        optimizer.step()
    return tensors_of(model, optimizer)


def tensors_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor | None]:
    state: list[Any] = [value for of_one in optimizer.state.values() for value in of_one.values()]
    return [*(each.detach() for each in model.parameters()), *state, *(each.grad for each in model.parameters())]

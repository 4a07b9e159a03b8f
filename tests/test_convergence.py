"""Training on real data, handwritten digits, ends where it does without compression."""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.ranks import run_ranks

SEEDS = range(4)
WIRES = ["none", "bf16", "fp16"]
NUM_STEPS = 250
BATCH_SIZE = 32
NUM_HELD_OUT = 360


def _data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return (torch.tensor(digits.data, dtype=torch.float32) / 16)[order], torch.tensor(digits.target)[order]


def _train(rank: int, wire: str, seed: int, images: Tensor, labels: Tensor) -> DistributedDataParallel:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=2.0**-7)
    fastsync.register_comm_hook(ddp, wire)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(NUM_STEPS):
        chosen = torch.randint(len(labels), (BATCH_SIZE,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(ddp(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return ddp


def _train_all(rank: int, world_size: int) -> dict[str, list[tuple[float, float, float]]]:
    """For each wire and seed: the loss on the digits trained on, the share right of those held out, a weight."""
    images, labels = _data()
    seen, held_out = slice(NUM_HELD_OUT, None), slice(NUM_HELD_OUT)
    ends: dict[str, list[tuple[float, float, float]]] = {wire: [] for wire in WIRES}
    for seed in SEEDS:
        for wire in WIRES:
            ddp = _train(rank, wire, seed, images[seen], labels[seen])
            with torch.no_grad():
                loss = cross_entropy(ddp.module(images[seen]), labels[seen]).item()
                right = (ddp.module(images[held_out]).argmax(1) == labels[held_out]).double().mean().item()
            ends[wire].append((loss, right, next(ddp.parameters())[0, 3].item()))
    return ends


def test_compressed_runs_end_within_the_noise_of_seeds() -> None:
    ends = run_ranks(_train_all, 2)
    assert ends[0] == ends[1], "the ranks ended with different models"
    losses = {wire: [loss for loss, _, _ in ends[0][wire]] for wire in WIRES}
    # Without compression the loss starts at log(10); its end depends on the seed, which says how much chance does.
    noise = max(losses["none"]) - min(losses["none"])
    assert max(losses["none"]) < math.log(10) / 10
    for wire in ("bf16", "fp16"):
        for seed in SEEDS:
            assert abs(losses[wire][seed] - losses["none"][seed]) < noise / 4, f"{wire}, seed {seed}"
            assert ends[0][wire][seed][2] != ends[0]["none"][seed][2], f"{wire} changed nothing: did it run?"
        assert min(right for _, right, _ in ends[0][wire]) > 0.9

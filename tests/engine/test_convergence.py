"""Training on real data ends where it does without compression: within the noise of seeds.

The short runs are for every day; ``make test-slow`` trains longer, with more seeds, and with ``-s`` prints a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pydoc_data.topics import topics
from statistics import mean, stdev
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression
from tests.engine.sharded import full
from tests.ranks import run_ranks

COMPRESSIONS = {
    "none": Compression(),
    "fp16": Compression("fp16"),
    "bf16": Compression("bf16"),
    "int8, error feedback": Compression("int8", error_feedback=True),
    "int8": Compression("int8"),
    "int4, error feedback": Compression("int4", error_feedback=True),
    "lowrank": Compression("lowrank"),
}
REPORTED = {"int8", "int4", "int4, error feedback", "lowrank"}
"""In the table of the long runs, whatever they give."""
DAILY = ("none", "bf16", "int8, error feedback")
OF_PARAMETERS = {wire: Compression(wire) for wire in ("none", "bf16", "fp16", "int8", "int4")}
"""What FSDP2 gathers parameters in."""
CONFIDENCE = 0.95

# ---- the statistics -------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Final losses of runs with a compression against those at full width, of the same seeds.

    A seed sets the initial weights and the samples; what seeds differ by is the noise that anybody has to live with.
    The compression passes where the shift is shown to be smaller; few seeds, or scattered ones, show nothing.
    """

    shift: float
    """How much higher the loss is on average."""
    bound: float
    """Of the size of the shift, which with ``CONFIDENCE`` is no larger, on either side: two one-sided t-tests of the
    paired differences (D. Schuirmann, 1987)."""
    noise: float
    """Standard deviation of the losses at full width over seeds."""


def compare(losses: Sequence[float], full_width: Sequence[float]) -> Comparison:
    from scipy import stats

    differences = [one - other for one, other in zip(losses, full_width, strict=True)]
    shift, count = mean(differences), len(differences)
    quantile = float(stats.t.ppf(CONFIDENCE, count - 1))
    return Comparison(shift, abs(shift) + quantile * stdev(differences) / math.sqrt(count), stdev(full_width))


# ---- what is trained ------------------------------------------------------------------------------------------------

Run = tuple[float, float]
"""How a training ended on one rank: the loss over all of the data, and a weight, to see that ranks agree and
compressions differ."""
Train = Callable[[int, Compression, int, int], Run]
"""Trains from a rank, a compression, a seed and a number of steps."""


def train_digits(rank: int, compression: Compression, seed: int, num_steps: int) -> Run:
    """A perceptron on handwritten digits, through DDP's hook, in several buckets."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=2.0**-7)
    fastsync.register_comm_hook(ddp, compression)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(num_steps):
        chosen = torch.randint(len(labels), (32,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(ddp(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        return cross_entropy(model(images), labels).item(), model[0].weight[0, 3].item()


WINDOW = 32
"""Characters that the transformer sees."""


class CharTransformer(nn.Module):
    """Two layers of causal attention that predict the next character."""

    def __init__(self, vocabulary: int, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(WINDOW, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Characters [batch, WINDOW] to logits [batch, WINDOW, vocabulary]."""
        hidden = self.characters(text) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def train_text(rank: int, compression: Compression, seed: int, num_steps: int) -> Run:
    """A character-level transformer on the beginning of Python's own help, attached."""
    text = Text()
    torch.manual_seed(seed)
    model = CharTransformer(len(text.vocabulary))
    fastsync.attach(model, compression, bucket_cap_mb=2.0**-4)
    text.train(model, 1000 * seed + rank, num_steps)
    return text.loss(model), model.head.weight[0, 3].item()


def train_sharded_text(rank: int, compression: Compression, seed: int, num_steps: int) -> Run:
    """The same under FSDP2. Forward and backward see parameters in the compression, the last loss the exact ones."""
    text = Text()
    torch.manual_seed(seed)
    model = CharTransformer(len(text.vocabulary))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    handle = fastsync.register_fsdp(model, gradients="pytorch", parameters=compression)
    text.train(model, 1000 * seed + rank, num_steps)
    weight = full(model.head.weight)[0, 3].item()
    handle.compression.parameters = "none"
    return text.loss(model), weight


class Text:
    """The beginning of Python's own help, from which a model learns to predict the next character."""

    def __init__(self) -> None:
        text = "".join(topics.values())[:20_000]
        self.vocabulary = sorted(set(text))
        self.encoded = torch.tensor([self.vocabulary.index(character) for character in text])

    def train(self, model: nn.Module, seed: int, num_steps: int) -> None:
        """Trains on windows that follow from the seed."""
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(num_steps):
            optimizer.zero_grad()
            self._loss_at(model, torch.randint(len(self.encoded) - WINDOW, (8,), generator=generator)).backward()
            optimizer.step()

    def loss(self, model: nn.Module) -> float:
        """Over the whole text."""
        with torch.no_grad():
            return self._loss_at(model, torch.arange(0, len(self.encoded) - WINDOW, WINDOW)).item()

    def _loss_at(self, model: nn.Module, starts: Tensor) -> Tensor:
        windows = self.encoded[starts[:, None] + torch.arange(WINDOW + 1)]
        return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


# ---- with and without compression -----------------------------------------------------------------------------------


def _train_all(
    rank: int, world_size: int, train: Train, compressions: Mapping[str, Compression], num_seeds: int, num_steps: int
) -> dict[str, list[Run]]:
    return {
        name: [train(rank, compression, seed, num_steps) for seed in range(num_seeds)]
        for name, compression in compressions.items()
    }


# What is right is less than what characters at their frequencies, or digits by chance, have.
@pytest.mark.parametrize(
    ("train", "num_seeds", "num_steps", "right"),
    [
        (train_digits, 5, 150, math.log(10) / 5),
        pytest.param(train_digits, 8, 1000, 0.01, marks=[pytest.mark.slow, pytest.mark.timeout(580)]),
        pytest.param(train_text, 8, 300, 2.6, marks=[pytest.mark.slow, pytest.mark.timeout(580)]),
        pytest.param(train_sharded_text, 8, 300, 2.6, marks=[pytest.mark.slow, pytest.mark.timeout(580)]),
    ],
)
def test_compressed_training_ends_within_the_noise(train: Train, num_seeds: int, num_steps: int, right: float) -> None:
    all_of_them = OF_PARAMETERS if train is train_sharded_text else COMPRESSIONS
    compressions = {name: all_of_them[name] for name in all_of_them if num_seeds == 8 or name in DAILY}
    runs, of_other = run_ranks(_train_all, 2, train, compressions, num_seeds, num_steps, timeout=550)
    assert runs == of_other, "the ranks ended with different models"
    full_width = [loss for loss, _ in runs["none"]]
    assert max(full_width) < right
    print("\n| compression | final loss | shift | shift is within | noise of seeds |\n|---|---|---|---|---|")
    found = {name: compare([loss for loss, _ in runs[name]], full_width) for name in runs}
    for name, (shift, bound, noise) in found.items():
        loss = mean(loss for loss, _ in runs[name])
        print(f"| {name} | {loss:.4f} | {shift:+.5f} | ±{bound:.5f} | {noise:.5f} |")
    for name in set(runs) - {"none", *REPORTED}:
        assert found[name].bound < found[name].noise, f"{name}: {found[name]}"
        for (_, one), (_, other) in zip(runs[name], runs["none"], strict=True):
            assert one != other, f"{name} changed nothing: did it run?"

"""What the tests of convergence train, and the statistics by which runs with and without compression are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression

COMPRESSIONS = {
    "none": Compression(),
    "fp16": Compression("fp16"),
    "bf16": Compression("bf16"),
    "int8, error feedback": Compression("int8", error_feedback=True),
    "int8": Compression("int8"),
}
CONFIDENCE = 0.95
TEXT = Path(__file__).parent / "data" / "coriolanus.txt"


@dataclass(frozen=True)
class Comparison:
    """Final losses of runs with a compression against those at full width, of the same seeds.

    A seed sets the initial weights and the samples; what seeds differ by is the noise that anybody has to live with.
    """

    mean: float
    """Of the losses."""
    shift: float
    """How much higher the loss is on average."""
    bound: float
    """Of the size of the shift, which with ``CONFIDENCE`` is no larger, on either side: two one-sided t-tests of the
    paired differences (D. Schuirmann, 1987)."""
    noise: float
    """Standard deviation of the losses at full width over seeds."""

    @property
    def is_within_noise(self) -> bool:
        """Whether the shift is shown to be smaller than the noise. Few seeds, or scattered ones, show nothing."""
        return self.bound < self.noise


def compare(losses: Sequence[float], full_width: Sequence[float]) -> Comparison:
    from scipy import stats

    differences = [one - other for one, other in zip(losses, full_width, strict=True)]
    shift, count = mean(differences), len(differences)
    error = stdev(differences) / math.sqrt(count)
    bound = abs(shift) + float(stats.t.ppf(CONFIDENCE, count - 1)) * error
    return Comparison(mean(losses), shift, bound, stdev(full_width))


def table(title: str, losses: Mapping[str, Sequence[float]]) -> str:
    """A Markdown table of the comparisons with ``losses["none"]``."""
    lines = [
        f"{title}, {len(losses['none'])} seeds, 2 ranks",
        "",
        "| compression | final loss | shift | shift is within | noise of seeds |",
        "|---|---|---|---|---|",
    ]
    for name, of_seeds in losses.items():
        found = compare(of_seeds, losses["none"])
        lines.append(f"| {name} | {found.mean:.4f} | {found.shift:+.5f} | ±{found.bound:.5f} | {found.noise:.5f} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Run:
    """How one training ended, on one rank."""

    loss: float
    """Over all of the data, at the end."""
    weight: float
    """One of the model: to see that ranks agree, and that a compression was in effect at all."""


Train = Callable[[int, Compression, int, int], Run]
"""Trains from a rank, a compression, a seed and a number of steps."""


def train_digits(rank: int, compression: Compression, seed: int, num_steps: int) -> Run:
    """A perceptron on handwritten digits, through DDP's hook, in several buckets."""
    images, labels = _digits()
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
        loss = cross_entropy(model(images), labels).item()
    return Run(loss, model[0].weight[0, 3].item())


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


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
    """A character-level transformer on the beginning of Coriolanus, attached."""
    text = TEXT.read_text()
    vocabulary = sorted(set(text))
    encoded = torch.tensor([vocabulary.index(character) for character in text])
    torch.manual_seed(seed)
    model = CharTransformer(len(vocabulary))
    fastsync.attach(model, compression, bucket_cap_mb=2.0**-4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    generator = torch.Generator().manual_seed(1000 * seed + rank)

    def loss_at(starts: Tensor) -> Tensor:
        windows = encoded[starts[:, None] + torch.arange(WINDOW + 1)]
        return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_at(torch.randint(len(encoded) - WINDOW, (8,), generator=generator)).backward()
        optimizer.step()
    with torch.no_grad():
        loss = loss_at(torch.arange(0, len(encoded) - WINDOW, WINDOW)).item()
    return Run(loss, model.head.weight[0, 3].item())


def train_all(
    rank: int,
    world_size: int,
    train: Train,
    compressions: Mapping[str, Compression],
    seeds: Sequence[int],
    num_steps: int,
) -> dict[str, list[Run]]:
    """Trains once for each compression and seed, on ranks that were started once."""
    return {
        name: [train(rank, compression, seed, num_steps) for seed in seeds]
        for name, compression in compressions.items()
    }

"""A multilayer perceptron with synthetic samples, for training steps of any batch size."""

from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor, nn

MODELS = {"mlp-0.3m": (256, 512, 256), "mlp-5m": (1024, 2048, 1024)}
"""Widths: input, two hidden layers, and output."""
NUM_BATCHES = 4
"""Different ones, taken in turns, so that no cache holds the one that is next."""


def build(name: str, device: torch.device, batch_size: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A model, with the same weights on all ranks, and its loss as a function of it on a rank's next batch.

    Weights come from a generator of their own; samples from the default one, which ranks seed differently.
    """
    inputs, hidden, outputs = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
        ).to(device)
    batches: Iterator[tuple[Tensor, Tensor]] = cycle(
        [
            (torch.randn(batch_size, inputs).to(device), torch.randn(batch_size, outputs).to(device))
            for _ in range(NUM_BATCHES)
        ]
    )

    def loss(model: nn.Module) -> Tensor:
        samples, targets = next(batches)
        return nn.functional.mse_loss(model(samples), targets)

    return model, loss

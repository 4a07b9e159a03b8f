"""Work to be synchronised: parameters of some size, and gradients whose mean over the ranks is known."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.baselines.gradients import Gradients
from benchmarks.units import parse_bytes

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Size:
    shapes: Shapes
    repetitions: int
    """How many are timed by default."""

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


SIZES = {
    # One small policy (6 tensors), one middle-sized, one of about two DDP buckets.
    "5k": Size([(64, 4), (64,), (64, 64), (64,), (2, 64), (2,)], repetitions=300),
    "0.5m": Size([(512, 256), (512,), (512, 512), (512,), (256, 512), (256,)], repetitions=100),
    "12m": Size([(1024, 1024), (1024,)] * 12, repetitions=20),
}

TENSORS_IN_BYTES = 16
"""Tensors that a size given in bytes is divided into."""
BYTES_IN_SAMPLES = 2**30
"""Gradients that all samples of a size given in bytes synchronise together, within 5 and 300 samples."""


def size_of(name: str) -> Size:
    """One of ``SIZES``, or as many bytes of float32 values in ``TENSORS_IN_BYTES`` tensors.

    Raises:
        ValueError: ``name`` is neither, or the bytes are no whole values, or too few.
    """
    if name in SIZES:
        return SIZES[name]
    try:
        nbytes = parse_bytes(name)
    except ValueError as error:
        raise ValueError(f"size {error}; or choose one of {', '.join(SIZES)}") from None
    if nbytes % 4 or nbytes < 4 * TENSORS_IN_BYTES:
        raise ValueError(
            f"size {name!r} must be a multiple of 4B, a value of float32, and at least {4 * TENSORS_IN_BYTES}B"
        )
    return Size(matrices(nbytes // 4, TENSORS_IN_BYTES), repetitions=max(5, min(300, BYTES_IN_SAMPLES // nbytes)))


def matrices(numel: int, num_tensors: int) -> Shapes:
    """Shapes of so many values in about equal matrices of as many rows as columns, to four times as many.

    What is left of a whole row is a vector. A low-rank method compresses matrices alone, and those of few rows hardly.
    """
    each = numel // num_tensors
    columns = 2 ** ((each.bit_length() - 1) // 2)
    rows, left = divmod(numel, columns)
    rest: Shapes = [(left,)] if left else []
    equal, longer = divmod(rows, num_tensors - len(rest))
    return [(equal + (index < longer), columns) for index in range(num_tensors - len(rest))] + rest


class Model(nn.Module):
    """Parameters whose gradients are the given tensors, at the price of one multiplication each."""

    def __init__(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        super().__init__()
        # Parameters of its own, with a .grad of their own, in memory that all models share: nobody changes the values.
        self.weights = nn.ParameterList(nn.Parameter(weight.detach()) for weight in weights)
        self.constants = grads

    def forward(self) -> Tensor:
        products = [(weight * grad).sum() for weight, grad in zip(self.weights, self.constants, strict=True)]
        return torch.stack(products).sum()


class Workload(Gradients):
    """One size's weights, the same on all ranks, and float32 gradients, other ones on each rank of the default group.

    Gradients are normally distributed, so that a value in the wrong place is a wrong value. For a low-rank method they
    are the worst case: they have no structure.
    """

    def __init__(self, size: Size, device: torch.device, seed: int = 0) -> None:
        ranks = range(dist.get_world_size())
        lengths = [torch.Size(shape).numel() for shape in size.shapes]
        super().__init__((_normal(size.numel, seed + 1 + rank) for rank in ranks), lengths, device)
        self._shapes = size.shapes
        self._weights = self._split(_normal(size.numel, seed).to(device))

    def model(self) -> Model:
        return Model(self._weights, self._split(self.flat_grads))

    def _split(self, flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(self._lengths), self._shapes, strict=True)]


def _normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))

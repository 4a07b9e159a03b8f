"""Gradients whose mean over the ranks is known without any communication: what every method is checked against."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastsync.sync.stats import SyncStats

BLOCK_VALUES = 128
"""Of int8 that share a scale."""


LARGEST_INT8 = 127
"""What the largest value of a block is sent as."""
SLACK = 1.02
"""What the bound of ``half_steps`` is multiplied by. Residuals make a value larger before it is rounded, at most by a
part of 1/254, twice; float32's own roundings are far less."""


@dataclass(frozen=True)
class Rounding:
    """The precision that values lose on their way to the mean."""

    wire: torch.dtype
    """In which they travel."""
    half_steps: float | None = None
    """By how many halves of the wire's step they may be off, where sums are in float32. None: they are on the wire."""


class Gradients(ABC):
    """A model whose backward gives this rank of the default group certain gradients, and their mean over the ranks.

    Args:
        of_ranks: the float32 gradients of each rank, in one vector. Every rank works out the others' by itself, so that
            the mean owes nothing to a collective.
        lengths: how many of them belong to each parameter.
        device: of this rank.
        noise: how far two backwards of the same model may be apart, where its operations have no fixed order.
    """

    def __init__(
        self, of_ranks: Iterable[Tensor], lengths: Sequence[int], device: torch.device, noise: float = 0.0
    ) -> None:
        self._lengths = list(lengths)
        self.world_size = dist.get_world_size()
        self.noise = noise
        for rank, grads in enumerate(of_ranks):
            if rank == 0:
                mean = torch.zeros(grads.numel(), dtype=torch.float64, device=grads.device)
                mean_magnitude = torch.zeros_like(mean)
                mean_largest = torch.zeros_like(self._largest_of_blocks(mean))
            mean += grads / self.world_size
            mean_magnitude += grads.abs() / self.world_size
            mean_largest += self._largest_of_blocks(grads) / self.world_size
            if rank == dist.get_rank():
                self.flat_grads = grads.to(device)
        self.mean = mean.to(device)
        self._mean_magnitude = mean_magnitude.to(device)
        self._mean_largest = mean_largest.to(device)

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Its forward takes nothing and returns the loss."""

    def is_own(self, result: Tensor) -> bool:
        """Checks that ``result``, flat, is what this rank has without communication."""
        return bool(((result - self.flat_grads).abs() <= self.noise).all())

    def is_mean(self, result: Tensor, *roundings: Rounding) -> bool:
        """Checks that each value of ``result``, flat, is as near to the mean as any of ``roundings`` allows."""
        bound = self._bound(roundings[0])
        for rounding in roundings[1:]:
            bound = torch.maximum(bound, self._bound(rounding))
        return bool(((result.double() - self.mean).abs() <= bound).all())

    def _bound(self, rounding: Rounding) -> Tensor:
        """Bounds the distance of each value from the mean."""
        if rounding.half_steps is None:
            return self._bound_of_sums(rounding.wire)
        # The mean of the ranks' errors is no larger than the mean of their bounds. The mean itself, which two_shot
        # rounds once more, is nowhere larger than the mean of the magnitudes.
        return rounding.half_steps * SLACK * self._half_step(rounding.wire) + self._bound_of_sums(torch.float32)

    def _half_step(self, wire: torch.dtype) -> Tensor:
        """Half the distance of the numbers that a value is rounded to, mean over the ranks."""
        if wire == torch.int8:
            return self._of_values(self._mean_largest + self.noise) / (2 * LARGEST_INT8)
        info = torch.finfo(wire)
        return ((self._mean_magnitude + self.noise) + info.smallest_normal) * (info.eps / 2)

    def _bound_of_sums(self, wire: torch.dtype) -> Tensor:
        """Of sums that are taken in the wire's dtype.

        A rank's value is rounded when it is cast, when it is divided, and in each of n - 1 additions, by a relative
        error of at most u each time (N. Higham, Accuracy and Stability of Numerical Algorithms, section 2.2), and where
        it is subnormal by half of the smallest step in the first two.
        """
        info = torch.finfo(wire)
        unit = info.eps / 2
        relative = (1 + unit) ** (self.world_size + 1) - 1
        magnitude = self._mean_magnitude + self.noise
        return magnitude * relative + 2 * self.world_size * info.smallest_normal * unit + self.noise

    def _largest_of_blocks(self, flat: Tensor) -> Tensor:
        """The largest magnitude in each block of each parameter."""
        parts = (nn.functional.pad(part, (0, -len(part) % BLOCK_VALUES)) for part in flat.split(self._lengths))
        return torch.cat([part.view(-1, BLOCK_VALUES).abs().amax(1) for part in parts])

    def _of_values(self, of_blocks: Tensor) -> Tensor:
        """Spreads what each block has over its values."""
        counts = [-(-length // BLOCK_VALUES) for length in self._lengths]
        parts = zip(of_blocks.split(counts), self._lengths, strict=True)
        return torch.cat([part.repeat_interleave(BLOCK_VALUES)[:length] for part, length in parts])

    def relative_error(self, result: Tensor) -> float:
        """The 2-norm of the error over that of the mean."""
        return ((result.double() - self.mean).norm() / self.mean.norm()).item()


class Step(ABC):
    """One method's model, ready to take step after step: ``prepare``, then ``run``, which is what is timed."""

    def prepare(self) -> None:  # noqa: B027  most have nothing to prepare
        """Comes before ``run``, and is not timed."""

    @abstractmethod
    def run(self) -> None: ...

    @abstractmethod
    def result(self) -> Tensor:
        """The gradients that the newest ``run`` left, in one vector."""

    def stats(self) -> SyncStats | None:
        """The cost of synchronisation so far, where the method tells."""
        return None

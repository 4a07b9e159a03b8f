"""Gradients whose mean over the ranks is known without any communication: what every way is checked against."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gradients(ABC):
    """A model whose backward gives this rank of the default group certain gradients, and their mean over the ranks.

    Args:
        of_ranks: the float32 gradients of each rank, in one vector. Every rank works out the others' by itself, so that
            the mean owes nothing to a collective.
        device: of this rank.
        noise: how far two backwards of the same model may be apart, where its operations have no fixed order.
    """

    def __init__(self, of_ranks: Iterable[Tensor], device: torch.device, noise: float = 0.0) -> None:
        self.world_size = dist.get_world_size()
        self.noise = noise
        for rank, grads in enumerate(of_ranks):
            if rank == 0:
                mean = torch.zeros(grads.numel(), dtype=torch.float64, device=grads.device)
                mean_magnitude = torch.zeros_like(mean)
            mean += grads / self.world_size
            mean_magnitude += grads.abs() / self.world_size
            if rank == dist.get_rank():
                self.flat_grads = grads.to(device)
        self.mean = mean.to(device)
        self._mean_magnitude = mean_magnitude.to(device)

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Its forward takes nothing and returns the loss."""

    def is_own(self, result: Tensor) -> bool:
        """Whether ``result``, flat, is what this rank has without communication."""
        return bool(((result - self.flat_grads).abs() <= self.noise).all())

    def is_mean(self, result: Tensor, wire: torch.dtype) -> bool:
        """Whether each value of ``result``, flat, is as near to the mean as roundings to ``wire`` allow.

        A rank's value is rounded when it is cast, when it is divided, and in each of n - 1 additions, by a relative
        error of at most u each time (N. Higham, Accuracy and Stability of Numerical Algorithms, section 2.2), and where
        it is subnormal by half of the smallest step in the first two.
        """
        info = torch.finfo(wire)
        unit = info.eps / 2
        relative = (1 + unit) ** (self.world_size + 1) - 1
        magnitude = self._mean_magnitude + self.noise
        bound = magnitude * relative + 2 * self.world_size * info.smallest_normal * unit + self.noise
        return bool(((result.double() - self.mean).abs() <= bound).all())

    def relative_error(self, result: Tensor) -> float:
        """The 2-norm of the error over that of the mean."""
        return ((result.double() - self.mean).norm() / self.mean.norm()).item()

"""What a handle asks of an optimizer's step that the ranks share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from .compression import Auto, Compression


class ShardedStep(Protocol):
    """The step of an optimizer of which each rank does a shard, see ``shard_optimizer``."""

    def check_may_step(self, optimizer: Optimizer, stepped: Iterable[Tensor]) -> None:
        """Raises RuntimeError if an optimizer is about to step some of these parameters that is not the given one.

        Args:
            optimizer: the one that is about to step.
            stepped: what it steps of the attached parameters.
        """

    def check_compression(self, compression: Compression | Auto) -> None:
        """Raises ValueError if the ranks cannot keep shards of means that travel with this compression."""

    def clip(self, divisor: Tensor) -> None:
        """Has the next step divide the means by a number."""

    def averaged_gradients(self) -> dict[str, Tensor]:
        """Returns the means over ranks, by parameter's name. Every rank must call it."""

    def parameter_wire_bytes(self) -> int:
        """Returns how many bytes of new parameters this rank has sent so far."""

    def wait_for_parameters(self) -> None:
        """Waits until the new values of all parameters have come."""

    def wait_for_samples(self, optimizer: Optimizer) -> None:
        """Waits until all ranks have read the parameters after a step, where they have them in one memory."""

    def end(self) -> None:
        """Gives this rank its own copy of the parameters and of the state."""

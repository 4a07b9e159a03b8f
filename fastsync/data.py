"""``MicroBatchSampler``: the rows of each micro-batch, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from ._checks import resolve_group
from .messages import check_at_least
from .sync.micro_batches import block_of, seed_of


class MicroBatchSampler(Sampler[list[int]]):
    """Deals the rows of a dataset into steps of micro-batches, for ``attach(micro_batches=)``.

    As a ``batch_sampler`` of a DataLoader it yields this rank's micro-batches in the order in which
    ``sync.micro_batches()`` asks for them, step after step. A row is in the same micro-batch of the same step on any
    number of ranks. Rows that do not fill a step are left out, others in each epoch::

        sampler = fastsync.data.MicroBatchSampler(len(dataset), batch_size=16, micro_batches=8, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            batches = iter(loader)
            for step in sampler.steps():
                optimizer.zero_grad()
                for index in sync.micro_batches():
                    loss_of(model, next(batches)).backward()
                optimizer.step()

    Where the number of ranks changes amid an epoch, as in ``Elastic``, take ``sampler.rows(step, index)`` instead.

    Args:
        length: the number of the dataset's rows.
        batch_size: rows of a micro-batch.
        micro_batches: how many a step has, as in ``attach``.
        seed: of the order of rows, which is another one in each epoch. None keeps the dataset's order.
        process_group: as in ``attach``. Without any group this process is the only rank.

    Raises:
        ValueError: a number is below 1, or the rows do not fill a step.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        micro_batches: int,
        seed: int | None = 0,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self.length, self.batch_size, self.micro_batches, self.seed = length, batch_size, micro_batches, seed
        check_at_least(self, length=1, batch_size=1, micro_batches=1)
        self.num_steps = length // (batch_size * micro_batches)
        """Steps of an epoch."""
        if self.num_steps == 0:
            raise ValueError(
                f"length: a step takes {batch_size} rows for each of {micro_batches} micro-batches, and there are "
                f"{length} rows; use a smaller batch_size"
            )
        self._process_group = process_group
        self._epoch = self._step = 0
        self._order: list[int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch. The one that a loaded state is amid goes on where it was."""
        if epoch != self._epoch:
            self._epoch, self._step, self._order = epoch, 0, None

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the epoch's steps that are left. ``state_dict`` tells of them."""
        for step in range(self._step, self.num_steps):
            self._step = step + 1
            yield step

    def rows(self, step: int, index: int) -> list[int]:
        """Returns the rows of one micro-batch of the epoch.

        Raises:
            ValueError: the epoch has no such step, or the step has no such micro-batch.
        """
        if not (0 <= step < self.num_steps and 0 <= index < self.micro_batches):
            raise ValueError(
                f"rows: step {step}, index {index}: an epoch has {self.num_steps} steps of {self.micro_batches} "
                "micro-batches"
            )
        first = (step * self.micro_batches + index) * self.batch_size
        return self._rows_in_order()[first : first + self.batch_size]

    def _rows_in_order(self) -> list[int]:
        if self._order is None:
            if self.seed is None:
                self._order = list(range(self.length))
            else:
                generator = torch.Generator().manual_seed(seed_of(self.seed, self._epoch, -1))
                self._order = torch.randperm(self.length, generator=generator).tolist()
        return self._order

    def _own_block(self) -> range:
        if self._process_group is None and not dist.is_initialized():
            return range(self.micro_batches)
        group = resolve_group(self._process_group)
        return block_of(group.rank(), group.size(), self.micro_batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Begins at the step that is next now: a DataLoader without workers asks for rows when steps() has gone on."""
        return self._rows_from(self._step)

    def _rows_from(self, first: int) -> Iterator[list[int]]:
        for step in range(first, self.num_steps):
            for index in self._own_block():
                yield self.rows(step, index)

    def __len__(self) -> int:
        return (self.num_steps - self._step) * len(self._own_block())

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the next step. Inside the loop over ``steps()`` call it behind the optimizer's step."""
        return {"epoch": self._epoch, "step": self._step, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` returned, perhaps on another number of ranks.

        Raises:
            ValueError: the state is of another seed.
        """
        if state_dict["seed"] != self.seed:
            raise ValueError(f"state_dict: expected one with the seed {self.seed}, got {state_dict['seed']}")
        self._epoch, self._step, self._order = state_dict["epoch"], state_dict["step"], None

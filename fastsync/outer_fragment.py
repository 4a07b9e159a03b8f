"""A part of the weights that ``DiLoCo`` averages at once, and what travels for it between sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from . import _C
from .attach import GradientSynchronizer
from .master_weights import local
from .model_tensors import ModelTensors, fingerprint, marks
from .topk import TopKAverager

OuterOptimizer = Callable[[list[Tensor]], Optimizer]
Averager = GradientSynchronizer | TopKAverager


class Fragment:
    """Some weights, their outer weights in float32 or wider on the host, and what is on its way for them.

    Note [What sites say before a mean]
    Before each mean every site says four numbers: whether its loop has ended, whether it counts, whether parameters
    beside the weights have changed, and a fingerprint of what it averages. A site counts while its loop goes on, and
    afterwards once more if it has moved since the mean before.
    """

    def __init__(
        self, tensors: ModelTensors, names: Sequence[str], make: OuterOptimizer, place: int, *, is_first: bool
    ) -> None:
        self.place = place  # among the steps of a round
        self.due: int | None = None  # the step at which it arrives, while it is on its way
        self.arrival: Future[None] | None = None
        self.averager: Averager  # of the group
        self._means_of_others: dict[str, Tensor] = {}
        self._tensors = tensors
        self._names = list(names)
        self._is_first = is_first  # of all fragments, with which travels what is no weight
        self.outer: dict[str, Tensor] = {}
        for name in names:
            own = local(tensors.weights[name])
            dtype = torch.promote_types(own.dtype, torch.float32)
            self.outer[name] = torch.empty(own.shape, dtype=dtype, pin_memory=own.is_cuda)
        self.take_over()
        buffers = self._buffers()
        self._shapes = {name: buffer.shape for name, buffer in buffers.items()}
        self.buffers_mean = _flat(buffers.values())  # as all sites had them last
        self._marks = marks(self._others())
        for outer in self.outer.values():
            outer.requires_grad_()
        self.optimizer = make(list(self.outer.values()))

    @torch.no_grad()
    def take_over(self) -> None:
        """Takes the site's own weights, which all sites have to have in common, for the outer ones."""
        for outer, (_, own) in zip(self.outer.values(), self._tensors.own(self._names), strict=True):
            outer.copy_(own)

    @torch.no_grad()
    def differences(self) -> Iterator[Tensor]:
        """Yields the outer gradient: from the site's own weights to the outer ones, for optimizers go against it."""
        for outer, (_, own) in zip(self.outer.values(), self._tensors.own(self._names), strict=True):
            # From what the site had taken over, so that the rounding of a narrower weight is no movement of its own.
            yield outer.to(own.dtype).to(outer.dtype) - own.to("cpu", outer.dtype)

    @torch.no_grad()
    def take_differences(self, *, has_ended: bool) -> None:
        """Takes what the next mean is of, and what this site says before it."""
        self._differences = list(self.differences())
        self._take_buffers()
        others = self._others()
        now = marks(others)
        self._changed_others = {name: _flat([others[name]]) for name in now if now[name] != self._marks.get(name)}
        self._description = self._tensors.describe()
        has_moved = (
            any(bool(difference.any()) for difference in self._differences)
            or self._buffers_have_moved
            or bool(self._changed_others)
        )
        self._says = [has_ended, not has_ended or has_moved, bool(self._changed_others)]

    def _take_buffers(self) -> None:
        buffers = self._buffers()
        shapes = {name: buffer.shape for name, buffer in buffers.items()}
        if shapes != self._shapes:  # the mean of the changes of those that are new is that of their values
            numels = [prod(shape) for shape in self._shapes.values()]
            before = dict(zip(self._shapes, self.buffers_mean.split(numels), strict=True))
            means = [
                before[name] if self._shapes.get(name) == shape else torch.zeros(shape, dtype=torch.float64)
                for name, shape in shapes.items()
            ]
            self.buffers_mean, self._shapes = _flat(means), shapes
        self._own_buffers = _flat(buffers.values())
        as_merged = self.buffers_mean.split([buffer.numel() for buffer in buffers.values()])
        self._buffers_have_moved = any(
            not torch.equal(buffer.detach().cpu().reshape(-1), mean.to(buffer.dtype))
            for buffer, mean in zip(buffers.values(), as_merged, strict=True)
        )

    def average(self, group: dist.ProcessGroup) -> bool:
        """Averages the differences, and returns whether all loops have ended.

        What it begins with stays, for another try.

        Raises:
            ValueError: the sites have other parameters or buffers by now.
        """
        said = gather(group, [*self._says, fingerprint(self._description)])
        if len({description for *_, description in said}) > 1:
            _C.check_agreement(group, self._description, torch.device("cpu"), "the model's parameters and buffers")
        self._num_counting = sum(counts for _, counts, _, _ in said)
        self._means_of_others = {}
        if self._num_counting > 0:
            self._average(group, any(have_changed for _, _, have_changed, _ in said))
        return all(has_ended for has_ended, *_ in said)

    def _average(self, group: dist.ProcessGroup, others_have_changed: bool) -> None:
        # Of what has changed: a buffer that is constant must not be, by roundings, another one after each mean.
        has_changed = self._own_buffers != self.buffers_mean
        self._changes = torch.where(has_changed, self._own_buffers - self.buffers_mean, 0.0)
        if self._changes.numel() > 0:
            group.allreduce(self._changes).wait()
        if others_have_changed:
            self._means_of_others = self._average_others(group)
        for outer, difference in zip(self.outer.values(), self._differences, strict=True):
            outer.grad = difference.clone()
        self.averager.synchronize()

    def _average_others(self, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Returns the means of those parameters that have changed on a site. The others may be large."""
        others = self._others()
        have_changed = torch.tensor([name in self._changed_others for name in others], dtype=torch.int32)
        group.allreduce(have_changed).wait()
        means = {}
        for name, number in zip(others, have_changed.tolist(), strict=True):
            if number > 0:
                value = self._changed_others.get(name)
                mean = _flat([others[name]]) if value is None else value.clone()
                if not self._says[1]:
                    mean.zero_()
                group.allreduce(mean).wait()
                means[name] = mean / self._num_counting
        return means

    def step(self, num_ranks: int) -> None:
        """Takes an outer step with what ``average`` has found."""
        if self._num_counting > 0:
            self.buffers_mean = self.buffers_mean + self._changes / self._num_counting
            if self._num_counting < num_ranks:  # the others have sent zeros
                for outer in self.outer.values():
                    assert outer.grad is not None
                    outer.grad *= num_ranks / self._num_counting
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._differences.clear()

    @torch.no_grad()
    def merge(self, alpha: float) -> None:
        """Takes over the outer weights, but for the share ``alpha`` of the site's own."""
        for outer, (weight, own) in zip(self.outer.values(), self._tensors.own(self._names), strict=True):
            arrived = outer.detach().to(own.device)
            own.copy_(arrived if alpha == 0 else torch.lerp(arrived, own.to(outer.dtype), alpha))
            if own is not weight:  # the optimizer steps from its own, and rounds them to the weight
                weight.copy_(own)
        first = 0
        for buffer in self._buffers().values():
            buffer.copy_(self.buffers_mean[first : first + buffer.numel()].view_as(buffer))
            first += buffer.numel()
        others = self._others()
        for name, mean in self._means_of_others.items():
            others[name].copy_(mean.view_as(others[name]))
        self._marks |= marks({name: others[name] for name in self._means_of_others})
        self._means_of_others = {}

    def _buffers(self) -> dict[str, Tensor]:
        return self._tensors.buffers() if self._is_first else {}

    def _others(self) -> dict[str, Tensor]:
        return self._tensors.others() if self._is_first else {}


def gather(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    """Returns the numbers of each rank of the group."""
    mine = torch.tensor(numbers, dtype=torch.int64)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather(theirs, mine).wait()
    return [each.tolist() for each in theirs]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """In float64 on the host, one after the other: sums that go on for a whole run are kept in it."""
    flat = [tensor.detach().to("cpu", torch.float64).reshape(-1) for tensor in tensors]
    return torch.cat([torch.empty(0, dtype=torch.float64), *flat])

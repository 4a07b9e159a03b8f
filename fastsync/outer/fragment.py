"""A part of the weights that ``DiLoCo`` averages at once, and what sites send each other for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .. import _C
from ..sync.compression import Auto, Compression
from ..sync.synchronizer import GradientSynchronizer
from .background import has_failed
from .master_weights import local
from .model_tensors import ModelTensors, fingerprint, marks, write
from .surviving_group import SurvivingGroup
from .topk import TopK, TopKAverager

OuterOptimizer = Callable[[list[Tensor]], Optimizer]
Averager = GradientSynchronizer | TopKAverager
MOST_NUMBERS = 6  # of a report. All reports are of one size, as Gloo aborts a process that gets more than it expects.


@dataclass(frozen=True)
class SiteChange:
    """The changes of a site since it took over the outer weights, and what it tells the others before the mean."""

    differences: list[Tensor]
    """The outer gradient of each weight."""
    buffers: Tensor
    """The site's own buffers, as one vector."""
    others: dict[str, Tensor]
    """The parameters beside the weights that have changed, each as a vector."""
    description: str
    """Describes the tensors of the model, which have to be alike on all sites."""
    has_ended: bool
    """Whether the site's loop has ended."""
    counts: bool
    """Whether the site counts in the mean."""


@dataclass(frozen=True)
class Mean:
    """The result of averaging the sites' changes. The mean of the differences is in ``.grad`` of the outer weights."""

    num_counting: int
    """The number of sites that count."""
    buffer_changes: Tensor
    """The changes of the buffers, summed over the sites."""
    have_all_ended: bool
    sites: list[int]
    """The sites that took part, each by its first rank."""


@dataclass(frozen=True)
class UnderWay:
    """A fragment's mean between the step that sends it and the step that merges it."""

    due: int
    """The step that merges it."""
    arrival: Future[None] | None = None
    """Done once the outer weights have moved; None where they have already."""

    @property
    def has_failed(self) -> bool:
        """Whether it does not arrive."""
        return self.arrival is not None and has_failed(self.arrival)


class Fragment:
    """Some weights, and their outer weights in float32 or wider on the host.

    Note [What sites say before a mean]
    Before each mean every site sends a report of some numbers: whether its loop has ended, whether it counts, whether
    parameters beside the weights have changed, which site it is, and a fingerprint of what it averages. A site counts
    while its loop goes on. Once the loop has ended, it counts if it has moved since the previous mean.
    """

    averager: Averager

    def __init__(
        self,
        tensors: ModelTensors,
        names: Sequence[str],
        make: OuterOptimizer,
        compression: Compression | Auto | TopK,
        group: dist.ProcessGroup,
        *,
        offset: int,
        is_first: bool,
    ) -> None:
        self.offset = offset  # the step of a round that sends it
        self.under_way: UnderWay | None = None
        self.num_unsent_steps = 0  # the site's steps since the newest change that it has sent
        self._tensors = tensors
        self._names = list(names)
        self._is_first = is_first  # buffers and other parameters are averaged with the first fragment
        self._compression = compression
        self.outer: dict[str, Tensor] = {}
        for name in names:
            own = local(tensors.weights[name])
            dtype = torch.promote_types(own.dtype, torch.float32)
            self.outer[name] = torch.empty(own.shape, dtype=dtype, pin_memory=own.is_cuda)
        self.take_over()
        buffers = self._buffers()
        self._shapes = {name: buffer.shape for name, buffer in buffers.items()}
        self.buffers_mean = _flat(buffers.values())  # the newest mean
        self.means_of_others: dict[str, Tensor] = {}  # of the newest mean, until ``merge`` writes them
        self._marks = marks(self._others())
        for outer in self.outer.values():
            outer.requires_grad_()
        self.optimizer = make(list(self.outer.values()))
        self.averager = self._averager_over(group)

    @property
    def due(self) -> int | None:
        """The step that merges what is under way; None where nothing is."""
        return None if self.under_way is None else self.under_way.due

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Averages over another group from now on. What has to be equal on all ranks begins anew, as it may not be.

        What is not sent yet adds as much to a mean as in the group of before.
        """
        unsent = self.averager.state_dict()
        growth = group.size() / self._num_ranks
        for each in [unsent["unsent"]] if "unsent" in unsent else unsent["residuals"].values():
            each *= growth
        self.averager = self._averager_over(group)
        self.begin_anew(unsent)

    def begin_anew(self, unsent: dict[str, Any]) -> None:
        """Averages with these values that are not sent yet, and with no other state."""
        self.averager.load_state_dict(unsent | {"step": 0, "scales": {}, "factors": {}})

    def _averager_over(self, group: dist.ProcessGroup) -> Averager:
        self._num_ranks = group.size()
        if isinstance(self._compression, TopK):
            return TopKAverager(self.outer, self._compression, group)
        averager = GradientSynchronizer(self.outer, self._compression, group, overlap=False)
        averager._engine.expect_same_data()  # the ranks of a site move alike
        return averager

    @torch.no_grad()
    def take_over(self) -> None:
        """Sets the outer weights to the site's own weights, which must be equal on all sites."""
        for outer, (_, own) in zip(self.outer.values(), self._tensors.own(self._names), strict=True):
            outer.copy_(own)

    @torch.no_grad()
    def differences(self) -> Iterator[Tensor]:
        """Yields the outer gradients: outer weights minus the site's own, as optimizers step against a gradient."""
        for outer, (_, own) in zip(self.outer.values(), self._tensors.own(self._names), strict=True):
            # The outer weight is rounded as it was when the site took it over, so that this rounding is no change.
            yield outer.to(own.dtype).to(outer.dtype) - own.to("cpu", outer.dtype)

    @torch.no_grad()
    def take_change(self, *, has_ended: bool) -> SiteChange:
        """Returns what this site has changed, for the next mean."""
        self.num_unsent_steps = 0
        differences = list(self.differences())
        buffers = self._buffers()
        self._fit_means_to(buffers)
        others = self._others()
        now = marks(others)
        changed_others = {name: _flat([others[name]]) for name in now if now[name] != self._marks.get(name)}
        has_moved = (
            any(bool(difference.any()) for difference in differences)
            or self._have_moved(buffers)
            or bool(changed_others)
        )
        return SiteChange(
            differences=differences,
            buffers=_flat(buffers.values()),
            others=changed_others,
            description=self._tensors.describe(),
            has_ended=has_ended,
            counts=not has_ended or has_moved,
        )

    def _fit_means_to(self, buffers: Mapping[str, Tensor]) -> None:
        """Gives new buffers a mean of zeros, so that the mean of their changes is that of their values."""
        shapes = {name: buffer.shape for name, buffer in buffers.items()}
        if shapes != self._shapes:
            numels = [prod(shape) for shape in self._shapes.values()]
            before = dict(zip(self._shapes, self.buffers_mean.split(numels), strict=True))
            means = [
                before[name] if self._shapes.get(name) == shape else torch.zeros(shape, dtype=torch.float64)
                for name, shape in shapes.items()
            ]
            self.buffers_mean, self._shapes = _flat(means), shapes

    def _have_moved(self, buffers: Mapping[str, Tensor]) -> bool:
        as_merged = self.buffers_mean.split([buffer.numel() for buffer in buffers.values()])
        return any(
            not torch.equal(buffer.detach().cpu().reshape(-1), mean.to(buffer.dtype))
            for buffer, mean in zip(buffers.values(), as_merged, strict=True)
        )

    def average(self, sites: SurvivingGroup, change: SiteChange, site: int) -> Mean:
        """Averages the changes of all sites. After an error it can be tried again with the same change.

        ``site`` is the first rank of this rank's site.

        Raises:
            ValueError: the sites have other parameters or buffers by now. Or some of them begin a block.
        """
        group = sites.group
        own_report = [change.has_ended, change.counts, bool(change.others), site, fingerprint(change.description)]
        reports = gather(sites, own_report, begins_block=False)
        if len({description for *_, description in reports}) > 1:
            _C.check_agreement(group, change.description, torch.device("cpu"), "the model's parameters and buffers")
        num_counting = sum(counts for _, counts, *_ in reports)
        # A constant buffer has a change of exactly 0, so that roundings do not alter it with each mean.
        has_changed = change.buffers != self.buffers_mean
        buffer_changes = torch.where(has_changed, change.buffers - self.buffers_mean, 0.0)
        self.means_of_others = {}
        if num_counting > 0:
            if buffer_changes.numel() > 0:
                group.allreduce(buffer_changes).wait()
            if any(have_changed for _, _, have_changed, *_ in reports):
                self.means_of_others = self._average_others(group, change, num_counting)
            # Sites that do not count send zeros, and what compression kept of their earlier changes. That was meant for
            # a mean over all ranks, so the others' differences grow in place of the sum.
            growth = len(reports) / num_counting
            for outer, difference in zip(self.outer.values(), change.differences, strict=True):
                outer.grad = difference * growth
            self.averager.synchronize()
        return Mean(
            num_counting,
            buffer_changes,
            have_all_ended=all(has_ended for has_ended, *_ in reports),
            sites=sorted(each for *_, each, _ in reports),
        )

    def _average_others(self, group: dist.ProcessGroup, change: SiteChange, num_counting: int) -> dict[str, Tensor]:
        """Returns the means of the parameters that have changed on a site. Others are not sent: they may be large."""
        others = self._others()
        have_changed = torch.tensor([name in change.others for name in others], dtype=torch.int32)
        group.allreduce(have_changed).wait()
        means = {}
        for name, number in zip(others, have_changed.tolist(), strict=True):
            if number > 0:
                value = change.others.get(name)
                mean = _flat([others[name]]) if value is None else value.clone()
                if not change.counts:
                    mean.zero_()
                group.allreduce(mean).wait()
                means[name] = mean / num_counting
        return means

    def step(self, mean: Mean) -> None:
        """Takes an outer step with what ``average`` has found."""
        if mean.num_counting > 0:
            self.buffers_mean = self.buffers_mean + mean.buffer_changes / mean.num_counting
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def merge(self, alpha: float) -> None:
        """Moves the site's weights to the outer ones, and keeps the share ``alpha`` of its own."""
        for outer, (weight, own) in zip(self.outer.values(), self._tensors.own(self._names), strict=True):
            arrived = outer.detach().to(own.device)
            own.copy_(arrived if alpha == 0 else torch.lerp(arrived, own.to(outer.dtype), alpha))
            if own is not weight:  # the optimizer steps a master, and rounds it to the weight
                weight.copy_(own)
        first = 0
        for buffer in self._buffers().values():
            write(buffer, self.buffers_mean[first : first + buffer.numel()].view_as(buffer))
            first += buffer.numel()
        others = self._others()
        for name, mean in self.means_of_others.items():
            write(others[name], mean.view_as(others[name]))
        self._marks |= marks({name: others[name] for name in self.means_of_others})
        self.means_of_others = {}

    def parameters(self) -> list[Tensor]:
        """Returns the model's parameters that a merge writes to."""
        now = self._tensors.now()
        return [now[name] for name in self._names]

    def _buffers(self) -> dict[str, Tensor]:
        return self._tensors.buffers() if self._is_first else {}

    def _others(self) -> dict[str, Tensor]:
        return self._tensors.others() if self._is_first else {}


def gather(sites: SurvivingGroup, report: Sequence[int], *, begins_block: bool) -> list[list[int]]:
    """Returns the reports of all sites, before a mean, or where a block begins.

    Raises:
        ValueError: some sites begin a block, and others average. This is an error on all of them.
    """
    mine = torch.zeros(1 + MOST_NUMBERS, dtype=torch.int64)
    mine[: 1 + len(report)] = torch.tensor([begins_block, *report])
    theirs = [torch.empty_like(mine) for _ in sites.ranks]
    sites.group.allgather(theirs, mine).wait()
    begin = [rank for rank, (begins, *_) in zip(sites.ranks, theirs, strict=True) if begins]
    if len(begin) not in (0, len(theirs)):
        raise ValueError(
            f"fastsync: ranks {begin} of {sites.ranks} begin another block, and the others are still in theirs. If a "
            "site catches an error, every site has to end its block by an error, and to begin another one. Else let "
            "the error end that site's process, and the others go on without it"
        )
    return [each[1 : 1 + len(report)].tolist() for each in theirs]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """Joins tensors in one vector on the host, in float64, because sums of a whole run are kept in it."""
    flat = [tensor.detach().to("cpu", torch.float64).reshape(-1) for tensor in tensors]
    return torch.cat([torch.empty(0, dtype=torch.float64), *flat])


def split(named: Mapping[str, Tensor], fragments: int) -> list[dict[str, Tensor]]:
    """Splits the weights into fragments of about equal size, none empty, in the model's order: equal on all ranks."""
    total, before = sum(weight.numel() for weight in named.values()), 0
    parts: list[dict[str, Tensor]] = [{}]
    for index, (name, weight) in enumerate(named.items()):
        is_full = before >= total * len(parts) / fragments
        must_begin = len(named) - index == fragments - len(parts)  # else a later fragment would be empty
        if parts[-1] and len(parts) < fragments and (is_full or must_begin):
            parts.append({})
        parts[-1][name] = weight
        before += weight.numel()
    return parts

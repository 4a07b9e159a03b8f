"""``DiLoCo`` and ``LocalSGD``: synchronising the weights every so many steps, where gradients at each step do not fit.

Each site trains by itself for ``sync_every`` steps. Then the mean of what the sites have changed, the outer gradient,
goes through an outer optimizer: A. Douillard and others, DiLoCo, arXiv 2311.08105, 2023; in fragments and in the
background: A. Douillard and others, Streaming DiLoCo, arXiv 2501.18512, 2025.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from . import _C
from ._checks import resolve_group
from ._optimizer_steps import innermost, is_training_step
from .attach import GradientSynchronizer
from .compression import AnyCompression, Compression, as_compression
from .distributed import broadcast_tensors
from .stats import SyncStats
from .surviving_group import SurvivingGroup
from .topk import TopK, TopKAverager

OuterOptimizer = Callable[[list[Tensor]], Optimizer]
Averager = GradientSynchronizer | TopKAverager
DEFAULT_COMPRESSION = Compression("int8", error_feedback=True)
DEFAULT_OPTIMIZER = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo:
    """Lets sites train by themselves, and moves all to common weights every ``sync_every`` steps of the optimizer.

    Put the training loop into ``with DiLoCo(model, optimizer):``, or call ``step()`` yourself. Differences to the
    common weights travel through the host. Inside a site gradients are synchronised at every step, by ``attach`` or DDP
    over a group of its own. Floating buffers are averaged; optimizer states, integer buffers and learning rates stay
    each site's own. See docs/guides/outer_steps.md, also for what happens when a site is lost.

    Args:
        model: all ranks begin with rank 0's. Under ``fully_shard`` a rank's shards are averaged with its peers'.
        optimizer: the inner one, whose steps count.
        sync_every: steps from one synchronisation of a fragment to its next.
        outer_optimizer: makes the outer optimizer for a list of tensors. By default SGD with lr 0.7 and Nesterov
            momentum 0.9; with ``TopK`` plain SGD of lr 1.
        fragments: parts of about equal size that are synchronised in turn, so that the link is used evenly.
        fragment_sync_delay: steps that a fragment may travel in the background; with 0 training waits for it.
        fragment_update_alpha: the share of a site's own weights that stays when a fragment arrives.
        compression: as in ``attach``, or a ``TopK``.
        process_group: the ranks to average over: one of each site, as of ``mesh["sites"]``, or all if a site is one
            host, whose ranks then add in shared memory first.
        timeout: seconds to wait for a site, before the others go on without it.

    Raises:
        ValueError: an argument is refused, or the ranks hold different parameters or settings.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int = 100,
        outer_optimizer: OuterOptimizer | None = None,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        compression: AnyCompression | TopK = DEFAULT_COMPRESSION,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        timeout: float = 600.0,
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise ValueError(f"expected a module and its optimizer, got {model!r:.40} and {optimizer!r:.40}")
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("model: none of its parameters requires a gradient; nothing to synchronise")
        _check_number("sync_every", sync_every, 1, sys.maxsize)
        _check_number("fragments", fragments, 1, min(len(named), sync_every))
        _check_number("fragment_sync_delay", fragment_sync_delay, 0, sync_every - 1)
        if not 0 <= fragment_update_alpha < 1:
            raise ValueError(f"fragment_update_alpha: expected 0 or more, and below 1, got {fragment_update_alpha!r}")
        self._optimizer = optimizer
        self._delay = fragment_sync_delay
        self._alpha = fragment_update_alpha
        self._sync_every = sync_every
        self._compression = compression if isinstance(compression, TopK) else as_compression(compression)
        self._sites = SurvivingGroup(resolve_group(process_group), timedelta(seconds=timeout))
        self._step = 0
        self._num_averaged = 0  # of fragments, in all
        self._num_begun = 0
        self._newest: Future[None] | None = None  # of those that are on their way
        self._hook: RemovableHandle | None = None
        make = outer_optimizer or (partial(SGD, lr=1.0) if isinstance(compression, TopK) else DEFAULT_OPTIMIZER)
        saved = model.state_dict().keys()
        floating = [b for name, b in model.named_buffers() if b.is_floating_point() and name in saved]
        parts = _split(named, fragments)
        settings = f"{sync_every=}, {fragments=}, {fragment_sync_delay=}, {fragment_update_alpha=}"
        trial = make([torch.zeros(1, requires_grad=True)])
        lines = [f"{settings}, {self._compression}", f"outer_optimizer {type(trial).__name__} {trial.defaults}"]
        tensors = {name: _local(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        lines += [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()]
        _C.check_agreement(self._sites.group, "\n".join(lines), torch.device("cpu"))
        broadcast_tensors(tensors.values(), self._sites.group)
        self._fragments = [
            _Fragment(part, make, (place + 1) * sync_every // fragments % sync_every, floating if place == 0 else [])
            for place, part in enumerate(parts)
        ]
        self._make_averagers()

    def __enter__(self) -> DiLoCo:
        def count(optimizer: Optimizer, *_: object) -> None:
            if is_training_step(optimizer):
                self.step()

        self._hook = innermost(self._optimizer).register_step_post_hook(count)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Waits for the fragments that are on their way, unless an error ends the block."""
        assert self._hook is not None
        self._hook.remove()
        if error is None:
            for fragment in sorted(self._fragments, key=lambda fragment: fragment.due or 0):
                if fragment.due is not None:
                    self._receive(fragment)

    def step(self) -> None:
        """Counts a step, and sends or takes over what is due. Within ``with`` the optimizer's steps call it."""
        self._step += 1
        for fragment in self._fragments:
            if fragment.due == self._step:
                self._receive(fragment)
        for fragment in self._fragments:
            if self._step % self._sync_every == fragment.place:
                self._send(fragment)

    def _send(self, fragment: _Fragment) -> None:
        fragment.take_differences()
        self._num_begun += 1
        fragment.due = self._step + self._delay
        if self._delay == 0:
            self._average(fragment, self._num_begun)
            self._receive(fragment)
            return
        fragment.arrival = self._newest = _after(self._newest, partial(self._average, fragment, self._num_begun))

    def _receive(self, fragment: _Fragment) -> None:
        if fragment.arrival is not None:
            fragment.arrival.result()  # waits no longer than the group does, and raises what went wrong
            fragment.arrival = None
        fragment.due = None
        fragment.merge(self._alpha)

    def _average(self, fragment: _Fragment, number: int) -> None:
        """Moves the fragment's outer weights by the mean difference. The numbers are those of its turn on all ranks."""
        for tries_left in reversed(range(self._sites.group.size())):
            try:
                if number > self._num_averaged:  # else it has come with another rank's state
                    fragment.average(self._sites.group)
                break
            except RuntimeError as error:
                if tries_left == 0:  # as often as there were ranks to lose
                    raise
                self._go_on_without_the_lost(fragment, error)
        if number > self._num_averaged:
            fragment.step(self._sites.group.size())
            self._num_averaged = number

    def stats(self) -> list[SyncStats]:
        """Returns what each fragment's synchronisations took, since the newest site was lost. ``TopK`` has none."""
        handles = (fragment.averager for fragment in self._fragments)
        return [handle.stats() for handle in handles if isinstance(handle, GradientSynchronizer)]

    def _go_on_without_the_lost(self, fragment: _Fragment, error: RuntimeError) -> None:
        """Some of those that are left may have got the last mean, and fail at the next.

        So all take over the outer weights of a rank that has come furthest, are equal again, and go on from there.
        """
        came = self._sites.go_on_without_the_lost(self._num_averaged, error)
        furthest = max(came, key=lambda rank: (came[rank], -rank))
        if self._num_averaged < came[furthest] and isinstance(fragment.averager, TopKAverager):
            fragment.averager.settle()  # the others have got what this rank sent
        self._make_averagers()
        if len(set(came.values())) > 1:
            state = self._outer_state() if dist.get_rank() == furthest else None
            self._load_outer_state(self._sites.broadcast_object(state, furthest))
            self._num_averaged = came[furthest]

    def _make_averagers(self) -> None:
        compression, group = self._compression, self._sites.group
        for fragment in self._fragments:
            before = getattr(fragment, "averager", None)
            if isinstance(compression, TopK):
                fragment.averager = TopKAverager(fragment.outer, compression, group)
            else:
                fragment.averager = GradientSynchronizer(fragment.outer, compression, group, overlap=False)
            if before is not None:  # steps and scales may differ by now: all begin anew
                fragment.averager.load_state_dict(before.state_dict() | {"step": 0, "scales": {}})

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on bit for bit, beside the model's and the optimizer's own states.

        Waits for the fragments that are on their way. Save the state of every rank: what compression has not sent yet
        is each rank's own.
        """
        if self._newest is not None:
            self._newest.result()  # they arrive one after the other
        return {
            "step": self._step,
            "due": [fragment.due for fragment in self._fragments],
            "outer": self._outer_state(),
            "unsent": [fragment.averager.state_dict() for fragment in self._fragments],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict()`` returned, on every rank, beside the model's and the optimizer's states.

        Raises:
            ValueError: it is of another model, other fragments or another compression. Then nothing has changed.
        """
        before = copy.deepcopy(self.state_dict())
        if not isinstance(state_dict, dict) or _shapes(state_dict) != _shapes(before):
            raise ValueError("state_dict: expected the state of a DiLoCo with the same parameters and fragments")
        try:
            self._load(state_dict)
        except BaseException:
            self._load(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        for fragment, due, unsent in zip(self._fragments, state["due"], state["unsent"], strict=True):
            fragment.averager.load_state_dict(unsent)
            fragment.due, fragment.arrival = due, None
        self._step = state["step"]
        self._load_outer_state(state["outer"])

    def _outer_state(self) -> list[dict[str, Any]]:
        return [
            {
                "weights": {name: weight.detach() for name, weight in fragment.outer.items()},
                "optimizer": fragment.optimizer.state_dict(),
                "buffers": fragment.buffers_mean,
            }
            for fragment in self._fragments
        ]

    @torch.no_grad()
    def _load_outer_state(self, state: list[dict[str, Any]]) -> None:
        for fragment, each in zip(self._fragments, state, strict=True):
            for name, weight in fragment.outer.items():
                weight.copy_(each["weights"][name])
            fragment.optimizer.load_state_dict(each["optimizer"])
            fragment.buffers_mean = each["buffers"].clone()


class LocalSGD(DiLoCo):
    """Lets sites train by themselves, and every ``sync_every`` steps of the optimizer takes the mean of their weights.

    It is ``DiLoCo`` with an outer SGD of lr 1: S. U. Stich, Local SGD Converges Fast, arXiv 1805.09767, 2018.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int = 100,
        compression: AnyCompression = "none",
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        timeout: float = 600.0,
    ) -> None:
        super().__init__(
            model, optimizer, sync_every=sync_every, outer_optimizer=partial(SGD, lr=1.0), compression=compression,
            process_group=process_group, timeout=timeout,
        )  # fmt: skip


class _Fragment:
    """Some parameters, their outer weights in float32 or wider on the host, and what is on its way for them."""

    def __init__(self, named: Mapping[str, Tensor], make: OuterOptimizer, place: int, buffers: list[Tensor]) -> None:
        self.place = place  # among the steps of a round
        self.due: int | None = None  # the step at which it arrives, while it is on its way
        self.arrival: Future[None] | None = None
        self.averager: Averager  # of the group
        self._weights = dict(named)
        self._buffers = buffers
        self.buffers_mean = _flat(buffers)  # as all sites had them last
        self.outer: dict[str, Tensor] = {}
        for name, weight in named.items():
            own = _local(weight)
            dtype = torch.promote_types(own.dtype, torch.float32)
            outer = torch.empty(own.shape, dtype=dtype, pin_memory=own.is_cuda)
            self.outer[name] = outer.copy_(own).requires_grad_()
        self.optimizer = make(list(self.outer.values()))

    @torch.no_grad()
    def take_differences(self) -> None:
        """The outer gradient points from the site's own weights to the outer ones, for optimizers go against it."""
        # From what the site had taken over, so that the rounding of a narrower weight is no movement of its own.
        own = map(_local, self._weights.values())
        self._differences = [
            outer.to(weight.dtype).to(outer.dtype) - weight.to("cpu", outer.dtype)
            for outer, weight in zip(self.outer.values(), own, strict=True)
        ]
        self._own_buffers = _flat(self._buffers)

    def average(self, group: dist.ProcessGroup) -> None:
        """Averages the differences. What it begins with stays, for another try."""
        # Of what has changed: a buffer that is constant must not be, by roundings, another one after each mean.
        has_changed = self._own_buffers != self.buffers_mean
        self._changes = torch.where(has_changed, self._own_buffers - self.buffers_mean, 0.0)
        if self._changes.numel() > 0:
            group.allreduce(self._changes).wait()
        for outer, difference in zip(self.outer.values(), self._differences, strict=True):
            outer.grad = difference.clone()
        self.averager.synchronize()

    def step(self, num_ranks: int) -> None:
        """Takes an outer step with what ``average`` has found."""
        self.buffers_mean = self.buffers_mean + self._changes / num_ranks
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._differences.clear()

    @torch.no_grad()
    def merge(self, alpha: float) -> None:
        for name, weight in zip(self._weights, map(_local, self._weights.values()), strict=True):
            outer = self.outer[name].detach().to(weight.device)
            weight.copy_(outer if alpha == 0 else torch.lerp(outer, weight.to(outer.dtype), alpha))
        first = 0
        for buffer in self._buffers:
            buffer.copy_(self.buffers_mean[first : first + buffer.numel()].view_as(buffer))
            first += buffer.numel()


def _check_number(name: str, number: object, least: int, most: int) -> None:
    if not isinstance(number, int) or not least <= number <= most:
        raise ValueError(f"{name}: expected a whole number from {least} to {most}, got {number!r}")


def _shapes(state: Mapping[str, Any]) -> list[object]:
    """What of a state has to be as it is here."""
    outer = state.get("outer", [])
    of_weights = [{name: weight.shape for name, weight in each["weights"].items()} for each in outer]
    return [sorted(state), of_weights, [each["buffers"].shape for each in outer]]


def _split(named: Mapping[str, Tensor], fragments: int) -> list[dict[str, Tensor]]:
    """Into parts of about equal size, in the model's order, which is the same on all ranks; none is empty."""
    total, before = sum(weight.numel() for weight in named.values()), 0
    parts: list[dict[str, Tensor]] = [{}]
    for place, (name, weight) in enumerate(named.items()):
        is_full = before >= total * len(parts) / fragments
        must_begin = len(named) - place == fragments - len(parts)  # or there would be too few for the rest
        if parts[-1] and len(parts) < fragments and (is_full or must_begin):
            parts.append({})
        parts[-1][name] = weight
        before += weight.numel()
    return parts


def _local(weight: Tensor) -> Tensor:
    """The rank's part of it, in the same memory."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).detach()


def _flat(buffers: Iterable[Tensor]) -> Tensor:
    """In float64 on the host, one after the other: sums that go on for a whole run are kept in it."""
    flat = [buffer.detach().to("cpu", torch.float64).reshape(-1) for buffer in buffers]
    return torch.cat([torch.empty(0, dtype=torch.float64), *flat])


def _after(previous: Future[None] | None, call: Callable[[], None]) -> Future[None]:
    """Calls it in a thread once the previous one has ended well: all ranks send in one order.

    The thread is a daemon, for a process that an error ends must not wait for a site that is gone.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            if previous is not None:
                previous.result()
            call()
            done.set_result(None)
        except BaseException as error:  # it is raised where the fragment is due
            done.set_exception(error)

    threading.Thread(target=run, name="fastsync outer step", daemon=True).start()
    return done

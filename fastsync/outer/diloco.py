"""``DiLoCo``: it synchronises weights every ``sync_every`` steps, if links are too slow for gradients.

Each site trains by itself for ``sync_every`` steps. Then the mean of what the sites have changed, the outer gradient,
goes through an outer optimizer: A. Douillard and others, DiLoCo, arXiv 2311.08105, 2023; in fragments and in the
background: A. Douillard and others, Streaming DiLoCo, arXiv 2501.18512, 2025.
"""

from __future__ import annotations

import atexit
import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Optimizer

from .._checks import resolve_group
from .._torch_compat import known_ranks
from ..elastic.loop import MOST_FAILURES
from ..sync.compression import AnyCompression, Compression, as_compression
from ..sync.elastic_in_use import check_no_elastic
from ..sync.handles_in_use import check_not_left_to_each_rank, groups_of
from ..sync.join import is_in_join
from ..sync.optimizer_steps import innermost, unwrapped
from ..sync.optimizer_watch import check_has_no_shards
from ..sync.outer_in_use import NO_JOIN, begin_outer_use, name_of_outer, set_in_block
from ..sync.stats import SyncStats
from ..sync.synchronizer import GradientSynchronizer
from .background import BackgroundCalls
from .fragment import Fragment, Mean, OuterOptimizer, SiteChange, UnderWay, gather, split
from .model_tensors import ModelTensors
from .outer_state import OuterState, shapes_of, with_plain_names
from .schedule import Schedule
from .steps import BlockSteps
from .surviving_group import SurvivingGroup
from .topk import TopK

Result = TypeVar("Result")
DEFAULT_COMPRESSION = Compression("int8", error_feedback=True)
DEFAULT_OPTIMIZER = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)

OnMerge = Callable[[list[Tensor]], object]


class DiLoCo:
    """Lets sites train by themselves, and moves all to common weights every ``sync_every`` steps of the optimizer.

    Put the training loop into ``with DiLoCo(model, optimizer):``, or call ``step()`` yourself. Differences to the
    common weights travel through the host. Inside a site gradients are synchronised at every step, by ``attach`` or DDP
    over a group of its own. Floating buffers are averaged; optimizer states, integer buffers and learning rates stay
    each site's own. See docs/guides/outer_steps.md, also for what happens when a site is lost.

    Sites may take different numbers of steps in a block. A site that is done takes part until all are done. Then the
    last changes are averaged, and all leave with equal weights. After an error nothing more is sent.

    Args:
        model: all ranks begin with rank 0's. If every rank loads the same other weights before a block's first step,
            these become the common weights. A parameter that is frozen now and changes later, or is added, gets the
            plain mean of the sites. Under ``fully_shard`` a rank's shards are averaged with its peers'.
        optimizer: the inner one, whose steps count; or a list, such as Muon and AdamW for different weights. A step of
            several counts when each has stepped since the one before. Wrappers with ``.optimizer`` are taken, too. If
            one steps from copies of the weights, such as float32 masters, and tells of them in
            ``optimizer.state[weight]["master"]``, each mean is written to these.
        sync_every: steps from one synchronisation of a fragment to its next.
        outer_optimizer: makes the outer optimizer for a list of tensors. By default SGD with lr 0.7 and Nesterov
            momentum 0.9; with ``TopK`` plain SGD of lr 1.
        fragments: parts of about equal size that are synchronised in turn, so that the link is used evenly.
        fragment_sync_delay: steps that a fragment may travel in the background; with 0 training waits for it.
        fragment_update_alpha: the share of a site's own weights that stays when a fragment arrives.
        compression: as in ``attach``, or a ``TopK``.
        process_group: the ranks to average over: one of each site, as in ``mesh["sites"]``. If a site is one host, it
            may be all ranks, which then add in shared memory first.
        timeout: seconds to wait for a site that is silent. Then the others go on without it, and warn. A site whose
            process has ended is not waited for. It has to be longer than ``sync_every`` steps take, because a site that
            is done waits for the next mean of the others.
        on_merge: is called with the list of parameters that were written to: with all when the object is made, and
            after each mean with those that it moves. Use it to write the mean to copies that the optimizer keeps
            elsewhere. With weights of less than 32 bits, an optimizer that is not PyTorch's has to tell of its copies,
            or has none and needs ``on_merge=lambda parameters: None``.

    Raises:
        ValueError: an argument is refused, or the ranks hold different parameters or settings. Or, in the first step,
            nobody tells whether the optimizer keeps copies of the weights.
        RuntimeError: ranks cannot connect. Or this process was to join others, none of which could be reached.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int = 100,
        outer_optimizer: OuterOptimizer | None = None,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        compression: AnyCompression | TopK = DEFAULT_COMPRESSION,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        timeout: float = 600.0,
        on_merge: OnMerge | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model: expected a module, got {type(model).__name__}")
        optimizers = _as_optimizers(optimizer)
        tensors = ModelTensors(model, optimizers)
        named = tensors.weights
        if not named:
            raise ValueError("model: none of its parameters requires a gradient; nothing to synchronise")
        for each in optimizers:
            if not tensors.are_stepped_by(each):
                raise ValueError(
                    f"optimizer: this {type(each).__name__} has none of the model's parameters; make it of "
                    "model.parameters(). One that steps masters of its own has to keep them beside the model's "
                    "parameters, as in optimizer.state[parameter]['master']"
                )
        check_has_no_shards(named, "model")
        group = resolve_group(process_group)
        tensors.ranks_that_train_together()  # or an error, before anything is sent
        check_not_left_to_each_rank(model, group, type(self).__name__)
        check_no_elastic(named.values(), "model", type(self).__name__)
        _check_number("sync_every", sync_every, 1, sys.maxsize)
        _check_number("fragments", fragments, 1, min(len(named), sync_every))
        _check_number("fragment_sync_delay", fragment_sync_delay, 0, sync_every - 1)
        if not 0 <= fragment_update_alpha < 1:
            raise ValueError(f"fragment_update_alpha: expected 0 or more, and below 1, got {fragment_update_alpha!r}")
        if on_merge is not None and not callable(on_merge):
            raise ValueError(f"on_merge: expected a function of a list of parameters, got {on_merge!r:.40}")
        self._on_merge = on_merge
        self._optimizers = list(dict.fromkeys(map(innermost, optimizers)))
        self._tensors = tensors
        self._delay = fragment_sync_delay
        self._alpha = fragment_update_alpha
        self._schedule = Schedule(sync_every)
        # Blocks that have begun and fragments that were sent, which gives each a number that is equal on all ranks.
        self._num_sent = 0
        self._is_resumed = False
        self._knows_masters = on_merge is not None
        self._unchecked_ranks = frozenset(known_ranks(group))  # until the first mean
        self._block: BlockSteps | None = None
        self._background = BackgroundCalls()
        atexit.register(_end_background_calls, weakref.ref(self))
        self._compression = compression if isinstance(compression, TopK) else as_compression(compression)
        make = outer_optimizer or (partial(SGD, lr=1.0) if isinstance(compression, TopK) else DEFAULT_OPTIMIZER)
        parts = split(named, fragments)
        settings = f"{sync_every=}, {fragments=}, {fragment_sync_delay=}, {fragment_update_alpha=}"
        with _on_the_host():
            self._sites = SurvivingGroup(group, timedelta(seconds=timeout))
            trial = make([torch.zeros(1, requires_grad=True)])
            lines = [f"{settings}, {self._compression}", f"outer_optimizer {type(trial).__name__} {trial.defaults}"]
            lines += [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.plain().items()]
            sent_as = self._compression

            def make_fragments(group: dist.ProcessGroup) -> list[Fragment]:
                return [
                    Fragment(
                        tensors, list(part), make, sent_as, group,
                        offset=(index + 1) * sync_every // fragments % sync_every, is_first=index == 0,
                    )
                    for index, part in enumerate(parts)
                ]  # fmt: skip

            self._state = OuterState(tensors, self._schedule, "\n".join(lines), make_fragments)
            self._joins = self._sites.joins
            if self._joins:
                self._join()
            else:
                self._state.begin(self._sites.group)
        begin_outer_use(self, named.values())
        self._tell_of_merge(list(named.values()))

    def __repr__(self) -> str:
        numel = sum(weight.numel() for weight in self._tensors.weights.values())
        return (
            f"{type(self).__name__}({numel:,} values, sync_every: {self._schedule.sync_every}, "
            f"compression: {self._compression}, step {self._schedule.step}, ranks {self._sites.ranks})"
        )

    @property
    def num_steps(self) -> int:
        """The steps so far. A site that joins begins with those of the others, and one that resumes with the saved."""
        return self._schedule.num_taken

    @property
    def rank(self) -> int:
        """This site's number: its rank in the default group, or a new number if it has joined."""
        return self._sites.own

    # ---- the block --------------------------------------------------------------------------------------------------

    def __enter__(self) -> DiLoCo:
        if self._block is not None:
            raise RuntimeError(
                f"fastsync: a with block of this {type(self).__name__} has begun already, and each step would count "
                "twice; leave that block first"
            )
        self._check_not_in_join()
        if name := name_of_outer(self._tensors.weights.values(), in_block=True):
            raise RuntimeError(
                f"fastsync: the with block of a {name} averages these weights already, and a {type(self).__name__} in "
                "it would undo its means; leave one of the two out"
            )
        self._block = BlockSteps(
            self._optimizers, self._tensors, begin=self._begin, step=self.step, patience=self._schedule.sync_every,
            owner=type(self).__name__,
        )  # fmt: skip
        self._block.has_begun, self._joins = self._joins, False  # who joins is in the others' block
        set_in_block(self, True)
        return self

    def _check_not_in_join(self) -> None:
        if is_in_join() and any(group.size() > 1 for group in groups_of(self._tensors.weights.values())):
            raise RuntimeError(
                f"fastsync: a {type(self).__name__} was used inside join() of the same weights. {NO_JOIN}"
            )

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Takes part in the means of sites whose loops go on, and in the last means, after which all weights are equal.

        If an error ends the block, nothing is averaged, and the next block goes on from here. A note of the error, from
        Python 3.11 on, tells how many steps were not averaged.

        Raises:
            RuntimeError: the optimizer has never stepped, and another one has.
        """
        block, self._block = self._block, None
        set_in_block(self, False)
        assert block is not None
        block.stop_counting()
        if error is not None:
            self._is_resumed = True
            self._note_unsent_steps(error)
            return
        try:
            block.begin()
            self._take_part_until_all_have_ended()
        except BaseException:
            self._is_resumed = True
            raise
        block.check_that_ours_stepped()

    def _take_part_until_all_have_ended(self) -> None:
        num_steps = self.num_steps
        for fragment in sorted(self._state.fragments, key=lambda fragment: fragment.due or 0):
            if fragment.due is not None:
                self._receive(fragment)
        while self._state.num_final < len(self._state.fragments):
            fragment = self._schedule.skip_to_next(self._state.fragments)
            self._schedule.num_skipped = self._schedule.step - num_steps
            self._send(fragment, has_ended=True)

    def _note_unsent_steps(self, error: BaseException) -> None:
        number = max(fragment.num_unsent_steps for fragment in self._state.fragments)
        if number > 0 and sys.version_info >= (3, 11):
            steps = "step" if number == 1 else f"{number} steps"
            error.add_note(
                f"fastsync: this error has ended a block of {type(self).__name__}. The other sites have not got what "
                f"this site has learned in its last {steps}. If every site begins another block, it goes on from there"
            )

    def _begin(self) -> None:
        """Checks before the first step of a block whether loaded weights differ from the common ones."""
        try:
            self._wait_for_means()  # for what a block has sent before an error ended it
        except Exception:
            if not self._is_resumed:  # else that block is over, and what it did not send goes with the next mean
                raise
        number = self._num_sent = self._num_sent + 1

        def compare() -> None:
            if number > self._state.num_averaged:  # else another rank has compared, and its outer weights came
                self._take_over_loaded_weights()

        with _on_the_host():
            self._with_all_sites(compare)
        self._num_sent = self._state.num_averaged = max(self._num_sent, self._state.num_averaged)
        self._state.num_final, self._is_resumed = 0, False

    def _take_over_loaded_weights(self) -> None:
        have_moved = not self._is_resumed and any(
            bool(difference.any()) for fragment in self._state.fragments for difference in fragment.differences()
        )
        next_step = self._schedule.next_step(self._state.fragments)
        own_report = [self._is_resumed, have_moved, self._num_sent, next_step, self._tensors.fingerprint()]
        reports = gather(self._sites, own_report, begins_block=True)
        resumed = [rank for rank, (is_resumed, *_) in zip(self._sites.ranks, reports, strict=True) if is_resumed]
        if len(resumed) not in (0, len(reports)):
            raise ValueError(
                f"fastsync: ranks {resumed} of {self._sites.ranks} go on from load_state_dict(), or after an error, "
                "and the others from the start; call load_state_dict() of the DiLoCo on every rank"
            )
        moved = [rank for rank, (_, has_moved, *_) in zip(self._sites.ranks, reports, strict=True) if has_moved]
        if moved and len({fingerprint for *_, fingerprint in reports}) == 1:
            for fragment in self._state.fragments:
                fragment.take_over()
        elif moved:
            warnings.warn(
                f"fastsync: the weights of ranks {moved} of {self._sites.ranks} were changed before the first step, "
                "and are not equal on all ranks. What has changed is averaged as if they had learned it. Where weights "
                "are loaded, let every rank load the same, before the block or before the DiLoCo is made",
                stacklevel=5,
            )
        # Where an error has ended a block, ranks may have come to other numbers and steps.
        self._num_sent = max(number for _, _, number, _, _ in reports)
        self._schedule.go_to(max(next_step for _, _, _, next_step, _ in reports), self._state.fragments)

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Counts a step, and sends or merges the fragments that are due. Inside ``with`` the optimizer's steps call it.

        Without a block all sites have to call it equally often. In a block they may take different numbers of steps.
        """
        if self._block is None:
            self._check_not_in_join()
        self._schedule.step += 1
        for fragment in self._state.fragments:
            fragment.num_unsent_steps += 1
        if not self._knows_masters:
            self._tensors.check_masters_are_known()
            self._knows_masters = True
        for fragment in self._state.fragments:
            if fragment.due == self._schedule.step:
                self._receive(fragment)
        for fragment in self._state.fragments:
            if self._schedule.sends(fragment):
                self._send(fragment)

    def _send(self, fragment: Fragment, *, has_ended: bool = False) -> None:
        self._warn_of_one_site()
        with _on_the_host():
            change = fragment.take_change(has_ended=has_ended)
        self._num_sent += 1
        if self._delay == 0 or has_ended:
            self._average(fragment, change, self._num_sent, self._schedule.step)
            self._merge(fragment, alpha=0.0 if has_ended else self._alpha)
        else:
            arrival = self._background.start(
                partial(self._average, fragment, change, self._num_sent, self._schedule.step)
            )
            fragment.under_way = UnderWay(self._schedule.step + self._delay, arrival)

    def _warn_of_one_site(self) -> None:
        ranks, self._unchecked_ranks = self._unchecked_ranks, frozenset()
        if len(ranks) > 1 and self._sites.own == min(ranks) and ranks <= self._trains_with:
            warnings.warn(
                f"fastsync: the gradients of ranks {sorted(ranks)} are averaged at each step already, so a "
                f"{type(self).__name__} over the same ranks adds nothing. Average gradients inside each site only, as "
                "by attach(model, process_group=mesh['ranks']), or leave one of the two out",
                stacklevel=2,
            )

    def _receive(self, fragment: Fragment) -> None:
        """Merges a fragment that is under way. Waits for it no longer than the group does, and raises its error."""
        assert fragment.under_way is not None
        if fragment.under_way.arrival is not None:
            self._wait_for_means(fragment.under_way.arrival)
        fragment.under_way = None
        self._merge(fragment, self._alpha)

    def _wait_for_means(self, arrival: Future[None] | None = None) -> None:
        """Waits for one mean that is on its way, or for all, and raises an error of it.

        A mean that has failed does not arrive any more. What it was made of is a part of the site's next change.
        """
        try:
            if arrival is None:
                self._background.wait()
            else:
                self._background.result(arrival)
        finally:
            for fragment in self._state.fragments:
                if fragment.under_way is not None and fragment.under_way.has_failed:
                    fragment.under_way = None

    def _merge(self, fragment: Fragment, alpha: float) -> None:
        with _on_the_host():
            fragment.merge(alpha)
        self._tell_of_merge(fragment.parameters())

    def _tell_of_merge(self, parameters: list[Tensor]) -> None:
        if self._on_merge is not None:
            self._on_merge(parameters)

    def _average(self, fragment: Fragment, change: SiteChange, number: int, step: int) -> None:
        """Moves the fragment's outer weights by the mean difference. All ranks give it the same number."""

        def average() -> Mean | None:
            if number <= self._state.num_averaged:  # the mean came with another rank's outer state
                return None
            self._sites.let_in()
            return fragment.average(self._sites, change, min(self._site))

        with _on_the_host():
            mean = self._with_all_sites(average, fragment)
            if mean is not None:
                self._state.averaged_sites = mean.sites
            if len(self._site) > 1:
                self._sites.check_same_sites(number, self._state.averaged_sites, sorted(self._site))
            if mean is not None:
                fragment.step(mean)
                self._state.num_averaged, self._state.averaged_step = number, step
                self._state.num_final = self._state.num_final + 1 if mean.have_all_ended else 0

    @cached_property
    def _site(self) -> set[int]:
        """The ranks of this site, with which this one trains. Only this one if all of them average in one group."""
        site = self._trains_with
        return {self.rank} if self._sites.joins or len(site & {*self._sites.ranks}) != 1 else site

    @cached_property
    def _trains_with(self) -> set[int]:
        """The ranks that average their gradients with this one at each step."""
        return self._tensors.ranks_that_train_together()

    def stats(self) -> list[SyncStats]:
        """Returns statistics of each fragment's synchronisations since the newest loss of a site. ``TopK`` has none."""
        handles = (fragment.averager for fragment in self._state.fragments)
        return [handle.stats() for handle in handles if isinstance(handle, GradientSynchronizer)]

    # ---- sites that are lost, and that join -------------------------------------------------------------------------

    def _with_all_sites(self, call: Callable[[], Result], fragment: Fragment | None = None) -> Result:
        """Makes a call that waits for all sites, again with those that are left if some are lost.

        It averages ``fragment``. Without one it begins a block, and new ranks have to wait.
        """
        tries_left = self._sites.group.size() + MOST_FAILURES
        while True:
            try:
                return call()
            except RuntimeError as error:
                tries_left -= 1
                if tries_left == 0:
                    raise
                self._go_on(fragment, error)

    def _go_on(self, fragment: Fragment | None, error: RuntimeError) -> None:
        """Goes on with the ranks that are left, and with new ones."""
        before = self._sites.ranks
        share = partial(self._state.share, self._sites, fragment)
        self._sites.go_on(lambda: self._state.num_averaged, share, error, takes_new=fragment is not None)
        if lost := sorted({*before} - {*self._sites.ranks}):
            warnings.warn(
                f"fastsync: ranks {lost} were lost, or did not come within the time-out ({error}); ranks "
                f"{self._sites.ranks} go on without them",
                stacklevel=2,
            )

    def _join(self) -> None:
        """Takes over the state of the others as soon as they take this rank in, and takes part in their next mean.

        This rank has changed nothing yet, so it does not count in that mean. Afterwards it is where the others are.
        """
        self._state.num_averaged = -1
        self._sites.go_on(lambda: self._state.num_averaged, partial(self._state.share, self._sites, None))
        self._begin_with_outer_weights()
        fragment = self._schedule.skip_to_next(self._state.fragments)
        self._num_sent = self._state.num_averaged + 1
        nothing = replace(fragment.take_change(has_ended=True), has_ended=False)
        self._average(fragment, nothing, self._num_sent, self._schedule.step)
        self._begin_with_outer_weights()

    def _begin_with_outer_weights(self) -> None:
        for fragment in self._state.fragments:
            fragment.merge(alpha=0.0)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on bit for bit, beside the model's and the optimizer's own states.

        Waits for the fragments that are on their way, and raises an error of one of them, once. Save the state of every
        rank, because the values that are not sent yet are each rank's own.
        """
        self._wait_for_means()
        return {
            "step": self._schedule.step,
            "num_skipped": self._schedule.num_skipped,
            "due": [fragment.due for fragment in self._state.fragments],
            "outer": self._state.of_fragments(),
            "unsent": [fragment.averager.state_dict() for fragment in self._state.fragments],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict()`` returned, on every rank, beside the model's and the optimizer's states.

        Raises:
            ValueError: it is of another model, other fragments or another compression. Then nothing has changed.
            RuntimeError: this process has joined others, and has their state.
        """
        if self._joins:
            raise RuntimeError(
                f"fastsync: this process joined others at step {self._schedule.step}, and has their state, so "
                f"load_state_dict() of the {type(self).__name__} would take it back; load a checkpoint only if "
                "num_steps is 0, and then also that of the model"
            )
        state_dict = with_plain_names(state_dict)
        before = copy.deepcopy(self.state_dict())
        if not isinstance(state_dict, dict) or shapes_of(state_dict) != shapes_of(before):
            raise ValueError("state_dict: expected the state of a DiLoCo with the same parameters and fragments")
        try:
            self._load(state_dict)
        except BaseException:
            self._load(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        for fragment, due, unsent in zip(self._state.fragments, state["due"], state["unsent"], strict=True):
            fragment.averager.load_state_dict(unsent)
            fragment.under_way = None if due is None else UnderWay(due)
            fragment.num_unsent_steps = 0
        self._schedule.step = self._state.averaged_step = state["step"]  # all that was sent is averaged
        self._schedule.num_skipped = state["num_skipped"]
        self._state.load_fragments(state["outer"])
        self._state.num_final, self._is_resumed = 0, True
        if self._block is not None:
            self._block.has_begun = True


@contextmanager
def _on_the_host() -> Iterator[None]:
    """Makes tensors on the CPU, and outside inference mode, whatever the default device and the mode are."""
    with torch.inference_mode(False), torch.device("cpu"):
        yield


def _as_optimizers(given: object) -> list[Optimizer]:
    """Returns the optimizers of the argument ``optimizer``, out of wrappers that are none themselves."""
    each = list(given) if isinstance(given, (list, tuple)) else [given]
    found = [optimizer for optimizer in map(unwrapped, each) if optimizer is not None]
    if not found or len(found) < len(each):
        names = ", ".join(type(one).__name__ for one in each)
        raise ValueError(
            "optimizer: expected a torch.optim.Optimizer, a list of them, or wrappers with step(), zero_grad() and one "
            f"in .optimizer; got {f'[{names}]' if isinstance(given, (list, tuple)) else names}"
        )
    return found


def _check_number(name: str, number: object, least: int, most: int) -> None:
    if not isinstance(number, int) or not least <= number <= most:
        up_to = "" if most == sys.maxsize else f" to {most}"
        raise ValueError(f"{name}: expected a whole number from {least}{up_to}, got {number!r}")


def _end_background_calls(known: weakref.ref[DiLoCo]) -> None:
    sync = known()
    if sync is not None:
        sync._background.end(interrupt=sync._sites.close)

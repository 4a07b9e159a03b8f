"""What all sites of ``DiLoCo`` have alike: the outer weights of each fragment, and how far their means have come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .._checks import without_compiler
from .fragment import Fragment
from .model_tensors import ModelTensors
from .schedule import Schedule
from .surviving_group import Progress, SurvivingGroup
from .topk import TopKAverager


class OuterState:
    """The fragments, and what is equal on all sites between two means.

    Args:
        tensors: those of the model.
        schedule: the steps of this site.
        settings: has to be equal on all ranks.
        make_fragments: makes the fragments, which average over a group.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        schedule: Schedule,
        settings: str,
        make_fragments: Callable[[dist.ProcessGroup], list[Fragment]],
    ) -> None:
        self.fragments: list[Fragment] = []
        self.averaged_step = 0  # the step that sent the fragment that was averaged last
        self.averaged_sites: list[int] = []  # those of the newest mean, each by its first rank
        self.num_averaged = 0  # the number of the newest one that all ranks have come to
        self.num_final = 0  # how many fragments were averaged in a row after all loops had ended
        self._tensors = tensors
        self._schedule = schedule
        self._settings = settings
        self._make_fragments = make_fragments

    def begin(self, group: dist.ProcessGroup) -> None:
        """Makes the fragments of rank 0's weights, on all ranks of the group."""
        self._check_settings(group)
        self._tensors.broadcast(group)
        self.fragments = self._make_fragments(group)

    def _check_settings(self, group: dist.ProcessGroup) -> None:
        _C.check_agreement(group, self._settings, torch.device("cpu"))

    def share(self, sites: SurvivingGroup, failed: Fragment | None, progress: Progress) -> None:
        """Makes the outer weights of all ranks equal in a new group.

        Some of them may have got the last mean before an error, and some not, and some may be new. So all take the
        outer weights of a rank that has come furthest. ``failed`` is the fragment whose mean has failed, if one has.
        """
        group, is_new = sites.group, self.num_averaged < 0
        furthest = max(progress, key=lambda rank: (progress[rank], -rank))
        have_new = min(progress.values()) < 0
        if have_new:
            self._check_settings(group)
        state: dict[str, Any] | None = None
        if len({*progress.values()}) > 1:
            mine = self._common(have_new) if sites.own == furthest else None
            state = sites.broadcast_object(mine, furthest)
        averager = None if failed is None else failed.averager
        if self.num_averaged < progress[furthest] and isinstance(averager, TopKAverager):
            averager.settle()  # the other ranks have received what this rank sent
        if is_new:
            assert state is not None
            self._tensors.load_beside_weights(state["beside"])
            self.fragments = self._make_fragments(group)
            for each in self.fragments:
                each.begin_anew(each.averager.state_dict())  # as all ranks do in use_group()
        else:
            for each in self.fragments:
                each.use_group(group)
        if state is not None:
            if failed is None and not is_new:
                self._schedule.go_to(state["next_step"], self.fragments)
            self.load_fragments(state["outer"])
            self.num_final, self.averaged_step = state["num_final"], state["averaged_step"]
            self.averaged_sites = state["averaged_sites"]
            self.num_averaged = progress[furthest]
            if is_new:
                self._schedule.step, self._schedule.num_skipped = self.averaged_step, state["num_skipped"]

    def _common(self, have_new: bool) -> dict[str, Any]:
        """Returns the state that all ranks take over. New ones get frozen parameters and buffers, too."""
        return {
            "outer": self.of_fragments(),
            "num_final": self.num_final,
            "averaged_step": self.averaged_step,
            "averaged_sites": self.averaged_sites,
            "next_step": self._schedule.next_step(self.fragments),
            "num_skipped": self._schedule.num_skipped,
            "beside": self._tensors.beside_weights() if have_new else {},
        }

    def of_fragments(self) -> list[dict[str, Any]]:
        """Returns the outer weights of each fragment, and what belongs to them."""
        return [
            {
                "weights": {name: weight.detach() for name, weight in fragment.outer.items()},
                "optimizer": fragment.optimizer.state_dict(),
                "buffers": fragment.buffers_mean,
                "others": dict(fragment.means_of_others),
            }
            for fragment in self.fragments
        ]

    @torch.no_grad()
    def load_fragments(self, state: list[dict[str, Any]]) -> None:
        """Takes over what ``of_fragments`` returned."""
        for fragment, each in zip(self.fragments, state, strict=True):
            for name, weight in fragment.outer.items():
                weight.copy_(each["weights"][name])
            fragment.optimizer.load_state_dict(each["optimizer"])
            fragment.buffers_mean = each["buffers"].clone()
            fragment.means_of_others = {name: mean.clone() for name, mean in each["others"].items()}


def with_plain_names(state: Any) -> Any:
    """Returns a state without what torch.compile's wrapper adds to names, as states of earlier versions have it."""
    if isinstance(state, dict):
        return {
            without_compiler(key) if isinstance(key, str) else key: with_plain_names(each)
            for key, each in state.items()
        }
    return [with_plain_names(each) for each in state] if isinstance(state, list) else state


def shapes_of(state: Mapping[str, Any]) -> list[object]:
    """Returns the keys and shapes that a state of ``DiLoCo`` must have in common with this one."""
    outer = state.get("outer", [])
    weights = [{name: weight.shape for name, weight in each["weights"].items()} for each in outer]
    return [sorted(state), weights, [each["buffers"].shape for each in outer]]

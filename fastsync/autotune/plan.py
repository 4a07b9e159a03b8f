"""From what was asked for to what the engine follows: the candidates of each step, measured where there are several."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

import torch
import torch.distributed as dist
from torch import Tensor

from fastsync import _C
from fastsync.autotune.candidates import WIRES, Candidate, Explanation, explain
from fastsync.autotune.measure import measure_group
from fastsync.autotune.profile import GroupProfile, ranks_by_host
from fastsync.checks import check_parameters
from fastsync.compression import LOSSIER, Auto, Compression, Schedule


@dataclass(frozen=True)
class Plan:
    """The candidates that buckets may travel with. Equal on all ranks."""

    phases: tuple[tuple[int, tuple[Candidate, ...]], ...]
    """(first step, candidates), steps ascending from 0."""

    def explain(self, step: int, numels: Sequence[int], transport: str) -> Explanation:
        """Tells what buckets of so many values travel with in a step, and why."""
        candidates = next(candidates for first, candidates in reversed(self.phases) if first <= step)
        return explain(candidates, numels, transport)


def make_plan(
    compression: Compression | Auto | Schedule,
    process_group: dist.ProcessGroup,
    named: Mapping[str, Tensor],
    argument: str,
    *,
    remeasure: bool = False,
) -> Plan:
    """Plans what these parameters' gradients travel with; measures the group where that has to be known and is not yet.

    Args:
        compression: what was asked for.
        process_group: the group to average over.
        named: the parameters by name.
        argument: the name of the argument that they come from, for errors.
        remeasure: forget what was measured before.

    Raises:
        ValueError: the compression cannot carry one of the parameters, nodes do not divide the group, or a profile is
            of another group.
    """
    phases = compression.phases if isinstance(compression, Schedule) else ((0, compression),)
    for _, choice in phases:
        check_parameters(named, Compression() if isinstance(choice, Auto) else choice, argument)
    if remeasure:
        _profiles.pop(process_group, None)
    return Plan(tuple((step, _candidates(choice, process_group, named)) for step, choice in phases))


def _candidates(
    choice: Compression | Auto, process_group: dist.ProcessGroup, named: Mapping[str, Tensor]
) -> tuple[Candidate, ...]:
    if isinstance(choice, Compression):
        return (Candidate(_within(choice, process_group.size())),)
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    if not trained:
        return (Candidate(Compression()),)
    wires = [wire for wire in WIRES if wire not in LOSSIER or wire in choice.allow]
    if any(parameter.is_complex() for parameter in trained):
        wires = ["none"]  # nothing else carries them
    if choice.profile is None:
        return _measured(process_group, tuple(wires), trained).of_wires(wires)
    return _of_profile(choice.profile, wires, process_group, trained[0].device)


def _of_profile(
    profile: GroupProfile | str | PathLike[str],
    wires: Sequence[str],
    process_group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[Candidate, ...]:
    """Raises on all ranks where it will not do on one, or the others would wait for that one."""
    here = ranks_by_host(process_group, device)
    obstacle: ValueError | None = None
    candidates: tuple[Candidate, ...] = ()
    try:
        if not isinstance(profile, GroupProfile):
            profile = GroupProfile.read(profile)
        profile.check(process_group, device)
        candidates = profile.of_wires(wires)
        profile.check_hosts(here)
    except ValueError as error:
        obstacle = error
    _C.check_agreement(process_group, str(obstacle or "profile: fits this group"), device)
    if obstacle is not None:
        raise obstacle
    return candidates


def _within(compression: Compression, world_size: int) -> Compression:
    """Simplifies it for so many ranks: those of a single node do not compress."""
    ranks_per_node = compression.ranks_per_node or 1
    if world_size % ranks_per_node:
        raise ValueError(
            f"compression: ranks_per_node={ranks_per_node} does not divide the process group's {world_size} ranks; "
            "every node has to have as many"
        )
    return Compression(reduce="fp32") if world_size == ranks_per_node > 1 else compression


_profiles: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], GroupProfile]] = (
    weakref.WeakKeyDictionary()
)


def _measured(process_group: dist.ProcessGroup, wires: tuple[str, ...], trained: Sequence[Tensor]) -> GroupProfile:
    """Measured once for a group, and for the dtype that most of the values have."""
    numels: Counter[torch.dtype] = Counter()
    for parameter in trained:
        numels[parameter.dtype.to_real()] += parameter.numel()
    device, dtype = trained[0].device, numels.most_common(1)[0][0]
    known = _profiles.setdefault(process_group, {})
    case = (wires, device.type, dtype)
    if case not in known:
        known[case] = measure_group(process_group, wires=wires, device=device, dtype=dtype)
    return known[case]

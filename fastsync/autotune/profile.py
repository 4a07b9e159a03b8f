"""The profile of a process group: what syncs were measured to take, kept, saved, loaded, and asked."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from ..compression import Compression
from .choose import Candidate, choose


@dataclass(frozen=True)
class GroupProfile:
    """Seconds that whole syncs take on a process group, by compression and size. Equal on all ranks."""

    candidates: tuple[Candidate, ...]
    """From the least lossy compression to the lossiest."""
    world_size: int
    ranks_per_host: tuple[int, ...]
    """How many share memory on each host; empty where none do."""
    backend: str
    """Such as ``gloo``, for ``device``."""
    device: str
    """Type of the device that gradients were on: ``cpu`` or ``cuda``."""
    dtype: str

    def choose(self, numel: int) -> Compression:
        """Picks what a bucket of ``numel`` values travels best with, lossiness counted in."""
        return self.candidates[choose(self.candidates, numel)].compression

    def of_wires(self, wires: Sequence[str]) -> tuple[Candidate, ...]:
        """The candidates of these wires."""
        return tuple(candidate for candidate in self.candidates if candidate.compression.wire in wires)

    def why_not(
        self, process_group: dist.ProcessGroup, device: torch.device, hosts: tuple[int, ...], wires: Sequence[str]
    ) -> str:
        """Says what keeps it from serving this group; empty where nothing does."""
        there = (self.world_size, self.backend, self.device, self.ranks_per_host)
        here = (process_group.size(), backend_of(process_group, device), device.type, hosts)
        if here != there:
            kind = "{} ranks of {} with gradients on {} and {} of them in one memory"
            there_and_here = f"it was measured on {kind.format(*there)}, and here are {kind.format(*here)}"
            return f"profile: {there_and_here}; measure here with fastsync.measure_group, or leave profile out"
        measured = dict.fromkeys(candidate.compression.wire for candidate in self.candidates)
        missing = [wire for wire in wires if wire not in measured]
        said = f"profile: it was measured with the wires {', '.join(measured)}, without {', '.join(missing)}; measure "
        return f"{said}with fastsync.measure_group(wires=...) what the compression allows" if missing else ""

    def save(self, path: str | PathLike[str]) -> None:
        """Writes it to a JSON file. Every rank may, to one file as well: all write the same."""
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> GroupProfile:
        """Reads what ``save`` wrote, on whichever group that was measured. Raises ValueError where it cannot."""
        try:
            fields: dict[str, Any] = json.loads(Path(path).read_text())
            candidates = [
                Candidate(Compression(**given["compression"]), tuple((n, s) for n, s in given["points"]))
                for given in fields.pop("candidates")
            ]
            return cls(candidates=tuple(candidates), ranks_per_host=tuple(fields.pop("ranks_per_host")), **fields)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"profile: {os.fspath(path)!r} is no profile that this version of fastsync can read ({error}); make "
                "one with fastsync.measure_group(...).save(path)"
            ) from error


def backend_of(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the group's backend for a device. Raises ValueError where it has none."""
    if device.type not in {each.type for each in process_group._device_types}:
        raise ValueError(f"process_group: it has no backend for {device.type}")
    return process_group._get_backend(device).name()


def ranks_by_host(process_group: dist.ProcessGroup, device: torch.device) -> tuple[int, ...]:
    """Counts the ranks of each host that add in memory there. Every rank must call it."""
    return tuple(len(ranks) for ranks in _C.hosts(process_group)) if device.type == "cpu" else ()

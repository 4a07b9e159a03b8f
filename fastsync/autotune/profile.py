"""The profile of a process group: what syncs were measured to take, kept, saved, loaded, and asked."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fastsync import _C
from fastsync.autotune.candidates import Candidate, choose, reason
from fastsync.checks import resolve_group
from fastsync.compression import Compression, Wire
from fastsync.files import write_whole

_FORMAT = 2


class Choice(NamedTuple):
    """A compression for a bucket, and why it was chosen."""

    compression: Compression
    reason: str


@dataclass(frozen=True)
class GroupProfile:
    """Seconds that whole syncs take on a process group, by compression and size. Equal on all ranks."""

    candidates: tuple[Candidate, ...]
    """From the least lossy compression to the lossiest."""
    world_size: int
    ranks_per_host: tuple[int, ...]
    """How many share memory on each host; empty where none do."""
    backend: str
    """Such as ``gloo``, of the group for ``device``."""
    device: str
    """Type of the device that gradients were on: ``cpu`` or ``cuda``."""
    dtype: str
    """Of the gradients, such as ``float32``."""
    torch_version: str
    fastsync_version: str

    def predict(self, compression: Compression | Wire, numel: int) -> float:
        """Seconds that a sync of ``numel`` values takes.

        Raises:
            ValueError: the compression was not measured, or is none.
        """
        compression = Compression(compression) if isinstance(compression, str) else compression
        for candidate in self.candidates:
            if candidate.compression == compression:
                return candidate.predict(numel)
        measured = "; ".join(str(candidate.compression) for candidate in self.candidates)
        raise ValueError(f"compression: {compression} was not measured, only: {measured}")

    def choose(self, numel: int) -> Choice:
        """Picks what a bucket of ``numel`` values travels best with, lossiness counted in, and says why."""
        chosen = self.candidates[choose(self.candidates, numel)]
        return Choice(chosen.compression, reason(self.candidates, numel))

    def of_wires(self, wires: Sequence[str]) -> tuple[Candidate, ...]:
        """The candidates of these wires.

        Raises:
            ValueError: one of the wires was not measured.
        """
        measured = dict.fromkeys(candidate.compression.wire for candidate in self.candidates)
        if missing := [wire for wire in wires if wire not in measured]:
            raise ValueError(
                f"profile: it was measured with the wires {', '.join(measured)}, without {', '.join(missing)}; measure "
                "with fastsync.measure_group(wires=...) what the compression allows"
            )
        return tuple(candidate for candidate in self.candidates if candidate.compression.wire in wires)

    def check_hosts(self, ranks_per_host: tuple[int, ...]) -> None:
        """Raises ValueError where ranks shared memory otherwise than here, as ``ranks_by_host`` has it."""
        if ranks_per_host != self.ranks_per_host:
            there, here = (
                f"hosts with {', '.join(map(str, hosts))} ranks" if hosts else "ranks that do not share memory"
                for hosts in (self.ranks_per_host, ranks_per_host)
            )
            raise ValueError(
                f"profile: it was measured on {there}, and here are {here}; measure here with fastsync.measure_group, "
                "or leave profile out"
            )

    def check(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        """Raises ValueError where what was measured is not this group, with gradients on this device."""
        here = (process_group.size(), backend_of(process_group, device), device.type)
        if here != (self.world_size, self.backend, self.device):
            raise ValueError(
                f"profile: it was measured on {self.world_size} ranks of {self.backend} with gradients on "
                f"{self.device}, and here are {here[0]} ranks of {here[1]} with gradients on {here[2]}; measure here "
                "with fastsync.measure_group, or leave profile out"
            )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes it to a JSON file. Every rank may, to one file as well: all write the same."""
        write_whole(Path(path), (json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n").encode())

    @classmethod
    def load(
        cls, path: str | PathLike[str], *, process_group: dist.ProcessGroup | DeviceMesh | None = None
    ) -> GroupProfile:
        """Reads what ``save`` wrote.

        Args:
            path: the file.
            process_group: the group it is for; None for the default group.

        Raises:
            ValueError: it cannot be read, or was measured on another number of ranks or another backend.
        """
        profile = cls.read(path)
        profile.check(resolve_group(process_group), torch.device(profile.device))
        return profile

    @classmethod
    def read(cls, path: str | PathLike[str]) -> GroupProfile:
        """As ``load``, wherever it was measured: to look at it."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise ValueError(
                f"profile: {os.fspath(path)!r} cannot be read ({error.strerror}); make one with "
                "fastsync.measure_group(...).save(path)"
            ) from error
        try:
            fields: dict[str, Any] = json.loads(text)
            if (found := fields.pop("format")) != _FORMAT:
                raise ValueError(f"format {found} instead of {_FORMAT}")
            candidates = [
                Candidate(Compression(**given["compression"]), tuple((n, s) for n, s in given["points"]))
                for given in fields.pop("candidates")
            ]
            return cls(candidates=tuple(candidates), ranks_per_host=tuple(fields.pop("ranks_per_host")), **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"profile: {os.fspath(path)!r} is no profile that this version of fastsync can read ({error}); measure "
                "again with fastsync.measure_group"
            ) from error


def backend_of(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the group's backend for a device. Raises ValueError where it has none."""
    if device.type not in {each.type for each in process_group._device_types}:
        raise ValueError(f"process_group: it has no backend for {device.type}")
    return process_group._get_backend(device).name()


def ranks_by_host(process_group: dist.ProcessGroup, device: torch.device) -> tuple[int, ...]:
    """Counts the ranks of each host that add in memory there. Every rank must call it."""
    return tuple(len(ranks) for ranks in _C.hosts(process_group)) if device.type == "cpu" else ()

"""Rows that can be read without the run that made them: samples, quantiles, settings, versions, hardware."""

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastsync
from fastsync.doctor import num_usable_cores
from fastsync.ppo.files import write_whole

QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


@dataclass(frozen=True)
class Record:
    """One row. Times in seconds."""

    benchmark: str
    """The command."""
    method: str
    settings: Mapping[str, Any]
    figures: Mapping[str, float | None]
    """What was derived or counted; None where it is not known."""
    correct: bool
    """Whether what was timed gave the right result."""
    samples: Sequence[float]
    """Every repetition's time, in order. Empty if the result was wrong before any was timed."""
    environment: Mapping[str, Any]

    @property
    def quantiles(self) -> dict[str, float]:
        return quantiles(self.samples)


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Empty if there are no samples."""
    if not samples:
        return {}
    return dict(zip(QUANTILES, np.quantile(samples, list(QUANTILES.values())).tolist(), strict=True))


class RowFile:
    """A JSON array of records in a file, a record a line. Rows are on disk as soon as they are added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: list[Record] = []

    def add(self, records: Iterable[Record]) -> None:
        """Adds rows. The first ones replace a file that was there."""
        self.replace([*self._records, *records])

    def replace(self, records: Iterable[Record]) -> None:
        """Puts rows in the place of all that were added."""
        self._records = list(records)
        lines = [json.dumps(asdict(record) | {"quantiles": record.quantiles}) for record in self._records]
        write_whole(self.path, ("[\n" + ",\n".join(lines) + "\n]\n").encode())

    def reload(self) -> None:
        """Takes over what another process has added, so that the next rows come behind it."""
        self._records = self.read()

    def read(self) -> list[Record]:
        """All rows in the file; none if there is no file."""
        return read_json(self.path) if self.path.exists() else []


def read_json(path: Path) -> list[Record]:
    """The rows of a file that RowFile wrote.

    Raises:
        ValueError: it is not such a file, or there is none.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    names = [field.name for field in fields(Record)]
    try:
        rows = [
            {"method": row.get("way"), **row} for row in json.loads(path.read_text(encoding="utf-8"))
        ]  # as it was called before
        return [Record(**{name: row[name] for name in names}) for row in rows]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no rows of a benchmark: {error!r}") from None


def environment(device: torch.device) -> dict[str, Any]:
    """Describes when and where this process measures on ``device``, and with what."""
    on_gpu = device.type == "cuda"
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "fastsync": fastsync.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": num_usable_cores(),
        "threads_per_rank": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
    }


def versions(*packages: str) -> dict[str, str]:
    """Of packages that are installed, by their names on PyPI."""
    return {package: metadata.version(package) for package in packages}


def _commit() -> str | None:
    """The source tree's commit, with -dirty behind it if it was changed since; None outside of a git repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()

"""Rows that can be read without the run that made them: samples, quantiles, settings, versions, hardware."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastsync

QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


@dataclass(frozen=True)
class Record:
    """One row. Times in seconds."""

    benchmark: str
    """The command."""
    way: str
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


def write_json(path: Path, records: Sequence[Record]) -> None:
    """Writes a JSON array, one record a line."""
    lines = [json.dumps(asdict(record) | {"quantiles": record.quantiles}) for record in records]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def environment(device: torch.device) -> dict[str, Any]:
    """When and where this process measures on ``device``, and with what."""
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
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
    }


def _commit() -> str | None:
    """The source tree's commit, with -dirty behind it if it was changed since; None outside of a git repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()

"""Loggers, which take figures update by update: a CSV file, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...doctor import install_command
from ...files import replacing
from ..settings import RunSettings


class Logger(Protocol):
    """Takes the figures of one update after the other."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keeps the figures that the run had after ``step`` environment steps. NaN: not known."""

    def close(self) -> None:
        """Writes what is still kept back."""


def open_loggers(folder: Path, settings: RunSettings, resumed_step: int) -> list[Logger]:
    """Those of a run. What they hold about steps after ``resumed_step`` is dropped."""
    loggers: list[Logger] = [
        CsvLog(folder / "progress.csv", resumed_step),
        TensorBoardLog(folder, settings.as_dict(), resumed_step),
    ]
    if settings.wandb_project is not None:
        loggers.append(WandbLog(folder, settings.wandb_project, settings.as_dict()))
    return loggers


class CsvLog:
    """A row for each update. The first one decides the columns; a field is empty where a figure is not known.

    Args:
        path: the file. What it holds about steps after ``resumed_step`` is dropped, and the rest goes on.
        resumed_step: where the run goes on; 0 for a new one.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self._path = path
        self._rows = _rows_until(path, resumed_step) if resumed_step else []
        self._writer: csv.DictWriter[str] | None = None
        self._file: Any = None

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            # Columns of the rows before stay, though another number of ranks may no longer fill them.
            self._start(list(dict.fromkeys(["step", *scalars, *(name for old in self._rows for name in old)])))
        assert self._writer is not None
        self._writer.writerow({"step": step} | _known(scalars))
        self._file.flush()

    def _start(self, columns: Sequence[str]) -> None:
        with replacing(self._path) as unfinished:
            self._file = unfinished.open("w", newline="")
            self._writer = csv.DictWriter(self._file, columns, restval="", extrasaction="raise")
            self._writer.writeheader()
            self._writer.writerows(self._rows)
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _rows_until(path: Path, step: int) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        whole = [line for line in file if line.endswith("\n")]  # a killed run may have left half a line
    return [row for row in csv.DictReader(whole) if int(row["step"]) <= step]


class TensorBoardLog:
    """Event files in the run's folder. Of those before, TensorBoard drops what is after ``resumed_step``."""

    def __init__(self, folder: Path, settings: Mapping[str, object], resumed_step: int = 0) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        # All of them at 0: a run that ended before its first checkpoint begins anew in its folder.
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else 0)
        rows = "\n".join(f"|{name}|{value}|" for name, value in settings.items())
        self._writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}", resumed_step)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        # All in one event: an add_scalar each took most of the time of an update's report.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in _known(scalars).items()]
        self._writer._get_file_writer().add_summary(self._summary(value=values), step)

    def close(self) -> None:
        self._writer.close()


class WandbLog:
    """A run of Weights & Biases. Its id is kept in the folder, so that a resumed run goes on in the same one.

    The environment variables of wandb count: WANDB_MODE=offline keeps everything in the folder.
    """

    def __init__(self, folder: Path, project: str, settings: Mapping[str, object]) -> None:
        check_wandb(project)
        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        where: dict[str, Any] = {"name": folder.name, "dir": str(folder), "id": id_file.read_text(), "resume": "allow"}
        self._run = importlib.import_module("wandb").init(project=project, config=dict(settings), **where)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(_known(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def check_wandb(project: str | None) -> None:
    """Raises ValueError for a run that is to be logged to a project of W&B where that is not installed."""
    try:
        if project is not None:
            importlib.import_module("wandb")
    except ImportError:
        raise ValueError(f"wandb_project={project!r} needs wandb: {install_command('wandb')}") from None


def _known(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if not math.isnan(value)}

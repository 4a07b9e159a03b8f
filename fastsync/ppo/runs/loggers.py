"""Loggers of the metrics of each update: a CSV file, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import io
import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..._torch_compat import file_writer_of
from ...doctor import install_command
from ..files import write_whole
from ..settings import RunSettings

PROGRESS = "progress.csv"
"""The name of the CSV file in a run's folder."""


def open_loggers(
    folder: Path, settings: RunSettings, resumed_step: int
) -> list[CsvLog | TensorBoardLog | WandbLog]:  # fmt: skip
    """Opens the loggers of a run. They drop what they hold about steps after ``resumed_step``.

    ``log`` takes the number of environment steps and the metrics. NaN means that a metric is not known.
    """
    loggers: list[CsvLog | TensorBoardLog | WandbLog] = [
        CsvLog(folder / PROGRESS, resumed_step),
        TensorBoardLog(folder, settings.as_dict(), resumed_step),
    ]
    if settings.wandb_project is not None:
        loggers.append(WandbLog(folder, settings.wandb_project, settings.as_dict()))
    return loggers


class CsvLog:
    """A row for each update. A field is empty if the metric is not known.

    Rows up to ``resumed_step`` stay. A metric that first comes later gets a column behind the others. That happens if
    the first rollout only resets environments, because then nothing calls a loss of the user's own.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self._path = path
        self._rows = _rows_until(path, resumed_step) if resumed_step else []
        if path.exists():  # rows beyond are taken back now, because a run may be killed before its first one
            if self._rows:
                write_whole(path, _as_csv(list(self._rows[0]), self._rows))
            else:
                path.unlink()
        self._columns: dict[str, None] = {}
        self._writer: csv.DictWriter[str] | None = None
        self._file: Any = None

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is not None and not self._columns.keys() >= scalars.keys():
            self.close()
            self._rows, self._writer = _rows_until(self._path, step), None
        if self._writer is None:
            # Columns of earlier rows stay, even if another number of ranks no longer fills them.
            earlier = (name for old in self._rows for name in old)
            self._columns = dict.fromkeys([*(self._columns or ["step"]), *scalars, *earlier])
            self._start(list(self._columns))
        assert self._writer is not None
        self._writer.writerow({"step": step} | _known(scalars))
        self._file.flush()

    def _start(self, columns: Sequence[str]) -> None:
        write_whole(self._path, _as_csv(columns, self._rows))
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _as_csv(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _rows_until(path: Path, step: int) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        whole = [line for line in file if line.endswith("\n")]  # a killed run may have left half a line
    return [row for row in csv.DictReader(whole) if int(row["step"]) <= step]


class TensorBoardLog:
    """Event files in the run's folder. TensorBoard drops earlier events after ``resumed_step``."""

    def __init__(self, folder: Path, settings: Mapping[str, object], resumed_step: int = 0) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        # 0 drops all of them: a run that ended before its first checkpoint begins again in its folder.
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else 0)
        rows = "\n".join(f"|{name}|{value}|" for name, value in settings.items())
        self._writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}", resumed_step)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        # All in one event: one add_scalar per metric took most of the time of a report.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in _known(scalars).items()]
        file_writer_of(self._writer).add_summary(self._summary(value=values), step)

    def close(self) -> None:
        self._writer.close()


class WandbLog:
    """A run of Weights & Biases. The folder keeps its id, so that a resumed run continues it.

    The environment variables of wandb apply: WANDB_MODE=offline keeps everything in the folder.
    """

    def __init__(self, folder: Path, project: str, settings: Mapping[str, object]) -> None:
        check_wandb(project)
        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        where: dict[str, Any] = {
            "name": folder.name,
            "dir": str(folder),
            "id": id_file.read_text(encoding="utf-8"),
            "resume": "allow",
        }
        self._run = importlib.import_module("wandb").init(project=project, config=dict(settings), **where)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        # wandb ignores steps before that of the newest row, or at it after a resumption.
        self._run.log(_known(scalars), step=max(step, self._run.step))

    def close(self) -> None:
        self._run.finish()


def check_wandb(project: str | None) -> None:
    """Raises ValueError if a run asks for Weights & Biases, and wandb is not installed."""
    try:
        if project is not None:
            importlib.import_module("wandb")
    except ImportError:
        raise ValueError(f"wandb_project={project!r} needs wandb: {install_command('wandb')}") from None


def _known(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if not math.isnan(value)}

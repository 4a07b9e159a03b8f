"""Checkpoints: a crash at any moment leaves the old ones whole, and one that was damaged since is noticed."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ...files import write_whole
from ..settings import Kind


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run at some moment. All of it is dicts, lists, numbers, strings and tensors."""

    settings: dict[str, Any]  # The settings of the run, as plain data: see ``settings_as``.
    world_size: int  # The number of ranks.
    step: int  # Environment steps done, over all ranks.
    update: int  # Updates done, one after each rollout.
    seconds: float  # Wall time of the learning loop so far.
    learner: dict[str, Any]  # What the ranks share: policy, optimizer, gradient synchronisation, random numbers.
    environments: list[Any]  # What each rank has of its own, in rank order.
    window: list[Any]  # The last episodes.
    best_return: float = -math.inf  # The mean return of the best checkpoint when this one was saved, this one included.

    def settings_as(self, kind: type[Kind]) -> Kind:
        """The settings.

        Raises:
            ValueError: they do not suit this version.
        """
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.settings.items()
        }
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the checkpoint's settings do not suit this version of fastsync: {error}") from error


class CheckpointFolder:
    """The checkpoints of a run: ``step-000012345.pt``.

    ``best.pt`` is the one with the highest mean return so far.

    Args:
        folder: made when something is saved.
        keep: how many of the newest stay when another is saved.
        best_return: the mean return of the one in ``best.pt``.
    """

    def __init__(self, folder: Path, keep: int = 1, best_return: float = -math.inf) -> None:
        self.folder = folder
        self.keep = keep
        self.best_return = best_return

    def save(self, checkpoint: Checkpoint, mean_return: float) -> Path:
        """Writes a checkpoint and lets go of older ones. When this returns, the disk has it.

        Args:
            checkpoint: its best_return is filled in here.
            mean_return: of its last episodes; NaN where there were none.

        Raises:
            OSError: it could not be written. Those saved before are still there.
        """
        path = self.folder / f"step-{checkpoint.step:09d}.pt"
        is_best = mean_return > self.best_return
        best_return = mean_return if is_best else self.best_return
        file = io.BytesIO()
        torch.save(vars(replace(checkpoint, best_return=best_return)), file)
        content = file.getvalue()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self.folder.glob("*.tmp"):  # what a crash left
                unfinished.unlink()
            if is_best:
                write_whole(self.folder / "best.pt", content)
            write_whole(path, content)
        except OSError as error:
            what = f"{error.strerror}: the checkpoint of step {checkpoint.step} is not saved, those before it are"
            raise OSError(error.errno, what, str(self.folder)) from error
        self.best_return = best_return
        for old in self._by_step()[: -self.keep]:
            old.unlink()
        return path

    def newest(self, warn: Callable[[str], None] = lambda text: None) -> tuple[Path, Checkpoint] | None:
        """The newest checkpoint that can be read, or None if none was ever saved.

        Args:
            warn: is told of each newer one that is damaged.

        Raises:
            RuntimeError: there are some, and all are damaged.
        """
        paths = self._by_step()[::-1]
        for path in paths:
            try:
                return path, load_checkpoint(path)
            except RuntimeError as error:
                warn(str(error))
        if paths:
            raise RuntimeError(f"none of the {len(paths)} checkpoints in {self.folder} can be read; see the warnings")
        return None

    def _by_step(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"), key=lambda path: int(path.stem.removeprefix("step-")))


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint onto the CPU, after a look at its checksums, as a zip file has them. Nothing is executed.

    Raises:
        RuntimeError: it cannot be read, is damaged, or is none of this version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RuntimeError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    try:
        if damaged := zipfile.ZipFile(io.BytesIO(content)).testzip():
            raise zipfile.BadZipFile(f"its part {damaged} is not what was written")
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # damage leads to any
        raise RuntimeError(f"the checkpoint {path} is damaged: {error}") from error
    if missing := {field.name for field in fields(Checkpoint) if field.default is MISSING} - set(values):
        missed = ", ".join(sorted(missing))
        raise RuntimeError(f"{path} is no checkpoint of this version of fastsync: it has no {missed}")
    return Checkpoint(**{field.name: values[field.name] for field in fields(Checkpoint) if field.name in values})

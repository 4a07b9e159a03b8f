"""Checkpoints. A crash at any moment leaves the older ones intact, and damage to a file is detected."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces

from ..files import write_whole
from ..settings import Kind

BEST = "best.pt"
"""The name of the best checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run, as dicts, lists, numbers, strings and tensors."""

    settings: dict[str, Any]  # The settings of the run, as plain data; see ``settings_as``.
    world_size: int  # Number of ranks.
    step: int  # Environment steps so far, over all ranks.
    update: int  # Updates so far, one per rollout.
    seconds: float  # Wall time of the learning loop so far.
    learner: dict[str, Any]  # State that all ranks share: policy, optimizer, gradient synchronisation, random numbers.
    environments: list[Any]  # State of each rank, in rank order.
    window: list[Any]  # The last 100 episodes.
    best_return: float = -math.inf
    """Mean return of the best checkpoint so far, this one included: of its newest evaluation, if the run has any, and
    else of the last episodes of the training."""
    evaluated_step: int | None = None
    """The step that the next evaluation is counted from. None in checkpoints of before: ``step``."""
    spaces: dict[str, str] = field(default_factory=dict)
    """Shapes of observations and actions, as ``kinds_of`` says them. Checkpoints of before lack some or all."""

    num_of_before: int = 0
    """How many more episodes have to end until the window holds none from before a change of settings."""

    def check_spaces(self, env: str, observations: Space[Any], actions: Space[Any]) -> None:
        """Checks that the policy fits an environment with these spaces.

        Raises:
            ValueError: observations or actions have another shape than in the training, or actions other bounds.
        """
        now = kinds_of(observations, actions)
        for what, before in self.spaces.items():
            if before != now[what]:
                raise ValueError(
                    f"env={env!r} has {what} {now[what]}, and the run's checkpoint was made with {what} {before}: put "
                    "the environment back as it was, or begin a new run"
                )

    def settings_as(self, kind: type[Kind]) -> Kind:
        """Returns the settings as a ``kind``. It leaves out those that ``kind`` lacks, such as those of a script's
        subclass.

        Raises:
            ValueError: the values do not suit this version.
        """
        known = {each.name for each in fields(kind)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.settings.items()
            if name in known
        }
        if values.get("sync", "gradients") != "gradients":
            values.pop("bucket_cap_mb", None)  # it meant nothing there, and was not always refused
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the checkpoint's settings do not suit this version of fastsync: {error}") from error


def kinds_of(observations: Space[Any], actions: Space[Any]) -> dict[str, str]:
    """Returns in words what a policy's first and last layers depend on, and the bounds of continuous actions."""
    of_actions = f"of shape {actions.shape}"
    if isinstance(actions, spaces.Discrete | spaces.MultiDiscrete):
        of_actions = f"of {np.array(getattr(actions, 'n', getattr(actions, 'nvec', None))).tolist()} choices"
    kinds = {"observations": f"of shape {observations.shape}", "actions": of_actions}
    if isinstance(actions, spaces.Box):
        kinds["actions in bounds"] = " to ".join(map(_number_or_all, (actions.low, actions.high)))
    return kinds


def _number_or_all(bounds: Any) -> str:
    """Returns one number if all are the same."""
    numbers = bounds.ravel().tolist()
    return str(numbers[0] if len(set(numbers)) == 1 else numbers)


class CheckpointFolder:
    """The checkpoints of a run: ``step-000012345.pt``, and ``best.pt`` with the highest mean return so far.

    Args:
        folder: the folder, which the first save creates.
        keep: number of newest checkpoints to keep.
        best_return: the mean return of ``best.pt``.
    """

    def __init__(self, folder: Path, keep: int = 1, best_return: float = -math.inf) -> None:
        self.folder = folder
        self.keep = keep
        self.best_return = best_return

    def save(self, checkpoint: Checkpoint, mean_return: float) -> Path:
        """Writes a checkpoint to disk and removes older ones.

        Args:
            checkpoint: the checkpoint. Its best_return is set here.
            mean_return: mean return of its last episodes; NaN without any.

        Raises:
            OSError: it could not be written. The earlier checkpoints still exist.
        """
        path = self.folder / f"step-{checkpoint.step:09d}.pt"
        is_best = mean_return > self.best_return
        best_return = mean_return if is_best else self.best_return
        file = io.BytesIO()
        torch.save(vars(replace(checkpoint, best_return=best_return)), file)
        content = file.getvalue()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self.folder.glob("*.tmp"):  # left by a crash
                unfinished.unlink()
            if is_best:
                write_whole(self.folder / BEST, content)
            write_whole(path, content)
        except OSError as error:
            what = f"{error.strerror}: the checkpoint of step {checkpoint.step} is not saved, earlier ones are"
            raise OSError(error.errno, what, str(self.folder)) from error
        self.best_return = best_return
        for old in self.by_step()[: -self.keep]:
            old.unlink()
        return path

    def newest(self, warn: Callable[[str], None] = lambda text: None) -> tuple[Path, Checkpoint] | None:
        """Returns the newest checkpoint that can be read, or None if there is none at all.

        Args:
            warn: called with a message for each newer one that is damaged.

        Raises:
            RuntimeError: all checkpoints are damaged.
        """
        paths = self.by_step()[::-1]
        for path in paths:
            try:
                return path, load_checkpoint(path)
            except RuntimeError as error:
                warn(str(error))
        if paths:
            raise RuntimeError(f"none of the {len(paths)} checkpoints in {self.folder} can be read; see the warnings")
        return None

    def best(self, warn: Callable[[str], None] = lambda text: None) -> tuple[Path, Checkpoint] | None:
        """Returns the best checkpoint; None if there is none, or if it is damaged, which ``warn`` is called with."""
        path = self.folder / BEST
        if not path.exists():
            return None
        try:
            return path, load_checkpoint(path)
        except RuntimeError as error:
            warn(str(error))
        return None

    def by_step(self) -> list[Path]:
        """Returns the checkpoints' paths, oldest first."""
        return sorted(self.folder.glob("step-*.pt"), key=lambda path: int(path.stem.removeprefix("step-")))


def is_checkpoint_file(path: Path) -> bool:
    """Tells whether a file may be a checkpoint, even a damaged one: by its name, or by its first bytes."""
    if path.name == BEST or (path.name.startswith("step-") and path.suffix == ".pt"):
        return True
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"  # as zip files begin


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint onto the CPU. It checks the checksums of the zip file, and executes no code from it.

    Raises:
        RuntimeError: it cannot be read, is damaged, or is not of this version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RuntimeError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    try:
        if damaged := zipfile.ZipFile(io.BytesIO(content)).testzip():
            raise zipfile.BadZipFile(f"the checksum of its part {damaged} is wrong")
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # the file is whole, and it holds other classes
        raise RuntimeError(f"{path} is not a checkpoint of fastsync: it holds objects, and not only data") from error
    except Exception as error:  # damage can lead to any
        raise RuntimeError(f"the checkpoint {path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise RuntimeError(f"{path} is not a checkpoint of fastsync: it holds a {type(values).__name__}")
    required = {each.name for each in fields(Checkpoint) if each.default is each.default_factory is MISSING}
    if missing := required - set(values):
        missed = ", ".join(sorted(missing))
        raise RuntimeError(f"{path} is not a checkpoint of this version of fastsync: it has no {missed}")
    return Checkpoint(**{each.name: values[each.name] for each in fields(Checkpoint) if each.name in values})

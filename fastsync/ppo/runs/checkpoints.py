"""Checkpoints: a crash at any moment leaves the old ones whole, and one that was damaged since is noticed."""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fastsync.files import replacing, sync_folder, write_whole
from fastsync.ppo.settings import Kind, settings_from

_NAME = re.compile(r"(?:step|best)-(\d+)\.pt")
_SUM = re.compile(rb"\nfastsync sha256 ([0-9a-f]{64})\n\Z")
"""The end of a checkpoint: the sum of what lies before. torch.load does not mind it."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run at some moment. All of it is dicts, lists, numbers, strings and tensors."""

    settings: dict[str, Any]
    """The settings of the run, as plain data: see ``settings_as``."""
    world_size: int
    """The number of ranks."""
    step: int
    """Environment steps done, over all ranks."""
    update: int
    """Updates done, one after each rollout."""
    seconds: float
    """Wall time of the learning loop so far."""
    learner: dict[str, Any]
    """What the ranks share: policy, optimizer, gradient synchronisation, random numbers."""
    environments: list[Any]
    """What each rank has of its own, in rank order."""
    window: list[Any]
    """The last episodes."""
    mean_return: float = math.nan
    """Of its last episodes; NaN where there were none."""
    best_return: float = -math.inf
    """The mean return of the best checkpoint when this one was saved, this one included."""

    def settings_as(self, kind: type[Kind]) -> tuple[Kind, list[str]]:
        """The settings, which another version may have written, and what had to be made up for, in sentences.

        Raises:
            ValueError: they do not suit this version.
        """
        defaults = kind().as_dict()
        notes = [
            f"the checkpoint has a setting that this version of fastsync does not: {name}={self.settings[name]!r}"
            for name in sorted(set(self.settings) - set(defaults))
        ] + [
            f"the checkpoint was saved without the setting {name}; it counts as {defaults[name]!r}"
            for name in sorted(set(defaults) - set(self.settings))
        ]
        known = {name: value for name, value in self.settings.items() if name in defaults}
        try:
            return settings_from(known, kind), notes
        except ValueError as error:
            raise ValueError(f"the checkpoint's settings do not suit this version of fastsync: {error}") from error


class CheckpointFolder:
    """The checkpoints of a run: ``step-000012345.pt``, each with its SHA-256 at its end.

    ``best-000012345.pt`` is the one with the highest mean return so far. Only ``save`` and ``set_aside`` change
    anything, so that others may read while a run writes.

    Args:
        folder: made when something is saved.
        keep: how many of the newest stay when another is saved.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._best_return: float | None = None

    def save(self, checkpoint: Checkpoint, mean_return: float) -> Path:
        """Writes a checkpoint and lets go of older ones. When this returns, the disk has it.

        Args:
            checkpoint: its mean_return and best_return are filled in here.
            mean_return: of its last episodes; NaN where there were none.

        Raises:
            OSError: it could not be written. Those saved before are still there.
        """
        try:
            return self._save(checkpoint, mean_return)
        except OSError as error:
            what = f"{error.strerror}: the checkpoint of step {checkpoint.step} is not saved, those before it are"
            raise OSError(error.errno, what, str(self.folder)) from error

    def _save(self, checkpoint: Checkpoint, mean_return: float) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self.folder.glob("*.tmp"):  # what a crash left
            _clear(unfinished)
        best_before = self._best_so_far()
        is_best = mean_return > best_before
        best = mean_return if is_best else best_before
        path = self.folder / f"step-{checkpoint.step:09d}.pt"
        _make_way(path)
        write_whole(path, _encode(replace(checkpoint, mean_return=mean_return, best_return=best)))
        if is_best:
            self._link_best(path, best)
        for old in self._by_step("step")[: -self.keep] + self._by_step("best")[:-1]:
            _clear(old)
        sync_folder(self.folder)
        return path

    def newest(self, warn: Callable[[str], None] = lambda text: None) -> tuple[Path, Checkpoint] | None:
        """The newest checkpoint that can be read, or None if none was ever saved.

        Args:
            warn: is told of each newer one that is damaged.

        Raises:
            RuntimeError: there are some, and all are damaged.
        """
        paths = self._by_step("step")[::-1]
        for path in paths:
            try:
                return path, load_checkpoint(path)
            except RuntimeError as error:
                warn(str(error))
        if paths:
            raise RuntimeError(f"none of the {len(paths)} checkpoints in {self.folder} can be read; see the warnings")
        return None

    def best(self) -> Path | None:
        """The one with the highest mean return, or None if no episode had ended when any was saved."""
        return next(iter(self._by_step("best")[::-1]), None)

    def set_aside(self, *, after: int) -> list[Path]:
        """Renames checkpoints of later steps, which a run that goes on from an earlier one will not come by again.

        Returns:
            Their new names.
        """
        renamed = []
        for path in self._by_step("step") + self._by_step("best"):
            if _step_of(path) <= after:
                continue
            aside = path.with_name(path.name + ".set-aside")
            os.replace(path, aside)
            renamed.append(aside)
        if renamed:
            self._best_return = None
            self._best_so_far()
        return renamed

    def _by_step(self, kind: str) -> list[Path]:
        return sorted((path for path in self.folder.glob(f"{kind}-*.pt") if _NAME.fullmatch(path.name)), key=_step_of)

    def _best_so_far(self) -> float:
        """The mean return of the best one, which has its link when this returns."""
        if self._best_return is None:
            self._best_return = -math.inf
            best, steps = self.best(), self._by_step("step")
            if best is not None:
                try:
                    self._best_return = load_checkpoint(best).best_return
                    steps = steps[-1:]  # a crash can have kept no older one from its link
                except RuntimeError:  # damaged: the best of the others takes its place
                    _clear(best)
            for path in steps:
                mean_return = _mean_return_of(path)
                if mean_return > self._best_return:
                    self._link_best(path, mean_return)
        return self._best_return

    def _link_best(self, path: Path, mean_return: float) -> None:
        link = self.folder / f"best-{_step_of(path):09d}.pt"
        _make_way(link)
        with replacing(link) as unfinished:
            try:
                os.link(path, unfinished)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, unfinished)
        self._best_return = mean_return


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint onto the CPU, after a look at its checksum. Nothing in it is executed.

    Raises:
        RuntimeError: it cannot be read, is damaged, or is none of this version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RuntimeError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    found = _SUM.search(content, max(0, len(content) - 100))
    if found and hashlib.sha256(memoryview(content)[: found.start()]).hexdigest().encode() != found[1]:
        raise RuntimeError(f"the checkpoint {path} is damaged: its SHA-256 is not the one at its end")
    try:
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # damage may look like anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise RuntimeError(f"the checkpoint {path} is damaged: {reason}") from error
    missing = _REQUIRED - set(values) if isinstance(values, dict) else _REQUIRED
    if missing:
        raise RuntimeError(
            f"{path} is no checkpoint of this version of fastsync: it has no {', '.join(sorted(missing))}"
        )
    if not found:
        raise RuntimeError(f"the checkpoint {path} is damaged: it does not end with its SHA-256")
    return Checkpoint(**{name: values[name] for name in _WRITTEN & set(values)})


_WRITTEN = {field.name for field in fields(Checkpoint)}
_REQUIRED = {field.name for field in fields(Checkpoint) if field.default is MISSING}


def _mean_return_of(path: Path) -> float:
    """NaN where no episode had ended, or where it cannot be read."""
    try:
        return load_checkpoint(path).mean_return
    except RuntimeError:
        return math.nan


def _encode(checkpoint: Checkpoint) -> bytes:
    file = io.BytesIO()
    torch.save({name: getattr(checkpoint, name) for name in sorted(_WRITTEN)}, file)
    return with_sum(file.getvalue())


def with_sum(content: bytes) -> bytes:
    """What ``torch.save`` has written, as a checkpoint ends."""
    return content + f"\nfastsync sha256 {hashlib.sha256(content).hexdigest()}\n".encode()


def _clear(path: Path) -> None:
    _make_way(path)
    path.unlink(missing_ok=True)


def _make_way(path: Path) -> None:
    """A folder in the place of a file is somebody's: it gets another name."""
    if path.is_dir():
        names = (path.with_name(f"{path.name}.folder-{number}") for number in itertools.count())
        path.rename(next(name for name in names if not name.exists()))


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])

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
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fastsync.files import replacing, sync_folder, write_whole
from fastsync.ppo.config import Settings

_NAME = re.compile(r"(?:step|best)-(\d+)\.pt")
_SUM = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run at some moment. All of it is dicts, lists, numbers, strings and tensors."""

    settings: Settings
    """The settings of the run."""
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
    notes: tuple[str, ...] = ()
    """What reading it had to make up for, in sentences. Not written."""


class CheckpointFolder:
    """The checkpoints of a run: ``step-000012345.pt``, each with its SHA-256 beside it for ``sha256sum --check``.

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
        self._clean_up()
        best_before = self._best_so_far()
        is_best = mean_return > best_before
        best = mean_return if is_best else best_before
        path = self.folder / f"step-{checkpoint.step:09d}.pt"
        _write_with_sum(path, _encode(replace(checkpoint, mean_return=mean_return, best_return=best)))
        if is_best:
            self._link_best(path, best)
        for old in self._by_step("step")[: -self.keep] + self._by_step("best")[:-1]:
            _remove(old)
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
            digest = _good_sum(path)
            if digest is not None:
                write_whole(_sum_path(aside), f"{digest}  {aside.name}\n".encode())
            elif _sum_path(path).exists():
                os.replace(_sum_path(path), _sum_path(aside))
            os.replace(path, aside)
            _unlink(_sum_path(path))
            renamed.append(aside)
        if renamed:
            self._best_return = None
            self._best_so_far()
        return renamed

    def _clean_up(self) -> None:
        """Removes what a crash left: unfinished files, and sums whose files were not written any more."""
        for unfinished in self.folder.glob("*.tmp"):
            _unlink(unfinished)
        for digest in self.folder.glob("*.pt.sha256"):
            if not digest.with_suffix("").exists():
                _unlink(digest)

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
                    _remove(best)
            for path in steps:
                mean_return = _mean_return_of(path)
                if mean_return > self._best_return:
                    self._link_best(path, mean_return)
        return self._best_return

    def _link_best(self, path: Path, mean_return: float) -> None:
        _link_with_sum(path, self.folder / f"best-{_step_of(path):09d}.pt")
        self._best_return = mean_return


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint onto the CPU, after a look at its checksum where that is there. Nothing in it is executed.

    Raises:
        RuntimeError: it cannot be read, is damaged, or is none of this version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RuntimeError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    expected = _read_sum(path)
    if expected is not None and hashlib.sha256(content).hexdigest() != expected:
        raise RuntimeError(f"the checkpoint {path} is damaged: its SHA-256 is not that of {_sum_path(path).name}")
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
    known = {name: values[name] for name in _WRITTEN & set(values)}
    _check_content(path, known)
    settings, notes = _settings_from(path, values["settings"])
    if expected is None:
        notes += (f"{path.name} has no {_sum_path(path).name} beside it, so damage would go unnoticed",)
    return Checkpoint(**known | {"settings": settings, "notes": notes})


_WRITTEN = {field.name for field in fields(Checkpoint)} - {"notes"}
_REQUIRED = {field.name for field in fields(Checkpoint) if field.default is MISSING}
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("settings", "learner"), (dict,)),
    **dict.fromkeys(("world_size", "step", "update"), (int,)),
    **dict.fromkeys(("environments", "window"), (list,)),
    **dict.fromkeys(("seconds", "mean_return", "best_return"), (float, int)),
}
_OF_LEARNER = {"model", "optimizer", "scaler", "sync", "schedule", "rewards", "num_draws"}
_OF_RANK = {"environments", "columns"}


def _check_content(path: Path, values: dict[str, Any]) -> None:
    """Raises RuntimeError where a part is missing or is something else: found later, no other could be taken."""
    for name, value in values.items():
        if not isinstance(value, _TYPES[name]):
            expected = " or ".join(each.__name__ for each in _TYPES[name])
            raise RuntimeError(
                f"the checkpoint {path} is damaged: {name} has to be {expected}, and is a {type(value).__name__}"
            )
    if len(values["environments"]) != values["world_size"]:
        raise RuntimeError(
            f"the checkpoint {path} is damaged: it has {len(values['environments'])} environments' parts of "
            f"{values['world_size']} ranks"
        )
    parts = [("learner", values["learner"], _OF_LEARNER)]
    parts += [(f"environments[{rank}]", part, _OF_RANK) for rank, part in enumerate(values["environments"])]
    for name, part, expected_keys in parts:
        if not isinstance(part, dict) or not expected_keys <= set(part):
            missing = sorted(expected_keys - set(part)) if isinstance(part, dict) else sorted(expected_keys)
            raise RuntimeError(f"the checkpoint {path} is damaged: {name} has no {', '.join(missing)}")


def _mean_return_of(path: Path) -> float:
    """NaN where no episode had ended, or where it cannot be read."""
    try:
        return load_checkpoint(path).mean_return
    except RuntimeError:
        return math.nan


def _encode(checkpoint: Checkpoint) -> bytes:
    values = {name: getattr(checkpoint, name) for name in sorted(_WRITTEN)}
    file = io.BytesIO()
    torch.save(values | {"settings": asdict(checkpoint.settings)}, file)
    return file.getvalue()


def _settings_from(path: Path, values: dict[str, Any]) -> tuple[Settings, tuple[str, ...]]:
    """Settings that another version may have written."""
    known = {field.name for field in fields(Settings)}
    defaults = Settings()
    notes = [
        f"{path.name} has a setting that this version of fastsync does not: {name}={values[name]!r}"
        for name in sorted(set(values) - known)
    ] + [
        f"{path.name} was saved without the setting {name}; it counts as {getattr(defaults, name)!r}"
        for name in sorted(known - set(values))
    ]
    try:
        return Settings(**{name: value for name, value in values.items() if name in known}), tuple(notes)
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"the settings in {path} do not suit this version of fastsync: {error}") from error


def _write_with_sum(path: Path, content: bytes) -> None:
    """The sum comes first: a crash in between leaves a sum without a file, never a file without its sum."""
    _remove(path)  # or the sum would be that of another file for a moment
    digest = hashlib.sha256(content).hexdigest()
    write_whole(_sum_path(path), f"{digest}  {path.name}\n".encode())
    write_whole(path, content)


def _link_with_sum(path: Path, link: Path) -> None:
    """Another name for a file, with a sum of its own."""
    _remove(link)
    digest = _good_sum(path)
    if digest is not None:
        write_whole(_sum_path(link), f"{digest}  {link.name}\n".encode())
    with replacing(link) as unfinished:
        try:
            os.link(path, unfinished)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, unfinished)


def _remove(path: Path) -> None:
    _unlink(path)
    _unlink(_sum_path(path))


def _sum_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _read_sum(path: Path) -> str | None:
    """The sum beside a checkpoint; None where there is none. Raises RuntimeError where it is none."""
    try:
        words = _sum_path(path).read_bytes().split()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RuntimeError(f"{_sum_path(path)}, the sum of a checkpoint, is damaged: {error.strerror}") from error
    if not words or not _SUM.fullmatch(words[0]):
        raise RuntimeError(f"{_sum_path(path)}, the sum of a checkpoint, is damaged: it holds no SHA-256")
    return words[0].decode()


def _good_sum(path: Path) -> str | None:
    """None where there is none, or what is there is none."""
    try:
        return _read_sum(path)
    except RuntimeError:
        return None


def _unlink(path: Path) -> None:
    """Removes a file that may be missing. A folder in its place is somebody's: it gets another name."""
    if path.is_dir():
        names = (path.with_name(f"{path.name}.folder-{number}") for number in itertools.count())
        path.rename(next(name for name in names if not name.exists()))
    else:
        path.unlink(missing_ok=True)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])

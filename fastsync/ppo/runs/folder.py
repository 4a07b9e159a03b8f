"""A run's folder: its name, what lies in it, and going on where an earlier run stopped."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path

from filelock import FileLock, Timeout

from ...files import write_whole
from ..settings import RunSettings, dump_settings
from .checkpoints import Checkpoint, CheckpointFolder, load_checkpoint

CHECKPOINTS = "checkpoints"
SETTINGS = "settings.yaml"

# What another policy, or other observations, would follow from: weights that were learnt mean nothing then.
_FIXED = ("env", "policy", "network", "hidden_sizes", "activation", "norm_observations")
# Where a run lies, rather than what it does.
_UNMENTIONED = ("resume", "run_name", "runs_dir")

Opened = tuple[Path, Checkpoint | None, list[str]]
"""The run's folder, what it goes on from, and sentences to say."""


def default_run_name(settings: RunSettings, started: float | None) -> str:
    """Environment, compression, seed, and the time, if one is given, in seconds since 1970."""
    name = re.sub("[/: ]", "-", f"{settings.env}-{settings.compression}-{settings.seed}")
    return name if started is None else f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}"


def check_run(settings: RunSettings, world_size: int) -> None:
    """Tries whether the run can begin or go on. It is for the machine of rank 0, where the run's folder lies.

    Raises:
        ValueError: as ``open_run``, or none of the checkpoints can be read.
    """
    with ExitStack() as stack:
        try:
            _find(settings, world_size, stack)
        except RuntimeError as error:
            raise ValueError(f"resume={settings.resume!r}: {error}") from error


@contextmanager
def open_run(settings: RunSettings, world_size: int) -> Iterator[Opened]:
    """Opens the folder of a run, and locks it for the time of a ``with`` block. One rank calls it.

    resume=None begins in a new folder. "auto" goes on in the folder of that name (without a time) from its newest good
    checkpoint, or begins in it. A checkpoint begins a new folder. Ranks that were started again go on in any case.

    Raises:
        ValueError: the folder of a new run exists, what is to be resumed does not, somebody trains in it, or it cannot
            go on with these settings. Nothing has been changed then.
        RuntimeError: none of the checkpoints can be read.
    """
    with ExitStack() as stack:
        folder, checkpoint, notes = _find(settings, world_size, stack)
        if not folder.exists():
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise ValueError(f"the run folder {folder} cannot be written: {error.strerror}") from error
            stack.enter_context(_locked(folder))
        # So that whoever takes them for a config goes on in this folder.
        own = replace(settings, resume=None, run_name=str(folder.relative_to(settings.runs_dir)))
        write_whole(folder / SETTINGS, dump_settings(own).encode())
        yield folder, checkpoint, notes


def _find(settings: RunSettings, world_size: int, stack: ExitStack) -> Opened:
    """What ``open_run`` opens. It writes nothing, and locks a folder that exists."""
    goes_on = settings.resume == "auto"
    source = None if goes_on or settings.resume is None else Path(settings.resume)
    if source and not source.is_file():
        how = "to go on in a run, have its settings.yaml as config, and resume='auto'"
        raise ValueError(f"resume={settings.resume!r} is neither 'auto' nor a checkpoint; {how}")
    name = settings.run_name or default_run_name(settings, None if goes_on else time.time())
    folder = _named(name, settings.runs_dir)
    if folder.exists():
        if not goes_on and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            how = "choose another run_name, remove it, or go on in it with resume='auto'"
            raise ValueError(f"the run folder {folder} exists already; {how}")
        stack.enter_context(_locked(folder))
    notes: list[str] = []
    try:
        found = CheckpointFolder(folder / CHECKPOINTS).newest(notes.append)
    except RuntimeError as error:
        raise RuntimeError("\n".join([str(error), *notes])) from error
    if found is None and source:
        found = source, load_checkpoint(source)
    if found is None:
        return folder, None, notes
    path, checkpoint = found
    notes.append(f"going on from step {checkpoint.step:,} ({path})")
    return folder, checkpoint, [*notes, *changes(checkpoint, settings, world_size)]


def _named(run_name: str, runs_dir: str) -> Path:
    """Raises ValueError where that is not inside runs_dir."""
    inside = os.path.normpath(run_name)
    if os.path.isabs(inside) or inside.split(os.sep)[0] in ("", os.curdir, os.pardir):
        raise ValueError(
            f"run_name={run_name!r} is no folder inside runs_dir={runs_dir!r}; to have it elsewhere, set runs_dir"
        )
    return Path(runs_dir) / run_name


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock on a run's folder, which ends with the process, however that ends.

    Raises:
        ValueError: somebody trains there.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        in_use = f"the run folder {folder} is in use: another process trains there"
        raise ValueError(f"{in_use}; wait for its end, stop it, or choose another run_name") from None
    except NotImplementedError:
        warnings.warn(f"{folder} cannot be locked: see to it that nobody else trains there", stacklevel=2)
    except OSError as error:
        raise ValueError(f"the run folder {folder} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def changes(checkpoint: Checkpoint, settings: RunSettings, world_size: int) -> list[str]:
    """Tells what is other than in the run that goes on, a sentence each.

    Raises:
        ValueError: environment or network are others, so that what was learnt is of no use.
    """
    old, notes = checkpoint.settings_as(type(settings)), []
    if checkpoint.world_size != world_size:
        notes.append(f"the run goes on with world size {world_size} after {checkpoint.world_size}")
    for field in fields(settings):
        name, before, now = field.name, getattr(old, field.name), getattr(settings, field.name)
        if before == now or name in _UNMENTIONED:
            continue
        if name in _FIXED:
            raise ValueError(
                f"{name}={now!r} cannot be resumed from a run with {name}={before!r}; resume with that value, or begin "
                f"a new run"
            )
        notes.append(f"{name} is {now!r} from here on, after {before!r}")
    return notes

"""A run's folder: its name, what lies in it, and going on where an earlier run stopped."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fastsync._checks import format_bytes
from fastsync.files import write_whole
from fastsync.ppo.runs.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint
from fastsync.ppo.runs.lock import RunLock, check_free
from fastsync.ppo.settings import Kind, RunSettings, dump_settings, load_settings

CHECKPOINTS = "checkpoints"
SETTINGS = "settings.yaml"
_LAUNCHER = ".launcher"
_UNFINISHED = ".unfinished-"

# What another policy, or other observations, would follow from: weights that were learnt mean nothing then.
_FIXED = ("env", "policy", "network", "hidden_sizes", "activation", "lstm_size", "norm_observations")
# Where a run lies, rather than what it does.
_UNMENTIONED = ("resume", "run_name", "runs_dir")

Opened = tuple[Path, Checkpoint | None, list[str]]


def default_run_name(settings: RunSettings, started: float | None) -> str:
    """Environment, compression, seed, and the time, if one is given, in seconds since 1970."""
    name = re.sub("[/: ]", "-", f"{settings.env}-{settings.compression}-{settings.seed}")
    return name if started is None else f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}"


def run_of(path: Path) -> Path | None:
    """The folder of the run that a run's folder, the one with its checkpoints, or one of these belongs to.

    None for a checkpoint that lies elsewhere.
    """
    folder = path.parent if path.is_file() else path
    if folder.name == CHECKPOINTS:
        return folder.parent
    return None if path.is_file() else folder


def settings_of_run(resume: str, run_name: str | None, runs_dir: str, kind: type[Kind]) -> Kind | None:
    """The settings that a run had, or that a checkpoint was saved with, but where it lies as it is given here.

    Args:
        resume: as in RunSettings. "auto" means the run of that name.
        run_name: as in RunSettings.
        runs_dir: as in RunSettings.

    Returns:
        None where there are none.

    Raises:
        ValueError: the run's settings.yaml holds what is no setting.
    """
    path = Path(resume)
    if resume == "auto":
        if run_name is None:
            return None
        path = _folder_named(run_name, runs_dir)
    file = (run_of(path) or path) / SETTINGS
    try:
        if path.is_file():
            settings, _ = load_checkpoint(path).settings_as(kind)
        elif file.is_file():
            settings = load_settings(str(file), kind)
        else:
            return None
    except RuntimeError:  # a damaged checkpoint: whoever opens it says so
        return None
    return replace(settings, resume=None, run_name=run_name, runs_dir=runs_dir)


@dataclass(frozen=True)
class Found:
    """The run that ``open_run`` would open."""

    folder: Path
    """Where the run lies."""
    begins: bool
    """Whether the folder has to be made."""
    checkpoint: Checkpoint | None = None
    """What it goes on from."""
    notes: tuple[str, ...] = ()
    """About finding it."""
    changes: tuple[str, ...] = ()
    """What is other than before."""


def find_run(settings: RunSettings, world_size: int, enter: Callable[[Path], None] | None = None) -> Found:
    """Finds a run as ``open_run`` does, and raises what it would raise, but writes nothing.

    Before it reads what lies in the folder of an earlier run it calls ``enter``, by default to see that it is free.
    """
    found = _find(settings, enter or _check_free)
    if found.checkpoint is None:
        return found
    return replace(found, changes=tuple(changes(found.checkpoint, settings, world_size)))


def check_room(folder: Path, num_bytes: int = 0) -> None:
    """Tries whether a run's folder, which may have to be made yet, can be written, and leaves nothing there.

    Args:
        folder: of the run.
        num_bytes: what it is to have room for. That of the newest checkpoint there counts as well, as the next one is
            written before an old one is removed.

    Raises:
        ValueError: it cannot be written, or has no room.
    """
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        raise ValueError(f"the run folder {folder} cannot be written: {error.strerror}") from error
    sizes = [file.stat().st_size for file in sorted((folder / CHECKPOINTS).glob("step-*.pt"))]
    needed = max([num_bytes, *sizes[-1:]])
    if free < needed:
        raise ValueError(
            f"the run folder {folder} has no room for a checkpoint: it takes {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free"
        )


def open_run(settings: RunSettings, world_size: int) -> Opened:
    """Opens the folder of a run, and finds what it goes on from and what is to be said about it. One rank calls it.

    resume=None begins in a new folder. "auto" goes on in the folder of that name (without a time) if checkpoints are
    there, else begins in it. A run's folder goes on from its newest good checkpoint, a file among a run's checkpoints
    from that one; checkpoints of later steps are set aside. Any other checkpoint begins a new folder.

    Ranks that torch's elastic launcher has started again go on in the folder that they had before. If they had none
    yet, resume counts as it did for the first ones.

    Returns:
        The folder, which holds settings.yaml; the checkpoint or None; sentences.

    Raises:
        ValueError: the folder of a new run exists, what is to be resumed does not, somebody trains in it, or it cannot
            go on with these settings. Nothing has been changed then.
        RuntimeError: none of the checkpoints can be read.
    """
    if not _is_restart():
        # Of an earlier launcher that happened to have the same number.
        for file in _launcher_files(settings):
            file.unlink(missing_ok=True)
    notes: list[str] = []
    before = set(_locks)
    try:
        found = find_run(settings, world_size, lambda folder: _lock(folder, notes))
        notes += found.notes
        if found.begins:
            _make_folder(found.folder, settings)
        else:
            notes += _set_later_ones_aside(found, settings)
            # Not before: ranks that are lost in between and start again must set aside what is left.
            _write_settings(found.folder, settings)
    except BaseException:
        for folder in set(_locks) - before:
            _locks.pop(folder).release()
        raise
    return found.folder, found.checkpoint, [*notes, *found.changes]


def _set_later_ones_aside(found: Found, settings: RunSettings) -> list[str]:
    if found.checkpoint is None:
        return []
    checkpoints = CheckpointFolder(found.folder / CHECKPOINTS, settings.keep_checkpoints)
    aside = checkpoints.set_aside(after=found.checkpoint.step)
    return [f"set aside, as they are of later steps: {', '.join(path.name for path in aside)}"] if aside else []


def close_run(folder: Path) -> None:
    """Takes away what only ranks that are started again need, and lets others open the folder."""
    (folder / _LAUNCHER).unlink(missing_ok=True)
    lock = _locks.pop(folder, None)
    if lock:
        lock.release()


_locks: dict[Path, RunLock] = {}
"""Of the runs that this process has opened."""


def _lock(folder: Path, notes: list[str]) -> None:
    if folder.is_dir() and folder not in _locks:
        _locks[folder] = RunLock(folder, notes.append)


def _check_free(folder: Path) -> None:
    if folder not in _locks:
        check_free(folder)


def changes(checkpoint: Checkpoint, settings: RunSettings, world_size: int) -> list[str]:
    """Tells what is other than in the run that goes on, a sentence each.

    Raises:
        ValueError: environment or network are others, so that what was learnt is of no use.
    """
    old, notes = checkpoint.settings_as(type(settings))
    for name in _FIXED:
        before, now = getattr(old, name), getattr(settings, name)
        if before != now:
            raise ValueError(
                f"{name}={now!r} cannot be resumed from a run with {name}={before!r}; resume with that value, or begin "
                f"a new run"
            )
    if checkpoint.world_size != world_size:
        notes.append(
            f"the run goes on with world size {world_size} after {checkpoint.world_size}: all ranks have "
            f"{world_size * settings.num_envs} environments after {checkpoint.world_size * old.num_envs}"
        )
    for field in fields(settings):
        before, now = getattr(old, field.name), getattr(settings, field.name)
        if before != now and field.name not in _UNMENTIONED:
            notes.append(f"{field.name} is {now!r} from here on, after {before!r}")
    return notes


def _find(settings: RunSettings, enter: Callable[[Path], None]) -> Found:
    folder = _folder_before_restart(settings)
    if folder:
        return _newest_in(folder, settings, enter)
    if settings.resume is None:
        return _new_run(settings)
    if settings.resume == "auto":
        folder = _folder_named(settings.run_name or default_run_name(settings, None), settings.runs_dir)
        return _newest_in(folder, settings, enter) if folder.exists() else Found(folder, begins=True)
    path = Path(settings.resume)
    folder = run_of(path)
    if path.is_file():
        if folder:
            enter(folder)
        checkpoint = load_checkpoint(path)
        found = Found(folder, begins=False) if folder else _new_run(settings)
        return replace(found, checkpoint=checkpoint, notes=(_goes_on(path, checkpoint),))
    if not folder or not folder.is_dir():
        raise ValueError(f"resume={settings.resume!r} is neither 'auto', nor a run's folder, nor a checkpoint")
    found = _newest_in(folder, settings, enter)
    if found.checkpoint is None:
        raise ValueError(f"resume={settings.resume!r} holds no checkpoints in {folder / CHECKPOINTS}")
    return found


def _new_run(settings: RunSettings) -> Found:
    folder = _folder_named(settings.run_name or default_run_name(settings, time.time()), settings.runs_dir)
    if folder.exists():
        raise _exists(folder)
    return Found(folder, begins=True)


def _folder_named(run_name: str, runs_dir: str) -> Path:
    """Raises ValueError where that is not inside runs_dir."""
    inside = os.path.normpath(run_name)
    if os.path.isabs(inside) or inside.split(os.sep)[0] in ("", os.curdir, os.pardir):
        raise ValueError(
            f"run_name={run_name!r} is no folder inside runs_dir={runs_dir!r}; to have it elsewhere, set runs_dir"
        )
    return Path(runs_dir) / run_name


def _exists(folder: Path) -> ValueError:
    return ValueError(
        f"the run folder {folder} exists already; choose another run_name, remove it, or go on in it with resume='auto'"
    )


def _newest_in(folder: Path, settings: RunSettings, enter: Callable[[Path], None]) -> Found:
    enter(folder)
    warnings: list[str] = []
    try:
        newest = CheckpointFolder(folder / CHECKPOINTS, settings.keep_checkpoints).newest(warnings.append)
    except RuntimeError as error:
        raise RuntimeError("\n".join([str(error), *warnings])) from error
    if newest is None:
        return Found(folder, begins=False)
    path, checkpoint = newest
    return Found(folder, begins=False, checkpoint=checkpoint, notes=(*warnings, _goes_on(path, checkpoint)))


def _goes_on(path: Path, checkpoint: Checkpoint) -> str:
    return f"going on from step {checkpoint.step:,} ({path})"


def _make_folder(folder: Path, settings: RunSettings) -> None:
    """Makes a run's folder. It appears with its content: if ranks are lost, there is none, or one that they find again.

    It is locked by then.

    Raises:
        ValueError: it exists already.
    """
    unfinished = folder.with_name(f"{_UNFINISHED}{uuid.uuid4().hex[:8]}")
    unfinished.mkdir(parents=True)
    lock = RunLock(unfinished)
    try:
        _write_settings(unfinished, settings)
        if folder.exists():  # renaming would take the place of an empty one
            raise _exists(folder)
        try:
            unfinished.rename(folder)
        except OSError as error:
            if not folder.exists():
                raise
            raise _exists(folder) from error  # somebody else was faster
        lock.moved_to(folder)
        _locks[folder] = lock
    except BaseException:
        lock.release()
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_settings(folder: Path, settings: RunSettings) -> None:
    """Leaves the settings in a run's folder, and by which launcher the ranks that work in it were started."""
    write_whole(folder / SETTINGS, dump_settings(replace(settings, resume=None)).encode())
    launcher = _launcher()
    if launcher:
        write_whole(folder / _LAUNCHER, launcher.encode())


def _launcher() -> str | None:
    """Names torch's elastic launcher that this rank was started by. It stays the same when it starts ranks again."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if run_id is None else f"{socket.gethostname()} {os.getppid()} {run_id}\n"


def _is_restart() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _folder_before_restart(settings: RunSettings) -> Path | None:
    """Finds the run's folder from before its ranks were started again, if they were."""
    files = _launcher_files(settings) if _is_restart() else []
    return max(files, key=lambda file: file.stat().st_mtime).parent if files else None


def _launcher_files(settings: RunSettings) -> list[Path]:
    """Finds those that name this rank's launcher."""
    runs = Path(settings.runs_dir)
    files = {file for file in runs.glob(f"*/{_LAUNCHER}") if not file.parent.name.startswith(_UNFINISHED)}
    if settings.run_name:
        files.add(_folder_named(settings.run_name, settings.runs_dir) / _LAUNCHER)
    folder = None if settings.resume in (None, "auto") else run_of(Path(settings.resume))
    if folder:
        files.add(folder / _LAUNCHER)
    launcher = _launcher()
    return [file for file in files if file.is_file() and file.read_text() == launcher]

"""A run's folder: its name, what lies in it, and going on where an earlier run stopped."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import fields, replace
from pathlib import Path

from fastsync.ppo.checkpoint import Checkpoint, CheckpointFolder, load_checkpoint
from fastsync.ppo.config import Settings
from fastsync.ppo.settings_file import dump_settings

CHECKPOINTS = "checkpoints"
SETTINGS = "settings.yaml"
_LAUNCHER = ".launcher"

# What another policy, or other observations, would follow from: weights that were learnt mean nothing then.
_FIXED = ("env", "network", "hidden_sizes", "activation", "lstm_size", "norm_observations")
# Where a run lies, rather than what it does.
_UNMENTIONED = ("resume", "run_name", "runs_dir")

Opened = tuple[Path, Checkpoint | None, list[str]]


def sync_name(settings: Settings) -> str:
    """How a run's gradients travel, such as "ddp" or "fastsync fp16"."""
    return settings.sync if settings.compression == "none" else f"{settings.sync} {settings.compression}"


def default_run_name(settings: Settings, started: float | None) -> str:
    """Environment, sync mode, seed, and the time, if one is given, in seconds since 1970."""
    env = settings.env.replace("/", "-").replace(":", "-")
    name = f"{env}-{sync_name(settings).replace(' ', '-')}-{settings.seed}"
    return name if started is None else f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}"


def make_run_folder(settings: Settings) -> Path:
    """Creates the folder of a run that begins.

    Raises:
        ValueError: it exists already.
    """
    folder = Path(settings.runs_dir) / (settings.run_name or default_run_name(settings, time.time()))
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(
            f"the run folder {folder} exists already; choose another run_name, remove it, or go on in it with "
            f"resume='auto'"
        ) from None
    return folder


def open_run(settings: Settings) -> Opened:
    """The folder of a run, what it goes on from, and what is to be said about it. One rank calls it.

    resume=None begins in a new folder. "auto" goes on in the folder of that name (without a time) if checkpoints are
    there, else begins in it. A run's folder goes on from its newest good checkpoint, a file among a run's checkpoints
    from that one; checkpoints of later steps are set aside. Any other checkpoint begins a new folder.

    Ranks that torch's elastic launcher has started again go on where they were before, whatever resume says.

    Returns:
        The folder, which holds settings.yaml; the checkpoint or None; sentences.

    Raises:
        ValueError: the folder of a new run exists, or what is to be resumed does not.
        RuntimeError: none of the checkpoints can be read.
    """
    folder, checkpoint, notes = _find(settings)
    (folder / SETTINGS).write_text(dump_settings(replace(settings, resume=None)))
    launcher = _launcher()
    if launcher:
        (folder / _LAUNCHER).write_text(launcher)
    return folder, checkpoint, notes


def changes(checkpoint: Checkpoint, settings: Settings, world_size: int) -> list[str]:
    """What is other than in the run that goes on, a sentence each.

    Raises:
        ValueError: environment or network are others, so that what was learnt is of no use.
    """
    old = checkpoint.settings
    for name in _FIXED:
        before, now = getattr(old, name), getattr(settings, name)
        if before != now:
            raise ValueError(
                f"{name}={now!r} cannot be resumed from a run with {name}={before!r}; resume with that value, or begin "
                f"a new run"
            )
    notes = list(checkpoint.notes)
    if checkpoint.world_size != world_size:
        notes.append(
            f"the run goes on with world size {world_size} after {checkpoint.world_size}: a batch of all ranks has "
            f"{world_size * settings.batch_size} rows after {checkpoint.world_size * old.batch_size}"
        )
    for field in fields(Settings):
        before, now = getattr(old, field.name), getattr(settings, field.name)
        if before != now and field.name not in _UNMENTIONED:
            notes.append(f"{field.name} is {now!r} from here on, after {before!r}")
    return notes


def _find(settings: Settings) -> Opened:
    folder = _folder_before_restart(settings)
    if folder:
        return _newest_in(folder, settings)
    if settings.resume is None:
        return make_run_folder(settings), None, []
    if settings.resume == "auto":
        folder = Path(settings.runs_dir) / (settings.run_name or default_run_name(settings, None))
        folder.mkdir(parents=True, exist_ok=True)
        return _newest_in(folder, settings)
    path = Path(settings.resume)
    if path.is_dir():
        opened = _newest_in(path, settings)
        if opened[1] is None:
            raise ValueError(f"resume={settings.resume!r} holds no checkpoints in {path / CHECKPOINTS}")
        return opened
    if not path.is_file():
        raise ValueError(f"resume={settings.resume!r} is neither 'auto', nor a run's folder, nor a checkpoint")
    checkpoint = load_checkpoint(path)
    if path.parent.name != CHECKPOINTS:
        return make_run_folder(settings), checkpoint, [_goes_on(path, checkpoint)]
    return _go_on(path.parent.parent, path, checkpoint, settings)


def _newest_in(folder: Path, settings: Settings) -> Opened:
    warnings: list[str] = []
    try:
        found = CheckpointFolder(folder / CHECKPOINTS, settings.keep_checkpoints).newest(warnings.append)
    except RuntimeError as error:
        raise RuntimeError("\n".join([str(error), *warnings])) from error
    if found is None:
        return folder, None, []
    folder, checkpoint, notes = _go_on(folder, *found, settings)
    return folder, checkpoint, warnings + notes


def _go_on(folder: Path, path: Path, checkpoint: Checkpoint, settings: Settings) -> Opened:
    notes = [_goes_on(path, checkpoint)]
    checkpoints = CheckpointFolder(folder / CHECKPOINTS, settings.keep_checkpoints)
    aside = checkpoints.set_aside(after=checkpoint.step)
    if aside:
        notes.append(f"set aside, as they are of later steps: {', '.join(renamed.name for renamed in aside)}")
    return folder, checkpoint, notes


def _goes_on(path: Path, checkpoint: Checkpoint) -> str:
    return f"going on from step {checkpoint.step:,} ({path})"


def _launcher() -> str | None:
    """Names torch's elastic launcher that this rank was started by. It stays the same when it starts ranks again."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if run_id is None else f"{socket.gethostname()} {os.getppid()} {run_id}\n"


def _folder_before_restart(settings: Settings) -> Path | None:
    """Where the run was before its ranks were started again, if they were."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    launcher = _launcher()
    folders = [path.parent for path in _launcher_files(settings) if path.read_text() == launcher]
    return max(folders, key=lambda folder: (folder / _LAUNCHER).stat().st_mtime, default=None)


def _launcher_files(settings: Settings) -> list[Path]:
    files = list(Path(settings.runs_dir).glob(f"*/{_LAUNCHER}"))
    if settings.resume not in (None, "auto"):
        path = Path(settings.resume)
        folder = path if path.is_dir() else path.parent.parent
        files += [folder / _LAUNCHER] if (folder / _LAUNCHER).is_file() else []
    return files

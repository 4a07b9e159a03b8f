"""A run's folder: its name, its lock, and resuming an earlier run."""

from __future__ import annotations

import errno
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from gymnasium import Space

from ..files import write_whole
from ..names import has_import_name
from ..settings import RunSettings, dump_settings
from .checkpoints import Checkpoint, CheckpointFolder, is_checkpoint_file, load_checkpoint

CHECKPOINTS = "checkpoints"
SETTINGS = "settings.yaml"

_HAS_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems that lack locks, such as Lustre without the option flock."""

# Settings that must not change: otherwise the saved state does not fit the policy, observations, or averages.
_FIXED = (
    "env", "env_kwargs", "policy", "network", "hidden_sizes", "activation", "recurrent", "action_distribution",
    "critic_keys", "norm_observations", "sync",
)  # fmt: skip
# Settings that name code of the user's. Another one must not come in by oversight.
_OWN_CODE = ("loss", "advantages")
# Settings that say where a run is stored, and whether it prints. No note tells that they differ.
_UNMENTIONED = ("resume", "run_name", "runs_dir", "quiet", "allow_other_loss")

# Settings that say how a run is carried out, and hardly what is learnt.
_OF_CARRYING_OUT = (
    *_UNMENTIONED, "total_steps", "vectorization", "log_info", "compression", "bucket_cap_mb", "device", "fused",
    "timeout", "on_lost_rank", "checkpoint_interval", "keep_checkpoints", "wandb_project", "eval_interval",
    "eval_episodes", "eval_env",
)  # fmt: skip

Opened = tuple[Path, Checkpoint | None, list[str]]
"""The run's folder, the checkpoint to resume from, and sentences to print."""


def default_run_name(settings: RunSettings, started: float | None) -> str:
    """Returns environment, compression, seed and, if given in seconds since 1970, the time.

    After the time comes the number of this process, because a loop in a shell starts several runs within a second.
    """
    name = re.sub("[/: ]", "-", f"{settings.env}-{settings.compression}-{settings.seed}")
    if started is None:
        return name
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}-{os.getpid()}"


def check_run(settings: RunSettings, world_size: int, spaces: tuple[Space[Any], Space[Any]] | None = None) -> None:
    """Checks whether the run can begin or resume, on the machine of rank 0, which has the run's folder.

    Args:
        settings: settings of the run.
        world_size: number of ranks.
        spaces: of observations and actions, if they are known.

    Raises:
        ValueError: as ``open_run``, or none of the checkpoints can be read. Or the checkpoint is of other spaces.
    """
    with ExitStack() as stack:
        try:
            _, checkpoint, _ = _find(settings, world_size, stack)
            if checkpoint is not None and spaces is not None:
                checkpoint.check_spaces(settings.env, *spaces)
        except RuntimeError as error:
            raise ValueError(f"resume={settings.resume!r}: {error}") from error


@contextmanager
def open_run(settings: RunSettings, world_size: int) -> Iterator[Opened]:
    """Opens the folder of a run, and locks it for a ``with`` block. Only rank 0 calls it.

    resume=None begins a run in a new folder. "auto" resumes from the newest good checkpoint in the folder, or begins
    there if it has none. The folder's default name then has no time. The path of a checkpoint begins a run in a new
    folder with its state. Restarted ranks always resume.

    Raises:
        ValueError: the folder of a new run exists, the checkpoint does not, another process trains in the folder, or
            the run cannot resume with these settings. Then nothing has been changed.
        RuntimeError: none of the checkpoints can be read.
    """
    with ExitStack() as stack:
        folder, checkpoint, notes = _find(settings, world_size, stack)
        if not folder.exists():
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise ValueError(f"the run folder {folder} cannot be written: {error.strerror}") from error
            stack.enter_context(locked(folder))
        # A run with this file as config resumes in this folder.
        own = replace(
            settings, resume=None, allow_other_loss=False, run_name=str(folder.relative_to(settings.runs_dir))
        )
        write_whole(folder / SETTINGS, dump_settings(own).encode())
        yield folder, checkpoint, notes


def _find(settings: RunSettings, world_size: int, stack: ExitStack) -> Opened:
    """Finds what ``open_run`` opens. It writes nothing, and locks an existing folder."""
    goes_on = settings.resume == "auto"
    source = None if goes_on or settings.resume is None else Path(settings.resume)
    if source and not (source.is_file() and is_checkpoint_file(source)):
        how = "to resume a run, use its settings.yaml as config, and resume='auto'"
        raise ValueError(f"resume={settings.resume!r} is neither 'auto' nor a checkpoint; {how}")
    name = settings.run_name or default_run_name(settings, None if goes_on else time.time())
    folder = _named(name, settings.runs_dir)
    if folder.exists():
        if not goes_on and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            how = "choose another run_name, remove it, or resume it with resume='auto'"
            raise ValueError(f"the run folder {folder} exists already; {how}")
        stack.enter_context(locked(folder))
    notes: list[str] = []
    try:
        found = CheckpointFolder(folder / CHECKPOINTS).newest(notes.append)
    except RuntimeError as error:
        raise RuntimeError("\n".join([str(error), *notes])) from error
    if found is None and source:
        found = source, replace(load_checkpoint(source), best_return=-math.inf)  # this folder has no best one yet
    if found is None:
        if (folder / SETTINGS).exists():  # a run has begun here
            notes.append(f"{folder} has no checkpoint to resume from: the run begins anew")
        return folder, None, notes
    path, checkpoint = found
    notes.append(f"resuming from step {checkpoint.step:,} ({path})")
    return folder, checkpoint, [*notes, *changes(checkpoint, settings, world_size)]


def _named(run_name: str, runs_dir: str) -> Path:
    """Returns the folder of that name. Raises ValueError if it is not inside runs_dir, or cannot be written here."""
    inside = os.path.normpath(run_name)
    if os.path.isabs(inside) or inside.split(os.sep)[0] in ("", os.curdir, os.pardir):
        raise ValueError(
            f"run_name={run_name!r} is not inside runs_dir={runs_dir!r}; to store the run elsewhere, set runs_dir"
        )
    folder = Path(runs_dir) / run_name
    try:
        os.fsencode(str(folder).encode("utf-8").decode("utf-8"))
    except UnicodeEncodeError:  # the locale knows ASCII only
        raise ValueError(
            f"the run folder {str(folder)!a} has letters that this locale has not: it is "
            f"{sys.getfilesystemencoding()}; set PYTHONUTF8=1, or choose another run_name or runs_dir"
        ) from None
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a run's folder for a ``with`` block. The lock ends with the process, however it ends.

    Raises:
        ValueError: another process trains there.
    """
    # Else newer versions of filelock take a marker where the file system has no locks, and a killed process leaves it.
    strict: dict[str, Any] = {"fallback_to_soft": False} if hasattr(FileLock, "fallback_to_soft") else {}
    lock = FileLock((folder / ".lock").absolute(), timeout=0, **strict)
    try:
        lock.acquire()
    except Timeout:
        in_use = f"the run folder {folder} is in use: another process trains there"
        raise ValueError(f"{in_use}; wait for its end, stop it, or choose another run_name") from None
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _HAS_NO_LOCKS:
            raise ValueError(f"the run folder {folder} cannot be written: {error.strerror}") from error
        warnings.warn(f"{folder} cannot be locked: make sure that no other process trains there", stacklevel=2)
    try:
        yield
    finally:
        lock.release()


def learns_otherwise(checkpoint: Checkpoint, settings: RunSettings) -> bool:
    """Returns whether the policy learns by other settings from here on than those of the checkpoint."""
    old = checkpoint.settings_as(type(settings))
    names = (field.name for field in fields(settings) if field.name not in _OF_CARRYING_OUT)
    return any(getattr(old, name) != getattr(settings, name) for name in names)


def changes(checkpoint: Checkpoint, settings: RunSettings, world_size: int) -> list[str]:
    """Returns a sentence for each setting that differs from the checkpoint's.

    Raises:
        ValueError: environment or network differ, so the checkpoint's weights are of no use. Or loss or advantages
            differ, and the settings do not allow it.
    """
    old = checkpoint.settings_as(type(settings))
    unknown = sorted(checkpoint.settings.keys() - settings.as_dict().keys())
    notes = [f"{name} is no setting here, it was {checkpoint.settings[name]!r}" for name in unknown]
    if checkpoint.world_size != world_size:
        notes.append(f"the world size is {world_size} from here on, it was {checkpoint.world_size}")
    for field in fields(settings):
        name, before, now = field.name, getattr(old, field.name), getattr(settings, field.name)
        if before == now or name in _UNMENTIONED:
            continue
        if "loss" not in checkpoint.settings and name in ("policy", *_OWN_CODE) and before is None:
            continue  # older versions did not note what a script passed
        if name in _OWN_CODE and not settings.allow_other_loss:
            option = f"--{name} {before}" if before is not None else f"no --{name}"
            way = _by_script(before) or f"resume with {option}, use the run's settings.yaml as config"
            raise ValueError(
                f"{name}={now!r} would resume a run with {name}={before!r}; {way}, or set allow_other_loss to go on "
                "with another one"
            )
        if name in _FIXED:
            way = (_by_script(before) if name == "policy" else None) or "resume with that value"
            raise ValueError(f"{name}={now!r} cannot resume a run with {name}={before!r}; {way}, or begin a new run")
        notes.append(f"{name} is {now!r} from here on, it was {before!r}")
    return notes


def _by_script(own_code: str | None) -> str | None:
    """Returns how to resume with code of the user's that no option can name; None if one can."""
    if own_code is None or has_import_name(own_code):
        return None
    return "resume by the script that passed it, with the same arguments"

"""The trainer's command line: ``fastsync train``, and ``python -m fastsync.ppo`` on one rank.

Settings come from a YAML file or a preset. Options on the command line override them.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed
import tyro
from gymnasium import Space
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..distributed import process_group
from ..doctor import install_command
from ..integrations.ray import launch_on_ray
from ..launch.environment import this_rank
from ..launch.options import read_options
from ..launch.supervisor import launch_survivors
from ..launch.torchrun import launch_ranks
from ..messages import check_at_least
from .envs.make import make_one
from .evaluation import Evaluator
from .names import kept_folder, resolve
from .policies import try_policy
from .ppo import Settings, train
from .runs.checkpoints import CheckpointFolder
from .runs.folder import CHECKPOINTS, SETTINGS, check_run, default_run_name
from .runs.loggers import check_wandb
from .settings import file_words, preset_names, words_of
from .whole_numbers import WHOLE_NUMBERS

STOPPED = 128 + 15
"""Exit status of a training that saved and ended because of a signal. Shells give this status for SIGTERM."""

SYNONYMS = {
    "--lr": "--learning-rate",
    "--env-id": "--env",
    "--total-timesteps": "--total-steps",
    "--n-envs": "--num-envs",
    "--n-steps": "--num-steps",
    "--n-epochs": "--num-epochs",
    "--update-epochs": "--num-epochs",
    "--nproc-per-node": "--nproc",
}
"""Options of CleanRL, Stable-Baselines3 and torchrun, and ours that mean the same."""
_AFTERWARDS = "a training shows nothing but figures; afterwards `fastsync eval RUN {}` {}"
ELSEWHERE = {
    "--render": _AFTERWARDS.format("--render", "plays the policy in a window"),
    **dict.fromkeys(
        ("--capture-video", "--video"), _AFTERWARDS.format("--video FOLDER", "writes videos of the policy")
    ),
    "--backend": "the device decides it: --device cuda takes NCCL, and --device cpu takes fastsync",
    "--no-norm-advantages": "write --norm-advantages none",
    "--track": "name a project of Weights & Biases, by --wandb-project",
}
"""What to use in place of options that a training does not have."""
ONE_RANK = (
    "this command is one rank; `fastsync train --nproc N` starts N, and so does "
    "`torchrun --nproc-per-node N -m fastsync.ppo`"
)
"""What to use in place of --nproc where it starts nothing."""

Command = TypeVar("Command")


def parse(command: type[Command], prog: str, arguments: Sequence[str] | None) -> Command:
    """Reads a command line. Errors of single options end the process with status 2 and one message.

    Args:
        command: a dataclass with a field ``settings``, of Settings, and a field ``config``, a file or preset.
        prog: the name of the command, for messages.
        arguments: the words after it; by default those of this process.

    Raises:
        ValueError: the file of settings is none, or settings are refused.
    """
    starts_ranks = "nproc" in {option.name for option in fields(command)}  # type: ignore[arg-type]
    elsewhere = ELSEWHERE if starts_ranks else ELSEWHERE | {"--nproc": ONE_RANK}
    words = understood(prog, sys.argv[1:] if arguments is None else arguments, elsewhere)
    finder = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    for option in ("--config", "--nproc", "--nodes"):
        finder.add_argument(option)
    finder.add_argument("--micro-batches", "--micro_batches")
    found = finder.parse_known_args(words)[0]
    num_ranks = _product(found.nodes, found.nproc) if starts_ranks else this_rank().world_size
    if found.micro_batches not in (None, "None"):  # counts are those of all ranks
        num_ranks = 1
    file_options = [] if found.config is None else file_words(found.config, num_ranks)
    # The last value of an option wins.
    words = [*understood(prog, file_options, elsewhere), *words]
    return read_options(command, prog, words, config=(tyro.conf.OmitArgPrefixes,), registry=WHOLE_NUMBERS)


def _product(*numbers: str | None) -> int:
    """Of those that are given, as far as they are numbers. What is wrong with the others is said later."""
    return math.prod(max(1, int(number)) for number in numbers if number and number.isdecimal())


def say_which_settings(prog: str, config: str | None, settings: Settings) -> None:
    """Says which settings a training has that nobody has chosen any for."""
    if config is None and settings.resume is None and not settings.quiet:
        preset = f"--config {settings.env} has" if settings.env in preset_names() else "--config FILE has"
        print(
            f"{prog}: without --config the settings are CleanRL's general ones, of its ppo.py, on each rank; "
            f"{preset} others",
            file=sys.stderr,
        )


def understood(prog: str, words: Sequence[str], elsewhere: Mapping[str, str]) -> list[str]:
    """Puts our names of options in place of those that other trainers have.

    An option of ``elsewhere`` belongs to another command. It ends the process with its message.
    """
    known = []
    for word in words:
        option, equals, value = word.partition("=")
        name = option.replace("_", "-")
        name = SYNONYMS.get(name, name)
        if name in elsewhere:
            print(f"{prog}: {option}: {elsewhere[name]}", file=sys.stderr)
            sys.exit(2)
        known.append(f"{name}{equals}{value}" if name in SYNONYMS.values() else word)
    return known


@dataclass(frozen=True)
class Arguments:
    """Train a policy with PPO, as the only rank or as one of torchrun's."""

    config: str | None = None
    """A YAML file of settings, or a preset: Acrobot-v1, Atari, CartPole-v1, HalfCheetah-v5, Hopper-v5, LunarLander-v3,
    Pendulum-v1. Other options override it. The ranks share a preset's environments or steps."""
    settings: Settings = field(default_factory=Settings)


def train_rank(settings: Settings) -> str | None:
    """Trains as the rank that torchrun's environment variables tell, or as the only one.

    Returns:
        The name of the signal that stopped the training early, or None.
    """
    with process_group(settings.timeout, backend=settings.backend) as device:
        # All ranks take rank 0's settings, because only rank 0 has to see the run's folder.
        shared_settings = [settings]
        torch.distributed.broadcast_object_list(shared_settings)
        return train(shared_settings[0], device)[1].stopped_by


@dataclass(frozen=True)
class Launch(Arguments):
    """Train a policy with PPO on one or more ranks of this machine, or of Ray's cluster. Each rank is a process."""

    nproc: int = 1  # Number of ranks.
    launcher: Literal["torchrun", "ray"] = "torchrun"
    """torchrun: this command starts the ranks. ray: Ray starts them on its cluster, which must share runs_dir."""
    max_restarts: int = 0  # How often to restart the job from its last checkpoint after a rank is lost.
    stop_timeout: float = 120.0  # Seconds that ranks have to finish their update and save when they are asked to stop.

    def __post_init__(self) -> None:
        check_at_least(self, nproc=1, max_restarts=0)
        if not self.stop_timeout > 0:
            raise ValueError(f"stop_timeout={self.stop_timeout} must be more than 0 seconds")
        if self.launcher == "ray" and self.settings.resume not in (None, "auto"):
            raise ValueError(
                f"resume={self.settings.resume!r}: launcher='ray' resumes with resume='auto' only; set run_name"
            )
        if self.settings.on_lost_rank == "continue":
            if self.launcher == "ray":
                raise ValueError(
                    "on_lost_rank='continue': Ray ends all ranks when one is lost; leave out launcher='ray'"
                )
            if self.max_restarts:
                raise ValueError(
                    f"max_restarts={self.max_restarts} starts all ranks again when one is lost, and with "
                    "on_lost_rank='continue' the others go on; leave one of them out"
                )


def check_device(settings: Settings, num_ranks: int = 1) -> None:
    """Checks that this machine has GPUs for so many ranks if they are to compute on GPUs.

    Raises:
        ValueError: there are too few. Ranks may share GPUs only if NCCL_MULTI_RANK_GPU_ENABLE is 1.
    """
    num_gpus = torch.cuda.device_count()
    needed = 1 if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else num_ranks
    if settings.device == "cuda" and num_gpus < needed:
        found = f"torch sees {num_gpus} GPU(s) here, and each of {num_ranks} rank(s) takes one"
        raise ValueError(f"device='cuda': {found}; start fewer ranks, or set device to 'cpu' or 'auto'")


def check_environment(settings: Settings) -> tuple[Space[Any], Space[Any]]:
    """Tries environment and policy, and finds the functions that the settings name, before ranks start.

    Returns:
        The spaces of observations and actions.

    Raises:
        ValueError: the environment, the policy, a function or an extra is missing or does not suit.
    """
    check_wandb(settings.wandb_project)
    resolve(settings)
    rows_per_pass = (
        settings.envs_together * settings.num_steps // (settings.num_minibatches * settings.num_micro_batches)
    )
    with kept_folder(), make_one(settings) as environments:
        if settings.eval_interval:
            Evaluator(settings, environments).check()
        spaces = environments.single_observation_space, environments.single_action_space
        with _playing(settings):
            observations = torch.as_tensor(environments.reset(), device="cpu")
        actions = try_policy(settings, *spaces, observations, rows_per_pass)
        with _playing(settings):
            environments.step(actions.numpy())
    return spaces


@contextmanager
def _playing(settings: Settings) -> Iterator[None]:
    """Names the environment in errors that it raises inside a ``with`` block."""
    try:
        yield
    except Exception as error:  # any error of the user's environment
        raise ValueError(
            f"env={settings.env!r} cannot be played: {type(error).__name__}: {error}; reset(seed=...) must return "
            "(observation, info), step(action) must return (observation, reward, terminated, truncated, info), and "
            "observations must belong to observation_space"
        ) from error


def launch(options: Launch, work: Callable[[Settings], str | None] = train_rank) -> int:
    """Trains on all ranks.

    Args:
        options: the command line.
        work: called on each rank with the settings, as ``train_rank``.

    Returns:
        The exit status: 0; 1 if a rank failed, after torchrun's report and a sentence with rank and reason, or if all
        were lost that may go on without others; 143 if a signal stopped the training, after a message how to resume;
        130 if that was Ctrl-C.

    Raises:
        ValueError: the settings cannot work here, or the run cannot begin or resume. This is checked before ranks
            start, so that the error comes only once.
    """
    settings = options.settings
    if settings.run_name is None and settings.resume != "auto":
        # The name includes the time of this start, so that restarted ranks find the run.
        settings = replace(settings, run_name=default_run_name(settings, time.time()))
    if options.launcher == "torchrun":
        check_device(settings, options.nproc)
    settings.parts_of(0, options.nproc)  # raises an error if some ranks would have none
    check_run(settings, options.nproc, check_environment(settings))
    say_which_settings("fastsync train", options.config, settings)
    if options.max_restarts and settings.resume is None:
        settings = replace(settings, resume="auto")  # for restarted ranks
    if sys.stderr.isatty() and not settings.quiet:  # for they take seconds before they show anything
        print(f"fastsync train: starting {options.nproc} {'rank' if options.nproc == 1 else 'ranks'}", file=sys.stderr)
    if options.launcher == "ray":
        return _launch_on_ray(options, settings, work)
    # torchrun's messages about signals and failed ranks would repeat what is printed below.
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    is_told = logging.ERROR if options.max_restarts else logging.CRITICAL
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(is_told)
    killed = list[str]()
    stopping: dict[str, Any] = {"max_restarts": options.max_restarts, "stop_timeout": options.stop_timeout}
    told: dict[str, Any] = {"say": lambda text: print(f"fastsync train: {text}", file=sys.stderr), "killed": killed}
    try:
        if settings.on_lost_rank == "continue":
            stopped_by = launch_survivors(work, options.nproc, settings, stop_timeout=options.stop_timeout)
            if not stopped_by:
                print(f"fastsync train: all ranks are lost{_how_to_resume(options, settings)}", file=sys.stderr)
                return 1
        else:
            stopped_by = launch_ranks(work, options.nproc, settings, **stopping, **told)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message: Any = failure.message  # a dict if the rank has raised, a string if its process has died
        reason = message["message"] if isinstance(message, dict) else message
        ended = f"SIGKILL ended {' and '.join(killed)}; " if killed else ""
        print(f"{error}\nfastsync train: {ended}torchrun saw rank {rank} fail first: {reason}", file=sys.stderr)
        return 1
    except SignalException as error:
        ended_by = signal.Signals(error.sigval)
        more = " (later steps are lost; SIGTERM saves first)"
        print(f"fastsync train: ended by {ended_by.name}{_how_to_resume(options, settings, more)}", file=sys.stderr)
        return 128 + ended_by
    reasons = [reason for reason in stopped_by if reason]
    if reasons:
        # A rank that got no signal itself only knows that another rank got one.
        reason = next((reason for reason in reasons if reason in signal.Signals.__members__), reasons[0])
        print(f"fastsync train: stopped by {reason}{_how_to_resume(options, settings)}", file=sys.stderr)
        return STOPPED
    return 0


def _launch_on_ray(options: Launch, settings: Settings, work: Callable[[Settings], str | None]) -> int:
    """Trains on Ray's workers, as ``launch``. Restarted workers resume from the last checkpoint."""
    try:
        from ray.train import TrainingFailedError
    except ImportError:
        raise ValueError(f"launcher='ray' needs Ray: {install_command('ray')}") from None
    settings = replace(settings, runs_dir=str(Path(settings.runs_dir).absolute()), resume="auto")
    use_gpu = None if settings.device == "auto" else settings.device == "cuda"
    limits: dict[str, Any] = {"max_restarts": options.max_restarts, "timeout": settings.timeout}
    try:
        launch_on_ray(work, options.nproc, settings, use_gpu=use_gpu, **limits)
    except TrainingFailedError as error:
        print(f"fastsync train: {error}", file=sys.stderr)
        return 1
    return 0


def _how_to_resume(options: Launch, settings: Settings, more: str = "") -> str:
    """Returns the end of a message: the newest checkpoint, the command that resumes from it, and ``more``.

    Or that there is no checkpoint.
    """
    folder = Path(settings.runs_dir) / (settings.run_name or default_run_name(settings, None))
    checkpoints = CheckpointFolder(folder / CHECKPOINTS).by_step()
    if not checkpoints:
        return f" before {folder} had a checkpoint"
    words = [*option_words(options, "settings", "config"), "--config", str(folder / SETTINGS), "--resume", "auto"]
    return f". Resume from {checkpoints[-1]} with: fastsync train {shlex.join(words)}{more}"


def option_words(options: Any, *others: str) -> list[str]:
    """Returns command-line options for the fields that differ from their defaults, except ``others``."""
    names = [option.name for option in fields(options) if getattr(options, option.name) != option.default]
    return words_of({name: getattr(options, name) for name in names if name not in others})

"""``fastsync eval``: plays episodes with a trained policy."""

from __future__ import annotations

import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium.wrappers import RecordVideo

from ..doctor import install_command
from ..launch.options import read_options
from ..messages import check_at_least
from .envs.interface import EnvironmentFailedError, Environments
from .envs.lookup import Env
from .evaluation import MAX_STEPS, check_same_spaces, kept_generators, make_players, play
from .json_objects import JSON_OBJECT
from .names import kept_folder, look_in
from .policies import Policy, make_policy
from .ppo import Settings
from .runs.checkpoints import BEST, Checkpoint, CheckpointFolder, is_checkpoint_file, load_checkpoint
from .runs.figures import format_return
from .runs.folder import CHECKPOINTS
from .runs.metrics import returns_of
from .whole_numbers import WHOLE_NUMBERS

LISTED = 5
"""The most runs that an error names."""


@dataclass(frozen=True)
class Evaluate:
    """Play episodes with a trained policy, by its likeliest actions, and print their mean return."""

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """The folder of a run, which stands for its best checkpoint, or a checkpoint. Without it the runs are listed."""
    newest: bool = False  # Play the newest checkpoint of the run, and not the best.
    env: str | None = None  # Environment to play in, such as the run's eval_env. By default that of the training.
    env_kwargs: Annotated[dict[str, Any] | None, JSON_OBJECT] = None
    """Arguments of the environment, as JSON: '{"continuous": true}'. By default those of the training."""
    episodes: int = 10  # Number of episodes.
    seed: int = 0  # Seeds episodes.
    max_steps: int = MAX_STEPS  # Steps after which a running episode is cut. It counts with its return so far.
    render: bool = False  # Show the episodes in a window.
    video: str | None = None  # Folder to write a video of each episode to, as mp4.

    def __post_init__(self) -> None:
        check_at_least(self, episodes=1, seed=0, max_steps=1)
        if self.render and self.video is not None:
            raise ValueError("render and video exclude each other: an environment draws in a window, or into a file")


def main(arguments: Sequence[str]) -> int:
    """Runs the command and prints the result.

    Returns:
        The exit status: 0, or 1 if the checkpoint is damaged, or if the environment fails. Without a run it is 0, after
        commands for the runs in this folder.

    Raises:
        ValueError: no checkpoint is found, its environment or policy cannot be made, or a package is missing.
    """
    options = read_options(Evaluate, "fastsync eval", arguments, registry=WHOLE_NUMBERS)
    if options.checkpoint is None:
        if not (found := newest_runs()):
            raise ValueError(f"say which run to play; {runs_here('eval')}")
        print("\n".join(_commands("eval", found)))
        return 0
    path, here = Path(options.checkpoint).expanduser(), Path.cwd()
    look_in(here)  # also for the policy's module, if the environment leaves the working folder
    try:
        file, checkpoint = find_checkpoint(path, newest=options.newest)
    except RuntimeError as error:
        _say(str(error))
        return 1
    mode = "rgb_array" if options.video else "human" if options.render else None
    if options.video:  # SDL would look for a screen, and complain that XDG_RUNTIME_DIR is invalid
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    with make_environment(
        checkpoint, path, env=options.env, env_kwargs=options.env_kwargs, seed=options.seed, render_mode=mode,
        video=None if options.video is None else str(here / Path(options.video).expanduser()),
    ) as environment:  # fmt: skip
        for sentence in environment.notes:
            _say(sentence)
        if options.env is not None or options.env_kwargs is not None:
            _check_suits(checkpoint, environment, options)
        policy = restore_policy(checkpoint, path, environment, options.env)
        try:
            episodes = play(policy, environment, options.episodes, max_steps=options.max_steps, say=_say)
        except EnvironmentFailedError as error:
            # Environments import what draws only when they draw.
            if mode is not None and isinstance(error.__cause__, gymnasium.error.DependencyNotInstalled):
                raise ValueError(f"{error.__cause__}; install what drawing needs: {install_command('video')}") from None
            traceback.print_exception(error.__cause__)  # where in the user's code
            _say(str(error))
            return 1
    returns, name = np.array(returns_of(episodes)), "episode" if len(episodes) == 1 else "episodes"
    length = np.mean([episode.length for episode in episodes])
    mean_return, std = format_return(returns.mean(), 2), format_return(returns.std(), 2)
    which = f"after {checkpoint.step:,} steps{', the best checkpoint' if file.name == BEST else ''}"
    print(
        f"{options.env or checkpoint.settings['env']} {which}, likeliest actions: return {mean_return} "
        f"± {std} over {len(episodes)} {name} of {length:.1f} steps"
    )
    if options.video:
        print(f"videos: {options.video}")
    return 0


def _check_suits(checkpoint: Checkpoint, environment: Environments, options: Evaluate) -> None:
    """Checks that the options' environment has the spaces of the training's, if that can be made here."""
    settings = checkpoint.settings_as(Settings)
    try:
        with kept_generators(torch.device("cpu")):  # the environment to play in has been seeded
            training = make_players(settings.env, settings.env_kwargs, seed=0, critic_keys=settings.critic_keys)
    except ValueError:  # its module or package is missing; the weights still have to fit
        return
    with training:
        kwargs = "" if options.env_kwargs is None else f" with env_kwargs={options.env_kwargs}"
        name = f"env={settings.env if options.env is None else options.env!r}{kwargs}"
        check_same_spaces(environment, (training.single_observation_space, training.single_action_space), name)


def _say(sentence: str) -> None:
    print(f"fastsync eval: {sentence}", file=sys.stderr)


def load_policy(run_or_checkpoint: str | Path, *, newest: bool = False) -> Policy:
    """Loads a trained policy onto the CPU, in eval mode. Its method ``act`` chooses actions.

    Args:
        run_or_checkpoint: the folder of a run, such as ``runs/NAME``, or a checkpoint in it.
        newest: take the newest checkpoint of the run, and not the best.

    Raises:
        ValueError: there is no checkpoint, or its environment or policy cannot be made here.
        RuntimeError: the checkpoint is damaged.

    Warns:
        UserWarning: the environment normalises by statistics that the checkpoint does not have.
    """
    path = Path(run_or_checkpoint).expanduser()
    _, checkpoint = find_checkpoint(path, newest=newest)
    # Making an environment seeds what the user's code may draw from.
    kept = kept_folder(), kept_generators(torch.device("cpu"))
    with kept[0], kept[1], make_environment(checkpoint, path, seed=0) as environment:
        for note in environment.notes:
            warnings.warn(note.removeprefix("warning: "), stacklevel=2)
        return restore_policy(checkpoint, path, environment).eval()


def find_checkpoint(path: Path, *, newest: bool = False) -> tuple[Path, Checkpoint]:
    """Reads a checkpoint file, or the best good one in the folder of a run, or the newest. Returns it with its file.

    Raises:
        ValueError: there is no checkpoint.
        RuntimeError: the file is damaged, or all files of the run are.
    """
    if path.is_file():
        if not is_checkpoint_file(path):
            raise ValueError(
                f"checkpoint={str(path)!r} is a file, but no checkpoint of fastsync; they are in the folder of a run, "
                f"such as runs/NAME/{CHECKPOINTS}/best.pt; {runs_here('eval')}"
            )
        return path, load_checkpoint(path)
    folder = CheckpointFolder(path if path.name == CHECKPOINTS else path / CHECKPOINTS)

    def warn(warning: str) -> None:
        print(warning, file=sys.stderr)

    found = (None if newest else folder.best(warn)) or folder.newest(warn)
    if found is None:
        named = Path(Settings.runs_dir) / path
        offer = (
            f"`{shlex.join(['fastsync', 'eval', str(named)])}` plays the run of that name; "
            if (named / CHECKPOINTS).is_dir()
            else ""
        )
        raise ValueError(
            f"checkpoint={str(path)!r} is neither a checkpoint nor the folder of a run that has one; "
            f"{offer}{runs_here('eval')}"
        )
    return found


def runs_here(verb: str) -> str:
    """Returns the end of a message: commands with this verb for the newest runs in this folder."""
    found = newest_runs()
    if not found:
        return f"the folder {Settings.runs_dir!r} has none here: `fastsync train` makes one"
    more = [f"… and {len(found) - LISTED} more"] if len(found) > LISTED else []
    return "\n  ".join(["the newest here:", *_commands(verb, found[:LISTED]), *more])


def _commands(verb: str, runs: Sequence[Path]) -> list[str]:
    return [shlex.join(["fastsync", verb, str(each)]) for each in runs]


def newest_runs() -> list[Path]:
    """Returns the folders of the runs in this folder that have checkpoints, newest first."""
    found = Path(Settings.runs_dir).glob(f"**/{CHECKPOINTS}")
    return [each.parent for each in sorted(found, key=lambda folder: folder.stat().st_mtime, reverse=True)]


def make_environment(
    checkpoint: Checkpoint,
    path: Path,
    *,
    seed: int,
    env: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    video: str | None = None,
) -> Environments:
    """Makes one environment like those of the training.

    Args:
        checkpoint: the checkpoint.
        path: where it is, for messages.
        env, env_kwargs: another environment, and its arguments; by default those of the training.
        seed: seeds the episodes.
        render_mode: gymnasium's.
        video: the folder for videos, if any.

    Raises:
        ValueError: it cannot be made here.
    """
    settings = checkpoint.settings_as(Settings)
    env = settings.env if env is None else env
    kwargs = settings.env_kwargs if env_kwargs is None else env_kwargs

    def wrap(made: Env) -> Env:
        if render_mode is not None and made.render_mode != render_mode:
            raise ValueError(
                f"env={env!r} cannot be drawn: its render_mode is {made.render_mode!r}, not {render_mode!r}"
            )
        return made if video is None else _recorded(made, video, re.sub("[/: ]", "-", env))

    try:
        return make_players(
            env, kwargs, seed=seed, wrap=wrap, render_mode=render_mode, critic_keys=settings.critic_keys
        )
    except ValueError as error:
        raise ValueError(f"{error}{_where_it_was(checkpoint, path, env)}") from error


def _recorded(env: Env, folder: str, name: str) -> Env:
    try:
        return RecordVideo(env, folder, episode_trigger=lambda number: True, name_prefix=name)
    except gymnasium.error.DependencyNotInstalled:
        raise ValueError(f"video={folder!r} needs MoviePy: {install_command('video')}") from None
    except OSError as error:
        raise ValueError(f"video={folder!r} cannot be written: {error.strerror}") from error


def restore_policy(checkpoint: Checkpoint, path: Path, environment: Environments, env: str | None = None) -> Policy:
    """Makes the policy of a checkpoint, on the CPU, for an environment like that of the training.

    Args:
        checkpoint: the checkpoint.
        path: where it is, for messages.
        environment: the environment.
        env: its name, if it is another than in the training.

    Raises:
        ValueError: the class of the policy cannot be imported, or the weights do not fit it. Or the environment has
            other shapes than in the training.
    """
    settings = checkpoint.settings_as(Settings)
    spaces = environment.single_observation_space, environment.single_action_space
    try:
        policy = make_policy(settings, *spaces)
    except ValueError as error:
        raise ValueError(f"{error}{_where_it_was(checkpoint, path, settings.policy)}") from error
    checkpoint.check_spaces(settings.env if env is None else env, *spaces)
    try:
        policy.load_state_dict(checkpoint.learner["model"])
    except RuntimeError as error:
        raise ValueError(
            "the checkpoint's weights do not fit the policy in its settings. If a script has trained a class of its "
            "own with train(policy=...), name it in the settings instead, as Settings(policy='module:Class')"
        ) from error
    return policy


def _where_it_was(checkpoint: Checkpoint, path: Path, name: str | None) -> str:
    """Returns the end of a message about "module:name": the folder that the training ran in, if the module is there."""
    module = (name or "").rpartition(":")[0]
    runs_dir = Path(str(checkpoint.settings.get("runs_dir", Settings.runs_dir)))
    run = path.absolute() if path.is_dir() else path.absolute().parent.parent
    if not module or runs_dir.is_absolute():
        return ""
    for folder in run.parents:
        if folder.samefile(os.getcwd()) or not run.is_relative_to(folder / runs_dir):
            continue
        file = folder / module if module.endswith(".py") else folder.joinpath(*module.split("."))
        if file.with_suffix(".py").exists() or file.is_dir():
            return (
                f". It was trained in {folder}, which has the module {module}: run this command there, or set "
                f"PYTHONPATH={shlex.quote(str(folder))}"
            )
    return ""

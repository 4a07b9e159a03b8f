"""``fastsync eval``: plays episodes with a trained policy."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from .._checks import check_at_least
from .envs.interface import Environments, Episode, seed_globals
from .envs.lookup import find_env, notes_on
from .envs.vector import EpisodeRecorder, RecordedEnvironments
from .policies import Policy, in_eval_mode, make_policy
from .ppo import Settings
from .runs.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint
from .runs.folder import CHECKPOINTS
from .runs.metrics import returns_of
from .whole_numbers import WHOLE_NUMBERS

UNSEEN = 2**31
"""Number of the evaluation's environment. No training environment has it, so the episodes are new."""

PROGRESS_SECONDS = 10.0
"""The seconds between messages about the progress."""

LISTED = 5
"""The most runs that a message names."""


@dataclass(frozen=True)
class Evaluate:
    """Play episodes with a trained policy, by its likeliest actions, and print their mean return."""

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")] = None
    """A checkpoint, or the folder of a run, which stands for its newest checkpoint. Without it the runs are listed."""
    episodes: int = 10  # Number of episodes.
    seed: int = 0  # Seeds episodes.
    max_steps: int = 100_000  # Steps after which a running episode is cut. It counts with its return so far.

    def __post_init__(self) -> None:
        check_at_least(self, episodes=1, seed=0, max_steps=1)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and prints the result.

    Returns:
        The exit status: 0, or 1 if the checkpoint is damaged.

    Raises:
        ValueError: no checkpoint is named or found, or its environment cannot be made.
    """
    options = tyro.cli(Evaluate, prog="fastsync eval", args=arguments, registry=WHOLE_NUMBERS)
    if options.checkpoint is None:
        raise ValueError(f"say which run to play; {_runs_here()}")
    try:
        checkpoint = find_checkpoint(Path(options.checkpoint))
    except RuntimeError as error:
        _say(str(error))
        return 1
    with make_environment(checkpoint, seed=options.seed) as environment:
        for sentence in environment.notes:
            _say(sentence)
        policy = load_policy(checkpoint, environment)
        episodes = play(policy, environment, options.episodes, max_steps=options.max_steps, say=_say)
    returns, name = np.array(returns_of(episodes)), "episode" if len(episodes) == 1 else "episodes"
    length = np.mean([episode.length for episode in episodes])
    print(
        f"{checkpoint.settings['env']} after {checkpoint.step:,} steps, likeliest actions: return {returns.mean():.2f} "
        f"± {returns.std():.2f} over {len(episodes)} {name} of {length:.1f} steps"
    )
    return 0


def _say(sentence: str) -> None:
    print(f"fastsync eval: {sentence}", file=sys.stderr)


def find_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint file, or the newest good one in the folder of a run.

    Raises:
        ValueError: there is no checkpoint.
        RuntimeError: the file is damaged, or all files of the run are.
    """
    if path.is_file():
        return load_checkpoint(path)
    newest = CheckpointFolder(path / CHECKPOINTS).newest(lambda warning: print(warning, file=sys.stderr))
    if newest is not None:
        return newest[1]
    raise ValueError(
        f"checkpoint={str(path)!r} is neither a checkpoint nor the folder of a run that has one; {_runs_here()}"
    )


def _runs_here() -> str:
    """Returns the end of a message: commands that play the newest runs in this folder."""
    home = Settings.runs_dir
    found = sorted(Path(home).glob(f"**/{CHECKPOINTS}"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    if not found:
        return f"the folder {home!r} has none here: `fastsync train` makes one"
    return "\n  ".join(
        ["the newest here:", *(shlex.join(["fastsync", "eval", str(each.parent)]) for each in found[:LISTED])]
    )


def make_environment(checkpoint: Checkpoint, *, seed: int) -> Environments:
    """Makes one environment like those of the training.

    Raises:
        ValueError: it cannot be made here.
    """
    seed_globals(seed, UNSEEN)
    settings = checkpoint.settings_as(Settings)
    source = find_env(settings.env, settings.env_kwargs)
    source, made = source.explored()
    notes = notes_on(source.name, made)
    makers = [lambda: EpisodeRecorder(made, seed=seed, index=UNSEEN)]
    vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
    return RecordedEnvironments(vector, first_index=0, counts_games=source.is_atari, notes=notes)


def load_policy(checkpoint: Checkpoint, environment: Environments) -> Policy:
    """Loads the policy of a checkpoint, on the CPU.

    Raises:
        ValueError: the weights do not fit the policy in the checkpoint's settings.
    """
    spaces = environment.single_observation_space, environment.single_action_space
    policy = make_policy(checkpoint.settings_as(Settings), *spaces)
    try:
        policy.load_state_dict(checkpoint.learner["model"])
    except RuntimeError as error:
        raise ValueError(
            "the checkpoint's weights do not fit the policy in its settings. If a script has trained a class of its "
            "own with train(policy=...), name it in the settings instead, as Settings(policy='module:Class')"
        ) from error
    return policy


@torch.no_grad()
def play(
    policy: Policy, environment: Environments, num_episodes: int, *, max_steps: int = Evaluate.max_steps,
    say: Callable[[str], None] = lambda sentence: None,
) -> list[Episode]:  # fmt: skip
    """Plays episodes in a single environment, one after the other, with the likeliest actions, in eval mode.

    An episode that has not ended after ``max_steps`` steps is cut. ``say`` is called with messages: about the first cut
    episode, about the number of cut episodes at the end, and now and then about the progress.
    """
    observations, episodes = environment.reset(), list[Episode]()
    length, total, num_cut, told = 0, 0.0, 0, time.monotonic()
    with in_eval_mode(policy):
        while len(episodes) < num_episodes:
            seen = torch.from_numpy(observations).to(policy.observation_dtype)
            outputs = policy.allowed(policy.outputs(policy.features(seen)), seen)
            step = environment.step(policy.distribution.mode(outputs).numpy())
            observations, length, total = step.observations, length + int(step.valid[0]), total + float(step.rewards[0])
            if step.episodes:
                episodes += step.episodes
                length, total = 0, 0.0
            elif length >= max_steps:
                num_cut += 1
                if num_cut == 1:
                    say(
                        f"episode {len(episodes) + 1} has not ended after {length:,} steps, and counts as it is.\n"
                        "  --max-steps cuts episodes elsewhere. If they never end, they do not in training either:\n"
                        "  gymnasium.wrappers.TimeLimit ends them"
                    )
                episodes.append(Episode(environment.first_index, total, length))
                observations, length, total = environment.reset(), 0, 0.0
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                say(f"{len(episodes)} of {num_episodes} episodes have ended, and {length:,} steps of the next are done")
    if num_cut > 1:
        say(f"{num_cut} of {num_episodes} episodes were cut after {max_steps:,} steps")
    return episodes

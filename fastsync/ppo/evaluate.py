"""``fastsync eval``: playing episodes with a trained policy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from .._checks import check_at_least
from .envs.interface import Environments
from .envs.lookup import find_env
from .envs.vector import EpisodeRecorder, RecordedEnvironments
from .policies import Policy, make_policy
from .ppo import Settings
from .random_streams import RandomStreams
from .runs.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint
from .runs.folder import CHECKPOINTS

UNSEEN = 2**31
"""Number of the environment that episodes are played in: none that trained has it, so its episodes are new."""


@dataclass(frozen=True)
class Evaluate:
    """Play episodes with a trained policy, and tell their mean return."""

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A checkpoint, or the folder of a run, whose newest one is taken."""
    episodes: int = 10  # Number of episodes.
    stochastic: bool = False  # Draw actions as in training, instead of taking the likeliest.
    seed: int = 0  # Seeds episodes and actions.

    def __post_init__(self) -> None:
        check_at_least(self, episodes=1)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")


@dataclass(frozen=True)
class Evaluation:
    """The outcome of episodes, in their order."""

    returns: list[float]  # the sums of their rewards
    lengths: list[int]  # their numbers of steps

    def __str__(self) -> str:
        returns, episodes = np.array(self.returns), "episode" if len(self.returns) == 1 else "episodes"
        return (
            f"return {returns.mean():.2f} ± {returns.std():.2f} over {len(returns)} {episodes} "
            f"of {np.mean(self.lengths):.1f} steps"
        )


def main(arguments: Sequence[str]) -> int:
    """Evaluates what a command line names and prints the result.

    Returns:
        The exit status: 0, or 1 if the checkpoint is damaged.

    Raises:
        ValueError: no such checkpoint, or an environment that cannot be made.
    """
    options = tyro.cli(Evaluate, prog="fastsync eval", args=arguments)
    path = Path(options.checkpoint)
    try:
        checkpoint = find_checkpoint(path)
    except RuntimeError as error:
        print(f"fastsync eval: {error}", file=sys.stderr)
        return 1
    with make_environment(checkpoint, seed=options.seed) as environment:
        policy = load_policy(checkpoint, environment)
        result = play(policy, environment, options.episodes, stochastic=options.stochastic, seed=options.seed)
    how = "actions drawn" if options.stochastic else "likeliest actions"
    print(f"{checkpoint.settings['env']} after {checkpoint.step:,} steps, {how}: {result}")
    return 0


def find_checkpoint(path: Path) -> Checkpoint:
    """Reads that of a file, or the newest good one in the folder of a run.

    Raises:
        ValueError: there is none.
        RuntimeError: the file is damaged, or all of them are.
    """
    if path.is_file():
        return load_checkpoint(path)
    newest = CheckpointFolder(path / CHECKPOINTS).newest(lambda warning: print(warning, file=sys.stderr))
    if newest is not None:
        return newest[1]
    raise ValueError(f"checkpoint={str(path)!r} is neither a checkpoint nor the folder of a run that has one")


def make_environment(checkpoint: Checkpoint, *, seed: int) -> Environments:
    """One environment of the kind that the policy was trained in.

    Raises:
        ValueError: it cannot be made here.
    """
    source = find_env(checkpoint.settings_as(Settings).env)
    makers = [lambda: EpisodeRecorder(source.make(), seed=seed, index=UNSEEN)]
    vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
    return RecordedEnvironments(vector, first_index=0, counts_games=source.is_atari)


def load_policy(checkpoint: Checkpoint, environment: Environments) -> Policy:
    """The policy of a checkpoint, on the CPU.

    Raises:
        ValueError: it is not the one that the checkpoint's settings describe.
    """
    spaces = environment.single_observation_space, environment.single_action_space
    policy = make_policy(checkpoint.settings_as(Settings), *spaces)
    try:
        policy.load_state_dict(checkpoint.learner["model"])
    except RuntimeError as error:
        raise ValueError(
            "the checkpoint's weights are not those of the policy in its settings: if a script has trained a class of "
            "its own by train(policy=...), let Settings(policy='module:Class') name it, so that it is found again"
        ) from error
    return policy


@torch.no_grad()
def play(
    policy: Policy, environment: Environments, episodes: int, *, stochastic: bool = False, seed: int = 0
) -> Evaluation:
    """Plays episodes, one after the other, in a single environment whose episodes restart in a step of their own.

    With ``stochastic`` actions are drawn by the seed, instead of the likeliest taken.
    """
    distribution = policy.distribution
    streams = RandomStreams(seed, first_index=0, num_envs=1, device=torch.device("cpu"))
    observations = environment.reset()
    returns: list[float] = []
    lengths: list[int] = []
    while len(returns) < episodes:
        outputs = policy.outputs(policy.features(torch.from_numpy(observations).to(policy.observation_dtype)))
        if stochastic:
            noise = distribution.noise(streams.uniform(1, distribution.num_outputs, policy.dtype))
            actions = distribution.sample(outputs, noise[0])
        else:
            actions = distribution.mode(outputs)
        step = environment.step(actions.numpy())
        observations = step.observations
        returns += [episode.episode_return for episode in step.episodes]
        lengths += [episode.length for episode in step.episodes]
    return Evaluation(returns, lengths)

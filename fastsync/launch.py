"""``fastsync train``: a training on several ranks of this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from fastsync.ppo.config import Settings
from fastsync.ppo.envs import make_envs
from fastsync.ranks import launch_ranks
from fastsync.train import train_rank


@dataclass(frozen=True)
class Launch:
    """Train a policy with PPO on several ranks of this machine."""

    nproc: int = 1
    """Number of ranks, each a process of its own."""
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ValueError(f"nproc={self.nproc} must be at least 1")


def launch(options: Launch) -> int:
    """Trains on ``nproc`` ranks.

    Returns:
        The exit status: 0, or 1 if a rank failed, after telling which one and why.

    Raises:
        ValueError: an unsupported environment. It is tried here, so that the error comes once and not from each rank.
    """
    make_envs(options.settings.env, num_envs=1).close()
    try:
        launch_ranks(train_rank, options.nproc, options.settings)
    except ChildFailedError as error:
        # The launcher has logged the whole traceback already.
        rank, failure = error.get_first_failure()
        message: Any = failure.message  # a dict where the rank has raised, a string where its process has died
        reason = message["message"] if isinstance(message, dict) else message
        print(f"fastsync train: rank {rank} failed first: {reason}", file=sys.stderr)
        return 1
    return 0

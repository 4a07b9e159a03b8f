"""Where a training of fastsync spends its time: by wrapping the trainer's functions, on rank 0."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.baselines.trainers import Outcome, fastsync_rank

PHASES = (
    "environment",
    "policy",
    "advantages",
    "forward",
    "backward and sync",
    "clip and optimizer",
    "reports",
    "rest",
)
"""The rest is mostly what cuts rollouts into minibatches."""


class Stopwatches:
    """Adds up time by phase: that of a function without what wrapped functions take within it."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.calls: dict[str, int] = {}
        """Of each function, by the names of its owner and its own."""
        self._within = [0.0]

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Replaces the function of that name."""
        function: Callable[..., Any] = getattr(owner, name)
        full_name = f"{owner.__name__}.{name}"
        self.calls[full_name] = 0

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._within.append(0.0)
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds = time.perf_counter() - began
                self.seconds[phase] += seconds - self._within.pop()
                self._within[-1] += seconds
                self.calls[full_name] += 1

        setattr(owner, name, timed)


def fastsync_rank_phases(settings: Any) -> tuple[Outcome, dict[str, float]]:
    """Trains as ``fastsync_rank`` does.

    Returns:
        The outcome, and this rank's seconds in each of PHASES for one optimizer step.
    """

    from fastsync.ppo import ppo
    from fastsync.ppo.envs.interface import Environments
    from fastsync.ppo.session import Session

    watches = Stopwatches()
    for owner, name, phase in (
        (ppo, "train", "rest"),
        (Environments, "step", "environment"),
        (ppo.Collector, "collect", "policy"),
        (ppo, "normalize", "advantages"),
        (ppo, "discounted_sums", "advantages"),
        (ppo, "normalize_advantages", "advantages"),
        (ppo, "minibatch_loss", "forward"),
        (ppo.PPO, "_backward", "backward and sync"),
        (ppo.PPO, "_take_step", "clip and optimizer"),
        (Session, "tell", "reports"),
        (Session, "finish", "end"),  # once a training, however long it is
    ):
        watches.wrap(owner, name, phase)
    outcome = fastsync_rank(settings)
    return outcome, {phase: watches.seconds[phase] / watches.calls["PPO._take_step"] for phase in PHASES}

"""What a whole training is told and what it has done, whoever trains."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

WINDOW = 100
"""Episodes, the newest, whose mean return tells how far a training has come."""


@dataclass(frozen=True)
class Training:
    """The settings of a training. Counts of environments and minibatches are those of all ranks together."""

    total_steps: int
    num_envs: int
    num_steps: int
    num_minibatches: int
    num_epochs: int
    seed: int
    env: str = "CartPole-v1"
    """A game of ALE is seen in pictures, by convolutions that actor and critic share."""
    learning_rate: float = 2.5e-4
    """At the start."""
    anneal_lr: bool = True
    """The learning rate falls to 0 over the training."""
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    anneal_clip: bool = False
    """The clipping falls to 0 over the training."""
    clip_value_loss: bool = True
    value_coef: float = 0.25
    """Weight of the value's squared error in the loss. CleanRL multiplies a half of the error by 0.5,
    Stable-Baselines3 the whole."""
    entropy: float = 0.01
    gsde: bool = False
    """Exploration that depends on the state, with new noise every fourth step (Raffin et al., 2021)."""
    normalize: bool = False
    """Observations and rewards, by running moments."""
    norm_advantages: str = "minibatch"
    """Advantages have mean 0 and variance 1 in each minibatch, or in the rollout, as fastsync's option has it."""
    hidden_size: int = 64
    nproc: int = 1
    threads: int = 1
    """That a process computes with."""
    vectorization: str = "auto"
    device: str = "cpu"
    """What policies compute on: cpu or cuda."""
    until: float | None = None
    """The mean return of the last WINDOW episodes at which the training may end."""

    @property
    def is_atari(self) -> bool:
        return self.env.startswith("ALE/")

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches


@dataclass(frozen=True)
class Outcome:
    """What a training has done."""

    steps: int
    """Of environments."""
    seconds: float
    """Of collecting and learning, without start-up."""
    mean_return: float | None = None
    """Of the last WINDOW episodes; None where the trainer does not tell it."""
    reached: bool = False
    """Whether it has ended because ``Training.until`` was reached."""
    compile_seconds: float | None = None
    """Of ``seconds``, where a compiler is part of the training's loop."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that train."""

    @property
    def speed(self) -> float:
        return self.steps / self.seconds


class Watch:
    """Measures a training's loop, and looks after each update whether it has come as far as ``Training.until``.

    It must be made when the loop begins.
    """

    def __init__(self, training: Training) -> None:
        self.began = time.perf_counter()
        self._until = training.until
        self._reached: Outcome | None = None

    def look(self, steps: int, returns: Iterable[float]) -> bool:
        """Whether the training may end, after so many steps, with the returns of its newest episodes so far."""
        if self._until is not None and self._reached is None:
            seconds, newest = time.perf_counter() - self.began, list(returns)[-WINDOW:]
            if len(newest) == WINDOW and np.mean(newest) >= self._until:
                self._reached = Outcome(steps, seconds, float(np.mean(newest)), reached=True)
        return self._reached is not None

    def outcome(self, steps: int, returns: Iterable[float]) -> Outcome:
        """As it was when the training had come far enough, or else as it is now."""
        seconds, newest = time.perf_counter() - self.began, list(returns)[-WINDOW:]
        return self._reached or Outcome(steps, seconds, float(np.mean(newest)) if newest else None)

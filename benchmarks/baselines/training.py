"""What a whole training is told and what it has done, whoever trains."""

from dataclasses import dataclass

GAMMA, GAE_LAMBDA = 0.99, 0.95


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
    """At the start; it falls to 0 over the training."""
    clip: float = 0.2
    entropy: float = 0.01
    normalize: bool = False
    """Observations and rewards, by running moments."""
    hidden_size: int = 64
    nproc: int = 1
    vectorization: str = "auto"
    device: str = "cpu"
    """What policies compute on: cpu or cuda."""

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
    """Of the last 100 episodes; None where the trainer does not tell it."""

    @property
    def speed(self) -> float:
        return self.steps / self.seconds

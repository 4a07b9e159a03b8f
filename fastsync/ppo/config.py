"""The settings of a training run: one dataclass, which is also the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastsync.compression import Wire

SyncMode = Literal["fastsync", "ddp", "cat"]


@dataclass(frozen=True)
class Settings:
    """What to train, how, and where the results go. Counts of environments and steps per rollout are per rank."""

    env: str = "CartPole-v1"
    """Gymnasium environment with vector observations and discrete actions. "module:id" imports module first."""
    seed: int = 1
    """Seeds the initial weights, and, differently on each rank, the environments, the actions and the minibatches."""
    total_steps: int = 200_000
    """Environment steps to train for, over all ranks. The last rollout may go past it."""

    sync: SyncMode = "fastsync"
    """Who averages the gradients: fastsync's hook on DDP, plain DDP, or concatenate, all-reduce and copy back."""
    compression: Wire = "none"
    """What fastsync sends: the gradients as they are, or rounded to 16 bits."""
    timeout: float = 120.0
    """Seconds that a rank waits for the others before it gives up with an error."""

    num_envs: int = 32
    """Environments per rank."""
    num_steps: int = 32
    """Steps of each environment per rollout."""
    hidden_size: int = 64
    """Width of the two hidden layers of the actor and of the critic."""

    learning_rate: float = 1e-3
    """Step size of Adam at the start."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to 0 over the run."""
    num_epochs: int = 10
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Optimizer steps per pass. It must divide num_envs * num_steps."""
    gamma: float = 0.98
    """Discount per step."""
    gae_lambda: float = 0.95
    """Weight of longer returns in generalised advantage estimation."""
    clip_coef: float = 0.2
    """How far the probability ratio may move from 1 before the objective stops rewarding it."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient averaged over ranks; longer ones are scaled down."""

    runs_dir: str = "runs"
    """Folder that holds one folder per run."""
    run_name: str | None = None
    """Folder of this run inside runs_dir. By default environment, sync mode, seed and the time of the start."""

    def __post_init__(self) -> None:
        for name in ("total_steps", "num_envs", "num_steps", "hidden_size", "num_epochs", "num_minibatches"):
            self._check(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("timeout", "learning_rate", "clip_coef", "max_grad_norm"):
            self._check(name, getattr(self, name) > 0, "must be greater than 0")
        for name in ("ent_coef", "vf_coef", "seed"):
            self._check(name, getattr(self, name) >= 0, "must not be negative")
        for name in ("gamma", "gae_lambda"):
            self._check(name, 0 <= getattr(self, name) <= 1, "must lie in [0, 1]")
        if self.batch_size % self.num_minibatches:
            raise ValueError(
                f"num_minibatches={self.num_minibatches} does not divide the {self.batch_size} rows of a rank's "
                f"rollout (num_envs={self.num_envs} * num_steps={self.num_steps}); choose one that does"
            )
        if self.compression != "none" and self.sync != "fastsync":
            raise ValueError(
                f"compression={self.compression!r} needs sync='fastsync': sync={self.sync!r} sends gradients as they "
                f"are; leave compression at 'none' or choose sync='fastsync'"
            )

    @property
    def batch_size(self) -> int:
        """Rows that one rank collects per rollout."""
        return self.num_envs * self.num_steps

    def _check(self, name: str, holds: bool, demand: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)} {demand}")

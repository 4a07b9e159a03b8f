"""The settings of a training run: one dataclass, which is also the command line and the YAML file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fastsync.autotune.request import as_compression

SyncMode = Literal["fastsync", "ddp", "cat"]
Vectorization = Literal["auto", "sync", "async", "vector_entry_point", "envpool"]
Autoreset = Literal["next_step", "same_step"]
Network = Literal["auto", "separate", "shared"]
Activation = Literal["tanh", "relu", "elu"]
Precision = Literal["fp32", "fp64", "bf16", "fp16"]
LrSchedule = Literal["constant", "linear", "adaptive"]
LrScaling = Literal["none", "sqrt", "linear"]


@dataclass(frozen=True)
class Settings:
    """A training: what, how, and where the results go. Counts of environments and steps per rollout are per rank."""

    env: str = "CartPole-v1"
    """Gymnasium environment, or "module:function" that makes one. "module:id" imports module first."""
    seed: int = 1
    """Seeds weights, actions, minibatches and environments. Each environment of each rank has a seed of its own."""
    total_steps: int = 200_000
    """Environment steps to train for, over all ranks. The last rollout may go past it."""
    num_envs: int = 32
    """Environments per rank."""
    num_steps: int = 32
    """Steps of each environment per rollout."""
    vectorization: Vectorization = "auto"
    """How environments step together: one after the other (sync), in processes (async), by their own vectorised
    implementation, or in EnvPool's threads. auto takes the environment's own where it has one, else sync."""
    autoreset: Autoreset = "next_step"
    """When an episode that ended starts anew, with sync and async: in a step of its own, or in the step that ended
    the last one."""

    network: Network = "auto"
    """Whether actor and critic share the layers before their last: auto shares for images and with an LSTM."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers for vector observations. Images go through the convolutions of Mnih et al., 2015."""
    activation: Activation = "tanh"
    """Between the hidden layers."""
    lstm_size: int = 0
    """Units of an LSTM between the shared layers and the heads; 0 for none. Minibatches are then whole sequences."""
    log_std_init: float = 0.0
    """Logarithm of the standard deviation that continuous actions begin with."""

    learning_rate: float = 1e-3
    """Step size of Adam at the start."""
    lr_schedule: LrSchedule = "linear"
    """linear: to 0 over the run. adaptive: divided or multiplied by 1.5 where the KL divergence of a minibatch is over
    twice, or under half of target_kl, but kept within 1e-5 and 1e-2."""
    lr_scaling: LrScaling = "none"
    """Multiply the learning rate by the number of ranks, or by its square root."""
    warmup_updates: int = 0
    """Rollouts over which the learning rate rises to its full height."""
    num_epochs: int = 10
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Optimizer steps per pass. It must divide num_envs * num_steps; with an LSTM, num_envs."""
    num_micro_batches: int = 1
    """Parts that a minibatch goes through the network in, to save memory. Gradients are sent once, with the last."""
    gamma: float = 0.98
    """Discount per step."""
    gae_lambda: float = 0.95
    """Weight of longer returns in generalised advantage estimation."""
    clip_coef: float = 0.2
    """How far the probability ratio may move from 1 before the objective stops rewarding it."""
    anneal_clip: bool = False
    """Lower clip_coef linearly to 0 over the run."""
    clip_value_loss: bool = False
    """Also keep the value within clip_coef of what it was when the rollout was made."""
    norm_advantages: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over the rollouts of all ranks."""
    norm_observations: bool = False
    """Shift and scale observations by their running mean and variance over all ranks; they are cut off at 10."""
    norm_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return over all ranks; cut off at 10."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient averaged over ranks; longer ones are scaled down."""
    target_kl: float | None = None
    """KL divergence between old and new policy, over all ranks. Without lr_schedule=adaptive a minibatch with more than
    1.5 times as much ends the learning from its rollout."""

    sync: SyncMode = "fastsync"
    """Who averages the gradients: fastsync, DDP, or concatenate, all-reduce and copy back."""
    compression: str = "none"
    """What fastsync sends, as fastsync.attach takes it: none, bf16, fp16, int8, with what lies behind a plus sign, such
    as int8+ef with error feedback; or auto, which measures and chooses."""
    precision: Precision = "fp32"
    """Of the computation. bf16 and fp16 are autocast, fp16 with a GradScaler."""
    num_threads: int | None = None
    """Threads that torch computes with on each rank. By default OMP_NUM_THREADS, else 1, as torchrun has it."""
    timeout: float = 120.0
    """Seconds that a rank waits for the others before it gives up with an error."""

    runs_dir: str = "runs"
    """Folder that holds one folder per run."""
    run_name: str | None = None
    """Folder of this run inside runs_dir. By default environment, sync mode, seed and, without resume, the time."""
    checkpoint_interval: float = 60.0
    """Seconds between checkpoints; 0 for one after every rollout."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept, besides the best."""
    resume: str | None = None
    """auto goes on from the run's last checkpoint if there is one; a run's folder or a checkpoint goes on from that. On
    the command line without config, settings are then those of that run, except for what else is typed; with auto, this
    needs run_name."""
    wandb_project: str | None = None
    """Also log to this project of Weights & Biases."""

    def __post_init__(self) -> None:
        for name in (
            "total_steps", "num_envs", "num_steps", "num_epochs", "num_minibatches", "num_micro_batches",
            "keep_checkpoints",
        ):  # fmt: skip
            self._check(name, getattr(self, name) >= 1, "must be at least 1")
        self._check("max_grad_norm", self.max_grad_norm > 0, "must be greater than 0")
        for name in ("timeout", "learning_rate", "clip_coef"):
            self._check(name, 0 < getattr(self, name) < math.inf, "must be a finite number greater than 0")
        self._check("seed", self.seed < 2**63, "must be less than 2**63")
        for name in ("ent_coef", "vf_coef", "seed", "lstm_size", "warmup_updates", "checkpoint_interval"):
            self._check(name, getattr(self, name) >= 0, "must not be negative")
        for name in ("gamma", "gae_lambda"):
            self._check(name, 0 <= getattr(self, name) <= 1, "must lie in [0, 1]")
        for name in ("num_threads", "target_kl"):
            self._check(name, getattr(self, name) is None or getattr(self, name) > 0, "must be greater than 0")
        self._check("hidden_sizes", all(size >= 1 for size in self.hidden_sizes), "must be widths of at least 1")
        self._check_batches()
        self._check_combinations()

    @property
    def batch_size(self) -> int:
        """Rows that one rank collects per rollout."""
        return self.num_envs * self.num_steps

    @property
    def is_recurrent(self) -> bool:
        """True where the policy remembers."""
        return self.lstm_size > 0

    def _check(self, name: str, holds: bool, demand: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)} {demand}")

    def _check_batches(self) -> None:
        if self.is_recurrent:
            whole, of_what = self.num_envs, f"num_envs={self.num_envs} sequences of a rank's rollout"
        else:
            whole = self.batch_size
            of_what = f"{whole} rows of a rank's rollout (num_envs={self.num_envs} * num_steps={self.num_steps})"
        if whole % self.num_minibatches:
            raise ValueError(
                f"num_minibatches={self.num_minibatches} does not divide the {of_what}; choose one that does"
            )
        minibatch = whole // self.num_minibatches
        if minibatch % self.num_micro_batches:
            raise ValueError(
                f"num_micro_batches={self.num_micro_batches} does not divide the {minibatch} "
                f"{'sequences' if self.is_recurrent else 'rows'} of a minibatch; choose one that does"
            )

    def _check_combinations(self) -> None:
        as_compression(self.compression)
        if self.compression != "none" and self.sync != "fastsync":
            raise ValueError(
                f"compression={self.compression!r} needs sync='fastsync': sync={self.sync!r} sends gradients as they "
                f"are; leave compression at 'none' or choose sync='fastsync'"
            )
        if self.lr_schedule == "adaptive" and self.target_kl is None:
            raise ValueError("lr_schedule='adaptive' needs the KL divergence to aim at; set target_kl, such as 0.01")
        if self.is_recurrent and self.network == "separate":
            raise ValueError(
                f"lstm_size={self.lstm_size} needs network='shared' or 'auto': actor and critic share the LSTM"
            )

"""The settings of a run besides those of PPO, and settings as YAML.

``ppo.Settings`` adds PPO's settings to these. A subclass of your own may add more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml

from ..launch.options import read_options
from ..messages import did_you_mean
from ..sync.compression import AnyCompression, Compression, parse_compression
from ..sync.micro_batches import block_of
from .json_objects import JSON_OBJECT
from .whole_numbers import WHOLE_NUMBERS

Precision = Literal["fp32", "fp64", "bf16", "fp16"]
Activation = Literal["tanh", "relu", "elu"]

FLAG_OF_BEFORE = {True: "rollout", False: "none"}
"""What ``norm_advantages`` is called today in the settings of older runs, where it was true or false."""


@dataclass(frozen=True)
class RunSettings:
    """Environments, network, ranks, and where the results go. Counts of environments are per rank."""

    env: str = "CartPole-v1"
    """Gymnasium environment, or "module:function" that makes one. "module:id" imports the module that registers it."""
    env_kwargs: Annotated[dict[str, Any] | None, JSON_OBJECT] = None
    """Arguments of the environment, as JSON: '{"continuous": true}'. That of evaluations gets them, too."""
    seed: int = 1
    """Seeds weights, actions, minibatches and environments. Every environment of every rank gets its own seed."""
    total_steps: int = 500_000  # Environment steps to train for, over all ranks. The last rollout may exceed it.
    num_envs: int = 4  # Environments per rank. With micro_batches those of all ranks.
    micro_batches: int | None = None
    """Deal the environments of all ranks into so many equal parts, a power of two, and add up by part. Then any number
    of ranks up to that gives the same figures and weights, to the bit. It costs time on few ranks: see the guide.
    To save memory take num_micro_batches."""
    vectorization: Literal["auto", "sync", "async", "vector_entry_point"] = "auto"
    """How environments step together: one after the other (sync), in processes (async), or by the environment's own
    vectorised implementation (vector_entry_point). auto uses the environment's own if there is one, else sync."""
    log_info: tuple[str, ...] = ()
    """Names of numbers in the environment's info to log, as means over the steps of a rollout."""

    policy: str | None = None
    """Your own subclass of fastsync.ppo.Policy, as "module:Class". By default the next settings define the network."""
    network: Literal["auto", "separate", "shared"] = "auto"
    """Whether actor and critic share all layers but their last. auto shares them for images only."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers for vector observations. Images use the convolutions of Mnih et al., 2015."""
    activation: Activation = "tanh"  # Activation after each hidden layer.
    recurrent: Literal["none", "lstm", "gru"] = "none"
    """A layer that remembers earlier observations of the episode, as wide as the last hidden layer and behind it. Actor
    and critic then share all layers but their last."""
    action_distribution: Literal["normal", "tanh_normal", "beta"] = "normal"
    """Distribution of continuous actions. normal is clipped to the bounds. tanh_normal, squashed by tanh, and beta are
    scaled to them, and need finite ones."""
    log_std_init: float = 0.0  # Initial log standard deviation of continuous actions. Not with beta.
    ortho_init: bool = True
    """Begin with orthogonal weights. --no-ortho-init: with torch's own, as RL Baselines3 Zoo has it for MuJoCo."""
    critic_keys: tuple[str, ...] = ()
    """Keys of dictionaries of observations whose numbers only the critic sees, as what a simulator knows."""
    norm_observations: bool = False
    """Normalise observations by their running mean and variance over all ranks, and clip them to [-10, 10]. The moments
    change between updates, and the first rollout is seen as it is, for nothing is known of it."""

    sync: Literal["gradients", "local_sgd", "diloco"] = "gradients"
    """Ranks average gradients at every optimizer step or, for slow links, weights after every sync_every rollouts.
    local_sgd takes the mean of the weights, diloco moves them with an outer optimizer."""
    sync_every: int = 1  # Rollouts that each rank learns from by itself before weights are averaged.
    compression: str = "none"
    """Compression of gradients or of weight changes: none, bf16, fp16, int8, int4 or lowrank. Options follow a plus
    sign, such as int8+ef for error feedback. auto measures and chooses."""
    bucket_cap_mb: float = 25.0  # MiB of gradients that are sent together. Smaller buckets are sent earlier.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What ranks compute on: cpu, or cuda, a GPU for each. auto takes GPUs if rank 0 sees one for each rank of its
    machine."""
    precision: Precision = "fp32"  # Precision of the computation. bf16 and fp16 use autocast, fp16 also a GradScaler.
    fused: bool = True
    """On CPUs use fused operators in place of code that you have not changed. --no-fused: only plain PyTorch."""
    timeout: float = 120.0  # Seconds that a rank waits for the others before it ends with an error.
    on_lost_rank: Literal["stop", "continue"] = "stop"
    """What the other ranks do when one is lost. stop: they end with an error. continue: they repeat the update that is
    under way, and go on with their own environments. It needs CPUs, and sync=gradients."""

    runs_dir: str = "runs"  # Folder that holds one folder per run.
    run_name: str | None = None
    """Name of this run's folder in runs_dir. By default environment, compression, seed and, without resume, time."""
    checkpoint_interval: float = 60.0  # Seconds between checkpoints; 0 saves after every rollout.
    keep_checkpoints: int = 3  # Number of newest checkpoints to keep, besides the best.
    resume: str | None = None
    """auto resumes the run of this name from its last checkpoint, or begins it if there is none. A checkpoint's path
    begins a new run from that checkpoint."""
    allow_other_loss: bool = False  # Resume even with another loss, or other advantages, than the run has had so far.
    wandb_project: str | None = None  # Also log to this project of Weights & Biases.
    quiet: bool = False  # Print only warnings and errors.

    eval_interval: int = 0
    """Environment steps between evaluations on the way, over all ranks, which also choose the best checkpoint. 0: none.
    They leave the training as it is, except for its time."""
    eval_episodes: int = 10
    """Episodes of an evaluation, spread over the ranks. They are the same each time. Without evaluations, so many of
    the training's have to end before a checkpoint is the best."""
    eval_env: str | None = None  # Environment of the evaluations, as in --env. By default that of the training.

    def __post_init__(self) -> None:
        for name in ("runs_dir", "resume"):  # ~ means the home, as in a shell, which leaves --runs-dir=~/runs as it is
            object.__setattr__(self, name, getattr(self, name) and os.path.expanduser(getattr(self, name)))
        counts = ("total_steps", "num_envs", "keep_checkpoints", "sync_every", "eval_episodes")
        self._check("must be at least 1", lambda value: value >= 1, *counts)
        self._check("must be a finite number greater than 0", lambda v: 0 < v < math.inf, "timeout", "bucket_cap_mb")
        self._check("must be less than 2**63", lambda value: value < 2**63, "seed")
        self._check("must not be negative", lambda value: value >= 0, "seed", "checkpoint_interval", "eval_interval")
        self._check("must be widths of at least 1", lambda sizes: all(n >= 1 for n in sizes), "hidden_sizes")
        if self.recurrent != "none" and self.network == "separate":
            raise ValueError(
                f"recurrent={self.recurrent!r} is a layer that actor and critic share, and network is 'separate'; "
                "leave one of them out"
            )
        if self.action_distribution == "beta" and self.log_std_init != type(self).log_std_init:
            raise ValueError(
                f"log_std_init={self.log_std_init:g} is for normal distributions, and action_distribution is 'beta'; "
                "leave one of them out"
            )
        if self.critic_keys and (self.network == "shared" or self.recurrent != "none"):
            shared = "network='shared'" if self.network == "shared" else f"recurrent={self.recurrent!r}"
            raise ValueError(
                f"critic_keys={list(self.critic_keys)} need a critic of its own, and with {shared} it shares layers "
                "with the actor; leave one of them out"
            )
        wire = parse_compression(self.compression)
        if self.micro_batches is not None:
            self._check_micro_batches(wire)
        if self.eval_env is not None and not self.eval_interval:
            raise ValueError(f"eval_env={self.eval_env!r} needs eval_interval, such as 50000 environment steps")
        if self.sync == "gradients" and self.sync_every != 1:
            raise ValueError(f"sync_every={self.sync_every} is for weights; set sync to 'diloco' or 'local_sgd', too")
        if self.sync != "gradients" and self.bucket_cap_mb != type(self).bucket_cap_mb:
            raise ValueError(
                f"bucket_cap_mb={self.bucket_cap_mb:g} is for gradients, and with sync={self.sync!r} ranks send "
                "weights; leave one of them out"
            )
        if self.on_lost_rank == "continue" and self.sync != "gradients":
            raise ValueError(
                f"on_lost_rank='continue' needs sync='gradients': with sync={self.sync!r} each rank learns by itself, "
                "and what a lost one has learned is lost; leave one of them out"
            )
        if self.on_lost_rank == "continue" and self.device == "cuda":
            raise ValueError("on_lost_rank='continue' needs CPUs, and device is 'cuda'; set device to 'cpu'")

    def _check_micro_batches(self, compression: AnyCompression) -> None:
        """Raises ValueError for settings with which the bits depend on the number of ranks."""
        number, way_out = self.micro_batches, "leave one of them out"
        if type(number) is not int or number < 1 or number & (number - 1):
            raise ValueError(f"micro_batches={number} must be a power of two, such as 8")
        if self.num_envs % number:
            raise ValueError(
                f"micro_batches={number} does not divide the {self.num_envs} environments of all ranks; set num_envs "
                "to a multiple of it"
            )
        if self.sync != "gradients":
            raise ValueError(f"micro_batches={number} needs sync='gradients', got {self.sync!r}; {way_out}")
        if compression != Compression("none"):
            raise ValueError(
                f"micro_batches={number} needs compression='none', got {self.compression!r}, because what a wire "
                f"rounds depends on the number of ranks; {way_out}"
            )
        if self.on_lost_rank == "continue":
            raise ValueError(
                f"micro_batches={number}: with on_lost_rank='continue' a lost rank's environments are gone; resume the "
                "run in place of it, by max_restarts or resume='auto'"
            )

    @property
    def envs_together(self) -> int:
        """Environments of one rollout: those of a rank, or of a micro-batch."""
        return self.num_envs // (self.micro_batches or 1)

    def parts_of(self, rank: int, world_size: int) -> Sequence[int]:
        """Returns the numbers of a rank's rollouts among those of all ranks: its own, or its micro-batches.

        Raises:
            ValueError: there are more ranks than micro-batches.
        """
        if self.micro_batches is None:
            return [rank]
        if world_size > self.micro_batches:
            raise ValueError(
                f"micro_batches={self.micro_batches} leaves some of {world_size} ranks without environments; use more "
                "micro-batches, or fewer ranks"
            )
        return block_of(rank, world_size, self.micro_batches)

    @property
    def backend(self) -> Literal["fastsync", "nccl"] | None:
        """The backend of ``process_group`` that has ranks compute on ``device``; None if it may choose."""
        backends: dict[str, Literal["fastsync", "nccl"]] = {"cpu": "fastsync", "cuda": "nccl"}
        return backends.get(self.device)

    def as_dict(self) -> dict[str, Any]:
        """Returns the settings as plain data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def _check(self, demand: str, holds: Any, *names: str) -> None:
        """Raises ValueError for the first of these settings that does not hold."""
        for name in names:
            if not holds(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} {demand}")

    def _check_divides(self, name: str, whole: int, rows_of: str) -> None:
        """Raises ValueError if the setting does not divide ``whole`` rows."""
        parts = getattr(self, name)
        if whole % parts:
            raise ValueError(f"{name}={parts} does not divide the {whole} rows {rows_of}; choose one that does")


Kind = TypeVar("Kind", bound=RunSettings)


def own_first(kind: type[Kind]) -> type[Kind]:
    """Decorates a class of settings: those that it adds come first, as in --help, and then those of every run."""
    fields: dict[str, Any] = kind.__dataclass_fields__
    of_runs = RunSettings.__dataclass_fields__
    added = {name: field for name, field in fields.items() if name not in of_runs}
    kind.__dataclass_fields__ = added | fields
    return kind


PRESETS = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Returns the names that ``--config`` knows."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def load_settings(source: str, kind: type[Kind], num_ranks: int = 1) -> Kind:
    """Reads settings from a YAML file or, if there is no such file, from the preset of that name.

    A file has the counts of each rank. A preset has those of all, which so many ranks share. Settings that the
    file does not mention have their defaults. A setting that is unknown, or of another type, ends the process, as on
    the command line.

    Raises:
        ValueError: there is no such file or preset, the content is not YAML, or a value is refused.
    """
    return read_options(kind, source, file_words(source, num_ranks), registry=WHOLE_NUMBERS)


def file_words(source: str, num_ranks: int = 1) -> list[str]:
    """Returns the settings of a YAML file or preset as words of a command line. Errors are those of load_settings."""
    path, is_preset = Path(source).expanduser(), False
    if not path.is_file():
        if source not in (names := preset_names()):
            hint = f"{did_you_mean(source, names)}; presets: {', '.join(names)}"
            raise ValueError(f"config={source!r} is neither a file nor a preset{hint}")
        path, is_preset = PRESETS / f"{source}.yaml", True
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold lines such as 'total_steps: 100000', not a {type(content).__name__}")
    if (flag := content.get("norm_advantages")) in (True, False):
        content["norm_advantages"] = FLAG_OF_BEFORE[flag]
    return words_of(shared(content, num_ranks) if is_preset else content)


def shared(preset: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Returns a preset, whose counts are those of all ranks, with the counts of each of so many ranks.

    They share the environments or, where there are fewer, the steps. What does not divide is rounded up.
    """
    num_envs, num_steps = preset["num_envs"], preset["num_steps"]
    if num_envs >= num_ranks:
        return {**preset, "num_envs": -(-num_envs // num_ranks)}
    parts = preset["num_minibatches"]
    return {**preset, "num_envs": 1, "num_steps": parts * -(-num_envs * num_steps // (num_ranks * parts))}


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Returns command-line options with these values. It leaves out values that are None."""
    words: list[str] = []
    for key, value in values.items():
        name = str(key).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict):
            words += [f"--{name}", json.dumps(value)]
        elif value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def dump_settings(settings: RunSettings) -> str:
    """Returns all settings as YAML for ``load_settings``, in the order of their definition."""
    return yaml.safe_dump(settings.as_dict(), sort_keys=False, default_flow_style=None)

"""What a training needs besides PPO itself: its settings, and settings as YAML.

Those of PPO are in ``ppo.Settings``, which adds to these. A dataclass of your own may add to both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
import yaml

from .._checks import did_you_mean
from ..compression import parse_compression

Precision = Literal["fp32", "fp64", "bf16", "fp16"]
Activation = Literal["tanh", "relu", "elu"]


@dataclass(frozen=True)
class RunSettings:
    """Environments, network, ranks, and where the results go. Counts of environments are per rank."""

    env: str = "CartPole-v1"
    """Gymnasium environment, or "module:function" that makes one. "module:id" imports module first."""
    seed: int = 1
    """Seeds weights, actions, minibatches and environments. Each environment of each rank has a seed of its own."""
    total_steps: int = 200_000  # Environment steps to train for, over all ranks. The last rollout may go past it.
    num_envs: int = 32  # Environments per rank.
    vectorization: Literal["auto", "sync", "async", "vector_entry_point"] = "auto"
    """How environments step together: one after the other (sync), in processes (async), or by their own vectorised
    implementation. auto takes the environment's own where it has one, else sync."""
    log_info: tuple[str, ...] = ()
    """Names of numbers that the environment puts into info: their means over the steps of a rollout are logged."""

    policy: str | None = None
    """The policy, as "module:Class" of a fastsync.ppo.Policy; by default the network that the next settings make."""
    network: Literal["auto", "separate", "shared"] = "auto"
    """Whether actor and critic share the layers before their last: auto shares for images."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers for vector observations. Images go through the convolutions of Mnih et al., 2015."""
    activation: Activation = "tanh"  # Between the hidden layers.
    log_std_init: float = 0.0  # Logarithm of the standard deviation that continuous actions begin with.
    norm_observations: bool = False
    """Shift and scale observations by their running mean and variance over all ranks; they are cut off at 10."""

    sync: Literal["gradients", "local_sgd", "diloco"] = "gradients"
    """What ranks average: gradients, in each optimizer step; or, for slow links, weights, every sync_every rollouts,
    where diloco has an outer optimizer."""
    sync_every: int = 1  # Rollouts that each rank learns from by itself before weights are averaged.
    compression: str = "none"
    """What gradients, or differences of weights, travel as, none, bf16, fp16, int8, int4, with what lies behind a plus
    sign, such as int8+ef with error feedback; or auto, which measures and chooses."""
    precision: Precision = "fp32"  # Of the computation. bf16 and fp16 are autocast, fp16 with a GradScaler.
    fused: bool = True
    """Let operators for CPUs compute what they were proven equal to; the rest, and all without it, is plain PyTorch."""
    num_threads: int | None = None
    """Threads that torch computes with on each rank. By default OMP_NUM_THREADS, else 1, as torchrun has it."""
    timeout: float = 120.0  # Seconds that a rank waits for the others before it gives up with an error.

    runs_dir: str = "runs"  # Folder that holds one folder per run.
    run_name: str | None = None
    """Folder of this run inside runs_dir. By default environment, compression, seed and, without resume, the time."""
    checkpoint_interval: float = 60.0  # Seconds between checkpoints; 0 for one after every rollout.
    keep_checkpoints: int = 3  # Newest checkpoints that are kept, besides the best.
    resume: str | None = None
    """auto goes on from the last checkpoint in the run's folder, if there is one, else begins it. A checkpoint begins a
    new run from there."""
    wandb_project: str | None = None  # Also log to this project of Weights & Biases.

    def __post_init__(self) -> None:
        counts = ("total_steps", "num_envs", "keep_checkpoints", "sync_every")
        self._check("must be at least 1", lambda value: value >= 1, *counts)
        self._check("must be a finite number greater than 0", lambda value: 0 < value < math.inf, "timeout")
        self._check("must be less than 2**63", lambda value: value < 2**63, "seed")
        self._check("must not be negative", lambda value: value >= 0, "seed", "checkpoint_interval")
        self._check("must be greater than 0", lambda value: value is None or value > 0, "num_threads")
        self._check("must be widths of at least 1", lambda sizes: all(n >= 1 for n in sizes), "hidden_sizes")
        parse_compression(self.compression)
        if self.sync == "gradients" and self.sync_every != 1:
            raise ValueError(f"sync_every={self.sync_every} is for weights; set sync to 'diloco' or 'local_sgd', too")

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def _check(self, demand: str, holds: Any, *names: str) -> None:
        """Raises ValueError for the first of these settings that is not as demanded."""
        for name in names:
            if not holds(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} {demand}")

    def _check_divides(self, name: str, whole: int, of_what: str) -> None:
        """Raises ValueError where a setting does not divide so many rows."""
        parts = getattr(self, name)
        if whole % parts:
            raise ValueError(f"{name}={parts} does not divide the {whole} rows {of_what}; choose one that does")


Kind = TypeVar("Kind", bound=RunSettings)
NUMBERS = tyro.constructors.ConstructorRegistry()
"""Reads integers also where they are written such as 1e6, which YAML takes for text."""


@NUMBERS.primitive_rule
def _integers(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    def read(words: list[str]) -> int:
        try:
            return int(words[0])
        except ValueError:
            number = float(words[0])
        if not number.is_integer():
            raise ValueError(f"{words[0]} is no whole number")
        return int(number)

    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        1, "INT", read, is_instance=lambda value: isinstance(value, int), str_from_instance=lambda value: [str(value)]
    )


PRESETS = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Lists what ``--config`` finds by name."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def load_settings(source: str, kind: type[Kind]) -> Kind:
    """Settings from a YAML file, or from the preset of that name where there is no such file.

    What the file does not mention has its default. What it says wrong ends the process, as on the command line.

    Raises:
        ValueError: there is neither, or the content is not YAML.
    """
    return tyro.cli(kind, prog=source, args=file_words(source), registry=NUMBERS)


def file_words(source: str) -> list[str]:
    """What ``load_settings`` reads, as words of a command line."""
    path = Path(source)
    if not path.is_file():
        if source not in (names := preset_names()):
            hint = f"{did_you_mean(source, names)}; presets: {', '.join(names)}"
            raise ValueError(f"config={source!r} is neither a file nor a preset{hint}")
        path = PRESETS / f"{source}.yaml"
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold lines such as 'total_steps: 100000', not a {type(content).__name__}")
    return words_of(content)


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Words of a command line that gives these values. None is left out."""
    words: list[str] = []
    for key, value in values.items():
        name = str(key).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def dump_settings(settings: RunSettings) -> str:
    """All settings as YAML that ``load_settings`` understands, in the order of their definition."""
    return yaml.safe_dump(settings.as_dict(), sort_keys=False, default_flow_style=None)

"""What a training needs besides PPO itself: its settings, and settings as YAML.

Those of PPO are in ``ppo.Settings``, which adds to these. A dataclass of your own may add to both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from fastsync.compression import parse_compression
from fastsync.wording import did_you_mean

Precision = Literal["fp32", "fp64", "bf16", "fp16"]
Activation = Literal["tanh", "relu", "elu"]


@dataclass(frozen=True)
class RunSettings:
    """Environments, network, ranks, and where the results go. Counts of environments are per rank."""

    env: str = "CartPole-v1"
    """Gymnasium environment, or "module:function" that makes one. "module:id" imports module first."""
    seed: int = 1
    """Seeds weights, actions, minibatches and environments. Each environment of each rank has a seed of its own."""
    total_steps: int = 200_000
    """Environment steps to train for, over all ranks. The last rollout may go past it."""
    num_envs: int = 32
    """Environments per rank."""
    vectorization: Literal["auto", "sync", "async", "vector_entry_point", "envpool"] = "auto"
    """How environments step together: one after the other (sync), in processes (async), by their own vectorised
    implementation, or in EnvPool's threads. auto takes the environment's own where it has one, else sync."""
    autoreset: Literal["next_step", "same_step"] = "next_step"
    """When an episode that ended starts anew, with sync and async: in a step of its own, or in the step that ended
    the last one."""
    log_info: tuple[str, ...] = ()
    """Names of numbers that the environment puts into info: their means over the steps of a rollout are logged."""

    policy: str | None = None
    """The policy, as "module:Class" of a fastsync.ppo.Policy; by default the network that the next settings make."""
    network: Literal["auto", "separate", "shared"] = "auto"
    """Whether actor and critic share the layers before their last: auto shares for images and with an LSTM."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers for vector observations. Images go through the convolutions of Mnih et al., 2015."""
    activation: Activation = "tanh"
    """Between the hidden layers."""
    lstm_size: int = 0
    """Units of an LSTM between the shared layers and the heads; 0 for none. Minibatches are then whole sequences."""
    log_std_init: float = 0.0
    """Logarithm of the standard deviation that continuous actions begin with."""
    norm_observations: bool = False
    """Shift and scale observations by their running mean and variance over all ranks; they are cut off at 10."""

    compression: str = "none"
    """What gradients travel as, none, bf16, fp16, int8, with what lies behind a plus sign,
    such as int8+ef with error feedback; or auto, which measures and chooses."""
    precision: Precision = "fp32"
    """Of the computation. bf16 and fp16 are autocast, fp16 with a GradScaler."""
    fused: bool = True
    """Let operators for CPUs compute what they were proven equal to; the rest, and all without it, is plain PyTorch."""
    num_threads: int | None = None
    """Threads that torch computes with on each rank. By default OMP_NUM_THREADS, else 1, as torchrun has it."""
    timeout: float = 120.0
    """Seconds that a rank waits for the others before it gives up with an error."""

    runs_dir: str = "runs"
    """Folder that holds one folder per run."""
    run_name: str | None = None
    """Folder of this run inside runs_dir. By default environment, compression, seed and, without resume, the time."""
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
        self._check("must be at least 1", lambda value: value >= 1, "total_steps", "num_envs", "keep_checkpoints")
        self._check("must be a finite number greater than 0", lambda value: 0 < value < math.inf, "timeout")
        self._check("must be less than 2**63", lambda value: value < 2**63, "seed")
        self._check("must not be negative", lambda value: value >= 0, "seed", "lstm_size", "checkpoint_interval")
        self._check("must be greater than 0", lambda value: value is None or value > 0, "num_threads")
        self._check("must be widths of at least 1", lambda sizes: all(n >= 1 for n in sizes), "hidden_sizes")
        parse_compression(self.compression)
        if self.is_recurrent and self.network == "separate":
            raise ValueError(
                f"lstm_size={self.lstm_size} needs network='shared' or 'auto': actor and critic share the LSTM"
            )

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @property
    def is_recurrent(self) -> bool:
        """True where the policy remembers."""
        return self.lstm_size > 0

    def _check(self, demand: str, holds: Any, *names: str) -> None:
        """Raises ValueError for the first of these settings that is not as demanded."""
        for name in names:
            if not holds(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} {demand}")

    def _check_divides(self, name: str, whole: int, of_what: str) -> None:
        """Raises ValueError where a setting does not divide so many rows, or sequences with an LSTM."""
        parts, rows = getattr(self, name), "sequences" if self.is_recurrent else "rows"
        if whole % parts:
            raise ValueError(f"{name}={parts} does not divide the {whole} {rows} {of_what}; choose one that does")


Kind = TypeVar("Kind", bound=RunSettings)

PRESETS = Path(__file__).parent / "presets"
PRESET_WORLD_SIZE = 2
"""Ranks that presets are made for."""


def preset_names() -> list[str]:
    """Lists what ``--config`` finds by name."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def is_preset(source: str) -> bool:
    """Tells whether ``load_settings`` takes a preset."""
    return _find(source).parent == PRESETS


def load_settings(source: str, kind: type[Kind]) -> Kind:
    """Settings from a YAML file, or from the preset of that name where there is no such file.

    What the file does not mention has its default.

    Raises:
        ValueError: there is neither, or the content is not what settings are; the message names the file.
    """
    path = _find(source)
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(content or {}, dict):
        raise ValueError(f"{path} must hold lines such as 'total_steps: 100000', not a {type(content).__name__}")
    try:
        return settings_from(content or {}, kind)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def settings_from(values: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """Settings from plain data, such as YAML gives.

    Raises:
        ValueError: a name that is no setting, or a value that it cannot have.
    """
    hints = get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise ValueError(f"{name!r} is no setting{did_you_mean(str(name), hints)}")
    return kind(**{name: _convert(name, value, hints[name]) for name, value in values.items()})


def dump_settings(settings: RunSettings) -> str:
    """All settings as YAML that ``load_settings`` understands, in the order of their definition."""
    return yaml.safe_dump(settings.as_dict(), sort_keys=False, default_flow_style=None)


def _find(source: str) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    preset = PRESETS / f"{source}.yaml"
    if preset.parent == PRESETS and preset.is_file():
        return preset
    names = preset_names()
    raise ValueError(
        f"config={source!r} is neither a file nor a preset{did_you_mean(source, names)}; presets: {', '.join(names)}"
    )


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Makes the value what the setting's type wants."""
    is_optional = type(None) in get_args(hint)
    if value is None and is_optional:
        return None
    kind = get_args(hint)[0] if is_optional else hint
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name}={value!r} must be a list, such as [64, 64]")
        return tuple(_convert(name, item, get_args(kind)[0]) for item in value)
    number = value
    if isinstance(value, str) and kind not in (bool, str):
        with suppress(ValueError):
            number = float(value)  # YAML 1.1 takes 1e-3 for text: it wants 1.0e-3
    if kind in (bool, str):
        fits = isinstance(value, kind)
    else:
        fits = type(number) in (int, float) and (kind is float or number % 1 == 0)
    if not fits:
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text; put it in quotes"}[kind]
        raise ValueError(f"{name}={value!r} must be {wanted}{' or null' if is_optional else ''}")
    return kind(number)

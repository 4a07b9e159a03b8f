"""The trainers that ``python -m benchmarks ppo --until`` compares: what they are called, need, and cannot do."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.baselines.training import Training


@dataclass(frozen=True)
class Trainer:
    title: str
    trainer: str
    """In ``trainers.TRAINERS``; with ", environment alone" behind it, its environments without a training."""
    module: str | None = None
    """That it needs, beyond fastsync's own dependencies."""
    package: str | None = None
    """Of `make baselines`, whose environment has the module where the one that measures has not."""
    has_threads: bool = False
    """Whether torch's number of threads matters to it. JAX takes all cores."""
    lacks: Callable[[Training], Iterator[str]] = lambda _: iter(())
    """Which of the settings it does not have, so that its own way stands instead."""
    refuses: Callable[[Training], str | None] = lambda _: None
    """Why it cannot be trained so."""
    has_scopes: bool = False
    """Whether it can normalise advantages over the rollout, too."""

    def python(self) -> str | None:
        """The interpreter that has it; None where it is not installed."""
        if self.module is None or find_spec(self.module):
            return sys.executable
        own = Path(sys.prefix) / f"with-{self.package}" / "bin" / "python"
        return str(own) if self.package and own.exists() else None

    @property
    def how_to_install(self) -> str:
        command = "make baselines" if self.package else "pip install stable-baselines3"
        return f"{self.title} is left out, because it is not installed: `{command}` installs it"


def _no_gsde(training: Training) -> Iterator[str]:
    if training.gsde:
        yield "no gSDE"


def _fixed_clip(training: Training) -> Iterator[str]:
    yield from _no_gsde(training)
    if training.anneal_clip:
        yield "the clipping is not annealed"


def _sbx_lacks(training: Training) -> Iterator[str]:
    yield from _no_gsde(training)
    if training.clip_value_loss:
        yield "the value loss is not clipped"


def _rejax_lacks(training: Training) -> Iterator[str]:
    yield from _fixed_clip(training)
    yield "gradients are clipped value by value, not by their norm"
    if not training.clip_value_loss:
        yield "the value loss is clipped"


def _gymnax_refuses(training: Training) -> str | None:
    return None if training.env in ("CartPole-v1", "Acrobot-v1", "Pendulum-v1") else f"gymnax has no {training.env}"


def _cleanrl_refuses(training: Training) -> str | None:
    if training.normalize or training.env == "Pendulum-v1":
        return "ppo.py is for discrete actions, and does not normalise"
    return None


SB3 = "stable_baselines3"
COMPARED = {
    "sb3": Trainer("SB3 DummyVecEnv", "stable-baselines3", SB3, has_threads=True, has_scopes=True),
    "sb3-subproc": Trainer("SB3 SubprocVecEnv", "stable-baselines3, SubprocVecEnv", SB3, has_threads=True),
    "cleanrl": Trainer("CleanRL's loop", "cleanrl loop", has_threads=True, refuses=_cleanrl_refuses),
    "sbx": Trainer("SBX", "sbx", "sbx", "sbx", lacks=_sbx_lacks),
    "rlox": Trainer("rlox", "rlox", "rlox", "rlox", has_threads=True, lacks=_fixed_clip),
    "rejax": Trainer("Rejax, gymnax", "rejax", "rejax", "rejax", lacks=_rejax_lacks, refuses=_gymnax_refuses),
    "fastsync": Trainer("fastsync", "fastsync", lacks=_no_gsde, has_scopes=True),
}
"""By the names of the option."""

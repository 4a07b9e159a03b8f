"""Finds environments, and classes of the user's own, by their names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import FlattenObservation

from ..._checks import did_you_mean
from ...doctor import install_command
from .atari import wrap_atari
from .spaces import suits

Env: TypeAlias = "gymnasium.Env[Any, Any]"

# Maps a word in an environment's entry point, or in the error, to the extra that it needs.
EXTRAS = {"ale": "atari", "atari": "atari", "box2d": "box2d", "mujoco": "mujoco"}


@dataclass(frozen=True)
class EnvSource:
    """Makes single environments. It can be pickled."""

    name: str  # The user's name of the environment.
    maker: Callable[..., Env] | None = None  # The user's own function, or None.
    spec: EnvSpec | None = None  # The registration in gymnasium, or None.

    @property
    def is_atari(self) -> bool:
        """Whether it is a game of the Arcade Learning Environment with images as observations."""
        return (
            self.spec is not None
            and str(self.spec.entry_point).startswith("ale_py")
            and self.spec.kwargs.get("obs_type", "rgb") != "ram"
        )

    def make(self, render_mode: str | None = None) -> Env:
        """Makes an environment. Games get the wrappers of ``wrap_atari``. Observations that are neither vectors nor
        uint8 images, such as dictionaries and matrices, become vectors (``gymnasium.wrappers.FlattenObservation``).

        Args:
            render_mode: gymnasium's. The user's own function gets it as an argument, unless it is None.

        Raises:
            ValueError: it cannot be made here.
        """
        rendering: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
        try:
            if self.spec is None:
                assert self.maker is not None
                env = self.maker(**rendering)
            elif self.is_atari:
                return wrap_atari(gymnasium.make(self.spec, disable_env_checker=True, frameskip=1, **rendering))
            else:
                env = gymnasium.make(self.spec, disable_env_checker=True, **rendering)
        except Exception as error:  # any error of the user's function
            raise cannot_be_made(self.name, error, needed_for=str(self.spec and self.spec.entry_point)) from error
        if not isinstance(env, gymnasium.Env):
            raise ValueError(f"env={self.name!r} returned {env!r}; the function must return a gymnasium.Env")
        return env if suits(env.observation_space) else FlattenObservation(env)


def notes_on(name: str, env: Any) -> list[str]:
    """Returns a sentence for the user if an environment normalises by running statistics, as wrappers of gymnasium do.

    Each copy of the environment has its own statistics, which are neither in checkpoints nor in ``fastsync eval``.
    """
    keepers = []
    while env is not None:
        if any(type(value).__name__ == "RunningMeanStd" for value in vars(env).values()):
            keepers.append(type(env).__name__)
        env = env.env if isinstance(env, gymnasium.Wrapper | gymnasium.vector.VectorWrapper) else None
    if not keepers:
        return []
    return [
        f"warning: {' and '.join(keepers)} in env={name!r} normalises by running statistics of each copy of the "
        "environment. Checkpoints do not hold them, so the policy sees other numbers after a resume and in fastsync "
        "eval. Take it out, and set --norm-observations or --norm-rewards: their statistics are those of all ranks, "
        "and are saved"
    ]


def find_env(name: str) -> EnvSource:
    """Finds a gymnasium id, "module:id" or "module:function".

    Raises:
        ValueError: there is no such environment here.
    """
    module_name, colon, attribute = name.rpartition(":")
    if colon:
        try:
            maker = getattr(_import(module_name), attribute, None)
        except Exception as error:  # any error of the user's module
            raise cannot_be_made(name, error) from error
        if callable(maker):
            return EnvSource(name, maker=maker)
    if attribute.startswith("ALE/"):
        try:
            gymnasium.register_envs(importlib.import_module("ale_py"))
        except ImportError as error:
            raise cannot_be_made(name, error, needed_for="ale_py") from error
    try:
        spec = gymnasium.spec(attribute)
    except gymnasium.error.Error as error:
        if colon:
            hint = f"the module {module_name} has no function {attribute!r}, and after its import: {error}"
            raise ValueError(f"env={name!r} cannot be made: {hint}") from error
        raise ValueError(f"env={name!r} cannot be made: {_why_unknown(name, error)}") from error
    return EnvSource(name, spec=replace(spec))


def _why_unknown(name: str, error: Exception) -> str:
    """Returns what is wrong with the name of an environment that gymnasium does not have, and what to write."""
    if isinstance(error, gymnasium.error.VersionNotFound | gymnasium.error.DeprecatedEnv):
        return f"{error}{did_you_mean(name, _usual_ids())}"
    is_file = name.endswith(".py")
    module, _, attribute = name.removesuffix(".py").strip("./").replace("/", ".").rpartition(".")
    own = f"{module}.{attribute}".strip(".") + ":NAME" if is_file else f"{module or 'MODULE'}:{attribute}"
    asks = did_you_mean(name, _usual_ids(), cutoff=0.75)
    return (
        f"gymnasium has no environment of this name{asks or '.'} For an environment of your own write module:name, "
        f"such as {own}, and run where Python finds the module"
    )


def _usual_ids() -> list[str]:
    """Returns the ids of gymnasium's registry without those for JAX and tables, which have the others' names."""
    return [name for name in gymnasium.registry if not name.startswith(("phys2d/", "tabular/"))]


def import_from(setting: str, name: str) -> Any:
    """Imports what a setting names as "module:attribute".

    Raises:
        ValueError: there is no such module or attribute here.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        raise ValueError(f"{setting}={name!r} must be module:Class")
    try:
        return getattr(_import(module_name), attribute)
    except Exception as error:  # any error of the user's module
        raise ValueError(f"{setting}={name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _import(module_name: str) -> Any:
    if os.getcwd() not in sys.path:
        # The command itself does not look for modules in the current folder, unlike python -m.
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(module_name)


def cannot_be_made(name: str, error: Exception, needed_for: str = "") -> ValueError:
    """Returns the error for an environment that cannot be made, and what to install if that is the reason."""
    kind = "" if isinstance(error, (ImportError, gymnasium.error.Error)) else f"{type(error).__name__}: "
    message = f"env={name!r} cannot be made: {kind}{error}"
    missing = isinstance(error, (ImportError, gymnasium.error.DependencyNotInstalled))
    extra = next((extra for part, extra in EXTRAS.items() if part in f"{needed_for} {error}".lower()), None)
    if missing and extra:
        message += f"; install what it needs with: {install_command(extra)}"
    return ValueError(message)

"""Finds environments by their names."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import FlattenObservation, NormalizeObservation, NormalizeReward
from gymnasium.wrappers import vector as vector_wrappers

from ...doctor import install_command
from ...messages import did_you_mean
from ..names import import_module
from .atari import wrap_atari
from .parts import MASK, LeavesChecked, PartsInARow, choices_of, has_parts
from .spaces import suits

Env: TypeAlias = "gymnasium.Env[Any, Any]"

OF_REWARDS = (NormalizeReward, vector_wrappers.NormalizeReward)
NORMALIZERS = (NormalizeObservation, vector_wrappers.NormalizeObservation, *OF_REWARDS)
"""gymnasium's wrappers that have settings in place of them."""

# Maps a word in an environment's entry point, or in the error, to the extra that it needs.
EXTRAS = {"ale": "atari", "atari": "atari", "box2d": "box2d", "mujoco": "mujoco"}


@dataclass(frozen=True)
class EnvSource:
    """Makes single environments. It can be pickled."""

    name: str  # The user's name of the environment.
    maker: Callable[..., Env] | None = None  # The user's own function, or None.
    spec: EnvSpec | None = None  # The registration in gymnasium, or None.
    kwargs: dict[str, Any] = field(default_factory=dict)  # The user's arguments of the environment.
    masks_in_info: bool = False  # Whether the environment says in ``info`` which actions are allowed.
    critic_keys: tuple[str, ...] = ()  # Keys of a Dict that only the critic sees.

    @property
    def is_atari(self) -> bool:
        """Whether it is a game of the Arcade Learning Environment with images as observations."""
        return (
            self.spec is not None
            and str(self.spec.entry_point).startswith("ale_py")
            and (self.spec.kwargs | self.kwargs).get("obs_type", "rgb") != "ram"
        )

    @property
    def makes_vector(self) -> bool:
        """Whether it is the user's function of ``num_envs``, which makes environments that step together."""
        return self.maker is not None and "num_envs" in inspect.signature(self.maker).parameters

    def make_vector(self, num_envs: int, device: torch.device) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        """Makes environments that step together, by the user's function. It gets ``device`` if it takes one.

        Raises:
            ValueError: they cannot be made here.
        """
        assert self.maker is not None
        given: dict[str, Any] = {"num_envs": num_envs}
        if "device" in inspect.signature(self.maker).parameters:
            given["device"] = device
        try:
            vector: Any = self.maker(**given, **self.kwargs)
        except Exception as error:  # any error of the user's function
            raise cannot_be_made(self.name, error, kwargs=self.kwargs) from error
        if not isinstance(vector, gymnasium.vector.VectorEnv):
            raise ValueError(
                f"env={self.name!r} returned {vector!r}; a function that takes num_envs must return a "
                "gymnasium.vector.VectorEnv"
            )
        return vector

    def make(self, index: int = 0, render_mode: str | None = None) -> Env:
        """Makes an environment. Games get the wrappers of ``wrap_atari``. Observations that are neither vectors nor
        uint8 images, such as dictionaries and matrices, become vectors (``gymnasium.wrappers.FlattenObservation``).
        Images in dictionaries and masks of actions remain images and masks in a row (``PartsInARow``).

        Args:
            index: number of the environment, for a user's function with an argument ``index``.
            render_mode: gymnasium's. The user's own function gets it as an argument, unless it is None.

        Raises:
            ValueError: it cannot be made here.
        """
        return self._wrapped(self._make(index, render_mode))

    def explored(self, index: int = 0, render_mode: str | None = None) -> tuple[EnvSource, Env]:
        """Returns this source, which then knows whether masks are in ``info``, and an environment. Arguments and errors
        are those of ``make``.
        """
        env = self._make(index, render_mode)
        source = replace(self, masks_in_info=_masks_in_info(env))
        return source, source._wrapped(env)

    def _make(self, index: int, render_mode: str | None) -> Env:
        kwargs = self.kwargs if render_mode is None else self.kwargs | {"render_mode": render_mode}
        try:
            if self.spec is None:
                assert self.maker is not None
                takes_index = "index" in inspect.signature(self.maker).parameters
                env = self.maker(**({"index": index} if takes_index else {}), **kwargs)
            elif self.is_atari:
                return wrap_atari(gymnasium.make(self.spec, disable_env_checker=True, frameskip=1, **kwargs))
            else:
                env = gymnasium.make(self.spec, disable_env_checker=True, **kwargs)
        except Exception as error:  # any error of the user's function
            needed_for = str(self.spec and self.spec.entry_point)
            raise cannot_be_made(self.name, error, needed_for=needed_for, kwargs=self.kwargs) from error
        if not isinstance(env, gymnasium.Env):
            raise ValueError(f"env={self.name!r} returned {env!r}; the function must return a gymnasium.Env")
        return env

    def _wrapped(self, env: Env) -> Env:
        space = env.observation_space
        if space.is_np_flattenable and (self.masks_in_info or has_parts(space) or self.critic_keys):
            try:
                return PartsInARow(env, masks_in_info=self.masks_in_info, critic_keys=self.critic_keys)
            except ValueError as error:
                raise ValueError(f"env={self.name!r}: {error}") from None
        return env if suits(space) else FlattenObservation(LeavesChecked(env))


def _masks_in_info(env: Env) -> bool:
    """Returns whether ``reset`` says which actions are allowed. The generators that a process shares do not notice."""
    if not choices_of(env.action_space):
        return False
    states = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        return MASK in env.reset(seed=0)[1]
    except Exception:  # any error of the user's environment, which the first real reset tells
        return False
    finally:
        np.random.set_state(states[0])  # noqa: NPY002
        random.setstate(states[1])


def refuse_running_statistics(name: str, env: Any) -> None:
    """Refuses an environment that gymnasium's wrappers normalise by statistics which they still update.

    Each copy of the environment has its own statistics, which are neither in checkpoints nor in ``fastsync eval``.

    Raises:
        ValueError: it has such wrappers. The message names them, and the setting that replaces each.
    """
    found = [each for each in _keepers_of_statistics(env) if isinstance(each, NORMALIZERS)]
    if found:
        names = " and ".join(type(each).__name__ for each in found)
        options = (f"--norm-{'rewards' if isinstance(each, OF_REWARDS) else 'observations'}" for each in found)
        raise ValueError(
            f"env={name!r} normalises by {names}, whose running statistics no checkpoint holds: the policy would see "
            "other numbers after a resume, on another rank and in fastsync eval. Take it out, and set "
            f"{' and '.join(dict.fromkeys(options))}: these statistics are those of all ranks, and are saved"
        )


def notes_on(name: str, env: Any) -> list[str]:
    """Returns a sentence for the user if an environment normalises by running statistics, which nobody saves."""
    keepers = [type(each).__name__ for each in _keepers_of_statistics(env)]
    if not keepers:
        return []
    return [
        f"warning: {' and '.join(keepers)} in env={name!r} normalises by running statistics of each copy of the "
        "environment. Checkpoints do not hold them, so the policy sees other numbers after a resume and in fastsync "
        "eval. Take it out, and set --norm-observations or --norm-rewards: their statistics are those of all ranks, "
        "and are saved"
    ]


def _keepers_of_statistics(env: Any) -> list[Any]:
    """Returns the wrappers that update running statistics, the outermost first, and the environment if it does."""
    keepers = []
    while env is not None:
        has_statistics = any(type(value).__name__ == "RunningMeanStd" for value in vars(env).values())
        if has_statistics and getattr(env, "update_running_mean", True):
            keepers.append(env)
        env = env.env if isinstance(env, gymnasium.Wrapper | gymnasium.vector.VectorWrapper) else None
    return keepers


def find_env(name: str, kwargs: Mapping[str, Any] | None = None, critic_keys: tuple[str, ...] = ()) -> EnvSource:
    """Finds a gymnasium id, "module:id" or "module:function".

    Args:
        name: the setting ``env``.
        kwargs: the setting ``env_kwargs``, for every environment.
        critic_keys: the setting of that name.

    Raises:
        ValueError: there is no such environment here.
    """
    module_name, colon, attribute = name.rpartition(":")
    if colon:
        try:
            module = import_module(module_name)
            maker = getattr(module, attribute, None)
        except Exception as error:  # any error of the user's module
            raise cannot_be_made(name, error) from error
        if callable(maker):
            return EnvSource(name, maker=maker, kwargs=dict(kwargs or {}), critic_keys=critic_keys)
    if attribute.startswith("ALE/"):
        try:
            gymnasium.register_envs(importlib.import_module("ale_py"))
        except ImportError as error:
            raise cannot_be_made(name, error, needed_for="ale_py") from error
    try:
        spec = gymnasium.spec(attribute)
    except gymnasium.error.Error as error:
        if colon:
            own = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            after = f"{str(error).rstrip('.')}{did_you_mean(attribute, own) or '.'}"
            hint = f"the module {module_name} has no function {attribute!r}, and after its import: {after}"
            raise ValueError(f"env={name!r} cannot be made: {hint}") from error
        raise ValueError(f"env={name!r} cannot be made: {_why_unknown(name, error)}") from error
    return EnvSource(name, spec=replace(spec), kwargs=dict(kwargs or {}), critic_keys=critic_keys)


def _why_unknown(name: str, error: Exception) -> str:
    """Returns what is wrong with the name of an environment that gymnasium does not have, and what to write."""
    if isinstance(error, gymnasium.error.DeprecatedEnv):
        return str(error)  # it names the version to use
    if isinstance(error, gymnasium.error.VersionNotFound):
        same = name.rpartition("-v")[0]
        return f"{error}{did_you_mean(name, [each for each in _usual_ids() if each.rpartition('-v')[0] == same])}"
    if not name:
        return "it has no name; give one of gymnasium's, or module:name"
    asks = did_you_mean(name, _usual_ids(), cutoff=0.75)
    unknown = f"gymnasium has no environment of this name{asks or '.'} For an environment of your own write"
    if name.endswith(".py"):
        return f"{unknown} file:name, such as {name}:NAME"
    module, _, attribute = name.strip("./").replace("/", ".").rpartition(".")
    own = f"{module or 'MODULE'}:{attribute}"
    return f"{unknown} module:name, such as {own}, and run where Python finds the module"


def _usual_ids() -> list[str]:
    """Returns the ids of gymnasium's registry without those for JAX and tables, which have the others' names."""
    return [name for name in gymnasium.registry if not name.startswith(("phys2d/", "tabular/"))]


def cannot_be_made(
    name: str, error: Exception, needed_for: str = "", kwargs: Mapping[str, Any] | None = None
) -> ValueError:
    """Returns the error for an environment that cannot be made, and what to install if that is the reason."""
    kind = "" if isinstance(error, (ImportError, gymnasium.error.Error)) else f"{type(error).__name__}: "
    given = f" with env_kwargs={kwargs}" if kwargs else ""
    message = f"env={name!r}{given} cannot be made: {kind}{error}"
    missing = isinstance(error, (ImportError, gymnasium.error.DependencyNotInstalled))
    extra = next((extra for part, extra in EXTRAS.items() if part in f"{needed_for} {error}".lower()), None)
    if missing and extra:
        message += f"; install what it needs with: {install_command(extra)}"
    return ValueError(message)

"""Plays episodes with a policy, by its likeliest actions: on the way of a training, and for ``fastsync eval``."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from .envs.interface import UNSEEN, Environments, Episode, seed_from, seed_globals
from .envs.lookup import Env, EnvSource, find_env, notes_on, refuse_running_statistics
from .envs.make import chosen_gpu, make_own_vector
from .envs.spaces import check_spaces
from .envs.tensors import OnHost
from .envs.vector import EpisodeRecorder, RecordedEnvironments, VectorizedEnvironments, join
from .exchange import Exchange
from .policies import Policy, in_eval_mode
from .settings import RunSettings

MAX_STEPS = 100_000
"""Steps after which an episode is cut that has not ended."""

PROGRESS_SECONDS = 10.0
"""The seconds between messages about the progress."""

SLICE_SECONDS = 2.0
"""The seconds after which ranks that evaluate hear from each other."""


def make_players(
    env: str, kwargs: Mapping[str, Any] | None = None, *, seed: int, indices: Sequence[int] = (UNSEEN,),
    wrap: Callable[[Env], Env] = lambda made: made, render_mode: str | None = None, critic_keys: tuple[str, ...] = (),
    device: torch.device | None = None,
) -> Environments:  # fmt: skip
    """Makes environments to play in, like those of the training.

    Args:
        env: as in the settings.
        kwargs: arguments of the environment, env_kwargs of the settings.
        seed: seeds the episodes, together with the number of the environment.
        indices: numbers of the environments. A user's function with an argument ``index`` gets them less ``UNSEEN``.
        wrap: wraps each environment.
        render_mode: gymnasium's.
        critic_keys: those of the training.
        device: where the policy is, for environments that compute there; by default the CPU.

    Raises:
        ValueError: the environment cannot be made here, or has spaces that the trainer does not support.
    """
    seed_globals(seed, indices[0])
    first, *others = (index - UNSEEN for index in indices)
    source = find_env(env, kwargs, critic_keys)
    if source.makes_vector:
        return _players_of_vector(source, seed=seed, indices=indices, is_drawn=render_mode is not None, device=device)
    source, made_first = source.explored(first, render_mode)
    made = [wrap(each) for each in (made_first, *(source.make(index, render_mode) for index in others))]
    check_spaces(source.name, made[0].observation_space, made[0].action_space)
    makers: list[Callable[[], gymnasium.Env[Any, Any]]] = [
        partial(EpisodeRecorder, each, seed=seed, index=index) for each, index in zip(made, indices, strict=True)
    ]
    vector = join(source.name, makers, made[0].observation_space)
    notes = notes_on(source.name, made[0])
    return RecordedEnvironments(vector, first_index=indices[0], counts_games=source.is_atari, notes=notes)


def _players_of_vector(
    source: EnvSource, *, seed: int, indices: Sequence[int], is_drawn: bool, device: torch.device | None
) -> Environments:
    """Makes environments that step together. Tensors that they give are brought to the host."""
    if is_drawn:
        raise ValueError(f"env={source.name!r} makes environments that step together, which cannot be drawn")
    vector, observation = make_own_vector(source, len(indices), device or torch.device("cpu"))
    if isinstance(observation, Tensor):
        vector = OnHost(vector)
    return VectorizedEnvironments(
        vector, seed=seed_from(seed, indices[0]), first_index=indices[0], notes=notes_on(source.name, vector)
    )


@torch.no_grad()
def play(
    policy: Policy, environments: Environments, num_episodes: int, *, max_steps: int = MAX_STEPS,
    say: Callable[[str], None] = lambda sentence: None, goes_on: Callable[[], bool] = lambda: True,
) -> list[Episode]:  # fmt: skip
    """Plays episodes with the likeliest actions, in eval mode. One environment plays all, or each plays one.

    An episode that has not ended after ``max_steps`` steps is cut, and counts as it is then.

    Args:
        policy: the policy.
        environments: one environment, or ``num_episodes``.
        num_episodes: the number of episodes.
        max_steps: the most steps of an episode.
        say: is called with messages: about the first cut episode, about the number of cut episodes at the end, and now
            and then about the progress.
        goes_on: is called every ``SLICE_SECONDS``. If it returns False, the play ends there.
    """
    num_envs, first = environments.num_envs, environments.first_index
    assert num_envs in (1, num_episodes)
    observations, episodes = environments.reset(), list[Episode]()
    left = np.full(num_envs, num_episodes // num_envs)
    lengths, totals, num_cut, told = np.zeros(num_envs, np.int64), np.zeros(num_envs), 0, time.monotonic()
    asked = told
    device, memory = next(policy.parameters()).device, policy.new_memory(num_envs)
    remembered = () if policy.recurrent is None else (memory,)
    with in_eval_mode(policy):
        while left.any():
            seen = torch.from_numpy(observations).to(device, policy.observation_dtype)
            step = environments.step(policy.likeliest(seen, *remembered).cpu().numpy())
            memory.reset(~step.valid)
            observations, lengths, totals = step.observations, lengths + step.valid, totals + step.rewards
            for episode in step.episodes:
                index = episode.environment - first
                if left[index]:  # else an environment goes on while it waits for the others
                    episodes.append(episode)
                    left[index] -= 1
                lengths[index], totals[index] = 0, 0.0
            cut = [index for index in range(num_envs) if left[index] and lengths[index] >= max_steps]
            for index in cut:
                num_cut += 1
                if num_cut == 1:
                    say(
                        f"episode {len(episodes) + 1} has not ended after {lengths[index]:,} steps, and counts as it "
                        "is.\n  --max-steps cuts episodes elsewhere. If they never end, they do not in training "
                        "either:\n  gymnasium.wrappers.TimeLimit ends them"
                    )
                episodes.append(Episode(first + index, float(totals[index]), int(lengths[index])))
                left[index] -= 1
            if cut and left.any():
                observations, lengths, totals = environments.reset(), np.zeros_like(lengths), np.zeros_like(totals)
                memory.reset()
            now = time.monotonic()
            if now - told >= PROGRESS_SECONDS:
                told = now
                say(
                    f"{len(episodes)} of {num_episodes} episodes have ended, and {lengths.max():,} steps of the next "
                    "are done"
                )
            if now - asked >= SLICE_SECONDS:
                if not goes_on():
                    return episodes
                asked = time.monotonic()
    if num_cut > 1:
        say(f"{num_cut} of {num_episodes} episodes were cut after {max_steps:,} steps")
    return episodes


class Evaluator:
    """Evaluates the policy on the way. The episodes are spread over the ranks, and are the same each time.

    Args:
        settings: eval_env, eval_episodes, env, env_kwargs, seed and micro_batches are used.
        training: environments of the training, whose spaces those of the evaluations must have.
    """

    def __init__(self, settings: RunSettings, training: Environments) -> None:
        self._env, self._kwargs, self._seed = settings.eval_env or settings.env, settings.env_kwargs, settings.seed
        self._prefix = "" if settings.eval_env is None else "eval_"  # of "env" in messages
        self._spaces = training.single_observation_space, training.single_action_space
        self._critic_keys = settings.critic_keys
        self._device = chosen_gpu(settings)
        self._indices = [UNSEEN + number for number in range(settings.eval_episodes)]
        self._is_one_by_one = settings.micro_batches is not None  # what a policy rounds may depend on its other rows

    def check(self) -> None:
        """Checks that the environment exists, has the spaces of the training's, and suits a training.

        Raises:
            ValueError: it does not.
        """
        self._make([UNSEEN], self._device).close()

    def evaluate(
        self, policy: Policy, exchange: Exchange, stop_requested: Callable[[], bool] = lambda: False
    ) -> list[Episode] | None:
        """Plays this rank's episodes. Every rank must call it.

        The training's random numbers, and the buffers of the policy, are afterwards what they were before. So the
        training goes on as if there had been no evaluation.

        Args:
            policy: the policy.
            exchange: of the ranks that evaluate.
            stop_requested: tells whether this rank was asked to stop. Then all ranks leave the evaluation.

        Returns:
            The episodes of all ranks; None if a rank was asked to stop meanwhile.
        """
        numbers, together = list[float](), _Together(exchange, stop_requested)
        mine = self._indices[exchange.rank :: exchange.world_size]
        device = next(policy.parameters()).device
        for indices in [[each] for each in mine] if self._is_one_by_one else [mine] if mine else []:
            if together.are_stopped:
                break
            with _kept(policy), self._make(indices, device) as environments:
                for number, value, length, _ in play(policy, environments, len(indices), goes_on=together.go_on):
                    numbers += [indices[number - environments.first_index], value, length]
        if not together.wait_for_all():
            return None
        gathered = [number for ranks_numbers in exchange.all_gather(numbers) for number in ranks_numbers]
        columns = zip(gathered[::3], gathered[1::3], gathered[2::3], strict=True)
        return sorted(Episode(int(environment), value, int(length)) for environment, value, length in columns)

    def _make(self, indices: Sequence[int], device: torch.device | None) -> Environments:
        def checked(env: Env) -> Env:
            refuse_running_statistics(self._env, env)
            return env

        try:
            environments = make_players(
                self._env, self._kwargs, seed=self._seed, indices=indices, wrap=checked, critic_keys=self._critic_keys,
                device=device,
            )  # fmt: skip
            try:
                check_same_spaces(environments, self._spaces, f"env={self._env!r}")
            except ValueError:
                environments.close()
                raise
        except ValueError as error:
            raise ValueError(f"{self._prefix}{error}") from error
        return environments


class _Together:
    """Ranks that evaluate hear from each other now and then.

    So a rank that is done waits for the others however long their episodes are, and a stop waits for no episode.
    """

    def __init__(self, exchange: Exchange, stop_requested: Callable[[], bool]) -> None:
        self._exchange, self._stop_requested = exchange, stop_requested
        self._are_done = self.are_stopped = False

    def go_on(self, *, is_done: bool = False) -> bool:
        """Whether no rank was asked to stop. Every rank calls it until all are done or one of them has been asked."""
        answers = self._exchange.all_gather([is_done, self._stop_requested()])
        self._are_done = all(done for done, _ in answers)
        self.are_stopped = any(asked for _, asked in answers)
        return not self.are_stopped

    def wait_for_all(self) -> bool:
        """Waits until all ranks are done. Returns False if one was asked to stop before that."""
        while not (self._are_done or self.are_stopped):
            self.go_on(is_done=True)
        return self._are_done


def check_same_spaces(environments: Environments, needed: tuple[Space[Any], Space[Any]], name: str) -> None:
    """Checks that a policy that was made for the ``needed`` spaces can play in environments called ``name``.

    Raises:
        ValueError: observations or actions are of another kind, or actions have other bounds.
    """
    own = environments.single_observation_space, environments.single_action_space
    for what, has, needs in zip(("observations", "actions"), own, needed, strict=True):
        if _kind(has) != _kind(needs) or (what == "actions" and _bounds(has) != _bounds(needs)):
            raise ValueError(f"{name} has {what} {has}, and the training's environment has {needs}")


def _kind(space: Space[Any]) -> Any:
    """Returns what the policy's layers depend on."""
    choices = getattr(space, "n", getattr(space, "nvec", None))
    return type(space), space.shape, space.dtype, np.array(choices).tolist(), getattr(space, "parts", None)


def _bounds(space: Space[Any]) -> Any:
    """Returns the bounds of continuous actions, to which the policy's are scaled or clipped."""
    return (space.low.tolist(), space.high.tolist()) if isinstance(space, spaces.Box) else None


@contextmanager
def _kept(policy: Policy) -> Iterator[None]:
    """Restores the generators that a process shares, and the buffers of the policy, at the end of a ``with`` block."""
    buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    try:
        with kept_generators(next(policy.parameters()).device):
            yield
    finally:
        for name, buffer in policy.named_buffers():
            if name in buffers:  # a layer may make one in its first forward
                buffer.copy_(buffers[name])


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restores the generators of torch, numpy and Python that a process shares, at the end of a ``with`` block."""
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

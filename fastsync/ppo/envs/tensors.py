"""Environments that step together in torch, such as on a GPU: their tensors stay on their device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from torch import Tensor

from .interface import Array, Environments, Episode, Step
from .spaces import tensor_translator


class TensorEnvironments(Environments):
    """A vector environment whose observations, rewards and flags are tensors.

    What ``reset`` and ``step`` return are tensors, and ``step`` takes one. Nothing waits for the device, but for
    ``take_episodes``. A state holds only what a message needs: no episode goes on after a resume.

    Args:
        vector: the vector environment.
        seed: its seed.
        first_index, notes: see ``Environments``.
    """

    takes_tensors = True

    def __init__(
        self, vector: VectorEnv[Any, Any, Any], *, seed: int, first_index: int, notes: Sequence[str] = ()
    ) -> None:
        self._seed = seed
        self._observations: Any = vector.reset(seed=seed)[0]  # tells the device
        super().__init__(vector, first_index=first_index, notes=notes)
        self._to_space = tensor_translator(self.single_action_space, self._device)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._observations.device
        return device

    def step(self, actions: Any) -> Any:
        """Steps with actions as ``Environments.step`` takes them, but as a tensor. Returns a ``Step`` of tensors."""
        actions = self._to_space(torch.as_tensor(actions, device=self._device))
        observations, rewards, terminated, truncated, infos = self._vector.step(actions)
        terminated, truncated = terminated.bool(), truncated.bool()
        valid, ended = ~self._restarting, terminated | truncated
        self._observations, self._restarting = observations, ended
        returns, lengths = self._returns + rewards, self._lengths + valid
        self._log.append(torch.stack([ended.to(returns.dtype), returns, lengths.to(returns.dtype)]))
        self._returns, self._lengths = returns.masked_fill(ended, 0), lengths.masked_fill(ended, 0)
        return Step(observations, rewards, terminated, truncated, valid, [], infos)

    def take_episodes(self) -> list[Episode]:
        if not self._log:
            return []
        ended, returns, lengths = torch.stack(self._log, 1).cpu().unbind()  # [steps, N] each
        self._log.clear()
        return [
            Episode(self.first_index + index, returns[row, index].item(), int(lengths[row, index]), row)
            for row, index in ended.nonzero().tolist()
        ]

    def state(self) -> dict[str, Any]:
        state = {"observations": self._observations, "restarting": self._restarting}
        return {name: tensor.cpu() for name, tensor in state.items()}

    def restore(self, state: dict[str, Any]) -> None:
        return None

    def _clear_statistics(self) -> None:
        self._restarting: Any = torch.zeros(self.num_envs, dtype=torch.bool, device=self._device)
        self._returns: Any = torch.zeros(self.num_envs, device=self._device)
        self._lengths: Any = torch.zeros(self.num_envs, dtype=torch.int64, device=self._device)
        self._log = list[Tensor]()

    def _reset(self) -> Any:
        return self._vector.reset(seed=self._seed)[0]

    def _state(self) -> dict[str, Any]:
        return {}

    def _restore(self, state: dict[str, Any]) -> Array | None:
        return None


class NextStep(VectorWrapper):
    """Has environments of tensors that reset within a step do so in the next one, as ``Environments`` need it.

    They take the first step of an episode by the action for the observation before it. So nothing is learnt from that
    step, and its reward does not count. The last observation of an episode is ``infos["final_obs"]``, or without it the
    one before.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, infos = self.env.reset(seed=seed, options=options)
        self._before = observations.clone()
        self._ended = torch.zeros(self.num_envs, dtype=torch.bool, device=observations.device)
        return observations, infos

    def step(self, actions: Any) -> Any:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        restarts = self._ended
        terminated, truncated = terminated.bool() & ~restarts, truncated.bool() & ~restarts
        self._ended = terminated | truncated
        at_end = self._ended.view(-1, *[1] * (observations.dim() - 1))
        self._before = torch.where(at_end, infos.get("final_obs", self._before), observations)
        return self._before, rewards.masked_fill(restarts, 0), terminated, truncated, infos


def resets_in_next_step(vector: VectorEnv[Any, Any, Any], observation: Any) -> VectorEnv[Any, Any, Any]:
    """Wraps environments in ``NextStep`` if they need it. ``observation`` is one of theirs."""
    is_same = vector.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
    return NextStep(vector) if is_same and isinstance(observation, Tensor) else vector


class OnHost(VectorWrapper):
    """Gives arrays in place of tensors, for evaluations."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self._device = torch.device("cpu")

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, infos = self.env.reset(seed=seed, options=options)
        if isinstance(observations, Tensor):
            self._device = observations.device
        return on_host(observations), infos

    def step(self, actions: Any) -> Any:
        observations, rewards, *flags, infos = self.env.step(torch.as_tensor(actions, device=self._device))
        return on_host(observations), on_host(rewards), *(on_host(flag.bool()) for flag in flags), infos


def on_host(values: Any) -> Any:
    """Returns an array of what a tensor has; other values as they are."""
    return values.cpu().numpy() if isinstance(values, Tensor) else values


def has_tensors(observation: Any) -> bool:
    """Returns whether an observation is a tensor, or has some."""
    inside = observation.values() if isinstance(observation, Mapping) else [observation]
    return any(isinstance(each, Tensor) for each in inside)

"""Environments that step together in torch. Reach them as "tests.torch_envs:name"."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from tests import toy_envs


class TorchCartPole(VectorEnv[Any, Any, Any]):
    """CartPole-v1 in batches of tensors on a device."""

    def __init__(self, num_envs: int, device: Any = "cpu", limit: int = 500) -> None:
        like: Any = gymnasium.make("CartPole-v1")
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.device, self.limit = num_envs, torch.device(device), limit
        self.single_observation_space: Any = like.observation_space
        self.single_action_space: Any = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        if seed is not None:  # all starts are drawn here, so that no step copies any to the device
            drawn = torch.rand(1000, self.num_envs, 4, generator=torch.Generator().manual_seed(seed)) * 0.1 - 0.05
            self.starts, self.num_drawn = drawn.to(self.device).unbind(), 0
        self.state = self.drawn()
        self.time = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.ended = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.state, {}

    def drawn(self) -> Tensor:
        self.num_drawn += 1
        return self.starts[self.num_drawn % len(self.starts)]

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        assert actions.device.type == self.device.type
        assert actions.dtype == torch.int64
        x, x_dot, theta, theta_dot = self.state.unbind(-1)
        force = actions * 20.0 - 10.0
        sine, cosine = theta.sin(), theta.cos()
        temp = (force + 0.05 * theta_dot.square() * sine) / 1.1
        theta_acc = (9.8 * sine - cosine * temp) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        x_acc = temp - 0.05 * theta_acc * cosine / 1.1
        moved = torch.stack(
            [x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc], -1
        )
        restarts = self.ended  # these ignore their action
        self.state = torch.where(restarts.unsqueeze(-1), self.drawn(), moved)
        self.time = torch.where(restarts, 0, self.time + 1)
        terminated = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2095)
        truncated = (self.time >= self.limit) & ~terminated
        self.ended = terminated | truncated
        return self.state, (~restarts).float(), terminated, truncated, {"speed": self.state[:, 1].abs()}


def cart_pole(num_envs: int, device: torch.device, limit: int = 500) -> TorchCartPole:
    return TorchCartPole(num_envs, device, limit)


class SameStep(TorchCartPole):
    """Resets within the last step of an episode, and notes its observations."""

    def __init__(self, num_envs: int, *, tells: bool) -> None:
        super().__init__(num_envs, limit=20)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.tells, self.final = tells, list[Tensor]()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        before = self.state
        final, rewards, terminated, truncated, _ = super().step(actions)
        self.final += (final if self.tells else before)[self.ended]
        self.state = torch.where(self.ended.unsqueeze(-1), self.drawn(), final)
        self.time = torch.where(self.ended, 0, self.time)
        self.ended = torch.zeros_like(self.ended)
        return self.state, rewards, terminated, truncated, {"final_obs": final} if self.tells else {}


def same_step(num_envs: int, tells: bool = True) -> SameStep:
    return SameStep(num_envs, tells=tells)


def disabled(num_envs: int) -> TorchCartPole:
    made = TorchCartPole(num_envs)
    made.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    return made


def not_a_vector(num_envs: int) -> Any:
    return gymnasium.make("CartPole-v1")


def elsewhere(num_envs: int) -> TorchCartPole:
    """Has a space of another size than what it gives."""
    made = TorchCartPole(num_envs)
    made.single_observation_space = spaces.Box(-1, 1, (5,))
    return made


class FlagsOfFloats(TorchCartPole):
    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = super().step(actions)
        return observations, rewards, terminated.float(), truncated.float(), infos


def of_arrays(num_envs: int, kind: str) -> SyncVectorEnv:
    """Environments of gymnasium or of the toys, which observe in numpy."""
    make = getattr(toy_envs, kind, partial(gymnasium.make, kind))
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def on_gpus_only(num_envs: int, device: torch.device) -> TorchCartPole:
    if device.type != "cuda":
        raise RuntimeError(f"no simulator for {device}")
    return TorchCartPole(num_envs)

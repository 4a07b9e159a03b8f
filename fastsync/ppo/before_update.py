"""What an update changes, to be put back where it runs again because a rank was lost in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Before:
    """What learning from a rollout changes in a ``ppo.PPO``, as it was before."""

    def __init__(self, ppo: Any) -> None:
        self._ppo = ppo
        self._tensors = {name: tensor.detach().clone() for name, tensor in self._named_tensors()}
        self._states = copy.deepcopy([part.state_dict() for part in self._parts()])
        self._rate = copy.deepcopy(ppo.learning_rate.state_dict())
        self._numbers = ppo.step, ppo.update, ppo.streams[0].num_draws
        self._world_size = ppo.exchange.world_size
        self._random = torch.get_rng_state()

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        modules = {"policy": self._ppo.policy, "rewards": self._ppo.reward_normalizer}
        for prefix, module in modules.items():
            if module is not None:
                yield from module.named_parameters(prefix)
                yield from module.named_buffers(prefix)

    def _parts(self) -> tuple[Any, ...]:
        return self._ppo.optimizer, self._ppo.scaler, self._ppo.sync

    @torch.no_grad()
    def put_back(self) -> None:
        """Puts it back. What averaging still waits for ends first."""
        ppo = self._ppo
        ppo.sync.end_interrupted()
        for name, tensor in self._named_tensors():
            tensor.copy_(self._tensors[name])
        *_, averaging = states = copy.deepcopy(self._states)
        for residual in averaging["residuals"].values():  # adds as much to the mean of fewer ranks, see use_group()
            residual *= ppo.sync._group.size() / self._world_size
        for part, state in zip(self._parts(), states, strict=True):
            part.load_state_dict(state)
        ppo.learning_rate.put_back(self._rate)
        ppo.step, ppo.update, ppo.streams[0].num_draws = self._numbers
        torch.set_rng_state(self._random)

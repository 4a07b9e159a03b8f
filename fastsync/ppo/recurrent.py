"""Layers that remember earlier observations: an LSTM or a GRU between a policy's trunk and its heads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence


class Recurrent(nn.Module):
    """An LSTM or a GRU over the steps of each environment.

    What it remembers of an environment is a state, a row [S]. A state of zeros is that of the start of an episode.

    Args:
        kind: lstm or gru.
        num_inputs: F, the width of its input.
        size: H, the width of its output.
    """

    def __init__(self, kind: Literal["lstm", "gru"], num_inputs: int, size: int) -> None:
        super().__init__()
        self.layer: nn.LSTM | nn.GRU = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](num_inputs, size)
        self.state_size = 2 * size if kind == "lstm" else size

    def nothing(self, num_envs: int) -> Tensor:
        """Returns states [N, S] of the start of episodes."""
        return next(self.parameters()).new_zeros(num_envs, self.state_size)

    def step(self, features: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Takes a step in each of N environments.

        Args:
            features: [N, F].
            states: [N, S].

        Returns:
            Outputs [N, H], and the states [N, S] after the step.
        """
        with _full_precision(features):
            outputs, after = self.layer(self._input(features).unsqueeze(0), self._for_layer(states))
        rows = torch.cat(after, dim=-1) if isinstance(after, tuple) else after
        return outputs.squeeze(0), rows.squeeze(0)

    def forward(self, features: Tensor, states: Tensor, begins: Tensor) -> Tensor:
        """Goes over pieces of episodes. Each piece is in rows one after the other. Returns outputs [B, H].

        Args:
            features: [B, F].
            states: [B, S]. Only those before the first row of each piece are used.
            begins: [B] bool: the row is the first of a piece. That is so of the first row.
        """
        firsts = begins.nonzero().squeeze(-1)
        lengths = torch.diff(firsts, append=firsts.new_tensor([len(begins)])).tolist()
        with _full_precision(features):
            pieces = pack_sequence(self._input(features).split(lengths), enforce_sorted=False)
            outputs, _ = self.layer(pieces, self._for_layer(states[firsts]))
        return torch.cat(unpack_sequence(outputs))

    def _input(self, features: Tensor) -> Tensor:
        return features.to(next(self.parameters()).dtype)

    def _for_layer(self, states: Tensor) -> Any:
        """Returns states [N, S] as the layer takes them: [1, N, H], or for an LSTM two of them."""
        layered = states.unsqueeze(0)
        if isinstance(self.layer, nn.GRU):
            return layered
        return tuple(half.contiguous() for half in layered.chunk(2, dim=-1))


def _full_precision(features: Tensor) -> AbstractContextManager[None]:
    """Turns autocast off inside a ``with`` block: over many steps, rounding would add up."""
    kind = features.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class Memory:
    """What a policy remembers of N environments while it plays. A policy without recurrent layers remembers nothing.

    Args:
        recurrent: the layers, if there are any.
        num_envs: N.
    """

    def __init__(self, recurrent: Recurrent | None, num_envs: int) -> None:
        self._recurrent = recurrent
        self.states = torch.empty(num_envs, 0, device="cpu") if recurrent is None else recurrent.nothing(num_envs)
        """[N, S]: the states before the next observations."""

    def step(self, features: Tensor) -> Tensor:
        """Takes the layers' step over features [N, F], and remembers it. Returns outputs [N, H]."""
        if self._recurrent is None:
            return features
        features, self.states = self._recurrent.step(features, self.states)
        return features

    def reset(self, begins: Any = None) -> None:
        """Forgets what was before an episode.

        Args:
            begins: [N] bool, an array or a tensor: the environments whose next observation is the first of an episode.
                By default all.
        """
        if self._recurrent is None:
            return
        if begins is None:
            self.states = torch.zeros_like(self.states)
        else:  # a failed simulation may have left nan, which no product makes 0
            mask = torch.as_tensor(begins, device=self.states.device).view(-1, 1)
            self.states = self.states.masked_fill(mask, 0.0)

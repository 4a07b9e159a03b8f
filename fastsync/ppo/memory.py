"""The memory that a recurrent policy carries from step to step."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

MemoryState: TypeAlias = tuple[Tensor, Tensor]
"""Hidden state and cell state of an LSTM, [N, size] each."""


class Memory(nn.Module):
    """An LSTM that begins anew with each episode."""

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(num_inputs, size)
        for name, parameter in self.cell.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.orthogonal_(parameter)

    def forward(self, inputs: Tensor, state: MemoryState, starts: Tensor) -> tuple[Tensor, MemoryState]:
        """Hidden states [T, N, size] and the last state.

        Args:
            inputs: [T, N, num_inputs].
            state: before the first row.
            starts: [T, N] bool: the row is the first of an episode.
        """
        hidden, cell = state
        goes_on = (~starts).unsqueeze(-1).to(hidden.dtype)
        rows = []
        for row, keep in zip(inputs, goes_on, strict=True):
            hidden, cell = self.cell(row, (hidden * keep, cell * keep))
            rows.append(hidden)
        return torch.stack(rows), (hidden, cell)

    def initial_state(self, num_envs: int) -> MemoryState:
        """Zeros, on the parameters' device."""
        zeros = self.cell.weight_hh.new_zeros(num_envs, self.cell.hidden_size)
        return zeros, zeros.clone()

"""Sums over what is yet to come, each step of it discounted: of advantages, of returns."""

from __future__ import annotations

import torch
from torch import Tensor

import fastsync._ppo  # noqa: F401 registers torch.ops.fastsync.discounted_sums


def in_plain_pytorch(summands: Tensor, decays: Tensor) -> Tensor:
    """The specification of torch.ops.fastsync.discounted_sums, and what a GPU computes.

    Args:
        summands: [T, N].
        decays: [T, N], of what is summed behind a row; those of the last row count for nothing.

    Returns:
        sums [T, N]: ``sums[t] = summands[t] + decays[t] * sums[t + 1]``.
    """
    sums = torch.empty_like(summands)
    following = torch.zeros_like(summands[0])
    for summand, decay, result in zip(summands.flip(0), decays.flip(0), reversed(sums.unbind()), strict=True):
        following = torch.addcmul(summand, decay, following, out=result)
    return sums


def discounted_sums(summands: Tensor, decays: Tensor) -> Tensor:
    """As ``in_plain_pytorch``, by one operator where there is one."""
    if summands.device.type == "cpu":
        return torch.ops.fastsync.discounted_sums.default(summands, decays)  # type: ignore[no-any-return]
    return in_plain_pytorch(summands, decays)

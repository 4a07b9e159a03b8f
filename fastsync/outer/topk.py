"""``TopK``: the largest values of outer differences alone, for links over which not even 8 bits a value fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..sync.compression import FOR_DILOCO

BLOCK = 4096
"""The number of values in a block, of which the largest are sent. An index in it has 12 bits."""
LEVELS = 4
"""The number of magnitudes that the sent values of a block can have."""


@dataclass(frozen=True)
class TopK:
    """Sends a fixed share of the values, those that are largest in their block of 4096, as 13 bits each.

    A vector keeps the unsent values for the next differences. It replaces the outer momentum: SparseLoCo (A. Sarfi and
    others, arXiv 2508.15706, 2025). Every site gets the values of every other, so the bytes that it receives grow with
    the number of sites. Raises ValueError where a number is out of its range.
    """

    fraction: float = 1 / 64
    """The fraction of the values that is sent, above 0 and at most 1. A block sends a multiple of 8 values."""
    decay: float = 0.95
    """The factor of an unsent value when the next difference is added to it, above 0 and at most 1."""

    _way_out: ClassVar[str] = FOR_DILOCO

    def __post_init__(self) -> None:
        for name, value in (("fraction", self.fraction), ("decay", self.decay)):
            if not 0 < value <= 1:
                raise ValueError(f"compression: TopK's {name} has to be above 0 and at most 1, got {value!r}")

    @property
    def values_a_block(self) -> int:
        """How many values of each block are sent."""
        return max(8, round(self.fraction * BLOCK / 8) * 8)


class TopKAverager:
    """Averages the ``.grad`` of some tensors over a group's ranks, in place, each rank sending its largest values."""

    def __init__(self, named: Mapping[str, Tensor], top_k: TopK, group: dist.ProcessGroup) -> None:
        self._tensors = list(named.values())
        self._top_k = top_k
        self._group = group
        numel = sum(tensor.numel() for tensor in self._tensors)
        self._unsent = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self._unsent_then = self._unsent

    def synchronize(self) -> None:
        """Every rank must call it.

        Raises:
            RuntimeError: another rank did not take part in time, or is lost. Then nothing has changed.
        """
        gradients = torch.cat([tensor.grad.reshape(-1).float() for tensor in self._tensors if tensor.grad is not None])
        wanted = self._unsent * self._top_k.decay + gradients
        message = encode(wanted, self._top_k.values_a_block)
        self._unsent_then = wanted - decode(message, self._top_k.values_a_block, wanted.numel())
        messages = [torch.empty_like(message) for _ in range(self._group.size())]
        self._group.allgather(messages, message).wait()
        mean = torch.zeros_like(wanted)
        for theirs in messages:  # in the order of ranks, so that all get the same bits
            mean += decode(theirs, self._top_k.values_a_block, mean.numel())
        mean /= self._group.size()
        self.settle()
        first = 0
        for tensor in self._tensors:
            assert tensor.grad is not None
            tensor.grad.copy_(mean[first : first + tensor.numel()].view_as(tensor))
            first += tensor.numel()

    def settle(self) -> None:
        """Counts the newest message as received. After an error another rank may tell that it was."""
        self._unsent = self._unsent_then

    def state_dict(self) -> dict[str, Any]:
        """Returns what has not been sent yet. It is each rank's own."""
        return {"unsent": self._unsent}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict()`` returned. Raises ValueError where it is of another size."""
        unsent = state_dict.get("unsent")
        if not isinstance(unsent, Tensor) or unsent.shape != self._unsent.shape:
            raise ValueError(f"state_dict: expected 'unsent', of {self._unsent.numel()} values")
        self._unsent = self._unsent_then = unsent.to("cpu", torch.float32, copy=True)


def encode(values: Tensor, values_a_block: int) -> Tensor:
    """Encodes the largest values of each block of a float32 vector on the CPU, as a vector of uint8.

    Note [How TopK travels]
    For each block the mean magnitude of each quarter of its largest values is sent; then their 12-bit indices, from the
    largest magnitude to the smallest; then a bit for each sign. The order tells which quarter a value belongs to. The
    number of values a block is a multiple of 8.
    """
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    magnitudes, index = blocks.abs().topk(values_a_block, dim=1)
    levels = magnitudes.view(-1, LEVELS, values_a_block // LEVELS).mean(dim=2)
    signs = blocks.gather(1, index) < 0
    even, odd = index[:, 0::2], index[:, 1::2]
    packed = torch.stack([even & 0xFF, even >> 8 | (odd & 0xF) << 4, odd >> 4], dim=2)
    bits = signs.view(-1, values_a_block // 8, 8) << torch.arange(8, device="cpu")
    parts = (levels.view(torch.uint8), packed.flatten(1).to(torch.uint8), bits.sum(dim=2).to(torch.uint8))
    return torch.cat(parts, dim=1).flatten()


def decode(message: Tensor, values_a_block: int, numel: int) -> Tensor:
    """Decodes what ``encode`` made of ``numel`` values, into a new vector that is 0 where nothing was sent."""
    sizes = [4 * LEVELS, values_a_block * 3 // 2, values_a_block // 8]
    levels, packed, bits = message.view(-1, sum(sizes)).split(sizes, dim=1)
    first, second, third = packed.long().view(-1, values_a_block // 2, 3).unbind(dim=2)
    index = torch.stack([first | (second & 0xF) << 8, second >> 4 | third << 4], dim=2).flatten(1)
    magnitudes = (
        levels.flatten().view(torch.float32).view(-1, LEVELS).repeat_interleave(values_a_block // LEVELS, dim=1)
    )
    signs = (bits.unsqueeze(2) >> torch.arange(8, device="cpu") & 1).flatten(1)
    blocks: Tensor = magnitudes.new_zeros(len(index), BLOCK)
    blocks.scatter_(1, index, torch.where(signs == 1, -magnitudes, magnitudes))
    return blocks.flatten()[:numel]

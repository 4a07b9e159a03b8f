"""Comparison of tensors by their bits, with a message that tells where they part."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str = "tensors") -> None:
    """Raises AssertionError unless both hold the same bits; any nan equals any nan, but −0 differs from 0.

    The message gives the number of elements that differ, and the first of them: its coordinate, both values and their
    bits. ``what`` names the tensors in it. Devices and strides may differ.
    """
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        raise AssertionError(
            f"{what}: {actual.dtype} of shape {tuple(actual.shape)} is not "
            f"{expected.dtype} of shape {tuple(expected.shape)}"
        )
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    differs = _bits(actual) != _bits(expected)
    differs &= ~(actual.isnan() & expected.isnan())
    coordinates = differs.nonzero()
    if len(coordinates) == 0:
        return
    first = tuple(coordinates[0].tolist())
    raise AssertionError(
        f"{what}: {len(coordinates)} of {actual.numel()} elements differ, the first at {list(first)}: "
        f"{_describe(actual[first])} is not {_describe(expected[first])}"
    )


def _bits(values: Tensor) -> Tensor:
    return values.view(_INTEGERS[values.element_size()])


def _describe(value: Tensor) -> str:
    size = value.element_size()
    bits = _bits(value).item() & ((1 << 8 * size) - 1)
    return f"{value.item()!r} (bits 0x{bits:0{2 * size}x})"

"""Error feedback in torch.ops.fastsync: what a wire has not carried is kept, and sent later."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastsync._C  # noqa: F401 registers torch.ops.fastsync
from tests import reference
from tests.bitwise import assert_bitwise_equal
from tests.emulated import ops
from tests.engine.sample_inputs import GRAD_DTYPES, NUM_BEHIND, on_each_device, random_values

LOSSY = [torch.float16, torch.bfloat16, torch.uint8, torch.int8]


def new_stats(device: str) -> Tensor:
    return torch.zeros(reference.NUM_STATS, dtype=torch.float64, device=device)


def new_wire(grad: Tensor, wire_dtype: torch.dtype) -> Tensor:
    return torch.empty(reference.wire_numel([grad.numel()], wire_dtype), dtype=wire_dtype, device=grad.device)


def new_residual(numel: int, dtype: torch.dtype, device: str) -> Tensor:
    """Zeros, with room behind them, for what is wrong is to fail and not to crash."""
    return torch.zeros(numel + NUM_BEHIND, dtype=dtype, device=device)[:numel]


def decoded(wire: Tensor, like: Tensor, scale: Tensor | None = None) -> Tensor:
    """What a rank gets from a wire, before it is rounded to the gradient's dtype."""
    back = torch.empty_like(like)
    ops.unpack(wire, [back], new_stats(like.device.type), None if scale is None else scale.clone())
    return back


@on_each_device
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("wire_dtype", LOSSY)
@given(
    values=st.sampled_from(["ordinary", "wide", "zeros", "mostly_ordinary", "bits"]),
    numel=st.sampled_from([1, 127, 129, 256, 300, 777]),
    exponent=st.integers(-5, 9),
    seed=st.integers(0, 2**31),
)
@settings(derandomize=True, deadline=None, max_examples=25)
def test_what_is_kept_and_what_was_sent_are_the_value(
    wire_dtype: torch.dtype,
    dtype: torch.dtype,
    device: str,
    values: str,
    numel: int,
    exponent: int,
    seed: int,
) -> None:
    """Over several steps, exactly."""
    generator = torch.Generator().manual_seed(seed)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    scale = torch.tensor(2.0**exponent, device=device) if wire_dtype == torch.float16 else None
    limit = None if wire_dtype in reference.BLOCK_BITS else reference.saturation_limit(wire_dtype, 1)
    residual = new_residual(numel, compute, device)
    for _ in range(4):
        grad = random_values(values, numel, dtype, generator).to(device)
        before = residual.clone()
        wire = new_wire(grad, wire_dtype)
        ops.pack([grad], wire, new_stats(device), scale, [residual], limit=limit)
        value = (grad.to(compute) + before).cpu()
        sent = decoded(wire, residual, scale).cpu()
        finite = sent.isfinite()
        assert_bitwise_equal(residual.cpu()[~finite], before.cpu()[~finite], "residual where nothing finite was sent")
        if wire_dtype not in reference.BLOCK_BITS:
            assert torch.equal(finite, value.isfinite())
        lost = value - sent
        assert_bitwise_equal(residual.cpu()[finite], lost[finite], "residual")
        if compute == torch.float32:
            factor = 1.0 if scale is None else scale.item()
            sent_whole = finite & (value.abs() * factor <= (limit or reference.BLOCK_LIMIT))  # others saturated
            exact = residual.cpu().double() + sent.double()
            assert torch.equal(exact[sent_whole], value.double()[sent_whole])

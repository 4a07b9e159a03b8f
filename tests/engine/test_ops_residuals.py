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
from tests.engine.sample_inputs import GRAD_DTYPES, NUM_BEHIND, in_either_order, on_each_device, random_values

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


@in_either_order
@pytest.mark.parametrize("wire_dtype", LOSSY)
def test_what_is_too_small_for_the_wire_arrives_in_the_end(wire_dtype: torch.dtype, device: str) -> None:
    """A value of a thousandth of a step is lost each time without a residual, and arrives within a step with one."""
    step = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-7, torch.uint8: 1 / 127, torch.int8: 1 / 7}[wire_dtype]
    small = step / 1000
    # bfloat16 has steps of that size only beside a large value, which the residual has to hold up.
    start = 1.0 if wire_dtype == torch.bfloat16 else 0.0
    grad = torch.full((200,), start + small, dtype=torch.float64, device=device)
    grad[::128] = 1.0
    residual = new_residual(grad.numel(), grad.dtype, device)
    total = torch.zeros_like(grad)
    plain = new_wire(grad, wire_dtype)
    ops.pack([grad], plain, new_stats(device))
    assert decoded(plain, grad)[1] == start
    for _ in range(3000):
        wire = new_wire(grad, wire_dtype)
        ops.pack([grad], wire, new_stats(device), None, [residual])
        total += decoded(wire, grad)
    assert (total - 3000 * grad).abs().max() <= step
    assert (total - 3000 * start)[1] >= 2 * step


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wire_dtype", LOSSY)
@given(num_wires=st.integers(1, 8), exponent=st.integers(-5, 9), seed=st.integers(0, 2**31))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_sums_that_are_encoded_anew_lose_nothing_over_the_steps(
    wire_dtype: torch.dtype, dtype: torch.dtype, device: str, num_wires: int, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor(2.0**exponent, device=device) if wire_dtype == torch.float16 else None
    residual = new_residual(384, dtype, device)
    applied, wanted = torch.zeros(384, dtype=torch.float64), torch.zeros(384, dtype=torch.float64)
    rounding = 0.0
    for _ in range(5):
        grads = [torch.randn(384, generator=generator, dtype=dtype).to(device) for _ in range(num_wires)]
        wires = torch.stack([new_wire(grad, wire_dtype) for grad in grads])
        for grad, wire in zip(grads, wires, strict=True):
            ops.pack([grad], wire, new_stats(device), scale)
        out = torch.empty_like(wires[0])
        ops.reduce(wires, out, scale, residual, multiplier=1 / num_wires, grad_dtype=dtype)
        mean = sum(decoded(wire, grad, scale).double().cpu() for wire in wires) / num_wires
        wanted += mean
        applied += decoded(out, grad, scale).double().cpu()
        rounding += (num_wires + 2) * 8 * torch.finfo(torch.float32).eps
    assert (applied + residual.double().cpu() - wanted).abs().max() <= rounding
    assert (applied - wanted).abs().max() <= residual.abs().max() + rounding

"""The engine in plain PyTorch: the specification of what the compiled passes compute, and the oracle of the tests.

Every function has the signature of its operator in ``torch.ops.fastsync``. Values agree bit for bit; the sum of squares
agrees to rounding, because the order of a sum is the implementation's own.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NUM_STATS = 4
SUM_OF_SQUARES, NUM_NONFINITE, NUM_SATURATED, MAX_MAGNITUDE = range(NUM_STATS)

TARGET_EXPONENT = 10
MAX_SCALE_EXPONENT = 118
MAX_IDLE_SCALE_EXPONENT = 24

_SIGNIFICAND_BITS = {torch.float16: 11, torch.bfloat16: 8}


def pack(
    grads: Sequence[Tensor],
    wire: Tensor,
    stats: Tensor,
    bucket_scale: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    limit: float | None = None,
) -> None:
    """Gradients to wire: ``wire = (grads * multiplier * bucket_scale)``, one after the other, each in C order.

    Products are taken in float32 (float64 for float64 gradients) and rounded once, to nearest even, to ``wire.dtype``;
    float64 products go to a 16-bit wire through float32, as torch's own conversion does.
    A finite gradient whose product is beyond ``±limit`` is sent as ``±limit`` and counted in ``stats[NUM_SATURATED]``;
    inf and nan are sent as they are.

    Args:
        grads: tensors of one dtype (float32, float64, float16, bfloat16) and device, of any shapes.
        wire: vector of as many elements as ``grads`` have, of their dtype, float16 or bfloat16. Written.
        stats: float64 vector of ``NUM_STATS`` elements. ``NUM_SATURATED`` is written.
        bucket_scale: one float32 element, a power of two; None means 1.
        multiplier: usually one over the world size.
        limit: largest magnitude that may be sent; see ``saturation_limit``.
    """
    compute = _compute_dtype(grads[0].dtype)
    factor = torch.tensor(multiplier, dtype=compute, device=wire.device)
    if bucket_scale is not None:
        factor = factor * bucket_scale.to(compute)
    flat = torch.cat([grad.reshape(-1) for grad in grads]).to(compute)
    scaled = flat * factor
    if limit is not None:
        bound = torch.tensor(limit, dtype=compute, device=wire.device)
        saturated = flat.isfinite() & (scaled.abs() > bound)
        scaled = torch.where(saturated, torch.copysign(bound, scaled), scaled)
        stats[NUM_SATURATED] = saturated.sum()
    else:
        stats[NUM_SATURATED] = 0
    wire.copy_(_round_to(scaled, wire.dtype))


def unpack(wire: Tensor, grads: Sequence[Tensor], stats: Tensor, bucket_scale: Tensor | None = None) -> None:
    """Wire to gradients: ``grads = wire / bucket_scale``, then the statistics of what was written.

    Args:
        wire: vector as ``pack`` fills it, usually summed over the ranks since.
        grads: tensors as given to ``pack``. Written. What is finite on the wire is finite here: a value beyond the
            largest of a 16-bit gradient dtype becomes that largest.
        stats: float64 vector. ``SUM_OF_SQUARES``, ``NUM_NONFINITE`` and ``MAX_MAGNITUDE`` (over the finite values) are
            written.
        bucket_scale: as in ``pack``. Moved on to the scale for the next step, see ``next_bucket_scale``.
    """
    compute = _compute_dtype(grads[0].dtype)
    values = wire.to(compute)
    if bucket_scale is not None:
        values = values * (1 / bucket_scale.to(compute))
    bound = torch.tensor(torch.finfo(grads[0].dtype).max, dtype=compute, device=wire.device)
    values = torch.where(wire.isfinite(), values.clamp(-bound, bound), values)
    written = 0
    for grad in grads:
        part = values[written : written + grad.numel()]
        grad.copy_(_round_to(part, grad.dtype).view(grad.shape))
        written += grad.numel()
    measure(grads, stats)
    if bucket_scale is not None:
        bucket_scale.fill_(next_bucket_scale(bucket_scale.item(), stats[MAX_MAGNITUDE].item()))


def measure(grads: Sequence[Tensor], stats: Tensor) -> None:
    """Writes ``SUM_OF_SQUARES``, ``NUM_NONFINITE`` and ``MAX_MAGNITUDE`` (over the finite values) of the gradients."""
    flat = torch.cat([grad.reshape(-1) for grad in grads]).double()
    finite = flat.isfinite()
    stats[SUM_OF_SQUARES] = flat.square().sum()
    stats[NUM_NONFINITE] = (~finite).sum()
    stats[MAX_MAGNITUDE] = torch.where(finite, flat.abs(), 0.0).max() if flat.numel() else 0.0


def saturation_limit(wire: torch.dtype, world_size: int) -> float | None:
    """The largest magnitude one rank may send so that no order of additions over the ranks overflows; None if any may.

    ``n`` values of at most ``L``, added with a relative error of at most ``u`` each, sum to at most
    ``n L (1 + u)^(n - 1)`` (N. Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). Rounded down to a
    value of the wire's dtype.
    """
    if wire not in _SIGNIFICAND_BITS:
        return None
    bits = _SIGNIFICAND_BITS[wire]
    bound = torch.finfo(wire).max / (world_size * (1 + 2.0**-bits) ** (world_size - 1))
    fraction, exponent = math.frexp(bound)
    return math.ldexp(math.floor(math.ldexp(fraction, bits)), exponent - bits)


def initial_bucket_scale(max_magnitude: float) -> float:
    """The power of two that brings ``max_magnitude``, the largest over all ranks, to [2^9, 2^10); 1 if it is zero."""
    return math.ldexp(1.0, _scale_exponent_for(max_magnitude)) if max_magnitude > 0 else 1.0


def next_bucket_scale(scale: float, max_magnitude: float) -> float:
    """The scale of the next step: falls at once to what ``max_magnitude`` asks for, rises by a factor of two a step.

    Where all reduced gradients are zero, they may have been too small for the scale: it rises, up to
    ``2**MAX_IDLE_SCALE_EXPONENT``, from where it finds back within a few steps.
    """
    exponent = math.frexp(scale)[1] - 1
    if max_magnitude > 0:
        return math.ldexp(1.0, min(_scale_exponent_for(max_magnitude), exponent + 1))
    return math.ldexp(1.0, max(exponent, min(exponent + 1, MAX_IDLE_SCALE_EXPONENT)))


def all_reduce_mean(grads: Sequence[Sequence[Tensor]], wire: torch.dtype | None = None) -> list[Tensor]:
    """A whole sync without a process group: ``grads[rank]`` are one rank's gradients, the result is their mean.

    The sum over the ranks is taken in the wire's dtype in rank order. ``wire=None`` sends the gradients' own dtype.
    """
    world_size = len(grads)
    own = grads[0][0].dtype
    dtype = wire or own
    stats = torch.zeros(NUM_STATS, dtype=torch.float64)
    scale = None
    if dtype == torch.float16 and wire is not None:
        largest = 0.0
        for rank_grads in grads:
            measure(rank_grads, stats)
            largest = max(largest, stats[MAX_MAGNITUDE].item())
        scale = torch.tensor(initial_bucket_scale(largest))
    numel = sum(grad.numel() for grad in grads[0])
    total = torch.zeros(numel, dtype=dtype)
    for rank_grads in grads:
        part = torch.empty(numel, dtype=dtype)
        limit = saturation_limit(dtype, world_size) if wire is not None else None
        pack(rank_grads, part, stats, scale, multiplier=1 / world_size, limit=limit)
        total += part
    result = [torch.empty_like(grad) for grad in grads[0]]
    unpack(total, result, stats, scale)
    return result


def _compute_dtype(grad: torch.dtype) -> torch.dtype:
    return torch.float64 if grad == torch.float64 else torch.float32


def _round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(torch.float32).to(dtype) if dtype in _SIGNIFICAND_BITS else values.to(dtype)


def _scale_exponent_for(max_magnitude: float) -> int:
    wanted = TARGET_EXPONENT - math.frexp(max_magnitude)[1]
    return max(-MAX_SCALE_EXPONENT, min(MAX_SCALE_EXPONENT, wanted))

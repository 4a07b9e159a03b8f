"""The engine in plain PyTorch: the specification of what the compiled passes compute, and the oracle of the tests.

Every function has the signature of its operator in ``torch.ops.fastsync``. Values agree bit for bit; the sum of squares
agrees to rounding, because the order of a sum is the implementation's own.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

NUM_STATS = 4
SUM_OF_SQUARES, NUM_NONFINITE, NUM_SATURATED, MAX_MAGNITUDE = range(NUM_STATS)
# A square is rounded once and is then the term of at most fifteen float32 additions before the sum goes on in float64:
# sixteen errors of at most 2^-24 of a sum of positive terms, 9.6e-7 in all.
SUM_TOLERANCE = 1e-6

TARGET_EXPONENT = 10
MAX_SCALE_EXPONENT = 118
MAX_IDLE_SCALE_EXPONENT = 24

BLOCK_VALUES = 128
BLOCK_BITS = {torch.uint8: 8, torch.int8: 4}
"""Of a value in a block: blocks of int8 are told as uint8, those of int4 as int8."""
WIRE_DTYPE = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8, "int4": torch.int8}
# 127 times a block's scale, and the mean of such values over any number of ranks, stay below float32's largest.
BLOCK_LIMIT = torch.finfo(torch.bfloat16).max

_SIGNIFICAND_BITS = {torch.float16: 11, torch.bfloat16: 8}


def pack(
    grads: Sequence[Tensor],
    wire: Tensor,
    stats: Tensor,
    bucket_scale: Tensor | None = None,
    residuals: Sequence[Tensor] | None = None,
    *,
    multiplier: float = 1.0,
    limit: float | None = None,
    is_first: bool = True,
    weight: Tensor | None = None,
) -> None:
    """Gradients to wire: ``wire = (grads * multiplier * bucket_scale)``, one after the other, each in C order.

    Products are taken in float32 (float64 for float64 gradients) and rounded once, to nearest even, to ``wire.dtype``;
    float64 products go to a narrower wire through float32, as torch's own conversion does.
    A finite gradient whose product is beyond ``±limit`` is sent as ``±limit`` and counted in ``stats[NUM_SATURATED]``;
    inf and nan are sent as they are.

    Args:
        grads: tensors of one dtype (float32, float64, float16, bfloat16) and device, of any shapes.
        wire: vector of ``wire_numel`` elements, of the gradients' dtype, float16 or bfloat16; or of uint8 or int8, as
            ``encode_blocks`` fills it, where each gradient begins a new block. Written.
        stats: float64 vector of ``NUM_STATS`` elements. ``NUM_SATURATED`` is written.
        bucket_scale: one float32 element, a power of two; None means 1.
        residuals: error feedback: for each gradient a tensor of the dtype that products are taken in. They are added to
            the gradients first, and what the wire has then not carried is written to them, in units of the gradients.
            Where what was sent is not finite, they stay as they were.
        multiplier: usually one over the world size.
        limit: largest magnitude that may be sent; see ``saturation_limit``. Of blocks no more than ``BLOCK_LIMIT``.
        is_first: False adds to ``NUM_SATURATED`` what an earlier call for the same bucket has left there.
        weight: one float64 element that the gradients are multiplied with before residuals are added, or, without
            residuals, a part of the multiplier; None means 1. With 0 they count as 0, whatever they are.
    """
    compute = _compute_dtype(grads[0].dtype)
    factor = torch.tensor(multiplier, dtype=compute, device=wire.device)
    if bucket_scale is not None:
        factor = factor * bucket_scale.to(compute)
    values = _lay_out(grads, wire.dtype).to(compute)
    own_weight = torch.ones_like(factor) if weight is None else weight.to(compute)
    values = torch.where(own_weight == 0, 0.0, values)
    if residuals:
        values = values * own_weight + _lay_out(residuals, wire.dtype)
    else:
        factor = factor * own_weight
    scaled, num_saturated = _saturate(values, factor, limit, wire.dtype)
    stats[NUM_SATURATED] = num_saturated + (0 if is_first else stats[NUM_SATURATED])
    if wire.dtype not in BLOCK_BITS:  # a negative factor makes −0 of what lies between
        scaled = _lay_out(tuple(_parts(scaled, grads, wire.dtype)), wire.dtype)
    wire.copy_(_encode(scaled, wire.dtype))
    if residuals:
        sent = _decode(wire).to(compute)
        lost = values - _within_range(sent * (1 / factor), sent)
        kept = torch.where(sent.isfinite(), lost, _lay_out(residuals, wire.dtype))
        for residual, part in zip(residuals, _parts(kept, residuals, wire.dtype), strict=True):
            residual.copy_(part)


def unpack(
    wire: Tensor,
    grads: Sequence[Tensor],
    stats: Tensor,
    bucket_scale: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    is_first: bool = True,
    is_last: bool = True,
    scale_share: float = 1.0,
    by_tree: bool = False,
    factors: Tensor | None = None,
) -> None:
    """Wires to gradients: ``grads = sum(wires * multiplier) / bucket_scale``, and the statistics of what was written.

    Products and sums are taken in float32 (float64 for float64 gradients), from the first wire to the last. With
    ``by_tree`` it is ``sum_by_tree(wires) * multiplier``.

    Args:
        wire: vector as ``pack`` fills it, usually summed over the ranks since; or a matrix of which each row is one.
        grads: tensors as given to ``pack``. Written. What is finite as a sum is finite here: a value beyond the
            largest of the gradients' dtype becomes that largest.
        stats: float64 vector. ``SUM_OF_SQUARES``, ``NUM_NONFINITE`` and ``MAX_MAGNITUDE`` (over the finite values) are
            written. How many sums the gradients' dtype does not hold, not even by rounding, is added to
            ``NUM_SATURATED``.
        bucket_scale: as in ``pack``. Moved on to the scale for the next step, see ``next_bucket_scale``.
        multiplier: of each wire's values; usually one over the number of wires.
        is_first: False adds to the statistics that earlier calls for the same bucket have left.
        is_last: False leaves ``bucket_scale`` as it is, for the calls that follow.
        scale_share: the scale follows the largest magnitude times this.
        factors: float64 vector; each gradient is multiplied by its own.
    """
    compute = _compute_dtype(grads[0].dtype)
    total = _sum_wires(wire, compute, multiplier, by_tree)
    factor = None if bucket_scale is None else 1 / bucket_scale.to(compute)
    if factors is not None:
        own = torch.ones_like(total)
        for part, each in zip(_parts(own, grads, wire.dtype), factors, strict=True):
            part.fill_(each)
        factor = own if factor is None else factor * own
    values = total if factor is None else total * factor
    beyond = total.isfinite() & ~_round_to(values, grads[0].dtype).isfinite()
    values = _within_range(values, total, grads[0].dtype)
    for grad, part in zip(grads, _parts(values, grads, wire.dtype), strict=True):
        grad.copy_(_round_to(part, grad.dtype))
    before = stats.clone()
    measure(grads, stats)
    stats[NUM_SATURATED] += sum(part.sum() for part in _parts(beyond, grads, wire.dtype))
    if not is_first:
        stats[SUM_OF_SQUARES] += before[SUM_OF_SQUARES]
        stats[NUM_NONFINITE] += before[NUM_NONFINITE]
        stats[MAX_MAGNITUDE] = torch.maximum(stats[MAX_MAGNITUDE], before[MAX_MAGNITUDE])
    if bucket_scale is not None and is_last:
        bucket_scale.fill_(next_bucket_scale(bucket_scale.item(), stats[MAX_MAGNITUDE].item() * scale_share))


def reduce(
    wires: Tensor,
    out: Tensor,
    bucket_scale: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    grad_dtype: torch.dtype = torch.float32,
    multiplier: float = 1.0,
    limit: float | None = None,
    residual_share: float = 1.0,
    by_tree: bool = False,
) -> None:
    """Wires to wire: ``out = sum(wires * multiplier)``, encoded anew.

    Products and sums are taken in float32 (float64 for float64 gradients), from the first wire to the last, and rounded
    once, as ``pack`` does. With ``by_tree`` it is ``sum_by_tree(wires) * multiplier``.

    Args:
        wires: matrix of which each row is a wire, or a piece of one, as ``pack`` fills it.
        out: vector for one such piece, in any wire's dtype, or in that of ``wires`` where those are blocks. Written;
            may be a row of ``wires``.
        bucket_scale: what the wires' values have been multiplied with; None means 1.
        residual: as in ``pack``, but one vector of the dtype of the sums, which it is added to, times the share.
        grad_dtype: of the bucket's gradients.
        multiplier: of each wire's values; usually one over the number of wires.
        limit: as in ``pack``.
        residual_share: what one of the residual's units counts in the sum.
    """
    compute = _compute_dtype(grad_dtype)
    total = _sum_wires(wires, compute, multiplier, by_tree)
    one = torch.ones((), dtype=compute, device=out.device)
    scale = one if bucket_scale is None else bucket_scale.to(compute)
    unit = scale * torch.tensor(residual_share, dtype=compute, device=out.device)
    if residual is not None:
        total = total + residual * unit
    scaled, _ = _saturate(total, one, limit, out.dtype)
    out.copy_(_encode(scaled, out.dtype))
    if residual is not None:
        sent = _decode(out).to(compute)
        residual.copy_(torch.where(sent.isfinite(), (total - sent) * (1 / unit), residual))


def block_bytes(wire: torch.dtype) -> int:
    """What a block of this wire takes, with its scale."""
    return 4 + BLOCK_VALUES * BLOCK_BITS[wire] // 8


def encode_blocks(values: Tensor, wire: torch.dtype = torch.uint8) -> Tensor:
    """A float32 vector as blocks of ``BLOCK_VALUES`` that share a scale; the last one is filled up with zeros.

    A block is a float32 scale, followed by one whole number for each value, in [-127, 127], or of int4 in [-7, 7], two
    a byte, the first in the lower half. The scale is the block's largest magnitude, or 2^-110 where that is smaller,
    over 127 or 7; it is nan, and all values are 0, where one of the block's values is not finite. The result is a
    vector of ``block_bytes`` a block, in the machine's order of bytes. Values are rounded to nearest even.
    """
    bits = BLOCK_BITS[wire]
    blocks = _pad(values).view(-1, BLOCK_VALUES)
    finite = blocks.isfinite().all(dim=1, keepdim=True)
    largest = torch.tensor(2.0 ** (bits - 1) - 1, device=values.device)
    amax = blocks.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-110)
    scaled = torch.where(finite, blocks * (largest / amax), 0.0)
    scales = torch.where(finite, amax / largest, math.nan)
    scales = scales.view(-1).view(torch.uint8).view(len(blocks), 4)
    numbers = scaled.round().to(torch.int8).view(torch.uint8)
    if bits == 4:
        numbers = numbers[:, 0::2] & 0xF | numbers[:, 1::2] << 4
    return torch.cat([scales, numbers], dim=1).view(-1).view(wire)


def decode_blocks(wire: Tensor) -> Tensor:
    """The float32 values in blocks that ``encode_blocks`` has made: each number times its block's scale."""
    size = block_bytes(wire.dtype)
    blocks = wire.view(torch.uint8).view(len(wire) // size, size)
    scales = blocks[:, :4].clone().view(-1).view(torch.float32).view(-1, 1)
    numbers = blocks[:, 4:]
    if BLOCK_BITS[wire.dtype] == 4:
        halves = torch.stack([numbers & 0xF, numbers >> 4], dim=2).view(len(blocks), BLOCK_VALUES)
        return ((halves.float() + 8) % 16 - 8).mul(scales).view(-1)
    return (numbers.view(torch.int8).float() * scales).view(-1)


def wire_numel(numels: Sequence[int], wire: torch.dtype) -> int:
    """The elements of a wire of this dtype for gradients of so many elements each."""
    if wire not in BLOCK_BITS:
        return sum(numels)
    return sum(-(-numel // BLOCK_VALUES) * block_bytes(wire) for numel in numels)


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


def all_reduce_mean(
    grads: Sequence[Sequence[Tensor]],
    wire: torch.dtype | None = None,
    *,
    reduce: Literal["wire", "fp32"] = "wire",
    algorithm: Literal["one_shot", "two_shot"] = "one_shot",
    residuals: Sequence[Sequence[Tensor]] | None = None,
    weights: Sequence[float] | None = None,
) -> list[Tensor]:
    """A whole sync without a process group: ``grads[rank]`` are one rank's gradients, the result is their mean.

    Args:
        grads: for each rank its gradients.
        wire: the dtype that is sent, uint8 for blocks of int8, int8 for those of int4; None sends the gradients' own.
        reduce: "wire" takes the sum in the wire's dtype, "fp32" in float32 (float64 for float64 gradients); both in
            rank order.
        algorithm: of "fp32": every rank adds what it gets ("one_shot"), or sums are encoded anew and sent to every rank
            ("two_shot").
        residuals: of "fp32": for each rank the ``residuals`` of ``pack``. Written. In "two_shot" a rank adds up the
            values of one shard, and what encoding their means loses becomes part of its own residuals of them.
        weights: for each rank how much its gradients count; None means that all count the same.
    """
    world_size, own = len(grads), grads[0][0].dtype
    dtype, stats = wire or own, torch.zeros(NUM_STATS, dtype=torch.float64)
    counts = [1.0] * world_size if weights is None else weights
    shares = [torch.tensor(each * world_size / (sum(counts) or math.inf), dtype=torch.float64) for each in counts]
    scale = _first_scale(grads, shares) if wire == torch.float16 else None
    num_summed = world_size if reduce == "wire" else 1
    limit = saturation_limit(dtype, num_summed) if wire is not None else None
    numel = wire_numel([grad.numel() for grad in grads[0]], dtype)
    wires = torch.empty(world_size, numel, dtype=dtype)
    multiplier = 1 / (num_summed if weights is None else world_size)
    for rank, rank_grads in enumerate(grads):
        kept = residuals[rank] if residuals is not None else None
        pack(rank_grads, wires[rank], stats, scale, kept, multiplier=multiplier, limit=limit, weight=shares[rank])
    result = [torch.empty_like(grad) for grad in grads[0]]
    row_share = 1 / world_size if weights is None else 1.0  # of what is weighted each rank sends a part of the mean
    if reduce == "wire":
        total = torch.zeros(numel, dtype=dtype)
        for part in wires:
            total += part
        unpack(total, result, stats, scale)
    elif algorithm == "one_shot":
        unpack(wires, result, stats, scale, multiplier=row_share)
    else:
        laid_out = None if residuals is None else [_lay_out(kept, dtype) for kept in residuals]
        means = torch.cat(
            [
                _mean_of(
                    wires[:, wire_numel([begin], dtype) : wire_numel([end], dtype)],
                    own,
                    scale,
                    None if laid_out is None else laid_out[rank][begin:end],
                    limit,
                    share=row_share,
                    residual_share=1 / world_size,
                )
                for rank, (begin, end) in enumerate(shards(grads[0], dtype, world_size))
            ]
        )
        unpack(means, result, stats, scale)
        for kept, flat in zip(residuals or (), laid_out or (), strict=True):
            for residual, part in zip(kept, _parts(flat, kept, dtype), strict=True):
                residual.copy_(part)
    return result


def mean_of_used(
    grads: Sequence[Sequence[Tensor | None]], *, weights: Sequence[float] | None = None, **options: Any
) -> list[Tensor | None]:
    """The mean over the ranks that have a gradient; None where no rank has one. ``options`` are of ``all_reduce_mean``.

    It is ``all_reduce_mean`` with zeros for what is missing, times the weight of all ranks over that of the ranks that
    have a gradient. This factor is 1 where all ranks have one, or where those that have one count for nothing, that is
    for less than 1e-30 of a mean weight. A finite float16 stays finite.
    """
    counts = [1.0] * len(grads) if weights is None else weights
    shares = [torch.tensor(each * len(grads) / (sum(counts) or math.inf), dtype=torch.float64) for each in counts]
    like = [next((grad for grad in same if grad is not None), torch.zeros(1)) for same in zip(*grads, strict=True)]
    filled = [[torch.zeros_like(a) if grad is None else grad for a, grad in zip(like, of, strict=True)] for of in grads]
    result: list[Tensor | None] = []
    for same, mean in zip(zip(*grads, strict=True), all_reduce_mean(filled, weights=weights, **options), strict=True):
        of_users = sum(
            (share.float() for grad, share in zip(same, shares, strict=True) if grad is not None), torch.zeros(())
        )
        if all(grad is None for grad in same):
            result.append(None)
        elif all(grad is not None for grad in same) or of_users < 1e-30:
            result.append(mean)
        else:
            product = mean * (len(grads) / of_users.double()).to(_compute_dtype(mean.dtype))
            result.append(_within_range(product, mean) if mean.dtype == torch.float16 else product)
    return result


def sum_by_tree(rows: Sequence[Tensor]) -> Tensor:
    """The sum of the rows by a complete binary tree, whose last leaves are the sum of two rows each.

    There are as many leaves as the largest power of two that is not above the number of rows.
    """
    num_leaves = 2 ** (len(rows).bit_length() - 1)
    num_alone = 2 * num_leaves - len(rows)
    paired = rows[num_alone:]
    sums = [*rows[:num_alone], *(a + b for a, b in zip(paired[::2], paired[1::2], strict=True))]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def mean_of_micro_batches(grads: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """``attach(micro_batches=)``, whatever the number of ranks: ``grads[index]`` is one micro-batch's gradients."""
    result: list[Tensor | None] = []
    for same in zip(*grads, strict=True):
        like = next((grad for grad in same if grad is not None), None)
        zeros = None if like is None else torch.zeros_like(like)
        filled = [grad if grad is not None else zeros for grad in same]
        result.append(None if zeros is None else sum_by_tree(filled) * (1 / len(grads)))  # type: ignore[arg-type]
    return result


def shards(grads: Sequence[Tensor], wire: torch.dtype, world_size: int) -> list[tuple[int, int]]:
    """The values [begin, end), as ``pack`` lays them out, that each rank adds up in two_shot of a bucket in one piece.

    Shards are of one length, a multiple of 128 values, or of as many blocks as end at a multiple of 16 bytes. Where a
    bucket has several gradients, each counts as if it began at a multiple of 8 values.
    """
    if wire in BLOCK_BITS:
        alignment, multiple = BLOCK_VALUES, BLOCK_VALUES * 16 // math.gcd(16, block_bytes(wire))
    else:
        alignment, multiple = 8 if len(grads) > 1 else 1, 128
    lengths = [-(-grad.numel() // alignment) * alignment for grad in grads]
    firsts = [sum(lengths[:index]) for index in range(len(grads))]
    shard = -(-sum(lengths) // (world_size * multiple)) * multiple
    kept = lengths if wire in BLOCK_BITS else [grad.numel() for grad in grads]
    ends = [
        sum(min(max(rank * shard - first, 0), numel) for first, numel in zip(firsts, kept, strict=True))
        for rank in range(world_size + 1)
    ]
    return list(pairwise(ends))


def two_level_mean(
    grads: Sequence[Sequence[Tensor]],
    nodes: int | Sequence[Sequence[int]],
    wire: torch.dtype | None = None,
    *,
    algorithm: Literal["one_shot", "two_shot"] = "two_shot",
) -> list[Tensor]:
    """As ``all_reduce_mean`` with sums in float32, for ranks that share nodes.

    ``nodes`` are the ranks of each node, or how many a node has that follow each other. Each node adds its ranks'
    gradients, which get there at their own width. These sums, divided by the number of ranks of the largest node, so
    that none is beyond what its ranks have, are encoded as ``wire`` and sent between nodes.
    """
    if isinstance(nodes, int):
        nodes = [range(first, first + nodes) for first in range(0, len(grads), nodes)]
    own = grads[0][0].dtype
    dtype, stats = wire or own, torch.zeros(NUM_STATS, dtype=torch.float64)
    scale = _first_scale(grads) if wire == torch.float16 else None
    limit = saturation_limit(dtype, 1) if wire is not None else None
    laid_out = [_lay_out(rank_grads, dtype) for rank_grads in grads]
    full = torch.stack([torch.empty_like(values) for values in laid_out])
    for values, packed in zip(laid_out, full, strict=True):
        pack([values], packed, stats, scale, limit=limit)
    sums = torch.empty(len(nodes), wire_numel([full.shape[1]], dtype), dtype=dtype)
    most = max(len(members) for members in nodes)
    for members, encoded in zip(nodes, sums, strict=True):
        encoded.copy_(_mean_of(full[list(members)], own, scale, None, limit, dtype, share=1 / most))
    result = [torch.empty_like(grad) for grad in grads[0]]
    if algorithm == "one_shot":
        unpack(sums, result, stats, scale, multiplier=most / len(grads))
    else:
        unpack(_mean_of(sums, own, scale, None, limit, share=most / len(grads)), result, stats, scale)
    return result


def reduce_scatter(
    inputs: Sequence[Tensor],
    wire: torch.dtype | None = None,
    *,
    factor: float | None = None,
    residuals: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """A reduce-scatter without a process group: ``inputs[rank]`` is one rank's shards, one for each rank.

    Every rank encodes each shard once, its own too, and sums are taken in float32 (float64 for float64 gradients).
    Returns for each rank its shard of the sum. ``wire`` and ``residuals`` are as in ``all_reduce_mean``; a factor of
    None means one over the number of ranks.
    """
    world_size = len(inputs)
    grads = [list(values.chunk(world_size)) for values in inputs]
    own = inputs[0].dtype
    dtype = wire or own
    stats = torch.zeros(NUM_STATS, dtype=torch.float64)
    scale = _first_scale(grads) if wire == torch.float16 else None
    limit = saturation_limit(dtype, 1) if wire is not None else None
    shard = grads[0][0].numel()
    wires = torch.empty(world_size, world_size, wire_numel([shard], dtype), dtype=dtype)
    for rank, shards in enumerate(grads):
        kept = list(residuals[rank].chunk(world_size)) if residuals is not None else None
        pack(shards, wires[rank].view(-1), stats, scale, kept, limit=limit)
    outputs = [torch.empty(shard, dtype=own) for _ in inputs]
    for rank, output in enumerate(outputs):
        this_scale = None if scale is None else scale.clone()
        unpack(wires[:, rank], [output], stats, this_scale, multiplier=1 / world_size if factor is None else factor)
    return outputs


def _compute_dtype(grad: torch.dtype) -> torch.dtype:
    return torch.float64 if grad == torch.float64 else torch.float32


def _mean_of(
    wires: Tensor,
    grad_dtype: torch.dtype,
    scale: Tensor | None,
    residual: Tensor | None,
    limit: float | None,
    dtype: torch.dtype | None = None,
    *,
    share: float,
    residual_share: float = 1.0,
) -> Tensor:
    numel = len(wires[0]) if dtype is None else wire_numel([len(wires[0])], dtype)
    out = torch.empty(numel, dtype=dtype or wires.dtype)
    reduce(
        wires,
        out,
        scale,
        residual,
        grad_dtype=grad_dtype,
        multiplier=share,
        limit=limit,
        residual_share=residual_share,
    )
    return out


def _first_scale(grads: Sequence[Sequence[Tensor]], shares: Sequence[Tensor] | None = None) -> Tensor:
    stats = torch.zeros(NUM_STATS, dtype=torch.float64)
    largest = 0.0
    for rank, rank_grads in enumerate(grads):
        measure(rank_grads, stats)
        largest = max(largest, stats[MAX_MAGNITUDE].item() * (1.0 if shares is None else shares[rank].item()))
    return torch.tensor(initial_bucket_scale(largest))


def _pad(values: Tensor, multiple: int = BLOCK_VALUES) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % multiple))


def _lay_out(tensors: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    multiple = BLOCK_VALUES if wire in BLOCK_BITS else 1
    return torch.cat([_pad(tensor.reshape(-1), multiple) for tensor in tensors])


def _parts(values: Tensor, tensors: Sequence[Tensor], wire: torch.dtype) -> Iterator[Tensor]:
    multiple = BLOCK_VALUES if wire in BLOCK_BITS else 1
    begin = 0
    for tensor in tensors:
        yield values[begin : begin + tensor.numel()].view(tensor.shape)
        begin += tensor.numel()
        begin += -begin % multiple


def _saturate(values: Tensor, factor: Tensor, limit: float | None, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    scaled = values * factor
    if wire in BLOCK_BITS:
        limit = min(math.inf if limit is None else limit, BLOCK_LIMIT)
    bound = torch.tensor(math.inf if limit is None else limit, dtype=values.dtype, device=values.device)
    saturated = values.isfinite() & (scaled.abs() > bound)
    return torch.where(saturated, torch.copysign(bound, scaled), scaled), saturated.sum()


def _encode(values: Tensor, wire: torch.dtype) -> Tensor:
    if wire in BLOCK_BITS:
        return encode_blocks(values.float(), wire)
    return _round_to(values, wire)


def _decode(wire: Tensor) -> Tensor:
    return decode_blocks(wire) if wire.dtype in BLOCK_BITS else wire


def _sum_wires(wires: Tensor, compute: torch.dtype, multiplier: float, by_tree: bool = False) -> Tensor:
    factor = torch.tensor(multiplier, dtype=compute, device=wires.device)
    rows = wires.unbind() if wires.dim() == 2 else (wires,)
    if by_tree:
        return sum_by_tree([_decode(row).to(compute) for row in rows]) * factor
    values = [_decode(row).to(compute) * factor for row in rows]
    total = values[0]
    for other in values[1:]:
        total = total + other
    return total


def _within_range(values: Tensor, source: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``values``, but no further than what ``dtype`` can hold where their ``source`` is finite."""
    bound = torch.tensor(torch.finfo(dtype or values.dtype).max, dtype=values.dtype, device=values.device)
    return torch.where(source.isfinite(), values.clamp(-bound, bound), values)


def _round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(torch.float32).to(dtype) if dtype in _SIGNIFICAND_BITS else values.to(dtype)


def _scale_exponent_for(max_magnitude: float) -> int:
    wanted = TARGET_EXPONENT - math.frexp(max_magnitude)[1]
    return max(-MAX_SCALE_EXPONENT, min(MAX_SCALE_EXPONENT, wanted))


def low_rank_mean(of_ranks: Sequence[Tensor], factor: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the ranks' matrices as lowrank sends it, and the factor that the next step begins with (PowerSGD).

    What a rank keeps as its residual is its matrix minus that mean. The engine's results agree to rounding.

    Args:
        of_ranks: a matrix [rows, columns] of each rank, its residual added.
        factor: [columns, rank], of the step before.
    """
    left = torch.stack([matrix @ torch.linalg.qr(factor).Q for matrix in of_ranks]).mean(0)
    left = torch.linalg.qr(left).Q
    right = torch.stack([matrix.T @ left for matrix in of_ranks]).mean(0)
    return left @ right.T, right

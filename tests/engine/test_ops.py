"""torch.ops.fastsync.{pack,unpack,reduce} against tests.reference."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tests.passes  # noqa: F401 registers torch.ops.fastsync
from tests import reference
from tests.bitwise import assert_bitwise_equal
from tests.emulated import ops
from tests.engine.sample_inputs import (
    GRAD_DTYPES,
    OPERATORS,
    WIRE_DTYPES,
    Bucket,
    BuiltBucket,
    Gradient,
    in_either_order,
    on_each_device,
    random_buckets,
    sample_inputs,
)

random_examples = settings(derandomize=True, deadline=None, max_examples=100)
HALVES = [torch.float16, torch.bfloat16]
CHUNK = 32768
BLOCK = 256


def assert_same_stats(actual: Tensor, expected: Tensor) -> None:
    actual, expected = actual.cpu(), expected.cpu()
    squares = slice(reference.SUM_OF_SQUARES, reference.SUM_OF_SQUARES + 1)
    torch.testing.assert_close(actual[squares], expected[squares], rtol=reference.SUM_TOLERANCE, atol=0, equal_nan=True)
    for index in (reference.NUM_NONFINITE, reference.NUM_SATURATED, reference.MAX_MAGNITUDE):
        assert_bitwise_equal(actual[index], expected[index], f"stats[{index}]")


def assert_same_state(actual: BuiltBucket, expected: BuiltBucket) -> None:
    assert_bitwise_equal(actual.wire, expected.wire, "wire")
    assert_bitwise_equal(actual.out, expected.out, "out")
    for i, (grad, expected_grad) in enumerate(zip(actual.grads, expected.grads, strict=True)):
        assert_bitwise_equal(grad, expected_grad, f"grads[{i}]")
    for i, (storage, expected_storage) in enumerate(zip(actual.storages, expected.storages, strict=True)):
        assert_bitwise_equal(storage, expected_storage, f"the memory around tensor {i}")
    if actual.bucket_scale is not None:
        assert_bitwise_equal(actual.bucket_scale, expected.bucket_scale, "bucket_scale")
    assert_same_stats(actual.stats, expected.stats)


def call(implementation: Any, operator: str, built: BuiltBucket) -> None:
    args, kwargs = built.arguments(operator)
    assert getattr(implementation, operator)(*args, **kwargs) is None


def check_against_reference(operator: str, bucket: Bucket, device: str) -> None:
    actual, expected = bucket.build(device), bucket.build("cpu")
    call(ops, operator, actual)
    call(reference, operator, expected)
    assert_same_state(actual, expected)


def new_stats(device: str = "cpu") -> Tensor:
    return torch.zeros(reference.NUM_STATS, dtype=torch.float64, device=device)


def all_patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


# ---- tables of segments on a device ----


@pytest.mark.gpu
def test_a_captured_call_and_those_beside_it_have_tables_of_their_own() -> None:
    """The calls of one bucket, whose gradients lie elsewhere in the graph than beside it."""
    grads, wires = {}, {}
    for where in ("captured", "beside"):
        grads[where] = [torch.zeros(100 + i, device="cuda") for i in range(30)]
        wires[where] = torch.zeros(sum(grad.numel() for grad in grads[where]), device="cuda")
    stats = new_stats("cuda")

    def pack(where: str) -> None:
        ops.pack(grads[where], wires[where], stats, workspace=1000)

    def check(where: str) -> None:
        assert_bitwise_equal(wires[where], torch.cat(grads[where]))

    pack("beside")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack("captured")
    for value in range(3):
        for where, run in (("captured", graph.replay), ("beside", lambda: pack("beside"))):
            torch._foreach_add_(grads[where], value + 1.0)
            run()
            check(where)


# ---- against the reference ------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("operator", OPERATORS)
def test_samples(operator: str, device: str) -> None:
    for built in sample_inputs(device):
        expected = built.bucket.build("cpu")
        call(ops, operator, built)
        call(reference, operator, expected)
        assert_same_state(built, expected)


@pytest.mark.sampled(5)
@on_each_device
@pytest.mark.parametrize("operator", OPERATORS)
@given(bucket=random_buckets())
# A block is decoded in vectors, a tail value by value: neither may pass float32's largest.
@example(bucket=Bucket((Gradient((BLOCK,)), Gradient((3,))), scale_exponent=-126, values="wide"))
@example(bucket=Bucket((Gradient((BLOCK,)),), wire_dtype=torch.bfloat16, scale_exponent=-100, values="mostly_ordinary"))
@random_examples
def test_random_buckets(operator: str, device: str, bucket: Bucket) -> None:
    check_against_reference(operator, bucket, device)


@pytest.mark.sampled(5)
@in_either_order
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_sizes_across_chunk_and_block_borders(
    grad_dtype: torch.dtype, wire_dtype: torch.dtype | None, operator: str, device: str
) -> None:
    numels = (0, 1, 127, 128, 129, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + BLOCK + 17)
    for values, with_residuals in (("ordinary", False), ("mostly_ordinary", True)):
        bucket = Bucket(
            tuple(Gradient((numel,), offset=i % 2) for i, numel in enumerate(numels)),
            grad_dtype,
            wire_dtype,
            scale_exponent=2,
            multiplier=1 / 3,
            limit=1.5,
            with_residuals=with_residuals,
            values=values,
        )
        check_against_reference(operator, bucket, device)


@pytest.mark.sampled(5)
@in_either_order
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.uint8], ids=["fp16", "int8"])
def test_sizes_of_which_a_gpus_blocks_have_several_chunks(wire_dtype: torch.dtype, operator: str, device: str) -> None:
    numels = range(15_001, 15_151)  # in chunks of 4,096 more than 512
    bucket = Bucket(tuple(Gradient((numel,)) for numel in numels), wire_dtype=wire_dtype, with_residuals=True)
    check_against_reference(operator, bucket, device)


@in_either_order
@pytest.mark.parametrize("operator", OPERATORS)
def test_more_gradients_than_a_large_model_has(operator: str, device: str) -> None:
    gradients = tuple(Gradient((n % 7, n % 50), offset=n % 3) for n in range(1300))  # a table that comes in two parts
    bucket = Bucket(gradients, wire_dtype=torch.float16, scale_exponent=2, limit=9.0, values="mostly_ordinary")
    check_against_reference(operator, bucket, device)


@on_each_device
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_one_flat_buffer_is_gradients_and_wire(
    grad_dtype: torch.dtype, wire_dtype: torch.dtype | None, device: str
) -> None:
    """The gradients are views of one buffer; with a wire of their own dtype, that buffer is the wire as well."""
    sizes = [5, 0, BLOCK, 1, CHUNK + 3, 16]
    flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1)).to(grad_dtype)
    written, expected = flat.clone().to(device), flat.clone()
    numel = reference.wire_numel(sizes, wire_dtype or grad_dtype)
    wire = written if wire_dtype is None else torch.empty(numel, dtype=wire_dtype, device=device)
    expected_wire = torch.empty(numel, dtype=wire_dtype or grad_dtype)
    stats, expected_stats = new_stats(device), new_stats()
    ops.pack(written.split(sizes), wire, stats, multiplier=0.3)
    reference.pack(expected.split(sizes), expected_wire, expected_stats, multiplier=0.3)
    assert_bitwise_equal(wire, expected_wire)
    ops.unpack(wire, written.split(sizes), stats)
    reference.unpack(expected_wire, expected.split(sizes), expected_stats)
    assert_bitwise_equal(written, expected)
    assert_same_stats(stats, expected_stats)


# The magnitudes between which squares are added up in float32, the neighbours of both beyond them, and zero.
BORDERS = [0.0, 2.0**-40, 2.0**-40 * (1 - 2.0**-8), 2.0**60, 2.0**60 * (1 + 2.0**-7)]


@pytest.mark.sampled(3)
@in_either_order
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("others", ["alike", "wide", "subnormal", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sum_of_squares_where_the_way_to_take_it_changes(
    dtype: torch.dtype, others: str, border: float, device: str
) -> None:
    """One way or the other follows from the largest of a few values, and has to hold for the smaller ones with it."""
    numel = 4 * BLOCK + 5
    generator = torch.Generator().manual_seed(6)
    factors = {
        "alike": 1 - torch.rand(numel, generator=generator).double() / 2,
        "wide": 2.0 ** -(60 * torch.rand(numel, generator=generator).double()),
        "subnormal": torch.zeros(numel).double(),
        "zeros": -torch.zeros(numel).double(),
    }[others]
    values = factors * border + (2.0**-140 if others == "subnormal" else 0.0)
    values[::3] = border
    for bad in ((), (math.nan,), (math.inf, -math.inf), (math.nan, 2.0**100, 2.0**-100)):
        grad = values.to(dtype)
        for i, each in enumerate(bad):
            grad[i * 301 + 2] = each
        stats, expected = new_stats(device), new_stats()
        own = grad.to(device)
        ops.unpack(own, [own], stats)  # changes nothing
        reference.measure([grad], expected)
        assert_same_stats(stats, expected)
        back = torch.empty_like(grad, device=device)
        wires = torch.stack([grad, torch.zeros_like(grad)]).to(device)
        for wire in (wires[0], wires):  # values that are converted, and sums
            stats = new_stats(device)
            ops.unpack(wire, [back], stats)
            assert_same_stats(stats, expected)


@in_either_order
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_statistics_do_not_depend_on_where_the_values_lie(dtype: torch.dtype, device: str) -> None:
    """Ranks whose gradients lie otherwise in memory would clip by different norms, and be replicas no more."""
    values = torch.randn(2 * CHUNK + 7, generator=torch.Generator().manual_seed(3)).to(dtype)
    all_stats = []
    for offset in range(4):
        grad = torch.zeros(len(values) + offset, dtype=dtype, device=device)[offset:]
        wire, stats = values.to(torch.float16).to(device), [new_stats(device), new_stats(device)]
        ops.unpack(grad.copy_(values), [grad], stats[0])
        ops.unpack(wire, [grad], stats[1])
        all_stats.append(torch.stack(stats))
    for stats in all_stats[1:]:
        assert_bitwise_equal(stats, all_stats[0])


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("values", ["mostly_ordinary", "wide"])
def test_results_do_not_depend_on_the_number_of_threads(grad_dtype: torch.dtype, values: str, device: str) -> None:
    bucket = Bucket(
        (Gradient((3 * CHUNK + 77,)), Gradient((11,)), Gradient((300, 301)), Gradient((CHUNK + 1,))),
        grad_dtype,
        torch.float16,
        scale_exponent=1,
        limit=2.0,
        values=values,
    )
    for operator in OPERATORS:
        results = []
        for num_threads in (1, 2, 3):
            results.append(bucket.build(device))
            torch.set_num_threads(num_threads)
            call(ops, operator, results[-1])
            torch.set_num_threads(1)
        for other in results[1:]:
            assert_bitwise_equal(other.stats, results[0].stats, "stats")
            assert_same_state(other, results[0])


# ---- every 16-bit value, every rounding -----------------------------------------------------------------------------

# As one tensor the values go through the vectors, in pieces shorter than a row of 16 they go one by one.
in_one_or_in_pieces = pytest.mark.parametrize("piece", [2**18, 15])


def _enough(values: Tensor, piece: int) -> Tensor:
    """One value in 37 where thousands of pieces would keep an emulated device busy for seconds."""
    return values[::37].contiguous() if piece == 15 and ops.namespace == "fastsync_emulated" else values


@in_either_order
@in_one_or_in_pieces
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("wire_dtype", HALVES)
def test_every_pattern_reaches_every_gradient_dtype(
    wire_dtype: torch.dtype, grad_dtype: torch.dtype, piece: int, device: str
) -> None:
    wire = _enough(all_patterns(wire_dtype), piece)
    for scale in (1.0, 2.0**-9, 2.0**12):
        grads = torch.zeros(len(wire), dtype=grad_dtype, device=device)
        expected = torch.zeros(len(wire), dtype=grad_dtype)
        ops.unpack(wire.to(device), grads.split(piece), new_stats(device), torch.tensor(scale, device=device))
        reference.unpack(wire, [expected], new_stats(), torch.tensor(scale))
        assert_bitwise_equal(grads, expected)


@in_either_order
@in_one_or_in_pieces
@pytest.mark.parametrize("wire_dtype", HALVES)
def test_every_rounding(wire_dtype: torch.dtype, piece: int, device: str) -> None:
    """Every 16-bit value, the midpoint between it and the next, and the two float32 neighbours of that midpoint."""
    magnitudes = all_patterns(wire_dtype)[2**15 :].double()
    magnitudes = magnitudes[magnitudes.isfinite()]
    beyond = 2 * magnitudes[-1] - magnitudes[-2]  # where the next value would be if the exponent went on
    following = torch.cat([magnitudes[1:], beyond.view(1)])
    midpoints = ((magnitudes + following) / 2).float()
    up, down = torch.tensor(float("inf")), torch.tensor(float("-inf"))
    values = torch.cat([magnitudes.float(), midpoints, midpoints.nextafter(up), midpoints.nextafter(down)])
    values = _enough(torch.cat([values, -values]), piece)
    wire = torch.empty(len(values), dtype=wire_dtype, device=device)
    ops.pack(values.to(device).split(piece), wire, new_stats(device))
    assert_bitwise_equal(wire, values.to(wire_dtype))


@in_either_order
@pytest.mark.parametrize("wire_dtype", [*HALVES, torch.float32])
def test_gaps_between_aligned_gradients_become_zeros(wire_dtype: torch.dtype, device: str) -> None:
    """Whatever the memory held before. A gap of none, of one value, of all but one, and after more than a chunk."""
    alignment = 8
    values = torch.randn(sum(numels := (8, 7, 1, CHUNK + 9)), generator=torch.Generator().manual_seed(1))
    aligned = [-(-numel // alignment) * alignment for numel in numels]
    wire = torch.full((sum(aligned) + alignment,), torch.nan, dtype=wire_dtype, device=device)
    stats = new_stats(device)
    ops.pack(values.to(device).split(numels), wire, stats, alignment=alignment)
    for grad, sent in zip(values.split(numels), wire[:-alignment].cpu().split(aligned), strict=True):
        padded = torch.nn.functional.pad(grad, (0, len(sent) - len(grad)))
        assert_bitwise_equal(sent, padded.to(wire_dtype))
    assert wire[-alignment:].isnan().all()


@in_either_order
@in_one_or_in_pieces
@pytest.mark.parametrize("grad_dtype", HALVES)
@pytest.mark.parametrize("wire_dtype", HALVES)
def test_every_16_bit_gradient_is_packed(
    grad_dtype: torch.dtype, wire_dtype: torch.dtype, piece: int, device: str
) -> None:
    grads = _enough(all_patterns(grad_dtype), piece)
    limit = reference.saturation_limit(wire_dtype, 3)
    for multiplier in (1.0, 1 / 3, 2.0**-14, 512.0):
        wire = torch.empty(len(grads), dtype=wire_dtype, device=device)
        expected = torch.empty(len(grads), dtype=wire_dtype)
        stats, expected_stats = new_stats(device), new_stats()
        ops.pack(grads.to(device).split(piece), wire, stats, multiplier=multiplier, limit=limit)
        reference.pack([grads], expected, expected_stats, multiplier=multiplier, limit=limit)
        assert_bitwise_equal(wire, expected)
        assert_same_stats(stats, expected_stats)


# ---- finite stays finite --------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@in_either_order
@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
@pytest.mark.parametrize("wire_dtype", HALVES)
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("values", ["special", "bits", "wide"])
def test_sum_over_ranks_stays_finite_in_any_order(
    values: str, grad_dtype: torch.dtype, wire_dtype: torch.dtype, world_size: int, device: str
) -> None:
    """Gradients up to the largest there are, on ranks alike or not: what is finite stays so, what is not arrives."""
    for scale_exponent in (None, -100, 5, 100):
        wires, nonfinite = [], torch.zeros(3 * BLOCK + 5, dtype=torch.bool)
        for rank in range(world_size):
            built = Bucket(
                (Gradient((3 * BLOCK + 5,)),),
                grad_dtype,
                wire_dtype,
                scale_exponent=scale_exponent,
                multiplier=1 / world_size,
                limit=reference.saturation_limit(wire_dtype, world_size),
                values=values,
                seed=rank // 2,  # every other rank holds what the one before it does
            ).build(device)
            call(ops, "pack", built)
            wires.append(built.wire.clone())
            nonfinite |= ~built.grads[0].cpu().isfinite()
            alike = _sum_in_order([built.wire] * world_size)
            assert torch.equal(alike.isfinite(), built.grads[0].isfinite())
        shuffled = [wires[i] for i in torch.randperm(world_size, generator=torch.Generator().manual_seed(3))]
        for total in (_sum_in_order(wires), _sum_in_order(wires[::-1]), _sum_in_order(shuffled)):
            assert torch.equal(~total.isfinite().cpu(), nonfinite)
            built.wire.copy_(total)
            call(ops, "unpack", built)
            assert torch.equal(~built.grads[0].isfinite().cpu(), nonfinite)
            assert built.stats[reference.NUM_NONFINITE] == nonfinite.sum()


def _sum_in_order(wires: Sequence[Tensor]) -> Tensor:
    total = wires[0].clone()
    for wire in wires[1:]:
        total += wire
    return total


@on_each_device
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_what_saturates_is_counted_once_where_the_wire_is_the_gradients_memory(dtype: torch.dtype, device: str) -> None:
    """As under DDP, whose buckets travel from where they are: what is read again is not what came."""
    largest = torch.finfo(dtype).max
    wire = torch.full((300,), largest / 64, dtype=torch.float64).to(dtype)  # which times 16 fits, and times 256 not
    wire[[0, 299]] = largest
    expected, stats = wire.clone(), new_stats(device)
    grad = wire.to(device)
    ops.unpack(grad, [grad], stats, torch.tensor(2.0**-4, device=device))
    reference.unpack(expected, [expected], new_stats(), torch.tensor(2.0**-4))
    assert_bitwise_equal(grad, expected, "grad")
    assert stats[reference.NUM_SATURATED].item() == 2


# ---- the bucket scale -----------------------------------------------------------------------------------------------

magnitudes_over_time = st.lists(
    st.one_of(st.just(0.0), st.sampled_from([float("nan"), float("inf")]), st.floats(2.0**-126, 2.0**126, width=32)),
    max_size=40,
)


@in_either_order
@given(magnitudes=magnitudes_over_time, exponent=st.integers(-118, 118))
@example(magnitudes=[1.0] * 15 + [1e6] + [0.0] * 60 + [1e-30] * 200, exponent=0)
@settings(random_examples, max_examples=30)
def test_bucket_scale_follows_the_reference(device: str, magnitudes: list[float], exponent: int) -> None:
    scale = torch.tensor(2.0**exponent, device=device)
    expected = scale.item()
    grad, stats = torch.zeros(3, device=device), new_stats(device)
    for magnitude in magnitudes:
        ops.unpack(torch.tensor([0.0, magnitude, -magnitude / 2], device=device), [grad], stats, scale)
        finite = grad[grad.isfinite()].abs().max().item()
        assert stats[reference.MAX_MAGNITUDE].item() == finite
        expected = reference.next_bucket_scale(expected, finite)
        assert scale.item() == expected


# ---- in pieces ------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("odd_one", [10.0, math.nan])
def test_a_bucket_in_pieces_is_the_bucket_at_once(
    odd_one: float, wire_dtype: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    """Pieces of one gradient that end where a block does; the scale moves on with the last.

    The first one alone has a value that saturates, and is then the largest, or is not finite.
    """
    block = reference.BLOCK_VALUES
    size, per_block = (block, reference.block_bytes(torch.uint8)) if wire_dtype == torch.uint8 else (1, 1)
    values = torch.randn(7 * block + 5, generator=torch.Generator().manual_seed(0)) / 10
    values[block + 1] = odd_one
    grad = values.to(dtype).to(device)
    numel = reference.wire_numel([len(grad)], wire_dtype)
    whole, parts = (torch.zeros(numel, dtype=wire_dtype, device=device) for _ in range(2))
    scale, part_scale = (torch.tensor(2.0, device=device) for _ in range(2))
    stats, part_stats = new_stats(device), new_stats(device)
    pieces = list(zip(grad.split(2 * block), parts.split(2 * block // size * per_block), strict=True))
    ops.pack([grad], whole, stats, scale, limit=1.5)
    for i, (piece, part) in enumerate(pieces):
        ops.pack([piece], part, part_stats, part_scale, limit=1.5, is_first=i == 0)
    assert_bitwise_equal(parts, whole)
    assert_bitwise_equal(part_stats, stats)
    assert stats[reference.NUM_SATURATED] == (odd_one == 10.0)
    ops.unpack(whole, [grad], stats, scale)
    assert (stats[reference.NUM_NONFINITE] > 0) == math.isnan(odd_one)
    expected = grad.clone()
    grad.zero_()
    for i, (piece, part) in enumerate(pieces):
        ops.unpack(part, [piece], part_stats, part_scale, is_first=i == 0, is_last=i == len(pieces) - 1)
    assert_bitwise_equal(grad, expected)
    torch.testing.assert_close(part_stats, stats, rtol=1e-6, atol=0, equal_nan=True)
    assert part_scale == scale == 4.0


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _at_the_end_of_a_page(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor behind which memory begins that may not be touched."""
    num_bytes = numel * dtype.itemsize
    length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, length + mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + length
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=length - num_bytes)


def _pass_over_ends(said: Path) -> None:
    for grad_dtype, wire, numel in itertools.product(GRAD_DTYPES, WIRE_DTYPES, (1, 37, 128, 256, 300, 384)):
        compute = torch.float64 if grad_dtype == torch.float64 else torch.float32
        wire_dtype = wire or grad_dtype
        said.write_text(f"{grad_dtype}, {wire_dtype}, {numel} values")
        grads = [_at_the_end_of_a_page(numel, grad_dtype)]
        length, stats = reference.wire_numel([numel], wire_dtype), new_stats()
        wires = _at_the_end_of_a_page(2 * length, wire_dtype).view(2, length)
        ops.pack(grads, wires[1], stats)
        ops.pack(grads, wires[1], stats, None, [_at_the_end_of_a_page(numel, compute)])
        ops.unpack(wires[1], grads, stats)
        ops.unpack(wires, grads, stats)
        num_values = -(-numel // 128) * 128 if wire_dtype in reference.BLOCK_BITS else numel
        residual = _at_the_end_of_a_page(num_values, compute)
        ops.reduce(wires, _at_the_end_of_a_page(length, wire_dtype), None, residual, grad_dtype=grad_dtype)
        ops.unpack(grads[0], grads, stats)  # changes nothing


def test_nothing_is_read_beyond_the_end_of_a_tensor(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_pass_over_ends, args=(tmp_path / "said",))
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "said").read_text()


def _unpack_what_may_not_be_written(said: Path) -> None:
    for dtype, numel in itertools.product(GRAD_DTYPES, (300, 3 * CHUNK + 5)):
        said.write_text(f"{dtype}, {numel} values")
        grad = _at_the_end_of_a_page(numel, dtype)
        grad.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(1)))
        page = grad.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = grad.data_ptr() + grad.nbytes - page
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), length, mmap.PROT_READ) == 0
        stats, expected = new_stats(), new_stats()
        ops.unpack(grad, [grad], stats, torch.tensor(1.0))
        reference.measure([grad], expected)
        assert_same_stats(stats, expected)


@pytest.mark.parametrize("device", ["cpu", "emulated"], indirect=True)
def test_gradients_that_unpacking_leaves_as_they_are_are_only_read(device: str, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_unpack_what_may_not_be_written, args=(tmp_path / "said",)
    )
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "said").read_text()


# ---- on other CPUs --------------------------------------------------------------------------------------------------

TESTS_OF_VALUES = "(samples or changes or beyond) and not emulated and not generic"


def test_without_vector_instructions_the_values_are_the_same() -> None:
    """The plain rows, which other CPUs use."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", TESTS_OF_VALUES]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "TESTS_WITHOUT_RANKS": "1"}
    environment.pop("FAIL_WITHOUT_CUDA", None)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=230)
    assert ended.returncode == 0, ended.stdout

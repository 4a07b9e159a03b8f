"""Blocks of int8 on the wire: torch.ops.fastsync against fastsync.reference, and what becomes of the values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastsync._C  # noqa: F401 registers torch.ops.fastsync
from fastsync import reference
from tests.bitwise import assert_bitwise_equal
from tests.emulated import ops
from tests.engine.sample_inputs import GRAD_DTYPES, in_either_order, on_each_device

random_examples = settings(derandomize=True, deadline=None, max_examples=200)
BLOCK = reference.BLOCK_VALUES
INF, NAN = math.inf, math.nan


def new_stats(device: str = "cpu") -> Tensor:
    return torch.zeros(reference.NUM_STATS, dtype=torch.float64, device=device)


def new_wire(grads: list[Tensor]) -> Tensor:
    numel = reference.wire_numel([grad.numel() for grad in grads], torch.uint8)
    return torch.zeros(numel, dtype=torch.uint8, device=grads[0].device)


def there_and_back(grad: Tensor, **options: bool | int) -> Tensor:
    """What a gradient is after it has been on the wire."""
    wire, stats, back = new_wire([grad]), new_stats(grad.device.type), torch.empty_like(grad)
    ops.pack([grad], wire, stats, **options)
    ops.unpack(wire, [back], stats)
    return back


def scales_of(wire: Tensor) -> Tensor:
    return wire.cpu().view(-1, reference.BLOCK_BYTES)[:, :4].clone().view(torch.float32).view(-1)


def _huge_spread(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=generator) * torch.exp2(torch.linspace(-140, 120, numel))


def _one_outlier(numel: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(numel, generator=generator)
    values[numel // 3 : numel // 3 + 1] = 1e9
    return values


def _halves(numel: int, generator: torch.Generator) -> Tensor:
    """Of each block the first is its largest, the others lie halfway between two steps."""
    values = torch.randint(-127, 127, (numel,), generator=generator) + 0.5
    values[::BLOCK] = 127.0
    return values


ADVERSARIES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "huge spread": _huge_spread,
    "one outlier": _one_outlier,
    "halves": _halves,
    "subnormal": lambda numel, generator: torch.randn(numel, generator=generator) * 2.0**-130,
    "around the smallest scale": lambda numel, generator: torch.randn(numel, generator=generator) * 2.0**-110,
    "constant": lambda numel, generator: torch.full((numel,), -0.3),
    "zeros": lambda numel, generator: torch.copysign(torch.zeros(numel), torch.randn(numel, generator=generator)),
    "largest": lambda numel, generator: torch.randn(numel, generator=generator).sign() * 3.4028234e38,
    "ordinary": lambda numel, generator: torch.randn(numel, generator=generator),
}


def adversary(kind: str, numel: int, seed: int = 0) -> Tensor:
    return ADVERSARIES[kind](numel, torch.Generator().manual_seed(seed))


@on_each_device
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("kind", ADVERSARIES)
@given(
    numels=st.lists(st.sampled_from([0, 1, 127, 128, 129, 255, 256, 257, 512, 600]), min_size=1, max_size=4),
    stochastic=st.booleans(),
    num_wires=st.integers(1, 8),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(derandomize=True, deadline=None, max_examples=8)
def test_adversaries_give_the_references_bits(
    kind: str, dtype: torch.dtype, device: str, numels: list[int], stochastic: bool, num_wires: int, seed: int
) -> None:
    wires, expected_wires = [], []
    for rank in range(num_wires):
        grads = [adversary(kind, numel, rank).to(dtype) for numel in numels]
        on_device = [grad.to(device) for grad in grads]
        wires.append(new_wire(on_device))
        expected_wires.append(new_wire(grads))
        stats, expected_stats = new_stats(device), new_stats()
        ops.pack(on_device, wires[-1], stats, stochastic=stochastic, seed=seed)
        reference.pack(grads, expected_wires[-1], expected_stats, stochastic=stochastic, seed=seed)
        assert_bitwise_equal(wires[-1], expected_wires[-1], "wire")
        assert_bitwise_equal(stats, expected_stats, "stats")
    summed, expected = torch.stack(wires), torch.stack(expected_wires)
    out, expected_out = torch.empty_like(summed[0]), torch.empty_like(expected[0])
    options = {"multiplier": 1 / num_wires, "grad_dtype": dtype, "stochastic": stochastic, "seed": seed}
    ops.reduce(summed, out, **options)
    reference.reduce(expected, expected_out, **options)
    assert_bitwise_equal(out, expected_out, "out")
    ops.unpack(summed, on_device, stats, multiplier=1 / num_wires)
    reference.unpack(expected, grads, expected_stats, multiplier=1 / num_wires)
    for grad, expected_grad in zip(on_device, grads, strict=True):
        assert_bitwise_equal(grad, expected_grad, "grad")


@on_each_device
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("kind", ADVERSARIES)
def test_error_is_within_half_a_step_or_one_if_stochastic(kind: str, stochastic: bool, device: str) -> None:
    grad = adversary(kind, 5 * BLOCK + 17)
    wire = new_wire([grad])
    reference.pack([grad], wire, new_stats())
    steps = scales_of(wire).double().repeat_interleave(BLOCK)[: len(grad)]
    amax = torch.nn.functional.pad(grad, (0, -len(grad) % BLOCK)).view(-1, BLOCK).abs().amax(dim=1).double()
    amax = amax.clamp(2.0**-110, reference.INT8_LIMIT)
    torch.testing.assert_close(scales_of(wire).double(), amax / 127, rtol=2**-23, atol=0)
    error = (there_and_back(grad.to(device), stochastic=stochastic, seed=3).cpu().double() - grad.double()).abs()
    saturation = (grad.double().abs() - reference.INT8_LIMIT).clamp(min=0)
    # Rounding the inverse, the product with it and the product with the step moves a border by 127 * 3 * 2^-24 steps.
    assert (error - saturation <= steps * ((1 if stochastic else 0.5) + 2**-15)).all()


@on_each_device
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 77, 127])
def test_what_is_not_finite_makes_its_block_so_and_no_other(bad: float, place: int, device: str) -> None:
    for block in range(5):
        grad = adversary("ordinary", 5 * BLOCK - 1).to(device)
        grad[min(block * BLOCK + place, len(grad) - 1)] = bad
        stats, wire = new_stats(device), new_wire([grad])
        ops.pack([grad], wire, stats)
        assert scales_of(wire).isnan().tolist() == [b == block for b in range(5)]
        ops.unpack(wire, [grad], stats)
        bad_ones = torch.zeros(5 * BLOCK, dtype=torch.bool)
        bad_ones.view(5, BLOCK)[block] = True
        assert torch.equal(grad.isnan().cpu(), bad_ones[: len(grad)])
        assert stats[reference.NUM_NONFINITE] == bad_ones[: len(grad)].sum()


@on_each_device
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("num_wires", [1, 2, 3, 7, 64])
def test_the_largest_stay_finite_in_the_mean_and_what_saturates_is_counted(
    num_wires: int, dtype: torch.dtype, device: str
) -> None:
    largest = torch.finfo(dtype).max
    grad = torch.tensor([largest, -largest, 1.0], dtype=dtype, device=device).repeat(100)
    wire, stats = new_wire([grad]), new_stats(device)
    ops.pack([grad], wire, stats)
    assert stats[reference.NUM_SATURATED] == (200 if largest > reference.INT8_LIMIT else 0)
    wires = wire.repeat(num_wires).view(num_wires, -1)
    out = torch.empty_like(wire)
    ops.reduce(wires, out, multiplier=1 / num_wires, grad_dtype=dtype)
    for sent, factor in ((wires, 1 / num_wires), (out, 1.0)):
        ops.unpack(sent, [grad], stats, multiplier=factor)
        assert stats[reference.NUM_NONFINITE] == 0
        mean = grad[:2].double().cpu()
        expected = min(largest, reference.INT8_LIMIT) * torch.tensor([1.0, -1.0], dtype=torch.float64)
        torch.testing.assert_close(mean, expected, rtol=1e-2, atol=0)


# ---- stochastic rounding --------------------------------------------------------------------------------------------


def _murmur_finaliser(bits: int) -> int:
    bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
    return bits ^ bits >> 16


def test_random_bits_are_those_of_the_published_hashes() -> None:
    """SplitMix64 from 0 begins with e220a8397b1dcdaf, 6e789e6aa1b965f4; MurmurHash3's finaliser makes 514e28b7 of 1."""
    assert _murmur_finaliser(1) == 0x514E28B7
    fractions = reference.random_fractions(0, 2)
    for block, key in enumerate([0xE220A839, 0x6E789E6A]):
        for place in (0, 1, 127):
            assert fractions[block, place] == _murmur_finaliser(key + place) >> 17


@in_either_order
def test_stochastic_rounding_is_right_on_average(device: str) -> None:
    grad = torch.cat([torch.linspace(-1, 1, BLOCK - 1), torch.tensor([1.27])]).to(device)
    step = 0.01
    num_seeds = 4000
    total, squares = torch.zeros(BLOCK, dtype=torch.float64), torch.zeros(BLOCK, dtype=torch.float64)
    for seed in range(num_seeds):
        back = there_and_back(grad, stochastic=True, seed=seed).cpu().double()
        total += back
        squares += (back - grad.cpu().double()) ** 2
    error = (total / num_seeds - grad.cpu().double()) / step
    # Of a mean of so many values that are at most one step apart, with a deviation of at most half a step each: six of
    # the mean's deviations, and what the fixed point and float32 round.
    assert error.abs().max() < 6 * 0.5 / math.sqrt(num_seeds) + 2**-14
    assert (squares / num_seeds).max() < (0.55 * step) ** 2
    assert (squares / num_seeds).mean() > (0.3 * step) ** 2


@on_each_device
def test_stochastic_rounding_leaves_what_is_on_the_grid(device: str) -> None:
    grad = torch.arange(-127.0, 128.0, device=device)
    for seed in range(50):
        assert_bitwise_equal(there_and_back(grad, stochastic=True, seed=seed), grad)


@on_each_device
def test_stochastic_rounding_follows_the_seed_and_the_place_on_the_wire(device: str) -> None:
    grad = torch.full((4 * BLOCK,), 0.3, device=device)
    grad[::BLOCK] = 1.0

    def sent(seed: int) -> Tensor:
        return there_and_back(grad, stochastic=True, seed=seed).cpu()

    assert_bitwise_equal(sent(5), sent(5))
    assert not torch.equal(sent(5), sent(6))
    blocks = sent(5).view(4, BLOCK)
    assert len({tuple(block.tolist()) for block in blocks}) == 4


@in_either_order
def test_a_repeated_call_rounds_otherwise_each_time_and_right_on_average(device: str) -> None:
    """As a CUDA graph repeats it: everything that the host says stays the same, and unpacking counts the steps."""
    grad = torch.cat([torch.linspace(-1, 1, BLOCK - 1), torch.tensor([1.27])]).repeat(2).to(device)
    wires, out, back = new_wire([grad]).repeat(2).view(2, -1), new_wire([grad]), torch.empty_like(grad)
    stats, step = new_stats(device), torch.tensor(7, device=device)
    num_replays = 1000
    seen: dict[str, set[bytes]] = {"packed": set(), "reduced": set()}
    total = torch.zeros(2 * BLOCK, dtype=torch.float64)
    for _ in range(num_replays):
        for rank, wire in enumerate(wires):
            ops.pack([grad], wire, stats, stochastic=True, seed=rank, step=step)
        ops.reduce(wires, out, multiplier=0.5, stochastic=True, seed=2, step=step)
        ops.unpack(out, [back], stats, step=step)
        seen["packed"].add(wires[0].cpu().numpy().tobytes())
        seen["reduced"].add(out.cpu().numpy().tobytes())
        total += back.cpu().double()
    assert {name: len(each) for name, each in seen.items()} == {"packed": num_replays, "reduced": num_replays}
    assert step.item() == 7 + num_replays
    error = (total / num_replays - grad.cpu().double()) / 0.01
    # Two ranks' mean and its own rounding: each at most half a step of deviation, the former by the root of two less.
    assert error.abs().max() < 6 * 0.5 * math.sqrt(1.5 / num_replays) + 2**-12


@on_each_device
def test_a_step_is_counted_by_the_last_call_for_a_bucket(device: str) -> None:
    step = torch.tensor(5, device=device)
    wire, grad = torch.ones(300, device=device), torch.empty(300, device=device)
    ops.unpack(wire, [grad], new_stats(device), step=step, is_last=False)
    assert step.item() == 5
    ops.unpack(wire, [grad], new_stats(device), step=step)
    assert step.item() == 6
    ops.unpack(wire[:0], [grad[:0]], new_stats(device), step=step)
    assert step.item() == 7


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
    size, per_block = (BLOCK, reference.BLOCK_BYTES) if wire_dtype == torch.uint8 else (1, 1)
    values = adversary("ordinary", 7 * BLOCK + 5) / 10
    values[BLOCK + 1] = odd_one
    grad = values.to(dtype).to(device)
    numel = reference.wire_numel([len(grad)], wire_dtype)
    whole, parts = (torch.zeros(numel, dtype=wire_dtype, device=device) for _ in range(2))
    scale, part_scale = (torch.tensor(2.0, device=device) for _ in range(2))
    stats, part_stats = new_stats(device), new_stats(device)
    pieces = list(zip(grad.split(2 * BLOCK), parts.split(2 * BLOCK // size * per_block), strict=True))
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

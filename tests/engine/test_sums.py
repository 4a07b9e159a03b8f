"""Sums that the ranks take themselves, in float32: one_shot, two_shot and two levels, over every wire.

The bodies are the same on Gloo, by messages and in shared memory, and on NCCL: so what runs on a CPU proves the tests
that need a GPU.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync import _C, Compression
from fastsync.sync.compression import BLOCKS, Algorithm, Wire
from tests import reference
from tests.bitwise import assert_bitwise_equal
from tests.engine.entry_points import Averaged, average
from tests.models import (
    STAMP,
    Given,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    random_grads,
)
from tests.ranks import on_ranks, run_ranks
from tests.reference import WIRE_DTYPE

SHAPES = [(37, 11), (3,), (1,), (700,), (129,), (1000,)]
SEVERAL_PIECES = [(1_100_003,), (3,)]
STEPS = 3
WIRES: list[Wire] = ["none", "fp16", "bf16", "int8", "int4"]
ALGORITHMS: list[Algorithm] = ["one_shot", "two_shot"]
GRAD_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ENTRY_POINTS = ("hook", "attach", "all_reduce")

Way = Algorithm | int
"""Who adds: an algorithm, or so many ranks on each node."""

TRANSPORTS = {"shared memory": ("gloo", "cpu"), "messages": ("gloo", "cpu"), "nccl": ("nccl", "cuda")}
GENERIC = "messages, by torch's own operations"
"""As on a device that no kernels were built for."""
TRANSPORTS[GENERIC] = TRANSPORTS["messages"]
each_transport = pytest.mark.parametrize(
    "transport",
    [pytest.param(name, marks=pytest.mark.gpu if name == "nccl" else ()) for name in TRANSPORTS if name != GENERIC],
)
on_cpu_and_gpu = pytest.mark.parametrize("transport", ["messages", pytest.param("nccl", marks=pytest.mark.gpu)])


def start(function: Callable[..., Any], world_size: int, transport: str, *args: Any) -> list[Any]:
    backend, device = TRANSPORTS[transport]
    options: dict[str, Any] = {"backend": backend, "timeout": 140, "shared_memory": transport == "shared memory"}
    kernels = "aten" if transport == GENERIC else "auto"
    return run_ranks(_with_kernels, world_size, kernels, function, device, *args, **options)


def _with_kernels(rank: int, world_size: int, kernels: str, function: Callable[..., Any], *args: Any) -> Any:
    os.environ["FASTSYNC_KERNELS"] = kernels  # chosen, so nobody is warned
    assert (_C.kernels("cpu") == "generic") == (kernels == "aten")
    return function(rank, world_size, *args)


def by(way: Way, wire: Wire, **options: Any) -> Compression:
    if isinstance(way, int):
        return Compression(wire, ranks_per_node=way, **options)
    return Compression(wire, reduce="fp32", algorithm=way, **options)


def mean_by_reference(everyone: Sequence[Sequence[Tensor]], way: Way, wire: Wire) -> list[Tensor]:
    if isinstance(way, int):
        return reference.two_level_mean(everyone, way, WIRE_DTYPE[wire])
    return reference.all_reduce_mean(everyone, WIRE_DTYPE[wire], reduce="fp32", algorithm=way)


def averaged(given: Averaged, grads: Sequence[Tensor], device: str) -> list[Tensor]:
    result = [grad for grad in given.step([grad.to(device) for grad in grads]) if grad is not None]
    assert_same_on_all_ranks(result)
    return result


# ---- the same bits as the reference ---------------------------------------------------------------------------------


def _as_the_reference(rank: int, world_size: int, device: str, way: Way) -> None:
    def check(wire: Wire, shapes: Sequence[Sequence[int]], dtype: torch.dtype, steps: int, *entry_points: str) -> None:
        like = [grad.to(device) for grad in random_grads(0, 0, shapes, dtype)]
        models = {name: average(name, Given(like), by(way, wire), bucket_cap_mb=25) for name in entry_points}
        for step in range(steps):
            # All ranks have the same bits, so one of them holds them against the reference: the next one each time.
            compares = next(turns) % world_size == rank
            of_ranks = [
                random_grads(other, step, shapes, dtype) if compares or other == rank else []
                for other in range(world_size)
            ]
            # None is so small that float16 has only a subnormal for it: a bucket's scale cannot be seen.
            of_ranks = [[grad + grad.sign() / 64 for grad in grads] for grads in of_ranks]
            mean = mean_by_reference(of_ranks, way, wire) if compares else None
            for name, given in models.items():
                what = f"{wire}, {way}, {dtype}, {name}, step {step}: gradient"
                means = averaged(given, of_ranks[rank], device)
                assert_all_bitwise_equal(means, mean or means, what)

    turns = itertools.count()
    for wire in WIRES:
        for dtype in GRAD_DTYPES:
            steps, entry_points = (STEPS, ENTRY_POINTS) if dtype == torch.float32 else (1, ("attach",))
            check(wire, SHAPES, dtype, steps, *entry_points)
        one_more_than_shards_hold = [(512 * world_size + 1,)]
        check(wire, one_more_than_shards_hold, torch.float32, 1, "attach")
        if world_size in (3, 4) and wire in ("none", "int8"):
            check(wire, SEVERAL_PIECES, torch.float32, 1, "attach")


@pytest.mark.sampled(3)
@each_transport
@pytest.mark.parametrize(
    ("world_size", "way"),
    [(1, "one_shot"), *itertools.product((2, 3), ALGORITHMS), (4, 2), (6, 3)],
)
def test_the_mean_is_the_references_to_the_bit(world_size: int, way: Way, transport: str) -> None:
    start(_as_the_reference, world_size, transport, way)


def _with_pieces_under_way(rank: int, world_size: int, device: str) -> None:
    shapes = [(2_000_003,)] * 3  # each a bucket of eight pieces
    like = [torch.zeros(shape, device=device) for shape in shapes]
    given = average("attach", Given(like), by("two_shot", "none"), bucket_cap_mb=8)
    for step in range(1, 5):
        first = world_size * step
        for grad in given.step([torch.full_like(each, first + rank) for each in like]):
            assert grad is not None
            assert grad.eq(first + (world_size - 1) / 2).all(), f"step {step}"


@each_transport
def test_pieces_are_unpacked_while_others_are_added_up(transport: str) -> None:
    """On a CPU one thread does the one and another the other."""
    start(_with_pieces_under_way, 4, transport)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("world_size", "way"), [(2, "one_shot"), (3, "two_shot"), (4, 2)])
def test_torchs_own_operations_give_the_references_bits(world_size: int, way: Way) -> None:
    start(_as_the_reference, world_size, GENERIC, way)


@on_ranks(2)
def test_within_one_node_nothing_is_compressed(rank: int, world_size: int) -> None:
    everyone = [random_grads(other, 0, SHAPES, torch.float32) for other in range(world_size)]
    expected = reference.all_reduce_mean(everyone, reduce="fp32", algorithm="two_shot")
    for name in ENTRY_POINTS:
        given = average(name, Given(everyone[0]), by(world_size, "int8", error_feedback=True), bucket_cap_mb=25)
        assert_all_bitwise_equal(averaged(given, everyone[rank], "cpu"), expected, f"{name}: gradient")


@on_ranks(4)
def test_the_wire_between_nodes_may_change(rank: int, world_size: int) -> None:
    everyone = [random_grads(other, 0, SHAPES, torch.float32) for other in range(world_size)]
    for name in ("hook", "attach"):
        given = average(name, Given(everyone[0]), bucket_cap_mb=25)
        for wire in ("none", "int8", "bf16"):
            given.compression = by(2, wire)
            expected = mean_by_reference(everyone, 2, wire)
            assert_all_bitwise_equal(averaged(given, everyone[rank], "cpu"), expected, f"{name}, {wire}: gradient")


# ---- what depends on the steps before -------------------------------------------------------------------------------


@each_transport
@pytest.mark.parametrize(("world_size", "way"), [(3, "one_shot"), (2, "two_shot"), (3, "two_shot")])
def test_what_is_kept_is_the_references_to_the_bit(world_size: int, way: Algorithm, transport: str) -> None:
    start(_keeps_as_the_reference, world_size, transport, way)


def _keeps_as_the_reference(rank: int, world_size: int, device: str, way: Algorithm) -> None:
    for wire, shapes in itertools.product(("bf16", "int8", "int4"), (SHAPES, [(512 * world_size + 1,)])):
        like = [grad.to(device) for grad in random_grads(0, 0, shapes, torch.float32)]
        given = average("synchronize", Given(like), by(way, wire, error_feedback=True), bucket_cap_mb=25)
        in_bucket = like[::-1]  # so they follow each other
        kept = [[torch.zeros(grad.numel()) for grad in in_bucket] for _ in range(world_size)]
        for step in range(3):
            everyone = [random_grads(other, step, shapes, torch.float32) for other in range(world_size)]
            sent = [grads[::-1] for grads in everyone]
            mean = reference.all_reduce_mean(sent, WIRE_DTYPE[wire], reduce="fp32", algorithm=way, residuals=kept)
            assert_all_bitwise_equal(averaged(given, everyone[rank], device), mean[::-1], f"{wire}, {way}, step {step}")
            residuals = given.handle.state_dict()["residuals"]
            for index, expected in enumerate(kept[rank][::-1]):
                of_engine = residuals.get(f"weights.{index} of rank {rank}", torch.zeros_like(expected))
                assert_bitwise_equal(of_engine.cpu(), expected, f"{wire}, {way}, step {step}, kept of {index}")


OF_ALL_RANKS = [by(way, wire, error_feedback=True) for wire in WIRES[1:] for way in ALGORITHMS]
BETWEEN_NODES = [by(2, wire, error_feedback=True) for wire in WIRES[1:]]


def _every_step(rank: int, world_size: int, device: str, compressions: Sequence[Compression]) -> list[list[Tensor]]:
    results = []
    for compression in compressions:
        for name in ("hook", "attach"):
            like = [grad.to(device) for grad in random_grads(0, 0, SHAPES, torch.float32)]
            given = average(name, Given(like), compression, bucket_cap_mb=25)
            for step in range(STEPS):
                got = averaged(given, random_grads(rank, step, SHAPES, torch.float32), device)
                results.append([grad.cpu() for grad in got])
    return results


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "compressions"), [(2, OF_ALL_RANKS), (4, OF_ALL_RANKS), (4, BETWEEN_NODES)])
def test_residuals_are_the_cpus(compressions: Sequence[Compression], world_size: int) -> None:
    expected, *_ = start(_every_step, world_size, "messages", compressions)
    actual, *_ = start(_every_step, world_size, "nccl", compressions)
    for index, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        what = f"{compressions[index // (2 * STEPS)]}, result {index}: gradient"
        assert_all_bitwise_equal(got, wanted, what)


# ---- how wrong it may be --------------------------------------------------------------------------------------------

NUMEL = 5000
# A sum of n values takes n - 1 additions, each off by at most this part of the magnitudes (docs/reference/numerics.md);
# a value has been rounded once before, and its product with 1/n once.
UNIT = {"none": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


def _all_reduce(rank: int, world_size: int, device: str) -> None:
    for wire in UNIT:
        for name in ("hook", "attach"):
            like = [grad.to(device) for grad in random_grads(0, 0, SHAPES, torch.float32)]
            given = average(name, Given(like), wire, bucket_cap_mb=25)
            for step in range(STEPS):
                everyone = [random_grads(other, step, SHAPES, torch.float32) for other in range(world_size)]
                everyone = [[grad + grad.sign() / 64 for grad in grads] for grads in everyone]
                mean = reference.all_reduce_mean(everyone, WIRE_DTYPE[wire])
                what = f"{wire}, {name}: step {step}, gradient"
                got = averaged(given, everyone[rank], device)
                if world_size <= 2:  # one addition, which has no order
                    assert_all_bitwise_equal(got, mean, what)
                for index, actual in enumerate(got):
                    same = torch.stack([grads[index].double() for grads in everyone])
                    bound = same.abs().mean(dim=0) * ((1 + UNIT[wire]) ** (world_size + 1) - 1)
                    assert ((actual.cpu().double() - same.mean(dim=0)).abs() <= bound).all(), f"{what} {index}"


@on_cpu_and_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sums_by_the_process_group_are_as_exact_as_their_dtype(world_size: int, transport: str) -> None:
    start(_all_reduce, world_size, transport)


def test_sums_of_torchs_own_operations_are_as_exact_as_their_dtype() -> None:
    start(_all_reduce, 2, GENERIC)


def adversarial(rank: int) -> dict[str, Tensor]:
    """float32 gradients that are hard to carry; of each the values of all ranks are of one kind."""
    generator = torch.Generator().manual_seed(rank)
    noise = torch.randn(NUMEL, generator=generator)
    exponents = torch.randint(-60, 60, (NUMEL,), generator=generator).float()
    return {
        "ordinary": noise,
        "spread": noise * 2.0**exponents,
        "one large value a block": torch.where(torch.arange(NUMEL) % 128 == 5, 1e20, 1.0) * noise,
        "denormal": noise * 1e-40,
        "tiny": noise * 1e-30,
        "huge": noise.clamp(-3, 3) * 1e37,
        "constant": torch.full((NUMEL,), 1.00390625 + 2.0**-12),
        "cancelling": torch.full((NUMEL,), (-1.0) ** rank * 3.1) + noise * 1e-3,
        "zeros": torch.zeros(NUMEL),
    }


def encoding_error(values: Tensor, wire: Wire, largest: float) -> Tensor:
    """At most how far encoding may be off, for each value (docs/reference/numerics.md). ``largest`` on any rank."""
    values = values.double().abs()
    if wire in BLOCKS:
        blocks = nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 128)
        steps = blocks.amax(dim=1, keepdim=True).clamp(min=2.0**-110) / {"int8": 127, "int4": 7}[wire]
        return (steps / 2 * (1 + 2.0**-14)).expand_as(blocks).reshape(-1)[: len(values)]
    if wire == "bf16":
        return values * 2.0**-8 + 2.0**-134
    if wire == "fp16":
        return values * 2.0**-11 + max(largest * 2.0**-34, 2.0**-143)
    return torch.zeros_like(values)


def bound_of(grads: Sequence[Tensor], wire: Wire, algorithm: Algorithm) -> Tensor:
    largest = max(grad.abs().max().item() for grad in grads)
    sum_of_magnitudes = torch.stack([grad.double().abs() for grad in grads]).sum(dim=0)
    world_size = len(grads)
    error = torch.stack([encoding_error(grad, wire, largest) for grad in grads]).mean(dim=0)
    error = error + (world_size + 1) * (2.0**-24 * sum_of_magnitudes / world_size + 2.0**-149)
    if algorithm == "two_shot":
        mean_at_most = torch.stack([grad.double() for grad in grads]).mean(dim=0).abs() + error
        error = error + encoding_error(mean_at_most, wire, largest)
    return error


def _stays_within_the_bound(rank: int, world_size: int) -> dict[tuple[str, str, str], float]:
    """For each kind, wire and algorithm the largest error, relative to the largest value."""
    measured = {}
    of_ranks = [adversarial(other) for other in range(world_size)]
    for wire, algorithm in itertools.product(WIRES, ALGORITHMS):
        mine = list(of_ranks[rank].values())
        given = average("synchronize", Given(mine), by(algorithm, wire))
        means = averaged(given, mine, "cpu")
        assert len(given.handle.stats().buckets) == len(mine), "each kind has a scale of its own"
        for kind, mean in zip(of_ranks[rank], means, strict=True):
            grads = [values[kind] for values in of_ranks]
            error = (mean.double() - torch.stack(grads).double().mean(0)).abs()
            excess = (error / bound_of(grads, wire, algorithm)).max().item()
            assert excess <= 1, f"{kind}, {wire}, {algorithm}: {excess:.3g} times the bound"
            largest = max(grad.abs().max().item() for grad in grads)
            measured[kind, wire, algorithm] = error.max().item() / largest if largest else 0.0
    return measured


def test_errors_stay_within_what_is_derived_and_do_not_grow_with_the_ranks() -> None:
    of_few, of_many = (run_ranks(_stays_within_the_bound, world_size)[0] for world_size in (2, 6))
    for key, error in of_few.items():
        if key[0] in ("ordinary", "constant") and key[1] != "none":
            assert of_many[key] <= 1.5 * error, key


# ---- values that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "way"), [(3, "one_shot"), (3, "two_shot"), (4, 2)])
@on_ranks()
def test_what_is_not_finite_reaches_every_rank_and_is_forgotten(rank: int, world_size: int, way: Way) -> None:
    for wire, value in itertools.product(WIRES, (torch.inf, -torch.inf, torch.nan)):
        given = average("attach", Given([torch.zeros(400)]), by(way, wire, error_feedback=wire != "none"))
        for step in range(3):
            grads = [random_grads(other, step, [(400,)], torch.float32)[0] for other in range(world_size)]
            if step == 1:
                grads[-1][200] = value
            (mean,) = averaged(given, [grads[rank]], "cpu")
            reached = torch.arange(128, 256) if wire in BLOCKS else torch.tensor([200])
            is_bad = torch.zeros(400, dtype=torch.bool)
            is_bad[reached if step == 1 else []] = True
            what = f"{wire}, {way}, {value}, step {step}"
            assert torch.equal(~mean.isfinite(), is_bad), what
            assert given.handle.grad_stats().num_nonfinite.item() == is_bad.sum()
            if step != 1:
                atol = 1.0 if wire == "int4" else 0.15
                torch.testing.assert_close(mean, torch.stack(grads).mean(0), rtol=0, atol=atol, msg=what)


# ---- error feedback -------------------------------------------------------------------------------------------------


class Ledger:
    """What the gradients' means should have added up to, and has not come: the ranks must have kept it."""

    def __init__(self, given: Averaged, shapes: Sequence[Sequence[int]]) -> None:
        self.given, self.shapes = given, shapes
        self.owed = [torch.zeros(tuple(shape), dtype=torch.float64) for shape in shapes]

    def step(self, number: int, uses: Callable[[int, int], bool] = lambda rank, index: True) -> None:
        """In which each rank has a gradient of those parameters that it uses."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        of_ranks = [random_grads(other, number, self.shapes, torch.float32) for other in range(world_size)]
        means = self.given.step([grad if uses(rank, index) else None for index, grad in enumerate(of_ranks[rank])])
        for index, mean in enumerate(means):
            users = [other for other in range(world_size) if uses(other, index)]
            assert (mean is None) == (not users)
            for other in users:
                self.owed[index] += of_ranks[other][index].double() / world_size
            if mean is not None:
                self.owed[index] -= mean.double()

    def check(self, what: str) -> None:
        for index, (owed, kept) in enumerate(zip(self.owed, self.kept(), strict=True)):
            # float32's own roundings, of which each step makes a handful.
            torch.testing.assert_close(owed, kept, rtol=0, atol=1e-5, msg=lambda m: f"{what}, {index}: {m}")

    def kept(self) -> list[Tensor]:
        """Over all ranks, as a part of the mean. Zeros are not in the state."""
        residuals = self.given.handle.state_dict()["residuals"]
        kept = []
        for index, shape in enumerate(self.shapes):
            total = torch.zeros(tuple(shape), dtype=torch.float64)
            residual = residuals.get(f"weights.{index} of rank {dist.get_rank()}")
            if residual is not None:
                total += residual.view_as(total) / dist.get_world_size()
            dist.all_reduce(total)
            kept.append(total)
        return kept


@pytest.mark.parametrize(
    ("world_size", "way", "other"), [(3, "one_shot", "two_shot"), (3, "two_shot", "one_shot"), (4, 2, "two_shot")]
)
@on_ranks(cases={"entry_point": ["hook", "attach"]})
def test_what_is_applied_and_what_is_kept_are_all_there_was(
    rank: int, world_size: int, entry_point: str, way: Way, other: Way
) -> None:
    for wire in WIRES[1:]:
        compression = by(way, wire, error_feedback=True)
        ledger = Ledger(average(entry_point, Given([torch.zeros(s) for s in SHAPES]), compression), SHAPES)
        for number in range(3):
            ledger.step(number)
            ledger.check(f"{wire}, {way}, step {number}")
        assert max(kept.abs().max() for kept in ledger.kept()) > 0, "nothing was lost that could be kept"
        for number in range(3, 5):
            ledger.given.compression = by(other, wire, error_feedback=True)
            ledger.step(number)
            ledger.check(f"{wire}, from {way} to {other}")
        ledger.given.compression = "none"
        ledger.step(5)
        assert ledger.given.handle.state_dict()["residuals"] == {}


@on_ranks(4, cases={"way": [*ALGORITHMS, 2]})
def test_nothing_is_lost_of_pieces_and_of_gradients_that_some_ranks_lack(rank: int, world_size: int, way: Way) -> None:
    """Of pieces, of gradients that nobody, one rank, or all but another one in each step has, and of frozen ones."""
    ledger = Ledger(
        average("attach", Given([torch.zeros(s) for s in SEVERAL_PIECES]), by(way, "int8", error_feedback=True)),
        SEVERAL_PIECES,
    )
    for number in range(2):
        ledger.step(number)
        ledger.check(f"pieces, step {number}")
    given = average("attach", Given([torch.zeros(s) for s in SHAPES]), by(way, "int8", error_feedback=True))
    ledger = Ledger(given, SHAPES)

    *_, last = given.model.parameters()

    def uses(other: int, index: int) -> bool:
        of_each = [True, number != 1, other == 0, other != number % world_size, number % 2 == 0, last.requires_grad]
        return of_each[index]

    for number in range(8):
        last.requires_grad_(not 2 <= number < 5)  # which makes new buckets, and its own residuals wait
        ledger.step(number, uses)
        ledger.check(f"step {number}")


@on_ranks(2)
def test_residuals_are_saved_in_the_order_of_indices(rank: int, world_size: int) -> None:
    """Of a gradient in another order that is gone in the second step, when what was lost of its sums comes back."""
    grad = random_grads(rank, 0, [(4, 3, 5, 5)], torch.float32)[0].to(memory_format=torch.channels_last)
    model = Given([torch.zeros(7), torch.zeros_like(grad)])
    sync = fastsync.attach(model, Compression("int8", algorithm="two_shot", error_feedback=True))
    model([torch.ones(7), grad]).backward()
    total = grad.double()
    dist.all_reduce(total)
    lost = total / world_size - model.weights[1].grad.double()
    model.zero_grad()
    model([torch.ones(7), None]).backward()
    assert model.weights[1].grad is None
    residual = sync.state_dict()["residuals"][f"weights.1 of rank {rank}"]
    kept = residual.double() / world_size
    dist.all_reduce(kept)
    assert kept.count_nonzero() > 0
    torch.testing.assert_close(kept, lost.flatten(), rtol=0, atol=1e-6)


# ---- what is sent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(shared_memory=False)
def test_the_algorithm_by_default_is_what_sends_less(rank: int, world_size: int) -> None:
    """But for small buckets, where a step of the network costs more than the bytes: two_shot would save 2/3 of 80,000,
    which is less than 64 KiB.
    """
    for numel, payloads in {2: [(300_000, 1.0)], 3: [(40_000, 2.0), (300_000, 4 / 3)]}[world_size]:
        given = average("synchronize", Given([torch.ones(numel)]), Compression("bf16", reduce="fp32"))
        given.step([torch.full((numel,), 1.0 + rank)])
        flags = 4 * (world_size - 1)  # of one parameter, to each other rank
        assert (given.handle.stats().wire_bytes - flags) / (2 * numel) == pytest.approx(payloads, rel=0.01)


@pytest.mark.parametrize("world_size", [4, 6])
@on_ranks()
def test_what_crosses_from_node_to_node_is_compressed_and_sent_once(rank: int, world_size: int) -> None:
    ranks_per_node, num_nodes, numel = 2, world_size // 2, world_size * 512 * 3  # whole shards
    for wire, size in (("none", 4.0), ("bf16", 2.0), ("int8", 132 / 128), ("int4", 68 / 128)):
        given = average("hook", Given([torch.ones(numel)]), by(ranks_per_node, wire))  # type: ignore[arg-type]
        given.step([torch.full((numel,), 1.0 + rank)])
        within = (ranks_per_node - 1) * numel // ranks_per_node * (4 + size)
        between = 2 * (num_nodes - 1) * numel // world_size * size
        stamps = (ranks_per_node - 1 + num_nodes - 1) * STAMP * world_size * 4
        assert given.handle.stats().wire_bytes == within + between + stamps

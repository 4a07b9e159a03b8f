"""Sums in float32: what one_shot and two_shot give on several ranks, how wrong it may be, what error feedback keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync import Compression, reference
from fastsync.compression import Algorithm, Wire
from tests.models import (
    SMALL_BUCKETS,
    Given,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    backward_of,
    batch,
    given_ddp,
    grads_of,
    random_grads,
)
from tests.ranks import run_ranks

SHAPES = [(5,), (300,), (7, 11), (1000,), (129,)]
SEVERAL_PIECES = [(1_100_003,), (3,)]
WIRES: list[Wire] = ["none", "fp16", "bf16", "int8"]
ALGORITHMS: list[Algorithm] = ["one_shot", "two_shot"]
DTYPE_OF = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}


def mean_by_reference(grads: Sequence[Sequence[Tensor]], wire: Wire, algorithm: Algorithm) -> list[Tensor]:
    return reference.all_reduce_mean(grads, DTYPE_OF[wire], reduce="fp32", algorithm=algorithm)


def of_all_ranks(world_size: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[list[Tensor]]:
    return [random_grads(rank, 0, shapes, dtype) for rank in range(world_size)]


def averaged(grads: Sequence[Tensor], compression: Compression) -> list[Tensor]:
    """By an engine that is new, on all ranks."""
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    fastsync.all_reduce_gradients(parameters, compression)
    result = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert_same_on_all_ranks(result)
    return result


# ---- the same bits as the reference ---------------------------------------------------------------------------------


def _as_the_reference(rank: int, world_size: int, device: str) -> None:
    for wire, algorithm in itertools.product(WIRES, ALGORITHMS):
        compression = Compression(wire, reduce="fp32", algorithm=algorithm)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            grads = of_all_ranks(world_size, SHAPES, dtype)
            expected = mean_by_reference(grads, wire, algorithm)
            what = f"{wire}, {algorithm}, {dtype}: gradient"
            mine = [grad.to(device) for grad in grads[rank]]
            assert_all_bitwise_equal(averaged(mine, compression), expected, what)
            ddp = given_ddp(mine)
            fastsync.register_comm_hook(ddp, compression)
            assert_all_bitwise_equal(backward_of(ddp, mine), expected, "hook: " + what)
        one_more_than_shards_hold = [(512 * world_size + 1,)]
        for shapes in [one_more_than_shards_hold] + [SEVERAL_PIECES] * (world_size == 3):
            grads = of_all_ranks(world_size, shapes, torch.float32)
            expected = mean_by_reference(grads, wire, algorithm)
            mine = [grad.to(device) for grad in grads[rank]]
            assert_all_bitwise_equal(averaged(mine, compression), expected, f"{wire}, {algorithm}, {shapes}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_mean_is_the_references_to_the_bit(world_size: int) -> None:
    run_ranks(_as_the_reference, world_size, "cpu")


def _messages_as_the_reference(rank: int, world_size: int) -> None:
    for wire, algorithm in itertools.product(WIRES, ALGORITHMS):
        compression = Compression(wire, reduce="fp32", algorithm=algorithm)
        for shapes in (SHAPES, SEVERAL_PIECES):
            grads = of_all_ranks(world_size, shapes, torch.float32)
            expected = mean_by_reference(grads, wire, algorithm)
            assert_all_bitwise_equal(averaged(grads[rank], compression), expected, f"{wire}, {algorithm}, {shapes}")


def test_messages_bring_the_same() -> None:
    run_ranks(_messages_as_the_reference, 3, shared_memory=False)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_mean_on_gpus_is_the_references_to_the_bit(world_size: int) -> None:
    run_ranks(_as_the_reference, world_size, "cuda", backend="nccl")


def _full_width_between_two(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        mine = random_grads(rank, 0, SHAPES, dtype)
        expected = [grad.clone() for grad in mine]
        for grad in expected:
            dist.all_reduce(grad.mul_(0.5))
        assert_all_bitwise_equal(averaged(mine, Compression("none")), expected, f"{dtype}: gradient")


def test_full_width_between_two_ranks_is_all_reduces_sum() -> None:
    run_ranks(_full_width_between_two, 2)


# ---- how wrong it may be --------------------------------------------------------------------------------------------

NUMEL = 5000


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
    """At most how far encoding may be off, for each value (docs/design.md, Errors). ``largest`` on any rank."""
    values = values.double().abs()
    if wire == "int8":
        blocks = nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 128)
        steps = blocks.amax(dim=1, keepdim=True).clamp(min=2.0**-110) / 127
        return (steps / 2 * (1 + 2.0**-14)).expand_as(blocks).reshape(-1)[: len(values)]
    if wire == "bf16":
        return values * 2.0**-8 + 2.0**-134
    if wire == "fp16":
        return values * 2.0**-11 + max(largest * 2.0**-34, 2.0**-143)
    return torch.zeros_like(values)


def bound(grads: Sequence[Tensor], wire: Wire, algorithm: Algorithm) -> Tensor:
    largest = max(grad.abs().max().item() for grad in grads)
    sum_of_magnitudes = sum(grad.double().abs() for grad in grads)
    assert isinstance(sum_of_magnitudes, Tensor)
    world_size = len(grads)
    error = sum(encoding_error(grad, wire, largest) for grad in grads) / world_size
    error = error + (world_size + 1) * (2.0**-24 * sum_of_magnitudes / world_size + 2.0**-149)
    if algorithm == "two_shot":
        mean_at_most = (sum(grad.double() for grad in grads) / world_size).abs() + error
        error = error + encoding_error(mean_at_most, wire, largest)
    return error


def _stays_within_the_bound(rank: int, world_size: int) -> dict[tuple[str, str, str], float]:
    """For each kind, wire and algorithm the largest error, relative to the largest value."""
    measured = {}
    of_ranks = [adversarial(other) for other in range(world_size)]
    for wire, algorithm in itertools.product(WIRES, ALGORITHMS):
        parameters = [nn.Parameter(torch.zeros(NUMEL)) for _ in of_ranks[rank]]
        compression = Compression(wire, reduce="fp32", algorithm=algorithm)
        sync = fastsync.attach(parameters, compression, overlap=False, bucket_cap_mb=SMALL_BUCKETS)
        for parameter, grad in zip(parameters, of_ranks[rank].values(), strict=True):
            parameter.grad = grad.clone()
        sync.synchronize()
        assert len(sync.stats().buckets) == len(parameters), "each kind has a scale of its own"
        assert_same_on_all_ranks([parameter.grad for parameter in parameters])
        for kind, parameter in zip(of_ranks[rank], parameters, strict=True):
            grads = [values[kind] for values in of_ranks]
            error = (parameter.grad.double() - torch.stack(grads).double().mean(0)).abs()
            excess = (error / bound(grads, wire, algorithm)).max().item()
            assert excess <= 1, f"{kind}, {wire}, {algorithm}: {excess:.3g} times the bound"
            largest = max(grad.abs().max().item() for grad in grads)
            measured[kind, wire, algorithm] = error.max().item() / largest if largest else 0.0
    return measured


def test_errors_stay_within_what_is_derived_and_do_not_grow_with_the_ranks() -> None:
    of_few, of_many = (run_ranks(_stays_within_the_bound, world_size)[0] for world_size in (2, 8))
    for key, error in of_few.items():
        if key[0] in ("ordinary", "constant") and key[1] != "none":
            assert of_many[key] <= 1.5 * error, key


def test_the_wires_own_sum_grows_less_exact_with_the_ranks() -> None:
    def error(world_size: int, reduce: Literal["wire", "fp32"]) -> float:
        grads = [[torch.full((10,), 1.00390625 + rank * 2.0**-6)] for rank in range(world_size)]
        exact = torch.stack([grad for (grad,) in grads]).double().mean(0)
        (mean,) = reference.all_reduce_mean(grads, torch.bfloat16, reduce=reduce, algorithm="two_shot")
        return (mean.double() - exact).abs().max().item()

    assert error(64, "wire") > 4 * error(64, "fp32")


# ---- values that are not finite -------------------------------------------------------------------------------------


def _not_finite(rank: int, world_size: int) -> None:
    for wire, algorithm, value in itertools.product(WIRES, ALGORITHMS, (torch.inf, torch.nan)):
        feedback = wire != "none"
        model = Given([torch.zeros(400)])
        sync = fastsync.attach(model, Compression(wire, reduce="fp32", algorithm=algorithm, error_feedback=feedback))
        for step in range(4):
            grads = [random_grads(other, step, [(400,)], torch.float32)[0] for other in range(world_size)]
            if step == 1:
                grads[0][200] = value
            model.zero_grad()
            model([grads[rank]]).backward()
            (mean,) = grads_of(model)
            assert_same_on_all_ranks([mean])
            reached = torch.arange(128, 256) if wire == "int8" else torch.tensor([200])
            is_bad = torch.zeros(400, dtype=torch.bool)
            is_bad[reached if step == 1 else []] = True
            assert torch.equal(~mean.isfinite(), is_bad), f"{wire}, {algorithm}, {value}, step {step}"
            assert sync.grad_stats().num_nonfinite.item() == is_bad.sum()
            if step != 1:
                exact = torch.stack(grads).mean(0)
                torch.testing.assert_close(mean, exact, rtol=0, atol=0.15, msg=f"{wire}, {algorithm}, step {step}")


def test_what_is_not_finite_reaches_every_rank_and_is_forgotten() -> None:
    run_ranks(_not_finite, 3)


# ---- error feedback -------------------------------------------------------------------------------------------------

Door = Callable[[nn.Module, Any], tuple[nn.Module, Any]]


def attached(model: nn.Module, compression: Any) -> tuple[nn.Module, Any]:
    return model, fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS)


def hooked(model: nn.Module, compression: Any) -> tuple[nn.Module, Any]:
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)  # which regroups after one backward
    return ddp, fastsync.register_comm_hook(ddp, compression)


DOORS: dict[str, Door] = {"attach": attached, "hook": hooked}


def unsent(sync: Any, model: nn.Module) -> list[Tensor]:
    """What all ranks together still have to add to the mean of each parameter's gradients, in float64."""
    residuals = sync.state_dict()["residuals"]
    total = []
    for name, parameter in model.named_parameters():
        nothing = {"own": torch.zeros(parameter.numel()), "of_sums": None}
        of_this = residuals.get(f"{name} of rank {dist.get_rank()}", nothing)
        value = of_this["own"].double() / dist.get_world_size()
        if of_this["of_sums"] is not None:
            value = value + of_this["of_sums"].double()
        dist.all_reduce(value)
        total.append(value.view_as(parameter))
    return total


class Ledger:
    """What the gradients' means should have added up to, and what they did."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.owed = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        self.scale = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]

    def step(self, forward: nn.Module, rank: int, world_size: int, number: int) -> None:
        parameters = list(self.model.parameters())
        for other in range(world_size):
            loss = self.model(batch(other, number)).square().mean()
            able = [p for p in parameters if p.requires_grad]
            of_able = iter(torch.autograd.grad(loss, able))
            for index, parameter in enumerate(parameters):
                if parameter.requires_grad:
                    grad = next(of_able).double() / world_size
                    self.owed[index] += grad
                    self.scale[index] += grad.abs()
        forward.zero_grad()
        forward(batch(rank, number)).square().mean().backward()
        grads = [p.grad for p in parameters if p.requires_grad]
        assert_same_on_all_ranks([grad for grad in grads if grad is not None])
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                assert parameter.grad is not None
                self.owed[index] -= parameter.grad.double()

    def check(self, unsent: Sequence[Tensor], what: str) -> None:
        for index, (owed, kept, scale) in enumerate(zip(self.owed, unsent, self.scale, strict=True)):
            # float32's own roundings, of which each step makes a handful.
            excess = ((owed - kept).abs() / (scale.max() * 2.0**-21)).max().item()
            assert excess <= 1, f"{what}: parameter {index} is off by {excess:.3g} times what rounding explains"


def _nothing_is_lost(rank: int, world_size: int, name: str) -> None:
    for wire, algorithm in itertools.product(("int8", "fp16", "bf16"), ALGORITHMS):
        torch.manual_seed(1)
        model = Mlp()
        compression = Compression(wire, reduce="fp32", algorithm=algorithm, error_feedback=True)  # type: ignore[arg-type]
        forward, sync = DOORS[name](model, compression)
        ledger = Ledger(model)
        for number in range(6):
            ledger.step(forward, rank, world_size, number)
            ledger.check(unsent(sync, model), f"{name}, {wire}, {algorithm}, step {number}")
            largest = max(value.abs().max().item() for value in ledger.owed)
            assert largest > 0, "nothing was lost that could be kept"
        other = "two_shot" if algorithm == "one_shot" else "one_shot"
        sync.compression = Compression(wire, reduce="fp32", algorithm=other, error_feedback=True)  # type: ignore[arg-type]
        ledger.step(forward, rank, world_size, 6)
        ledger.check(unsent(sync, model), f"{name}, {wire}, from {algorithm} to {other}")
        sync.compression = "none"
        ledger.step(forward, rank, world_size, 7)
        ledger.check([torch.zeros_like(owed) for owed in ledger.owed], f"{name}, {wire}, {algorithm}: sent at last")
        assert sync.state_dict()["residuals"] == {}


@pytest.mark.parametrize("name", DOORS)
def test_what_is_applied_and_what_is_kept_are_all_there_was(name: str) -> None:
    run_ranks(_nothing_is_lost, 3, name)


def _nothing_is_lost_of_pieces(rank: int, world_size: int, how: dict[str, Any]) -> None:
    model = Given([torch.zeros(shape) for shape in SEVERAL_PIECES])
    sync = fastsync.attach(model, Compression("int8", error_feedback=True, **how))
    owed = [torch.zeros(shape, dtype=torch.float64) for shape in SEVERAL_PIECES]
    for step in range(3):
        of_ranks = [random_grads(other, step, SEVERAL_PIECES, torch.float32) for other in range(world_size)]
        model.zero_grad()
        model(of_ranks[rank]).backward()
        for index, mean in enumerate(grads_of(model)):
            owed[index] += torch.stack([grads[index] for grads in of_ranks]).double().mean(0) - mean.double()
        for one, other in zip(owed, unsent(sync, model), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=lambda m: f"step {step}: {m}")  # noqa: B023


@pytest.mark.parametrize("how", [{"algorithm": "one_shot"}, {"algorithm": "two_shot"}, {"ranks_per_node": 2}], ids=str)
def test_nothing_is_lost_of_buckets_that_go_in_pieces(how: dict[str, Any]) -> None:
    run_ranks(_nothing_is_lost_of_pieces, 4, how)


def _frozen_and_unused(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = Mlp()
    compression = Compression("int8", algorithm="two_shot", error_feedback=True)
    forward, sync = attached(model, compression)
    ledger = Ledger(model)
    first = model.layers[0]
    for number in range(8):
        for parameter in first.parameters():  # which makes new buckets, and its own residuals wait
            parameter.requires_grad_(not 2 <= number < 5)
        ledger.step(forward, rank, world_size, number)
        ledger.check(unsent(sync, model), f"step {number}")


def test_residuals_survive_new_buckets() -> None:
    run_ranks(_frozen_and_unused, 3)


def _without_gradient(rank: int, world_size: int) -> None:
    for algorithm in ALGORITHMS:
        _without_gradient_by(algorithm, rank, world_size)


def _without_gradient_by(algorithm: Algorithm, rank: int, world_size: int) -> None:
    shapes = [(200,), (300,)]
    model = Given([torch.zeros(shape) for shape in shapes])
    sync = fastsync.attach(model, Compression("int8", algorithm=algorithm, error_feedback=True))
    owed = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for step, uses in enumerate(([True, True], [True, False], [True, rank == 0], [True, True])):
        of_ranks = [random_grads(other, step, shapes, torch.float32) for other in range(world_size)]
        model.zero_grad()
        model([grad if used else None for grad, used in zip(of_ranks[rank], uses, strict=True)]).backward()
        for index, weight in enumerate(model.weights):
            users = range(world_size) if uses[index] or step == 2 else range(0)
            users = range(1) if step == 2 and index == 1 else users
            for other in users:
                owed[index] += of_ranks[other][index].double() / world_size
            if weight.grad is not None:
                owed[index] -= weight.grad.double()
            assert (weight.grad is None) == (step == 1 and index == 1)
        for one, other in zip(owed, unsent(sync, model), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_parameter_without_gradient_keeps_its_residual() -> None:
    run_ranks(_without_gradient, 2)


def _kept_as_it_lies_in_memory(rank: int, world_size: int) -> None:
    """A gradient that is gone in the second step, when what was lost of its sums comes back."""
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
    kept = unsent(sync, model)[1].flatten()
    assert kept.count_nonzero() > 0
    torch.testing.assert_close(kept, lost.permute(0, 2, 3, 1).flatten(), rtol=0, atol=1e-6)


def test_residuals_lie_as_their_gradients_do() -> None:
    run_ranks(_kept_as_it_lies_in_memory, 2)


# ---- stochastic rounding --------------------------------------------------------------------------------------------


def _unbiased(rank: int, world_size: int) -> None:
    grads = [torch.full((1280,), 0.3 + 0.1 * other) for other in range(world_size)]
    for values in grads:
        values[::128] = 10.0
    exact = torch.stack(grads).mean(0)
    for algorithm in ALGORITHMS:
        model = Given([torch.zeros(1280)])
        fastsync.attach(model, Compression("int8", rounding="stochastic", algorithm=algorithm))
        total = torch.zeros(1280, dtype=torch.float64)
        means = set()
        for _ in range(60):
            model.zero_grad()
            model([grads[rank]]).backward()
            (mean,) = grads_of(model)
            assert_same_on_all_ranks([mean])
            total += mean.double()
            means.add(mean[1].item())
        assert len(means) > 1, "every step rounds alike"
        # A step is 10 / 127; the mean of 60 * 1270 roundings has a deviation of less than a step / 2 / sqrt(76,200).
        off = (total / 60 - exact)[torch.arange(1280) % 128 != 0].mean().abs().item()
        assert off < 5 * 10 / 127 / 2 / (60 * 1270) ** 0.5 * 2**0.5, f"{algorithm}: {off:.2g}"


def test_stochastic_rounding_is_right_on_average_and_never_the_same() -> None:
    run_ranks(_unbiased, 2)


def _by_a_chance_of_its_own(rank: int, world_size: int, how: dict[str, Any]) -> None:
    """What rounding loses of blocks that are all alike, in a bucket of several pieces."""
    parameter = nn.Parameter(torch.zeros(128 * 8700))
    compression = Compression("int8", error_feedback=True, rounding="stochastic", **how)
    sync = fastsync.attach([parameter], compression, overlap=False)
    parameter.grad = torch.linspace(-1.0, 1.0, 128).sin().repeat(8700)
    sync.synchronize()
    own = sync.state_dict()["residuals"][f"0 of rank {rank}"]["own"].view(-1, 128)
    lost = own[own.count_nonzero(dim=1) > 0]
    assert len(lost) >= len(own) / world_size
    assert len(lost.unique(dim=0)) == len(lost)


@pytest.mark.parametrize("how", [{"algorithm": "one_shot"}, {"algorithm": "two_shot"}, {"ranks_per_node": 2}], ids=str)
def test_every_block_rounds_by_a_chance_of_its_own(how: dict[str, Any]) -> None:
    run_ranks(_by_a_chance_of_its_own, 4 if "ranks_per_node" in how else 2, how)


def _sums_by_another_chance(rank: int, world_size: int) -> None:
    """All lies halfway between two of the wire's values, and so do the means of one and the other, rounded anew."""
    parameter = nn.Parameter(torch.zeros(128 * 200))
    compression = Compression("int8", error_feedback=True, rounding="stochastic", algorithm="two_shot")
    sync = fastsync.attach([parameter], compression, overlap=False)
    parameter.grad = torch.full((128 * 200,), 10.5)
    parameter.grad[::128] = 127.0
    sync.synchronize()
    residual = sync.state_dict()["residuals"][f"0 of rank {rank}"]
    of_sums = residual["of_sums"].view(world_size, -1)[rank]
    is_rounded = of_sums != 0
    assert is_rounded.sum() > 1000
    for own in residual["own"].view(world_size, -1):
        went_alike = own.sign() == of_sums.sign()
        assert 0.4 < went_alike[is_rounded].float().mean() < 0.6


def test_sums_round_by_another_chance_than_what_they_are_of() -> None:
    run_ranks(_sums_by_another_chance, 2)


# ---- while backward goes on -----------------------------------------------------------------------------------------


def _many_buckets(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    models = [Mlp(), Mlp()]
    compression = Compression("fp16", reduce="fp32", algorithm="two_shot")
    syncs = [fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS) for model in models]
    for step in range(20):
        losses = [model(batch(rank, step)).square().mean() for model in models]
        for model in models:
            model.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        for model in models:
            exact = [torch.zeros_like(p) for p in model.parameters()]
            for other in range(world_size):
                loss = model(batch(other, step)).square().mean()
                for total, grad in zip(exact, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                    total += grad / world_size
            for mean, expected in zip(grads_of(model), exact, strict=True):
                torch.testing.assert_close(mean, expected, rtol=0, atol=2e-3 * expected.abs().max().item())
            assert_same_on_all_ranks(grads_of(model))
    assert all(len(sync.stats().buckets) >= 3 for sync in syncs)


def test_two_engines_of_many_buckets_in_one_backward() -> None:
    run_ranks(_many_buckets, 3)


def _died(rank: int, world_size: int, name: str) -> None:
    torch.manual_seed(1)
    forward, _ = DOORS[name](Mlp(), Compression("int8", algorithm="two_shot"))
    run = partial(forward, batch(rank, 0))
    for _ in range(3):  # DDP has collectives of its own at the beginning
        run().sum().backward()
    if rank == 1:
        return  # and its process ends
    with pytest.raises(RuntimeError, match="averaging bucket 0 failed on rank 0 of 2: "):
        run().sum().backward()


@pytest.mark.parametrize("name", DOORS)
def test_a_rank_that_is_gone_is_an_error(name: str) -> None:
    run_ranks(_died, 2, name)

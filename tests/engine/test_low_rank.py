"""lowrank: matrices travel as products of thin factors, with error feedback. PyTorch's PowerSGD hook is the oracle."""

from __future__ import annotations

import copy
import math
import resource
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import _C, Compression
from tests.engine.entry_points import AVERAGING, Averaged, average
from tests.models import (
    SMALL_BUCKETS,
    Fails,
    Given,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    backward_of,
    batch,
    given_ddp,
    grads_of,
    random_grads,
    train_step,
)
from tests.ranks import on_ranks
from tests.reference import low_rank_mean
from tests.refused import refused

RANK = 2
SHAPES = [(40, 24), (50,), (40, 24), (16, 6, 5), (3, 2), ()]
"""Matrices of which two are alike, one has three dimensions, and one is so small that it travels as it is."""
MATRICES = (0, 2, 3)
ENTRY_POINTS = [each for each in AVERAGING if each != "drop-in hook"]
ONE_BUCKET = 25


def everyones(step: int, world_size: int, shapes: Sequence[Sequence[int]] = SHAPES) -> list[list[Tensor]]:
    """The gradients of each rank."""
    return [random_grads(rank, step, shapes, torch.float32) for rank in range(world_size)]


def residuals_of(given: Averaged, rank: int) -> dict[int, Tensor]:
    """This rank's residuals of a ``Given`` model, by the index of the gradient."""
    kept = given.handle.state_dict()["residuals"]
    names = {f"weights.{index} of rank {rank}": index for index in range(len(SHAPES))}
    return {names[name]: residual for name, residual in kept.items()}


def unit(rows: int, columns: int, rank: int, dtype: torch.dtype = torch.float32) -> float:
    """What rounding does to the factors, beside the norm of the largest matrix that a rank sends.

    A sum of n products is off by sqrt(n) eps (Higham and Mary 2019), and so is each column of Householder's QR.
    """
    return torch.finfo(dtype).eps * rank * (math.sqrt(rows) + math.sqrt(columns))


class Reference:
    """What lowrank has to give, in float64, on all ranks at once.

    How far the engine may be off follows from the sizes and from the conditioning of each QR, with what earlier steps
    leave: five more references take matrices that are off by ``unit``, and twice the largest difference is allowed.
    """

    def __init__(
        self, world_size: int, shapes: Sequence[Sequence[int]] = SHAPES, rank: int = RANK, *, seed: int | None = None
    ) -> None:
        self.residuals = [[torch.zeros(shape, dtype=torch.float64) for shape in shapes] for _ in range(world_size)]
        first = [_C.first_factor(torch.zeros(shape), rank) for shape in shapes]
        self.factors = [None if factor is None else factor.double() for factor in first]
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.rounded = [] if seed is not None else [Reference(world_size, shapes, rank, seed=each) for each in range(5)]
        self.allowed: list[float] = []
        """How far each mean may be off, as the norm of the difference."""

    def step(self, of_ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        means, self.allowed = [], []
        rounded = [each.step(of_ranks) for each in self.rounded]
        for index, factor in enumerate(self.factors):
            sent = [kept[index] + grads[index].double() for kept, grads in zip(self.residuals, of_ranks, strict=True)]
            if factor is None:
                means.append(torch.stack(sent).mean(0))
                largest = max(float(each.norm()) for each in sent)
                self.allowed.append(torch.finfo(torch.float32).eps * len(sent) * largest)
                continue
            matrices = [self._rounded(each.flatten(1), factor.shape[1]) for each in sent]
            mean, self.factors[index] = low_rank_mean(matrices, factor)
            means.append(mean.view_as(sent[0]))
            self.allowed.append(_twice_the_largest([others[index] - means[-1] for others in rounded]))
            for kept, each in zip(self.residuals, sent, strict=True):
                kept[index] = each - means[-1]
        return means

    def _rounded(self, matrix: Tensor, rank: int) -> Tensor:
        if self.generator is None:
            return matrix
        noise = torch.randn(matrix.shape, generator=self.generator, dtype=torch.float64)
        return matrix + noise * (unit(*matrix.shape, rank) * matrix.norm() / noise.norm())

    def allowed_residual(self, rank: int, index: int) -> float:
        kept = self.residuals[rank][index]
        return _twice_the_largest([each.residuals[rank][index] - kept for each in self.rounded])


def _twice_the_largest(differences: Sequence[Tensor]) -> float:
    return 2 * max((float(each.norm()) for each in differences), default=0.0)


def allowed(
    means: Sequence[Tensor], rank: int = RANK, dtype: torch.dtype = torch.float32, *, sent: float | None = None
) -> float:
    """How far the last mean may be off, as the norm of the difference: all ``means`` are exact, of low rank.

    With M = U S V^T and the QR of M Q + E, the left factor spans U up to E (V^T Q)^+. So E counts with the inverse of
    the least singular value of V^T Q. Of a later Q only V of the step before is sure. What a mean is off stays for the
    steps after it.

    Args:
        sent: the norm of the largest matrix that a rank sends. By default a rank sends at most twice each mean so far.
    """
    factor, growth = _C.first_factor(torch.empty(means[0].shape), rank), 0.0
    assert factor is not None
    for mean in means:
        _, values, right = torch.linalg.svd(mean.double(), full_matrices=False)
        right = right[values > 1e-5 * values[0]]
        growth += 1.0 + 1.0 / float(torch.linalg.svdvals(right @ torch.linalg.qr(factor.double()).Q)[-1])
        factor = right.T
    largest = 2 * sum(float(mean.norm()) for mean in means) if sent is None else sent
    return unit(*means[0].shape, rank, dtype) * largest * growth


def assert_off_by(found: Tensor | None, right: Tensor, limit: float) -> None:
    assert found is not None
    off = float((found.double() - right.double()).norm())
    assert off <= limit, f"off by {off:.1e}, allowed are {limit:.1e}"


# ---- what arrives ---------------------------------------------------------------------------------------------------


@on_ranks(3, cases={"shared_memory": [True, False], "entry_point": ENTRY_POINTS})
def test_means_are_those_of_the_reference(rank: int, world_size: int, entry_point: str) -> None:
    for cap, reduce in ((SMALL_BUCKETS, "fp32"), (ONE_BUCKET, "wire")):
        given = average(
            entry_point, Given(everyones(0, 1)[0]), Compression("lowrank", reduce, rank=RANK), bucket_cap_mb=cap
        )
        reference = Reference(world_size)
        for step in range(3):
            of_ranks = everyones(step, world_size)
            means, expected = given.step(of_ranks[rank]), reference.step(of_ranks)
            for mean, right, limit in zip(means, expected, reference.allowed, strict=True):
                assert_off_by(mean, right, limit)
            assert_same_on_all_ranks([mean for mean in means if mean is not None])
            norm = math.sqrt(sum(float(mean.double().square().sum()) for mean in means if mean is not None))
            assert given.grad_norm().item() == pytest.approx(norm, rel=1e-6)
        if entry_point != "all_reduce":
            kept = residuals_of(given, rank)
            assert kept.keys() == set(MATRICES), "what travels as it is leaves nothing"
            for index in MATRICES:
                expected_residual = reference.residuals[rank][index].flatten()
                assert_off_by(kept[index], expected_residual, reference.allowed_residual(rank, index))


KEPT = list[dist.ProcessGroup | None]()


def power_sgd(rank: int, grads: Sequence[Tensor]) -> DistributedDataParallel:
    """A model with PyTorch's hook, which begins in its third step, and with the factors that fastsync begins with."""
    # The hook's callbacks hold the group, and end on one of Gloo's threads, which a group joins when it is destroyed.
    KEPT.append(dist.group.WORLD)
    ddp = given_ddp(grads)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1)

    def hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if state.iter == 2:
            matrices: dict[torch.Size, list[Tensor]] = {}  # the hook takes them by shape
            for gradient in bucket.gradients():
                matrix = gradient.view(gradient.shape[0], -1) if gradient.dim() > 0 else gradient.view(1, 1)
                if _C.first_factor(matrix, rank) is not None:
                    matrices.setdefault(matrix.shape, []).append(matrix)
            every = [matrix for alike in matrices.values() for matrix in alike]
            factors = [_C.first_factor(matrix, rank) for matrix in every]
            state.q_memory_dict[0] = torch.cat([factor.flatten() for factor in factors if factor is not None])
            state.p_memory_dict[0] = torch.empty(sum(rank * len(matrix) for matrix in every))
        return powerSGD_hook(state, bucket)

    # DDP compares types, and not their names.
    hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    ddp.register_comm_hook(state, hook)
    for _ in range(2):
        backward_of(ddp, [torch.zeros_like(grad) for grad in grads])
    return ddp


@on_ranks(3, cases={"entry_point": ["attach", "hook"]})
def test_it_agrees_with_the_hook_of_pytorch(rank: int, world_size: int, entry_point: str) -> None:
    shapes = SHAPES[:-1]  # PyTorch's hook takes no scalar
    for factor_rank in (1, 4):
        grads = random_grads(rank, 0, shapes, torch.float32)
        oracle = power_sgd(factor_rank, grads)
        given = average(entry_point, Given(grads), Compression("lowrank", rank=factor_rank), bucket_cap_mb=ONE_BUCKET)
        reference = Reference(world_size, shapes, factor_rank)
        for step in range(6):
            of_ranks = everyones(step, world_size, shapes)
            reference.step(of_ranks)
            ours, theirs = given.step(of_ranks[rank]), backward_of(oracle, of_ranks[rank])
            for mine, right, limit in zip(ours, theirs, reference.allowed, strict=True):
                assert_off_by(mine, right, 2 * limit)  # both are off


@on_ranks(2, cases={"dtype": [torch.float32, torch.float64, torch.float16, torch.bfloat16]})
def test_gradients_of_any_dtype_and_any_order_in_memory(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Each becomes the mean, where that is of low rank. Factors are float32, or float64."""
    generator = torch.Generator().manual_seed(rank)
    conv = torch.randn(32, 1, 1, 1, generator=generator) * torch.ones(1, 8, 3, 3)
    linear = torch.ones(30, 1) * torch.randn(1, 40, generator=generator)
    grads = [conv.to(dtype).to(memory_format=torch.channels_last), linear.to(dtype).t(), linear.to(dtype)[None]]
    sync = fastsync.attach(model := Given(grads), "lowrank:1")
    model(grads).backward()
    for index, grad in enumerate(grads):
        everyone = [torch.empty_like(grad.contiguous()) for _ in range(2)]
        dist.all_gather(everyone, grad.contiguous())
        mean = torch.stack(everyone).double().mean(0)
        # As it lies in memory, but for the order of columns that are equal.
        matrix = mean[0] if index == 2 else mean.t() if index == 1 else mean.flatten(1)
        sent = max(float(each.double().norm()) for each in everyone)
        limit = allowed([matrix], 1, dtype if dtype == torch.float64 else torch.float32, sent=sent)
        # What is added in float32 is then rounded to the gradient's type.
        assert_off_by(model.weights[index].grad, mean, limit + torch.finfo(dtype).eps / 2 * float(mean.norm()))
    factors = sync.state_dict()["factors"]
    assert {factor.dtype for factor in factors.values()} == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert {name: tuple(factor.shape) for name, factor in factors.items()} == {
        "weights.0": (72, 1),
        "weights.1": (40, 1),
        "weights.2": (40, 1),
    }


@on_ranks(2)
def test_values_that_16_bits_do_not_hold(rank: int, world_size: int) -> None:
    results = []
    reference = Reference(world_size, [(40, 24)])
    for step in range(3):
        reference.step(everyones(step, world_size, [(40, 24)]))
    for exponent in (0, 100, -100):
        sync = fastsync.attach(model := Given([torch.zeros(40, 24)]), "lowrank:2")
        for step in range(3):
            (grad,) = random_grads(rank, step, [(40, 24)], torch.float32)
            model.zero_grad()
            model([torch.ldexp(grad, torch.tensor(exponent))]).backward()
        (averaged,) = grads_of(model)
        results.append(torch.ldexp(averaged.double(), torch.tensor(-exponent)))
        assert sync.grad_stats().num_saturated == sync.grad_stats().num_nonfinite == 0
    for result in results[1:]:
        assert_off_by(result, results[0], 2 * reference.allowed[0])  # both are off


@on_ranks(2, cases={"value": [math.inf, math.nan], "entry_point": ["attach", "hook"]})
def test_what_is_not_finite_arrives_on_all_ranks_and_not_in_the_next_step(
    rank: int, world_size: int, entry_point: str, value: float
) -> None:
    given, shapes = average(entry_point, Given([torch.zeros(40, 24)]), "lowrank:2"), [(40, 24)]
    given.step(random_grads(rank, 0, shapes, torch.float32))
    (broken,) = random_grads(rank, 1, shapes, torch.float32)
    if rank == 1:
        broken[3, 4] = value
    before = given.handle.state_dict()
    (mean,) = given.step([broken])
    after = given.handle.state_dict()
    for part, name in (("residuals", f"weights.0 of rank {rank}"), ("factors", "weights.0")):
        assert_all_bitwise_equal([after[part][name]], [before[part][name]], part)
    assert mean is not None
    assert not mean.isfinite().all()
    assert given.handle.grad_stats().num_nonfinite > 0
    for step in range(2, 5):
        (mean,) = given.step(random_grads(rank, step, shapes, torch.float32))
        assert mean is not None
        assert mean.isfinite().all()
        assert mean.any()
        assert_same_on_all_ranks([mean])


@on_ranks(2, timeout=60.0)
def test_a_rank_whose_backward_fails_can_abandon_the_step(rank: int, world_size: int) -> None:
    """The others get nan, and residuals and factors stay what they were."""
    shapes = [(40, 24), (40, 24)]
    sync = fastsync.attach(model := Given([torch.zeros(shape) for shape in shapes]), "lowrank:2", bucket_cap_mb=0.001)
    for step in range(5):
        model.zero_grad()
        grads = random_grads(rank, step, shapes, torch.float32)
        if step == 3 and rank == 1:
            fails = Fails.apply(model.weights[0] * grads[0]).sum()
            loss = fails + (model.weights[1] * grads[1]).sum()  # whose gradient is ready first
            with pytest.raises(ArithmeticError):
                loss.backward()
            sync.abandon_step()
        else:
            model(grads).backward()
            assert all(grad.isfinite().all() for grad in grads_of(model)) == (step != 3)
        dist.barrier()
    assert_same_on_all_ranks([*grads_of(model), *sync.state_dict()["factors"].values()])


@on_ranks(2, cases={"entry_point": ["attach", "hook"]})
def test_a_gradient_of_zeros_keeps_the_factor(rank: int, world_size: int, entry_point: str) -> None:
    given, shapes = average(entry_point, Given([torch.zeros(40, 24)]), "lowrank:2"), [(40, 24)]
    before = given.handle.state_dict()["factors"]["weights.0"]
    (mean,) = given.step([torch.zeros(40, 24) if rank == 0 else -torch.zeros(40, 24)])
    assert mean is not None
    assert not mean.any()
    assert torch.equal(given.handle.state_dict()["factors"]["weights.0"], before)
    (mean,) = given.step(random_grads(rank, 0, shapes, torch.float32))
    assert mean is not None
    assert mean.any()


@on_ranks(1)
def test_a_step_needs_no_new_memory(rank: int, world_size: int) -> None:
    """The C library gives memory of this size back to the kernel, which would have to clear it in each step."""
    weight = nn.Parameter(torch.zeros(3000, 3000))
    sync = fastsync.attach([weight], "lowrank", overlap=False)
    weight.grad = torch.ones(3000, 3000)
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        sync.synchronize()
        num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert num_faults * resource.getpagesize() < weight.nbytes / 4


# ---- beside other things --------------------------------------------------------------------------------------------


def exact(rank: int, step: int) -> Tensor:
    """Rank 1 at most on all ranks together, so that means of any weights are exact."""
    generator = torch.Generator().manual_seed(step)
    left, right = torch.randn(40, 1, generator=generator), torch.randn(1, 24, generator=generator)
    return (1.0 + rank) * left @ right


@on_ranks(2)
def test_weights(rank: int, world_size: int) -> None:
    """A weight of 0 makes even nan count for nothing."""
    sync = fastsync.attach(model := Given([torch.zeros(40, 24)]), "lowrank:2")
    means: list[Tensor] = []
    for step, weights in enumerate(((1.0, 3.0), (2.0, 0.0))):
        sync.set_weight(weights[rank])
        model.zero_grad()
        is_nan = weights[rank] == 0
        model([torch.full((40, 24), math.nan) if is_nan else exact(rank, step)]).backward()
        means.append(sum(w * (1.0 + each) for each, w in enumerate(weights)) / sum(weights) * exact(0, step))
        assert_off_by(grads_of(model)[0], means[-1], allowed(means))


@on_ranks(2)
def test_sums(rank: int, world_size: int) -> None:
    sync = fastsync.attach(model := Given([torch.zeros(40, 24), torch.zeros(7)]), "lowrank:2", op="sum")
    total = torch.zeros(40, 24)
    for step in range(3):
        model.zero_grad()
        own, vector = random_grads(rank, step, [(40, 24), (7,)], torch.float32)
        model([own, vector]).backward()
        matrix, sum_ = grads_of(model)
        dist.all_reduce(vector)
        torch.testing.assert_close(sum_, vector)
        dist.all_reduce(own)
        total += own - matrix
    residual = sync.state_dict()["residuals"][f"weights.0 of rank {rank}"].view(40, 24)
    dist.all_reduce(residual)
    torch.testing.assert_close(total, residual, rtol=0, atol=1e-4)


@on_ranks(2, cases={"entry_point": ["attach", "synchronize", "all_reduce"]})
def test_unused_and_frozen_parameters(rank: int, world_size: int, entry_point: str) -> None:
    model = Given([torch.zeros(40, 24) for _ in range(4)])
    model.weights[3].requires_grad_(False)
    given = average(entry_point, model, "lowrank:2")
    first = given.step([exact(rank, 0), exact(rank, 1) if rank == 1 else None, None, None])
    assert first[2] is None
    assert first[3] is None
    for found, expected in zip(first, (1.5 * exact(0, 0), exact(0, 1)), strict=False):
        assert_off_by(found, expected, allowed([expected]))
    model.weights[3].requires_grad_(True)
    again = given.step([exact(rank, 2), None, exact(rank, 3), exact(rank, 4)])
    assert again[1] is None
    for index, steps in ((0, (0, 2)), (2, (3,)), (3, (4,))):
        means = [1.5 * exact(0, step) for step in steps]
        assert_off_by(again[index], means[-1], allowed(means))


@on_ranks(2)
def test_two_models_in_one_backward(rank: int, world_size: int) -> None:
    """The second sums of one engine come after the first sums of both."""
    models = [Given([torch.zeros(40, 24)]) for _ in range(2)]
    for model, compression in zip(models, ("lowrank:2", Compression("lowrank", rank=2, reduce="wire")), strict=True):
        fastsync.attach(model, compression)
    for step in range(3):
        losses = [model([exact(rank, 10 * number + step)]) for number, model in enumerate(models)]
        for model in models:
            model.zero_grad()
        (losses[rank] + losses[1 - rank]).backward()
        for number, model in enumerate(models):
            means = [1.5 * exact(0, 10 * number + each) for each in range(step + 1)]
            assert_off_by(grads_of(model)[0], means[-1], allowed(means))


@on_ranks(2)
def test_it_may_be_set_between_steps(rank: int, world_size: int) -> None:
    """Another compression's residuals are sent with the first factors, and those of vectors at once."""
    sync = fastsync.attach(model := Given([torch.zeros(40, 24), torch.zeros(300)]), "int8+ef")
    total = [torch.zeros(40, 24), torch.zeros(300)]
    for step, compression in enumerate(("int8+ef", "lowrank:2", "lowrank:5", "int8+ef", "lowrank", "none")):
        sync.compression = compression
        kept = sync.state_dict()["residuals"] if compression == "none" else {}
        model.zero_grad()
        grads = random_grads(rank, step, [(40, 24), (300,)], torch.float32)
        model(grads).backward()
        for index, sum_ in enumerate(total):
            sum_ += grads[index] - grads_of(model)[index]
            if f"weights.{index} of rank {rank}" in kept:
                sum_ -= kept[f"weights.{index} of rank {rank}"].view_as(sum_)
    for sum_ in total:
        dist.all_reduce(sum_)
        torch.testing.assert_close(sum_, torch.zeros_like(sum_), rtol=0, atol=1e-4)
    assert "factors" not in sync.state_dict()


@on_ranks(2)
def test_factors_are_what_travels(rank: int, world_size: int) -> None:
    for compression in ("lowrank:3", Compression("lowrank", rank=3, reduce="wire")):
        sync = fastsync.attach(model := Given([torch.zeros(128, 96), torch.zeros(50)]), compression)
        for step in range(3):
            model(random_grads(rank, step, [(128, 96), (50,)], torch.float32)).backward()
        stats = sync.stats()
        assert stats.num_steps == 3
        assert stats.numel == 128 * 96 + 50
        assert 1 <= stats.wire_bytes / (3 * 4 * (3 * (128 + 96) + 50)) < 1.05
        assert stats.exposed_time > 0
        assert "lowrank of rank 3, error feedback" in sync.explain()
        sync.detach()


# ---- state ----------------------------------------------------------------------------------------------------------


def _train(rank: int, given: Averaged, steps: range) -> list[list[Tensor]]:
    optimizer = torch.optim.Adam(given.model.parameters(), lr=0.01)
    grads = []
    for step in steps:
        train_step(given.model, optimizer, batch(rank, step))  # type: ignore[arg-type]  # of an attached one, too
        grads.append([grad.clone() for grad in grads_of(given.model)])
    return grads


@on_ranks(3, cases={"entry_point": ["attach", "hook"]})
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(rank: int, world_size: int, entry_point: str) -> None:
    """DDP regroups its buckets after its first backward, so a resumed run has its first step in other buckets."""
    torch.manual_seed(0)
    given, resumed = (average(entry_point, Mlp(), "lowrank:2") for _ in range(2))
    _train(rank, given, range(3))
    resumed.model.load_state_dict(given.model.state_dict())
    resumed.handle.load_state_dict(copy.deepcopy(given.handle.state_dict()))
    expected = _train(rank, given, range(3, 6))
    for step, grads in enumerate(_train(rank, resumed, range(3, 6))):
        assert_all_bitwise_equal(grads, expected[step], f"step {step}, gradient")


@on_ranks(2)
def test_factors_that_differ_are_refused(rank: int, world_size: int) -> None:
    sync = fastsync.attach(model := Given([torch.zeros(40, 24)]), "lowrank:2")
    model([exact(rank, 0)]).backward()
    state = copy.deepcopy(sync.state_dict())
    state["factors"]["weights.0"][0, 0] += rank
    sync.load_state_dict(state)
    refused(lambda: model([exact(rank, 1)]).backward(), "rank 1: saved scales of 0 parameters and")


@on_ranks(2)
def test_ranks_that_may_not_make_the_same_factors_are_told(rank: int, world_size: int) -> None:
    torch.set_num_threads(1 + rank)
    refused(lambda: average("attach", Given(everyones(0, world_size)[rank]), "lowrank"), "; rank 1: lowrank by")


@on_ranks(3)
def test_a_new_rank_takes_over_the_factors(rank: int, world_size: int) -> None:
    """Two ranks train. Then a third one comes."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = Given([torch.zeros(40, 24)])
    sync = fastsync.attach(model, "lowrank:2", process_group=groups[rank == 2])
    for step in range(3 if rank < 2 else 0):
        model.zero_grad()
        model(random_grads(rank, step, [(40, 24)], torch.float32)).backward()
    sync.use_group(dist.group.WORLD)
    for step in range(3, 6):
        model.zero_grad()
        model(random_grads(rank, step, [(40, 24)], torch.float32)).backward()
        assert_same_on_all_ranks([*grads_of(model), sync.state_dict()["factors"]["weights.0"]])


@on_ranks(2, cases={"shared_memory": [True, False]})
def test_piggybacked_values_outlive_the_second_sum(rank: int, world_size: int) -> None:
    """The factor of many columns is longer than all that the first sum has sent."""
    model = Given([torch.zeros(8, 400)])
    sync = fastsync.attach(model, "lowrank:2")
    for step in range(2):
        sync.piggyback("value", torch.tensor([float(rank), 4.0 + step]))
        model(random_grads(rank, step, [(8, 400)], torch.float32)).backward()
        assert sync.piggybacked()["value"].tolist() == [0.5, 4.0 + step]


@on_ranks(2)
def test_ranks_that_meet_with_other_parameters_are_told(rank: int, world_size: int) -> None:
    """The first has a matrix whose factor the other one does not know."""
    alone = [dist.new_group([each]) for each in range(2)]
    shapes = [(40, 24), (30, 20)][: 2 - rank]
    model = Given([torch.zeros(shape) for shape in shapes])
    sync = fastsync.attach(model, "lowrank:2", process_group=alone[rank])
    model(random_grads(rank, 0, shapes, torch.float32)).backward()
    sync.use_group(dist.group.WORLD, init_sync=False)
    with pytest.raises(ValueError, match=r"rank 1: .*rank 0: |rank 0: .*rank 1: "):
        model(random_grads(rank, 1, shapes, torch.float32)).backward()


# ---- what is refused ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_where_matrices_are_not_whole_it_is_refused(rank: int, world_size: int) -> None:
    sharded = fully_shard(Mlp(), mesh=init_device_mesh("cpu", (2,)))
    refused(lambda: fastsync.register_fsdp(sharded, gradients="lowrank"), "gradients:")
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    needs = r"^compression: 'lowrank' needs whole matrices, .*Leave shard_optimizer out"
    sync = fastsync.attach(model, "lowrank")
    with pytest.raises(ValueError, match=needs):
        fastsync.shard_optimizer(sync, optimizer)
    sync.compression = "none"
    fastsync.shard_optimizer(sync, optimizer)
    with pytest.raises(ValueError, match=needs):
        sync.compression = "lowrank:2"
    with pytest.raises(ValueError, match=r"'lowrank' cannot carry parameter weights\.0, which is torch\.complex64"):
        fastsync.attach(Given([torch.zeros(40, 24, dtype=torch.complex64)]), "lowrank")

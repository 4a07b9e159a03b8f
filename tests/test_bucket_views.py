"""``attach(gradient_as_bucket_view=True)``: gradients that stay in shared memory are those of an engine that copies."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync import Compression
from tests.models import SMALL_BUCKETS, Fails, Given, assert_all_bitwise_equal, assert_same_on_all_ranks
from tests.ranks import RankError, run_ranks


def lies_in_shared_memory(tensor: Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "memfd:" in line
    return False


def parameter_like(chance: random.Random) -> nn.Parameter:
    rows, columns = chance.choice([(1, 1), (3, 5), (17, 300), (400, 513)])
    return nn.Parameter(
        chance.choice(
            [
                lambda: torch.zeros(rows * columns),
                lambda: torch.zeros(columns, rows).t(),
                lambda: torch.zeros(2, rows, 3, columns).to(memory_format=torch.channels_last),
                lambda: torch.zeros(rows, 2 * columns)[:, ::2],  # with gaps between its elements
                lambda: torch.zeros(0, columns),
            ]
        )()
    )


def gradient_for(parameter: Tensor, chance: random.Random, generator: torch.Generator) -> Tensor | None:
    """What a backward or a user may leave there: nothing, of the parameter's strides, or of others."""
    if chance.random() < 0.2:
        return None
    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
    return values if chance.random() < 0.2 else torch.empty_like(parameter).copy_(values).detach()


def set_gradient(parameter: Tensor, gradient: Tensor | None, in_place: bool) -> None:
    if in_place and parameter.grad is not None and gradient is not None:
        parameter.grad.copy_(gradient)
    else:
        parameter.grad = None if gradient is None else gradient.clone()


def _as_the_engine_that_copies(rank: int, world_size: int, dtype: torch.dtype) -> None:
    of_all, own = random.Random(world_size), random.Random(100 * world_size + rank)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        pairs = [parameter_like(of_all) for _ in range(of_all.randrange(1, 6))] + [nn.Parameter(torch.zeros(3))]
        parameters = [nn.Parameter(parameter.detach().to(dtype)) for parameter in pairs]
        twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        options: dict[str, Any] = {"overlap": False, "bucket_cap_mb": of_all.choice([SMALL_BUCKETS, 25])}
        views = fastsync.attach(parameters, gradient_as_bucket_view=True, **options)
        copies = fastsync.attach(twins, **options)
        for step in range(5):
            for parameter, twin in zip(parameters, twins, strict=True):
                gradient = gradient_for(parameter, own, generator)
                set_gradient(parameter, gradient, in_place=own.random() < 0.5)
                set_gradient(twin, gradient, in_place=False)
            rider = torch.randn(1 + 500 * step, generator=generator)
            for sync in (views, copies):
                sync.ride(f"rider {step}", rider)
                sync.synchronize()
            for parameter, twin in zip(parameters, twins, strict=True):
                assert (parameter.grad is None) == (twin.grad is None)
            present = [(p.grad, t.grad) for p, t in zip(parameters, twins, strict=True) if t.grad is not None]
            assert_all_bitwise_equal([view for view, _ in present], [copy for _, copy in present], f"step {step}")
            assert all(view.numel() == 0 or lies_in_shared_memory(view) for view, _ in present)
            assert torch.equal(views.riders[f"rider {step}"], copies.riders[f"rider {step}"])
            torch.testing.assert_close(views.grad_stats.grad_norm, copies.grad_stats.grad_norm, rtol=1e-6, atol=0)
            assert_same_on_all_ranks([views.grad_stats.grad_norm, *(view for view, _ in present if view.numel())])
        assert views.stats().transport == "shared memory, gradients in place"


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (2, torch.float32),
        (3, torch.float32),
        (4, torch.float32),
        (5, torch.float32),
        (2, torch.bfloat16),
        (3, torch.float64),
        (2, torch.complex64),
    ],
)
def test_gradients_are_those_of_an_engine_that_copies(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(_as_the_engine_that_copies, world_size, dtype)


def model_of(rank: int, **options: Any) -> tuple[nn.Module, fastsync.GradientSynchronizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 40))
    return model, fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS, **options)


def backward(model: nn.Module, rank: int, step: int) -> None:
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))
    model(inputs).square().mean().backward()


def _a_whole_training(rank: int, world_size: int) -> None:
    results = []
    for views in (False, True):
        model, sync = model_of(rank, gradient_as_bucket_view=views)
        optimizer = torch.optim.Adam(model.parameters())
        addresses = []
        for step in range(8):
            optimizer.zero_grad(set_to_none=step % 3 == 1)
            if step % 2:
                with sync.no_sync():
                    backward(model, rank, 100 + step)
            backward(model, rank, step)
            norm = fastsync.clip_grad_norm_(sync, 0.1)
            optimizer.step()
            addresses.append([parameter.grad.data_ptr() for parameter in model.parameters()])
        assert not views or all(address == addresses[0] for address in addresses)
        assert all(lies_in_shared_memory(parameter.grad) == views for parameter in model.parameters())
        results.append([*(parameter.detach() for parameter in model.parameters()), norm])
    copied, in_place = results
    for one, other in zip(copied, in_place, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # the norm's last bits may differ
    assert_same_on_all_ranks(in_place)


def test_a_training_goes_the_same_way() -> None:
    run_ranks(_a_whole_training, 3)


def _copies_nothing(rank: int, world_size: int) -> None:
    model, sync = model_of(rank, gradient_as_bucket_view=True)
    backward(model, rank, 0)
    kept = [parameter.grad for parameter in model.parameters()]
    for step in range(1, 4):
        model.zero_grad(set_to_none=False)
        before = [gradient.data_ptr() for gradient in kept]
        backward(model, rank, step)
        assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), kept, strict=True))
        assert [gradient.data_ptr() for gradient in kept] == before
    sync.detach()
    model.zero_grad(set_to_none=False)
    backward(model, rank, 9)  # the memory is there as long as a gradient is
    assert all(bool(gradient.isfinite().all()) for gradient in kept)


def test_gradients_that_are_kept_stay_where_they_are() -> None:
    run_ranks(_copies_nothing, 2)


def _no_sum_where_nobody_has_a_new_gradient(rank: int, world_size: int) -> None:
    parameters = [nn.Parameter(torch.zeros(1_000)) for _ in range(2)]
    fastsync.attach(parameters, gradient_as_bucket_view=True)
    (parameters[0] * torch.full((1_000,), 0.1 * (rank + 1)) + parameters[1] * float(rank)).sum().backward()
    first = parameters[0].grad.clone()
    for _ in range(3):  # three thirds of a value need not be the value
        parameters[1].grad.zero_()
        (parameters[1] * float(rank)).sum().backward()
        assert torch.equal(parameters[0].grad, first)
        assert torch.equal(parameters[1].grad, torch.ones(1_000))
    if rank == 1:
        (parameters[0] * 0.3 + parameters[1]).sum().backward()
    else:
        parameters[1].sum().backward()
    expected = torch.zeros(1_000)
    for peer in range(world_size):
        expected += (first + 0.3 if peer == 1 else first) * torch.tensor(1 / 3)
    assert torch.equal(parameters[0].grad, expected)
    assert lies_in_shared_memory(parameters[0].grad)


def test_a_gradient_that_nobody_has_anew_stays_what_it_is() -> None:
    run_ranks(_no_sum_where_nobody_has_a_new_gradient, 3)


def _settings_change(rank: int, world_size: int) -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (70_000, 3, 50)]
    sync = fastsync.attach(parameters, overlap=False, gradient_as_bucket_view=True)
    schedule = [
        "none",
        Compression("int8", error_feedback=True),
        Compression("none", reduce="fp32", algorithm="one_shot"),
        "bf16",
        Compression("none", reduce="fp32", algorithm="two_shot"),
        Compression("none", ranks_per_node=2),
    ]
    for step, compression in enumerate([*schedule, *reversed(schedule)]):
        sync.compression = compression
        frozen = parameters[step % 3]
        for parameter in parameters:
            parameter.requires_grad_(parameter is not frozen)
            parameter.grad = None if parameter is frozen else torch.full_like(parameter, float(rank + 1))
        for again in range(2):
            sync.synchronize()
            for parameter in parameters:
                assert parameter is frozen or torch.equal(parameter.grad, torch.full_like(parameter, 2.5)), (
                    step,
                    again,
                )


def test_compression_and_layout_may_change() -> None:
    run_ranks(_settings_change, 4)


# ---- gradients that somebody has moved -----------------------------------------------------------------------------


def _lie_otherwise(rank: int, world_size: int) -> None:
    square = nn.Parameter(torch.zeros(30, 30))
    images = nn.Parameter(torch.zeros(3, 4, 5, 6))
    waves = nn.Parameter(torch.zeros(40, dtype=torch.complex64))
    twins = [nn.Parameter(torch.zeros(500)) for _ in range(2)]
    parameters = [square, images, waves, *twins]
    sync = fastsync.attach(parameters, overlap=False, bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=True)
    generator = torch.Generator().manual_seed(rank)

    def new_gradients() -> None:
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

    def change_strides_of_gradients() -> None:
        square.grad = square.grad.t()
        waves.grad = waves.grad.conj()

    def change_strides_of_parameters() -> None:
        square.data = square.data.t().contiguous().t()
        images.data = images.data.to(memory_format=torch.channels_last)

    def swap() -> None:
        twins[0].grad, twins[1].grad = twins[1].grad, twins[0].grad

    def tie() -> None:
        twins[0].grad = twins[1].grad

    for change in (lambda: None, change_strides_of_gradients, change_strides_of_parameters, swap, tie):
        for has_new_gradients_after in (True, False):
            new_gradients()
            sync.synchronize()
            for parameter in parameters:
                parameter.grad.mul_(rank + 1)
            change()
            if has_new_gradients_after:
                new_gradients()
            expected = []
            for parameter in parameters:
                total = parameter.grad.clone()
                dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
                expected.append(total / 2)
            sync.synchronize()
            gradients = [parameter.grad.clone() for parameter in parameters]
            assert_all_bitwise_equal(gradients, expected, f"{change}, {has_new_gradients_after}")
            assert all(lies_in_shared_memory(parameter.grad) for parameter in parameters)


def test_gradients_may_be_restrided_conjugated_and_swapped() -> None:
    run_ranks(_lie_otherwise, 2)


def _are_aligned(rank: int, world_size: int) -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.complex128)) for size in (64, 3)]
    fastsync.attach(parameters, gradient_as_bucket_view=True)
    sum((parameter.abs() + 1).sum() for parameter in parameters).backward()
    assert parameters[0].grad.data_ptr() % 64 == 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rows_begin_on_cache_lines(world_size: int) -> None:
    run_ranks(_are_aligned, world_size)


def _knows_that_it_was_changed(rank: int, world_size: int) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    fastsync.attach([weight], gradient_as_bucket_view=True)
    (weight * (rank + 1.0)).sum().backward()
    other = nn.Parameter(torch.ones(2))
    product = (other * weight.grad).sum()  # keeps the gradient for its backward
    weight.grad = None
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_graph_that_has_kept_a_gradient_is_told_of_the_next_one() -> None:
    run_ranks(_knows_that_it_was_changed, 2)


# ---- at any pace, and failures --------------------------------------------------------------------------------------


def _many_steps(rank: int, world_size: int, sizes: list[int], num_steps: int) -> None:
    chance = random.Random(rank)
    model = Given([torch.zeros(size) for size in sizes])
    fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=True)
    for step in range(num_steps):
        value = float((rank + 1) * (step % 7 + 1))
        model.zero_grad(set_to_none=chance.random() < 0.1)
        if chance.random() < 0.05:
            time.sleep(chance.random() * 2e-3)
        model([torch.full_like(weight, value) for weight in model.weights]).backward()
        mean = (step % 7 + 1) * (world_size + 1) / 2
        for weight in model.weights:
            assert torch.equal(weight.grad, torch.full_like(weight, mean)), step


@pytest.mark.parametrize(
    ("world_size", "sizes", "num_steps"), [(2, [3, 5_000, 400], 1_500), (3, [300_000, 300_000], 200), (5, [700], 300)]
)
def test_no_value_is_read_too_early_or_written_too_soon(world_size: int, sizes: list[int], num_steps: int) -> None:
    run_ranks(_many_steps, world_size, sizes, num_steps)


class Late(torch.autograd.Function):
    """Its input, and in backward some time before anything else."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.01)
        return grad


def _backward_fails(rank: int, world_size: int) -> None:
    model = Given([torch.zeros(300)] * 3)
    fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=True)
    for step in range(61):  # the last one fails nowhere: a rank that ends is missed by those that it owes a part
        failing = {(step // 2) % world_size} if step % 2 else set()
        model.zero_grad(set_to_none=step == 0)
        gradient = torch.full((300,), float(step % 5 + rank))
        begin = Late.apply if failing and rank not in failing else torch.clone
        weights = [
            Fails.apply(weight) if rank in failing and index == 0 else weight
            for index, weight in enumerate(model.weights)
        ]
        loss = begin(torch.stack([(weight * gradient).sum() for weight in weights]).sum())
        if rank in failing:
            with pytest.raises(ArithmeticError, match="as told"):
                loss.backward()
            unsent = model.weights[0].grad
            assert unsent is None or torch.equal(unsent, torch.zeros(300))
        else:
            loss.backward()
            grads = [weight.grad for weight in model.weights]
            if failing:
                assert any(bool(grad.isnan().all()) for grad in grads)
            else:
                mean = step % 5 + (world_size - 1) / 2
                assert [grad.unique().tolist() for grad in grads] == [[mean]] * 3, step


def test_ranks_whose_backward_fails_keep_in_step() -> None:
    run_ranks(_backward_fails, 3)


def _fails_after_its_only_bucket(rank: int, world_size: int) -> None:
    weight = nn.Parameter(torch.zeros(1_000))
    fastsync.attach([weight], gradient_as_bucket_view=True)
    before = nn.Parameter(torch.zeros(()))  # not attached: its gradient comes last
    (weight * 1.0 + before).sum().backward()
    last = Fails.apply(before) if rank == 0 else before * 1.0  # the first in forward
    loss = (weight * float(rank + 1) + last).sum()
    if rank == 0:
        with pytest.raises(ArithmeticError, match="as told"):
            loss.backward()
        dist.barrier()  # it takes its next step when the other one is done with this one
        weight.grad = None
        weight.sum().backward()
    else:
        loss.backward()
        dist.barrier()
        weight.sum().backward()


def test_nobody_waits_for_the_next_backward_of_one_that_failed() -> None:
    run_ranks(_fails_after_its_only_bucket, 2)


def _dies(rank: int, world_size: int) -> None:
    parameter = nn.Parameter(torch.zeros(100_000))
    sync = fastsync.attach([parameter], overlap=False, gradient_as_bucket_view=True)
    parameter.grad = torch.ones(100_000)
    for step in range(10**6):
        if rank == 1 and step == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        parameter.grad.fill_(1.0)
        sync.synchronize()


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 has ended"):
        run_ranks(_dies, 3, lost=[1])


# ---- where it cannot be ---------------------------------------------------------------------------------------------


def _elsewhere(rank: int, world_size: int) -> None:
    model, sync = model_of(rank, gradient_as_bucket_view=True)
    twin, _ = model_of(rank)
    for step in range(3):
        for each in (model, twin):
            each.zero_grad(set_to_none=False)
            backward(each, rank, step)
        assert_all_bitwise_equal(
            [parameter.grad for parameter in model.parameters()],
            [parameter.grad for parameter in twin.parameters()],
            f"step {step}",
        )
    assert not any(lies_in_shared_memory(parameter.grad) for parameter in model.parameters())
    assert sync.stats().transport.startswith("process group")


def test_messages_leave_gradients_where_they_are() -> None:
    run_ranks(_elsewhere, 2, shared_memory=False)


def _ranks_differ(rank: int, world_size: int) -> None:
    message = "rank 1: gradient_as_bucket_view False; rank 0: gradient_as_bucket_view True"
    with pytest.raises(ValueError, match=message):
        fastsync.attach([nn.Parameter(torch.zeros(3))], gradient_as_bucket_view=rank == 0)
    with pytest.raises(ValueError, match="gradient_as_bucket_view: expected True or False, got 'yes'"):
        fastsync.attach([nn.Parameter(torch.zeros(3))], gradient_as_bucket_view="yes")  # type: ignore[arg-type]


def test_ranks_that_differ_are_told() -> None:
    run_ranks(_ranks_differ, 2)


def _graph_of_gradients(rank: int, world_size: int) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    fastsync.attach([weight], gradient_as_bucket_view=True)
    for step in range(4):
        if step < 2:
            weight.grad = None
        else:
            weight.grad = weight.grad.detach().zero_()  # to be added to
        ((rank + 1) * weight.pow(3)).sum().backward(create_graph=True)
        assert weight.grad.requires_grad
        assert torch.equal(weight.grad.detach(), 1.5 * 3 * weight.detach().square()), step


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_keeps_it() -> None:
    run_ranks(_graph_of_gradients, 2)

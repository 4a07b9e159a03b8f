"""Error feedback in the engine: residuals go with their parameters, and stay where nothing was sent."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import fastsync
from fastsync import Compression
from tests.compare import assert_bitwise_equal
from tests.ranks import run_ranks

FEEDBACK = Compression("bf16", reduce="fp32", error_feedback=True)


def given_gradients(rank: int, step: int, *parameters: Tensor) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def residual_of(sync: Any, name: str) -> Tensor:
    own: Tensor = sync.state_dict()["residuals"][name]["own"]
    return own


def _follow_a_cast(rank: int, world_size: int) -> None:
    model = nn.Linear(100, 100)
    parameters = list(model.parameters())
    sync = fastsync.attach(model, FEEDBACK, overlap=False)
    given_gradients(rank, 0, *parameters)
    sync.synchronize()
    before = residual_of(sync, "weight")
    assert before.dtype == torch.float32
    assert before.count_nonzero() > 0
    model.double()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    sync.synchronize()
    sent = [torch.zeros_like(before) for _ in range(world_size)]
    torch.distributed.all_gather(sent, before.bfloat16().float())
    torch.testing.assert_close(model.weight.grad.flatten(), torch.stack(sent).double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(residual_of(sync, "weight"), before.double() - before.bfloat16().double())


def test_residuals_follow_a_cast() -> None:
    run_ranks(_follow_a_cast, 2)


def _of_another_size(rank: int, world_size: int) -> None:
    complex_one = nn.Parameter(torch.zeros(50_000, dtype=torch.complex64))
    real_one = nn.Parameter(torch.zeros(100))
    sync = fastsync.attach([complex_one, real_one], "none", overlap=False)
    sync.load_state_dict({"step": 0, "scales": {}, "residuals": {"1": {"own": torch.ones(100), "of_sums": None}}})
    complex_one.grad, real_one.grad = torch.ones_like(complex_one), torch.ones_like(real_one)
    sync.synchronize()
    assert_bitwise_equal(torch.view_as_real(complex_one.grad), torch.view_as_real(torch.ones_like(complex_one)))
    assert_bitwise_equal(real_one.grad, torch.full((100,), 2.0))


def test_residuals_beside_complex_parameters() -> None:
    """Which have none, but lie in the same bucket and are twice as many values."""
    run_ranks(_of_another_size, 2)


def _stay_where_nothing_is_new(rank: int, world_size: int) -> None:
    used, idle = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))
    sync = fastsync.attach([used, idle], FEEDBACK)
    (used.square() * 1.37 + idle.square() * 1.37).sum().backward()
    before = residual_of(sync, "1")
    assert before.count_nonzero() > 0
    used.grad = None
    idle.grad.zero_()  # as zero_grad(set_to_none=False) leaves it
    (used.square() * 1.37).sum().backward()
    assert idle.grad.count_nonzero() == 0
    assert_bitwise_equal(residual_of(sync, "1"), before)


def test_residuals_stay_where_no_rank_has_a_new_gradient() -> None:
    """What came back for such a gradient would go nowhere."""
    run_ranks(_stay_where_nothing_is_new, 2)


def _resume(rank: int, world_size: int) -> None:
    compression = Compression("int8", error_feedback=True, rounding="stochastic")
    first, second = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(1000))
    sync = fastsync.attach([first], compression, overlap=False)
    given_gradients(rank, 0, first)
    sync.synchronize()
    state = copy.deepcopy(sync.state_dict())
    given_gradients(rank, 1, first)
    sync.synchronize()
    resumed = fastsync.attach([second], compression, overlap=False)
    resumed.load_state_dict(state)
    given_gradients(rank, 1, second)
    resumed.synchronize()
    assert first.grad is not None
    assert second.grad is not None
    assert_bitwise_equal(second.grad, first.grad)


def test_stochastic_rounding_goes_on_as_it_was_in_another_engine() -> None:
    run_ranks(_resume, 3)


def _rounds_otherwise_elsewhere(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """What rounding loses of one value, in two buckets of one step."""
    parameters = [nn.Parameter(torch.zeros(128 * 8)) for _ in range(2)]
    compression = Compression("int8", error_feedback=True, rounding="stochastic", algorithm="one_shot")
    sync = fastsync.attach(parameters, compression, overlap=False, bucket_cap_mb=1e-3)
    for parameter in parameters:
        parameter.grad = torch.linspace(-1.0, 1.0, parameter.numel())
    sync.synchronize()
    assert len(sync.stats().buckets) == 2
    return residual_of(sync, "0"), residual_of(sync, "1")


def test_stochastic_rounding_differs_between_ranks_and_buckets() -> None:
    lost = [tensor for pair in run_ranks(_rounds_otherwise_elsewhere, 2) for tensor in pair]
    for index, one in enumerate(lost):
        for other in lost[index + 1 :]:
            assert (one != other).float().mean() > 0.25

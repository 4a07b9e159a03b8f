"""Error feedback in the engine: residuals go with their parameters, and stay where nothing was sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync import Compression
from tests.bitwise import assert_bitwise_equal
from tests.engine.failing_passes import no_memory_to
from tests.ranks import on_ranks

FEEDBACK = Compression("bf16", reduce="fp32", error_feedback=True)


def given_gradients(rank: int, step: int, *parameters: Tensor) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def residual_of(sync: Any, name: str) -> Tensor:
    residual: Tensor = sync.state_dict()["residuals"][f"{name} of rank {dist.get_rank()}"]
    return residual


@on_ranks(2)
def test_residuals_follow_a_cast(rank: int, world_size: int) -> None:
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


@on_ranks(3, cases={"kept": ["None here, zeros there", "None here, the newest there", "the newest", "zeros"]})
def test_statistics_of_what_no_rank_uses_are_the_same_on_all_ranks(rank: int, world_size: int, kept: str) -> None:
    """Of a gradient that no rank has a new one of, each rank may have kept something else."""
    for algorithm in ("one_shot", "two_shot"):
        compression = Compression("int8", algorithm=algorithm, error_feedback=True)
        always, once = nn.Parameter(torch.zeros(3000)), nn.Parameter(torch.zeros(3000))
        sync = fastsync.attach([always, once], compression)
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + rank)
            before = residual_of(sync, "1") if step == 1 else None
            always.grad = None
            loss = (always * torch.randn(3000, generator=generator)).sum()
            if step == 0:
                loss = loss + (once * torch.randn(3000, generator=generator) * 1e2).sum()
            elif kept == "None here, zeros there":
                once.grad = None if rank == 0 else torch.zeros(3000)
            elif kept == "None here, the newest there" and rank == 0:
                once.grad = None
            elif kept == "zeros":
                once.grad = torch.zeros(3000)
            loss.backward()
            norms: list[Any] = [None] * world_size
            dist.all_gather_object(norms, sync.grad_stats().grad_norm.item())
            assert len(set(norms)) == 1, f"{algorithm}, step {step}: {norms}"
            if before is not None:
                assert_bitwise_equal(residual_of(sync, "1"), before, f"{algorithm}: what is kept")
            if not (kept == "None here, the newest there" and step > 0):
                expected = nn.utils.get_total_norm([p.grad.double() for p in (always, once) if p.grad is not None])
                torch.testing.assert_close(sync.grad_stats().grad_norm.double(), expected, rtol=1e-6, atol=0.0)


@on_ranks(1, cases={"wires": [("int8+ef", "bf16"), ("fp16", "bf16"), ("bf16", "fp16")]})
def test_a_bucket_that_is_sent_again_rolls_back_to_before_the_first_time(
    rank: int, world_size: int, wires: tuple[str, str]
) -> None:
    """The compression changes before a step that fails twice: with the gradients, and with what replaces them."""
    parameter = nn.Parameter(torch.zeros(300))
    sync = fastsync.attach([parameter], wires[0], overlap=False)
    sync.make_revocable()
    given_gradients(rank, 0, parameter)
    sync.synchronize()
    before = sync.state_dict()
    sync.compression = wires[1]
    given_gradients(rank, 1, parameter)
    with no_memory_to("pack"), pytest.raises(torch.OutOfMemoryError):
        sync.synchronize()
    sync._engine.roll_back_step()
    after = sync.state_dict()
    assert after["scales"] == before["scales"]
    assert after["residuals"].keys() == before["residuals"].keys()
    for name, residual in after["residuals"].items():
        assert_bitwise_equal(residual, before["residuals"][name])

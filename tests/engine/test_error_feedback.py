"""Error feedback in the engine: residuals go with their parameters, and stay where nothing was sent."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync import Compression
from tests.bitwise import assert_bitwise_equal
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

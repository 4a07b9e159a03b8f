"""Gradients that are not what their parameter is: another order in memory, another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastsync
from tests.bitwise import assert_bitwise_equal
from tests.engine.entry_points import Averaged, average
from tests.models import Given, assert_same_on_all_ranks, random_grads
from tests.ranks import on_ranks, pair_of
from tests.refused import refused

WHOLE = ("attach", "synchronize", "all_reduce")
"""The entry points that read ``.grad`` itself."""
CHANNELS_LAST = torch.channels_last
FEEDBACK = "int8+ef"

# ---- order in memory ------------------------------------------------------------------------------------------------


def backward(given: Averaged, rank: int, step: int) -> list[Tensor]:
    """A step of a convolution. Returns copies of the averages in the order of their indices."""
    given.model.zero_grad()
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    given.backward(given.model(images).square().mean())
    return [grad.clone(memory_format=torch.contiguous_format) for grad in given.grads() if grad is not None]


@on_ranks(4, timeout=60.0)
def test_a_memory_order_that_one_rank_changes_is_told(rank: int, world_size: int) -> None:
    entry_point, compression = [("attach", "none"), ("all_reduce", FEEDBACK)][rank // 2]
    given = average(entry_point, nn.Conv2d(3, 4, 3), compression, group=pair_of(rank, world_size))
    backward(given, rank, 0)
    if rank % 2 == 0:
        given.model.to(memory_format=CHANNELS_LAST)
    with pytest.raises(RuntimeError, match=r"parameter (weight|0) lies in memory in another order") as error:
        backward(given, rank, 1)
    assert "rank 0" in str(error.value)


@on_ranks(2)
def test_a_state_is_the_same_in_each_memory_order(rank: int, world_size: int) -> None:
    """Residuals of a model that was channels_last load into one that is not."""
    gradient = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(rank))
    states: list[dict[str, Any]] = []
    for order in (torch.contiguous_format, CHANNELS_LAST):
        weight = nn.Parameter(torch.zeros(4, 3, 3, 3).to(memory_format=order))
        sync = fastsync.attach([weight], "bf16+ef+two_shot", overlap=False)
        weight.grad = gradient.clone(memory_format=torch.preserve_format).to(memory_format=order)
        sync.synchronize()
        states.append(sync.state_dict())
        sync.load_state_dict(states[-1])
        name = f"0 of rank {rank}"
        assert_bitwise_equal(sync.state_dict()["residuals"][name], states[-1]["residuals"][name], "loaded")
    of_each = [state["residuals"][f"0 of rank {rank}"] for state in states]
    assert of_each[0].count_nonzero() > 0
    assert_bitwise_equal(of_each[1], of_each[0], "residual")


@on_ranks(2, cases={"compression": ["none", "int8"]})
def test_gradients_in_another_order_than_their_parameter(rank: int, world_size: int, compression: str) -> None:
    """Transposed, permuted, expanded, or a part of something larger; on one rank only."""
    values = torch.arange(60.0).view(3, 4, 5)
    of_rank = [values + 1, values * 3]
    for of_parameter in (values, values.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        parameter = nn.Parameter(torch.empty_strided(of_parameter.size(), of_parameter.stride()).zero_())
        sync = fastsync.attach([parameter], compression, overlap=False)
        for strange in (
            of_rank[rank].permute(2, 1, 0).contiguous().permute(2, 1, 0),
            torch.cat([of_rank[rank], values], dim=-1)[..., :5],
            of_rank[rank].clone(),
        ):
            parameter.grad = strange if rank == 0 else of_rank[rank].clone()
            sync.synchronize()
            expected = (of_rank[0] + of_rank[1]) / 2
            torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=2.0 if compression == "int8" else 0)


@on_ranks(2)
def test_a_gradient_of_another_shape_is_told(rank: int, world_size: int) -> None:
    parameter = nn.Parameter(torch.zeros(2, 6))
    sync = fastsync.attach([parameter], overlap=False)
    parameter.grad = torch.full((2, 6), 1.0 + rank)
    sync.synchronize()
    parameter.data = torch.zeros(6, 2)
    refused(lambda: sync.synchronize(), "parameter 0 has the shape [6, 2], and its")


# ---- dtype ----------------------------------------------------------------------------------------------------------


def of_grad_dtype(dtype: torch.dtype, grad_dtype: torch.dtype | None, size: int = 300) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(size, dtype=dtype))
    parameter.grad_dtype = grad_dtype
    return parameter


@on_ranks(2)
def test_16_bit_gradients_of_float32_parameters_travel_in_16_bits(rank: int, world_size: int) -> None:
    parameter = of_grad_dtype(torch.float32, torch.bfloat16, 1000)
    sync = fastsync.attach([parameter])
    for _ in range(2):
        parameter.grad = None
        (parameter.bfloat16() * (rank + 1)).sum().backward()
        assert parameter.grad.dtype == torch.bfloat16
        assert parameter.grad.unique().tolist() == [1.5]
    [bucket] = sync.stats().buckets
    assert bucket.wire_bytes < 2 * 2200


@on_ranks(2)
def test_a_grad_dtype_that_changes(rank: int, world_size: int) -> None:
    """All ranks may change it. Where one does, all are told which."""
    parameter = of_grad_dtype(torch.bfloat16, torch.bfloat16)
    sync = fastsync.attach([parameter], overlap=False)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        parameter.grad = None
        parameter.grad_dtype = dtype
        parameter.grad = torch.full((300,), 1.0 + rank, dtype=dtype)
        sync.synchronize()
        assert parameter.grad.dtype == dtype
        assert parameter.grad.unique().tolist() == [1.5]
    other = of_grad_dtype(torch.bfloat16, torch.float32 if rank == 0 else torch.bfloat16)
    refused(lambda: fastsync.attach([other]), "rank 0: parameter 0 of")


@on_ranks(2)
def test_any_grad_dtype(rank: int, world_size: int) -> None:
    """With ``grad_dtype = None`` nothing tells what travels, so a wider gradient than the parameter is refused."""
    for dtype, grad_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        parameter = of_grad_dtype(dtype, None)
        sync = fastsync.attach([parameter], overlap=False)
        parameter.grad = torch.full((300,), 1.0 + rank, dtype=grad_dtype)
        if dtype == torch.float32:
            sync.synchronize()
            assert parameter.grad.unique().tolist() == [1.5]
            continue
        refused(lambda: sync.synchronize(), "gradient of Float, which BFloat16 cannot hold;")


# ---- two gradients in one memory ------------------------------------------------------------------------------------

PAIRED = [(4,), (4,), (3,)]


class _Paired(Given):
    """Autograd gives the first two weights one gradient, which lies in one memory."""

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        one, other, third = self.weights
        assert grads[2] is not None
        loss = (third * grads[2]).sum()
        return loss if grads[0] is None else loss + ((one.view(2, 2) + other.view(2, 2)) * grads[0].view(2, 2)).sum()


@on_ranks(
    2,
    cases={
        "compression": ["none", FEEDBACK],
        "entry_point, op": [
            ("all_reduce", "mean"),
            *((way, op) for way in WHOLE[:2] for op in ("mean", "mean_of_used", "sum")),
        ],
    },
)
def test_gradients_in_one_memory_count_as_those_in_two(
    rank: int, world_size: int, entry_point: str, op: str, compression: str
) -> None:
    options = {} if entry_point == "all_reduce" else {"op": op}
    like = [torch.zeros(shape) for shape in PAIRED]
    given, plain = (average(entry_point, model(like), compression, **options) for model in (_Paired, Given))
    for step, users in enumerate(({0}, {0, 1}, {1}, set(), {0})):
        first, _, third = random_grads(rank, step, PAIRED, torch.float32)
        pair = [first, first] if rank in users else [None, None]
        expected, actual = plain.step([*pair, third]), given.step([*pair, third])
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert (one is None) == (other is None)
            if one is not None:
                assert_bitwise_equal(one, other, f"step {step}, parameter {index}")
        assert_same_on_all_ranks([grad for grad in actual if grad is not None])


@on_ranks(2)
def test_gradients_that_are_parts_of_one_memory_stay_there(rank: int, world_size: int) -> None:
    memory = torch.arange(6.0) + rank
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    sync = fastsync.attach(parameters, overlap=False)
    for parameter, part in zip(parameters, memory.split(3), strict=True):
        parameter.grad = part
    sync.synchronize()
    assert memory.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]


# ---- no values ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_model_without_values_has_a_norm(rank: int, world_size: int) -> None:
    parameter = nn.Parameter(torch.ones(0))
    sync = fastsync.attach([parameter])
    parameter.sum().backward()
    assert fastsync.clip_grad_norm_(sync, 1.0) == 0


@on_ranks(2)
def test_a_parameter_without_values_holds_up_no_step(rank: int, world_size: int) -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))]
    sync = fastsync.attach(parameters)
    optimizer = torch.optim.SGD(parameters, 1.0)
    for number in range(2):
        sync.set_weight(1.0)
        with sync.no_sync():
            sum((parameter * rank).sum() for parameter in parameters).backward()
        sum((parameter * rank).sum() for parameter in parameters).backward()
        assert sync._engine.gradients_are_unchanged()
        optimizer.step()
        optimizer.zero_grad()
        assert parameters[0].tolist() == [-float(number)] * 3

"""check_consistency: which tensors and which extra state are compared, and what it says of buffers."""

from __future__ import annotations

import io
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from tests.models import group_of_one
from tests.ranks import on_ranks


class WithExtraState(nn.Linear):
    """A layer whose checkpoint holds more than tensors."""

    def __init__(self, extra: object) -> None:
        super().__init__(2, 2)
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def _normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def _buffers(rank: int, world_size: int) -> None:
    model = _normalised()
    fastsync.check_consistency(model)
    model(torch.randn(8, 2, generator=torch.Generator().manual_seed(rank)))
    with pytest.raises(RuntimeError, match=r"'1\.running_mean' of Sequential differs .* is a buffer.*buffers=False"):
        fastsync.check_consistency(model)
    fastsync.check_consistency(model, buffers=False)
    with torch.no_grad():
        model[0].bias[1] += rank
    with pytest.raises(RuntimeError, match=r"'0\.bias' of Sequential differs") as failure:
        fastsync.check_consistency(model, buffers=False)
    assert "buffer" not in str(failure.value)


def _extra_state(rank: int, world_size: int) -> None:
    equal: list[tuple[object, object]] = [
        (b"one", b"two"), ("one", "two"), (1, 2), (1.5, 2.5), (True, False), (torch.ones(2), torch.zeros(2)),
        (bytearray(b"one"), bytearray(b"two")), (1, 1.0), (None, 0), (b"1", "1"), (torch.ones(2), b"1"),
    ]  # fmt: skip
    for mine, theirs in equal:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fastsync.check_consistency(WithExtraState(mine))
            with pytest.raises(RuntimeError, match="'_extra_state' of WithExtraState differs between ranks"):
                fastsync.check_consistency(WithExtraState(theirs if rank else mine))
    fastsync.check_consistency(WithExtraState(float("nan")))
    with pytest.warns(UserWarning, match="'_extra_state' of WithExtraState is a BytesIO, which it does not compare"):
        fastsync.check_consistency(WithExtraState(io.BytesIO(bytes(rank))))
    with (
        pytest.warns(UserWarning, match="is a (dict|list), which it does not compare"),
        pytest.raises(RuntimeError, match=r"differs between ranks: ranks \[0\]: a dict; ranks \[1\]: a list"),
    ):
        fastsync.check_consistency(WithExtraState([] if rank else {}))


@on_ranks(3)
def test_how_many_differ_and_by_how_much(rank: int, world_size: int) -> None:
    model = _normalised()
    for name, tensor in model.state_dict().items():
        if rank == 1 and name != "0.weight":
            tensor.add_(3 if name == "1.num_batches_tracked" else 0.25)
    with pytest.raises(
        RuntimeError,
        match=r"'0\.bias' of Sequential differs between ranks: ranks \[0, 2\]: sha256 \w+; ranks \[1\]: sha256 \w+; "
        r"6 of 7 entries differ",
    ):
        fastsync.check_consistency(model)
    with pytest.raises(RuntimeError, match=r"3 of 4 entries differ$"):
        fastsync.check_consistency(model, buffers=False)
    if rank == 2:
        with torch.no_grad():
            model[1].weight[0] = float("nan")
    with pytest.raises(RuntimeError, match=r"3 of 4 entries differ$"):
        fastsync.check_consistency(model, buffers=False)
    for dtype in (torch.bfloat16, torch.float64, torch.int16, torch.uint8, torch.bool, torch.complex64):
        other = nn.Module()
        other.register_buffer("values", torch.tensor([[1, 0], [0, rank == 2]]).to(dtype).T)
        with pytest.raises(RuntimeError, match=r"ranks \[2\]: sha256 \w+; 1 of 1 entries differ"):
            fastsync.check_consistency(other)
    other.register_buffer("values", torch.zeros(2 + rank))
    with pytest.raises(RuntimeError, match=r"ranks \[2\]: sha256 \w+; 1 of 1 entries differ; it is a buffer"):
        fastsync.check_consistency(other)


def _alone(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    fastsync.check_consistency(_normalised(), process_group=group)
    if rank == 0:
        with pytest.raises(
            RuntimeError, match=r"check_consistency: .* rank 0 of 2 .*; every rank has to call it, .*sync\.join\(\)"
        ):
            fastsync.check_consistency(_normalised(), process_group=group)
    dist.barrier()


@on_ranks(2)
def test_what_is_compared(rank: int, world_size: int) -> None:
    _buffers(rank, world_size)
    _extra_state(rank, world_size)
    _alone(rank, world_size)


def test_only_a_module_is_compared() -> None:
    with group_of_one(), pytest.raises(ValueError, match="expected a module, got list; put several into"):
        fastsync.check_consistency([nn.Linear(2, 2)])


def test_tensors_that_are_not_plain() -> None:
    compared: list[Tensor] = [torch.tensor(1.0), torch.zeros(0), torch.zeros(2, dtype=torch.cfloat).conj()]
    skipped: list[Tensor] = [torch.eye(3).to_sparse(), torch.zeros(3, device="meta")]
    with group_of_one():
        for tensor in (*compared, *skipped):
            model = nn.Linear(2, 2)
            model.register_buffer("other", tensor)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                fastsync.check_consistency(model)
            words = ["'other' of Linear is a Tensor, which it does not compare" in str(each.message) for each in said]
            assert words == ([True] if any(tensor is each for each in skipped) else [])

"""Ranks that train on the same data are told so once: in the first step all of them have the same gradients."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fastsync
from fastsync.autotune import measure_group
from tests.engine.entry_points import average
from tests.models import Given, Mlp, batch
from tests.ranks import on_ranks


def _warnings_of(loss_of: Callable[[int], torch.Tensor]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            loss_of(step).backward()
    found = [str(each.message) for each in said]
    return [each for each in found if "have the same gradients in their first step" in each]


@on_ranks(2, cases={"entry_point": ["attach", "hook"], "shared_memory": [True, False]})
def test_ranks_with_the_same_data_are_told(rank: int, world_size: int, entry_point: str) -> None:
    torch.manual_seed(0)
    model = average(entry_point, Mlp()).model
    said = _warnings_of(lambda step: model(batch(0, step)).square().mean())
    assert [each[: each.index("ranks")] for each in said] == ["fastsync: all 2 "] * (rank == 0)


@on_ranks(2)
def test_who_calls_synchronize_is_told_by_python(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Mlp()
    sync = fastsync.attach(model, overlap=False)
    model(batch(0, 0)).square().mean().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sync.synchronize()
    assert [str(each.message)[:19] for each in said] == ["fastsync: all 2 ran"] * (rank == 0)


@on_ranks(3, cases={"entry_point": ["attach", "hook"]})
def test_others_are_left_alone(rank: int, world_size: int, entry_point: str) -> None:
    model, narrow, one, other = (
        average(entry_point, each).model
        for each in (Mlp(), nn.Linear(8, 2, bias=False), Given([torch.ones(3)]), Given([torch.ones(3)]))
    )
    assert not _warnings_of(lambda step: model(batch(rank, step)).square().mean())
    # One number of each gradient would be the same: its sum, or its norm.
    assert not _warnings_of(lambda step: narrow(torch.eye(8)[[rank + step]]).sum())
    # Most of the last layer's gradients do not depend on the data; one rank of three is another.
    assert not _warnings_of(lambda step: model(batch(rank // 2, step)).sum())
    assert not _warnings_of(lambda step: one([torch.zeros(3)]))
    assert not _warnings_of(lambda step: other([torch.full((3,), torch.inf)]))


@on_ranks(3, cases={"entry_point": ["attach", "hook"]})
def test_weights_are_left_alone(rank: int, world_size: int, entry_point: str) -> None:
    weighted = average(entry_point, Mlp())
    weighted.handle.set_weight(1.0)
    assert not _warnings_of(lambda step: weighted.model(batch(0, step)).square().mean())


@on_ranks(3)
def test_joins_are_left_alone(rank: int, world_size: int) -> None:
    joined = Mlp()
    with fastsync.attach(joined).join():
        assert not _warnings_of(lambda step: joined(batch(0, step)).square().mean())


@pytest.mark.parametrize("shared_memory", [True, False])
@on_ranks(2, parametrized=("shared_memory",))
def test_measuring_says_nothing_of_its_own_gradients(rank: int, world_size: int, tmp_path: Path) -> None:
    """Not to Python's warnings, nor where C++ says it without Python's lock."""
    said = tmp_path / f"rank {rank}"
    with said.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    warnings.simplefilter("always")
    measure_group(wires=["none", "fp16", "bf16", "int8"])
    assert said.read_text() == ""

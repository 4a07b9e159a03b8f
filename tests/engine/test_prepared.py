"""register_prepared: whichever way a trainer has wrapped its model. Real trainers are in test_examples.py."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.models import Mlp, batch, group_of_one
from tests.ranks import run_ranks


def _registers(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    wrapped = [DistributedDataParallel(Mlp()), torch.compile(DistributedDataParallel(Mlp()), backend="eager")]
    for model, kind in [*((ddp, fastsync.CommHook) for ddp in wrapped), (fully_shard(Mlp(), mesh=mesh), None)]:
        handle = fastsync.register_prepared(model, "fp16")
        assert isinstance(handle, kind or fastsync.ShardedGradients)
        model(batch(rank, 0)).sum().backward()
        assert handle.stats().num_steps == 1
    with pytest.raises(ValueError, match=r"fastsync\.attach for one without a wrapper"):
        fastsync.register_prepared(Mlp())


def test_whatever_is_wrapped_is_registered() -> None:
    run_ranks(_registers, 2)


def test_one_rank_needs_nothing() -> None:
    assert fastsync.register_prepared(Mlp()) is None
    with group_of_one():
        assert fastsync.register_prepared(Mlp()) is None

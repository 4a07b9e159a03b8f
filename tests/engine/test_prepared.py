"""register_prepared: whichever way a trainer has wrapped its model. Real trainers are in test_examples.py."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.models import Mlp, batch, group_of_one
from tests.ranks import on_ranks


@on_ranks(2)
def test_whatever_is_wrapped_is_registered(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    wrapped = [DistributedDataParallel(Mlp()), torch.compile(DistributedDataParallel(Mlp()), backend="eager")]
    for model, kind in [*((ddp, fastsync.CommHook) for ddp in wrapped), (fully_shard(Mlp(), mesh=mesh), None)]:
        handle = fastsync.register_prepared(model, "fp16")
        assert isinstance(handle, kind or fastsync.ShardedGradients)
        model(batch(rank, 0)).sum().backward()
        assert handle.stats().num_steps == 1
    with pytest.raises(ValueError, match=r"fastsync\.attach for one without a wrapper"):
        fastsync.register_prepared(Mlp())


def _takes_a_step_alone() -> None:
    model = Mlp()
    handle = fastsync.register_prepared(model, "fp16")
    assert isinstance(handle, fastsync.GradientSynchronizer)
    model(batch(0, 0)).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    assert handle.stats().num_steps == 1
    handle.load_state_dict(handle.state_dict())
    handle.detach()
    model.zero_grad()
    model(batch(0, 0)).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-3, atol=1e-6)


def test_one_rank_has_a_handle_too() -> None:
    _takes_a_step_alone()
    with group_of_one():
        _takes_a_step_alone()

"""DiLoCo and register_prepared on a device whose tensors Gloo does not take: the fake one here, a GPU where one is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync import DiLoCo
from tests import fake_device, ranks
from tests.engine.sites import assert_sites_are_equal, make_model, make_optimizer
from tests.models import Mlp, batch

DEVICES = pytest.mark.parametrize("device", [fake_device.DEVICE, pytest.param("cuda", marks=pytest.mark.gpu)])


def trained(rank: int, world_size: int, device: str) -> list[Tensor]:
    # BatchNorm comes first. Behind the layers it would take away what a bias adds, and AdamW would follow the noise of
    # such a gradient of zero.
    model = nn.Sequential(nn.BatchNorm1d(7), make_model())
    model[1][2].requires_grad_(False)
    if rank == 1:
        model[1][2].weight.fill_(5.0)
    model = model.to(device)
    optimizer = make_optimizer(model)
    with DiLoCo(model, optimizer, sync_every=2, fragments=2, fragment_sync_delay=1) as sync:
        for step in range(5 + rank):
            inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(1000 * rank + step))
            optimizer.zero_grad()
            # Without a gradient for the inputs, BatchNorm returns a tensor that the fake device cannot handle.
            model(inputs.to(device).requires_grad_()).square().sum().backward()
            optimizer.step()
    sync.load_state_dict(sync.state_dict())
    assert_sites_are_equal(model.cpu(), world_size)
    return [each.detach() for each in (*model.parameters(), *model.buffers())]


def trained_on(rank: int, world_size: int, device: str) -> None:
    if device == fake_device.DEVICE:
        fake_device.load()
    expected = trained(rank, world_size, "cpu")
    # The fake device computes as the CPU does. A GPU rounds otherwise, which may move a value of int8 by one step.
    tolerance = {} if device == fake_device.DEVICE else {"rtol": 0.0, "atol": 1e-3}
    for mine, theirs in zip(trained(rank, world_size, device), expected, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


@DEVICES
def test_sites_whose_model_is_on_a_device(device: str) -> None:
    (fake_device if device == fake_device.DEVICE else ranks).run_ranks(trained_on, 2, device)


def registered(rank: int, world_size: int, device: str, has_group: bool) -> None:
    if device == fake_device.DEVICE:
        fake_device.load()
    if not has_group:
        dist.destroy_process_group()
    model = Mlp().to(device)
    handle = fastsync.register_prepared(model, "fp16")
    model(batch(0, 0).to(device)).sum().backward()
    assert handle.stats().num_steps == 1
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    handle.detach()
    model.zero_grad()
    model(batch(0, 0).to(device)).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(grad.cpu(), parameter.grad.cpu(), rtol=1e-3, atol=1e-6)
    if not has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("has_group", [True, False])
@DEVICES
def test_one_rank_has_a_handle_on_a_device_too(device: str, has_group: bool) -> None:
    (fake_device if device == fake_device.DEVICE else ranks).run_ranks(registered, 1, device, has_group)

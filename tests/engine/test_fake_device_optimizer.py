"""``shard_optimizer`` on the fake device: the bits of attach and every rank's own step, in the order of streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW

import fastsync
from fastsync import Compression
from tests import fake_device
from tests.bitwise import assert_bitwise_equal
from tests.engine.optimizer_shards import Normalized
from tests.engine.test_optimizer_masters import Reference
from tests.fake_device import DEVICE, watched
from tests.models import Given, random_grads
from tests.refused import refused

NO_SCALER = GradScaler("cpu", enabled=False)
SHAPES = [(7, 33), (300,), (2, 3, 4), (513, 7), (40_000,)]
OPTIMIZERS: dict[str, Any] = {
    "fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: AdamW(p, lr=0.1, foreach=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "owners": lambda p: Normalized(p, lr=0.1),
}
COMPRESSIONS = [
    Compression(),
    Compression("bf16"),
    Compression("fp16", reduce="fp32", algorithm="one_shot", error_feedback=True),
    Compression("int8", algorithm="two_shot"),
]


def train(
    rank: int, optimizer: str, compression: Compression, group: Any, is_shared: bool, scaler: GradScaler = NO_SCALER
) -> list[Tensor]:
    """Takes some steps, of which one clips, and one lacks a gradient on rank 0. Returns parameters and state.

    A scaler skips the step before the last, in which rank 1 has an inf.
    """
    model = Given([grad.to(DEVICE) for grad in random_grads(9, 9, SHAPES, torch.float32)]).to(DEVICE)
    own = OPTIMIZERS[optimizer](model.parameters())
    chosen = compression if is_shared else replace(compression, reduce="fp32")
    sync = fastsync.attach(model, chosen, process_group=group, bucket_cap_mb=0.1)
    if is_shared:
        fastsync.shard_optimizer(sync, own)
    for step in range(5):
        grads: list[Tensor | None] = [grad.to(DEVICE) for grad in random_grads(rank, step, SHAPES, torch.float32)]
        if step == 3 and rank == 0:
            grads[1] = None
        if scaler.is_enabled() and step == 3 and rank == 1:
            grads[2].view(-1)[5] = torch.inf
        scaler.scale(model(grads)).backward()
        if step == 2:
            given = {"scaler": scaler} if scaler.is_enabled() else {}
            fastsync.clip_grad_norm_(sync, 0.5, optimizer=own if optimizer == "fused" else None, **given)
        scaler.step(own)
        scaler.update()
        own.zero_grad()
    state = own.state_dict()["state"]
    sync.detach()
    kept = [parameter.detach() for parameter in model.parameters()]
    return [each.cpu() for each in (*kept, *(state[i][name] for i in state for name in sorted(state[i])))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [2, 3])
@fake_device.on_ranks(cases={"optimizer": OPTIMIZERS})
def test_the_bits_are_those_of_every_rank(rank: int, world_size: int, optimizer: str) -> None:
    group = fake_device.new_group()
    for compression in COMPRESSIONS[world_size % 2 :: 2]:
        expected = train(rank, optimizer, compression, group, is_shared=False)
        with watched():
            actual = train(rank, optimizer, compression, group, is_shared=True)
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_bitwise_equal(one, other, f"{compression}: tensor {index}")


@fake_device.on_ranks(2)
def test_a_scaler_skips_and_unscales_as_on_every_rank(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    for compression in COMPRESSIONS[:2]:
        scalers = [GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2) for _ in range(2)]
        expected = train(rank, "fused", compression, group, False, scalers[0])
        with watched():
            actual = train(rank, "fused", compression, group, True, scalers[1])
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**10
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_bitwise_equal(one, other, f"{compression}: tensor {index}")


@fake_device.on_ranks(2)
def test_gradients_that_a_scaler_has_divided_are_refused(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    model = model_of(torch.float32)
    own = OPTIMIZERS["fused"](model.parameters())
    fastsync.shard_optimizer(fastsync.attach(model, process_group=group), own)
    scaler = GradScaler(DEVICE, init_scale=256.0)
    before = [parameter.detach().cpu() for parameter in model.parameters()]
    for divides in (True, False):
        grads = [grad.to(DEVICE) for grad in random_grads(rank, 0, SHAPES, torch.float32)]
        scaler.scale(model(grads)).backward()
        if divides:
            scaler.unscale_(own)
            refused(lambda: own.step(), "was changed since", kind=RuntimeError)
            for parameter, value in zip(model.parameters(), before, strict=True):
                assert_bitwise_equal(parameter.detach().cpu(), value, "a parameter")
        else:
            scaler.step(own)
        scaler.update()
        own.zero_grad()


@fake_device.on_ranks(2)
def test_a_failed_step_is_told_before_the_next(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    model = model_of(torch.float32)
    own = OPTIMIZERS["fused"](model.parameters())
    sync = fastsync.attach(model, process_group=group)
    fastsync.shard_optimizer(sync, own)
    for number in range(3):
        model([grad.to(DEVICE) for grad in random_grads(rank, number, SHAPES, torch.float32)]).backward()
        if number == 1 and rank == 1:
            failing = patch.object(sync._optimizer_shards._pieces.inner, "step", side_effect=ZeroDivisionError)
            with failing, pytest.raises(ZeroDivisionError):
                own.step()
        elif number == 2:
            refused(lambda: own.step(), "an earlier step of the optimizer has failed on", kind=RuntimeError)
        else:
            own.step()
        own.zero_grad()


@fake_device.on_ranks(2)
def test_parameters_may_be_views_of_one_tensor(rank: int, world_size: int) -> None:
    """As those of cuDNN's LSTMs are."""
    group = fake_device.new_group()
    flats = [torch.arange(12.0).to(DEVICE) for _ in range(2)]
    for flat, is_shared in zip(flats, (True, False), strict=True):
        parameters = [nn.Parameter(flat[:5]), nn.Parameter(flat[5:].view(7, 1))]
        own = AdamW(parameters, lr=0.1, fused=True)
        sync = fastsync.attach(parameters, process_group=group)
        if is_shared:
            fastsync.shard_optimizer(sync, own)
        for _ in range(2):
            sum((each * (1.0 + rank)).square().sum() for each in parameters).backward()
            own.step()
            own.zero_grad()
    assert_bitwise_equal(flats[0].cpu(), flats[1].cpu(), "all parameters")
    overlapping = [nn.Parameter(flats[0][:5]), nn.Parameter(flats[0][4:])]
    with pytest.raises(ValueError, match="parameters 0 and 1 are views of one tensor"):
        fastsync.shard_optimizer(fastsync.attach(overlapping, process_group=group), AdamW(overlapping, fused=True))


def model_of(dtype: torch.dtype) -> Given:
    return Given([grad.to(DEVICE) for grad in random_grads(9, 9, SHAPES, dtype)]).to(DEVICE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world_size", "dtype"), [(3, torch.bfloat16), (2, torch.float32)])
@fake_device.on_ranks(cases={"optimizer": OPTIMIZERS})
def test_masters_are_stepped_as_float32_copies(rank: int, world_size: int, optimizer: str, dtype: torch.dtype) -> None:
    group = fake_device.new_group()
    model, plain = model_of(dtype), model_of(dtype)
    own = OPTIMIZERS[optimizer](model.parameters())
    reference = Reference(plain, "AdamW", Compression(reduce="fp32"), torch.bfloat16, process_group=group)
    reference.optimizer = OPTIMIZERS[optimizer](reference.masters)
    sync = fastsync.attach(model, process_group=group, bucket_cap_mb=0.1)
    fastsync.shard_optimizer(sync, own, master_weights=True, parameter_compression="bf16")
    for step in range(4):
        for each in (model, plain):
            each([grad.to(DEVICE) for grad in random_grads(rank, step, SHAPES, dtype)]).backward()
        norm = None
        if step == 2:
            norm = fastsync.clip_grad_norm_(sync, 0.5, optimizer=own if optimizer == "fused" else None)
        with watched():
            own.step()
        own.zero_grad()
        reference.step(NO_SCALER, norm)
    state = own.state_dict()["state"]
    for index, (parameter, expected) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
        assert_bitwise_equal(parameter.detach().cpu(), expected.detach().cpu(), f"parameter {index}")
        assert_bitwise_equal(state[index]["master"].cpu(), reference.masters[index].detach().cpu(), f"master {index}")

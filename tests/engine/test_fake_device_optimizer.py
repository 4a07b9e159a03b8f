"""``shard_optimizer`` on the fake device: the bits of attach and every rank's own step, in the order of streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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
from tests.models import Given, assert_same_on_all_ranks, random_grads
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


@fake_device.on_ranks(2, cases={"overlap_gather": [False, True]})
def test_a_failed_step_is_told_before_the_next(rank: int, world_size: int, overlap_gather: bool) -> None:
    group = fake_device.new_group()
    model = model_of(torch.float32)
    own = OPTIMIZERS["fused"](model.parameters())
    sync = fastsync.attach(model, process_group=group)
    fastsync.shard_optimizer(sync, own, overlap_gather=overlap_gather)
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


class Sharded:
    """A model whose optimizer ranks step together, and how a rank's gradients get there."""

    def __init__(
        self, rank: int, optimizer: str = "fused", compression: Compression | None = None, **options: bool
    ) -> None:
        self.rank, group = rank, fake_device.new_group()
        self.model = model_of(torch.float32)
        self.own = OPTIMIZERS[optimizer](self.model.parameters())
        self.sync = fastsync.attach(self.model, compression or "none", process_group=group, bucket_cap_mb=0.1)
        fastsync.shard_optimizer(self.sync, self.own, **options)

    def backward(self, number: int) -> None:
        self.own.zero_grad()
        self.model([grad.to(DEVICE) for grad in random_grads(self.rank, number, SHAPES, torch.float32)]).backward()

    def step(self, number: int) -> None:
        self.backward(number)
        self.own.step()

    def values(self) -> list[Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
@fake_device.on_ranks(cases={"optimizer": OPTIMIZERS})
def test_the_host_waits_for_the_device_in_the_first_step_alone(rank: int, world_size: int, optimizer: str) -> None:
    for number, compression in enumerate(COMPRESSIONS[world_size % 2 :: 2]):
        training = Sharded(rank, optimizer, compression, overlap_gather=number == 0)
        scaler = GradScaler(DEVICE, init_scale=8.0, enabled=optimizer == "fused")
        for number in range(5):
            grads = [grad.to(DEVICE) for grad in random_grads(rank, number, SHAPES, torch.float32)]
            if scaler.is_enabled() and number == 3 and rank == 1:
                grads[2].view(-1)[5] = torch.inf
            with watched(), fake_device.unwaited() if number > 0 else nullcontext():
                scaler.scale(training.model(grads)).backward()
                if number == 2:
                    fastsync.clip_grad_norm_(training.sync, 0.5, optimizer=training.own, scaler=scaler)
                scaler.step(training.own)
                scaler.update()
                training.own.zero_grad()


@fake_device.on_ranks(2, cases={"overlap_gather": [False, True]})
def test_a_turn_that_fails_behind_a_good_one_is_told(rank: int, world_size: int, overlap_gather: bool) -> None:
    training = Sharded(rank, overlap_gather=overlap_gather)
    training.step(0)
    training.backward(1)
    inner = training.sync._optimizer_shards._pieces.inner
    if rank == 1:
        turns, own_step = iter([True]), inner.step
        second_fails = patch.object(inner, "step", lambda: own_step() if next(turns, False) else 1 / 0)
        with second_fails, pytest.raises(ZeroDivisionError):
            training.own.step()
    else:
        training.own.step()
    training.backward(2)
    refused(training.own.step, "an earlier step of the optimizer has failed on rank 1", kind=RuntimeError)


@fake_device.on_ranks(2)
def test_a_parameter_that_left_its_memory_is_refused_on_all_ranks(rank: int, world_size: int) -> None:
    """The others get the values that were there."""
    training = Sharded(rank)
    for number in range(2):
        training.step(number)
    training.backward(2)
    if rank == 1:
        last = [*training.model.parameters()][-1]
        last.data = last.data.to(torch.bfloat16)
        refused(training.own.step, "left the memory", kind=RuntimeError)
    else:
        training.own.step()
    refused(training.own.step, kind=RuntimeError)


@fake_device.on_ranks(2)
def test_a_gradient_of_another_size_is_a_change(rank: int, world_size: int) -> None:
    training = Sharded(rank)
    for number in range(2):
        training.step(number)
    training.backward(2)
    if rank == 1:
        gradient = [*training.model.parameters()][-1].grad
        gradient.data = gradient.data.to(torch.bfloat16)
    training.own.step()
    refused(training.own.step, kind=RuntimeError)


Mistake = Callable[[Sharded, int], None]


def steps_at_another_rate(training: Sharded, number: int) -> None:
    if training.rank == 1:
        training.own.param_groups[0]["lr"] *= 2
    training.step(number)


def steps_at_another_rate_on_the_device(training: Sharded, number: int) -> None:
    training.own.param_groups[0]["lr"] = torch.tensor(0.1 * (1 + training.rank)).to(DEVICE)
    training.step(number)


def clips_otherwise(training: Sharded, number: int) -> None:
    training.backward(number)
    fastsync.clip_grad_norm_(training.sync, 0.5 + training.rank)
    training.own.step()


def drops_a_gradient(training: Sharded, number: int) -> None:
    training.backward(number)
    if training.rank == 1:
        training.model.weights[1].grad = None
    training.own.step()


def writes_unseen(training: Sharded, number: int) -> None:
    training.backward(number)
    if training.rank == 1:
        training.model.weights[2].grad.data.mul_(2)
    training.own.step()


def writes_seen(training: Sharded, number: int) -> None:
    training.backward(number)
    if training.rank == 1:
        training.model.weights[2].grad.mul_(2)
        refused(training.own.step, "gradient of weights.2 was changed since", kind=RuntimeError)
    else:
        training.own.step()


def finds_inf_alone(training: Sharded, number: int) -> None:
    training.backward(number)
    given = {"grad_scale": None, "found_inf": torch.tensor(float(training.rank)).to(DEVICE)}  # as a GradScaler does
    vars(training.own).update(given)
    training.own.step()
    for name in given:
        delattr(training.own, name)


LATE: list[tuple[Mistake, str]] = [
    (steps_at_another_rate, "have taken the newest step with different settings in param_groups: rank 1 is not as"),
    (steps_at_another_rate_on_the_device, "different settings in param_groups: rank 1 is not as rank 0"),
    (clips_otherwise, "different clips of the gradients"),
    (drops_a_gradient, "different parameters that have gradients"),
    (finds_inf_alone, "different finds of a GradScaler"),
    (writes_unseen, "gradient"),
    (writes_seen, "rank 1 has refused the newest step"),
]


@fake_device.on_ranks(2, cases={"mistake, told": LATE, "optimizer": ["fused", "owners"]})
def test_what_ranks_do_differently_is_an_error_before_the_next_step(
    rank: int, world_size: int, mistake: Mistake, told: str, optimizer: str
) -> None:
    training = Sharded(rank, optimizer)
    training.step(0)
    mistake(training, 1)
    assert_same_on_all_ranks(training.values())
    before = training.values()
    for number in (2, 3):
        training.backward(number)
        refused(training.own.step, told, "Load a checkpoint", kind=RuntimeError)
    for value, other in zip(training.values(), before, strict=True):
        assert_bitwise_equal(value, other, "a parameter")
    training.sync.detach()


@fake_device.on_ranks(2)
def test_a_checkpoint_or_detach_tells_of_the_last_step(rank: int, world_size: int) -> None:
    for end in (lambda training: training.own.state_dict(), lambda training: training.sync.detach()):
        training = Sharded(rank)
        training.step(0)
        steps_at_another_rate(training, 1)
        refused(lambda: end(training), "have taken the newest step with different settings", kind=RuntimeError)
        assert all(each["exp_avg"].device.type == DEVICE for each in training.own.state_dict()["state"].values())


@fake_device.on_ranks(2)
def test_ranks_that_all_refuse_a_step_may_go_on(rank: int, world_size: int) -> None:
    training = Sharded(rank)
    for number in range(3):
        training.step(2 * number)
        training.backward(2 * number + 1)
        training.model.weights[0].grad.mul_(2)
        before = training.values()
        refused(training.own.step, "weights.0 was changed since", kind=RuntimeError)
        for value, other in zip(training.values(), before, strict=True):
            assert_bitwise_equal(value, other, "a parameter")
    assert_same_on_all_ranks(training.values())


@pytest.mark.skipif(not hasattr(torch.Stream, "is_capturing"), reason="this torch asks no device for it")
@fake_device.on_ranks(2)
def test_a_graph_is_refused_before_anything_is_sent(rank: int, world_size: int) -> None:
    training = Sharded(rank)
    training.step(0)
    loss = training.model([torch.zeros_like(parameter) for parameter in training.model.parameters()])
    backend = fake_device.backend_of(training.sync._group)
    for number, call in ((1, loss.backward), (2, training.own.step)):
        training.backward(number)
        backend.fail_after(0)
        fake_device.load().begin_capture()
        refused(call, "train without the graph, or leave shard_optimizer out", kind=RuntimeError)
        fake_device.load().end_capture()
        backend.fail_after(-1)
        training.step(2 + number)
    assert_same_on_all_ranks(training.values())

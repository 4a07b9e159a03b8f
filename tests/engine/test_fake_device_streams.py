"""Which stream the engine uses when, on the fake device: side streams, two at once, devices, failed backwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression
from tests import fake_device
from tests.engine.attached import Fallible, assert_freed, assert_soon_none, references_to
from tests.fake_device import DEVICE, unwaited, watched
from tests.models import SMALL_BUCKETS, Given, assert_all_bitwise_equal, grads_of, random_grads
from tests.refused import refused

SHAPES = [(7, 33), (300,), (2, 3, 4), (513, 7)]
STEPS = 4
COMPRESSIONS = [
    Compression(),
    Compression("fp16"),
    Compression("int8", algorithm="one_shot", error_feedback=True),
    Compression("int8", algorithm="two_shot", error_feedback=True),
    Compression("fp16", reduce="fp32", algorithm="two_shot"),
    Compression("bf16", ranks_per_node=2),
]


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """As a trainer uses a side stream: it waits for what came before, and what comes after waits for it."""
    around = torch.accelerator.current_stream()
    stream.wait_stream(around)
    with stream:
        yield
    around.wait_stream(stream)


def _grads(rank: int, step: int) -> list[Tensor]:
    return random_grads(rank, step, SHAPES, torch.float32)


class Halves(nn.Module):
    """A ``Given`` model whose second half runs under another stream, so that its gradients come there."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Given(_grads(0, 0))
        self.beside = torch.Stream(device=DEVICE)

    def forward(self, grads: list[Tensor]) -> Tensor:
        first = self.given([*grads[:2], None, None])
        with _on(self.beside):
            second = self.given([None, None, *grads[2:]])
        second.record_stream(torch.accelerator.current_stream())
        return first + second


def _model(side: torch.Stream) -> nn.Module:
    return Given(_grads(0, 0)).to(DEVICE)


def _all_under_a_side_stream(side: torch.Stream, attach: Callable[[nn.Module], Any]) -> nn.Module:
    with _on(side):
        model = _model(side)
        attach(model)
    return model


def _attached_on_the_default_stream(side: torch.Stream, attach: Callable[[nn.Module], Any]) -> nn.Module:
    model = _model(side)
    attach(model)
    return model


def _in_two_halves(side: torch.Stream, attach: Callable[[nn.Module], Any]) -> nn.Module:
    model = Halves().to(DEVICE)
    attach(model)
    return model


WAYS = {
    "all under a side stream": _all_under_a_side_stream,
    "attached on the default stream": _attached_on_the_default_stream,
    "two streams in one forward": _in_two_halves,
}


def _trained(
    rank: int, model: nn.Module, device: str, side: torch.Stream | None = None, is_weighted: bool = False
) -> list[Tensor]:
    """The averages of all steps. With weights, nobody waits but streams, also for the weights of the last step."""
    sync = fastsync.handle_of(model)
    inputs = [[grad.to(device) for grad in _grads(rank, step)] for step in range(STEPS)]
    kept = []
    for step, grads in enumerate(inputs):
        is_quiet = side is not None and is_weighted and step >= 2
        with _on(side) if side else nullcontext(), unwaited() if is_quiet else nullcontext():
            if is_weighted:
                sync.set_weight(1.0 + step * rank)
                sync.piggyback("weight", torch.ones(2, device=device) * (1.0 + step * rank))
            model.zero_grad()
            model(grads).backward()
            kept += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            if is_weighted:
                kept.append(sync.piggybacked()["weight"].clone())
    return kept


def _averages_on_cpu(rank: int, compression: Compression, is_weighted: bool = False) -> list[Tensor]:
    model = Given(_grads(0, 0))
    sync = fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS)
    averages = _trained(rank, model, "cpu", is_weighted=is_weighted)
    sync.detach()
    return averages


@pytest.mark.parametrize(("world_size", "is_weighted"), [(4, False), (2, True)])
@fake_device.on_ranks(cases={"way": WAYS})
def test_attached_and_trained_under_side_streams(rank: int, world_size: int, way: str, is_weighted: bool) -> None:
    group = fake_device.new_group()
    warnings.simplefilter("error")  # torch warns of an accumulator that remembers another stream
    for compression in COMPRESSIONS[1::2] if world_size == 4 else COMPRESSIONS[:-1]:
        expected = _averages_on_cpu(rank, compression, is_weighted)
        with watched():
            side = torch.Stream(device=DEVICE)
            options = {"bucket_cap_mb": SMALL_BUCKETS, "process_group": group}
            model = WAYS[way](side, partial(fastsync.attach, compression=compression, **options))
            kept = _trained(rank, model, DEVICE, side, is_weighted)
            del model  # its memory, too, goes back while the device may be behind
            side.synchronize()
            assert_all_bitwise_equal([tensor.cpu() for tensor in kept], expected, f"{way}, {compression}: gradient")


@fake_device.on_ranks(2)
def test_hooked_and_trained_under_a_side_stream(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    for compression in COMPRESSIONS[:-1]:
        with watched():
            side = torch.Stream(device=DEVICE)
            inputs = [[grad.to(DEVICE) for grad in _grads(rank, step)] for step in range(STEPS)]
            with _on(side):
                ddp = DistributedDataParallel(_model(side), process_group=group, bucket_cap_mb=SMALL_BUCKETS)
                hook = fastsync.register_comm_hook(ddp, compression, process_group=group)
                for step, grads in enumerate(inputs):
                    with unwaited() if step >= 2 else nullcontext():
                        ddp.zero_grad()
                        ddp(grads).backward()
                        hook.grad_stats().grad_norm.sqrt()


class Apart(nn.Module):
    """Two layers on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Given(_grads(0, 0)).to(f"{DEVICE}:0")
        self.second = Given(_grads(0, 0)).to(f"{DEVICE}:1")

    def forward(self, grads: list[Tensor]) -> Tensor:
        first = self.first([grad.to(f"{DEVICE}:0") for grad in grads])
        return first.to(f"{DEVICE}:1") + self.second([grad.to(f"{DEVICE}:1") for grad in grads])


@fake_device.on_ranks(2)
def test_a_model_on_two_devices(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    for compression in COMPRESSIONS[:-1]:
        expected = _averages_on_cpu(rank, compression)
        with watched():
            inputs = [[grad.to(DEVICE) for grad in _grads(rank, step)] for step in range(STEPS)]
            model = Apart()
            fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS, process_group=group)
            kept: tuple[list[Tensor], list[Tensor]] = ([], [])
            for grads in inputs:
                model.zero_grad()
                model(grads).backward()
                for half, into in zip((model.first, model.second), kept, strict=True):
                    into += [parameter.grad.clone() for parameter in half.parameters() if parameter.grad is not None]
            for half in kept:
                actual = [tensor.cpu() for tensor in half]
                assert_all_bitwise_equal(actual, expected, f"{compression}: gradient")


class _OfBoth(nn.Module):
    """A frozen parameter on the CPU, and weights on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.given = Given(_grads(0, 0)).to(DEVICE)


@fake_device.on_ranks(2)
def test_an_engine_with_a_parameter_on_the_cpu_has_its_place_in_the_devices_order(rank: int, world_size: int) -> None:
    fake_device.load()
    group = dist.new_group(backend=f"cpu:gloo,{DEVICE}:{DEVICE}")
    assert isinstance(group, dist.ProcessGroup)
    fake_device.backend_of(group).bind()
    both, alone = _OfBoth(), Given(_grads(0, 0)).to(DEVICE)
    for model in (both, alone):
        fastsync.attach(model, process_group=group)
    for step in range(STEPS):
        both.zero_grad()
        alone.zero_grad()
        grads = [[grad.to(DEVICE) for grad in _grads(rank, step + 10 * index)] for index in range(2)]
        # What a forward makes last has its gradients first.
        first = both.given(grads[0]) if rank == 0 else alone(grads[1])
        second = alone(grads[1]) if rank == 0 else both.given(grads[0])
        (first + second).backward()
        for index, model in enumerate((both.given, alone)):
            everyone = [_grads(other, step + 10 * index) for other in range(world_size)]
            means = [(one + other) / 2 for one, other in zip(*everyone, strict=True)]
            assert_all_bitwise_equal([grad.cpu() for grad in grads_of(model)], means, f"step {step}, engine {index}")


@fake_device.on_ranks(2)
def test_failed_backwards_and_detach(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    for compression in COMPRESSIONS[:-1]:
        with watched():
            model = Fallible().to(DEVICE)
            sync = fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS, process_group=group)
            inputs = torch.ones(16, 32, device=DEVICE)
            for step in range(STEPS):
                model.zero_grad()
                model.fails = step == STEPS - 2 and rank == 0
                if model.fails:
                    refused(lambda: model(inputs).square().mean().backward(), "as told", kind=ArithmeticError)
                else:
                    model(inputs).square().mean().backward()
            grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            sync.detach()
            before = sync.stats().num_syncs
            model(inputs).square().mean().backward()
            assert sync.stats().num_syncs == before, "a hook was left behind"
            for grad in grads:
                assert grad.isfinite().all().item()


@fake_device.on_ranks(1)
def test_detach_and_synchronize_right_after_a_failed_backward(rank: int, world_size: int) -> None:
    """A device's thread tells of the failure before it lets go of what it was doing."""
    group = fake_device.new_group()
    inputs = torch.ones(16, 32, device=DEVICE)
    for attempt in range(100):
        model = Fallible().to(DEVICE)
        sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS, process_group=group, init_sync=False)
        model(inputs).square().mean().backward()
        model.fails = True
        loss = model(inputs).square().mean()
        try:
            loss.backward()
        except ArithmeticError:
            sync.synchronize() if attempt % 2 else sync.detach()


@fake_device.on_ranks(2)
def test_an_engine_and_its_memory_end_with_the_model(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    extension = fake_device.load()
    before = extension.allocated_bytes()
    for compression in COMPRESSIONS[:-1]:
        model = _model(torch.Stream(device=DEVICE))
        sync = fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS, process_group=group)
        for step in range(STEPS):
            sync.piggyback("kl", torch.ones(2, device=DEVICE))
            model([grad.to(DEVICE) for grad in _grads(rank, step)]).backward()
        references = references_to(model)
        del model, sync
        assert_freed(references)
        assert_soon_none(lambda: extension.allocated_bytes() - before)  # bytes that are kept

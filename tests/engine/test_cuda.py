"""The entry points on GPUs: the bits they give on a CPU, in stream order; the host never waits; steps are captured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync.sync.compression import AnyCompression
from fastsync.sync.synchronizer import GradientSynchronizer
from tests import reference
from tests.engine.attached import assert_flags_pair_up_after_failures, assert_soon_none
from tests.engine.captured import CHANGES, Change
from tests.engine.entry_points import Averaged, average
from tests.models import (
    SMALL_BUCKETS,
    Given,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    batch,
    grads_of,
    random_grads,
)
from tests.ranks import on_ranks
from tests.refused import refused

pytestmark = pytest.mark.gpu
on_one_and_two_ranks = pytest.mark.parametrize("world_size", [1, 2])
each_entry_point = pytest.mark.parametrize("entry_point", ["hook", "drop-in hook", "attach"])

WIRE_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = [(7, 33), (300,), (), (2, 3, 4), (513, 257)]
STEPS = 5
# Clock cycles for which a device is kept busy: about 10 ms and one second on GPUs of today.
SHORT, LONG = 20_000_000, 2_000_000_000


def _grads(rank: int, step: int) -> list[Tensor]:
    # None is so small that fp16 has only a subnormal for it. Then the bucket's scale, a power of two, cannot be seen in
    # the result, and the reference, to which all gradients are one bucket, stays exact for several.
    return [grad + grad.sign() / 64 for grad in random_grads(rank, step, SHAPES, torch.float32)]


def _begin(entry_point: str, wire: str) -> Averaged:
    return average(entry_point, Given([grad.to("cuda") for grad in _grads(0, 0)]), wire)


def _step(given: Averaged, grads: list[Tensor]) -> list[Tensor]:
    return [grad for grad in given.step([grad.to("cuda") for grad in grads]) if grad is not None]


def _assert_averages(given: Averaged, wire: str, rank: int, world_size: int) -> None:
    """Takes steps, and compares each with the reference and with the other ranks. Attached, rank 0 lacks a gradient."""
    device = next(given.model.parameters()).device
    is_attached = isinstance(given.handle, GradientSynchronizer)
    for step in range(STEPS):
        everyone = [_grads(other, step) for other in range(world_size)]
        mine: list[Tensor | None] = [grad.to(device) for grad in everyone[rank]]
        if step == 3 and is_attached:
            everyone[0][1] = torch.zeros_like(everyone[0][1])
            if rank == 0:
                mine[1] = None
        given.model.zero_grad()
        if is_attached:
            given.handle.piggyback("rank", torch.tensor([float(rank), 1.0], device=device))
        loss = given.model(mine)
        with torch.cuda.device(device):
            torch.cuda._sleep(SHORT)  # the gradients come late: who does not wait for their stream reads something else
        given.backward(loss)
        actual = [grad for grad in given.grads() if grad is not None]
        mean = reference.all_reduce_mean(everyone, WIRE_DTYPES[wire])
        if step == 3 and is_attached and world_size == 1:
            del mean[1]
        assert_all_bitwise_equal(actual, mean, f"{wire}: step {step}, gradient")
        assert_same_on_all_ranks(actual)
        if is_attached:
            assert given.handle.piggybacked()["rank"].tolist() == [(world_size - 1) / 2, 1.0]


@on_one_and_two_ranks
@each_entry_point
@on_ranks(backend="nccl")
def test_gradients_are_bitwise_the_reference(rank: int, world_size: int, entry_point: str) -> None:
    for wire in WIRE_DTYPES:
        given = _begin(entry_point, wire)
        _assert_averages(given, wire, rank, world_size)
        assert len(given.handle.stats().buckets) >= 3


@each_entry_point
@on_ranks(2, backend="nccl")
def test_backward_on_a_side_stream(rank: int, world_size: int, entry_point: str) -> None:
    side = torch.cuda.Stream()
    for wire in WIRE_DTYPES:
        with torch.cuda.stream(side):
            given = _begin(entry_point, wire)
        torch.cuda._sleep(LONG)  # keeps the default stream busy: what ran there by mistake would come too late
        with torch.cuda.stream(side):
            _assert_averages(given, wire, rank, world_size)
        torch.cuda.synchronize()


@on_one_and_two_ranks
@pytest.mark.parametrize("entry_point", ["hook", "attach"])
@on_ranks(backend="nccl")
def test_grad_stats_and_clipping_are_torchs(rank: int, world_size: int, entry_point: str) -> None:
    for wire in WIRE_DTYPES:
        given = _begin(entry_point, wire)
        for step, max_norm in enumerate((0.5, 1e4, 0.5)):
            grads = [grad.to("cuda") for grad in _grads(rank, step)]
            averaged = [grad for grad in given.step(grads) if grad is not None]
            in_float64 = [nn.Parameter(grad.double()) for grad in averaged]
            for parameter in in_float64:
                parameter.grad = parameter.detach().clone()
            expected_norm = nn.utils.clip_grad_norm_(in_float64, max_norm)
            given.model.zero_grad()
            given.backward(given.model(grads))  # nobody reads a .grad now, so clipping takes the norm that is known
            stats = given.handle.grad_stats()
            torch.testing.assert_close(stats.grad_norm.double(), expected_norm, rtol=1e-7, atol=0.0)
            assert (stats.num_nonfinite.item(), stats.num_saturated.item()) == (0, 0)

            norm = fastsync.clip_grad_norm_(given.handle, max_norm)
            assert norm.item() == stats.grad_norm.item()
            for actual, parameter in zip(grads_of(given.model), in_float64, strict=True):
                # The norm, its sum with 1e-6, the reciprocal and two products are rounded to float32: 5 · 2^-24.
                torch.testing.assert_close(actual.double(), parameter.grad, rtol=3e-7, atol=0.0)
            if max_norm > expected_norm.item():
                assert_all_bitwise_equal(grads_of(given.model), averaged, "gradient below the maximum")
            assert_same_on_all_ranks([norm, *grads_of(given.model)])

        broken = _grads(rank, 0)
        if rank == world_size - 1:
            broken[0][3, 4], broken[4][512, 256] = float("inf"), float("nan")
        averaged = _step(given, broken)
        assert (averaged[0][3, 4].isinf().item(), averaged[4][512, 256].isnan().item()) == (True, True)
        stats = given.handle.grad_stats()
        assert (stats.num_nonfinite.item(), stats.num_saturated.item()) == (2, 0)


@on_one_and_two_ranks
@pytest.mark.parametrize("entry_point", ["hook", "attach"])
@on_ranks(backend="nccl")
def test_the_host_never_waits_for_the_device(rank: int, world_size: int, entry_point: str) -> None:
    for wire in WIRE_DTYPES:
        given = average(entry_point, Mlp().to("cuda"), wire)
        rides = isinstance(given.handle, GradientSynchronizer)
        optimizer = torch.optim.Adam(given.model.parameters(), fused=True)
        batches = [batch(rank, step).to("cuda") for step in range(STEPS)]
        kl = torch.tensor(float(rank), device="cuda")
        for step, inputs in enumerate(batches, start=1):
            if step == 3:  # DDP has rebuilt its buckets by now, and the ranks have agreed on them
                torch.cuda.set_sync_debug_mode("error")
            if step == STEPS:  # that mode does not see every wait, so the host is to be done while the device is not
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
                torch.cuda._sleep(LONG)
                slept = torch.cuda.current_stream().record_event()
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            if rides:
                given.handle.piggyback("kl", kl)
            given.backward(given.model(inputs).square().mean())
            fastsync.clip_grad_norm_(given.handle, 0.01, **({"optimizer": optimizer} if rides else {}))
            optimizer.step()
        assert not slept.query(), "the host waited for the device"
        refused(lambda: given.handle.grad_stats().grad_norm.item(), "synchronizing CUDA operation", kind=RuntimeError)
        torch.cuda.set_sync_debug_mode("default")
        assert_same_on_all_ranks(list(given.model.parameters()))


# ---- steps that a CUDA graph captures -------------------------------------------------------------------------------


class _Training:
    """A model whose steps can be captured in a CUDA graph."""

    def __init__(self, wire: AnyCompression) -> None:
        torch.manual_seed(1)
        self.model = Mlp().to("cuda")
        self.sync = fastsync.attach(self.model, wire, bucket_cap_mb=SMALL_BUCKETS)
        self._optimizer = torch.optim.Adam(self.model.parameters(), fused=True, capturable=True)
        self.piggybacks: Tensor | None = None

    def backward(self, inputs: Tensor) -> None:
        self.model.zero_grad(set_to_none=False)
        if self.piggybacks is not None:
            self.sync.piggyback("value", self.piggybacks * 2)
        self.model(inputs).square().mean().backward()

    def step(self, inputs: Tensor) -> None:
        self._optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        fastsync.clip_grad_norm_(self.sync, 0.01, optimizer=self._optimizer)
        self._optimizer.step()


def _captured(call: Any, inputs: Tensor, *others: Any) -> torch.cuda.CUDAGraph:
    """After steps on a side stream, as torch asks of what is to be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for each in (call, *others):
            for _ in range(STEPS):
                each(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(inputs)
    return graph


@on_one_and_two_ranks
@on_ranks(backend="nccl")
def test_a_captured_step_is_the_eager_one(rank: int, world_size: int) -> None:
    """What is attached on the default stream, too: the accumulators are those of the captured forward."""
    for wire in (*WIRE_DTYPES, fastsync.Compression("int8", error_feedback=True)):
        inputs = batch(rank, 0).to("cuda")
        eager, captured = _Training(wire), _Training(wire)
        graph = _captured(captured.step, inputs, eager.step)
        for number in range(1, STEPS):
            inputs.copy_(batch(rank, number))
            graph.replay()
            eager.step(inputs)
            expected = list(eager.model.parameters())
            assert_all_bitwise_equal(list(captured.model.parameters()), expected, f"{wire}: step {number}, parameter")
        assert_same_on_all_ranks(list(captured.model.parameters()))


@on_ranks(2, backend="nccl")
def test_every_replay_of_a_captured_step_may_be_clipped(rank: int, world_size: int) -> None:
    training, inputs = _Training("none"), batch(rank, 0).to("cuda")
    graph = _captured(training.backward, inputs)
    for number in range(1, STEPS):
        inputs.copy_(batch(rank, number))
        graph.replay()
        expected = torch.nn.utils.get_total_norm(grads_of(training.model))
        torch.testing.assert_close(fastsync.clip_grad_norm_(training.sync, 0.01), expected, rtol=1e-6, atol=0.0)


@on_ranks(1, backend="nccl")
def test_piggybacked_values_of_a_captured_step(rank: int, world_size: int) -> None:
    """In a graph it is what it computes anew in each replay; a value of before would be sent again and again."""
    training, inputs = _Training("none"), batch(rank, 0).to("cuda")
    value = training.piggybacks = torch.zeros(2, device="cuda")
    graph = _captured(training.backward, inputs)
    for number in range(STEPS):
        value.fill_(number + rank)
        graph.replay()
        assert training.sync.piggybacked()["value"].tolist() == [2 * number + world_size - 1.0] * 2
    training.piggybacks = None
    training.sync.piggyback("value", value)
    message = "'value' was piggybacked outside of the CUDA graph that is captured, or on the CPU"
    with pytest.raises(ValueError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        training.backward(inputs)


@on_ranks(1, backend="nccl")
def test_a_step_frees_what_a_deleted_captured_step_has_kept(rank: int, world_size: int) -> None:
    training, inputs = _Training(fastsync.Compression("int8", error_feedback=True)), batch(rank, 0).to("cuda")
    graph = _captured(training.backward, inputs)
    training.sync.compression = "none"  # from now on only the graph has the residuals
    for _ in range(STEPS):
        training.backward(inputs)
    held = torch.cuda.memory_allocated()
    del graph

    def is_held() -> bool:
        training.backward(inputs)
        return torch.cuda.memory_allocated() >= held

    assert_soon_none(is_held)  # CUDA's own thread tells when a graph has gone


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2, backend="nccl")
def test_a_captured_step_goes_on_whatever_the_engine_changes(rank: int, world_size: int, change: Change) -> None:
    """Memory that the engine lets go is written by others, and the replay must not read it."""
    for wire in ("fp16", fastsync.Compression("int8", error_feedback=True)):
        training, inputs = _Training(wire), batch(rank, 0).to("cuda")
        graph = _captured(training.backward, inputs)
        graph.replay()
        grads = [parameter.grad for parameter in training.model.parameters()]
        expected = [grad.clone() for grad in grads]
        change(training, partial(training.backward, inputs), "cuda")
        others = [torch.full((size,), float("nan"), device="cuda") for size in (1, 100, 10_000) for _ in range(100)]
        graph.replay()
        # fp16 may have another scale by now, and int8 has other residuals: a step of it is 1/127 of the largest value.
        share = 2**-10 if wire == "fp16" else 1 / 32
        largest = max(each.abs().max().item() for each in expected)
        for grad, before in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, before, rtol=0.0, atol=share * largest)
        assert_same_on_all_ranks(grads)
        del others, graph


@on_ranks(2, backend="nccl")
def test_a_collective_of_ones_own_pairs_up_after_an_abandoned_step(rank: int, world_size: int) -> None:
    assert dist.group.WORLD is not None
    assert_flags_pair_up_after_failures(rank, STEPS, dist.group.WORLD, "cuda")


@on_ranks(1, backend="nccl")
def test_captured_weights_are_refused(rank: int, world_size: int) -> None:
    training, inputs = _Training("none"), batch(rank, 0).to("cuda")
    training.sync.set_weight(2.0)
    refused(lambda: _captured(training.step, inputs), "a CUDA graph repeats the weights of the step")

"""attach on GPUs: the bits it gives on a CPU, in stream order, riders in a grouped call; the host never waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastsync
from fastsync import reference
from fastsync.compression import AnyCompression
from tests.bitwise import assert_bitwise_equal
from tests.engine.test_ddp_cuda import LONG, SHORT, STEPS, WIRE_DTYPES, _grads
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
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
on_one_and_two_ranks = pytest.mark.parametrize("world_size", [1, 2])


def _assert_averages(model: Given, sync: fastsync.GradientSynchronizer, wire: str, rank: int, world_size: int) -> None:
    for step in range(STEPS):
        everyone: list[list[Tensor]] = [_grads(other, step) for other in range(world_size)]
        mine: list[Tensor | None] = [grad.to("cuda") for grad in everyone[rank]]
        if step == 3:
            everyone[0][1] = torch.zeros_like(everyone[0][1])
            if rank == 0:
                mine[1] = None
        model.zero_grad()
        sync.piggyback("rank", torch.tensor([float(rank), 1.0], device="cuda"))
        loss = model(mine)
        torch.cuda._sleep(SHORT)  # the gradients come late: who does not wait for their stream reads something else
        loss.backward()
        if step == 3 and world_size == 1:
            assert model.weights[1].grad is None
            continue
        mean = reference.all_reduce_mean(everyone, WIRE_DTYPES[wire])
        assert_all_bitwise_equal(grads_of(model), mean, f"{wire}: step {step}, gradient")
        assert sync.piggybacked()["rank"].tolist() == [(world_size - 1) / 2, 1.0]
        assert_same_on_all_ranks(grads_of(model))


def _averages(rank: int, world_size: int) -> None:
    for wire in WIRE_DTYPES:
        model = Given([grad.to("cuda") for grad in _grads(0, 0)])
        sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
        _assert_averages(model, sync, wire, rank, world_size)


@on_one_and_two_ranks
def test_gradients_are_bitwise_the_reference(world_size: int) -> None:
    run_ranks(_averages, world_size, backend="nccl")


def _side_stream(rank: int, world_size: int) -> None:
    side = torch.cuda.Stream()
    for wire in WIRE_DTYPES:
        with torch.cuda.stream(side):
            model = Given([grad.to("cuda") for grad in _grads(0, 0)])
            sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
        torch.cuda._sleep(LONG)  # keeps the default stream busy: what ran there by mistake would come too late
        with torch.cuda.stream(side):
            _assert_averages(model, sync, wire, rank, world_size)
        torch.cuda.synchronize()


def test_backward_on_a_side_stream() -> None:
    run_ranks(_side_stream, 2, backend="nccl")


def _host_never_waits(rank: int, world_size: int) -> None:
    for wire in WIRE_DTYPES:
        model = Mlp().to("cuda")
        sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        batches = [batch(rank, step).to("cuda") for step in range(STEPS)]
        kl = torch.tensor(float(rank), device="cuda")
        for step, inputs in enumerate(batches, start=1):
            if step == 3:  # the ranks have agreed by now
                torch.cuda.set_sync_debug_mode("error")
            if step == STEPS:  # that mode does not see every wait, so the host is to be done while the device is not
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
                torch.cuda._sleep(LONG)
                slept = torch.cuda.current_stream().record_event()
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            sync.piggyback("kl", kl)
            model(inputs).square().mean().backward()
            fastsync.clip_grad_norm_(sync, 0.01, optimizer=optimizer)
            optimizer.step()
        assert not slept.query(), "the host waited for the device"
        torch.cuda.set_sync_debug_mode("default")
        assert_same_on_all_ranks(list(model.parameters()))


@on_one_and_two_ranks
def test_the_host_never_waits_for_the_device(world_size: int) -> None:
    run_ranks(_host_never_waits, world_size, backend="nccl")


class _Training:
    """A model whose steps can be captured in a CUDA graph."""

    def __init__(self, wire: AnyCompression) -> None:
        torch.manual_seed(1)
        self.model = Mlp().to("cuda")
        self._sync = fastsync.attach(self.model, wire, bucket_cap_mb=SMALL_BUCKETS)
        self._optimizer = torch.optim.Adam(self.model.parameters(), fused=True, capturable=True)

    def step(self, inputs: Tensor) -> None:
        self._optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        fastsync.clip_grad_norm_(self._sync, 0.01, optimizer=self._optimizer)
        self._optimizer.step()


def _warm_up(*trainings: _Training, inputs: Tensor) -> None:
    """Steps on a side stream, as torch asks of what is to be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for training in trainings:
            for _ in range(STEPS):
                training.step(inputs)
    torch.cuda.current_stream().wait_stream(side)


def _replays(rank: int, world_size: int) -> None:
    """What is attached on the default stream, too: the accumulators are those of the captured forward.

    Stochastic rounding follows the replays as it does the eager steps.
    """
    int8 = [fastsync.Compression("int8", error_feedback=True), fastsync.Compression("int8", rounding="stochastic")]
    for wire in (*WIRE_DTYPES, *int8):
        inputs = batch(rank, 0).to("cuda")
        eager, captured = _Training(wire), _Training(wire)
        _warm_up(eager, captured, inputs=inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.step(inputs)
        for number in range(1, STEPS):
            inputs.copy_(batch(rank, number))
            graph.replay()
            eager.step(inputs)
            expected = list(eager.model.parameters())
            assert_all_bitwise_equal(list(captured.model.parameters()), expected, f"{wire}: step {number}, parameter")
        assert_same_on_all_ranks(list(captured.model.parameters()))


@on_one_and_two_ranks
def test_a_captured_step_is_the_eager_one(world_size: int) -> None:
    run_ranks(_replays, world_size, backend="nccl")


def _clips_what_a_graph_left(rank: int, world_size: int) -> None:
    model = Mlp().to("cuda")
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    inputs = batch(rank, 0).to("cuda")

    def backward() -> None:
        model.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(STEPS):
            backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward()
    for number in range(1, STEPS):
        inputs.copy_(batch(rank, number))
        graph.replay()
        expected = torch.nn.utils.get_total_norm(grads_of(model))
        torch.testing.assert_close(fastsync.clip_grad_norm_(sync, 0.01), expected, rtol=1e-6, atol=0.0)


def test_every_replay_of_a_captured_step_may_be_clipped() -> None:
    run_ranks(_clips_what_a_graph_left, 2, backend="nccl")


def _schedule(rank: int, world_size: int) -> None:
    training = _Training(fastsync.Schedule({0: "none", 1000: "fp16"}))
    inputs = batch(rank, 0).to("cuda")
    _warm_up(training, inputs=inputs)
    with (
        pytest.raises(ValueError, match="a CUDA graph repeats the step that it has captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        training.step(inputs)


def test_a_captured_schedule_is_refused() -> None:
    run_ranks(_schedule, 1, backend="nccl")


def _captured_riders(rank: int, world_size: int) -> None:
    """What rides in a graph is what it computes anew in each replay; a value of before would ride again and again."""
    model = Mlp().to("cuda")
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    inputs = batch(rank, 0).to("cuda")
    value = torch.zeros(2, device="cuda")

    def step(rides: bool = True) -> None:
        model.zero_grad(set_to_none=False)
        if rides:
            sync.piggyback("value", value * 2)
        model(inputs).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(STEPS):
        value.fill_(number + rank)
        graph.replay()
        assert sync.piggybacked()["value"].tolist() == [2 * number + world_size - 1.0] * 2
    message = "rider 'value' was given outside of the CUDA graph that is captured, or on the CPU"
    sync.piggyback("value", value)
    with pytest.raises(ValueError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(rides=False)


def test_riders_of_a_captured_step() -> None:
    run_ranks(_captured_riders, 1, backend="nccl")


def _captured_weights(rank: int, world_size: int) -> None:
    training = _Training("none")
    training._sync.set_weight(2.0)
    inputs = batch(rank, 0).to("cuda")
    _warm_up(training, inputs=inputs)
    with (
        pytest.raises(ValueError, match="a CUDA graph repeats the weights of the step that it captures"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        training.step(inputs)


def test_captured_weights_are_refused() -> None:
    run_ranks(_captured_weights, 1, backend="nccl")


def _weights(rank: int, world_size: int) -> None:
    for wire in WIRE_DTYPES:
        model = Given([grad.to("cuda") for grad in _grads(0, 0)])
        sync = fastsync.attach(model, wire, bucket_cap_mb=1000.0)
        for step in range(STEPS):
            weights = [1.0 + 4096.0**step * other for other in range(world_size)]
            sync.set_weight(weights[rank])
            everyone = [_grads(other, 0) for other in range(world_size)]
            model.zero_grad()
            model([grad.to("cuda") for grad in everyone[rank]]).backward()
            mean = reference.all_reduce_mean(everyone, WIRE_DTYPES[wire], weights=weights)
            for got, expected in zip(grads_of(model), mean, strict=True):
                torch.testing.assert_close(got.cpu(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
            assert sync.grad_stats().num_saturated.item() == 0
            assert_same_on_all_ranks(grads_of(model))


@on_one_and_two_ranks
def test_weighted_means(world_size: int) -> None:
    run_ranks(_weights, world_size, backend="nccl")


def _gloo(rank: int, world_size: int) -> None:
    """Gradients go to the host, and come back with a CPU's bits."""
    averages = []
    for device in ("cpu", "cuda"):
        model = Given([torch.zeros(300, 7)]).to(device)
        sync = fastsync.attach(model)
        model([grad.to(device) for grad in random_grads(rank, 0, [(300, 7)], torch.float32)]).backward()
        averages += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        assert sync.stats().kernels == "fused"
    assert_bitwise_equal(averages[1], averages[0])


def test_gradients_on_a_gpu_over_gloo() -> None:
    run_ranks(_gloo, 2, backend="gloo")

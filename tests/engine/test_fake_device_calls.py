"""What the engine asks of a process group that groups calls as NCCL does: how often, in what sizes, and what becomes of
an error in the middle."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import fastsync
from fastsync import Compression
from tests import fake_device
from tests.fake_device import DEVICE
from tests.models import Given, random_grads

SHAPES = [(7, 33), (300,), (2, 3, 4), (513, 7)]
FP32 = {"reduce": "fp32"}
# One call for each step of the network.
ONE_STEP = {("_allgather_base", False): 1}
TWO_STEPS = {("alltoall", False): 1, ("_allgather_base", False): 1}


def _model() -> Given:
    return Given(random_grads(0, 0, SHAPES, torch.float32)).to(DEVICE)


def _step(model: Given, rank: int, step: int) -> None:
    model.zero_grad()
    model([grad.to(DEVICE) for grad in random_grads(rank, step, SHAPES, torch.float32)]).backward()


def _counts(rank: int, world_size: int, compression: Compression, expected: Counter[tuple[str, bool]]) -> None:
    _counts_in(fake_device.new_group(), rank, compression, expected)


def _counts_in(
    group: dist.ProcessGroup, rank: int, compression: Compression, expected: Counter[tuple[str, bool]]
) -> None:
    backend = fake_device.backend_of(group)
    model = _model()
    sync = fastsync.attach(model, compression, process_group=group)  # one bucket
    for step in range(4):
        backend.take_calls()
        sync.piggyback("kl", torch.ones(1, device=DEVICE))
        _step(model, rank, step)
    calls = backend.take_calls()
    assert Counter((call.name, call.is_in_group) for call in calls) == expected
    for call in calls:
        assert call.alignment >= 16, f"{call.name} of {call.nbytes} bytes begins at a multiple of {call.alignment}"


@pytest.mark.parametrize(
    ("compression", "expected"),
    [
        (Compression(), {("allreduce", False): 1}),
        (Compression("bf16"), {("allreduce", True): 2}),  # one group: the riders stay float32
        (Compression("fp16", **FP32, algorithm="one_shot"), ONE_STEP),
        (Compression("fp16", **FP32, algorithm="two_shot"), TWO_STEPS),
        (Compression("int8", algorithm="one_shot"), ONE_STEP),
        (Compression("int8", algorithm="two_shot"), TWO_STEPS),
    ],
    ids=str,
)
def test_calls_of_a_step_and_their_alignment(compression: Compression, expected: dict[tuple[str, bool], int]) -> None:
    fake_device.run_ranks(_counts, 3, compression, Counter(expected))


def _counts_among_many(rank: int, world_size: int) -> None:
    for many in (2, 8, 64):
        group = fake_device.pretended_group(many)
        for algorithm, expected in (("one_shot", ONE_STEP), ("two_shot", TWO_STEPS)):
            _counts_in(group, 0, Compression("int8", algorithm=algorithm), Counter(expected))


def test_calls_do_not_grow_with_the_number_of_ranks() -> None:
    fake_device.run_ranks(_counts_among_many, 1)


def _counts_on_two_levels(rank: int, world_size: int) -> None:
    # Parts of a group have no collectives of their own: each of the four steps is one launch of messages.
    expected = {("send", True): 4, ("recv", True): 4}
    _counts_in(fake_device.new_group(), rank, Compression("int8", ranks_per_node=2), Counter(expected))


def test_calls_on_two_levels() -> None:
    fake_device.run_ranks(_counts_on_two_levels, 4)


def _fails_in_a_group(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    backend = fake_device.backend_of(group)
    for compression, calls in (
        (Compression(), 1),
        (Compression("bf16"), 2),
        (Compression("fp16", **FP32, algorithm="one_shot"), 1),
        (Compression("int8", algorithm="two_shot"), 2),
    ):
        num_calls = 1
        failing = 0
        while failing < num_calls:
            model = _model()
            sync = fastsync.attach(model, compression, process_group=group)
            for step in range(2):
                backend.take_calls()
                sync.piggyback("kl", torch.ones(1, device=DEVICE))
                _step(model, rank, step)
            num_calls = len(backend.take_calls())
            backend.fail_after(failing)
            sync.piggyback("kl", torch.ones(1, device=DEVICE))
            with pytest.raises(RuntimeError, match=rf"averaging bucket 0 failed on rank {rank} of 2: .*told to"):
                _step(model, rank, 2)
            assert not backend.is_open(), f"{compression}: the group is still open after call {failing} failed"
            sync.detach()
            failing += 1
        assert num_calls == calls


def test_an_error_in_a_group_leaves_none_open_and_names_the_bucket() -> None:
    fake_device.run_ranks(_fails_in_a_group, 2)

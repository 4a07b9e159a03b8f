"""Steps that a graph captures, on the fake device: what a replay touches is still there, whatever came in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastsync
from fastsync import Compression
from tests import fake_device
from tests.bitwise import assert_bitwise_equal
from tests.engine.captured import CHANGES, Change
from tests.fake_device import DEVICE, watched
from tests.models import Given, random_grads

SHAPES = [(7, 33), (3,), (300,), (513, 7), (5,)]
SMALL_BUCKETS = 1e-3  # three buckets; the kernels find the gradients of two of them by tables
WIRES = [
    Compression(),
    Compression("fp16"),
    Compression("fp16", reduce="fp32", algorithm="two_shot", error_feedback=True),
    Compression("int8", algorithm="two_shot", error_feedback=True),
]

pytestmark = pytest.mark.skipif(not hasattr(torch.Stream, "is_capturing"), reason="this torch asks no device for it")


class Training:
    """A model, and the gradients that each of its steps has."""

    def __init__(self, rank: int, compression: Compression, group: dist.ProcessGroup) -> None:
        self.model = Given(random_grads(0, 0, SHAPES, torch.float32)).to(DEVICE)
        self.sync = fastsync.attach(self.model, compression, bucket_cap_mb=SMALL_BUCKETS, process_group=group)
        self._grads = [grad.to(DEVICE) for grad in random_grads(rank, 1, SHAPES, torch.float32)]
        self._rank = rank

    def step(self) -> None:
        self.model.zero_grad(set_to_none=False)
        self.model(self._grads).backward()

    def captured(self) -> int:
        """The number of the graph of one step."""
        extension = fake_device.load()
        extension.begin_capture()
        try:
            self.step()
        finally:
            graph = extension.end_capture()
        return int(graph)


@fake_device.on_ranks(2, cases={"change": CHANGES})
def test_what_a_replay_touches_outlives_changes_of_the_engine(rank: int, world_size: int, change: Change) -> None:
    group = fake_device.new_group()
    for compression in WIRES:
        with watched():
            training = Training(rank, compression, group)
            for _ in range(3):
                training.step()
            graph = training.captured()
            fake_device.load().replay(graph)
            change(training, training.step, DEVICE)
            fake_device.load().replay(graph)


def scales_and_residuals(state: dict[str, Any]) -> dict[str, Tensor | float]:
    return {**state["scales"], **{f"residual of {name}": each for name, each in state["residuals"].items()}}


@fake_device.on_ranks(2)
def test_a_loaded_state_is_written_in_place(rank: int, world_size: int) -> None:
    """The graph keeps its memory, so a state that lay anywhere else would take more."""
    group = fake_device.new_group()
    allocated_bytes = fake_device.load().allocated_bytes
    for compression in WIRES[1:]:
        training = Training(rank, compression, group)
        for _ in range(3):
            training.step()
        state = training.sync.state_dict()
        expected = {name: torch.as_tensor(each).clone() for name, each in scales_and_residuals(state).items()}
        training.captured()
        training.step()
        before = allocated_bytes()
        training.sync.load_state_dict({**state, "residuals": {}})
        for name, each in training.sync.state_dict()["residuals"].items():
            assert_bitwise_equal(each, torch.zeros_like(each), f"{compression}: {name}")
        training.sync.load_state_dict(state)
        assert allocated_bytes() == before
        for name, each in scales_and_residuals(training.sync.state_dict()).items():
            assert_bitwise_equal(torch.as_tensor(each), expected[name], f"{compression}: {name}")


@fake_device.on_ranks(2)
def test_an_optimizers_step_after_a_replay_does_not_wait(rank: int, world_size: int) -> None:
    training = Training(rank, Compression(), fake_device.new_group())
    optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-3)
    for _ in range(3):
        training.step()
        optimizer.step()
    graph = training.captured()
    for _ in range(3):
        fake_device.load().replay(graph)
        with fake_device.unwaited():
            optimizer.step()

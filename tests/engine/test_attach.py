"""What attach computes: the gradients that one process would have had for all samples, on every rank the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.models import (
    SMALL_BUCKETS,
    Given,
    assert_all_bitwise_equal,
    grads_of,
    random_grads,
)
from tests.ranks import on_ranks

SHAPES = [(7, 33), (5,), (300,), (), (2, 3, 4), (1,)]


def _synced(model: Given, grads: list[Tensor | None]) -> list[Tensor]:
    model.zero_grad()
    model(grads).backward()
    return [grad.clone() for grad in grads_of(model)]


# ---- against the specification ----------------------------------------------------------------------------------


@on_ranks(2)
def test_fp16_scales_follow_as_in_the_hook(rank: int, world_size: int) -> None:
    """Over steps whose magnitudes change a lot, attach and the hook give the same bits and keep the same scales."""
    like = random_grads(0, 0, SHAPES, torch.float32)
    model, ddp = Given(like), DistributedDataParallel(Given(like))
    sync, hook = fastsync.attach(model, "fp16"), fastsync.register_comm_hook(ddp, "fp16")
    for step, factor in enumerate((1.0, 1.0, 1e4, 1e-3, 1e-3, 1e-6, 0.0, 1.0, 1e9)):
        mine = [grad * factor for grad in random_grads(rank, step, SHAPES, torch.float32)]
        ddp.zero_grad()
        ddp(mine).backward()
        actual = _synced(model, mine)
        if step < 2:  # DDP regroups its buckets after the first, which start anew
            sync.load_state_dict(hook.state_dict())
            continue
        assert_all_bitwise_equal(actual, grads_of(ddp), f"step {step}")
        assert sync.state_dict() == hook.state_dict()
        assert torch.equal(sync.grad_stats().num_saturated, hook.grad_stats().num_saturated)


# ---- kinds of parameters ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_gradients_that_share_memory_or_have_another_type(rank: int, world_size: int) -> None:
    # Two gradients in one memory, each in a bucket of its own.
    first, second, small = (nn.Parameter(torch.zeros(shape)) for shape in ((20, 20), (400,), (3,)))
    sync = fastsync.attach([first, second, small], bucket_cap_mb=SMALL_BUCKETS)
    for _ in range(3):
        for parameter in (first, second, small):
            parameter.grad = None
        loss = (small * (rank + 1)).sum()
        (loss + ((first.view(-1) + second.view(400)) * (rank + 1)).sum()).backward()
        assert first.grad.data_ptr() == second.grad.data_ptr(), "they do not share memory: nothing is shown"
        for parameter in (first, second, small):
            assert torch.equal(parameter.grad, torch.full_like(parameter, 1.5))
    assert len(sync.stats().buckets) == 3

    # A gradient with the conjugate bit.
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    fastsync.attach([weight])
    (weight.conj() * torch.tensor(1.0 + 2.0j * (rank + 1))).real.sum().backward()
    assert torch.equal(weight.grad.resolve_conj(), torch.full((3,), 1.0 + 3.0j))

    # Gradients of another dtype than their parameter's, of which one is missing on one rank.
    weights = [nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)) for _ in range(2)]
    for weight in weights:
        weight.grad_dtype = torch.float32
    fastsync.attach(weights)
    for step in range(2):
        for weight in weights:
            weight.grad = None
        loss = weights[0].float().sum() * (rank + 1)
        if rank == 0 or step == 0:
            loss = loss + weights[1].float().sum() * (rank + 1)
        loss.backward()
        assert weights[0].grad.unique().tolist() == [1.5]
        assert weights[1].grad.unique().tolist() == [1.5 if step == 0 else 0.5]


# ---- buckets ----------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Layers used in the order of their sizes, whatever the order in which they were registered."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({str(size): nn.Parameter(torch.ones(size * 256)) for size in order})

    def forward(self, inputs: Tensor) -> Tensor:
        total = inputs
        for size in sorted(self.scales, key=int):
            total = total * (self.scales[size].sum() / self.scales[size].numel())
        return total


@on_ranks(2)
def test_buckets_follow_the_first_backward(rank: int, world_size: int) -> None:
    model = Chain([2, 4, 1, 3])
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)  # 256 elements
    for _ in range(2):
        model(torch.ones(())).backward()
        assert [bucket.numel for bucket in sync.stats().buckets] == [4 * 256, 3 * 256, 2 * 256, 256]


@on_ranks(2)
def test_buckets_are_sent_while_backward_goes_on(rank: int, world_size: int) -> None:
    model = Chain([1, 2, 3])
    fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    model(torch.ones(())).backward()
    with torch.profiler.profile() as profile:
        model(torch.ones(())).backward()
    names = [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]
    ours = [name for name in names if name.startswith("fastsync::")]
    assert ours == ["fastsync::pack"] * 3 + ["fastsync::wait", "fastsync::unpack"] * 3
    last_multiply = max(index for index, name in enumerate(names) if "MulBackward" in name)
    assert names.index("fastsync::pack") < last_multiply, "nothing was sent before backward was over"


@on_ranks(2)
def test_the_first_of_several_buckets_is_small(rank: int, world_size: int) -> None:
    mib = 2**20
    floats = [nn.Parameter(torch.ones(mib // 4)) for _ in range(4)]
    doubles = [nn.Parameter(torch.ones(mib // 8, dtype=torch.float64)) for _ in range(2)]
    sync = fastsync.attach([*floats, *doubles], fastsync.Compression("int8", error_feedback=True), bucket_cap_mb=2)
    for step in range(3):
        for parameter in (*floats, *doubles):
            parameter.grad = None
        sync.piggyback("step", torch.tensor(float(step + rank)))
        sum((parameter * (1.0 + rank)).sum() for parameter in (*floats, *doubles)).backward()  # type: ignore[union-attr]
        assert sync.piggybacked()["step"].item() == step + 0.5
        for parameter in (*floats, *doubles):
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 1.5))
    first, *others = [bucket.numel for bucket in sync.stats().buckets]
    assert first in (mib // 4, mib // 8)
    assert first + sum(others) == mib + mib // 4
    assert mib // 2 in others, "the others are as large as was asked for"


# ---- what every rank gets from rank 0 -----------------------------------------------------------------------------

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def _of_every_dtype(rank: int) -> nn.Module:
    model = nn.Linear(2, 2)
    for index, dtype in enumerate(DTYPES):
        values = torch.full((3, 2), (rank + index) % 2 + 1, dtype=torch.uint8).to(torch.float32)
        frozen = values.t() if index % 2 else values  # contiguous or not
        model.register_parameter(f"frozen_{index}", nn.Parameter(frozen.to(dtype), requires_grad=False))
        model.register_buffer(f"buffer_{index}", values.to(dtype))
        model.register_buffer(f"scalar_{index}", values[0, 0].to(dtype))
    return model


def _bytes(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@on_ranks(2)
def test_rank_0s_parameters_and_buffers_are_everybodys_whatever_their_dtype(rank: int, world_size: int) -> None:
    model, expected = _of_every_dtype(rank), _of_every_dtype(0)
    fastsync.attach(model)
    for name, tensor in expected.state_dict().items():
        if name not in ("weight", "bias"):
            assert _bytes(model.state_dict()[name]) == _bytes(tensor), f"rank {rank}: {name}"
    fastsync.check_consistency(model)

    loose = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), rank), requires_grad=False)]
    fastsync.attach(loose)
    assert loose[1].tolist() == [0, 0]

    model = nn.Linear(2, 2)
    model.register_parameter("table", nn.Parameter(torch.zeros(2 + rank, dtype=torch.int64), requires_grad=False))
    with pytest.raises(ValueError, match=r"rank 0: parameter table of shape \[2\], .*torch.int64; rank 1: .*\[3\]"):
        fastsync.attach(model)

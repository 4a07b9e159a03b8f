"""Reduce-scatters that travel while backward goes on: the same bits, and nobody reads a shard too early."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tensor import DTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.torch_version import TorchVersion

import fastsync
from fastsync import _C, Compression
from fastsync.autotune.choose import Candidate, engine_schedule
from fastsync.fsdp import _Unit, _units_of
from tests.bitwise import assert_bitwise_equal
from tests.ranks import on_ranks, run_ranks

STEPS = 4


class Chain(nn.Module):
    """Three layers, the last of which is used twice: it reduce-scatters once, or twice, in each backward."""

    def __init__(self, *, repeats: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(3))
        self.repeats = repeats

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values))
        for _ in range(self.repeats - 1):
            values = torch.tanh(self.layers[-1](values))
        return values


def sharded(world_size: int, *, repeats: int = 1, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    model = Chain(repeats=repeats)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(5, 17, generator=generator)).float().square().mean()


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.to_local().clone() if isinstance(p, DTensor) else p.clone() for p in model.parameters()]


def trained(rank: int, world_size: int, compression: Compression, **options: Any) -> list[Tensor]:
    model = sharded(world_size, **options)
    fastsync.register_reduce_scatter(model, compression)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return weights_of(model)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"repeats": 3},
    {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
]


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(shared_memory=False)
def test_the_same_bits_as_one_after_the_other(rank: int, world_size: int) -> None:
    keeps = _Unit.keeps_gradients_of
    for options in VARIANTS:
        for compression in (Compression("none"), Compression("fp16"), Compression("int8", error_feedback=True)):
            found = trained(rank, world_size, compression, **options)
            _Unit.keeps_gradients_of = lambda *_: False  # type: ignore[method-assign]
            expected = trained(rank, world_size, compression, **options)
            _Unit.keeps_gradients_of = keeps  # type: ignore[method-assign]
            for mine, theirs in zip(found, expected, strict=True):
                assert_bitwise_equal(mine, theirs, f"{compression}, {options}")


@pytest.mark.parametrize("shared_memory", [True, False])
@on_ranks(2, parametrized=("shared_memory",))
def test_modules_without_a_root_are_complete_after_backward(rank: int, world_size: int) -> None:
    """Each has an end of backward of its own, in which the first layer's gradients are reduce-scattered."""
    mesh = init_device_mesh("cpu", (world_size,))
    model, alone = Chain(), Chain()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    handle = fastsync.register_reduce_scatter(model, Compression("none"))
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        alone.zero_grad()
        torch.stack([loss_of(alone, each, step) for each in range(world_size)]).mean().backward()
        for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in alone.parameters()])
        torch.testing.assert_close(handle.grad_norm(), norm)
    assert handle.stats().num_steps == STEPS


@on_ranks(2, shared_memory=False)
def test_backward_goes_on_meanwhile(rank: int, world_size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    model = sharded(world_size, reshard_after_forward=False)  # else backward gathers weights, and ranks wait in there
    fastsync.register_reduce_scatter(model, "bf16")
    loss_of(model, rank, 0).backward()  # the ranks agree on each module when it first comes

    def in_turns(_module: nn.Module, _grads: Any) -> None:
        if rank == 0:
            store.set("the last layer's gradients have gone", "")
        else:
            store.wait(["the last layer's gradients have gone"])

    # Rank 1 sends nothing before rank 0 has gone on to the layer in the middle, whose backward comes second.
    watched = model.layers[2 if rank == 1 else 1]
    watched.register_full_backward_pre_hook(in_turns)
    model.zero_grad()
    loss_of(model, rank, 1).backward()


@on_ranks(2, shared_memory=False)
def test_hooks_of_parameters_read_whole_gradients(rank: int, world_size: int) -> None:
    model = sharded(world_size)
    fastsync.register_reduce_scatter(model, Compression("none"))
    seen: list[tuple[Tensor, Tensor]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: seen.append((p.grad.to_local(), p.grad.to_local().clone()))
        )
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    assert len(seen) == STEPS * len(list(model.parameters()))
    for after_backward, in_hook in seen:
        assert_bitwise_equal(in_hook, after_backward)


@on_ranks(2, shared_memory=False)
def test_gradients_that_are_cast_at_once(rank: int, world_size: int) -> None:
    """As PyTorch after 2.14 does it: a shard is cast to its parameter's grad_dtype as soon as it is handed over."""
    to_sharded = FSDPParam.to_sharded_dtensor
    of_dtype: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.bfloat16, None):
        model = sharded(world_size)
        FSDPParam.to_sharded_dtensor = (  # type: ignore[method-assign]
            lambda param, shard, dtype=dtype: to_sharded(param, shard if dtype is None else shard.to(dtype))
        )
        for parameter in model.parameters():
            parameter.grad_dtype = dtype
        fastsync.register_reduce_scatter(model, Compression("none"))
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        of_dtype.append([parameter.grad.to_local() for parameter in model.parameters()])
        FSDPParam.to_sharded_dtensor = to_sharded  # type: ignore[method-assign]
    for wide, narrow, any_dtype in zip(*of_dtype, strict=True):
        assert_bitwise_equal(narrow, wide.to(torch.bfloat16))
        assert_bitwise_equal(any_dtype, wide)


@on_ranks(1)
def test_what_an_unknown_version_does_with_shards_is_not_guessed(rank: int, world_size: int) -> None:
    model = sharded(world_size)
    loss_of(model, rank, 0)  # fully_shard finds out the parameters' dtypes
    unit = _units_of(model)[0]
    known = {"2.11.0": True, "2.14.1+cu130": True, "2.15.0.dev20261101": False, "2.15.0": False, "3.0.0": False}
    with patch.object(torch, "__version__"):
        for version, keeps in known.items():
            torch.__version__ = TorchVersion(version)
            assert unit.keeps_gradients_of(torch.float32) is keeps, version


class _InBackward(torch.autograd.Function):
    """Makes a call in the middle of backward."""

    @staticmethod
    def forward(context: Any, values: Tensor, call: Callable[[], object]) -> Tensor:
        context.call = call
        return values.clone()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        context.call()
        return *grads, None


def _backward(*calls: Callable[[], object]) -> None:
    values = torch.ones((), requires_grad=True)
    for call in reversed(calls):
        values = _InBackward.apply(values, call)
    values.backward()


@on_ranks(2, shared_memory=False)
def test_a_backward_that_fails_leaves_nothing_behind(rank: int, world_size: int) -> None:
    engine = _C.ShardedState(dist.group.WORLD)
    engine.set_schedule(engine_schedule([(0, [Candidate(Compression("none"))])]))
    identities = [torch.empty(world_size * 100, device="meta") for _ in range(2)]
    outputs = [torch.zeros(100) for _ in range(2)]

    def send(which: int, value: float) -> None:
        values = torch.full([world_size * 100], value + rank)
        engine.reduce_scatter(
            identities[which], f"module {which}", outputs[which], values, dist.ReduceOp.SUM, in_background=True
        )

    def fail() -> None:
        raise ArithmeticError("in the middle of backward")

    with pytest.raises(ArithmeticError, match="in the middle"):
        _backward(lambda: send(0, 1.0), fail)
    _backward(lambda: send(0, 10.0), lambda: send(1, 20.0), lambda: send(1, 30.0))
    assert [output.unique().tolist() for output in outputs] == [[21.0], [61.0]]
    assert engine.num_steps() == 2
    assert len(engine.grad_stats()) == 2
    _backward(lambda: send(0, 1.0))
    assert len(engine.grad_stats()) == 1  # of what has come in the newest step


def _waits_for_the_newest(rank: int, world_size: int) -> str:
    store = dist.distributed_c10d._get_default_store()
    engine = _C.ShardedState(dist.new_group(timeout=timedelta(seconds=3)))
    engine.set_schedule(engine_schedule([(0, [Candidate(Compression("none"))])]))
    identities = [torch.empty(world_size, device="meta") for _ in range(2)]

    def send(which: int) -> None:
        engine.reduce_scatter(
            identities[which], f"module {which}", torch.empty(1), torch.ones(world_size), dist.ReduceOp.SUM, True
        )

    _backward(lambda: send(0), lambda: send(1))
    error = ""
    if rank == 2:
        _backward(lambda: send(0), lambda: store.wait(["rank 0 has given up", "rank 1 has given up"]))
    else:
        with pytest.raises(RuntimeError, match="averaging module 1 failed") as raised:
            _backward(lambda: send(0), lambda: send(1))
        error = str(raised.value)
        store.set(f"rank {rank} has given up", "")
    return error


def test_who_waits_for_the_newest_says_so() -> None:
    """While the one before it has come."""
    of_rank = run_ranks(_waits_for_the_newest, 3, shared_memory=False)
    for error in of_rank[:2]:
        assert error.endswith("rank 0, 1, 2: averaging in step 1 of fully_shard's modules")


@on_ranks(1)
def test_memory_is_used_again_once_nobody_has_it(rank: int, world_size: int) -> None:
    engine = _C.ShardedState(dist.group.WORLD)
    first = engine.allocate_input(100, torch.float32)
    where = first.data_ptr()
    second = engine.allocate_input(100, torch.float32)
    third = engine.allocate_input(100, torch.float32)
    assert len({where, second.data_ptr(), third.data_ptr()}) == 3
    view = first[5:]
    del first
    assert engine.allocate_input(100, torch.float32).data_ptr() != where  # somebody still reads it
    del view
    narrower = engine.allocate_input(150, torch.bfloat16)
    assert (narrower.data_ptr(), narrower.shape, narrower.dtype) == (where, (150,), torch.bfloat16)
    del narrower
    assert engine.allocate_input(101, torch.float32).shape == (101,)


@on_ranks(1)
def test_nothing_is_kept_of_modules_that_are_gone(rank: int, world_size: int) -> None:
    engine = _C.ShardedState(dist.group.WORLD)
    engine.set_schedule(engine_schedule([(0, [Candidate(Compression("none"))])]))
    for numel in (4, 8):
        identity = torch.empty(numel, device="meta")
        engine.reduce_scatter(identity, "part", torch.empty(numel), torch.ones(numel), dist.ReduceOp.SUM)
        assert len(engine.totals().buckets) == 1

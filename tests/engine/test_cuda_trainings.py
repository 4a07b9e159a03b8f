"""Trainings on GPUs with what people use there, against PyTorch's own or the CPU's: mostly to the bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

import fastsync
from fastsync import Compression
from fastsync.sync.compression import AnyCompression
from tests import reference
from tests.bitwise import assert_bitwise_equal
from tests.engine.entry_points import average, mean_of, whole_numbers
from tests.engine.sharded import LIMITS, distance, sharded, train, trained_alone
from tests.engine.test_low_rank import RANK, Reference, everyones
from tests.engine.test_mean_of_used import USERS, used
from tests.engine.test_sparse_gradients import Words, tokens_of
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

pytestmark = pytest.mark.gpu
STEPS = 6


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, groups=2),
            nn.Flatten(),
            nn.Linear(16 * 16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def images(rank: int, step: int) -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _trained(ddp_or_entry_point: str, rank: int, autocast: torch.dtype | None, scales: bool) -> list[Tensor]:
    """Two micro-batches a step, convolutions in channels_last, a fused AdamW."""
    module = Convolutions().to("cuda", memory_format=torch.channels_last)
    if ddp_or_entry_point == "ddp":
        model: nn.Module = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
        no_sync, finish = model.no_sync, lambda: None
    else:
        given = average(ddp_or_entry_point, module)
        model, no_sync, finish = given.model, given.no_sync, given.finish
    optimizer = AdamW(module.parameters(), lr=0.01, fused=True)
    scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=3, enabled=scales)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in range(2):
            accumulates = micro_batch == 0 and ddp_or_entry_point != "all_reduce"
            with no_sync() if accumulates else nullcontext():
                inputs = images(rank, 2 * step + micro_batch).to("cuda", memory_format=torch.channels_last)
                with torch.autocast("cuda", autocast, enabled=autocast is not None):
                    loss = model(inputs).square().mean()
                scaler.scale(loss).backward()
        finish()
        scaler.step(optimizer)
        scaler.update()
    return list(module.parameters())


@pytest.mark.parametrize("entry_point", ["hook", "drop-in hook", "attach", "synchronize", "all_reduce"])
@on_ranks(2, backend="nccl")
def test_trains_as_ddp_to_the_bit(rank: int, world_size: int, entry_point: str) -> None:
    torch.backends.cudnn.deterministic = True
    for autocast, scales in ((None, False), (torch.bfloat16, False), (torch.float16, True)):
        expected = _trained("ddp", rank, autocast, scales)
        actual = _trained(entry_point, rank, autocast, scales)
        assert_all_bitwise_equal(actual, expected, f"{autocast}: parameter")
        assert_same_on_all_ranks(actual)


@on_ranks(2, backend="nccl")
def test_a_compiled_model(rank: int, world_size: int) -> None:
    models = [Mlp().to("cuda") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    syncs = [fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS) for model in models]
    models[1].compile()
    for step in range(STEPS):
        for model in models:
            model.zero_grad()
            model(batch(rank, step).to("cuda")).square().mean().backward()
        for eager, compiled in zip(*map(grads_of, models), strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-5)
        assert_same_on_all_ranks(grads_of(models[1]))
    assert len(syncs[1].stats().buckets) > 1


# ---- fully_shard ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["none", "bf16", "fp16", "int8"])
@on_ranks(2, backend="nccl")
def test_fully_shard_trains_as_one_process_with_all_data(rank: int, world_size: int, wire: Any) -> None:
    model = sharded(init_device_mesh("cuda", (world_size,)))
    compression, of_parameters = Compression(wire, error_feedback=wire == "int8"), "none" if wire == "int8" else wire
    handle = fastsync.register_fsdp(model, gradients=compression, parameters=of_parameters)
    train(model, rank, world_size, device="cuda")
    assert distance(model, trained_alone()) <= LIMITS["int8" if wire != "none" else wire]
    assert handle.stats().num_steps == 8


FULL_WIDTH: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "kept whole after forward": {"reshard_after_forward": False},
    "checkpointed": {"checkpointed": True},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("case", FULL_WIDTH)
@on_ranks(2, backend="cpu:gloo,cuda:nccl")
def test_full_width_is_what_fully_shard_does_by_itself(rank: int, world_size: int, case: str) -> None:
    mesh = init_device_mesh("cuda", (world_size,))
    models = [sharded(mesh, **FULL_WIDTH[case]) for _ in range(2)]
    fastsync.register_fsdp(models[0])
    for model in models:
        train(model, rank, world_size, steps=3, micro_batches=2, device="cuda")
    for index, pair in enumerate(zip(*(model.parameters() for model in models), strict=True)):
        mine, theirs = (parameter.to_local() for parameter in pair)
        assert_bitwise_equal(mine.cpu(), theirs.cpu(), f"parameter {index}")


# ---- shard_optimizer ------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: Adam(p, lr=0.1, foreach=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
}


def _stepped(rank: int, make: Callable[..., Any], compression: AnyCompression, is_shared: bool) -> list[Tensor]:
    shapes = [(7, 33), (300,), (2, 3, 4), (513, 7), (40_000,)]
    model = Given([grad.to("cuda") for grad in random_grads(9, 9, shapes, torch.float32)]).to("cuda")
    optimizer = make(model.parameters())
    sync = fastsync.attach(model, compression, bucket_cap_mb=0.1)
    if is_shared:
        fastsync.shard_optimizer(sync, optimizer)
    for step in range(STEPS):
        grads: list[Tensor | None] = [grad.to("cuda") for grad in random_grads(rank, step, shapes, torch.float32)]
        if step == 3 and rank == 0:
            grads[1] = None
        model(grads).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    sync.detach()
    kept = [state[index][name] for index in state for name in sorted(state[index]) if state[index][name] is not None]
    return [each.detach().cpu() for each in (*model.parameters(), *kept)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2, backend="nccl")
def test_shards_of_an_optimizer_step_as_every_rank(rank: int, world_size: int, optimizer: str) -> None:
    for wire in ("none", "bf16", "int8"):
        compression = Compression(wire, reduce="fp32", algorithm="two_shot")  # type: ignore[arg-type]
        expected, actual = (_stepped(rank, OPTIMIZERS[optimizer], compression, shared) for shared in (False, True))
        assert_all_bitwise_equal(actual, expected, f"{wire}: tensor")


@on_ranks(2, backend="nccl")
def test_a_step_of_shards_does_not_wait_for_the_device(rank: int, world_size: int) -> None:
    shapes = [(7, 33), (513, 7)]
    grads = [[grad.to("cuda") for grad in random_grads(rank, step, shapes, torch.float32)] for step in range(STEPS)]
    model = Given(grads[0]).to("cuda")
    optimizer, scaler = AdamW(model.parameters(), lr=0.1, fused=True), GradScaler("cuda")
    sync = fastsync.attach(model)
    fastsync.shard_optimizer(sync, optimizer)
    for step, given in enumerate(grads):
        scaler.scale(model(given)).backward()
        fastsync.clip_grad_norm_(sync, 0.5, optimizer=optimizer, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 0:  # in which ranks agree
            torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    assert_same_on_all_ranks(list(model.parameters()))


# ---- other kinds of sums --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry_point", ["hook", "attach", "all_reduce"])
@on_ranks(2, backend="nccl")
def test_lowrank(rank: int, world_size: int, entry_point: str) -> None:
    like = [grad.to("cuda") for grad in everyones(0, 1)[0]]
    given = average(entry_point, Given(like).to("cuda"), Compression("lowrank", rank=RANK), bucket_cap_mb=25)
    expected = Reference(world_size)
    for step in range(STEPS):
        of_ranks = everyones(step, world_size)
        means = given.step([grad.to("cuda") for grad in of_ranks[rank]])
        for mean, right in zip(means, expected.step(of_ranks), strict=True):
            assert mean is not None
            torch.testing.assert_close(mean.cpu().double(), right, rtol=0, atol=5e-5)
        assert_same_on_all_ranks([mean for mean in means if mean is not None])


@pytest.mark.parametrize("entry_point", ["synchronize", "all_reduce"])
@on_ranks(2, backend="nccl")
def test_what_does_not_overlap_gives_the_references_bits(rank: int, world_size: int, entry_point: str) -> None:
    shapes = [(7, 33), (300,), (), (513, 257)]
    for wire, dtype in (("none", None), ("bf16", torch.bfloat16)):
        _assert_reference(entry_point, wire, dtype, shapes, rank, world_size)


def _assert_reference(
    entry_point: str, wire: Any, dtype: torch.dtype | None, shapes: list[Any], rank: int, world_size: int
) -> None:
    """Takes steps, and compares their means with the reference's."""
    like = [grad.to("cuda") for grad in random_grads(0, 0, shapes, torch.float32)]
    given = average(entry_point, Given(like).to("cuda"), wire)
    for step in range(3):
        everyone = [random_grads(other, step, shapes, torch.float32) for other in range(world_size)]
        means = given.step([grad.to("cuda") for grad in everyone[rank]])
        found = [mean.cpu() for mean in means if mean is not None]
        expected = reference.all_reduce_mean(everyone, dtype)
        assert_all_bitwise_equal(found, expected, f"{entry_point}, {wire}: gradient")


@on_ranks(2, backend="nccl")
def test_weights_sums_and_means_of_used(rank: int, world_size: int) -> None:
    like = [torch.zeros(7, 33), torch.zeros(300), torch.zeros(2, 3, 4), torch.zeros(250)]
    shapes = [tuple(each.shape) for each in like]
    for op in ("mean", "sum", "mean_of_used"):
        model = Given(like).to("cuda")
        sync = fastsync.attach(model, op=op, bucket_cap_mb=SMALL_BUCKETS)  # type: ignore[arg-type]
        for step in range(4):
            everyone = [whole_numbers(other, step, shapes) for other in range(world_size)]
            everyone = used(everyone, [{1, 0}, *USERS[step][1:]]) if op == "mean_of_used" else everyone
            model.zero_grad()
            if op == "mean" and step == 2:  # and in all that follow
                sync.set_weight(1.0 + 2.0 * rank)
            model([None if grad is None else grad.to("cuda") for grad in everyone[rank]]).backward()
            means = mean_of(everyone)
            for index, (weight, mean) in enumerate(zip(model.weights, means, strict=True)):
                there = [grads[index] for grads in everyone if grads[index] is not None]
                if not there:
                    assert weight.grad is None, f"{op}, step {step}"
                    continue
                if op == "mean":
                    expected = mean if step < 2 else (everyone[0][index] + 3.0 * everyone[1][index]) / 4.0
                else:
                    expected = torch.stack(there).sum(0) / (1 if op == "sum" else len(there))
                assert_bitwise_equal(weight.grad.cpu(), expected, f"{op}, step {step}, parameter {index}")


@on_ranks(2, backend="nccl")
def test_sparse_gradients(rank: int, world_size: int) -> None:
    model = Words().to("cuda")
    fastsync.attach(model)
    for step in range(3):
        model.zero_grad()
        model(tokens_of(rank, step).to("cuda")).backward()
        gradients = []
        for other in range(world_size):
            alone = Words()
            alone(tokens_of(other, step)).backward()
            gradients.append([weight.grad.to_dense() for weight in alone.parameters()])
        for weight, expected in zip(model.parameters(), mean_of(gradients), strict=True):
            assert weight.grad is not None
            assert_bitwise_equal(weight.grad.to_dense().cpu(), expected, f"step {step}")
        assert model.words.weight.grad.is_sparse


@on_ranks(2, backend="nccl")
def test_a_rank_that_runs_out_of_batches_joins(rank: int, world_size: int) -> None:
    for wire in ("none", "int8", "lowrank:2"):
        like = torch.zeros(40, 24, device="cuda")
        sync = fastsync.attach(model := Given([like]), wire)
        value = torch.outer(torch.arange(40.0), torch.ones(24)).to("cuda")  # of rank one
        with sync.join():
            for step in range(2 + rank):
                model.zero_grad()
                model([value * (1 + rank)]).backward()
                expected = (1.5 if step < 2 else 2.0) * value
                torch.testing.assert_close(grads_of(model)[0], expected, rtol=0.02, atol=0.2)


@on_ranks(2, backend="cpu:gloo,cuda:nccl")
def test_parameters_on_both_devices(rank: int, world_size: int) -> None:
    shapes = [(7, 33), (300,), (2, 3, 4), (250,)]
    model = Given([torch.zeros(shape) for shape in shapes])
    for index in (0, 2):
        model.weights[index].data = model.weights[index].data.to("cuda")
    fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(3):
        everyone = [whole_numbers(other, step, shapes) for other in range(world_size)]
        model.zero_grad()
        losses = [
            (weight * grad.to(weight.device)).sum().cpu()
            for weight, grad in zip(model.weights, everyone[rank], strict=True)
        ]
        torch.stack(losses if rank == 0 else losses[::-1]).sum().backward()
        actual = [weight.grad.cpu() for weight in model.weights]
        assert_all_bitwise_equal(actual, [mean for mean in mean_of(everyone) if mean is not None], f"step {step}")


# ---- wires in memory of the group's own -----------------------------------------------------------------------------


@on_ranks(2, backend="nccl")
def test_wires_from_the_allocator_of_the_group(rank: int, world_size: int, tmp_path: Path) -> None:
    """A group that is bound to its device lends memory, as it does to DDP's buckets."""
    dist.destroy_process_group()
    device = torch.device("cuda", torch.cuda.current_device())
    store = dist.FileStore(str(tmp_path / "bound"), world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, device_id=device)
    shapes = [(7, 33), (300,), (513, 257)]
    for entry_point in ("hook", "attach"):
        for wire, dtype in (("none", None), ("bf16", torch.bfloat16)):
            _assert_reference(entry_point, wire, dtype, shapes, rank, world_size)

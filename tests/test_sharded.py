"""Models under fully_shard: what the engine's reduce-scatter gives, against one process that holds all data."""

from __future__ import annotations

import io
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tensor import DTensor, Shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fastsync
from fastsync import _C, Compression, reference
from fastsync.autotune.candidates import Candidate, engine_schedule
from fastsync.compression import Wire
from tests.bitwise import assert_bitwise_equal
from tests.ranks import run_ranks

WIRES: list[Wire] = ["none", "fp16", "bf16", "int8"]
DTYPE_OF = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}


# ---- the same bits as the reference ---------------------------------------------------------------------------------


def _as_the_reference(rank: int, world_size: int, device: str) -> None:
    several_pieces = 300_001 if world_size == 2 else 600
    cases = itertools.product(WIRES, (torch.float32, torch.float64, torch.bfloat16), (5, 1000, several_pieces))
    for wire, dtype, shard in cases:
        feedback = wire != "none"
        numel = shard * world_size
        engine = _C.ShardedState(dist.group.WORLD)
        choice = Compression(wire, reduce="fp32", error_feedback=feedback)
        engine.set_schedule(engine_schedule([(0, [Candidate(choice)])]))
        identity = torch.empty(numel, dtype=dtype, device="meta")
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        residuals = [torch.zeros(numel, dtype=sums) for _ in range(world_size)] if feedback else None
        for step, factor in enumerate((None, 1.0, 0.3)):
            generators = [torch.Generator().manual_seed(10 * step + other) for other in range(world_size)]
            inputs = [torch.randn(numel, generator=generator).to(dtype) for generator in generators]
            op = [dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist._make_nccl_premul_sum(0.3)][step]
            output = torch.empty(shard, dtype=dtype, device=device)
            engine.reduce_scatter(identity, "all of them", output, inputs[rank].to(device), op)
            expected = reference.reduce_scatter(inputs, DTYPE_OF[wire], factor=factor, residuals=residuals)
            what = f"{wire}, {dtype}, {shard} values, step {step}"
            assert_bitwise_equal(output.cpu(), expected[rank], what)
            squares = expected[rank].double().square().sum().item()
            assert engine.grad_stats()[0, reference.SUM_OF_SQUARES].item() == pytest.approx(squares, rel=1e-6), what


@pytest.mark.parametrize(("world_size", "shared_memory"), [(1, True), (2, True), (2, False), (3, True), (3, False)])
def test_a_shard_is_the_references_to_the_bit(world_size: int, shared_memory: bool) -> None:
    run_ranks(_as_the_reference, world_size, "cpu", shared_memory=shared_memory)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_shard_on_gpus_is_the_references_to_the_bit(world_size: int) -> None:
    run_ranks(_as_the_reference, world_size, "cuda", backend="nccl")


# ---- trainings ------------------------------------------------------------------------------------------------------

STEPS = 20
ROWS = 8  # of a step's batch, over all ranks


class Block(nn.Module):
    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 3 * width + 1)  # which no number of ranks divides
        self.narrow = nn.Linear(3 * width + 1, width)
        self.unused = nn.Parameter(torch.ones(3, 5))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self._checkpointed = checkpointed

    def forward(self, inputs: Tensor) -> Tensor:
        if self._checkpointed:
            return checkpoint(self._inner, inputs, use_reentrant=False)
        return self._inner(inputs)

    def _inner(self, inputs: Tensor) -> Tensor:
        return inputs + self.narrow(torch.tanh(self.wide(inputs))) * self.frozen


class Tied(nn.Module):
    """Blocks between an embedding and a head that is the same matrix; frozen and unused parameters in each block."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 9)
        self.blocks = nn.ModuleList(Block(9, checkpointed) for _ in range(2))
        self.head = nn.Linear(9, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(13, (ROWS, 6), generator=generator)
    return tokens, tokens.roll(1, dims=1)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def trained_alone(steps: int = STEPS) -> nn.Module:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch_of(step)).backward()
        optimizer.step()
    return model


def sharded(mesh: Any, *, checkpointed: bool = False, **options: Any) -> nn.Module:
    model = Tied(checkpointed=checkpointed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model: nn.Module, rank: int, world_size: int, *, steps: int = STEPS, micro_batches: int = 1) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        step_of(model, step, rank, world_size, micro_batches)
        if step == 0:
            assert_gradients_are_the_mean(model)
        optimizer.step()


def step_of(model: Any, step: int, rank: int, world_size: int, micro_batches: int = 1) -> None:
    parts = [part.chunk(world_size)[rank].chunk(micro_batches) for part in batch_of(step)]
    for index, (tokens, targets) in enumerate(zip(*parts, strict=True)):
        model.set_requires_gradient_sync(index == micro_batches - 1)
        (loss_of(model, tokens, targets) / micro_batches).backward()


def assert_gradients_are_the_mean(model: nn.Module) -> None:
    """But for what the wire loses: Adam would not notice a factor, such as that of a sum."""
    alone = Tied()
    loss_of(alone, *batch_of(0)).backward()
    mine, theirs = (
        torch.cat([full(p.grad).float().flatten() for p in each.parameters() if p.grad is not None])
        for each in (model, alone)
    )
    assert (mine - theirs).norm() < 0.05 * theirs.norm()


def full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def distance(model: nn.Module, alone: nn.Module) -> float:
    """The largest difference of a parameter's elements, relative to what training has changed at most."""
    begun = Tied()
    moved = max((b - a).abs().max().item() for a, b in zip(begun.parameters(), alone.parameters(), strict=True))
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((full(a).float() - b).abs().max().item() for a, b in pairs) / moved


LIMITS = {"none": 1e-4, "fp16": 5e-3, "bf16": 0.03, "int8": 0.3}


def _trains(rank: int, world_size: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (world_size,))
    alone = trained_alone()
    found = {}
    for wire in WIRES:
        model = sharded(mesh)
        handle = fastsync.register_reduce_scatter(model, Compression(wire, error_feedback=wire == "int8"))
        train(model, rank, world_size)
        found[wire] = distance(model, alone)
        stats = handle.stats()
        assert stats.num_steps == STEPS
        assert stats.num_syncs == 3 * STEPS
        assert all(block.unused.grad is None and block.frozen.grad is None for block in model.blocks)
        assert_bitwise_equal(full(model.head.weight), full(model.embedding.weight))
    return found


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (2, False), (4, True)])
def test_trains_as_one_process_with_all_data(world_size: int, shared_memory: bool) -> None:
    found = run_ranks(_trains, world_size, shared_memory=shared_memory)[0]
    assert all(found[wire] <= LIMITS[wire] for wire in WIRES), found


VARIANTS: dict[str, dict[str, Any]] = {
    "float32 sums of bfloat16": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "float16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    "micro-batches": {"micro_batches": 2},
    "activation checkpointing": {"checkpointed": True},
}


def _trains_in_variants(rank: int, world_size: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (world_size,))
    alone = trained_alone()
    found = {}
    for name, options in VARIANTS.items():
        micro_batches = options.pop("micro_batches", 1)
        model = sharded(mesh, **options)
        fastsync.register_reduce_scatter(model, "bf16")
        train(model, rank, world_size, micro_batches=micro_batches)
        found[name] = distance(model, alone)
    return found


def test_trains_in_variants_as_one_process_with_all_data() -> None:
    found = run_ranks(_trains_in_variants, 2)[0]
    assert all(found[name] <= LIMITS["bf16"] * (10 if "bfloat16" in name else 1) for name in VARIANTS), found


def _trains_in_replicas(rank: int, world_size: int) -> list[dict[str, float]]:
    """HSDP of two replicas: fully_shard's own, and with an all-reduce of the engine's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone = trained_alone()
    found: list[dict[str, float]] = [{}, {}]
    for wire in WIRES:
        compression = Compression(wire, reduce="fp32", error_feedback=wire == "int8")
        model = sharded(mesh)
        fastsync.register_reduce_scatter(model, compression)
        train(model, rank, world_size)
        found[0][wire] = distance(model, alone)
        model = sharded(mesh["shard"])
        handle = fastsync.register_all_reduce_hook(model, compression, process_group=mesh["replicate"])
        if wire == "bf16":
            fastsync.register_reduce_scatter(model, compression)
        train(model, rank, world_size)
        found[1][wire] = distance(model, alone)
        assert handle.stats().num_syncs == 3 * STEPS
        for parameter in model.parameters():
            theirs = [torch.empty_like(full(parameter)) for _ in range(world_size)]
            dist.all_gather(theirs, full(parameter).detach())
            for other in theirs:
                assert_bitwise_equal(other, full(parameter))
    return found


@pytest.mark.parametrize("shared_memory", [True, False])
def test_trains_in_replicas_as_one_process_with_all_data(shared_memory: bool) -> None:
    for found in run_ranks(_trains_in_replicas, 4, shared_memory=shared_memory)[0]:
        assert all(found[wire] <= LIMITS[wire] for wire in WIRES), found


def _replicates(rank: int, world_size: int) -> float:
    module = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "alone"))
    model = Tied()
    for part in (*model.blocks, model):
        module.replicate(part, mesh=mesh["alone"])
    with pytest.raises(ValueError, match="is replicated and not sharded"):
        fastsync.register_reduce_scatter(model)
    handle = fastsync.register_all_reduce_hook(model, "fp16", process_group=mesh["replicate"])
    train(model, rank, world_size)
    squares = [full(p.grad).square().sum() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(handle.grad_norm(), torch.stack(squares).sum().sqrt())
    return distance(model, trained_alone())


def test_replicas_that_are_not_sharded() -> None:
    assert max(run_ranks(_replicates, 2)) <= LIMITS["fp16"]


def _trains_beside_tensor_parallelism(rank: int, world_size: int) -> list[float]:
    """Shards of the tensors' parts, and whole replicas of them."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "alone", "tensor"))
    found = []
    for is_sharded in (True, False):
        model = Tied()
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        for call in (fastsync.attach, fastsync.all_reduce_gradients):
            with pytest.raises(ValueError, match=r"is a DTensor.*data-parallel dimension"):
                call(model, process_group=mesh["data"])
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["data" if is_sharded else "alone"])
        if is_sharded:
            handle = fastsync.register_reduce_scatter(model, "bf16")
        else:
            handle = fastsync.register_all_reduce_hook(model, "bf16", process_group=mesh["data"])
        train(model, mesh.get_local_rank("data"), 2)
        assert handle.stats().num_syncs == 3 * STEPS
        found.append(distance(model, trained_alone()))
        with pytest.raises(RuntimeError, match="tensor parallelism, split some parameters"):
            handle.grad_norm()
    return found


def test_trains_beside_tensor_parallelism() -> None:
    for found in run_ranks(_trains_beside_tensor_parallelism, 4):
        assert max(found) <= LIMITS["bf16"], found


# Between two ranks a sum of float32 values is the same whoever adds, and its half is exact.
POLICIES = [
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    MixedPrecisionPolicy(reduce_dtype=torch.float16),
    MixedPrecisionPolicy(reduce_dtype=torch.float64),
]


def _as_without_it(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))

    def compare(what: str, micro_batches: int = 1, change: Callable[[Any], None] = lambda _: None, **opts: Any) -> None:
        models = [sharded(mesh, **opts) for _ in range(2)]
        fastsync.register_reduce_scatter(models[0], "none")
        for model in models:
            change(model)
            train(model, rank, world_size, steps=3, micro_batches=micro_batches)
        for index, pair in enumerate(zip(*(model.parameters() for model in models), strict=True)):
            mine, theirs = (parameter.to_local() for parameter in pair)
            assert_bitwise_equal(mine, theirs, f"{what}, parameter {index}")

    for policy in POLICIES:
        compare(f"{policy}", mp_policy=policy)
        compare(f"{policy} with micro-batches", micro_batches=2, mp_policy=policy)
    compare("checkpointed", checkpointed=True)
    compare("kept whole after forward", reshard_after_forward=False)
    compare("sums", change=lambda model: model.set_force_sum_reduction_for_comms(True))


def test_full_width_between_two_ranks_is_what_fully_shard_does_by_itself() -> None:
    run_ranks(_as_without_it, 2)


def _detaches(rank: int, world_size: int) -> None:
    """The model is PyTorch's again, as in the step before, and may be registered anew: also in another group."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("shard", "replicate"))
    register: list[Callable[[nn.Module], fastsync.ShardedGradients]] = [
        lambda model: fastsync.register_reduce_scatter(model, "int8"),
        lambda model: fastsync.register_all_reduce_hook(model, "int8", process_group=mesh["replicate"]),
    ]

    def gradients(model: Any) -> list[Tensor]:
        model.zero_grad()
        step_of(model, 0, rank, world_size)
        return [p.grad.to_local() for p in model.parameters() if p.grad is not None]

    for one in register:
        model = sharded(mesh["shard"])
        expected = gradients(model)
        handle = one(model)
        gradients(model)
        handle.detach()
        with pytest.raises(ValueError, match="no handles of fastsync look after"):
            fastsync.handle_of(model)
        for mine, theirs in zip(gradients(model), expected, strict=True):
            assert_bitwise_equal(mine, theirs)
        assert handle.stats().num_steps == 1
        handle = one(model)
        gradients(model)
        assert handle.stats().num_steps == 1
    if hasattr(model, "set_separate_reduce_scatter_group"):
        for is_told in (False, True):
            model = sharded(mesh["shard"])
            handle = register[0](model)
            if is_told:
                handle.detach()
            model.set_separate_reduce_scatter_group()
            if is_told:
                register[0](model)
                gradients(model)
            else:
                with pytest.raises(RuntimeError, match="got another process group since"):
                    gradients(model)


def test_a_model_is_given_back() -> None:
    run_ranks(_detaches, 2)


def _norm_before_another_average(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh["shard"])
    scatter = fastsync.register_reduce_scatter(model, "none")
    replicas = fastsync.register_all_reduce_hook(model, "none", process_group=mesh["replicate"])
    step_of(model, 0, rank, world_size)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="an all-reduce hook averages the shards afterwards"):
            fastsync.clip_grad_norm_(scatter, 1.0)
    squares = [full(p.grad).square().sum() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(replicas.grad_norm(), torch.stack(squares).sum().sqrt())
    cubes = [full(p.grad).abs().pow(3).sum() for p in model.parameters() if p.grad is not None]
    norm = fastsync.clip_grad_norm_(replicas, 1e3, norm_type=3.0)
    torch.testing.assert_close(norm, torch.stack(cubes).sum().pow(1 / 3))


def test_a_norm_before_another_average_is_not_told() -> None:
    run_ranks(_norm_before_another_average, 4)


def _state_of_narrow_gradients(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (world_size,))

    def with_handle() -> tuple[nn.Module, fastsync.ShardedGradients]:
        model = sharded(mesh, mp_policy=policy)
        return model, fastsync.register_reduce_scatter(model, "int8+ef")

    model, handle = with_handle()
    other, resumed = with_handle()
    step_of(model, 0, rank, world_size)
    resumed.load_state_dict(handle.state_dict())
    for each in (model, other):
        each.zero_grad()
        step_of(each, 1, rank, world_size)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            assert_bitwise_equal(full(mine.grad), full(theirs.grad))


def test_what_error_feedback_has_of_narrow_gradients_goes_on() -> None:
    run_ranks(_state_of_narrow_gradients, 2)


def _scales_go_on(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    states = []
    for _ in range(2):
        model = sharded(mesh["shard"])
        handle = fastsync.register_all_reduce_hook(model, "fp16", process_group=mesh["replicate"])
        if states:
            handle.load_state_dict(states[0])
            assert handle.state_dict()["scales"] == states[0]["scales"]
        else:
            step_of(model, 0, rank, world_size)
            states.append(handle.state_dict())
            assert states[0]["scales"]
    step_of(model, 1, rank, world_size)


def test_the_scales_of_a_hook_go_on() -> None:
    run_ranks(_scales_go_on, 2)


def _divides_by_another_factor(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = sharded(mesh)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(4.0)  # which Gloo's own reduce-scatter does not take
    handle = fastsync.register_reduce_scatter(model, "none")
    assert fastsync.handle_of(model) is handle
    step_of(model, 0, rank, world_size)
    alone = Tied()
    loss_of(alone, *batch_of(0)).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(full(mine.grad), theirs.grad * (world_size / 4.0))
    squares = [p.grad.square().sum() for p in alone.parameters() if p.grad is not None]
    expected = torch.stack(squares).sum().sqrt() * (world_size / 4.0)
    torch.testing.assert_close(handle.grad_norm(), expected)


def test_a_divide_factor_of_the_users() -> None:
    run_ranks(_divides_by_another_factor, 2)


# ---- norms, and what is said of them --------------------------------------------------------------------------------


def _clips(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = sharded(mesh)
    handle = fastsync.register_reduce_scatter(model, "bf16")
    with pytest.raises(RuntimeError, match="no gradients have been synchronised yet"):
        handle.grad_norm()
    step_of(model, 0, rank, world_size)
    before = [full(p.grad).clone() for p in model.parameters() if p.grad is not None]
    expected = torch.cat([grad.flatten() for grad in before]).norm()
    torch.testing.assert_close(handle.grad_norm(), expected)
    assert handle.grad_stats.grad_norm < expected  # of this rank's shards
    torch.testing.assert_close(fastsync.clip_grad_norm_(handle, 0.01), expected)
    after = [full(p.grad) for p in model.parameters() if p.grad is not None]
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other * (0.01 / expected))
    with pytest.raises(RuntimeError, match="no backward was synchronised since"):
        fastsync.clip_grad_norm_(handle, 0.01)
    step_of(model, 1, rank, world_size)  # without zero_grad
    with pytest.raises(RuntimeError, match="gradients were added to those that were there"):
        handle.grad_norm()
    model.zero_grad()
    step_of(model, 2, rank, world_size)
    assert handle.grad_norm() > 0
    with_sums = sharded(mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    handle = fastsync.register_reduce_scatter(with_sums)
    step_of(with_sums, 0, rank, world_size)
    with pytest.raises(RuntimeError, match="divides the sums afterwards"):
        fastsync.clip_grad_norm_(handle, 1.0)


def test_the_norm_over_all_shards() -> None:
    run_ranks(_clips, 2)


def _norms_of_replicas(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    handle = fastsync.register_reduce_scatter(model)
    step_of(model, 0, rank, world_size)
    with pytest.raises(RuntimeError, match="HSDP averages the shards"):
        handle.grad_norm()
    model = sharded(mesh["shard"])
    fastsync.register_reduce_scatter(model)
    handle = fastsync.register_all_reduce_hook(model, process_group=mesh["replicate"])
    step_of(model, 0, rank, world_size)
    expected = torch.cat([full(p.grad).flatten() for p in model.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(handle.grad_norm(), expected)


def test_the_norm_in_replicas() -> None:
    run_ranks(_norms_of_replicas, 4)


def _is_explained(rank: int, world_size: int) -> None:
    model = sharded(init_device_mesh("cpu", (world_size,)))
    handle = fastsync.register_reduce_scatter(model, {0: "bf16", 1: Compression("int8", rounding="stochastic")})
    for step in range(2):
        step_of(model, step, rank, world_size)
        stats = handle.stats()
        assert stats.num_steps == step + 1
        assert len(stats.buckets) == 3
        assert stats.transport == "shared memory"
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad) - 2 * 15
        assert trained <= stats.elements <= trained + 5 * 64  # rows are padded
    assert "int8, stochastic, fp32 sums" in repr(handle.explain())
    assert "ShardedGradients(11 parameters" in repr(handle)
    before = handle.stats().wire_bytes
    handle.compression = "none"
    step_of(model, 2, rank, world_size)
    assert handle.stats().wire_bytes - before >= 4 * trained // world_size
    assert str(handle.compression) == "none, fp32 sums"


def test_statistics_and_another_compression() -> None:
    run_ranks(_is_explained, 2)


# ---- state ----------------------------------------------------------------------------------------------------------


STOCHASTIC = Compression("int8", error_feedback=True, rounding="stochastic")


def _goes_on(rank: int, world_size: int, folder: str, compression: Any) -> None:
    from torch.distributed import checkpoint as dcp

    mesh = init_device_mesh("cpu", (world_size,))

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, fastsync.ShardedGradients]:
        model = sharded(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, fastsync.register_reduce_scatter(model, compression)

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            step_of(model, step, rank, world_size)
            optimizer.step()

    model, optimizer, handle = begin()
    go_on(model, optimizer, range(4))
    torch.save(handle.state_dict(), saved := io.BytesIO())
    torch.save(handle.state_dict(), f"{folder}/{rank}.pt")
    dcp.save({"model": model.state_dict(), f"fastsync {rank}": saved.getvalue()}, checkpoint_id=f"{folder}/shards")
    state = handle.state_dict()
    assert state["step"] == 4
    assert state["scales"] == {}  # each sum begins with one of its own
    residuals = state["residuals"]
    assert len(residuals) == (0 if compression == "fp16" else 3)
    assert all(key.endswith(f" of rank {rank}") and kept["own"].count_nonzero() for key, kept in residuals.items())
    go_on(model, optimizer, range(4, 8))

    resumed, optimizer, handle = begin()
    loaded = {"model": resumed.state_dict(), f"fastsync {rank}": b""}
    dcp.load(loaded, checkpoint_id=f"{folder}/shards")
    if residuals:
        with pytest.raises(ValueError, match=f"no parameter named .* of rank {1 - rank}'"):
            handle.load_state_dict(torch.load(f"{folder}/{1 - rank}.pt"))
    handle.load_state_dict(torch.load(io.BytesIO(loaded[f"fastsync {rank}"])))
    go_on(resumed, optimizer, range(4, 8))
    for index, (one, other) in enumerate(zip(resumed.parameters(), model.parameters(), strict=True)):
        assert_bitwise_equal(one.to_local(), other.to_local(), f"parameter {index}")


@pytest.mark.parametrize("compression", [{0: STOCHASTIC, 6: "fp16"}, "fp16"], ids=["scheduled", "fp16"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Any, compression: Any) -> None:
    run_ranks(_goes_on, 2, str(tmp_path), compression)


# ---- ranks that are lost --------------------------------------------------------------------------------------------


def _loses_a_rank(rank: int, world_size: int) -> None:
    model = sharded(init_device_mesh("cpu", (world_size,)), reshard_after_forward=False)
    fastsync.register_reduce_scatter(model)
    step_of(model, 0, rank, world_size)
    loss = loss_of(model, *batch_of(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"averaging module 'blocks\.1' failed on rank 0 of 2: (.|\n)*rank 1"):
        loss.backward()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_that_is_lost_is_named(shared_memory: bool) -> None:
    run_ranks(_loses_a_rank, 2, shared_memory=shared_memory, lost={1})


def _meets_others(rank: int, world_size: int) -> None:
    engine = _C.ShardedState(dist.group.WORLD)
    engine.set_schedule(engine_schedule([(0, [Candidate(Compression("bf16", reduce="fp32"))])]))
    whole = [torch.empty(numel * world_size, device="meta") for numel in (64, 512, 512)]

    def send(index: int) -> Tensor:
        numel = whole[index].numel()
        output = torch.empty(numel // world_size)
        engine.reduce_scatter(whole[index], f"part {index}", output, torch.ones(numel), dist.ReduceOp.AVG)
        return output

    for step in range(2):
        assert all(send(index).eq(1).all() for index in range(3)), step
    with pytest.raises(
        RuntimeError, match=r"averaging part \d failed on rank(.|\n)*rank \d has (sent gradients of oth|fai)"
    ):
        send(1 if rank == world_size - 1 else 0 if world_size == 2 else 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_send_others_are_noticed_in_shared_memory(world_size: int) -> None:
    run_ranks(_meets_others, world_size)


# ---- what is refused ------------------------------------------------------------------------------------------------


class Foreign:
    """A reduce-scatter of somebody else's."""

    def allocate(self, size: Any, **options: Any) -> Tensor:
        return torch.empty(*size, **options)


def _refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    register = fastsync.register_reduce_scatter
    with pytest.raises(ValueError, match="expected a model that went through fully_shard, got int"):
        register(3)
    with pytest.raises(ValueError, match="no module of this Tied went through fully_shard"):
        register(Tied())
    model = sharded(mesh)
    for compression, message in (
        ("auto", "measures all-reduces"),
        ({0: "none", 5: "auto"}, "measures all-reduces"),
        (Compression("bf16", reduce="fp32", algorithm="two_shot"), "leave out algorithm='two_shot'"),
        (Compression("bf16", ranks_per_node=2), "ranks_per_node=2"),
        ("fp8", "expected one of 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            register(model, compression)
    register(model.blocks[0])
    register(model)
    with pytest.raises(ValueError, match="serves all of its modules already"):
        register(model)
    foreign = sharded(mesh)
    foreign.blocks[1].set_custom_reduce_scatter(Foreign())
    with pytest.raises(ValueError, match=r"module 'blocks\.1' has a reduce-scatter already, a Foreign"):
        register(foreign)
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mixed = Tied()
    fully_shard(mixed.blocks[0], mesh=pair["shard"])
    fully_shard(mixed, mesh=mesh)
    with pytest.raises(ValueError, match=r"sharded over several process groups .*the inner ones first"):
        register(mixed)
    register(mixed.blocks[0])
    register(mixed)

    several = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if hasattr(common, "ShardPlacementResult"):  # before it there were no several groups
        other = common.FSDPMeshInfo(pair["shard"], shard_mesh_dim=0)

        def place(parameter: nn.Parameter) -> Any:
            return common.ShardPlacementResult(Shard(0), other) if parameter is several[1].weight else None

        fully_shard(several, mesh=mesh, shard_placement_fn=place)
        with pytest.raises(ValueError, match="2 groups of parameters on different meshes"):
            register(several)

    hook = fastsync.register_all_reduce_hook
    with pytest.raises(ValueError, match="averages over replicas itself"):
        hook(sharded(pair), process_group=pair["replicate"])
    with pytest.raises(ValueError, match=r"ranks \[0, 1, 2, 3\] of one replica"):
        hook(sharded(mesh), process_group=mesh)
    served = sharded(pair["shard"])
    hook(served, process_group=pair["replicate"])
    with pytest.raises(ValueError, match="has an all-reduce hook already"):
        hook(served, process_group=pair["replicate"])
    dist.barrier()


def test_what_cannot_be_served_is_refused() -> None:
    run_ranks(_refused, 4)


def _differ(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"rank 0.*: compression bf16.*: compression none|rank .*do not agree"):
        fastsync.register_reduce_scatter(sharded(mesh), "none" if rank == 3 else "bf16")
    with pytest.raises(ValueError, match=r"rank 0: compression bf16, fp32 sums; rank 1: compression none, fp32 sums"):
        fastsync.register_reduce_scatter(sharded(mesh), "none" if rank >= 2 else "bf16")
    model = sharded(mesh["shard"])
    handle = fastsync.register_reduce_scatter(model, "bf16")
    handle.compression = "int8" if rank % 2 else "none"
    with pytest.raises(ValueError, match=r"do not agree on .*: rank 1: compression int8, .*; rank 0: compression none"):
        step_of(model, 0, rank, world_size)


def test_ranks_that_disagree_are_told() -> None:
    run_ranks(_differ, 4)

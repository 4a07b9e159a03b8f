"""Models under fully_shard: what the engine's all-gather gives, against PyTorch's and against rounded parameters."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import fastsync
from fastsync import _C, Compression
from fastsync.autotune.choose import Candidate, in_engine
from fastsync.sync.compression import Wire
from tests import reference
from tests.bitwise import assert_bitwise_equal
from tests.engine.sharded import Tied, batch_of, full, loss_of, sharded, step_of
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

WIRES: list[Wire] = ["none", "bf16", "fp16", "int8", "int4"]
RANKS = [(2, True), (2, False), (3, True), (3, False)]
"""How many, and whether they share memory."""


def rounded(values: Tensor, wire: Wire) -> Tensor:
    """What a wire carries of one parameter of a rank's shard."""
    dtype = reference.WIRE_DTYPE[wire]
    if dtype is None or dtype == values.dtype:
        return values.clone()
    stats = torch.zeros(reference.NUM_STATS, dtype=torch.float64)
    packed = torch.empty(reference.wire_numel([values.numel()], dtype), dtype=dtype)
    reference.pack([values], packed, stats, limit=reference.saturation_limit(dtype, 1))
    result = torch.empty_like(values)
    reference.unpack(packed, [result], stats)
    return result


# ---- the same bits as the reference ---------------------------------------------------------------------------------


def engine_of(wire: Wire, names: list[str]) -> _C.ParameterGather:
    engine = _C.ParameterGather(dist.group.WORLD, names)
    engine.set_compressions(in_engine([Candidate(Compression(wire))]))
    return engine


def begin(engine: _C.ParameterGather, module: int, shard: Tensor, numels: list[int]) -> tuple[Tensor, _C.GatherWork]:
    output = torch.full((dist.get_world_size() * shard.numel(),), 7, dtype=shard.dtype, device=shard.device)
    output.view(dist.get_world_size(), -1)[dist.get_rank()] = shard
    return output, engine.all_gather(module, output, numels)


def shard_of(rank: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(10 * seed + rank))
    values[:4] = torch.tensor([1e30, -0.0, 1e-42, float("nan") if seed == 1 else 1.0])
    return values.to(dtype)


def expected_of(world_size: int, numels: list[int], dtype: torch.dtype, wire: Wire, seed: int) -> Tensor:
    shards = [shard_of(rank, sum(numels), dtype, seed) for rank in range(world_size)]
    return torch.cat([rounded(part, wire) for shard in shards for part in shard.split(numels)])


def _as_the_reference(rank: int, world_size: int, device: str) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    cases = [*itertools.product(WIRES, dtypes, ([5], [64, 3, 700]))]
    if world_size == 2:  # several pieces
        cases += itertools.product(("none", "int8"), (torch.float32,), ([1_200_000, 5],))
    for wire, dtype, numels in cases:
        engine = engine_of(wire, ["first", "second"])
        # Two gathers are under way at once, and end in another order.
        for seed in range(2 if max(numels) < 1000 else 1):
            begun = [
                begin(engine, module, shard_of(rank, sum(numels), dtype, seed + module).to(device), numels)
                for module in range(2)
            ]
            for _, work in reversed(begun):
                work.wait()
            for module, (output, _) in enumerate(begun):
                expected = expected_of(world_size, numels, dtype, wire, seed + module)
                assert_bitwise_equal(output.cpu(), expected, f"{wire}, {dtype}, {numels}, gather {seed}")


@on_ranks(2, cases={"shared_memory": [True, False]})
def test_each_gather_under_way_has_memory_of_its_own(rank: int, world_size: int) -> None:
    """More than before, so that the memory of two does not serve the third. One that is dropped harms no other."""
    engine = engine_of("int8", ["first", "second", "third"])

    def check(output: Tensor, seed: int) -> None:
        expected = expected_of(world_size, [300], torch.float32, "int8", seed)
        assert_bitwise_equal(output, expected, f"gather {seed}")

    for num_gathers in (2, 3):
        begun = [begin(engine, seed, shard_of(rank, 300, torch.float32, seed), [300]) for seed in range(num_gathers)]
        for _, work in begun:
            work.wait()
        for seed, (output, _) in enumerate(begun):
            check(output, seed)
    for seed in range(4):
        begin(engine, 0, shard_of(rank, 300, torch.float32, 9), [300])  # nobody waits for it
        output, work = begin(engine, 1, shard_of(rank, 300, torch.float32, seed), [300])
        work.wait()
        work.wait()
        check(output, seed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world_size", "shared_memory"), [(1, True), *RANKS])
def test_gathered_parameters_are_the_references_to_the_bit(world_size: int, shared_memory: bool) -> None:
    run_ranks(_as_the_reference, world_size, "cpu", shared_memory=shared_memory)


@on_ranks(2)
def test_by_torchs_own_operations_they_are_the_references_to_the_bit(rank: int, world_size: int) -> None:
    os.environ["FASTSYNC_KERNELS"] = "aten"
    assert _C.kernels("cpu") == "generic"
    _as_the_reference(rank, world_size, "cpu")


@on_ranks(2)
def test_one_pass_unpacks_the_shards_of_all_ranks(rank: int, world_size: int) -> None:
    engine = engine_of("int8", ["module"])
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        begin(engine, 0, shard_of(rank, 300, torch.float32, 0), [100, 200])[1].wait()
    counts = {event.key: event.count for event in recorded.key_averages()}
    assert [counts["fastsync::pack"], counts["fastsync::unpack"]] == [1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gathered_parameters_on_gpus_are_the_references_to_the_bit(world_size: int) -> None:
    run_ranks(_as_the_reference, world_size, "cuda", backend="nccl")


# ---- trainings ------------------------------------------------------------------------------------------------------


class RoundingAllGather:
    """PyTorch's all-gather, and behind it the reference rounds each parameter of each rank's shard."""

    def __init__(self, module: Any, wire: Wire) -> None:
        (self._group,) = module._get_fsdp_state()._fsdp_param_groups
        self._wire = wire

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor.clone(), group=group)
        numels = [parameter.padded_sharded_param_size.numel() for parameter in self._group.fsdp_params]
        for shard in output_tensor.chunk(group.size()):
            for part in shard.split(numels):
                part.copy_(rounded(part, self._wire))


def parts_of(model: Any) -> list[Any]:
    return [*model.blocks, model]


def round_by_the_reference(model: Any, wire: Wire) -> None:
    for part in parts_of(model):
        part.set_custom_all_gather(RoundingAllGather(part, wire))


def trained(model: Any, rank: int, world_size: int, *, steps: int = 2, micro_batches: int = 1) -> list[Tensor]:
    """Trains, and returns this rank's shards."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        step_of(model, step, rank, world_size, micro_batches)
        optimizer.step()
    return [parameter.to_local().clone() for parameter in model.parameters()]


def assert_equal(mine: Sequence[Tensor], theirs: Sequence[Tensor], what: str) -> None:
    for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert_bitwise_equal(one, other, f"{what}, parameter {index}")


Change = Callable[[Any], None]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Change]] = {
    "plain": ({}, {}, lambda model: None),
    "kept whole after forward": ({"reshard_after_forward": False}, {}, lambda model: None),
    "bfloat16": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, {}, lambda model: None),
    "float16": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)}, {}, lambda model: None),
    "micro-batches": ({}, {"micro_batches": 2}, lambda model: None),
    "checkpointed": ({"checkpointed": True}, {}, lambda model: None),
    "prefetched in forward": ({}, {}, lambda model: model.set_modules_to_forward_prefetch(list(model.blocks))),
    "asynchronous": ({}, {}, lambda model: model._set_unshard_async_op(True)),
    "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}, lambda model: None),
}


def _trains_as_the_reference(rank: int, world_size: int, name: str, wires: Sequence[Wire]) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    of_model, of_training, change = CASES[name]
    for wire in wires:
        models = [sharded(mesh, **of_model) for _ in range(2)]
        handle = fastsync.register_fsdp(models[0], gradients="pytorch", parameters=wire)
        if wire != "none":
            round_by_the_reference(models[1], wire)
        for model in models:
            change(model)
        mine, theirs = (trained(model, rank, world_size, **of_training) for model in models)
        assert_equal(mine, theirs, f"{name}, {wire}")
        assert all(stats.num_syncs > 0 for stats in handle.stats().parameters.values())


@on_ranks(3, cases={"shared_memory": [True, False]})
def test_trains_as_with_rounded_parameters(rank: int, world_size: int) -> None:
    """At full width as fully_shard does by itself."""
    _trains_as_the_reference(rank, world_size, "plain", WIRES)


EACH_IN_ONE_WAY = [*zip(CASES, itertools.cycle([True, False]), strict=False)]
IN_BOTH_WAYS = ("prefetched in forward", "asynchronous", "offloaded")
"""Whose order of gathers is another."""


@on_ranks(
    2,
    cases={
        "name, shared_memory": [
            *EACH_IN_ONE_WAY,
            *((name, not shared_memory) for name, shared_memory in EACH_IN_ONE_WAY if name in IN_BOTH_WAYS),
        ]
    },
)
def test_trains_so_in_each_of_pytorchs_ways(rank: int, world_size: int, name: str) -> None:
    _trains_as_the_reference(rank, world_size, name, ["none", "int8"])


@on_ranks(4)
def test_trains_in_replicas_and_where_some_ranks_keep_what_forward_had(rank: int, world_size: int) -> None:
    """There backward gathers from fewer ranks, and what they kept is not rounded again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for wire in ("none", "int8"):
        models = [sharded(mesh) for _ in range(2)]
        fastsync.register_fsdp(models[0], gradients="pytorch", parameters=wire)
        if wire != "none":
            round_by_the_reference(models[1], wire)
        assert_equal(*(trained(model, rank, world_size) for model in models), wire)
    found = []
    for reshard_after_forward in (False, 2):
        model = sharded(init_device_mesh("cpu", (world_size,)), reshard_after_forward=reshard_after_forward)
        fastsync.register_fsdp(model, gradients="pytorch", parameters="int8")
        found.append(trained(model, rank, world_size))
    assert_equal(*found, "resharded to 2 ranks")


@on_ranks(2)
def test_beside_the_engines_reduce_scatter(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for gathers in (True, False):
        model = sharded(mesh)
        handle = fastsync.register_fsdp(model, gradients="int8", parameters="none" if gathers else "pytorch")
        found.append(trained(model, rank, world_size))
        assert fastsync.handle_of(model) is handle
        stats = handle.stats()
        assert stats.gradients is not None
        assert stats.wire_bytes == stats.gradients.wire_bytes > 0
        assert [len(stats.parameters), stats.parameter_wire_bytes > 0, stats.replicas] == [3 * gathers, gathers, None]
    assert_equal(*found, "int8 gradients")


# ---- what a rank computes with, and what it keeps -------------------------------------------------------------------


@on_ranks(3)
def test_all_ranks_compute_with_the_same_bits_and_shards_stay_exact(rank: int, world_size: int) -> None:
    model = sharded(init_device_mesh("cpu", (world_size,)))
    exact = {name: full(tensor).clone() for name, tensor in model.state_dict().items()}
    fastsync.register_fsdp(model, gradients="pytorch", parameters="int8")
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        seen.update({name: parameter.detach().clone() for name, parameter in model.blocks[0].named_parameters()})

    model.blocks[0].narrow.register_forward_hook(look)  # inside the forward of the whole block
    with torch.no_grad():
        model(batch_of(0)[0])
    assert any(not torch.equal(seen[name], exact[f"blocks.0.{name}"]) for name in seen)
    for name, mine in seen.items():
        theirs = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(theirs, mine)
        for other in theirs:
            assert_bitwise_equal(other, mine, name)
    for name, tensor in model.state_dict().items():
        assert_bitwise_equal(full(tensor), exact[name], name)


@on_ranks(2)
def test_evaluation_between_two_trainings(rank: int, world_size: int) -> None:
    """The engine's memory is made in inference mode, and serves a training afterwards."""
    tokens, _ = batch_of(0)
    mesh = init_device_mesh("cpu", (world_size,))
    for wire in ("none", "int8"):
        models = [sharded(mesh) for _ in range(2)]
        for model in models:
            trained(model, rank, world_size, steps=1)
        fastsync.register_fsdp(models[0], gradients="pytorch", parameters=wire)
        if wire != "none":
            round_by_the_reference(models[1], wire)
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert_bitwise_equal(*(model(tokens) for model in models), f"{wire}, {mode.__name__}")
        assert_equal(*(trained(model, rank, world_size) for model in models), wire)


@on_ranks(2)
def test_a_compiled_model(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    models = [sharded(mesh) for _ in range(2)]
    fastsync.register_fsdp(torch.compile(models[0], backend="eager"), gradients="pytorch", parameters="int8")
    round_by_the_reference(models[1], "int8")
    compiled = torch.compile(models[0], backend="eager")
    loss_of(compiled, *batch_of(rank)).backward()
    loss_of(models[1], *batch_of(rank)).backward()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        if theirs.grad is not None:
            assert_bitwise_equal(mine.grad.to_local(), theirs.grad.to_local())


class Noted:
    """An all-gather that notes what it does."""

    def __init__(self, comm: Any, name: str, events: list[str]) -> None:
        self._comm, self._name, self._events = comm, name, events
        self.allocate = comm.allocate

    def __call__(self, **options: Any) -> Any:
        self._events.append(f"send {self._name}")
        work = self._comm(**options)
        wait = work.wait
        work.wait = lambda: (self._events.append(f"wait for {self._name}"), wait())
        return work


@on_ranks(2)
def test_backward_computes_while_the_next_gather_travels(rank: int, world_size: int) -> None:
    model = sharded(init_device_mesh("cpu", (world_size,)))
    fastsync.register_fsdp(model, gradients="pytorch", parameters="int8")
    events: list[str] = []
    for index, block in enumerate(model.blocks):
        (group,) = block._get_fsdp_state()._fsdp_param_groups
        block.set_custom_all_gather(Noted(group._all_gather_comm, f"block {index}", events))
        block.narrow.register_full_backward_hook(lambda *_, name=f"block {index}": events.append(f"compute {name}"))
    loss = loss_of(model, *batch_of(rank))
    events.clear()
    loss.backward()
    assert events == [
        "send block 1",
        "wait for block 1",
        "send block 0",
        "compute block 1",
        "wait for block 0",
        "compute block 0",
    ]


# ---- the handle -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_costs_another_compression_and_a_model_that_is_given_back(rank: int, world_size: int) -> None:
    model = sharded(init_device_mesh("cpu", (world_size,)))
    handle = fastsync.register_fsdp(model, gradients="pytorch", parameters="bf16")
    assert repr(handle) == "ShardedHandle(3 modules, 2 ranks, parameters='bf16, all_reduce')"
    tokens, _ = batch_of(0)
    with torch.no_grad():
        model(tokens)
        stats = handle.stats().parameters
        assert list(stats) == ["", "blocks.0", "blocks.1"]
        block = stats["blocks.0"]
        assert (block.num_syncs, block.transport, block.transport_reason) == (1, "shared_memory", "")
        padded = sum(2 * -(-p.shape[0] // 2) * p[:1].numel() for p in Tied().blocks[0].parameters())
        assert block.numel == padded
        assert padded <= block.wire_bytes <= padded + 6 * 16  # two bytes of a half, with gaps between parameters
        handle.compression.parameters = "none"
        model(tokens)
        assert handle.stats().parameters["blocks.0"].wire_bytes - block.wire_bytes == 4 * padded // 2
        assert handle.compression.parameters == Compression("none")
        handle.detach()
        handle.detach()
        model(tokens)
        assert handle.stats().parameters["blocks.0"].num_syncs == 2
        fastsync.register_fsdp(model, gradients="pytorch", parameters="int8")
        model(tokens)


@on_ranks(2)
def test_an_all_gather_that_took_its_place_stays(rank: int, world_size: int) -> None:
    model = sharded(init_device_mesh("cpu", (world_size,)))
    handle = fastsync.register_fsdp(model, gradients="pytorch")
    foreign = Foreign(model.blocks[0], "int8")
    model.blocks[0].set_custom_all_gather(foreign)
    handle.detach()
    assert foreign._group._all_gather_comm is foreign
    assert type(Foreign(model.blocks[1], "int8")._group._all_gather_comm).__name__ == "DefaultAllGather"


# ---- errors ---------------------------------------------------------------------------------------------------------


class Foreign(RoundingAllGather):
    """An all-gather of somebody else's."""


@on_ranks(4)
def test_what_cannot_be_served_is_refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    register = partial(fastsync.register_fsdp, gradients="pytorch")
    refused(lambda: register(3), "expected a model that went through fully_shard,")
    refused(lambda: register(Tied()), "no module of this Tied went through fully_shard")
    model = sharded(mesh)
    for compression in ("auto", "int8+ef", "bf16+fp32", Compression("bf16", ranks_per_node=2)):
        refused(lambda: register(model, parameters=compression), "an all-gather adds nothing up and chooses")
    refused(lambda: register(model, parameters="int9"), "expected one of none,")
    register(model.blocks[0])
    handle = register(model)
    refused(lambda: register(model), "parameters:")
    with pytest.raises(ValueError, match="name a wire alone"):
        handle.compression.parameters = "auto"
    foreign = sharded(mesh)
    foreign.blocks[1].set_custom_all_gather(Foreign(foreign.blocks[1], "int8"))
    refused(lambda: register(foreign), "module 'blocks.1' has another all-gather")
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mixed = Tied()
    fully_shard(mixed.blocks[0], mesh=pair["shard"])
    fully_shard(mixed, mesh=mesh)
    refused(lambda: register(mixed), "sharded over several process groups")


@on_ranks(2)
def test_parameters_of_several_dtypes_travel_as_they_are(rank: int, world_size: int) -> None:
    def mixed() -> Any:
        model = Tied()
        for block in model.blocks:
            block.frozen.data = block.frozen.data.to(torch.bfloat16)
            fully_shard(block)
        return fully_shard(model)

    models = [mixed() for _ in range(2)]
    handle = fastsync.register_fsdp(models[0], gradients="pytorch", parameters="none")
    assert_equal(*(trained(model, rank, world_size) for model in models), "none")
    handle.compression.parameters = "int8"
    refused(lambda: models[0](batch_of(0)[0]), "module 'blocks.0' has parameters of Byte, or of")


@on_ranks(2)
def test_tensors_that_choose_what_they_send_are_packed_as_one(rank: int, world_size: int) -> None:
    """By FSDP2's extension methods: the first matrix sends each value twice, and takes the first of them."""

    def before(mesh: Any) -> Any:
        return (torch.stack([mine, mine]),), mine.shape

    def after(outputs: Any, metadata: Any, param_dtype: Any, *, out: Tensor | None = None) -> Any:
        first = torch.cat([pair[: len(pair) // 2] for pair in outputs[0].view(world_size, -1)]).view(8, 4)
        if out is None:
            return first, (first,)
        out.copy_(first)
        return None

    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)))
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    mine = group.fsdp_params[0]._sharded_local_tensor
    mine.fsdp_pre_all_gather, mine.fsdp_post_all_gather = before, after
    fastsync.register_fsdp(model, gradients="pytorch", parameters="bf16")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)).bfloat16().float()
    inputs = torch.randn(3, 4)
    assert_bitwise_equal(model(inputs), plain(inputs), "forward")


@on_ranks(2)
def test_ranks_that_disagree_are_told(rank: int, world_size: int) -> None:
    """Also on a compression that one rank sets alone."""
    mesh = init_device_mesh("cpu", (world_size,))
    register = partial(fastsync.register_fsdp, gradients="pytorch")
    with pytest.raises(ValueError, match=r"rank 0: all-gather, compression bf16; rank 1: all-gather, compression none"):
        register(sharded(mesh), parameters="none" if rank else "bf16")
    dtype = torch.bfloat16 if rank else None
    refused(lambda: register(sharded(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))), "shape [13, 9], torch")
    model = sharded(mesh)
    handle = register(model, parameters="bf16")
    with torch.no_grad():
        model(batch_of(0)[0])
        if rank == 0:
            handle.compression.parameters = "int8"
        refused(lambda: model(batch_of(0)[0]), "on rank", kind=RuntimeError)


@on_ranks(2)
def test_ranks_that_gather_others_are_noticed_in_shared_memory(rank: int, world_size: int) -> None:
    engine = engine_of("bf16", ["first", "second", "third"])
    for module in range(3):
        begin(engine, module, torch.ones(64), [64])[1].wait()
    refused(lambda: begin(engine, rank, torch.ones(64), [64])[1].wait(), "failed on rank", kind=RuntimeError)


def _loses_a_rank(rank: int, world_size: int) -> None:
    engine = engine_of("int8", ["module 'a'"])
    begin(engine, 0, torch.ones(64), [64])[1].wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = "fastsync: gathering module 'a' failed on rank 0 of 2: "
    refused(lambda: begin(engine, 0, torch.ones(64), [64])[1].wait(), said, kind=RuntimeError)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_that_is_lost_ends_the_wait(shared_memory: bool) -> None:
    run_ranks(_loses_a_rank, 2, shared_memory=shared_memory, lost=(1,))

"""``attach(micro_batches=)``: one digest of weights, optimizer state and norms, whatever the number of ranks."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_SELF, getpagesize, getrusage
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import fastsync
from fastsync.ppo.envs.interface import seed_globals
from fastsync.sync import freed_memory
from fastsync.sync.micro_batches import _SumsByTree, block_of, seed_of
from tests import passes, reference
from tests.engine.test_hosts import ALTERNATING, Nodes, run_on_hosts
from tests.engine.trained_by_micro_batches import (
    MICRO_BATCHES,
    NUM_STEPS,
    OPTIMIZERS,
    SEED,
    Training,
    make_optimizer,
    plain,
    tensors_of,
    train,
    train_a_part,
    train_elastic,
)
from tests.models import group_of_one
from tests.ranks import on_ranks, run_ranks


@cache
def alone(kind: str = "mlp", optimizer: str = "AdamW") -> str:
    """The digest that one rank ends with."""
    (digest,) = run_ranks(train, 1, kind, optimizer)
    return digest


# ---- the digests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (9, True), (5, False)])
def test_any_number_of_ranks(world_size: int, shared_memory: bool) -> None:
    assert run_ranks(train, world_size, shared_memory=shared_memory) == [alone()] * world_size


def _on_hosts(rank: int, world_size: int, nodes: Nodes, in_shards: bool) -> str:
    return train(rank, world_size, in_shards=in_shards)


@pytest.mark.parametrize("in_shards", [False, True])
def test_between_hosts(in_shards: bool) -> None:
    assert run_on_hosts(_on_hosts, ALTERNATING, in_shards) == [alone()] * 4


@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_other_models(kind: str) -> None:
    assert run_ranks(train, 3, kind, "SGD") == [alone(kind, "SGD")] * 3


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_in_shards(world_size: int, shared_memory: bool) -> None:
    digests = run_ranks(train, world_size, "mlp", "AdamW", True, shared_memory=shared_memory)
    assert digests == [alone()] * world_size


@pytest.mark.parametrize("has_owners", [False, True])
def test_muon(has_owners: bool) -> None:
    assert run_ranks(train, 3, "mlp", "Muon", has_owners) == [alone("mlp", "Muon")] * 3


@pytest.mark.parametrize("lost", [{0: (1, 1)}, {1: (2, 4), 2: (3, 4)}], ids=["rank 0", "two, one after the other"])
def test_after_losses(lost: dict[int, tuple[int, int]], tmp_path: Path) -> None:
    digests = run_ranks(train_elastic, 3, str(tmp_path / "store"), lost, lost=list(lost))
    assert [each for rank, each in enumerate(digests) if rank not in lost] == [alone()] * (3 - len(lost))


def test_with_ranks_that_join(tmp_path: Path) -> None:
    digests = run_ranks(train_elastic, 3, str(tmp_path / "store"), {0: (3, 0)}, {1: 0, 2: 1}, lost=[0])
    assert digests[1:] == [alone()] * 2


def test_resumed_on_another_number_of_ranks(tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint")
    run_ranks(train_a_part, 3, file, 0, 2)
    assert run_ranks(train_a_part, 2, file, 2, NUM_STEPS) == [alone()] * 2


# ---- the specification ----------------------------------------------------------------------------------------------


@on_ranks(3, cases={"optimizer": OPTIMIZERS})
def test_it_is_a_page_of_plain_pytorch(rank: int, world_size: int, optimizer: str) -> None:
    training = Training("mlp", optimizer)
    for step in range(NUM_STEPS):
        for index in training.sync.micro_batches(SEED):
            training.model.loss(step, index).backward()
        training.optimizer.step()
    for one, other in zip(tensors_of(training.model, training.optimizer), plain("mlp", optimizer), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or one.numpy().tobytes() == other.numpy().tobytes()


def test_sums_in_parts_are_those_of_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastsync.sync.micro_batches.CACHED_BYTES", 64)
    generator = torch.Generator().manual_seed(0)
    grads = [
        [None if (2 * index + part) % 5 < 2 else torch.randn(9, generator=generator) for part in range(6)] + [None]
        for index in range(MICRO_BATCHES)
    ]
    sums = _SumsByTree()
    for each in grads:
        sums.add([None if grad is None else grad.clone() for grad in each])
    for found, expected in zip(sums.root(), reference.mean_of_micro_batches(grads), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found / MICRO_BATCHES, expected)


@on_ranks(1)
def test_memory_of_gradients_stays_from_step_to_step(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    sync = fastsync.attach(model, micro_batches=4)
    faults = [0]
    for _ in range(9):
        model.zero_grad()
        for _ in sync.micro_batches():
            model(torch.ones(1, 1024)).sum().backward()
        faults.append(getrusage(RUSAGE_SELF).ru_minflt)
    pages_of_gradients = 8 * 2**20 // getpagesize()
    # Other threads of the process may cause some in any of the steps.
    assert min(after - before for before, after in pairwise(faults)) < pages_of_gradients / 8


@on_ranks(1)
def test_memory_stays_for_as_long_as_its_handle(rank: int, world_size: int) -> None:
    set_to: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patches:
        libc = SimpleNamespace(mallopt=set_to.__setitem__)
        patches.setattr(freed_memory, "ctypes", SimpleNamespace(CDLL=lambda name: libc))
        model = nn.Linear(512, 512)
        sync = fastsync.attach(model, micro_batches=4)
        kept = set_to[freed_memory._M_TRIM_THRESHOLD]
        sync.detach()
        del model, sync
        gc.collect()
    assert kept >= 4 * 512 * 512 * 4
    assert set_to[freed_memory._M_TRIM_THRESHOLD] == freed_memory._USUAL_TRIM_THRESHOLD


@pytest.mark.parametrize("kernels", ["auto", "aten"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_wires", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_wires_are_added_by_a_tree(num_wires: int, dtype: torch.dtype, kernels: str) -> None:
    generator = torch.Generator().manual_seed(num_wires)
    wires = torch.randn(num_wires, 1000, generator=generator, dtype=dtype) * 2.0 ** torch.arange(num_wires)[:, None]
    wires[:, :3] *= 2.0**-145 if dtype == torch.float32 else 2.0**-1070
    found, expected = (torch.empty(1000, dtype=dtype) for _ in range(2))
    grads = [torch.empty(1000, dtype=dtype)]
    passes.use_kernels(kernels)
    try:
        torch.ops.fastsync.reduce(wires, found, grad_dtype=dtype, multiplier=0.125, by_tree=True)
        torch.ops.fastsync.unpack(wires, grads, torch.zeros(4, dtype=torch.float64), multiplier=0.125, by_tree=True)
    finally:
        passes.use_kernels("auto")
    reference.reduce(wires, expected, grad_dtype=dtype, multiplier=0.125, by_tree=True)
    assert torch.equal(found, expected)
    assert torch.equal(grads[0], expected)


@pytest.mark.parametrize("micro_batches", [1, 2, 8, 32])
def test_blocks_are_whole_subtrees(micro_batches: int) -> None:
    for num_ranks in range(1, micro_batches + 3):
        blocks = [block_of(rank, num_ranks, micro_batches) for rank in range(num_ranks)]
        assert [index for block in blocks for index in block] == list(range(micro_batches))
        busy = [block for block in blocks if block]
        assert len(busy) == min(num_ranks, micro_batches)
        assert all(len(block).bit_count() == 1 and block.start % len(block) == 0 for block in busy)
        assert len(busy[0]) <= 2 * len(busy[-1])


# ---- around the loop ------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_gradients_norms_and_random_numbers_behind_the_loop(rank: int, world_size: int) -> None:
    training = Training()
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    training.sync.piggyback("seen", torch.tensor([float(rank)]))
    for index in training.sync.micro_batches(SEED):
        training.model.loss(0, index).backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert training.sync.piggybacked()["seen"].item() == 1.0
    assert training.model.unused.grad is None
    norm = training.sync.grad_stats().grad_norm
    grads = [each.grad for each in training.model.parameters() if each.grad is not None]
    torch.testing.assert_close(norm, nn.utils.get_total_norm(grads))
    assert torch.equal(fastsync.clip_grad_norm_(training.sync, 1e9), norm)
    for _ in training.sync.micro_batches(SEED):
        break
    assert torch.equal(torch.get_rng_state(), before)


def _drawn() -> list[float]:
    return [random.random(), np.random.random(), torch.rand(()).item()]  # noqa: NPY002


@on_ranks(2)
def test_generators_of_python_and_numpy_if_asked(rank: int, world_size: int) -> None:
    """In loops over two handles at a time."""
    syncs = [fastsync.attach(nn.Linear(2, 2), micro_batches=4) for _ in range(2)]
    seed_globals(rank)
    torch.manual_seed(rank)
    expected = _drawn()
    seed_globals(rank)
    torch.manual_seed(rank)
    loops = [sync.micro_batches(SEED, python=True, numpy=True) for sync in syncs]
    drawn = {index: _drawn() for index, _ in zip(*loops, strict=True)}
    assert _drawn() == expected
    everyone: list[dict[int, list[float]]] = [{}] * world_size
    dist.all_gather_object(everyone, drawn)
    assert len({tuple(each) for of_rank in everyone for each in of_rank.values()}) == 4
    for index, (of_python, *_) in drawn.items():
        random.seed(seed_of(SEED, 0, index))
        assert random.random() == of_python


@on_ranks(1)
def test_statistics_of_clipped_means_are_refused(rank: int, world_size: int) -> None:
    training = Training()
    with pytest.raises(RuntimeError, match="no gradients have been synchronised"):
        training.sync.grad_stats()
    training.step(0)
    with pytest.raises(RuntimeError, match="have changed since"):
        training.sync.grad_stats()
    training.step(1)
    assert torch.equal(training.sync.grad_stats().grad_norm, training.norm.value)


@on_ranks(2)
def test_ranks_that_compute_unlike_are_named(rank: int, world_size: int) -> None:
    torch.set_num_threads(1 + rank)
    training = Training()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.step(0)
        training.step(1)
    (said,) = (str(each.message) for each in caught if "compute alike" in str(each.message))
    assert "threads 1. Rank 1" in said
    assert "threads 2" in said


@on_ranks(2)
def test_ranks_with_other_numbers_are_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="micro_batches"):
        fastsync.attach(nn.Linear(2, 2), micro_batches=[2, 4][rank])


def _with_batch_norm(sync: object = None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    next(fastsync.attach(model, micro_batches=2).micro_batches())


def _with_a_changed_buffer() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("count", torch.zeros(1))
    for _ in fastsync.attach(model, micro_batches=2).micro_batches():
        model.count += 1


def _stepped_outside() -> None:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, "SGD")
    fastsync.attach(model, micro_batches=2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def _of(**options: object) -> Callable[[], object]:
    return lambda: fastsync.attach(nn.Linear(2, 2), **{"micro_batches": 2, **options})


def _then(call: Callable[[fastsync.sync.synchronizer.GradientSynchronizer], object]) -> Callable[[], object]:
    return lambda: call(fastsync.attach(nn.Linear(2, 2), micro_batches=2))


def _enter(context: object) -> None:
    with context:  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (_of(micro_batches=6), "micro_batches: expected a power of two up to 32768, got 6"),
        (_of(micro_batches=0), "got 0"),
        (_of(micro_batches=2.0), "got 2.0"),
        (_of(compression="fp16"), "compression: micro_batches needs 'none'"),
        (_of(compression="auto"), "compression: micro_batches needs 'none'"),
        (_of(op="sum"), "op: with micro_batches expected 'mean', got 'sum'"),
        (_of(broadcast_buffers=True), "broadcast_buffers"),
        (lambda: fastsync.attach(nn.Linear(2, 2).bfloat16(), micro_batches=2), "parameter weight has gradients of"),
        (lambda: fastsync.attach(nn.Embedding(2, 2, sparse=True), micro_batches=2), "sparse=True"),
        (lambda: fastsync.attach(DistributedDataParallel(nn.Linear(2, 2)), micro_batches=2), "Distributed"),
        (lambda: fastsync.attach(nn.Linear(2, 2)).micro_batches(), r"attach\(model, micro_batches=8\)"),
        (_then(lambda sync: setattr(sync, "compression", "int8")), "compression: micro_batches needs 'none'"),
        (_then(lambda sync: sync.set_weight(2.0)), r"set_weight\(\)"),
        (_then(lambda sync: sync.synchronize()), r"synchronize\(\)"),
        (_then(lambda sync: _enter(sync.no_sync())), r"no_sync\(\)"),
        (_then(lambda sync: _enter(sync.join())), r"join\(\)"),
        (_then(lambda sync: fastsync.clip_grad_norm_([sync], 1.0)), "micro_batches"),
        (_with_batch_norm, "BatchNorm1d of 2 features in train mode"),
        (_with_a_changed_buffer, "the buffer 'count' of a Linear"),
        (_stepped_outside, "for index in sync.micro_batches"),
    ],
)
def test_what_would_break_the_promise_is_refused(call: Callable[[], object], said: str) -> None:
    with group_of_one(), pytest.raises((ValueError, RuntimeError), match=said):
        call()


def _with_a_scaler(rank: int, world_size: int) -> tuple[list[torch.Tensor], float]:
    """Autocast, an inf in one micro-batch of one step, and a clip of what was unscaled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sync = fastsync.attach(model, micro_batches=MICRO_BATCHES)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        for index in sync.micro_batches(seed=1):
            data = torch.randn(4, 16) * (torch.inf if (step, index) == (2, 5) else 1.0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(data).square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*(parameter.detach() for parameter in model.parameters()), *states], scaler.get_scale()


@pytest.mark.parametrize("backend", ["gloo", "fastsync"])
def test_a_scaler_sees_the_same_on_any_number_of_ranks(backend: str) -> None:
    ((expected, scale),) = run_ranks(_with_a_scaler, 1)
    assert scale == 2.0**10  # twice as much after two steps, and half of it after the inf
    for found, found_scale in run_ranks(_with_a_scaler, 3, backend=backend):
        assert found_scale == scale
        assert all(map(torch.equal, found, expected))


# ---- data -----------------------------------------------------------------------------------------------------------


def _rows(
    rank: int, world_size: int, first: dict[str, object] | None, num_workers: int
) -> dict[tuple[int, int], list[int]]:
    sampler = fastsync.data.MicroBatchSampler(100, 3, MICRO_BATCHES, seed=1)
    sampler.set_epoch(2)
    if first is not None:
        sampler.load_state_dict(first)
    of_workers = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_sampler=sampler, **of_workers)
    batches = iter(loader)
    assert len(sampler) == len(list(sampler))
    seen = {}
    for step in sampler.steps():
        for index in block_of(rank, world_size, MICRO_BATCHES):
            (rows,) = next(batches)
            assert rows.tolist() == sampler.rows(step, index)
            seen[step, index] = rows.tolist()
    assert sampler.state_dict() == {"epoch": 2, "step": 4, "seed": 1}
    return seen


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_are_those_of_one_rank(num_workers: int) -> None:
    """A DataLoader without workers asks for the first rows when the first step has begun."""
    (expected,) = run_ranks(_rows, 1, None, num_workers)
    assert len(expected) == 4 * MICRO_BATCHES
    assert len({row for rows in expected.values() for row in rows}) == 96
    first, second, third = run_ranks(_rows, 3, {"epoch": 2, "step": 1, "seed": 1}, num_workers)
    assert first | second | third == {key: rows for key, rows in expected.items() if key[0] >= 1}


def test_each_epoch_has_an_order_of_its_own() -> None:
    sampler = fastsync.data.MicroBatchSampler(16, 1, 8)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert sorted(row for rows in sampler for row in rows) == list(range(16))
    assert list(fastsync.data.MicroBatchSampler(16, 1, 8, seed=None)) == [[row] for row in range(16)]
    with pytest.raises(ValueError, match="length: a step takes 2 rows for each of 8 micro-batches"):
        fastsync.data.MicroBatchSampler(15, 2, 8)
    with pytest.raises(ValueError, match="rows: step 2, index 0"):
        sampler.rows(2, 0)
    with pytest.raises(ValueError, match="seed"):
        sampler.load_state_dict({"epoch": 0, "step": 0, "seed": 7})

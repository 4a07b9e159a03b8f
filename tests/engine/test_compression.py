"""Compression: its names, and that it can be swapped while training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.autotune import Auto
from fastsync.sync.compression import as_compression, parse_compression
from tests.models import (
    SMALL_BUCKETS,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    batch,
    grads_of,
    train_step,
)
from tests.ranks import on_ranks
from tests.refused import refused


def test_a_wires_name_is_shorthand_for_its_compression() -> None:
    assert fastsync.Compression() == fastsync.Compression(wire="none") == as_compression("none")
    assert as_compression("fp16") == fastsync.Compression(wire="fp16") != as_compression("bf16")
    compression = fastsync.Compression(wire="bf16")
    assert as_compression(compression) is compression


@pytest.mark.parametrize("read", [parse_compression, as_compression])
def test_a_word_has_options_behind_the_wire(read: Callable[[str], object]) -> None:
    assert read("int8+ef") == fastsync.Compression("int8", error_feedback=True)
    assert read("fp16+ef") == fastsync.Compression("fp16", reduce="fp32", error_feedback=True)
    assert read("none+one_shot") == fastsync.Compression(reduce="fp32", algorithm="one_shot")
    everything = fastsync.Compression("int8", error_feedback=True, algorithm="two_shot")
    assert read("int8+two_shot+ef+fp32") == everything
    assert read("lowrank") == read("lowrank:4") == read("lowrank+ef") == fastsync.Compression("lowrank", rank=4)
    assert read("lowrank:8+two_shot") == fastsync.Compression("lowrank", rank=8, algorithm="two_shot")


@on_ranks(2)
def test_every_entry_point_takes_the_words(rank: int, world_size: int) -> None:
    """What is meant arrives: error feedback is not dropped."""
    meant = fastsync.Compression("int8", error_feedback=True)
    sync = fastsync.attach(Mlp(), "int8+ef")
    hook = fastsync.register_comm_hook(DistributedDataParallel(Mlp()), "int8+ef")
    alone = fully_shard(Mlp(), mesh=init_device_mesh("cpu", (world_size,)))
    sharded = fastsync.register_fsdp(alone, gradients="int8+ef")
    prepared = fastsync.register_prepared(DistributedDataParallel(Mlp()), "int8+ef")
    assert sync.compression == hook.compression == sharded.compression.gradients == prepared.compression == meant
    sync.compression = "none"
    sync.compression = "int8+ef"
    assert sync.compression == meant
    sync.compression = "auto:int8"
    assert sync.compression == Auto(allow=("int8",))
    for kind in (fastsync.DiLoCo, fastsync.LocalSGD):
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = kind(model, optimizer, sync_every=2, compression="int8+ef")
        assert outer._compression == meant
    grads = [torch.zeros(256, requires_grad=True) for _ in range(2)]
    for each, compression in zip(grads, ("int8+ef", meant), strict=True):
        for step in range(2):
            each.grad = torch.linspace(rank, 1.0 + step, 256).square()
            fastsync.all_reduce_gradients([each], compression)
    assert_all_bitwise_equal([grads[0].grad], [grads[1].grad], "after two steps, gradient")


def test_what_is_no_compression_is_refused() -> None:
    words = ("int8+eff", "int8_ef", "int8+", "ef+int8", "auto+ef", "auto:int4", "int8+ef+ef", "int8+one_shot+two_shot")
    words += ("none+ef", "lowrank:", "lowrank:few", "lowrank:x", "lowrank:0", "low_rank", "topk", "int8:4")
    for read in (parse_compression, as_compression, fastsync.Compression):
        for each in words:
            refused(lambda: read(each), "compression:")
    for read in (as_compression, fastsync.Compression):
        for other in (None, 16, b"fp16"):
            refused(lambda: read(other), "compression:")


def test_a_word_is_refused_with_what_may_have_been_meant() -> None:
    for read in (parse_compression, as_compression, fastsync.Compression):
        refused(lambda: read("float16"), "int4, lowrank, auto", "got 'float16'; did you mean fp16 or bf16?")
    refused(lambda: fastsync.Compression("int8+ef"), "a word for Compression('int8', error_feedback=True); ")


def test_who_adds_follows_from_the_wire() -> None:
    assert fastsync.Compression("fp16").reduce == fastsync.Compression().reduce == "wire"
    assert fastsync.Compression("int8") == fastsync.Compression("int8", reduce="fp32")
    assert str(fastsync.Compression("fp16")) == "fp16, all_reduce"
    feeds_back = fastsync.Compression("int8", error_feedback=True, algorithm="one_shot")
    assert str(feeds_back) == "int8, error feedback, one_shot"
    assert fastsync.Compression("lowrank").reduce == "fp32"
    assert str(fastsync.Compression("lowrank", rank=2)) == "lowrank of rank 2, error feedback, fp32 sums"
    assert fastsync.Compression("bf16", ranks_per_node=1).reduce == "wire"
    assert str(fastsync.Compression("bf16", ranks_per_node=8)) == "bf16, fp32 sums, 8 ranks per node"


def test_what_does_not_go_together_is_refused() -> None:
    given: list[dict[str, Any]] = [
        {"wire": "int8", "reduce": "wire"},
        {"wire": "fp16", "reduce": "fp64"},
        {"wire": "int8", "algorithm": "ring"},
        {"wire": "fp16", "algorithm": "one_shot"},
        {"wire": "fp16", "error_feedback": True},
        {"reduce": "fp32", "error_feedback": True},
        {"wire": "int8", "error_feedback": "yes"},
        {"wire": "int8", "ranks_per_node": 0},
        {"wire": "int8", "ranks_per_node": True},
        {"wire": "bf16", "reduce": "wire", "ranks_per_node": 2},
        {"wire": "int8", "algorithm": "two_shot", "ranks_per_node": 2},
        {"wire": "int8", "rank": 4},
        *({"wire": "lowrank", "rank": rank} for rank in (0, 2.0, True)),
        {"wire": "lowrank", "error_feedback": False},
        {"wire": "lowrank", "ranks_per_node": 2},
        {"wire": "lowrank", "reduce": "wire", "algorithm": "two_shot"},
    ]
    for options in given:
        refused(lambda: fastsync.Compression(**options), "compression:")


def test_auto_allows_by_name_what_loses_more() -> None:
    assert as_compression("auto") == Auto()
    assert parse_compression("auto:int8") == Auto(allow=("int8",))
    for allow in ("int8", ("fp16",), ["int8"]):
        refused(lambda: Auto(allow=allow), "allow:")


@on_ranks(2, shared_memory=False)
def test_a_run_that_swaps_goes_on_as_one_that_had_it_from_there(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL_BUCKETS)
    hook = fastsync.register_comm_hook(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step = 0
    for compression in ("none", fastsync.Compression("fp16"), "bf16", "none"):
        hook.compression = compression
        assert hook.compression == as_compression(compression)
        fresh = DistributedDataParallel(copy.deepcopy(ddp.module), bucket_cap_mb=SMALL_BUCKETS)
        fastsync.register_comm_hook(fresh, compression)
        fresh_optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
        for _ in range(3):
            train_step(ddp, optimizer, batch(rank, step))
            train_step(fresh, fresh_optimizer, batch(rank, step))
            assert_all_bitwise_equal(grads_of(ddp), grads_of(fresh), f"{compression}: step {step}, gradient")
            assert_all_bitwise_equal(list(ddp.parameters()), list(fresh.parameters()), f"step {step}, parameter")
            step += 1
        assert_same_on_all_ranks(list(ddp.parameters()))

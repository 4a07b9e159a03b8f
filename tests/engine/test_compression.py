"""Compression: its names, and that it can be swapped while training."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.compression import as_compression, parse_compression
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


def test_a_wires_name_is_shorthand_for_its_compression() -> None:
    assert fastsync.Compression() == fastsync.Compression(wire="none") == as_compression("none")
    assert as_compression("fp16") == fastsync.Compression(wire="fp16") != as_compression("bf16")
    compression = fastsync.Compression(wire="bf16")
    assert as_compression(compression) is compression


def test_a_command_line_has_options_behind_the_wire() -> None:
    assert parse_compression("int8+ef") == fastsync.Compression("int8", error_feedback=True)
    assert parse_compression("fp16+ef") == fastsync.Compression("fp16", reduce="fp32", error_feedback=True)
    assert parse_compression("none+one_shot") == fastsync.Compression(reduce="fp32", algorithm="one_shot")
    everything = fastsync.Compression("int8", error_feedback=True, algorithm="two_shot")
    assert parse_compression("int8+two_shot+ef+fp32") == everything


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int8+eff", "expected one of .*, got 'int8\\+eff'"),
        ("int8+", "expected one of .*, got 'int8\\+'"),
        ("ef+int8", "expected one of .*, got 'ef\\+int8'"),
        ("auto+ef", "expected one of .*, got 'auto\\+ef'"),
        ("none+ef", "error_feedback needs a wire that loses something"),
    ],
)
def test_options_that_do_not_fit_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^compression: {message}"):
        parse_compression(text)


@pytest.mark.parametrize(
    ("wire", "meant"),
    [
        ("fp8", "; did you mean fp16?"),
        ("FP16", "; did you mean fp16 or bf16?"),
        ("float16", "; did you mean fp16 or bf16?"),
        ("bfloat16", "; did you mean bf16 or fp16?"),
        ("auto:int8", "; did you mean int8 or auto?"),
        ("int8+ef", "; did you mean int8 or int4?"),
        ("", ""),
        (None, ""),
        (16, ""),
    ],
)
def test_an_unknown_name_is_refused_with_the_names_there_are(wire: object, meant: str) -> None:
    names = "'none', 'bf16', 'fp16', 'int8', 'int4', 'auto'"
    message = rf"compression: expected one of {names}, .*, got {re.escape(repr(wire))}{re.escape(meant)}$"
    with pytest.raises(ValueError, match=message):
        as_compression(wire)
    with pytest.raises(ValueError, match=message):
        fastsync.Compression(wire=wire)


def test_who_adds_follows_from_the_wire() -> None:
    assert fastsync.Compression("fp16").reduce == fastsync.Compression().reduce == "wire"
    assert fastsync.Compression("int8") == fastsync.Compression("int8", reduce="fp32")
    assert str(fastsync.Compression("fp16")) == "fp16, all_reduce"
    feeds_back = fastsync.Compression("int8", error_feedback=True, algorithm="one_shot")
    assert str(feeds_back) == "int8, error feedback, one_shot"
    assert fastsync.Compression("bf16", ranks_per_node=1).reduce == "wire"
    assert str(fastsync.Compression("bf16", ranks_per_node=8)) == "bf16, fp32 sums, 8 ranks per node"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire": "int8", "reduce": "wire"}, "int8 blocks cannot be added on the wire"),
        ({"wire": "fp16", "reduce": "fp64"}, "reduce has to be one of 'wire', 'fp32', got 'fp64'"),
        ({"wire": "int8", "algorithm": "ring"}, "algorithm has to be one of None, 'one_shot', 'two_shot', got 'ring'"),
        ({"wire": "fp16", "algorithm": "one_shot"}, "algorithm='one_shot' needs reduce='fp32'"),
        ({"wire": "fp16", "error_feedback": True}, "error_feedback needs reduce='fp32'"),
        ({"reduce": "fp32", "error_feedback": True}, "error_feedback needs a wire that loses something"),
        ({"wire": "int8", "error_feedback": "yes"}, "error_feedback has to be one of True, False, got 'yes'"),
        ({"wire": "int8", "ranks_per_node": 0}, "ranks_per_node has to be at least 1, got 0"),
        ({"wire": "bf16", "reduce": "wire", "ranks_per_node": 2}, "ranks_per_node=2 needs reduce='fp32'"),
        ({"wire": "int8", "algorithm": "two_shot", "ranks_per_node": 2}, "ranks_per_node=2 has an algorithm"),
        ({"wire": "int8", "ranks_per_node": True}, "ranks_per_node has to be at least 1, got True"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^compression: {message}"):
        fastsync.Compression(**options)


def test_auto_allows_by_name_what_loses_more() -> None:
    assert as_compression("auto") == fastsync.Auto()
    assert parse_compression("auto:int8") == fastsync.Auto(allow=("int8",))
    for allow in ("int8", ("fp16",), ["int8"]):
        with pytest.raises(ValueError, match=r"allow: expected a tuple of names out of \('int8',\), got"):
            fastsync.Auto(allow=allow)


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

"""The DDP hook with weights, and with sums in place of means."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression
from fastsync.sync.ddp import CommHook
from tests import reference
from tests.engine.entry_points import whole_numbers
from tests.models import (
    SMALL_BUCKETS,
    Given,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    grads_of,
    random_grads,
)
from tests.ranks import on_ranks
from tests.refused import refused

SHAPES = [(7, 33), (300,), (2, 3, 4), (250,)]
OPTIONS = ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True})


def _whole(rank: int, step: int) -> list[Tensor]:
    return whole_numbers(rank, step, SHAPES)


def _ddp(op: str, compression: Any = "none", **options: Any) -> tuple[DistributedDataParallel, CommHook]:
    """A DDP model of the ``SHAPES``, in several buckets."""
    ddp = DistributedDataParallel(Given(_whole(0, 0)), bucket_cap_mb=SMALL_BUCKETS, **options)
    return ddp, fastsync.register_comm_hook(ddp, compression, op=op)


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (3, False)])
@on_ranks(parametrized=("shared_memory",))
def test_weighted_means_and_sums(rank: int, world_size: int) -> None:
    """In each mode of DDP. First nobody has asked for weights, then they are numbers of tokens, one of them 0.

    With a static graph, whose first step DDP sends in another way, the first has weights already.
    """
    for op in ("mean", "sum"):
        for wire, options in [*((wire, {}) for wire in ("fp16", "int8+ef")), *(("none", each) for each in OPTIONS)]:
            ddp, hook = _ddp(op, wire, **options)
            first_weighted = 0 if options.get("static_graph") else 2
            for step in range(6):
                everyone = [_whole(other, step) for other in range(world_size)]
                is_weighted = step >= first_weighted
                weights = [64.0 * (1 + step * other) if is_weighted else 1.0 for other in range(world_size)]
                if step == 5:
                    weights[1] = 0.0
                if is_weighted:
                    hook.set_weight(weights[rank])
                mine = [grad * math.nan for grad in everyone[rank]] if weights[rank] == 0 else everyone[rank]
                ddp.zero_grad()
                if not options.get("static_graph"):  # which has no no_sync()
                    mine = [grad / 2 for grad in mine]
                    with ddp.no_sync():
                        ddp(mine).backward()
                ddp(mine).backward()
                total = sum(weights)
                expected = [
                    sum(w * g.double() for w, g in zip(weights, same, strict=True)) / (total if op == "mean" else 1)
                    for same in zip(*everyone, strict=True)
                ]
                largest = max(float(each.abs().max()) for each in expected)
                atol = (1e-6 if wire == "none" else 3e-2) * largest
                for got, right in zip(grads_of(ddp), expected, strict=True):
                    torch.testing.assert_close(got, right.float(), rtol=0, atol=atol)
                assert_same_on_all_ranks(grads_of(ddp))
                norm = torch.cat([grad.flatten() for grad in grads_of(ddp)]).norm()
                torch.testing.assert_close(hook.grad_stats().grad_norm, norm, rtol=1e-5, atol=0)
                torch.testing.assert_close(fastsync.clip_grad_norm_(hook, math.inf), norm, rtol=1e-5, atol=0)
            hook.compression = "none"
            for _ in range(2):  # the first brings what error feedback has kept
                hook.set_weight(0)
                ddp.zero_grad()
                ddp(_whole(rank, 0)).backward()
            assert all(not grad.any() for grad in grads_of(ddp)), "nobody counts for anything"


@on_ranks(3, cases={"shared_memory": [True, False]})
def test_weighted_means_are_the_references_to_the_bit(rank: int, world_size: int) -> None:
    for wire, wire_dtype in (("none", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        for weights in ([1.0, 3.0, 2.5], [3e38, 0.0, 1e38]):
            everyone = [random_grads(other, 7, SHAPES, torch.float32) for other in range(world_size)]
            expected = reference.all_reduce_mean(everyone, wire_dtype, reduce="fp32", weights=weights)
            ddp = DistributedDataParallel(Given(everyone[rank]), bucket_cap_mb=64)
            hook = fastsync.register_comm_hook(ddp, Compression(wire, "fp32", algorithm="one_shot"))
            hook.set_weight(weights[rank])
            ddp(everyone[rank]).backward()
            assert_all_bitwise_equal(grads_of(ddp), expected, f"{wire}, {weights}: gradient")


@on_ranks(2)
def test_in_ddps_join_who_has_run_out_counts_for_nothing(rank: int, world_size: int) -> None:
    """So equal weights give the mean over the ranks that still have batches, and sums are sums over these."""
    for op in ("mean", "sum"):
        ddp, hook = _ddp(op)
        hook.set_weight(1.0)
        for all_steps in ((1, 3), (4, 2)):
            with ddp.join():
                for step in range(all_steps[rank]):
                    ddp.zero_grad()
                    ddp(_whole(rank, step)).backward()
                    together = [_whole(other, step) for other in range(2)]
                    both = [sum(same) / (2 if op == "mean" else 1) for same in zip(*together, strict=True)]
                    is_alone = step >= min(all_steps)
                    expected = _whole(rank, step) if is_alone else both
                    assert_all_bitwise_equal(grads_of(ddp), expected, f"{op}, step {step} of {all_steps}: gradient")


@on_ranks(2)
def test_a_weight_counts_for_all_micro_batches(rank: int, world_size: int) -> None:
    tokens = ((1, 9), (5, 2))[rank]
    for set_to_none in (True, False):
        ddp, hook = _ddp("mean")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def micro_batches(total: int, weighs_each: bool, ddp: Any = ddp, hook: Any = hook) -> None:
            for index, count in enumerate(tokens):
                if weighs_each:
                    hook.set_weight(count)
                with ddp.no_sync() if index == 0 else nullcontext():
                    ddp([torch.full(shape, 10.0 * rank + index + 1) * (count / total) for shape in SHAPES]).backward()

        for _ in range(2):
            hook.set_weight(5.0)
            hook.set_weight(sum(tokens))  # as where a batch is skipped
            micro_batches(sum(tokens), weighs_each=False)
            for grad in grads_of(ddp):
                torch.testing.assert_close(grad, torch.full_like(grad, 98 / 17))
            fastsync.clip_grad_norm_(hook, 0.1)
            optimizer.step()
            hook.set_weight(5.0)
            optimizer.zero_grad(set_to_none=set_to_none)
            hook.set_weight(6.0)
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"set_weight\(\) was called after a backward .* weights\.\d, no sync"):
            micro_batches(1, weighs_each=True)


@on_ranks(2)
def test_what_is_refused(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(Given([torch.ones(3)]))
    refused(lambda: fastsync.register_comm_hook(ddp, op="avg"), "op:")
    hook = fastsync.register_comm_hook(ddp, op="sum" if rank else "mean")
    for weight in (-1.0, math.inf, math.nan, 10**400, None, "many"):
        refused(lambda: hook.set_weight(weight), "weight:")
    refused(lambda: ddp([torch.ones(3)]).backward(), "rank 0: op mean; rank 1: op sum")


# ---- sums that are still there --------------------------------------------------------------------------------------


@on_ranks(2, cases={"options": OPTIONS})
def test_a_backward_that_would_add_to_a_sum_is_refused(rank: int, world_size: int, options: dict[str, bool]) -> None:
    """Each rank would count it once more. After zero_grad() the hook goes on, and so it does after it was refused."""
    ddp, hook = _ddp("sum", **options)
    everyone = [_whole(other, 0) for other in range(world_size)]
    expected = [sum(same) for same in zip(*everyone, strict=True)]
    message = r'\.grad still holds what the step before has left there, and with op="sum"'
    for change in (lambda grad: grad, lambda grad: grad.mul_(0.5), lambda grad: grad.data.mul_(0.5)):
        ddp.zero_grad()
        ddp(everyone[rank]).backward()
        assert_all_bitwise_equal(grads_of(ddp), expected, "gradient")
        for grad in grads_of(ddp):
            change(grad)
        loss = ddp(everyone[rank])
        with pytest.raises(RuntimeError, match=message):
            loss.backward()
    assert hook.stats().num_steps == 3

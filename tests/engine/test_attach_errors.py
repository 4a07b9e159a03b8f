"""Backwards that fail, and gradients that one rank alone refuses: no rank waits for ever, and all go on in step."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastsync
from tests.engine.attached import assert_freed, backward_of_given, references_to
from tests.models import SMALL_BUCKETS, Fails, Given, assert_all_bitwise_equal, grads_of
from tests.ranks import on_ranks
from tests.refused import refused


@on_ranks(2, cases={"failing": [(1,), (0, 1)]})
def test_a_backward_that_fails_is_noticed_on_the_other_ranks(
    rank: int, world_size: int, failing: tuple[int, ...]
) -> None:
    """They get nan for what was not sent, for they cannot know; then all go on in step, with the same scales."""
    fails = rank in failing
    for wire in ("none", "bf16", "fp16"):
        for failing_step in (0, 2):
            model = Given([torch.zeros(300)] * 3)
            sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
            for step in range(6):
                # Smaller from the failing step on, so that fp16's scales have reason to move.
                size = 2.0**-10 if step >= failing_step else 1.0
                grads = [torch.full((300,), (1.0 + rank) * size)] * 3
                sync.piggyback("step", torch.tensor(float(step)))
                if step != failing_step:
                    assert backward_of_given(model, grads) == [[1.5 * size]] * 3, f"{wire}, {step}"
                    assert sync.piggybacked()["step"] == step
                    continue
                for _ in range(1 + step if len(failing) == 2 else 1):
                    backward_of_given(model, grads, fails=fails)
                dist.barrier()  # what is left goes at once, and not with what the rank does next
                if fails:
                    continue
                spoilt = [bool(grad.isnan().all()) for grad in grads_of(model)]
                assert spoilt == [True, step == 0, step == 0], "there are buckets from the second step on"
                assert sync.grad_stats().num_nonfinite == 300 * sum(spoilt)
                assert sync.grad_stats().grad_norm.isnan()
                assert step == 0 or [grad.unique().tolist() for grad in grads_of(model)[1:]] == [[1.5 * size]] * 2
                assert step == 0 or sync.piggybacked()["step"].isnan()
            states: list[object] = [None, None]
            dist.all_gather_object(states, sync.state_dict())
            assert states[0] == states[1]
            if len(failing) == 2:
                sync.piggyback("step", torch.tensor(8.0 + rank))
                backward_of_given(model, grads, fails=True)
                sync.synchronize()
                assert sync.piggybacked()["step"] == 8.5, "a value of a backward that failed is lost"
                with sync.no_sync():
                    backward_of_given(model, grads, fails=True)
            backward_of_given(model, grads, fails=fails)
            sync.detach()  # tells the others
            sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
            assert backward_of_given(model, grads) == [[1.5 * size]] * 3
            if len(failing) == 2:
                backward_of_given(model, grads, fails=True)
            references = references_to(model)
            del model, sync
            assert_freed(references)


@on_ranks(2, cases={"change": ["compression", "weight", "piggybacked value", "state"]}, timeout=60)
def test_what_changes_after_a_failed_backward_is_for_the_next_step(rank: int, world_size: int, change: str) -> None:
    grads = [torch.full((300,), 1.0 + rank)] * 3
    model = Given(grads)
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(5):
        fails = step == 2
        if fails and rank == 0:
            time.sleep(0.2)  # so that the other one changes it first
        averages = backward_of_given(model, grads, fails=fails and rank == 1)
        if not fails:
            assert averages == [[1.5]] * 3, f"step {step}"
        elif change == "compression":
            sync.compression = "bf16"
        elif change == "weight":
            sync.set_weight(2.0)
        elif change == "piggybacked value":
            sync.piggyback("new", torch.tensor(1.0 + rank))
        elif change == "state":
            states: list[Any] = [None] * world_size
            dist.all_gather_object(states, sync.state_dict())
            assert states[0] == states[1]
            sync.load_state_dict({**states[rank], "step": 7})
    assert change != "piggybacked value" or sync.piggybacked() == {} or sync.piggybacked()["new"] == 1.5


@on_ranks(2)
def test_a_checkpointed_backward_that_fails_spoils_nothing(rank: int, world_size: int) -> None:
    """The parameter that a reentrant checkpoint takes as its input outlives the graph in which backward failed."""
    direct, last, layer = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(3)), nn.Linear(16, 300, bias=False)
    nn.init.ones_(layer.weight)  # so that every gradient is a whole number
    parameters = [direct, last, layer.weight]
    sync = fastsync.attach(parameters, bucket_cap_mb=SMALL_BUCKETS)

    def loss_of(run: Callable[..., Tensor], *, fails: bool = False) -> Tensor:
        taken = Fails.apply(direct) if fails else direct.clone()
        return (last * direct[:3]).sum() + taken.sum() + run(layer, direct).sum()

    for step in range(5):
        for parameter in parameters:
            parameter.grad = None
        of_one = torch.autograd.grad(loss_of(lambda layer, inputs: layer(inputs)), parameters)
        loss = (1 + 2 * rank) * loss_of(partial(checkpoint, use_reentrant=True), fails=step == 2)
        if step == 2:
            refused(lambda: loss.backward(), "as told", kind=ArithmeticError)
        else:
            loss.backward()
            expected = [2 * gradient for gradient in of_one]
            assert_all_bitwise_equal([p.grad for p in parameters], expected, f"step {step}: gradient")  # type: ignore[misc]
    assert sync.stats().num_steps == 5


# ---- gradients that one rank alone refuses --------------------------------------------------------------------------


@on_ranks(2)
def test_an_error_in_one_of_several_engines_keeps_no_rank_waiting(rank: int, world_size: int) -> None:
    used, idle, other = (nn.Parameter(torch.zeros(40)) for _ in range(3))
    fastsync.attach([used, idle])
    fastsync.attach([other])
    if rank == 0:
        idle.grad = torch.ones(40).to_sparse()
    loss = ((used + other) * (1.0 + rank)).sum()
    if rank == 0:
        refused(lambda: loss.backward(), "parameter 1 got a sparse gradient")
        assert used.grad.tolist() == [1.0] * 40, "an engine that failed has handed out what it had"
    else:
        loss.backward()
        assert used.grad.isnan().all()
    assert other.grad.tolist() == [1.5] * 40

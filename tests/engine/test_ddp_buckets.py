"""A bucket is what is in it: neither its place nor its buffer, which DDP and other hooks change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.sync.ddp import HookState
from tests.models import Given, backward_of, given_ddp, group_of_one

TINY_BUCKETS = {"bucket_cap_mb": 2.0**-20}  # one for each parameter, once DDP has regrouped them


def _far_apart() -> list[Tensor]:
    """So far that no scale serves both: together in a bucket, the small one is zero in float16."""
    return [torch.full((4,), 2.0**-20), torch.full((4,), 2.0**20)]


def _values(grads: list[Tensor]) -> list[float]:
    return [grad[0].item() for grad in grads]


def test_a_regrouped_bucket_starts_from_its_own_gradients() -> None:
    with group_of_one():
        ddp = given_ddp(_far_apart(), **TINY_BUCKETS)
        hook = fastsync.register_comm_hook(ddp, "fp16")
        together = _values(backward_of(ddp, _far_apart()))
        assert len(hook.stats().buckets) == 1
        assert together == [0.0, 2.0**20]
        assert _values(backward_of(ddp, _far_apart())) == [2.0**-20, 2.0**20]
        assert len(hook.stats().buckets) == 2

        resumed = given_ddp(_far_apart(), **TINY_BUCKETS)
        fastsync.register_comm_hook(resumed, "fp16").load_state_dict(hook.state_dict())
        assert _values(backward_of(resumed, _far_apart())) == together
        assert _values(backward_of(resumed, _far_apart())) == [2.0**-20, 2.0**20]


class _OtherOrder(Given):
    """Its gradients get ready in the order 0, 2, 1, while DDP begins with 0, 1, 2."""

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        loss = {index: (self.weights[index] * grads[index]).sum() for index in (1, 2, 0)}
        return loss[0] + loss[1] + loss[2]


def test_residuals_stay_with_their_parameters_where_a_regrouped_bucket_begins_alike() -> None:
    grads = [torch.linspace(1.0, 2.0, 300) * 10.0**power for power in (0, 3, 6)]
    with group_of_one():
        ddp = DistributedDataParallel(_OtherOrder(grads))
        hook = fastsync.register_comm_hook(ddp, fastsync.Compression("bf16", reduce="fp32", error_feedback=True))
        sums = [torch.zeros(300) for _ in grads]
        for _ in range(3):
            for total, averaged in zip(sums, backward_of(ddp, grads), strict=True):
                total.add_(averaged)
        for index, (total, grad) in enumerate(zip(sums, grads, strict=True)):
            kept = hook.state_dict()["residuals"][f"weights.{index} of rank 0"]
            torch.testing.assert_close(total + kept, 3 * grad, rtol=1e-6, atol=0.0)


def test_a_wire_that_was_left_and_taken_again_starts_anew() -> None:
    with group_of_one():
        ddp = given_ddp([torch.ones(4)])
        hook = fastsync.register_comm_hook(ddp, "fp16")
        backward_of(ddp, [torch.full((4,), 2.0**20)])
        hook.compression = "none"
        backward_of(ddp, [torch.full((4,), 2.0**-40)])
        hook.compression = "fp16"
        assert _values(backward_of(ddp, [torch.full((4,), 2.0**-40)])) == [2.0**-40]


def test_norms_are_of_one_backward_each_where_each_uses_other_buckets() -> None:
    """Asking for the times between the steps must not lose the place."""
    with group_of_one():
        ddp = given_ddp(
            [torch.ones(4)] * 3, find_unused_parameters=True, skip_all_reduce_unused_params=True, **TINY_BUCKETS
        )
        state = HookState()
        ddp.register_comm_hook(state, fastsync.allreduce_hook)
        backward_of(ddp, [torch.ones(4)] * 3)  # after which DDP regroups
        ends, middle = [torch.ones(4), None, torch.ones(4)], [None, torch.full((4,), 2.0), None]
        for step, (grads, norm) in enumerate([(ends, 8**0.5), (middle, 4.0), (middle, 4.0)] * 2, start=2):
            backward_of(ddp, grads)
            assert state.stats().num_steps == step
            torch.testing.assert_close(state.grad_stats().grad_norm.item(), norm)

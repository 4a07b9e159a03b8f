"""The DDP hook under every way of running DDP: what DDP without a hook does, it does too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastsync
from tests.models import (
    SMALL_BUCKETS,
    STAMP,
    Given,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    backward_of,
    batch,
    given_ddp,
    grads_of,
    random_grads,
    train_step,
)
from tests.ranks import on_ranks, open_group, run_ranks

SHAPES = [(7, 33), (300,), (2, 3, 4), (250,)]
FLOAT_WIRES = ["none", "fp16", "bf16"]


def _assert_like_ddp(
    model: nn.Module, step: Callable[[DistributedDataParallel, int], None], **options: Any
) -> fastsync.CommHook:
    """Runs steps on a DDP model without a hook and on one with ours, and compares gradients and which there are."""
    options = {"bucket_cap_mb": SMALL_BUCKETS, **options}
    plain = DistributedDataParallel(copy.deepcopy(model), **options)
    hooked = DistributedDataParallel(model, **options)
    hook = fastsync.register_comm_hook(hooked)
    for number in range(4):
        for ddp in (plain, hooked):
            step(ddp, number)
        for (name, mine), theirs in zip(hooked.module.named_parameters(), plain.module.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), f"step {number}: {name}.grad with {options}"
        assert_all_bitwise_equal(grads_of(hooked), grads_of(plain), f"step {number} with {options}, gradient")
    assert_same_on_all_ranks(grads_of(hooked))
    return hook


def _given_step(grads_of_step: Callable[[int], list[Tensor | None]], **zero_grad: Any) -> Callable[..., None]:
    def step(ddp: DistributedDataParallel, number: int) -> None:
        ddp.zero_grad(**zero_grad)
        ddp(grads_of_step(number)).backward()

    return step


def _parameters_without_gradients(rank: int) -> None:
    like = random_grads(0, 0, SHAPES, torch.float32)

    def unused(number: int) -> list[Tensor | None]:
        grads: list[Tensor | None] = list(random_grads(rank, number, SHAPES, torch.float32))
        grads[1] = None  # on all ranks
        if rank == number % 2:
            grads[2] = None  # on one
        return grads

    for bucket_view in (False, True):
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": bucket_view}
        model = Given(like)
        _assert_like_ddp(model, _given_step(unused), **options)
        assert [weight.grad is None for weight in model.weights] == [False, True, False, False]


def _ways_to_build_ddp(rank: int) -> None:
    def train(ddp: DistributedDataParallel, number: int) -> None:
        ddp.zero_grad()
        ddp(batch(rank, number)).square().mean().backward()

    torch.manual_seed(1)
    for options in (
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"find_unused_parameters": True},
    ):
        _assert_like_ddp(Mlp(), train, **options)

    grads = partial(random_grads, rank, shapes=SHAPES, dtype=torch.float32)
    kept = _given_step(grads, set_to_none=False)
    _assert_like_ddp(Given(grads(0)), kept, gradient_as_bucket_view=True)


class _Checkpointed(Mlp):
    def forward(self, inputs: Tensor) -> Tensor:
        first, *rest = self.layers
        hidden = checkpoint(first, inputs, use_reentrant=False)
        return checkpoint(nn.Sequential(*rest), hidden, use_reentrant=False)


def _ways_to_run_a_step(rank: int) -> None:
    def accumulate(ddp: DistributedDataParallel, number: int) -> None:
        ddp.zero_grad()
        with ddp.no_sync():
            for micro in range(2):
                ddp(batch(rank, 10 * number + micro)).square().mean().backward()
        ddp(batch(rank, 10 * number + 2)).square().mean().backward()

    torch.manual_seed(1)
    for bucket_view in (False, True):
        hook = _assert_like_ddp(Mlp(), accumulate, gradient_as_bucket_view=bucket_view)
        assert hook.stats().num_steps == 4

    def train(ddp: DistributedDataParallel, number: int) -> None:
        ddp.zero_grad()
        ddp(batch(rank, number)).square().mean().backward()

    _assert_like_ddp(_Checkpointed(), train)


def _dtypes(rank: int) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]

    def mixed(number: int) -> list[Tensor | None]:
        return [random_grads(rank, number, SHAPES, dtype)[index] for index, dtype in enumerate(kinds)]

    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        grads = partial(random_grads, rank, shapes=SHAPES, dtype=dtype)
        _assert_like_ddp(Given(grads(0)), _given_step(grads))
    hook = _assert_like_ddp(Given(mixed(0)), _given_step(mixed))
    assert sorted(bucket.wire_bytes // bucket.numel // bucket.num_syncs for bucket in hook.stats().buckets)[0] == 2

    for wire in FLOAT_WIRES:
        ddp = given_ddp(mixed(0), bucket_cap_mb=SMALL_BUCKETS)
        fastsync.register_comm_hook(ddp, wire)
        for number in range(3):
            theirs = [grad.clone() for grad in mixed(number)]
            for grad in theirs:
                dist.all_reduce(grad, op=dist.ReduceOp.AVG)
            tolerance = 2.0**-6 if wire == "bf16" else 2.0**-7  # two roundings to bfloat16's 8 bits, or to the model's
            for actual, expected in zip(backward_of(ddp, mixed(number)), theirs, strict=True):
                torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    def complex_grads(number: int) -> list[Tensor | None]:
        return [torch.view_as_complex(grad.view(-1, 2)) for grad in random_grads(rank, number, [(30,)] * 3, kinds[0])]

    hook = _assert_like_ddp(Given(complex_grads(0)), _given_step(complex_grads))
    assert hook.grad_stats().grad_norm.item() > 0


@on_ranks(2)
def test_every_mode_of_ddp_gives_bitwise_what_it_gives_without_a_hook(rank: int, world_size: int) -> None:
    _parameters_without_gradients(rank)
    _ways_to_build_ddp(rank)
    _ways_to_run_a_step(rank)
    _dtypes(rank)


def _two_models_share_the_state_none(rank: int) -> None:
    shapes = [(300,), (200,), (400,)]
    likes = [random_grads(rank, 0, shapes, torch.float32), random_grads(rank, 1, shapes[:2], torch.bfloat16)]
    alone = [given_ddp(like, bucket_cap_mb=SMALL_BUCKETS) for like in likes]
    sharing = [given_ddp(like, bucket_cap_mb=SMALL_BUCKETS) for like in likes]
    for ddp in alone:
        fastsync.register_comm_hook(ddp, "fp16")
    for ddp in sharing:
        ddp.register_comm_hook(None, fastsync.fp16_compress_hook)
    for _ in range(3):
        expected = [backward_of(ddp, grads) for ddp, grads in zip(alone, likes, strict=True)]
        actual = [backward_of(ddp, grads) for ddp, grads in zip(sharing, likes, strict=True)]
        for index in range(2):
            assert_all_bitwise_equal(actual[index], expected[index], f"one after the other: model {index}, gradient")
        for ddp in sharing:
            ddp.zero_grad()
        torch.stack([ddp(grads) for ddp, grads in zip(sharing, likes, strict=True)]).sum().backward()
        for index in range(2):
            assert_all_bitwise_equal(grads_of(sharing[index]), expected[index], f"at once: model {index}, gradient")


def _torchs_wrapper_around_our_hook(rank: int) -> None:
    model = Mlp()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS)
    state = fastsync.HookState()
    wrapped.register_comm_hook(state, default_hooks.fp16_compress_wrapper(fastsync.allreduce_hook))
    plain = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    plain.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    for step in range(4):
        for ddp in (wrapped, plain):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
        assert_all_bitwise_equal(grads_of(wrapped), grads_of(plain), f"step {step}, gradient")
    assert state.stats().num_steps == 4
    num_buckets = len(state.stats().buckets)
    assert num_buckets >= 3
    assert state.stats().num_syncs == 1 + 3 * num_buckets
    # The wrapper's buffers are the wire, so a stamp goes in float32 by itself: in the first of many steps of a bucket
    # that comes last, of which DDP has made two.
    assert state.stats().wire_bytes == 4 * 8082 * 2 + 2 * STAMP * 2 * 4
    # A bucket is known by its parameters where its buffer is another one each step.
    assert [bucket.num_syncs for bucket in state.stats().buckets] == [3] * num_buckets


def _buckets_left_out(rank: int) -> None:
    # A bucket for each parameter, and DDP passes over those not used: neither the first nor the last of a step comes.
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 2.0**-20}
    like = random_grads(0, 0, SHAPES, torch.float32)
    plain, hooked = given_ddp(like, **options), given_ddp(like, **options)
    state = fastsync.HookState()
    hooked.register_comm_hook(state, fastsync.allreduce_hook)
    for number in range(4):
        _, second, third, _ = random_grads(rank, number, SHAPES, torch.float32)
        expected = backward_of(plain, [None, second, third, None])
        assert_all_bitwise_equal(backward_of(hooked, [None, second, third, None]), expected, f"step {number}, gradient")
        torch.testing.assert_close(state.grad_stats().grad_norm, nn.utils.get_total_norm(expected))
        assert state.stats().num_steps == number + 1


def _uneven_inputs(rank: int) -> None:
    torch.manual_seed(1)
    model = Mlp()
    plain = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS)
    hooked = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    hook = fastsync.register_comm_hook(hooked)
    for ddp in (plain, hooked):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(3 + 2 * rank):  # rank 0 runs out first and shadows rank 1 with zeros
                train_step(ddp, optimizer, batch(rank, step))
    assert_all_bitwise_equal(list(hooked.parameters()), list(plain.parameters()), "parameter")
    assert hook.stats().num_steps == 5


@on_ranks(2, shared_memory=False)
def test_shared_states_wrapped_hooks_and_join(rank: int, world_size: int) -> None:
    _two_models_share_the_state_none(rank)
    _torchs_wrapper_around_our_hook(rank)
    _buckets_left_out(rank)
    _uneven_inputs(rank)


def _a_new_default_group(rank: int, world_size: int, folder: str) -> None:
    for number in range(2):
        ddp = given_ddp([torch.ones(2)])
        ddp.register_comm_hook(None, fastsync.fp16_compress_hook)
        assert backward_of(ddp, [torch.full((2,), float(rank))])[0].tolist() == [0.5, 0.5]
        del ddp  # while others have the group as well: torch may hang where a DDP model is its last owner
        dist.destroy_process_group()
        open_group(f"{folder}/store{number}", rank, world_size)


def test_state_none_follows_the_default_group_when_it_is_made_anew(tmp_path: object) -> None:
    run_ranks(_a_new_default_group, 2, str(tmp_path))


@on_ranks(2)
def test_compiled_ddp_runs_the_hook(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = Mlp()
    plain = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS)
    hooked = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    hook = fastsync.register_comm_hook(hooked)
    assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1024  # the optimizer wants no bucket smaller than the first
    compiled = torch.compile(hooked, backend="aot_eager")
    for step in range(3):
        for ddp in (plain, compiled):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
        assert hook.stats().num_steps == step + 1
        assert_same_on_all_ranks(grads_of(hooked))
        for actual, expected in zip(grads_of(hooked), grads_of(plain), strict=True):
            torch.testing.assert_close(actual, expected)


@on_ranks(3)
def test_none_on_three_ranks_is_ddp_without_a_hook_within_one_rounding(rank: int, world_size: int) -> None:
    # DDP multiplies by 1/3 where it copies into a bucket, and divides by 3 where the gradient lies in it already.
    for keeps_views in (False, True):
        options = {"bucket_cap_mb": SMALL_BUCKETS, "gradient_as_bucket_view": keeps_views}
        like = random_grads(0, 0, SHAPES, torch.float32)
        plain, hooked = given_ddp(like, **options), given_ddp(like, **options)
        fastsync.register_comm_hook(hooked)
        for step in range(4):
            mine = random_grads(rank, step, SHAPES, torch.float32)
            everyone = [random_grads(other, step, SHAPES, torch.float32) for other in range(world_size)]
            for ddp in (plain, hooked):
                ddp.zero_grad(set_to_none=not keeps_views)
                ddp(mine).backward()
            for index, (actual, expected) in enumerate(zip(grads_of(hooked), grads_of(plain), strict=True)):
                # With u = 2^-24 and m the mean magnitude: g·fl(1/3) is off by 2u·|g|/3 at most, g/3 by u·|g|/3, and
                # each of the two additions on each side by u·m. In all (3 + 2 + 2)·u·m, to first order in u.
                magnitude = sum(grads[index].abs() for grads in everyone) / world_size
                bound = 7 * 2.0**-24 * 1.001 * magnitude
                assert bool(((actual - expected).abs() <= bound).all()), f"step {step}, gradient {index}"
            assert_same_on_all_ranks(grads_of(hooked))


@on_ranks(4)
def test_a_hook_may_average_over_another_group_than_ddp_has(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    grad = torch.tensor([float(rank), 1.0])
    in_group, in_world = torch.tensor([0.5 + 2 * (rank // 2), 1.0]), torch.tensor([1.5, 1.0])
    given = given_ddp([grad])
    fastsync.register_comm_hook(given, "fp16", process_group=mine)
    assert_all_bitwise_equal(backward_of(given, [grad]), [in_group], "of the group given")
    for state, expected in ((None, in_world), (mine, in_group), (fastsync.HookState(mine), in_group), (None, in_world)):
        drop_in = given_ddp([grad])
        drop_in.register_comm_hook(state, fastsync.fp16_compress_hook)
        assert_all_bitwise_equal(backward_of(drop_in, [grad]), [expected], "of the state's group")

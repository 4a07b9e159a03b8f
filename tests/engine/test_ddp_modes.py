"""The DDP hook under every way of running DDP: what DDP without a hook does, it does too."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastsync
from fastsync.sync.ddp import HookState
from tests.models import (
    SMALL_BUCKETS,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    backward_of,
    batch,
    given_ddp,
    grads_of,
    train_step,
)
from tests.ranks import on_ranks, open_group
from tests.refused import refused


def _train(ddp: DistributedDataParallel, rank: int, number: int) -> None:
    ddp.zero_grad()
    ddp(batch(rank, number)).square().mean().backward()


def _train_from_zeros(ddp: DistributedDataParallel, rank: int, number: int) -> None:
    ddp.zero_grad(set_to_none=False)
    ddp(batch(rank, number)).square().mean().backward()


def _accumulate(ddp: DistributedDataParallel, rank: int, number: int) -> None:
    ddp.zero_grad()
    with ddp.no_sync():
        for micro in range(2):
            ddp(batch(rank, 10 * number + micro)).square().mean().backward()
    ddp(batch(rank, 10 * number + 2)).square().mean().backward()


class _Checkpointed(Mlp):
    def forward(self, inputs: Tensor) -> Tensor:
        first, *rest = self.layers
        hidden = checkpoint(first, inputs, use_reentrant=False)
        return checkpoint(nn.Sequential(*rest), hidden, use_reentrant=False)


class _PartlyUsed(Mlp):
    """Where DDP finds no unused parameters, it warns of the search."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(3))


MODES: list[tuple[type[nn.Module], Callable[..., None], dict[str, bool]]] = [
    (Mlp, _train, {"static_graph": True}),
    (Mlp, _train, {"gradient_as_bucket_view": True}),
    (Mlp, _train, {"gradient_as_bucket_view": True, "static_graph": True}),
    (_PartlyUsed, _train, {"find_unused_parameters": True}),
    (Mlp, _train_from_zeros, {"gradient_as_bucket_view": True}),
    (Mlp, _accumulate, {}),
    (Mlp, _accumulate, {"gradient_as_bucket_view": True}),
    (_Checkpointed, _train, {}),
]


@on_ranks(2)
def test_every_mode_of_ddp_gives_bitwise_what_it_gives_without_a_hook(rank: int, world_size: int) -> None:
    for kind, step, options in MODES:
        torch.manual_seed(1)
        model = kind()
        plain, hooked = (
            DistributedDataParallel(each, bucket_cap_mb=SMALL_BUCKETS, **options)
            for each in (copy.deepcopy(model), model)
        )
        hook = fastsync.register_comm_hook(hooked)
        for number in range(4):
            for ddp in (plain, hooked):
                step(ddp, rank, number)
            what = f"{kind.__name__}, {step.__name__} with {options}, step {number}: gradient"
            assert_all_bitwise_equal(grads_of(hooked), grads_of(plain), what)
        assert_same_on_all_ranks(grads_of(hooked))
        assert hook.stats().num_steps == 4


@on_ranks(2, shared_memory=False)
def test_torchs_wrapper_around_our_hook(rank: int, world_size: int) -> None:
    model = Mlp()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS)
    state = HookState()
    wrapped.register_comm_hook(state, default_hooks.fp16_compress_wrapper(fastsync.allreduce_hook))
    plain = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    plain.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    for step in range(4):
        for ddp in (wrapped, plain):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
        assert_all_bitwise_equal(grads_of(wrapped), grads_of(plain), f"step {step}, gradient")
    assert state.stats().num_steps == 4
    assert len(state.stats().buckets) >= 3


@on_ranks(2, shared_memory=False)
def test_uneven_inputs(rank: int, world_size: int) -> None:
    """An epoch each; who runs out first shadows the other with zeros."""
    torch.manual_seed(1)
    model = Mlp()
    plain = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS)
    hooked = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    hook = fastsync.register_comm_hook(hooked)
    for ddp in (plain, hooked):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for num_steps in (3 + 2 * rank, 4, 6 - 3 * rank):
            with ddp.join():
                for step in range(num_steps):
                    train_step(ddp, optimizer, batch(rank, step))
    assert_all_bitwise_equal(list(hooked.parameters()), list(plain.parameters()), "parameter")
    assert hook.stats().num_steps == 5 + 4 + 6


@on_ranks(2)
def test_state_none_follows_the_default_group_when_it_is_made_anew(rank: int, world_size: int, tmp_path: Path) -> None:
    for number in range(2):
        ddp = given_ddp([torch.ones(2)])
        ddp.register_comm_hook(None, fastsync.fp16_compress_hook)
        assert backward_of(ddp, [torch.full((2,), float(rank))])[0].tolist() == [0.5, 0.5]
        del ddp  # while others have the group as well: torch may hang where a DDP model is its last owner
        dist.destroy_process_group()
        open_group(str(tmp_path / f"store{number}"), rank, world_size)


@on_ranks(2)
def test_compiled_ddp_runs_the_hook(rank: int, world_size: int) -> None:
    torch._logging.set_logs(dynamo=logging.ERROR)  # it warns that it leaves out what DDP marks for profilers
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
        torch.testing.assert_close(grads_of(hooked), grads_of(plain))


@on_ranks(4)
def test_a_hook_may_average_over_another_group_than_ddp_has(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    grad = torch.tensor([float(rank), 1.0])
    in_group, in_world = torch.tensor([0.5 + 2 * (rank // 2), 1.0]), torch.tensor([1.5, 1.0])
    given = given_ddp([grad])
    fastsync.register_comm_hook(given, "fp16", process_group=mine)
    assert_all_bitwise_equal(backward_of(given, [grad]), [in_group], "of the group given")
    for state, expected in ((None, in_world), (mine, in_group), (HookState(mine), in_group), (None, in_world)):
        drop_in = given_ddp([grad])
        drop_in.register_comm_hook(state, fastsync.fp16_compress_hook)
        assert_all_bitwise_equal(backward_of(drop_in, [grad]), [expected], "of the state's group")


@on_ranks(2)
def test_a_model_that_is_given_back_averages_as_with_pytorchs_hook(rank: int, world_size: int) -> None:
    """Afterwards another hook may be registered, with other options."""
    models = [DistributedDataParallel(copy.deepcopy(Mlp()), bucket_cap_mb=SMALL_BUCKETS) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].register_comm_hook(None, default_hooks.allreduce_hook)
    first = fastsync.register_comm_hook(models[0], "int8", op="sum")
    _train(models[0], rank, 0)
    assert first.stats().num_steps == 1
    first.detach()
    first.detach()
    refused(lambda: fastsync.handle_of(models[0]), "no handles of fastsync belong to")
    for number, train in enumerate((_train, _accumulate, _train_from_zeros)):
        for model in models:
            train(model, rank, number)
        assert_all_bitwise_equal(grads_of(models[0]), grads_of(models[1]), f"after {train.__name__}, gradient")
    _train(models[0], rank, 3)
    models[0](batch(rank, 4)).square().mean().backward()  # sums would refuse to be added to
    assert first.stats().num_steps == 1

    second = fastsync.register_comm_hook(models[0], "bf16")
    assert fastsync.handle_of(models[0]) is second
    _train(models[0], rank, 5)
    assert (first.stats().num_steps, second.stats().num_steps) == (1, 1)
    assert_same_on_all_ranks(grads_of(models[0]))
    output = models[0](batch(rank, 6))
    output.register_hook(lambda grad: second.detach())
    refused(lambda: output.sum().backward(), "detach() was called inside a backward", kind=RuntimeError)

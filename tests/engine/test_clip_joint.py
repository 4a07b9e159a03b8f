"""clip_grad_norm_ over several handles: one norm, of all parameters of all ranks, as one process would have it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fastsync
from tests.engine.entry_points import average
from tests.models import Given, assert_same_on_all_ranks, grads_of, random_grads
from tests.ranks import on_ranks
from tests.refused import refused

DENSE, EXPERT = [(7, 33), (300,)], [(20, 5), (11,)]
# Which ranks have the same experts.
LAYOUTS = {"two and two": [[0, 2], [1, 3]], "three and one": [[0, 1, 3], [2]], "each its own": [[0], [1], [2], [3]]}


def _mean(gradients_of: Any, ranks: Sequence[int]) -> list[Tensor]:
    everyone = [gradients_of(rank) for rank in ranks]
    return [torch.stack(same).mean(0) for same in zip(*everyone, strict=True)]


def _dense(rank: int, step: int) -> list[Tensor]:
    return random_grads(rank, step, DENSE, torch.float32)


def _experts(rank: int, step: int) -> list[Tensor]:
    return random_grads(100 + rank, step, EXPERT, torch.float32)


def _given(shapes: Sequence[Sequence[int]]) -> Given:
    return Given([torch.zeros(*shape) for shape in shapes])


class Whole:
    """One process with the dense layers and all experts, in plain PyTorch."""

    def __init__(self, layout: Sequence[Sequence[int]], optimizer: Any) -> None:
        self.layout = layout
        self.dense, *self.experts = (
            Given([torch.zeros(s) for s in shapes]) for shapes in [DENSE] + [EXPERT] * len(layout)
        )
        self.all = [p for model in (self.dense, *self.experts) for p in model.parameters()]
        self.optimizer = optimizer(self.all)

    def backward(self, step: int) -> None:
        means = [_mean(partial(_dense, step=step), range(4))]
        means += [_mean(partial(_experts, step=step), ranks) for ranks in self.layout]
        for parameter, grad in zip(self.all, [grad for each in means for grad in each], strict=True):
            parameter.grad = grad

    def expert_of(self, rank: int) -> nn.Module:
        return next(model for model, ranks in zip(self.experts, self.layout, strict=True) if rank in ranks)


def _handles(way: str, layout: Sequence[Sequence[int]], rank: int) -> tuple[list[nn.Module], list[Any]]:
    groups = [dist.new_group(list(ranks)) for ranks in layout]
    mine = next(group for group, ranks in zip(groups, layout, strict=True) if rank in ranks)
    dense = average(way, _given(DENSE))
    experts = average(way, _given(EXPERT), group=mine)
    return [dense.model, experts.model], [dense.handle, experts.handle]


@on_ranks(4, cases={"way": ["attach", "hook"], "layout": LAYOUTS})
def test_dense_layers_and_experts_are_clipped_as_one_model(rank: int, world_size: int, way: str, layout: str) -> None:
    whole = Whole(LAYOUTS[layout], partial(torch.optim.SGD, lr=0.1))
    models, handles = _handles(way, LAYOUTS[layout], rank)
    for step, norm_type in enumerate((2.0, 1.0, 3.0, math.inf, 2.0)):
        for max_norm in (1e4, 0.5):
            for model, grads in zip(models, (_dense(rank, step), _experts(rank, step)), strict=True):
                model.zero_grad()
                model(grads).backward()
            whole.backward(step)
            expected = nn.utils.clip_grad_norm_(whole.all, max_norm, norm_type)
            norm = fastsync.clip_grad_norm_(handles, max_norm, norm_type=norm_type, process_group=dist.group.WORLD)
            assert (norm.dtype, norm.shape) == (torch.float32, ())
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
            theirs = [*grads_of(whole.dense), *grads_of(whole.expert_of(rank))]
            mine = [*grads_of(models[0]), *grads_of(models[1])]
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
            assert_same_on_all_ranks([norm, *grads_of(models[0])])


@on_ranks(4)
def test_stages_of_a_pipeline(rank: int, world_size: int) -> None:
    """Each rank has one handle, of its stage; the group says whose parameters count."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage = rank // 2
    given = average("synchronize", Given([torch.zeros(300)]), group=mesh["data"])
    given.step([torch.full((300,), 1.0 + 2 * stage)])  # the same on both ranks of a stage
    alone = fastsync.clip_grad_norm_(given.handle, math.inf)
    torch.testing.assert_close(alone, torch.tensor((1.0 + 2 * stage) * 300**0.5))
    for whose in ({"process_group": dist.group.WORLD}, {"process_group": init_device_mesh("cpu", (4,))}):
        norm = fastsync.clip_grad_norm_(given.handle, math.inf, **whose)
        torch.testing.assert_close(norm, torch.tensor(10.0**0.5 * 300**0.5))
    for sync in (given.handle, [given.handle]):
        torch.testing.assert_close(fastsync.clip_grad_norm_(sync, math.inf), alone)
    norm = fastsync.clip_grad_norm_([given.handle], 1.0, process_group=dist.group.WORLD)
    assert_same_on_all_ranks([norm])
    expected = (1.0 + 2 * stage) / (3000**0.5)
    torch.testing.assert_close(next(given.model.parameters()).grad, torch.full((300,), expected))


@on_ranks(4, cases={"is_fused": [True, False], "how": ["without a scaler", "unscaled first", "scaled"]})
def test_an_optimizer_of_all_may_clip_in_its_step(rank: int, world_size: int, is_fused: bool, how: str) -> None:
    """All scalers skip the step that one expert's ranks skip."""
    scales, layout = how != "without a scaler", LAYOUTS["two and two"]
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=is_fused)
    whole = Whole(layout, make)
    models, handles = _handles("attach", layout, rank)
    optimizer = make([p for model in models for p in model.parameters()])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100, enabled=scales)
    for step in range(4):
        is_spoilt = scales and step == 2
        grads = [_dense(rank, step), _experts(rank, step)]
        if is_spoilt and rank == 1:
            grads[1][0].fill_(math.inf)
        optimizer.zero_grad()
        for model, each in zip(models, grads, strict=True):
            scaler.scale(model(each)).backward()
        whole.backward(step)
        if how == "unscaled first":
            scaler.unscale_(optimizer)
        options: dict[str, Any] = {"scaler": scaler} if scales else {}
        options |= {"optimizer": optimizer, "process_group": dist.group.WORLD}
        norm = fastsync.clip_grad_norm_(handles, 0.5, **options)
        if is_fused and not scales:
            with pytest.raises(RuntimeError, match="clipped already, in the optimizer's next step"):
                fastsync.clip_grad_norm_(handles[1], 0.5)
        if not is_spoilt:
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.all, 0.5), rtol=1e-5, atol=0)
            whole.optimizer.step()
        assert norm.isfinite() == (not is_spoilt)
        scaler.step(optimizer)
        scaler.update()
        assert not scales or scaler.get_scale() == (64.0 if step < 2 else 32.0)
    theirs = [*whole.dense.parameters(), *whole.expert_of(rank).parameters()]
    torch.testing.assert_close([p for model in models for p in model.parameters()], theirs, rtol=1e-4, atol=1e-5)


@on_ranks(4)
def test_the_handles_common_group(rank: int, world_size: int) -> None:
    """Groups that train apart have norms of their own, and none waits for another."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    own = rank % 2 - 0.5  # which the means are without
    both = [average("attach", Given([torch.zeros(3)]), group=pairs[rank // 2]) for _ in range(2)]
    for number, given in enumerate(both, 1):
        given.step([torch.full((3,), number * 10.0 ** (rank // 2) + own)])
    if rank < 2:  # the others do not clip in this step
        norm = fastsync.clip_grad_norm_([each.handle for each in both], math.inf)
        torch.testing.assert_close(norm, torch.tensor(15.0**0.5))
    everyone = average("attach", Given([torch.zeros(3)]))
    everyone.step([torch.full((3,), 2.0 + own)])
    for handles in ([both[0].handle, everyone.handle], [everyone.handle, both[0].handle]):
        norm = fastsync.clip_grad_norm_(handles, math.inf)
        torch.testing.assert_close(norm, torch.tensor((12.0 + 3.0 + 300.0) ** 0.5))
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    other = average("attach", Given([torch.zeros(3)]), group=across[rank % 2])
    other.step([torch.full((3,), 1.0 + rank)])
    refused(lambda: fastsync.clip_grad_norm_([both[0].handle, other.handle], 1.0), "process_group:")
    # As many ranks as the handle's, and other ones: only one of both would add to the norm.
    refused(lambda: fastsync.clip_grad_norm_([other.handle], 1.0, process_group=pairs[rank // 2]), "process_group:")


@on_ranks(2)
def test_what_is_refused(rank: int, world_size: int) -> None:
    given = average("attach", Given([torch.zeros(3)]))
    given.step([torch.ones(3) + rank])
    own = dist.new_group([rank], use_local_synchronization=True)
    for argument, sync, options in (
        *(("sync", wrong, {}) for wrong in ([], [given.handle, given.handle], [given.handle, given.model])),
        ("norm_type", [given.handle], {"norm_type": 0.0}),
        ("process_group", [given.handle], {"process_group": own}),
        ("process_group", given.handle, {"process_group": "world"}),
    ):
        refused(lambda: fastsync.clip_grad_norm_(sync, 1.0, **options), f"{argument}:")
    other = _given(EXPERT)
    optimizer, shared = torch.optim.AdamW(other.parameters()), fastsync.attach(other)
    fastsync.shard_optimizer(shared, optimizer)
    scaled = {"optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu")}
    refused(lambda: fastsync.clip_grad_norm_([shared, given.handle], 0.5, **scaled), "scaler:")
    group = dist.new_group(timeout=timedelta(seconds=6))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_: on rank 0 of 2 the other ranks did not all come"):
            fastsync.clip_grad_norm_([given.handle], 1.0, process_group=group)

"""Stages of torch.distributed.pipelining, two ranks each: what they train, against one process with all data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.engine.entry_points import whole
from tests.ranks import on_ranks
from tests.refused import refused

WIDTH, LAYERS, ROWS, MICRO_BATCHES, STEPS = 8, 4, 16, 4, 5
CPU = torch.device("cpu")
Stages = list[nn.Module]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch_of(step)
    return nn.functional.mse_loss(model(inputs), targets)


def trained_alone() -> nn.Sequential:
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return model


class Pipeline:
    """This rank's stages of a model in a mesh of 2 stages by 2 ranks of the same stage, and their schedule."""

    def __init__(self, schedule_class: Any, wrap: Callable[[Stages, DeviceMesh], Stages], has_shapes: bool) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
        self._part = mesh.get_local_rank("data")
        is_single = issubclass(schedule_class, Schedule1F1B | ScheduleGPipe)
        self._num_stages = 2 if is_single else 4
        self._indices = range(mesh.get_local_rank("stage"), self._num_stages, 2)
        self.modules = wrap([self._part_of(layers(), index) for index in self._indices], mesh["data"])
        shape = torch.empty(ROWS // 2 // MICRO_BATCHES, WIDTH)
        stages = [
            PipelineStage(
                *(module, index, self._num_stages, CPU),
                input_args=shape.clone().requires_grad_(index > 0) if has_shapes else None,
                output_args=shape.clone().requires_grad_() if has_shapes else None,
                group=mesh.get_group("stage"),
            )
            for module, index in zip(self.modules, self._indices, strict=True)
        ]
        self._schedule = schedule_class(
            stages[0] if is_single else stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss
        )

    def _part_of(self, parts: Any, index: int) -> nn.Sequential:
        size = LAYERS // self._num_stages
        return nn.Sequential(*parts[index * size : (index + 1) * size])

    def step(self, step: int) -> None:
        inputs, targets = (both.chunk(2)[self._part] for both in batch_of(step))
        self._schedule.step(
            *([inputs] if 0 in self._indices else []),
            target=targets if self._num_stages - 1 in self._indices else None,
            return_outputs=False,
        )

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def of_whole(self, model: nn.Sequential) -> list[nn.Parameter]:
        return [parameter for index in self._indices for parameter in self._part_of(model, index).parameters()]


def by_hook(stages: Stages, mesh: DeviceMesh) -> Stages:
    wrapped: Stages = [DistributedDataParallel(stage, process_group=mesh.get_group()) for stage in stages]
    for stage in wrapped:
        fastsync.register_comm_hook(stage)
    return wrapped


def by_reduce_scatter(stages: Stages, mesh: DeviceMesh) -> Stages:
    for stage in stages:
        for layer in stage:
            fully_shard(layer, mesh=mesh)
        fastsync.register_fsdp(fully_shard(stage, mesh=mesh))
    return stages


def by_attach(stages: Stages, mesh: DeviceMesh) -> Stages:
    for stage in stages:
        fastsync.attach(stage, process_group=mesh, overlap=False)
    return stages


def by_overlap(stages: Stages, mesh: DeviceMesh) -> Stages:
    """Each micro-batch's backward averages."""
    for stage in stages:
        fastsync.attach(stage, process_group=mesh)
    return stages


def synchronize(pipeline: Pipeline, wrap: Any = by_attach) -> None:
    for stage in pipeline.modules:
        handle = fastsync.handle_of(stage)
        if isinstance(handle, GradientSynchronizer) and wrap is by_attach:
            handle.synchronize()


@on_ranks(4, cases={"wrap": [by_hook, by_reduce_scatter, by_attach, by_overlap]})
def test_trains_as_one_process_with_all_data(rank: int, world_size: int, wrap: Any) -> None:
    alone = trained_alone()
    for schedule in (Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        if schedule is ScheduleInterleavedZeroBubble and wrap is not by_attach:
            continue  # it passes hooks by: DDP averages nothing there, modules under fully_shard may get no gradient
        # Where the schedule finds the shapes out by itself, it runs a backward that DDP's buckets cannot stand.
        pipeline = Pipeline(schedule, wrap, has_shapes=wrap is by_hook)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            pipeline.step(step)
            synchronize(pipeline, wrap)
            optimizer.step()
        for mine, theirs in zip(pipeline.parameters(), pipeline.of_whole(alone), strict=True):
            torch.testing.assert_close(whole(mine), theirs, rtol=1e-5, atol=1e-6)
        num_syncs = STEPS * (MICRO_BATCHES if wrap is by_overlap else 1)
        assert all(fastsync.handle_of(stage).stats().num_steps == num_syncs for stage in pipeline.modules)


@on_ranks(4)
def test_gradients_that_pass_hooks_by_are_refused(rank: int, world_size: int) -> None:
    """Zero-bubble schedules call no hook of any stage but the first. So the ranks of the others end the training."""

    def wrap(stages: Stages, mesh: DeviceMesh) -> Stages:
        fastsync.attach(nn.ModuleList(stages), process_group=mesh)
        return stages

    pipeline = Pipeline(ScheduleInterleavedZeroBubble, wrap, has_shapes=False)
    pipeline.step(0)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    if rank >= 2:
        refused(lambda: optimizer.step(), "no rank has averaged", kind=RuntimeError)
    dist.barrier()


@on_ranks(4)
def test_the_norm_is_that_of_divided_gradients(rank: int, world_size: int) -> None:
    alone = nn.Sequential(*layers())
    loss_of(alone, 0).backward()
    for wrap in (by_hook, by_attach):
        pipeline = Pipeline(Schedule1F1B, wrap, has_shapes=True)
        pipeline.step(0)
        synchronize(pipeline)
        handle = fastsync.handle_of(pipeline.modules[0])
        squares = [p.grad.square().sum() for p in pipeline.of_whole(alone) if p.grad is not None]
        norm = fastsync.clip_grad_norm_(handle, 1.0)
        torch.testing.assert_close(norm, torch.stack(squares).sum().sqrt(), rtol=1e-5, atol=0.0)

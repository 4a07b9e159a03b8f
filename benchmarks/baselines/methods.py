"""The methods to average a model's gradients over ranks: fastsync's, PyTorch's, hand-written ones, and the limit."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastsync
from benchmarks.baselines import compressions
from benchmarks.baselines.gradients import Gradients, Rounding, Step
from benchmarks.baselines.optimizer_steps import (
    BareCopy,
    BareMuon,
    by_attach,
    by_torch,
    muon_by_attach,
    muon_by_torch,
)
from benchmarks.baselines.shared_memory import BareSum
from fastsync.sync.compression import parse_compression
from fastsync.sync.stats import SyncStats

MIN_WARMUP = 2
"""Steps before a method does what it goes on to do: DDP regroups its buckets once, PowerSGD starts at its third."""


class TrainingStep(Step):
    """The forward is prepared, the backward timed, with what has to follow it (``synchronize``)."""

    def __init__(
        self,
        model: nn.Module,
        synchronize: Callable[[], object] = lambda: None,
        stats: Callable[[], SyncStats | None] = lambda: None,
    ) -> None:
        self.model = model
        self._synchronize = synchronize
        self.stats = stats

    def prepare(self) -> None:
        self.model.zero_grad()
        self._loss = self.model()

    def run(self) -> None:
        self._loss.backward()
        self._synchronize()

    def result(self) -> Tensor:
        return torch.cat([parameter.grad.reshape(-1) for parameter in self.model.parameters()])


class BareAllReduce(Step):
    """One all_reduce of as many values as the model has, already divided, cast and in one tensor. No backward."""

    def __init__(self, workload: Gradients, group: ProcessGroup, dtype: torch.dtype) -> None:
        self._source = (workload.flat_grads / workload.world_size).to(dtype)
        self._flat = torch.empty_like(self._source)
        self._group = group

    def prepare(self) -> None:
        self._flat.copy_(self._source)

    def run(self) -> None:
        dist.all_reduce(self._flat, group=self._group)

    def result(self) -> Tensor:
        return self._flat


Build = Callable[[Gradients, ProcessGroup], Step]


def _bare(dtype: torch.dtype) -> Build:
    return lambda workload, group: BareAllReduce(workload, group, dtype)


_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # the second is the older one's name
    if name in inspect.signature(DistributedDataParallel).parameters
)


def wrapped(workload: Gradients, group: ProcessGroup, **options: float | bool) -> DistributedDataParallel:
    """A model in DDP that sends its gradients and nothing else, as all methods do: buffers stay where they are."""
    return DistributedDataParallel(workload.model(), process_group=group, **{_SYNC_BUFFERS: False}, **options)


def _ddp(hook: Callable | None = None, **options: bool) -> Build:
    def build(workload: Gradients, group: ProcessGroup) -> Step:
        model = wrapped(workload, group, **options)
        if hook is not None:
            model.register_comm_hook(group, hook)
        return TrainingStep(model)

    return build


def _power_sgd(rank: int) -> Build:
    def build(workload: Gradients, group: ProcessGroup) -> Step:
        # In one bucket: the hook starts all_reduces from callbacks, so with two buckets on their way each rank would
        # have them in an order of its own, and Gloo pairs them by order: a wrong size, or a wait without end.
        one_bucket = 1 + workload.flat_grads.nbytes // 2**20
        model = wrapped(workload, group, bucket_cap_mb=one_bucket)
        state = PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
        return TrainingStep(model)

    return build


def _register_comm_hook(compression: str) -> Build:
    def build(workload: Gradients, group: ProcessGroup) -> Step:
        model = wrapped(workload, group)
        hook = fastsync.register_comm_hook(model, parse_compression(compression))
        return TrainingStep(model, stats=hook.stats)

    return build


def _attach(compression: str) -> Build:
    def build(workload: Gradients, group: ProcessGroup) -> Step:
        model = workload.model()
        sync = fastsync.attach(model, parse_compression(compression), process_group=group)
        return TrainingStep(model, stats=sync.stats)

    return build


def all_reduce_concatenated(parameters: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Averages gradients as trainers without DDP write it."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _after_backward(average: Callable[[list[nn.Parameter], ProcessGroup], object]) -> Build:
    def build(workload: Gradients, group: ProcessGroup) -> Step:
        model = workload.model()
        parameters = list(model.parameters())
        return TrainingStep(model, lambda: average(parameters, group))

    return build


class ShardedStep(TrainingStep):
    """As ``TrainingStep``, of a model under ``fully_shard``, whose gradients are shards."""

    def result(self) -> Tensor:
        return torch.cat([parameter.grad.full_tensor().reshape(-1) for parameter in self.model.parameters()])


def _fully_shard(
    reduce_dtype: torch.dtype | None = None, compression: str | None = None, *, gathers: bool = False
) -> Build:
    """Parameters stay whole from forward to backward, so that in the backward only gradients travel.

    With ``gathers`` the engine also gathers the parameters, in the same compression. Each block's forward then fetches
    the next block's ahead. PyTorch's own gathers wait at once on CPUs, so that would gain them nothing.
    """

    def build(workload: Gradients, group: ProcessGroup) -> Step:
        model = copy.deepcopy(workload.model())  # the memory of other models is the same, and shards are to be its own
        mesh = DeviceMesh.from_group(group, workload.flat_grads.device.type)
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        blocks = [block for blocks in model.modules() if isinstance(blocks, nn.Sequential) for block in blocks]
        blocks = [block for block in blocks if any(True for _ in block.children())]
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        if compression is None:
            return ShardedStep(model)
        parameters = compression if gathers else "pytorch"
        handle = fastsync.register_fsdp(model, gradients=parse_compression(compression), parameters=parameters)
        if gathers:
            for module, following in pairwise([model, *blocks]):
                module.set_modules_to_forward_prefetch([following])
        return ShardedStep(model, stats=handle.stats)

    return build


@dataclass(frozen=True)
class Method:
    build: Build
    """Makes a step of it. A collective call: on all ranks, in the same order."""
    wire: torch.dtype | None = torch.float32
    """As what the gradients travel; None if they do not, or something else does, or what that is gets chosen."""
    roundings: tuple[Rounding, ...] = ()
    """What values may lose, one of these; by default what ``wire`` loses where it is summed."""
    compression: str | None = None
    """Of the engine, as ``compressions`` names it."""
    approximate: bool = False
    """Whether the result is something else than the mean, rounded. Its error is reported and not judged."""
    only: str | None = None
    """The backend that can run it; None if all can."""
    in_ddp: bool = False
    """Whether the model is wrapped in DDP, whose own overhead is then a part of the step."""
    scatters: bool = False
    """Whether each rank gets a part of the mean only, which is half the way."""

    @property
    def limit(self) -> str | None:
        """The bare all_reduce of what travels; None where there is none."""
        return None if self.only == "gloo" or self.scatters else LIMITS.get(self.wire)

    @property
    def averages(self) -> bool:
        """True if its result is the mean over the ranks, or near it."""
        return self.approximate or bool(self.allowed)

    @property
    def allowed(self) -> tuple[Rounding, ...]:
        """The precision that values may lose; empty if the result is not to be the mean."""
        return self.roundings or ((Rounding(self.wire),) if self.wire else ())


fp16, bf16 = torch.float16, torch.bfloat16

DTYPES = {"none": torch.float32, "fp16": fp16, "bf16": bf16, "int8": torch.int8}
ENTRY_POINTS = {"fastsync.register_comm_hook": _register_comm_hook, "fastsync.attach": _attach}

SHARED_SUM = "shared_memory_sum"
"""The limit of CPU ranks that share a host."""
LIMITS = {torch.float32: "all_reduce/fp32", fp16: "all_reduce/fp16", bf16: "all_reduce/bf16"}
OPTIMIZER_LIMITS = {"adamw": "copy+adamw", "muon": "step+muon"}
"""What a step with an optimizer is compared to: the least memory traffic, and what one rank does alone."""
POWER_SGD_4 = "ddp/powerSGD_hook:4"
"""PyTorch's hook with the rank that fastsync has by default. Its own is 1."""
BARE = {SHARED_SUM, *OPTIMIZER_LIMITS.values(), *LIMITS.values()}
"""Methods without a backward."""


def _rounding(compression: str) -> Rounding:
    return Rounding(DTYPES[compressions.split(compression)[0]], compressions.half_steps(compression))


def _through(entry_point: str, compression: str) -> Method:
    """A compression of the engine. What is chosen by measurement may lose as much as the coarsest choice."""
    build, in_ddp = ENTRY_POINTS[entry_point](compression), entry_point == "fastsync.register_comm_hook"
    if (coarsest := compressions.CHOSEN.get(compression)) is not None:
        return Method(build, None, (_rounding("bf16"), _rounding(coarsest)), compression, in_ddp=in_ddp)
    if compression in compressions.APPROXIMATE:
        return Method(build, None, compression=compression, approximate=True, in_ddp=in_ddp)
    rounding = _rounding(compression)
    return Method(build, rounding.wire, (rounding,), compression, in_ddp=in_ddp)


def _scattered(compression: str) -> Method:
    """Of int8 no bound is known: what shares a block depends on how the parameters are sharded."""
    wire = DTYPES[compressions.split(compression)[0]]
    rounding = Rounding(wire, None if wire == torch.float32 else 1.0)
    build, is_int8 = _fully_shard(compression=compression), wire == torch.int8
    return Method(build, wire, () if is_int8 else (rounding,), approximate=is_int8, scatters=True)


def _gathered(compression: str) -> Method:
    """Gradients of rounded parameters are others, so their error is not judged."""
    build, is_lossy = _fully_shard(compression=compression, gathers=True), compression != "none"
    return replace(_scattered(compression), build=build, roundings=(), approximate=is_lossy)


SHARDED = {
    "fully_shard/fp32": Method(_fully_shard(), scatters=True),
    "fully_shard/bf16": Method(_fully_shard(bf16), bf16, scatters=True),
    **{
        f"fastsync.register_fsdp:gradients/{name}": _scattered(name)
        for name in ("none", "bf16", "fp16", "int8", "int8+ef")
    },
    **{f"fastsync.register_fsdp/{name}": _gathered(name) for name in ("none", "bf16", "int8")},
}
"""Models under ``fully_shard``: PyTorch's reduce-scatter in the dtype that gradients are cast to, and the engine's.
Without ``:gradients`` the engine gathers as well."""


def _stepping(build: Build, zero: bool = False) -> Build:
    return lambda workload, group: by_torch(build(workload, group), group, zero)


def _attached(shared: bool, **options: str | bool) -> Build:
    return lambda workload, group: by_attach(workload, group, TrainingStep, shared, **options)


def _attached_to_muon(shared: bool) -> Build:
    return lambda workload, group: muon_by_attach(workload, group, TrainingStep, shared)


def _muon(build: Build) -> Build:
    return lambda workload, group: muon_by_torch(build(workload, group), group)


WITH_ADAMW = {
    OPTIMIZER_LIMITS["adamw"]: Method(BareCopy, only="gloo"),
    "ddp+adamw": Method(_stepping(_ddp()), in_ddp=True),
    "zero_redundancy+adamw": Method(_stepping(_ddp(), zero=True), in_ddp=True),
    "fully_shard+adamw": Method(_stepping(_fully_shard()), scatters=True),
    "fastsync.attach+adamw": Method(_attached(shared=False)),
    "fastsync.shard_optimizer+adamw": Method(_attached(shared=True), only="gloo"),
    "fastsync.shard_optimizer:bf16+adamw": Method(_attached(shared=True, parameter_compression="bf16"), only="gloo"),
}
"""Methods that also clip, and step with fused AdamW."""
OVERLAPPING = {
    "fastsync.shard_optimizer:overlap+adamw": Method(_attached(shared=True, overlap_gather=True), only="gloo"),
}
"""The same, where the next forward hides what is left of a step. So only whole steps tell how long they take."""
ROUNDING = "fastsync.shard_optimizer:bf16+adamw"
"""The gradients of rounded parameters are others than those that a whole step is checked by."""
WHOLE_WITH_ADAMW = [
    *(name for name in WITH_ADAMW if name not in (*OPTIMIZER_LIMITS.values(), ROUNDING)),
    *OVERLAPPING,
]
WITH_MUON = {
    OPTIMIZER_LIMITS["muon"]: Method(BareMuon),
    "ddp+muon": Method(_muon(_ddp()), in_ddp=True),
    "fastsync.attach+muon": Method(_attached_to_muon(shared=False)),
    "fastsync.shard_optimizer+muon": Method(_attached_to_muon(shared=True), only="gloo"),
}
"""Methods that also step, matrices with Muon and the rest with fused AdamW."""
STEPPING = {"adamw": WITH_ADAMW, "muon": WITH_MUON}
"""By the optimizer, whose name ends theirs."""

METHODS = {
    "no_sync": Method(lambda workload, group: TrainingStep(workload.model()), wire=None),
    SHARED_SUM: Method(BareSum, only="gloo"),
    **{name: Method(_bare(wire), wire) for wire, name in LIMITS.items()},
    "ddp": Method(_ddp(), in_ddp=True),
    # Gradients are views of the buckets, so that none is copied back. It is copied in all the same, because zero_grad,
    # which sets gradients to None by default, drops the views.
    "ddp/bucket_view": Method(_ddp(gradient_as_bucket_view=True), in_ddp=True),
    "ddp/fp16_compress_hook": Method(_ddp(default_hooks.fp16_compress_hook), fp16, in_ddp=True),
    "ddp/bf16_compress_hook": Method(_ddp(default_hooks.bf16_compress_hook), bf16, only="nccl", in_ddp=True),
    "ddp/powerSGD_hook": Method(_power_sgd(rank=1), wire=None, approximate=True, in_ddp=True),
    POWER_SGD_4: Method(_power_sgd(rank=4), wire=None, approximate=True, in_ddp=True),
    "cat": Method(_after_backward(all_reduce_concatenated)),
    "fastsync.fp16_compress_hook": Method(_ddp(fastsync.fp16_compress_hook), fp16, in_ddp=True),
    **{
        f"{entry_point}/{name}": _through(entry_point, name)
        for entry_point in ENTRY_POINTS
        for name in (*compressions.DEFAULT, *compressions.ON_REQUEST, *compressions.APPROXIMATE)
    },
    "fastsync.all_reduce_gradients/none": Method(
        _after_backward(lambda parameters, group: fastsync.all_reduce_gradients(parameters, process_group=group))
    ),
    **SHARDED,
    **WITH_ADAMW,
    **OVERLAPPING,
    **WITH_MUON,
}

SYNCHRONISED = tuple(name for name in METHODS if name not in {"no_sync", *BARE, *WITH_ADAMW, *OVERLAPPING, *WITH_MUON})
"""Those that training steps can be taken with."""
BY_DEFAULT = tuple(
    name
    for name, each in METHODS.items()
    if each.compression not in (*compressions.ON_REQUEST, *compressions.APPROXIMATE)
    and not each.scatters
    and name not in (*WITH_ADAMW, *OVERLAPPING, *WITH_MUON, POWER_SGD_4)
)
"""Those that are measured where none are named."""


def is_right(method: Method, step: Step, workload: Gradients) -> bool:
    """Checks the step's newest result against what this method promises."""
    if method.approximate:
        return True
    if not method.allowed:
        return workload.is_own(step.result())
    return workload.is_mean(step.result(), *method.allowed)


def with_their_limits(names: tuple[str, ...]) -> list[str]:
    """These methods, with those that they are compared to, in the order of the table."""
    needed = {*names, "no_sync", *(METHODS[name].limit for name in names)}
    return [name for name in METHODS if name in needed]


def left_out(names: list[str], backend: str) -> dict[str, str]:
    """Names those of these methods that cannot run on this backend, and why."""
    return {
        name: f"it takes {METHODS[name].only}, and these ranks have {backend}"
        for name in names
        if METHODS[name].only not in (None, backend)
    }

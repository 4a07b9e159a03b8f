"""Features, two at a time: a training that has both, and the same training in plain PyTorch and one process.

tests/engine/test_pairs.py tries each pair. ``REFUSED`` has those that raise an error, and ``python -m tools.reference``
writes them into docs/reference/pairs.md.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import fastsync
from tests.engine.wrappers import OptimizerWrapper

ATTACH, HOOK, SHARDS, OWNERS = "attach", "register_comm_hook", "shard_optimizer", "shard_optimizer of Muon"
DILOCO, LOCAL_SGD, ELASTIC, JOIN = "DiLoCo", "LocalSGD", "Elastic", "join"
CLIP, CLIP_SEVERAL = "clip of one handle", "clip of several handles"
SCALER, WRAPPED, NO_SYNC, COMPILED, FROZEN, MICRO, OVERLAP = (
    "GradScaler", "a wrapped optimizer", "no_sync", "torch.compile", "gc.freeze", "micro_batches", "overlap_gather",
)  # fmt: skip
FEATURES = (
    ATTACH, HOOK, SHARDS, OWNERS, DILOCO, LOCAL_SGD, ELASTIC, JOIN, CLIP, CLIP_SEVERAL, SCALER, WRAPPED, NO_SYNC,
    COMPILED, FROZEN, MICRO, OVERLAP,
)  # fmt: skip
AVERAGING, OUTER = (ATTACH, HOOK, SHARDS, OWNERS), (DILOCO, LOCAL_SGD)
PAIRS = [frozenset(pair) for pair in combinations(FEATURES, 2)]

REFUSED: dict[frozenset[str], str] = {
    frozenset({ATTACH, HOOK}): "both would average",
    frozenset({HOOK, SHARDS}): "shards need the gradients where autograd leaves them",
    frozenset({DILOCO, LOCAL_SGD}): "both would average the weights",
    frozenset({HOOK, ELASTIC}): "DDP is bound to one process group",
    frozenset({HOOK, JOIN}): "DDP has a join() of its own",
    frozenset({SHARDS, DILOCO}): "ranks step shards of shared weights",
    frozenset({SHARDS, LOCAL_SGD}): "ranks step shards of shared weights",
    frozenset({SHARDS, ELASTIC}): "a lost rank's shard is gone",
    frozenset({SHARDS, JOIN}): "a rank without batches has a shard to step",
    frozenset({HOOK, OWNERS}): "shards need the gradients where autograd leaves them",
    frozenset({OWNERS, DILOCO}): "ranks step shards of shared weights",
    frozenset({OWNERS, LOCAL_SGD}): "ranks step shards of shared weights",
    frozenset({OWNERS, ELASTIC}): "a lost rank's matrices are gone",
    frozenset({OWNERS, JOIN}): "a rank without batches has matrices to step",
    frozenset({OWNERS, SCALER}): "Muon is not fused, so a scaler would unscale gradients that are no means",
    frozenset({DILOCO, ELASTIC}): "sites have their own way to go on",
    frozenset({LOCAL_SGD, ELASTIC}): "sites have their own way to go on",
    frozenset({DILOCO, JOIN}): "ranks of a site take equally many steps",
    frozenset({LOCAL_SGD, JOIN}): "ranks of a site take equally many steps",
    frozenset({ELASTIC, JOIN}): "steps() tells each rank how many there are",
    frozenset({ELASTIC, CLIP_SEVERAL}): "an Elastic has one handle",
    frozenset({JOIN, CLIP_SEVERAL}): "one join() keeps one engine going",
    frozenset({HOOK, MICRO}): "DDP sends in each backward",
    frozenset({JOIN, MICRO}): "all ranks take all steps",
    frozenset({CLIP_SEVERAL, MICRO}): "a joint norm depends on the number of ranks",
    frozenset({NO_SYNC, MICRO}): "more micro-batches accumulate more",
    frozenset({HOOK, OVERLAP}): "shards need the gradients where autograd leaves them",
    frozenset({DILOCO, OVERLAP}): "ranks step shards of shared weights",
    frozenset({LOCAL_SGD, OVERLAP}): "ranks step shards of shared weights",
    frozenset({ELASTIC, OVERLAP}): "a lost rank's shard is gone",
    frozenset({JOIN, OVERLAP}): "a rank without batches has a shard to step",
}
"""Why they are refused."""

NUM_STEPS, SYNC_EVERY, LOST_BEFORE, LOST, MAX_NORM = 6, 2, 4, 1, 0.05


class Layout:
    """How many sites there are, and ranks in each."""

    def __init__(self, pair: frozenset[str]) -> None:
        self.pair = pair
        self.sites = 2 if pair & {*OUTER} else 1
        self.averages = bool(pair - {*OUTER, WRAPPED, COMPILED, FROZEN, SCALER}) or not pair & {*OUTER}
        """Whether the ranks of a site average their gradients."""
        self.ranks = 2 if self.averages else 1
        self.world_size = self.sites * self.ranks
        self.num_micro = 2 if NO_SYNC in pair else 1

    def active(self, step: int) -> Sequence[int]:
        """The ranks of a site that take this step."""
        everyone = range(self.ranks)
        if ELASTIC in self.pair and step >= LOST_BEFORE:
            return everyone[:1]
        return everyone[:1] if JOIN in self.pair and step == NUM_STEPS - 1 else everyone


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, 3, dtype=torch.float64))


def loss_of(model: Callable[[Tensor], Tensor], rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return model(torch.randn(4, 5, generator=generator, dtype=torch.float64)).square().mean()


def make_optimizer(parameters: Sequence[Tensor], **options: bool) -> Optimizer:
    return AdamW(parameters, lr=0.01, **options)


def parts_of(model: nn.Sequential, pair: frozenset[str]) -> list[list[Tensor]]:
    """What several handles average, and several optimizers step: matrices and others for Muon, or layers."""
    if OWNERS in pair and HOOK not in pair:
        return [[p for p in model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False)]
    return [list(each.parameters()) for each in ([model[0], model[2]] if CLIP_SEVERAL in pair else [model])]


def make_optimizers(model: nn.Sequential, pair: frozenset[str], **options: bool) -> list[Optimizer]:
    parts = parts_of(model, pair)
    if len(parts) > 1 and OWNERS in pair:
        return [torch.optim.Muon(parts[0], lr=0.01), make_optimizer(parts[1], **options)]
    return [make_optimizer(part, **options) for part in parts]


def plain(pair: frozenset[str]) -> list[Tensor]:
    """The weights that the training has to end with."""
    layout = Layout(pair)
    models = [make_model() for _ in range(layout.sites)]
    optimizers = [make_optimizers(model, pair) for model in models]
    outer = make_model()
    nesterov = SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(NUM_STEPS):
        for site, (model, steppers) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            active = range(layout.ranks) if MICRO in pair else layout.active(step)
            for rank in active:
                for micro in range(layout.num_micro):
                    (loss_of(model, site * layout.ranks + rank, step, micro) / len(active)).backward()
            if CLIP in pair:
                nn.utils.clip_grad_norm_(parts_of(model, pair)[0], MAX_NORM)
            if CLIP_SEVERAL in pair:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            for optimizer in steppers:
                optimizer.step()
        if layout.sites > 1 and (step + 1) % SYNC_EVERY == 0:
            with torch.no_grad():
                for whole, *parts in zip(outer.parameters(), *(model.parameters() for model in models), strict=True):
                    mean = torch.stack(parts).mean(dim=0)
                    whole.grad = whole - mean
                    if LOCAL_SGD in pair:
                        whole.copy_(mean)
                if DILOCO in pair:
                    nesterov.step()
                for model in models:
                    model.load_state_dict(outer.state_dict())
    return [parameter.detach() for parameter in models[0].parameters()]


class Training:
    """A rank's training with both features."""

    def __init__(self, pair: frozenset[str], rank: int, store: str) -> None:
        self.pair, self.rank, self.layout = pair, rank, Layout(pair)
        self.module = make_model()
        self.optimizers = make_optimizers(self.module, pair, fused=bool({SHARDS, OVERLAP} & pair))
        if WRAPPED in pair:
            self.optimizers = [OptimizerWrapper(each) for each in self.optimizers]
        self.scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2) if SCALER in pair else None
        if FROZEN in pair:
            gc.collect()
            gc.freeze()
        inside, between = self.groups()
        self.model: Any = self.module
        self.handles = [self.averaged(part, inside, index) for index, part in enumerate(self.parts())]
        if COMPILED in pair:
            self.model = torch.compile(self.model, backend="eager")
        self.stack = ExitStack()
        self.outer(between)
        self.elastic = self.made_elastic(store) if ELASTIC in pair else None

    def parts(self) -> Sequence[nn.Module | list[Tensor]]:
        """What the handles are of."""
        if OWNERS in self.pair and HOOK not in self.pair:
            return parts_of(self.module, self.pair)
        return [self.module[0], self.module[2]] if CLIP_SEVERAL in self.pair else [self.module]

    def groups(self) -> tuple[Any, Any]:
        if self.layout.sites == 1 or not self.layout.averages:
            return None, None
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "ranks"))
        return mesh["ranks"], mesh["sites"]

    def averaged(self, part: Any, group: Any, index: int) -> Any:
        """The handle of what averages a part's gradients."""
        if not self.layout.averages:
            return None
        handle: Any = None
        if {ATTACH, MICRO} & self.pair or HOOK not in self.pair:
            micro_batches = self.layout.ranks if MICRO in self.pair else None
            handle = fastsync.attach(part, process_group=group, micro_batches=micro_batches)
        if HOOK in self.pair:
            ddp = DistributedDataParallel(part, process_group=group and group.get_group())
            handle = fastsync.register_comm_hook(ddp, process_group=group)
            if part is self.module:
                self.model = ddp
            else:
                self.module[2 * index] = ddp
        if {SHARDS, OVERLAP} & self.pair or (OWNERS in self.pair and index == 0):
            fastsync.shard_optimizer(handle, self.optimizers[index], overlap_gather=OVERLAP in self.pair)
        return handle

    def outer(self, between: Any) -> None:
        """Begins the blocks of both."""
        for kind in (DILOCO, LOCAL_SGD):
            if kind in self.pair:
                options: dict[str, Any] = {"compression": "none"} if kind == DILOCO else {}
                made = getattr(fastsync, kind)(
                    self.model if COMPILED in self.pair else self.module, self.optimizers, sync_every=SYNC_EVERY,
                    process_group=between, **options,
                )  # fmt: skip
                self.stack.enter_context(made)

    def made_elastic(self, store: str) -> Any:
        states = [] if self.scaler is None else [self.scaler]
        sync, optimizer = self.handle_and_optimizer()
        kept = dist.FileStore(store, -1)
        return fastsync.Elastic(self.module, optimizer, sync, state=states, store=kept, timeout=20.0)

    def handle_and_optimizer(self) -> tuple[Any, Optimizer]:
        if OWNERS in self.pair:
            return self.handles[0], self.optimizers[0]
        (sync,), (optimizer,) = self.handles, self.optimizers
        return sync, optimizer

    def run(self) -> None:
        with self.stack, self.joined():
            for step, block in self.steps():
                with block:
                    self.step(step)

    def joined(self) -> Any:
        if JOIN not in self.pair:
            return nullcontext()
        sync, _ = self.handle_and_optimizer()
        return sync.join(*self.optimizers, *([] if self.scaler is None else [self.scaler]))

    def steps(self) -> Iterator[tuple[int, Any]]:
        if self.elastic is not None:
            for step in self.elastic.steps(NUM_STEPS):
                if step.index == LOST_BEFORE and self.rank == LOST:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield step.index, step
            return
        for step in range(NUM_STEPS):
            if self.rank % self.layout.ranks in self.layout.active(step):
                yield step, nullcontext()

    def step(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for rank, micro in self.backwards():
            if self.pair == {COMPILED, OVERLAP}:
                self.handles[0].wait_for_parameters()
            with self.no_sync() if micro + 1 < self.layout.num_micro else nullcontext():
                loss = loss_of(self.model, rank, step, micro)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def backwards(self) -> Iterator[tuple[int, int]]:
        """Yields whose data the backwards are of."""
        if MICRO in self.pair:
            first = self.rank // self.layout.ranks * self.layout.ranks
            loops = (handle.micro_batches() for handle in self.handles)
            yield from ((first + index, 0) for index, *_ in zip(*loops, strict=True))
        else:
            yield from ((self.rank, micro) for micro in range(self.layout.num_micro))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for handle in [self.model] if HOOK in self.pair else self.handles:
                stack.enter_context(handle.no_sync())
            yield

    def clip(self) -> None:
        given: dict[str, Any] = {}
        if self.scaler is not None:
            given = {"scaler": self.scaler, "optimizer": self.optimizers[0]}
        if CLIP in self.pair:
            fastsync.clip_grad_norm_(self.handles[0], MAX_NORM, **given)
        if CLIP_SEVERAL in self.pair:
            fastsync.clip_grad_norm_(self.handles, MAX_NORM, **given)

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.module.parameters()]


def train(rank: int, world_size: int, pair: frozenset[str], store: str) -> list[Tensor] | str:
    """Returns the rank's weights, or the class of the error that refuses the pair."""
    try:
        training = Training(pair, rank, store)
        training.run()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return training.weights()


def table() -> str:
    """Returns the pairs that are refused, as a table in Markdown."""
    rows = [(*sorted(pair, key=FEATURES.index), why) for pair, why in REFUSED.items()]
    return "\n".join(
        ["| | and | are refused, because |", "|---|---|---|", *(f"| {a} | {b} | {why} |" for a, b, why in rows)]
    )

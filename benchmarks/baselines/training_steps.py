"""Whole training steps: forward, backward with what makes the gradients the mean over the ranks, and the optimizer."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from benchmarks.baselines.gradients import Gradients, Step
from benchmarks.baselines.models import Training
from benchmarks.baselines.ways import BARE, WAYS, TrainingStep, Way, wrapped
from fastsync import SyncStats


class WholeStep(Step):
    """A training step, all of it timed: what a way prepares for its backward, the backward, the optimizer's step."""

    def __init__(self, step: TrainingStep, training: Training) -> None:
        self.model = step.model
        self._step = step
        self._optimizer = training.optimizer(step.model.parameters())

    def run(self) -> None:
        self._step.prepare()
        self._step.run()
        self._optimizer.step()

    def result(self) -> Tensor:
        return self._step.result()

    def stats(self) -> SyncStats | None:
        return self._step.stats()


class _NoSync(nn.Module):
    """DDP that does not communicate: it decides so in the forward."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        with self.model.no_sync():
            return self.model()


def _ddp_no_sync(gradients: Gradients, group: ProcessGroup) -> Step:
    return TrainingStep(_NoSync(wrapped(gradients, group)))


NO_DDP, NO_SYNC = "no_ddp", "no_sync"
PARTS: dict[str, Way] = {NO_DDP: WAYS["no_sync"], **WAYS, NO_SYNC: Way(_ddp_no_sync, wire=None, in_ddp=True)}
"""The ways that gradients are taken along in a step. A model of its own is all that ``sync`` needs for no_sync; here
that is no_ddp."""


def whole_steps(names: Sequence[str], training: Training) -> dict[str, Way]:
    """Ways whose steps are whole ones; the bare all_reduces, which are no training, stay what they are."""

    def whole(way: Way) -> Way:
        return replace(way, build=lambda gradients, group: WholeStep(way.build(gradients, group), training))

    return {name: PARTS[name] if name in BARE else whole(PARTS[name]) for name in (NO_DDP, *names)}

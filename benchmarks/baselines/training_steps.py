"""Whole training steps: forward, backward with what makes the gradients the mean over the ranks, and the optimizer."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.baselines.gradients import Gradients, Step
from benchmarks.baselines.methods import BARE, METHODS, WHOLE_WITH_ADAMW, Method, TrainingStep, wrapped
from benchmarks.baselines.models import Training
from benchmarks.baselines.optimizer_steps import OptimizerStep
from fastsync.sync.stats import SyncStats


class WholeStep(Step):
    """A training step, all of it timed: what a method prepares for its backward, the backward, the optimizer's step."""

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


class _SteppingWholeStep(Step):
    """The same of a method that has an optimizer of its own: the optimizer's step, forward and backward."""

    def __init__(self, step: Step) -> None:
        assert isinstance(step, OptimizerStep)
        self._step = step

    def run(self) -> None:
        self._step.begin_with_update()

    def result(self) -> Tensor:
        return self._step.result()

    def stats(self) -> SyncStats | None:
        return self._step.stats()


class _WithoutSync(TrainingStep):
    """DDP that does not communicate: it decides so in the forward."""

    def prepare(self) -> None:
        with self.model.no_sync():
            super().prepare()


def _ddp_no_sync(gradients: Gradients, group: ProcessGroup) -> Step:
    return _WithoutSync(wrapped(gradients, group))


NO_DDP, NO_SYNC = "no_ddp", "no_sync"
PARTS = {NO_DDP: METHODS["no_sync"], **METHODS, NO_SYNC: Method(_ddp_no_sync, wire=None, in_ddp=True)}
"""All methods for a step. A model of its own is all that ``sync`` needs for no_sync; here that is no_ddp."""


def whole_steps(names: Sequence[str], training: Training) -> dict[str, Method]:
    """Methods whose steps are whole ones; the bare all_reduces, which are no training, stay what they are."""

    def whole(name: str, method: Method) -> Method:
        if name in WHOLE_WITH_ADAMW:
            return replace(method, build=lambda gradients, group: _SteppingWholeStep(method.build(gradients, group)))
        return replace(method, build=lambda gradients, group: WholeStep(method.build(gradients, group), training))

    return {name: PARTS[name] if name in BARE else whole(name, PARTS[name]) for name in (NO_DDP, *names)}

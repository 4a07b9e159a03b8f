"""A step of ``Elastic``: what it notes before, so that it can run again, and which optimizers may step in it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, repeat
from math import isnan, nan
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _C
from .._torch_compat import own_buffers
from ..errors import RankLostError
from ..sync.sync_weights import replace_inference_buffers
from .kept_states import copy_of_tensor


class Step:
    """One step of a training, as a context. See ``Elastic``. ``index`` is its number, from 0."""

    index = 0

    def __init__(
        self,
        engine: _C.Synchronizer,
        model: nn.Module,
        *,
        own: Callable[[], int],
        fail: Callable[[BaseException | None], bool],
    ) -> None:
        """Takes what returns this rank's number, and what deals with the error of a step, if it does."""
        self.engine = engine
        self._own, self._fail = own, fail
        self.engine_step = 0  # the engine's number of this step
        self.num_finished = 0
        self.is_in_loop = self.was_entered = self.is_inside = False
        self.has_stepped = False  # whether the optimizer has
        self.has_idled = False  # whether the newest step has ended without an error, and without the optimizer's step
        self.must_agree = False  # whether the ranks agree on the members before the next step
        self.wants_change = False  # whether a new rank waits; this rank's signal tells it to the others
        self._random = _C.RandomState()
        self._with_buffers = [module for module in model.modules() if own_buffers(module)]
        self._buffers: list[dict[str, Tensor | None]] = []  # by module, as they were before the step
        self._copies: list[Tensor] = []  # of their values
        self._optimizers: list[Optimizer] = []
        self._idle: set[Optimizer] = set()  # those that have not stepped in the newest step in which another has

    def goes_on(self, num_steps: int) -> bool:
        """Whether there is another step. If so, ``index`` is its number."""
        if self.num_finished >= num_steps:
            return False
        self.index, self.was_entered = self.num_finished, False
        return True

    def __enter__(self) -> Step:
        self.was_entered = self.is_inside = True
        self.has_stepped = self.has_idled = False
        self._random.keep()
        if self._with_buffers:
            self._keep_buffers()
        self.engine_step = self.engine.set_signal(float(self.wants_change))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        wishes = (self.engine.signals() or 0.0) if error is None else nan
        if isnan(wishes):
            return self._fail(error)
        self.is_inside = False
        self.has_idled = not self.has_stepped
        self.must_agree = wishes > 0
        self.num_finished += 1
        return True

    def watch(self, optimizers: list[Optimizer]) -> None:
        """Lets these optimizers step in each block, each of them once."""
        self._optimizers = optimizers
        for each in optimizers:
            each.register_step_pre_hook(self.before_optimizer if len(optimizers) == 1 else self._before_one)
            each.register_step_post_hook(self.after_optimizer if len(optimizers) == 1 else self._after_one)

    def before_optimizer(self, *arguments: object) -> None:
        """Refuses the optimizer's step where it could not be taken back, or has no averages."""
        wishes = self.engine.signals() if self.is_inside and not self.has_stepped else None
        if (wishes is None or isnan(wishes)) and (self.is_inside or self.is_in_loop):
            self._refuse_optimizer(wishes)

    def after_optimizer(self, *arguments: object) -> None:
        self.has_stepped = self.is_inside  # one outside of a block is not ours

    def _before_one(self, optimizer: Optimizer, *arguments: Any) -> None:
        if not (self.is_inside and self.has_stepped):
            self.before_optimizer()
        elif optimizer not in self._idle:
            self._refuse_optimizer(None)

    def _after_one(self, optimizer: Optimizer, *arguments: Any) -> None:
        if not self.has_stepped:
            self._idle = {*self._optimizers}
        self._idle.discard(optimizer)
        self.after_optimizer()

    @property
    def is_half_done(self) -> bool:
        """Whether some of several optimizers have stepped, and others have not."""
        return self.has_stepped and bool(self._idle)

    def _keep_buffers(self) -> None:
        replace_inference_buffers(self._with_buffers)
        self._buffers = [own_buffers(module).copy() for module in self._with_buffers]
        with torch.no_grad():
            self._copies = [*map(copy_of_tensor, self._tensors(), chain(self._copies, repeat(None)))]

    def _tensors(self) -> list[Tensor]:
        return [buffer for each in self._buffers for buffer in each.values() if buffer is not None]

    @torch.no_grad()
    def put_back(self) -> None:
        """Puts back buffers, and the random state."""
        self._random.put_back()
        for buffer, kept in zip(self._tensors(), self._copies, strict=True):
            buffer.copy_(kept)
        for module, buffers in zip(self._with_buffers, self._buffers, strict=False):  # none before the first step
            own_buffers(module).update(buffers)  # a forward may have put others there

    def _refuse_optimizer(self, wishes: float | None) -> None:
        if not self.is_inside:
            raise ValueError(
                "fastsync.Elastic: the optimizer stepped outside the block of a step, where a step that has failed "
                "would step, too; put it into the block, behind the backward"
            )
        if self.has_stepped:
            raise ValueError(
                "fastsync.Elastic: the optimizer steps twice in one step, which could not be taken back; give each of "
                "its steps a block of its own"
            )
        if wishes is None:
            raise ValueError(
                "fastsync.Elastic: the optimizer was about to step, and no backward of this block has averaged "
                "gradients; put the backward into the block, and let its errors leave the block"
            )
        reason = "this rank's backward has failed"
        raise RankLostError(
            f"fastsync.Elastic: {reason}, so the step runs again",
            ranks=[self._own()],
            step=self.num_finished,
            reason=reason,
        )

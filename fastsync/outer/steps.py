"""The optimizers' steps in a block of ``DiLoCo``: counts them, and notices where another optimizer steps instead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..sync.optimizer_steps import is_training_step, register_when_watched, watch_optimizers
from .model_tensors import ModelTensors

PATIENCE = 16
"""The number of steps that other optimizers may take before each of ours has taken its first."""


class BlockSteps:
    """Calls ``begin`` before the first step of any optimizer with the weights, and ``step`` after each step of ours.

    Several optimizers take a step together: it ends when each has stepped since the one before.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        tensors: ModelTensors,
        *,
        begin: Callable[[], None],
        step: Callable[[], None],
        patience: int,
        owner: str,
    ) -> None:
        self._optimizers = optimizers
        self._tensors = tensors
        self._begin = begin
        self._step = step
        self._patience = max(patience, PATIENCE)
        self._owner = owner  # named in the error
        self.has_begun = False  # whether the sites have compared their weights, or have loaded a state
        self._have_stepped: set[Optimizer] = set()  # since the newest step that counts
        self._idle = list(optimizers)  # those that have not stepped in this block
        self._num_steps_of_others = 0
        watch_optimizers()
        self._hooks = [each.register_step_post_hook(self._after_ours) for each in optimizers]
        _set_counting(self, True)

    def begin(self) -> None:
        """Begins the block, if that has not been done."""
        if not self.has_begun:
            self._begin()
            self.has_begun = True

    def stop_counting(self) -> None:
        """Takes the hooks off."""
        _set_counting(self, False)
        for hook in self._hooks:
            hook.remove()

    def check_that_ours_stepped(self) -> None:
        """Raises RuntimeError if none of the optimizers has ever stepped, and another one has."""
        if len(self._idle) == len(self._optimizers):
            self._check_others(at_most=0)

    def before_any(self, optimizer: Optimizer) -> None:
        """Begins the block before the first step of an optimizer with the weights."""
        if not self.has_begun and is_training_step(optimizer) and self._tensors.are_stepped_by(optimizer):
            self.begin()

    def _after_ours(self, optimizer: Optimizer, *_: object) -> None:
        if not is_training_step(optimizer):
            return
        if optimizer in self._idle:
            self._idle.remove(optimizer)
        self._have_stepped.add(optimizer)
        if len(self._have_stepped) == len(self._optimizers):
            self._have_stepped.clear()
            self._step()

    def after_any(self, optimizer: Optimizer) -> None:
        """Counts steps until each of ours has stepped. Other optimizers may have parameters of their own."""
        if self._idle and is_training_step(optimizer) and self._tensors.are_stepped_by(optimizer):
            self._num_steps_of_others += 1
            self._check_others(at_most=self._patience)

    def _check_others(self, at_most: int) -> None:
        if self._num_steps_of_others > at_most:
            raise RuntimeError(
                f"fastsync: the {type(self._idle[0]).__name__} that the {self._owner} was given has not "
                f"stepped, and another optimizer has stepped the model's parameters {self._num_steps_of_others} times, "
                "which count for nothing; pass the optimizer that steps, which a trainer may make only when it begins"
            )


# See Note [Hooks of all optimizers]. Another thread may go through the tuple, so it is replaced as a whole.
_lock = threading.Lock()
_counting: tuple[BlockSteps, ...] = ()


def _set_counting(block: BlockSteps, counts: bool) -> None:
    global _counting
    with _lock:
        others = tuple(each for each in _counting if each is not block)
        _counting = (*others, block) if counts else others


def _before_any(optimizer: Optimizer, *_: object) -> None:
    for block in _counting:
        block.before_any(optimizer)


def _after_any(optimizer: Optimizer, *_: object) -> None:
    for block in _counting:
        block.after_any(optimizer)


register_when_watched(lambda: register_optimizer_step_pre_hook(_before_any))
register_when_watched(lambda: register_optimizer_step_post_hook(_after_any))

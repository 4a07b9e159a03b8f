"""The optimizer's steps in a block of ``DiLoCo``: counts them, and notices where another optimizer steps instead."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ._optimizer_steps import is_training_step
from .model_tensors import ModelTensors

PATIENCE = 16
"""The number of steps that other optimizers may take before the first step of ours."""


class BlockSteps:
    """Calls ``begin`` before the first step of any optimizer with the weights, and ``step`` after each step of ours."""

    def __init__(
        self,
        optimizer: Optimizer,
        tensors: ModelTensors,
        *,
        begin: Callable[[], None],
        step: Callable[[], None],
        patience: int,
        owner: str,
    ) -> None:
        self._optimizer = optimizer
        self._tensors = tensors
        self._begin = begin
        self._step = step
        self._patience = max(patience, PATIENCE)
        self._owner = owner  # named in the error
        self.has_begun = False  # whether the sites have compared their weights, or have loaded a state
        self._num_steps = self._num_steps_of_others = 0
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_any),
            optimizer.register_step_post_hook(self._after_ours),
            register_optimizer_step_post_hook(self._after_any),
        ]

    def begin(self) -> None:
        """Begins the block, if that has not been done."""
        if not self.has_begun:
            self._begin()
            self.has_begun = True

    def stop_counting(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def check_that_ours_stepped(self) -> None:
        """Raises RuntimeError if the optimizer has never stepped, and another one has."""
        if self._num_steps == 0:
            self._check_others(at_most=0)

    def _before_any(self, optimizer: Optimizer, *_: object) -> None:
        if not self.has_begun and is_training_step(optimizer) and self._tensors.are_stepped_by(optimizer):
            self.begin()

    def _after_ours(self, optimizer: Optimizer, *_: object) -> None:
        if is_training_step(optimizer):
            self._num_steps += 1
            self._step()

    def _after_any(self, optimizer: Optimizer, *_: object) -> None:
        """Counts steps of others until ours has stepped. Several optimizers may each have parameters of their own."""
        if self._num_steps > 0 or optimizer is self._optimizer or not is_training_step(optimizer):
            return
        if self._tensors.are_stepped_by(optimizer):
            self._num_steps_of_others += 1
            self._check_others(at_most=self._patience)

    def _check_others(self, at_most: int) -> None:
        if self._num_steps_of_others > at_most:
            raise RuntimeError(
                f"fastsync: the {type(self._optimizer).__name__} that the {self._owner} was given has not "
                f"stepped, and another optimizer has stepped the model's parameters {self._num_steps_of_others} times, "
                "which count for nothing; pass the optimizer that steps, which a trainer may make only when it begins"
            )

"""Watches the steps of optimizers: refuses steps that would let ranks drift apart, and tells the engine of the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, wraps
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _C
from ..optimizer.shards import OptimizerShards
from ..optimizer.steps import is_training_step
from .grad_scaler import forget_scale
from .handle import GradientHandle
from .handles_in_use import in_use
from .late_parameters import LateParameters

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class WatchedHandle(GradientHandle):
    """A handle of whole gradients. It refuses an optimizer's step with gradients that no rank has averaged."""

    _engine: _C.HookState | _C.Synchronizer
    _deferred_clip_step = -1
    """The step whose gradients the optimizer's next step clips, for ``clip_grad_norm_``; -1 if there is none."""
    _optimizer_shards: OptimizerShards | None = None
    """Lets each rank step a shard of the parameters; None without ``attach(optimizer=)``."""
    _late_reason: ClassVar[str]
    """Ends the error that a parameter of the model is not averaged: it gives the reason, and the way out."""
    _steps_before: WeakKeyDictionary[Optimizer, int]
    """The number of syncs at each optimizer's newest step."""
    _ids: frozenset[int]
    """The ids of the parameters whose gradients are averaged, or would be if they were not frozen."""

    def _stepped_by(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yields the parameters of an optimizer whose gradients this handle averages."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._ids and parameter.requires_grad:
                    yield parameter

    def _check_before_step(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if an optimizer is about to step inside backward, or another one than attach's."""
        if self._optimizer_shards is not None:
            self._optimizer_shards.check_may_step(optimizer, self._stepped_by(optimizer))
        if torch._C._current_graph_task_id() == -1:
            return
        for parameter in self._stepped_by(optimizer):
            raise RuntimeError(
                f"fastsync: {type(optimizer).__name__} stepped inside backward() with a parameter of shape "
                f"{list(parameter.shape)} whose gradients are averaged over ranks when backward() ends, so it "
                "would use this rank's own gradients and ranks would drift apart; let one optimizer step after "
                "backward() has returned, or do not attach these parameters"
            )

    def _check_was_averaged(self, optimizer: Optimizer, what: str, way_out: str) -> None:
        """Raises RuntimeError if an optimizer is about to step with a gradient that no rank has averaged.

        Args:
            optimizer: steps parameters of this handle.
            what: the call that the handle is of.
            way_out: how to get an average.
        """
        if self._engine.is_captured():  # replays are no steps of the engine, and the host does not wait for them
            return
        num_steps = self._engine.num_steps()
        stepped = self._find_not_averaged(optimizer, self._steps_before.get(optimizer, 0) != num_steps)
        if stepped is not None:
            name = next(name for name, parameter in self._named_parameters().items() if parameter is stepped)
            raise RuntimeError(
                f"{what}: {type(optimizer).__name__} was about to step with gradients that no rank has averaged, such "
                f"as that of {name}; {way_out}, on every rank. A step that is meant to be this rank's own belongs "
                "inside no_sync()"
            )
        self._steps_before[optimizer] = num_steps

    @abstractmethod
    def _find_not_averaged(self, optimizer: Optimizer, is_synced: bool) -> Tensor | None:
        """Returns a parameter that the optimizer is about to step with a gradient that no rank has averaged, or None.

        Args:
            optimizer: steps parameters of this handle.
            is_synced: whether there was a sync since its previous step.
        """

    @abstractmethod
    def _steps_are_shared(self) -> bool:
        """Whether optimizers step with averages now, and not with this rank's own gradients inside ``no_sync``."""

    @abstractmethod
    def _parameters_of_model(self) -> Iterable[tuple[str, Tensor]]:
        """Returns the parameters that the model has now, with names, except those meant to be each rank's own."""

    @cached_property
    def _late(self) -> LateParameters:
        return LateParameters(self._ids)

    def _check_nothing_is_late(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if an optimizer is about to step a parameter of the model that nobody averages."""
        for name, parameter in self._late.stepped_by(optimizer, self._parameters_of_model):
            if not any(each is parameter for handle in in_use() for each in handle._claimed_parameters()):
                raise RuntimeError(
                    f"fastsync: {type(optimizer).__name__} was about to step {name}, whose gradient no rank has "
                    f"averaged, because {self._late_reason}"
                )

    def _note_step(self, optimizer: Optimizer) -> None:
        """Tells the engine that the parameters were updated. Version counters do not show it for fused optimizers."""
        if any(True for _ in self._stepped_by(optimizer)):
            self._engine.note_update()
            shards = self._optimizer_shards
            if self._steps_are_shared() and self._engine.sample_weights() and shards is not None:
                shards.wait_for_samples(optimizer)


def has_gradient(parameter: Tensor) -> bool:
    """Whether the parameter has a gradient with other values than zeros. Waits for the device."""
    return parameter.grad is not None and (parameter.grad.is_sparse or bool(parameter.grad.any()))


def check_has_no_shards(named: Mapping[str, Tensor], argument: str) -> None:
    """Raises ValueError if ranks step shards of these parameters, and so cannot change them each on its own."""
    for handle in _watched():
        for name, parameter in named.items():
            if handle._optimizer_shards is not None and id(parameter) in handle._ids:
                raise ValueError(
                    f"{argument}: with attach(optimizer=) ranks step parameter {name} together, so none of them can "
                    "change it on its own; leave optimizer= out of attach()"
                )


@cache  # The hooks stay for the rest of the process. Without handles they do nothing.
def watch_optimizers() -> None:
    """Lets the handles in use check and note the steps of all optimizers."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
    handles = _watched()
    if not handles or not is_training_step(optimizer):
        return None

    def check() -> None:
        try:
            for handle in handles:
                handle._check_before_step(optimizer)
        except RuntimeError:
            forget_scale(optimizer)
            raise

    # A closure makes the gradients that the step takes, as Lightning's and LBFGS's do. So the check comes after it.
    if len(args) > 1 and callable(args[1]):
        return (args[0], _then(args[1], check), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, kwargs | {"closure": _then(kwargs["closure"], check)}
    check()
    return None


def _then(closure: Callable[[], Any], check: Callable[[], None]) -> Callable[[], Any]:
    """Returns a closure whose first call in the step is followed by the check."""
    is_checked = False

    @wraps(closure)
    def checked() -> Any:
        nonlocal is_checked
        result = closure()
        if not is_checked:
            is_checked = True
            check()
        return result

    return checked


def _after_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    handles = _watched()
    if handles and is_training_step(optimizer):
        for handle in handles:
            handle._note_step(optimizer)


def _watched() -> list[WatchedHandle]:
    return [handle for handle in in_use() if isinstance(handle, WatchedHandle)]

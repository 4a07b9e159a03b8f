"""Watches the steps of optimizers: refuses steps that would let ranks drift apart, and tells the engine of the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, wraps
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _C
from .._torch_compat import is_in_backward
from .grad_scaler import forget_scale
from .handle import GradientHandle
from .handles_in_use import in_use
from .late_parameters import LateParameters
from .micro_batches import MicroBatches
from .optimizer_steps import is_training_step, register_when_watched
from .sharded_step import ShardedStep

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class WatchedHandle(GradientHandle):
    """A handle of whole gradients. It refuses an optimizer's step with gradients that no rank has averaged."""

    _engine: _C.HookState | _C.Synchronizer
    _deferred_clip_step = -1
    """The step whose gradients the optimizer's next step clips, for ``clip_grad_norm_``; -1 if there is none."""
    _optimizer_shards: ShardedStep | None = None
    """Lets each rank step a shard of the parameters; None without ``shard_optimizer``."""
    _micro_batches: MicroBatches | None = None
    """Gives the same bits on any number of ranks; None without ``attach(micro_batches=)``."""
    _late_reason: ClassVar[str]
    """Ends the error that a parameter of the model is not averaged: it gives the reason, and the way out."""
    _made_by: ClassVar[str]
    """The call that the handle is of, for errors."""
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
        """Raises RuntimeError if an optimizer is about to step inside backward, or another one than shards."""
        if self._optimizer_shards is not None:
            self._optimizer_shards.check_may_step(optimizer, self._stepped_by(optimizer))
        if not is_in_backward():
            return
        for parameter in self._stepped_by(optimizer):
            raise RuntimeError(
                f"fastsync: {type(optimizer).__name__} stepped inside backward() with a parameter of shape "
                f"{list(parameter.shape)} whose gradients are averaged over ranks when backward() ends, so it "
                "would use this rank's own gradients and ranks would drift apart; let one optimizer step after "
                "backward() has returned, or do not attach these parameters"
            )

    @abstractmethod
    def _averages(self) -> bool:
        """Whether this rank's backwards are meant to be averaged: false inside ``no_sync``."""

    @abstractmethod
    def _way_to_average(self) -> str:
        """Returns how to get an average, for errors."""

    def _check_was_averaged(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if an optimizer is about to step with a gradient that no rank has averaged."""
        if self._engine.is_captured():  # replays are no steps of the engine, and the host does not wait for them
            return
        num_steps = self._engine.num_steps()
        is_synced = self._steps_before.get(optimizer, 0) != num_steps
        found = self._find_not_averaged(optimizer, is_synced)
        if found is not None:
            stepped, is_own = found
            kind, name = type(optimizer).__name__, self._name_of(stepped)
            what = f"{kind} was about to step with gradients that no rank has averaged, such as that of {name}"
            if not is_own and num_steps > 0:
                what = (
                    f"{kind} has stepped with these gradients already, such as that of {name}, or no rank has averaged "
                    "them: no backward() was averaged since its step before"
                )
            raise RuntimeError(
                f"{self._made_by}: {what}; {self._way_to_average()}, on every rank. A step that is meant to be this "
                "rank's own belongs inside no_sync()"
            )
        self._steps_before[optimizer] = num_steps

    @abstractmethod
    def _find_not_averaged(self, optimizer: Optimizer, is_synced: bool) -> tuple[Tensor, bool] | None:
        """Returns a parameter that the optimizer is about to step with a gradient that no rank has averaged, or None.

        It also tells whether the gradient is sure to be this rank's own.

        Args:
            optimizer: steps parameters of this handle.
            is_synced: whether there was a sync since its previous step.
        """

    def _check_may_be_clipped(self) -> None:
        """Raises RuntimeError if gradients are about to be clipped, and no rank has averaged any yet."""
        if not self._averages() or self._engine.num_steps() > 0:
            return
        if (clipped := first_with_gradient(self.parameters())) is not None:
            raise RuntimeError(
                "fastsync.clip_grad_norm_: it was about to clip gradients that no rank has averaged, such as that of "
                f"{self._name_of(clipped)}; {self._way_to_average()}, on every rank"
            )

    def _name_of(self, parameter: Tensor) -> str:
        return next(name for name, each in self._named_parameters().items() if each is parameter)

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
            if shards is not None and self._engine.is_sample_due():
                shards.wait_for_parameters()
            if self._averages() and self._engine.sample_weights() and shards is not None:
                shards.wait_for_samples(optimizer)


def first_with_gradient(parameters: Iterable[Tensor]) -> Tensor | None:
    """Returns the first parameter whose gradient is not zero.

    ``zero_grad(set_to_none=False)`` leaves zeros to models of an optimizer that had no backward in this step.
    """
    return next((p for p in parameters if p.grad is not None and (p.grad.is_sparse or bool(p.grad.any()))), None)


def check_has_no_shards(named: Mapping[str, Tensor], argument: str) -> None:
    """Raises ValueError if ranks step shards of these parameters, and so cannot change them each on its own."""
    for handle in _watched():
        for name, parameter in named.items():
            if handle._optimizer_shards is not None and id(parameter) in handle._ids:
                raise ValueError(
                    f"{argument}: with shard_optimizer ranks step parameter {name} together, so none of them can "
                    "change it on its own; leave shard_optimizer out"
                )


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
    handles = _watched()
    if not handles or not is_training_step(optimizer):
        return None

    def check() -> None:
        try:
            for handle in handles:
                handle._check_before_step(optimizer)
        except (RuntimeError, ValueError):
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


# See Note [Hooks of all optimizers].
register_when_watched(lambda: register_optimizer_step_pre_hook(_before_step))
register_when_watched(lambda: register_optimizer_step_post_hook(_after_step))

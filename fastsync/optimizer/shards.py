"""The step that ranks share: each steps its own shard of the parameters, with the user's optimizer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import _C
from ..sync.compression import Auto, Compression
from ..sync.grad_scaler import forget_scale, has_unscaled, scaler_of_step
from ..sync.optimizer_steps import innermost, is_training_step
from ..sync.stats import GradStats
from ..sync.synchronizer import GradientSynchronizer
from .agreement import LateAgreement, agree_on_step, changed_since, comparable, failed_on
from .arrival import Arrivals
from .checks import OR_ELSE, WAY_OUT, check_compression
from .groups import ShardedGroups
from .home import ShardHome
from .host_memory import HostMemory
from .masters import WideState
from .own_shards import OwnShards
from .piece_optimizer import PieceOptimizer
from .state import ShardedState
from .wrappers import WrapperWatch

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerShards:
    """Lets the ranks step the parameters of a user's optimizer together, each of them a shard.

    Before the optimizer's own step, another one of its class steps this rank's pieces of the parameters with the means.
    Then the optimizer's own step steps its other parameters alone. So torch does all arithmetic, and ``param_groups``
    and ``state`` are the user's, as without shards.

    All ranks come together before a step, because another rank may still read the parameters, and after it. Where
    parameters and state are, the home knows.
    """

    def __init__(
        self,
        sync: GradientSynchronizer,
        optimizer: Optimizer,
        master_weights: bool,
        parameter_wire: torch.dtype | None,
        overlap_gather: bool,
        wrappers: Sequence[Optimizer] = (),
    ) -> None:
        """Takes the optimizer, and the wrappers around it that the user steps."""
        self._sync, self._optimizer, self._wrappers = sync, optimizer, wrappers
        self._groups = ShardedGroups(optimizer, sync._named_parameters(), master_weights, parameter_wire)
        self._parameters, self._names = self._groups.parameters, self._groups.names
        self._wide_state = WideState(optimizer, [self._parameters[index] for index in self._groups.rounding])
        self._home: ShardHome
        self._state: ShardedState
        self._pieces: PieceOptimizer
        self._arrivals = Arrivals(self._note_failure) if overlap_gather else None
        self._late: LateAgreement | None = None  # on a device
        self._late_error = ""  # what all ranks have heard of an earlier step there
        self._addresses: dict[int, int] = {}
        self._divisor: Tensor | None = None
        self._has_failed = False
        self._wrapper_watch = WrapperWatch(
            {self._names[index]: each for index, each in self._parameters.items()}, self._sync._engine.meet
        )

    @property
    def _engine(self) -> _C.Synchronizer:
        return self._sync._engine

    # ---- begin and end ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Gives the parameters and the state a home. Every rank must call it.

        Raises:
            ValueError: the ranks were given different optimizers, or the compression does not go with it. Then nothing
                has changed.
        """
        overlaps = "" if self._arrivals is None else "new parameters that the next forward may wait for\n"
        self._engine.set_optimizer(self._groups.description() + overlaps)
        try:
            self._engine.agree(init_sync=False)
            self._home = self._find_home()
            self.check_compression(self._sync.compression)
        except ValueError:
            self._engine.set_optimizer("")
            raise
        self._home.begin()
        self._sync._sparse = frozenset()  # of parameters that are frozen; dense gradients alone are taken
        self._state = ShardedState(self._groups, self._home)
        self._pieces = PieceOptimizer(self._sync, self._groups, self._home, self._state)
        if not all(parameter.is_cpu for parameter in self._parameters.values()):
            self._late = LateAgreement(self._engine, self._home.ranks(), self._names)
        self._addresses = {index: parameter.data_ptr() for index, parameter in self._parameters.items()}
        self._wide_state.begin()
        if not self._home.are_pieces_alone:
            self._wrapper_watch.begin(self._wrappers, self._note_failure)
        self._hooks = (
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            self._optimizer.register_state_dict_post_hook(self._put_whole_state),
        )

    def _find_home(self) -> ShardHome:
        has_owners = self._groups.kind.is_tensorwise
        if all(parameter.is_cpu for parameter in self._parameters.values()):
            try:
                names = self._groups.state_names()
                memory = HostMemory(self._sync, self._parameters, self._groups.rounding, names, has_owners)
                # Between hosts sums over micro-batches go by messages, and not through this memory.
                if self._sync._micro_batches is None or len(memory.ranks()) == self._sync._group.size():
                    return memory
            except ValueError as error:
                self._warn_of(error)
        return OwnShards(self._sync, self._parameters, self._groups.rounding, has_owners, self._arrivals)

    def _warn_of(self, error: ValueError) -> None:
        """Tells once why ranks do not share memory, unless nobody would expect it."""
        why = getattr(error, "reason", "")  # which rank has tried in vain, and why; empty if none could
        is_expected = not why or os.environ.get("FASTSYNC_SHARED_MEMORY") == "0"
        if self._sync._group.rank() == 0 and not is_expected:
            warnings.warn(
                f"fastsync.shard_optimizer: ranks share no memory, because {why}. So each rank has its own parameters "
                "and the state of its shard, and every rank has to call the optimizer's state_dict(), and detach()",
                stacklevel=5,
            )

    def check_compression(self, compression: Compression | Auto) -> None:
        """Raises ValueError if the ranks cannot keep shards of means that travel with this compression."""
        check_compression(compression)
        per_node = compression.ranks_per_node if isinstance(compression, Compression) else 1
        if 1 < per_node < self._sync._group.size() and self._home.are_pieces_alone:
            raise ValueError(
                f"compression: ranks_per_node={per_node} does not go with shard_optimizer where "
                f"ranks share no memory, because all of them exchange shards; leave it out. {WAY_OUT}"
            )

    def end(self) -> None:
        """Gives this rank its own copy of the parameters and of the state.

        Raises:
            RuntimeError: this rank could not gather the state. The optimizer has none afterwards. Or ranks have taken
                the newest step in different ways, and hear of it now.
        """
        for hook in self._hooks:
            hook.remove()
        self._wrapper_watch.end()
        try:
            self._home.end()
            self._hear()
        finally:
            try:
                self._state.end()
            finally:
                self._wide_state.end()

    def _put_whole_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._hear()
        if self._home.are_pieces_alone:  # else all of it is in the host's memory
            self._state.put_whole(state_dict)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def check_may_step(self, optimizer: Optimizer, stepped: Iterable[Tensor]) -> None:
        """Raises RuntimeError if an optimizer is about to step some of these parameters that is not the given one.

        Args:
            optimizer: the one that is about to step.
            stepped: what it steps of the attached parameters.
        """
        if innermost(optimizer) is self._optimizer:
            return
        parameter = next((each for each in stepped if each.grad is not None), None)
        if parameter is not None:
            name = next(name for name, each in self._sync._named.items() if each is parameter)
            own, other = type(self._optimizer).__name__, type(optimizer).__name__
            raise RuntimeError(
                f"fastsync: {f'another {other}' if other == own else other} was about to step parameter {name}, which "
                f"the ranks step together by the {own} that shard_optimizer got. Each rank would step by itself, "
                "and with its own gradients. Step with that optimizer. Or call detach(), attach again, and shard the "
                "new one, on every rank"
            )

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        if not is_training_step(optimizer):
            return None
        if not self._sync._is_enabled:
            raise RuntimeError(
                "fastsync: with shard_optimizer the ranks step together, so a rank cannot take a step of its own "
                f"inside no_sync(): step outside. {WAY_OUT}"
            )
        try:
            self._engine.check_not_captured()
            self._hear()
            if self._late_error:  # all ranks have it
                raise RuntimeError(self._late_error)
        except RuntimeError:
            forget_scale(optimizer)
            raise
        args, kwargs = _after_closure(args, kwargs)
        self._home.wait_for_parameters()
        stepped: list[int] = []
        refusal: RuntimeError | None = None
        try:
            self._check()
            stepped = self._stepped()
        except RuntimeError as error:
            refusal = error
        found_inf = self._found_inf()
        skips_on_device = self._late is not None and not self._late.is_first and not self._state.begins(stepped)
        finds_inf = found_inf is not None and not skips_on_device and bool(found_inf)
        if not skips_on_device:
            found_inf = None
        try:
            self._agree(stepped, finds_inf, found_inf, refusal)
        except RuntimeError:
            forget_scale(optimizer)
            raise
        if finds_inf:
            stepped = []  # all ranks' GradScalers skip this step
        self._step(stepped, stepped if self._late is None else self._with_means(), self._take_divisor(), found_inf)
        self._wrapper_watch.note_step()
        return (self._without_parameters(args[0]), *args[1:]), kwargs

    def _step(
        self, stepped: Sequence[int], shared: Sequence[int], divisor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Steps this rank's pieces of some parameters, and gives other ranks the values of those that are shared."""
        with self._told_of_failure(shared):
            self._pieces.renew()
        new = [index for index in stepped if self._parameters[index] not in self._optimizer.state]
        turns, chosen = self._home.turns(shared), set(stepped)
        for number, turn in enumerate(turns):
            with self._told_of_failure([*chain(*turns[number:])]):
                self._pieces.step([index for index in turn if index in chosen], turn, divisor, found_inf)
            self._home.begin_share(turn)
        self._state.put_in_order(new)
        self._home.share()

    @contextmanager
    def _told_of_failure(self, left: Sequence[int]) -> Iterator[None]:
        """Inside, a failure is told to the other ranks, which wait for new values of the parameters that are left."""
        try:
            yield
        except BaseException:
            self._note_failure()
            self._home.fail(left)
            raise

    def _after_step(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._groups.rounding and not is_training_step(optimizer):
            self._wide_state.make()

    def wait_for_parameters(self) -> None:
        """Waits until the new values of all parameters have come."""
        self._home.wait_for_parameters()

    def wait_for_samples(self, optimizer: Optimizer) -> None:
        """Waits until all ranks have read the parameters after a step, where they have them in one memory."""
        if innermost(optimizer) is self._optimizer:
            self._home.wait_for_readers()

    def _agree(
        self, stepped: Sequence[int], finds_inf: bool, found_inf: Tensor | None, refusal: RuntimeError | None
    ) -> None:
        """Raises RuntimeError if not all ranks take this step, or not the same one, as far as the host knows by now."""
        settings: list[Tensor] = []
        clips: list[Tensor] = []
        finds = [] if found_inf is None else [found_inf]
        compared = [] if refusal is not None else self._compared(stepped, finds_inf, settings, clips)
        if self._late is None:
            if compared:  # beside parameters on a CPU the host may wait for numbers on a device
                compared[0] = compared[0], [tensor.tolist() for tensor in settings]
                compared[3] = compared[3], [tensor.tolist() for tensor in clips]
            agree_on_step(self._engine, self._home.ranks(), compared, self._has_failed, refusal)
            return
        looked_at = [] if refusal is not None else stepped
        on_device = settings, clips, finds
        others_step = self._late.tell(compared, on_device, looked_at, self._has_failed, refusal is not None)
        if refusal is not None:
            if others_step:
                self._step([], self._with_means(), divisor=None, found_inf=None)
            raise refusal

    def _with_means(self) -> list[int]:
        """Returns the parameters of which any rank may have new values. They are the same on all ranks."""
        have_means = self._engine.have_means()
        return [index for index in self._parameters if have_means and have_means[index]]

    def _hear(self) -> None:
        """Raises RuntimeError, once and on all ranks, if they hear only now that the newest step is wrong."""
        if self._late is None:
            return
        try:
            self._late.hear()
            for rank in self._home.failed_late():
                raise failed_on(rank)
        except RuntimeError as error:
            self._late_error = str(error)
            raise

    def _note_failure(self) -> None:
        self._has_failed = True

    def _without_parameters(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        """Returns an optimizer with the same state and settings that steps the other parameters alone."""
        rest: AnyOptimizer = object.__new__(type(optimizer))
        vars(rest).update(vars(optimizer))
        rest.param_groups = self._groups.without_parameters()
        return rest

    def _check(self) -> None:
        """Raises RuntimeError if the step would not be that of the parameters that the ranks have."""
        if self._groups.have_changed():
            raise RuntimeError(
                "fastsync: the optimizer got other parameters after shard_optimizer. Call detach() of the handle, "
                "attach again, and shard it again, on every rank"
            )
        for index, parameter in self._parameters.items():
            if parameter.data_ptr() != self._addresses[index]:
                raise RuntimeError(
                    f"fastsync: parameter {self._names[index]} left the memory that shard_optimizer gave it, as "
                    "after an assignment to .data, to(dtype) or share_memory(). Write to it in place (copy_). Or call "
                    "detach() of the handle before, and attach and shard again afterwards, on every rank"
                )
        self._wrapper_watch.check()
        scaler_and_optimizer = scaler_of_step(self._optimizer)
        if scaler_and_optimizer is not None and has_unscaled(*scaler_and_optimizer):
            raise RuntimeError(
                "fastsync: with shard_optimizer a step takes the means that backward() has made, and "
                "GradScaler.unscale_ has divided this rank's own gradients alone. A GradScaler calls it by itself for "
                "an optimizer that is not fused. Make the optimizer with fused=True, and leave out unscale_(). "
                f"{OR_ELSE}"
            )

    def _stepped(self) -> list[int]:
        """Returns which parameters to step: those with a gradient on some rank, unless this rank set its own to None.

        Raises RuntimeError if a gradient has another value than the one that was averaged, or is of a parameter that
        the optimizer does not have.
        """
        have_means, writes = self._engine.have_means(), self._engine.num_writes()
        # A count that has risen proves a write. One that has not proves nothing: many writes are not counted.
        have_other_values = None if self._late is not None else self._engine.have_other_values()
        # With a fused optimizer, GradScaler.step multiplies each gradient by 1 to look for inf and nan.
        is_scaled = getattr(self._optimizer, "grad_scale", None) is not None and hasattr(self._optimizer, "found_inf")
        stepped = []
        for index, has_mean in enumerate(have_means):
            if has_mean and index not in self._groups.group_of:
                raise RuntimeError(
                    f"fastsync: parameter {self._names[index]} has a gradient now, and the optimizer that "
                    "shard_optimizer got does not have it. It was frozen then. Freeze it again; or call detach() of "
                    "the handle, give it to the optimizer, attach and shard again, on every rank"
                )
        for index, parameter in self._parameters.items():
            if not have_means or not have_means[index] or (writes[index] < 0 and parameter.grad is None):
                continue
            has_other_values = have_other_values is not None and have_other_values[index]
            if has_other_values or writes[index] not in ((0, 1) if is_scaled else (0,)):
                raise changed_since(self._names[index])
            stepped.append(index)
        return stepped

    def _compared(
        self, stepped: Sequence[int], finds_inf: bool, settings: list[Tensor], clips: list[Tensor]
    ) -> list[object]:
        """Returns what has to be equal on all ranks, as ``agree_on_step`` takes it. Tensors of a device go to lists."""
        groups = [
            {name: comparable(value, settings) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        scales = getattr(self._optimizer, "grad_scale", None), self._clip_divisor()
        return [groups, stepped, self._state.held(), [comparable(each, clips) for each in scales], finds_inf]

    def _found_inf(self) -> Tensor | None:
        """Returns 1 if the GradScaler that takes this step is to skip it, and 0 if not, float32; None without one."""
        found = getattr(self._optimizer, "found_inf", None)
        if found is None:
            return None
        # The engine's own count. That of the handle may gather the means, and a rank that knows better does not ask.
        num_nonfinite = GradStats(self._engine.grad_stats()).num_nonfinite
        return torch.logical_or(found.to(num_nonfinite.device) > 0, num_nonfinite > 0).float()

    def _clip_divisor(self) -> Tensor | None:
        return self._divisor if self._sync._deferred_clip_step == self._engine.num_steps() else None

    def _take_divisor(self) -> Tensor | None:
        divisor = self._clip_divisor()
        self._divisor, self._sync._deferred_clip_step = None, -1
        return divisor

    # ---- what the handle asks ---------------------------------------------------------------------------------------

    def clip(self, divisor: Tensor) -> None:
        """Has the next step divide the means by a number."""
        self._divisor = divisor

    def averaged_gradients(self) -> dict[str, Tensor]:
        """Returns the means over ranks, by parameter's name. Every rank must call it."""
        return self._pieces.means()

    def parameter_wire_bytes(self) -> int:
        """Returns how many bytes of new parameters this rank has sent so far."""
        return self._home.wire_bytes()


def _after_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments:
    """Calls the closure of a step, if there is one, and returns arguments that hand on its result.

    Optimizers that ranks step together call it once, and before anything else.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        result = closure()

    def of_result() -> Any:
        return result

    return ((*args[:1], of_result, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": of_result})

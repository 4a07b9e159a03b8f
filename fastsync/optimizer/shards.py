"""``attach(optimizer=)``: each rank steps its own shard of the parameters, with the user's optimizer."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import chain
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .. import _C
from ..sync.compression import Auto, Compression
from ..sync.grad_scaler import forget_scale, has_unscaled, scaler_of_step
from .checks import WAY_OUT, check_compression, has_count, state_names
from .home import Piece, ShardHome, StatePart
from .host_memory import HostMemory
from .masters import MASTER, WideState, rounding_of
from .own_shards import OwnShards
from .steps import innermost, is_training_step
from .wrappers import WrapperWatch

if TYPE_CHECKING:
    from ..sync.attach import GradientSynchronizer


AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]

STEP = "the step of the optimizer"
"""What ranks wait for, for errors."""
TAKES_STEP, REFUSES, HAS_FAILED = 0.0, 1.0, 2.0
"""What a rank tells of itself before a step. HAS_FAILED: an earlier step has ended in an error on it."""
COMPARED = (
    "settings in param_groups",
    "parameters that have gradients",
    "state, as after a load_state_dict() on some",
    "clips of the gradients, or scales of a GradScaler",
    "finds of a GradScaler, whose inf or nan is in a gradient that no rank has averaged",
)
"""What has to be equal on all ranks, as an error calls it."""


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
        wrappers: Sequence[Optimizer] = (),
    ) -> None:
        """Takes the optimizer, and the wrappers around it that the user steps."""
        self._sync, self._optimizer, self._wrappers = sync, optimizer, wrappers
        self._names = list(sync._named)
        index_of = {id(parameter): index for index, parameter in enumerate(sync._named.values())}
        self._groups = [[index_of.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        self._group_of = {i: number for number, indices in enumerate(self._groups) for i in indices if i is not None}
        self._parameters = {
            index: parameter
            for index, parameter in enumerate(sync._named.values())
            if index in self._group_of and parameter.numel() > 0
        }
        self._rounding = {
            index: rounding
            for index, parameter in self._parameters.items()
            if (rounding := rounding_of(parameter, master_weights, parameter_wire)) is not None
        }
        self._wide_state = WideState(optimizer, [self._parameters[index] for index in self._rounding])
        self._home: ShardHome
        self._stand_ins: dict[StatePart, Tensor] = {}  # for parts of the state of whole parameters
        self._addresses: dict[int, int] = {}
        self._pieces: list[Piece] = []
        self._pieces_number = -1
        self._inner: Optimizer | None = None  # steps the pieces
        self._handed: dict[int, Tensor | None] = {}  # whose state the pieces have, with the step's number if it counts
        self._divisor: Tensor | None = None
        self._has_failed = False
        self._ids = frozenset(map(id, self._parameters.values()))
        self._wrapper_watch = WrapperWatch({self._names[index]: each for index, each in self._parameters.items()})

    def description(self) -> str:
        """Returns the text that has to be equal on all ranks."""
        groups = "; ".join(" ".join(map(str, indices)) for indices in self._groups)
        text = f"optimizer {type(self._optimizer).__name__} of parameters {groups}\n"
        text += f"its state: {', '.join(self._state_names()) or 'none'}\n"
        for dtype in sorted({*self._rounding.values()}, key=str):
            rounded = (str(index) for index, rounding in self._rounding.items() if rounding == dtype)
            text += f"masters, rounded to {dtype}, of parameters {' '.join(rounded)}\n"
        return text

    def _state_names(self) -> list[str]:
        """Returns the names of the state that has a value for each value of a parameter, in any group."""
        return sorted({name for group in self._optimizer.param_groups for name in state_names(self._optimizer, group)})

    @property
    def _engine(self) -> _C.Synchronizer:
        return self._sync._engine

    # ---- begin and end ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Gives the parameters and the state a home. Every rank must call it.

        Raises:
            ValueError: the compression does not go with it.
        """
        self._home = self._find_home()
        self.check_compression(self._sync.compression)
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
        if all(parameter.is_cpu for parameter in self._parameters.values()):
            try:
                return HostMemory(self._sync, self._parameters, self._rounding, self._state_names())
            except ValueError as error:
                self._warn_of(error)
        return OwnShards(self._sync, self._parameters, self._rounding)

    def _warn_of(self, error: ValueError) -> None:
        """Tells once why ranks do not share memory, unless nobody would expect it."""
        why = str(error).partition(". Leave")[0]
        is_expected = "no two are on one host" in why or "FASTSYNC_SHARED_MEMORY=0" in why
        if self._sync._group.rank() == 0 and not is_expected:
            warnings.warn(
                f"fastsync.attach: {why}. So each rank has its own parameters and the state of its shard, and every "
                "rank has to call the optimizer's state_dict(), and detach()",
                stacklevel=4,
            )

    def check_compression(self, compression: Compression | Auto) -> None:
        """Raises ValueError if the ranks cannot keep shards of means that travel with this compression."""
        check_compression(compression)
        per_node = compression.ranks_per_node if isinstance(compression, Compression) else 1
        if 1 < per_node < self._sync._group.size() and self._home.are_pieces_alone:
            raise ValueError(
                f"compression: ranks_per_node={per_node} does not go with attach(optimizer=) where "
                f"ranks share no memory, because all of them exchange shards; leave it out. {WAY_OUT}"
            )

    def end(self) -> None:
        """Gives this rank its own copy of the parameters and of the state.

        Raises:
            RuntimeError: this rank could not gather the state. The optimizer has none afterwards.
        """
        for hook in self._hooks:
            hook.remove()
        self._wrapper_watch.end()
        self._home.end()
        for index in self._rounding:
            self._state(index).pop(MASTER, None)
        try:
            self._give_whole_state()
        except RuntimeError as error:
            for parameter in self._parameters.values():
                self._optimizer.state.pop(parameter, None)
            raise RuntimeError(
                "fastsync: detach() has not gathered all ranks' shards, so the optimizer's state is lost: go on from a "
                f"checkpoint. {error}"
            ) from error
        finally:
            self._wide_state.end()

    def _give_whole_state(self) -> None:
        """Gives the optimizer the state of whole parameters, in memory of its own."""
        for (index, part), copy in self._whole_state().items():
            self._state(index)[part] = copy

    def _whole_state(self) -> dict[StatePart, Tensor]:
        """Returns copies of the state that is at home."""
        parts = [
            (index, part)
            for index in self._parameters
            for part in self._parts(index)
            if self._is_at_home(index, part, self._state(index))
        ]
        return self._home.copies(parts) if parts else {}

    def _put_whole_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Puts the state of whole parameters into ``state_dict()``, where each rank has that of its pieces alone."""
        if not self._home.are_pieces_alone:
            return
        position_of = {index: position for position, index in enumerate(chain.from_iterable(self._groups))}
        for (index, part), copy in self._whole_state().items():
            position = position_of[index]
            state_dict["state"][position] = {**state_dict["state"][position], part: copy}

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
                f"the ranks step together by the {own} that attach(optimizer=) got. Each rank would step by itself, "
                "and with its own gradients. Step with that optimizer. Or call detach(), and attach with the new one, "
                "on every rank"
            )

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        if not is_training_step(optimizer):
            return None
        if not self._sync._is_enabled:
            raise RuntimeError(
                "fastsync: with attach(optimizer=) the ranks step together, so a rank cannot take a step of its own "
                f"inside no_sync(): step outside. {WAY_OUT}"
            )
        args, kwargs = _after_closure(args, kwargs)
        stepped: list[int] = []
        refusal: RuntimeError | None = None
        try:
            self._check()
            stepped = self._stepped()
        except RuntimeError as error:
            refusal = error
        finds_inf = self._finds_inf()
        try:
            self._meet(stepped, finds_inf, refusal)
        except RuntimeError:
            forget_scale(optimizer)
            raise
        if finds_inf:
            stepped = []  # all ranks' GradScalers skip this step
        try:
            self._step(stepped)
        except BaseException:
            self._note_failure()
            self._home.fail(stepped)
            raise
        self._home.share(stepped)
        self._wrapper_watch.note()
        return (self._without_parameters(args[0]), *args[1:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._rounding and not is_training_step(optimizer):
            self._wide_state.make()

    def wait_for_samples(self, optimizer: Optimizer) -> None:
        """Waits until all ranks have read the parameters after a step, where they have them in one memory."""
        if innermost(optimizer) is self._optimizer:
            self._home.wait_for_readers()

    def _note_failure(self) -> None:
        self._has_failed = True

    def _without_parameters(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        """Returns an optimizer with the same state and settings that steps the other parameters alone."""
        rest: AnyOptimizer = object.__new__(type(optimizer))
        vars(rest).update(vars(optimizer))
        rest.param_groups = [
            {**group, "params": [each for each in group["params"] if id(each) not in self._ids]}
            for group in optimizer.param_groups
        ]
        return rest

    def _check(self) -> None:
        """Raises RuntimeError if the step would not be that of the parameters that the ranks have."""
        if [len(group["params"]) for group in self._optimizer.param_groups] != [len(each) for each in self._groups]:
            raise RuntimeError(
                "fastsync: the optimizer got other parameters after attach(optimizer=). Call detach() of the handle, "
                "and attach again, on every rank"
            )
        for index, parameter in self._parameters.items():
            if parameter.data_ptr() != self._addresses[index]:
                raise RuntimeError(
                    f"fastsync: parameter {self._names[index]} left the memory that attach(optimizer=) gave it, as "
                    "after an assignment to .data, to(dtype) or share_memory(). Write to it in place (copy_). Or call "
                    "detach() of the handle before, and attach again afterwards, on every rank"
                )
        self._wrapper_watch.check()
        scaler_and_optimizer = scaler_of_step(self._optimizer)
        if scaler_and_optimizer is not None and has_unscaled(*scaler_and_optimizer):
            raise RuntimeError(
                "fastsync: with attach(optimizer=) a step takes the means that backward() has made, and "
                "GradScaler.unscale_ has divided this rank's own gradients alone. A GradScaler calls it by itself for "
                "an optimizer that is not fused. Make the optimizer with fused=True, and leave out unscale_(). "
                f"{WAY_OUT}"
            )

    def _stepped(self) -> list[int]:
        """Returns which parameters to step: those with a gradient on some rank, unless this rank set its own to None.

        Raises RuntimeError if a gradient has another value than the one that was averaged.
        """
        have_means, writes = self._engine.have_means(), self._engine.num_writes()
        # A count that has risen proves a write. One that has not proves nothing: many writes are not counted.
        have_other_values = self._engine.have_other_values()
        # With a fused optimizer, GradScaler.step multiplies each gradient by 1 to look for inf and nan.
        is_scaled = getattr(self._optimizer, "grad_scale", None) is not None and hasattr(self._optimizer, "found_inf")
        stepped = []
        for index, parameter in self._parameters.items():
            if not have_means or not have_means[index] or (writes[index] < 0 and parameter.grad is None):
                continue
            if have_other_values[index] or writes[index] not in ((0, 1) if is_scaled else (0,)):
                raise RuntimeError(
                    "fastsync: with attach(optimizer=) a step takes the means that backward() has made, and the "
                    f"gradient of {self._names[index]} was changed since, as torch.nn.utils.clip_grad_norm_ and "
                    "GradScaler.unscale_ do. Call fastsync.clip_grad_norm_(sync, ...) alone, and make the optimizer "
                    f"with fused=True for a GradScaler. {WAY_OUT}"
                )
            stepped.append(index)
        return stepped

    def _meet(self, stepped: Sequence[int], finds_inf: bool, refusal: RuntimeError | None) -> None:
        """Waits until all ranks are about to step.

        Raises:
            RuntimeError: ``refusal``, if this rank has one. Or another rank refuses the step, or has failed in an
                earlier one, or ranks would step in different ways.
        """
        own = self._compared(stepped, finds_inf) if refusal is None else [""] * len(COMPARED)
        state = HAS_FAILED if self._has_failed else TAKES_STEP if refusal is None else REFUSES
        numbers = [float(zlib.crc32(text.encode())) for text in own]
        try:
            told = self._engine.compare([state, *numbers], STEP)
        except RuntimeError:
            if refusal is not None:
                raise refusal from None
            raise
        if refusal is not None:
            raise refusal
        ranks = self._home.ranks()
        for rank, (theirs, *_) in zip(ranks, told, strict=True):
            if theirs == HAS_FAILED:
                raise RuntimeError(
                    f"fastsync: an earlier step of the optimizer has failed on rank {rank}, so its shard is behind the "
                    "others. Load a checkpoint: call detach() of the handle before, and attach again, on every rank"
                )
            if theirs == REFUSES:
                raise RuntimeError(
                    f"fastsync: rank {rank} refuses this step, and its own error says why. With attach(optimizer=) "
                    "the ranks step together, so no rank has stepped"
                )
        for number, what in enumerate(COMPARED, start=1):
            others = [rank for rank, theirs in zip(ranks, told, strict=True) if theirs[number] != told[0][number]]
            if others:
                raise RuntimeError(
                    f"fastsync: the ranks were about to step with different {what}: "
                    f"rank {others[0]} is not as rank {ranks[0]}. "
                    "With attach(optimizer=) do the same to the optimizer on every rank"
                )

    def _compared(self, stepped: Sequence[int], finds_inf: bool) -> list[str]:
        """Returns texts that have to be equal on all ranks, one for each of COMPARED."""
        settings = [
            {name: _values(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        with_state = [index for index, p in self._parameters.items() if self._optimizer.state.get(p)]
        scales = getattr(self._optimizer, "grad_scale", None), self._clip_divisor()
        return [
            repr(settings),
            repr(stepped),
            repr((with_state, [*map(self._is_foreign, with_state)])),
            repr([*map(_values, scales)]),
            repr(finds_inf),
        ]

    def _finds_inf(self) -> bool:
        """Tells whether the GradScaler that takes this step is to skip it."""
        found = getattr(self._optimizer, "found_inf", None)
        return found is not None and (float(found) > 0 or bool(self._sync.grad_stats().num_nonfinite > 0))

    def _clip_divisor(self) -> Tensor | None:
        return self._divisor if self._sync._deferred_clip_step == self._engine.num_steps() else None

    def _step(self, stepped: Sequence[int]) -> None:
        inner = self._inner_optimizer()
        divisor = self._clip_divisor()
        self._divisor, self._sync._deferred_clip_step = None, -1
        if not stepped:
            return
        scale = getattr(self._optimizer, "grad_scale", None)  # a GradScaler's
        is_fused = all(group.get("fused") for group in self._optimizer.param_groups)
        if is_fused:
            scale = divisor if scale is None else scale if divisor is None else scale * divisor
        vars(inner)["grad_scale"] = scale
        self._hand_state_to_pieces(inner, stepped)
        for group, of_pieces in zip(self._optimizer.param_groups, inner.param_groups, strict=True):
            of_pieces.update({name: value for name, value in group.items() if name != "params"}, params=[])
        chosen = set(stepped)
        pieces = [piece for piece in self._pieces if piece.index in chosen]
        for piece in pieces:
            inner.param_groups[self._group_of[piece.index]]["params"].append(piece.parameter)
            piece.before_step()
        self._hand_counts_to_pieces(inner, pieces)
        if pieces and divisor is not None and not is_fused:
            torch._foreach_mul_([piece.gradient for piece in pieces], divisor.reciprocal())
        inner.step()
        for piece in pieces:
            piece.after_step()
        self._take_state_from_pieces(inner, stepped)
        if steps := [step for index in stepped if (step := self._handed[index]) is not None]:
            torch._foreach_add_(steps, 1)
        torch.autograd.graph.increment_version([self._parameters[index] for index in stepped])

    def _inner_optimizer(self) -> Optimizer:
        """Returns the optimizer of this rank's pieces. Makes pieces anew if this rank has other shards now."""
        number = self._engine.pieces_number()
        if self._inner is None or number != self._pieces_number:
            if self._home.are_pieces_alone:
                self._give_whole_state()
            self._home.renew()
            self._pieces = [
                Piece(index, begin, self._parameters[index], means) for index, begin, means in self._engine.pieces()
            ]
            for piece in self._pieces:
                if piece.index in self._rounding:
                    piece.take_master(self._home.held(piece, MASTER), self._rounding[piece.index])
            of_same_class: Any = type(self._optimizer)
            self._inner = of_same_class([{**group, "params": []} for group in self._optimizer.param_groups])
            self._handed.clear()
            self._pieces_number = number
        return self._inner

    # ---- the state --------------------------------------------------------------------------------------------------

    def _group(self, index: int) -> dict[str, Any]:
        return self._optimizer.param_groups[self._group_of[index]]

    def _state(self, index: int) -> dict[str, Any]:
        return self._optimizer.state.get(self._parameters[index]) or {}

    def _parts(self, index: int) -> tuple[str, ...]:
        names = state_names(self._optimizer, self._group(index))
        return (*names, MASTER) if index in self._rounding else names

    def _is_foreign(self, index: int) -> bool:
        """Tells whether a parameter has state that is not at home, as after ``load_state_dict``."""
        state = self._state(index)
        return any(state.get(part) is not self._stand_ins.get((index, part)) for part in self._parts(index))

    def _is_at_home(self, index: int, part: str, state: Mapping[str, Any]) -> bool:
        return state.get(part) is not None and state[part] is self._stand_ins.get((index, part))

    def _stand_in(self, index: int, part: str) -> Tensor:
        if (index, part) not in self._stand_ins:
            self._stand_ins[index, part] = self._home.stand_for((index, part))
        return self._stand_ins[index, part]

    def _new_count(self, index: int) -> Tensor:
        is_fused = self._group(index)["fused"]
        is_wide = torch.get_default_dtype() == torch.float64 and not is_fused
        device = self._parameters[index].device if is_fused else "cpu"
        return torch.zeros((), dtype=torch.float64 if is_wide else torch.float32, device=device)

    def _hand_state_to_pieces(self, inner: Optimizer, stepped: Sequence[int]) -> None:
        """Gives the pieces the state that their parameters have. If it is a loaded one, it moves home.

        Each rank writes its own pieces alone, from what it has loaded itself.
        """
        changed = {
            index
            for index in stepped
            if not (state := self._state(index))
            or self._is_foreign(index)
            or index not in self._handed
            or self._handed[index] is not state.get("step")
        }
        new = {index for index in changed if has_count(self._optimizer) and not self._state(index)}
        for index in sorted(changed):
            if index in new:
                self._optimizer.state[self._parameters[index]]["step"] = self._new_count(index)
            self._handed[index] = self._state(index).get("step")
            for part in self._parts(index):
                self._stand_in(index, part)
        for piece in self._pieces:
            if piece.index not in changed:
                continue
            own: dict[str, Any] = dict(self._state(piece.index))
            for part in self._parts(piece.index):
                held, loaded = self._home.held(piece, part), own.get(part)
                if loaded is None and part == MASTER:
                    held.copy_(piece.weight)
                elif piece.index in new:
                    held.zero_()
                elif loaded is None:
                    continue  # the first step makes it
                elif not self._is_at_home(piece.index, part, own):
                    held.copy_(piece.of(_laid_out_as(self._parameters[piece.index], loaded, held.dtype)))
                own[part] = held
            if "step" in own:
                own["step"] = own["step"].clone()
            inner.state[piece.parameter] = own
        for index in changed:
            state = self._state(index)
            parts = [p for p in self._parts(index) if state.get(p) is not None or index in new or p == MASTER]
            if parts:  # else SGD's state stays empty
                own = {part: self._stand_in(index, part) for part in parts}
                self._optimizer.state[self._parameters[index]].update(own)

    def _hand_counts_to_pieces(self, inner: Optimizer, pieces: Sequence[Piece]) -> None:
        """Gives the pieces the number of their parameter's steps, which ``dcp.load`` writes in place."""
        counts = [(piece, count) for piece in pieces if (count := self._handed[piece.index]) is not None]
        if counts:
            own = [inner.state[piece.parameter]["step"] for piece, _ in counts]
            torch._foreach_copy_(own, [count for _, count in counts])

    def _take_state_from_pieces(self, inner: Optimizer, stepped: Sequence[int]) -> None:
        """Moves momentum that a first step has made home, and makes it the optimizer's."""
        new = {index for index in stepped if self._parts(index) and self._is_foreign(index)}
        stand_ins = {index: {part: self._stand_in(index, part) for part in self._parts(index)} for index in sorted(new)}
        for piece in self._pieces:
            if piece.index in new:
                own = inner.state[piece.parameter]
                for part in self._parts(piece.index):
                    own[part] = self._home.held(piece, part).copy_(own[part])
        for index, of_index in stand_ins.items():
            self._optimizer.state[self._parameters[index]].update(of_index)

    def parameter_wire_bytes(self) -> int:
        """Returns how many bytes of new parameters this rank has sent so far."""
        return self._home.wire_bytes()

    # ---- clipping and the means -------------------------------------------------------------------------------------

    def clip(self, divisor: Tensor) -> None:
        """Has the next step divide the means by a number."""
        self._divisor = divisor

    def averaged_gradients(self) -> dict[str, Tensor]:
        """Returns the means over ranks, by parameter's name. Every rank must call it."""
        self._inner_optimizer()
        have_means = self._engine.have_means()
        means = {i: torch.zeros_like(p.detach()) for i, p in self._parameters.items() if have_means and have_means[i]}
        for piece in self._pieces:
            if piece.index in means and 0 in self._home.ranks():  # each host has all means
                piece.of(means[piece.index]).copy_(piece.means)
        for mean in means.values():
            dist.all_reduce(mean, group=self._sync._group)
        return {self._names[index]: mean for index, mean in means.items()}


def _values(value: object) -> object:
    """Returns what is equal on all ranks of a setting, for a repr.

    Of tensors on any device that is their numbers. A function counts by its name, and an object by its class.
    """
    if value is None or isinstance(value, (float, int, str, bytes)):
        return value
    if isinstance(value, Mapping):
        return sorted(repr((_values(key), _values(each))) for key, each in value.items())
    if isinstance(value, (tuple, list)):
        return [*map(_values, value)]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_values(each)) for each in value)
    if callable(to_list := getattr(value, "tolist", None)) and not isinstance(value, type):  # NumPy's have it, too
        return to_list()
    if isinstance(value, (Number, Enum, torch.dtype, torch.device)):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _after_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments:
    """Calls the closure of a step, if there is one, and returns arguments that hand on its result.

    torch's AdamW, Adam and SGD call it once, and before anything else.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        result = closure()

    def of_result() -> Any:
        return result

    return ((*args[:1], of_result, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": of_result})


def _laid_out_as(parameter: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor with its values in the order in which the parameter's lie in memory."""
    if tensor.stride() == parameter.stride() and tensor.dtype == dtype:
        return tensor
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(tensor)

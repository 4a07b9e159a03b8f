"""The optimizer's state: at the home of shards, in the pieces that a rank steps, and in the user's optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch_compat import foreach_add_, foreach_copy_
from .groups import ShardedGroups, numbers_of
from .home import ShardHome, StatePart
from .masters import MASTER, STEP
from .piece import Piece


class ShardedState:
    """Hands the state of whole parameters to the pieces of this rank, and back.

    The user's optimizer has tensors of whole parameters that stand for what is at home. Other ones, as after
    ``load_state_dict``, move home before the next step.
    """

    def __init__(self, groups: ShardedGroups, home: ShardHome) -> None:
        self._groups, self._home = groups, home
        self._optimizer, self._parameters = groups.optimizer, groups.parameters
        self._stand_ins: dict[StatePart, Tensor] = {}  # for parts of the state of whole parameters
        self._handed: set[int] = set()  # whose state the pieces have
        self._new: set[int] = set()  # which parameters have none before this step
        self._numbers: dict[int, dict[str, Any]] = {}  # of the parameters of this step

    # ---- of whole parameters ----------------------------------------------------------------------------------------

    def whole(self) -> dict[StatePart, Tensor]:
        """Returns copies of the state that is at home."""
        parts = [
            (index, part)
            for index in self._parameters
            for part in self._groups.parts(index)
            if self._is_at_home(index, part, self._groups.state(index))
        ]
        return self._home.copies(parts) if parts else {}

    def give_whole(self) -> None:
        """Gives the optimizer the state of whole parameters, in memory of its own."""
        for (index, part), copy in self.whole().items():
            self._groups.state(index)[part] = copy

    def put_whole(self, state_dict: dict[str, Any]) -> None:
        """Puts the state of whole parameters into a ``state_dict()``, which has stand-ins."""
        position_of = {index: position for position, index in enumerate(chain.from_iterable(self._groups.indices))}
        for (index, part), copy in self.whole().items():
            position = position_of[index]
            state_dict["state"][position] = {**state_dict["state"][position], part: copy}

    def end(self) -> None:
        """Gives the optimizer its state, without masters.

        Raises:
            RuntimeError: this rank could not gather the state. The optimizer has none afterwards.
        """
        for index in self._groups.rounding:
            self._groups.state(index).pop(MASTER, None)
        try:
            self.give_whole()
        except RuntimeError as error:
            for parameter in self._parameters.values():
                self._optimizer.state.pop(parameter, None)
            raise RuntimeError(
                "fastsync: detach() has not gathered all ranks' shards, so the optimizer's state is lost: go on from a "
                f"checkpoint. {error}"
            ) from error

    def held(self) -> list[tuple[int, bool]]:
        """Returns which parameters have state, and of each whether that is not at home."""
        return [(i, self._is_foreign(i)) for i, p in self._parameters.items() if self._optimizer.state.get(p)]

    # ---- of pieces --------------------------------------------------------------------------------------------------

    def forget_pieces(self) -> None:
        """Notes that this rank has other pieces now."""
        self._handed.clear()

    def hand_to_pieces(self, inner: Optimizer, pieces: Sequence[Piece], stepped: Sequence[int]) -> None:
        """Gives the pieces the state that their parameters have. If it is a loaded one, it moves home.

        Each rank writes its own pieces alone, from what it has loaded itself.
        """
        groups = self._groups
        self._new = {index for index in stepped if groups.state(index).keys() <= {MASTER}}
        self._numbers = {index: groups.numbers(index) for index in stepped}
        changed = {i for i in stepped if i in self._new or i not in self._handed or self._is_foreign(i)}
        self._handed |= changed
        for index in sorted(changed):
            for part in groups.parts(index):
                self._stand_in(index, part)
        for piece in pieces:
            if piece.index not in changed:
                continue
            state = groups.state(piece.index)
            own = {name: _copy_of(number) for name, number in self._numbers[piece.index].items()}
            for part in groups.parts(piece.index):
                held, loaded = self._home.held(piece, part), state.get(part)
                if loaded is None and part == MASTER:
                    held.copy_(piece.weight)
                elif loaded is None:
                    continue  # the first step makes it
                elif not self._is_at_home(piece.index, part, state):
                    held.copy_(piece.of(_laid_out_as(self._parameters[piece.index], loaded, held.dtype)))
                if part != MASTER:
                    own[part] = piece.shaped(held)
            inner.state[piece.parameter] = own
        for index in changed:
            state = groups.state(index)
            parts = [part for part in groups.parts(index) if state.get(part) is not None or part == MASTER]
            if parts:  # else SGD's state stays empty
                own = {part: self._stand_in(index, part) for part in parts}
                self._optimizer.state[self._parameters[index]].update(own)

    def begins(self, stepped: Sequence[int]) -> bool:
        """Tells whether a step of these parameters makes state."""
        groups = self._groups
        has_names = (index for index in stepped if any(groups.kind.state_names(groups.group(index))))
        return any(groups.state(index).keys() <= {MASTER} for index in has_names)

    def put_in_order(self, stepped: Sequence[int]) -> None:
        """Puts what the turns of a first step have made into the order in which one step makes it."""
        state, parameters = self._optimizer.state, [self._parameters[index] for index in stepped]
        for parameter in parameters:
            if parameter in state:
                state[parameter] = state.pop(parameter)

    def needs_numbers(self, index: int) -> bool:
        """Tells whether a step gives a parameter numbers that a rank without values of it would not know."""
        return index in self._new or not self._numbers[index].keys() <= {STEP}

    def hand_numbers_to_pieces(self, inner: Optimizer, pieces: Sequence[Piece]) -> None:
        """Gives the pieces the numbers in their parameter's state, which ``dcp.load`` writes in place."""
        _assign([(inner.state[piece.parameter], self._numbers[piece.index]) for piece in pieces])

    def take_from_pieces(
        self, inner: Optimizer, pieces: Sequence[Piece], stepped: Sequence[int], found_inf: Tensor | None
    ) -> None:
        """Moves state that a first step has made home, and makes it the optimizer's. Counts a step that was taken."""
        parts = self._groups.parts
        for piece in pieces:
            if piece.index in self._new:
                self._check_made(piece, inner.state[piece.parameter])
        self._take_numbers(inner, pieces, stepped, 1 if found_inf is None else 1 - found_inf)
        new = {index for index in stepped if parts(index) and self._is_foreign(index)}
        stand_ins = {index: {part: self._stand_in(index, part) for part in parts(index)} for index in sorted(new)}
        for piece in pieces:
            if piece.index in new:
                own = inner.state[piece.parameter]
                for part in parts(piece.index):
                    if part != MASTER:
                        own[part] = piece.shaped(self._home.held(piece, part)).copy_(own[part])
        for index, of_index in stand_ins.items():
            self._optimizer.state[self._parameters[index]].update(of_index)

    def _take_numbers(
        self, inner: Optimizer, pieces: Sequence[Piece], stepped: Sequence[int], num_steps: int | Tensor
    ) -> None:
        """Gives parameters the numbers that their pieces have. What counts steps is known without a piece."""
        groups, counts, own = self._groups, [], {piece.index: inner.state[piece.parameter] for piece in pieces}
        taken: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        for index in stepped:
            state = groups.state(index)
            if index in own and self.needs_numbers(index):
                if numbers := numbers_of(own[index], groups.parts(index)):
                    taken.append((self._optimizer.state[self._parameters[index]], numbers))
            elif isinstance(count := state.get(STEP), Tensor):
                counts.append(count)
            elif count is not None:
                state[STEP] = count + num_steps
        _assign(taken)
        if counts:
            foreach_add_(counts, [num_steps] * len(counts) if isinstance(num_steps, Tensor) else num_steps)

    def _check_made(self, piece: Piece, state: Mapping[str, Any]) -> None:
        """Raises RuntimeError if the first step of a parameter has made other state than its class is known for."""
        parts = self._groups.parts(piece.index)
        missing = [part for part in parts if part != MASTER and state.get(part) is None]
        kind = self._groups.kind
        known = parts if kind.is_tensorwise else (*parts, *numbers_of(state, parts))
        wrong = [*missing, *(name for name in state if name not in known)]
        if wrong:
            name, register = type(self._optimizer).__name__, "tensorwise" if kind.is_tensorwise else "elementwise"
            what = "has no tensor of a parameter's shape" if missing else "is not among the names"
            raise RuntimeError(
                f"fastsync: the state of {name} is not what fastsync.optimizer.register_{register} was told: "
                f"{wrong[0]!r} {what}. Tell it of all tensors that {name} keeps for a parameter, and of no other"
            )

    def _is_foreign(self, index: int) -> bool:
        """Tells whether a parameter has state that is not at home, as after ``load_state_dict``."""
        state = self._groups.state(index)
        return any(state.get(part) is not self._stand_ins.get((index, part)) for part in self._groups.parts(index))

    def _is_at_home(self, index: int, part: str, state: Mapping[str, Any]) -> bool:
        return state.get(part) is not None and state[part] is self._stand_ins.get((index, part))

    def _stand_in(self, index: int, part: str) -> Tensor:
        if (index, part) not in self._stand_ins:
            self._stand_ins[index, part] = self._home.stand_for((index, part))
        return self._stand_ins[index, part]


def _laid_out_as(parameter: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor with its values in the order in which the parameter's lie in memory."""
    if tensor.stride() == parameter.stride() and tensor.dtype == dtype:
        return tensor
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(tensor)


def _copy_of(number: object) -> object:
    return number.clone() if isinstance(number, Tensor) else number


def _assign(pairs: Iterable[tuple[dict[str, Any], Mapping[str, Any]]]) -> None:
    """Writes numbers into states. Tensors that are there already stay."""
    targets, sources = [], []
    for state, numbers in pairs:
        for name, number in numbers.items():
            if isinstance(number, Tensor) and isinstance(state.get(name), Tensor):
                targets.append(state[name])
                sources.append(number)
            else:
                state[name] = _copy_of(number)
    if targets:
        foreach_copy_(targets, sources)

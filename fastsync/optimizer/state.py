"""The optimizer's state: at the home of shards, in the pieces that a rank steps, and in the user's optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch_compat import foreach_add_, foreach_copy_
from .checks import has_count
from .groups import ShardedGroups
from .home import ShardHome, StatePart
from .masters import MASTER
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
        self._handed: dict[int, Tensor | None] = {}  # whose state the pieces have, with the step's number if it counts

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
        changed = {
            index
            for index in stepped
            if not (state := groups.state(index))
            or self._is_foreign(index)
            or index not in self._handed
            or self._handed[index] is not state.get("step")
        }
        new = {index for index in changed if has_count(self._optimizer) and not groups.state(index)}
        for index in sorted(changed):
            if index in new:
                self._optimizer.state[self._parameters[index]]["step"] = self._new_count(index)
            self._handed[index] = groups.state(index).get("step")
            for part in groups.parts(index):
                self._stand_in(index, part)
        for piece in pieces:
            if piece.index not in changed:
                continue
            own: dict[str, Any] = dict(groups.state(piece.index))
            for part in groups.parts(piece.index):
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
            state = groups.state(index)
            parts = [p for p in groups.parts(index) if state.get(p) is not None or index in new or p == MASTER]
            if parts:  # else SGD's state stays empty
                own = {part: self._stand_in(index, part) for part in parts}
                self._optimizer.state[self._parameters[index]].update(own)

    def hand_counts_to_pieces(self, inner: Optimizer, pieces: Sequence[Piece]) -> None:
        """Gives the pieces the number of their parameter's steps, which ``dcp.load`` writes in place."""
        counts = [(piece, count) for piece in pieces if (count := self._handed[piece.index]) is not None]
        if counts:
            own = [inner.state[piece.parameter]["step"] for piece, _ in counts]
            foreach_copy_(own, [count for _, count in counts])

    def take_from_pieces(self, inner: Optimizer, pieces: Sequence[Piece], stepped: Sequence[int]) -> None:
        """Moves momentum that a first step has made home, and makes it the optimizer's. Counts the step."""
        parts = self._groups.parts
        new = {index for index in stepped if parts(index) and self._is_foreign(index)}
        stand_ins = {index: {part: self._stand_in(index, part) for part in parts(index)} for index in sorted(new)}
        for piece in pieces:
            if piece.index in new:
                own = inner.state[piece.parameter]
                for part in parts(piece.index):
                    own[part] = self._home.held(piece, part).copy_(own[part])
        for index, of_index in stand_ins.items():
            self._optimizer.state[self._parameters[index]].update(of_index)
        if counts := [count for index in stepped if (count := self._handed[index]) is not None]:
            foreach_add_(counts, 1)

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

    def _new_count(self, index: int) -> Tensor:
        is_fused = self._groups.group(index)["fused"]
        is_wide = torch.get_default_dtype() == torch.float64 and not is_fused
        device = self._parameters[index].device if is_fused else "cpu"
        return torch.zeros((), dtype=torch.float64 if is_wide else torch.float32, device=device)


def _laid_out_as(parameter: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor with its values in the order in which the parameter's lie in memory."""
    if tensor.stride() == parameter.stride() and tensor.dtype == dtype:
        return tensor
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(tensor)

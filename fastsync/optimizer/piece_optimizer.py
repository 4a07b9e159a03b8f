"""The optimizer that steps this rank's pieces, with the user's settings and state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .._torch_compat import foreach_mul_, takes_grad_scale
from ..distributed import every_rank_calls
from ..sync.synchronizer import GradientSynchronizer
from .groups import ShardedGroups
from .home import ShardHome
from .masters import MASTER
from .piece import Piece
from .state import ShardedState


class PieceOptimizer:
    """Steps this rank's pieces of the parameters with the means, by an optimizer of the user's class."""

    def __init__(self, sync: GradientSynchronizer, groups: ShardedGroups, home: ShardHome, state: ShardedState) -> None:
        self._sync, self._groups, self._home, self._state = sync, groups, home, state
        self._shards: list[Piece] = []  # of the means that this rank has
        self._pieces: list[Piece] = []  # what it steps
        self._number = -1  # of the shards that these pieces are of
        self.inner = self._new_optimizer()

    def _new_optimizer(self) -> Optimizer:
        """Makes an optimizer of the user's class as unpickling does: nobody knows what a constructor takes."""
        given = self._groups.optimizer
        made: Any = object.__new__(type(given))
        groups = [{**group, "params": []} for group in self._settings()]
        made.__setstate__({"defaults": {**given.defaults}, "state": defaultdict(dict), "param_groups": groups})
        of_step = ("step", "grad_scale", "found_inf")  # set by schedulers and a GradScaler
        own = {name: value for name, value in vars(given).items() if name not in of_step}
        vars(made).update({**own, **vars(made)})
        return cast("Optimizer", made)

    def _settings(self) -> list[dict[str, Any]]:
        return self._groups.optimizer.param_groups

    def step(
        self, stepped: Sequence[int], shared: Sequence[int], divisor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Steps the pieces of some parameters, of those that ``renew`` has found.

        Args:
            stepped: their indices.
            shared: those that ranks tell each other of, the same on all ranks. They have at least these.
            divisor: divides the means, for a clip; None without one.
            found_inf: 1 on a device if a fused step is to change nothing, else 0; None if the host knows that.
        """
        if self._groups.kind.is_tensorwise:
            self._home.send_means(self._shards, set(shared))
        if not stepped:
            return
        chosen = set(stepped)
        inner = self.inner
        scale = getattr(self._groups.optimizer, "grad_scale", None)  # a GradScaler's
        is_fused = takes_grad_scale(inner) and all(group.get("fused") for group in self._settings())
        if is_fused:
            scale = divisor if scale is None else scale if divisor is None else scale * divisor
        vars(inner).update(grad_scale=scale, found_inf=found_inf)
        self._state.hand_to_pieces(inner, self._pieces, stepped)
        for group, of_pieces in zip(self._settings(), inner.param_groups, strict=True):
            of_pieces.update({name: value for name, value in group.items() if name != "params"}, params=[])
        has_numbers = {index for index in stepped if self._state.needs_numbers(index)}
        pieces = [each for each in self._pieces if each.index in (chosen if each.means.numel() else has_numbers)]
        for piece in pieces:
            inner.param_groups[self._groups.group_of[piece.index]]["params"].append(piece.parameter)
            piece.before_step()
        self._state.hand_numbers_to_pieces(inner, pieces)
        if pieces and divisor is not None and not is_fused:
            foreach_mul_([piece.gradient for piece in pieces], divisor.reciprocal())
        inner.step()
        self._check_settings()
        for piece in pieces:
            piece.after_step()
        self._state.take_from_pieces(inner, pieces, stepped, found_inf)
        torch.autograd.graph.increment_version([self._groups.parameters[index] for index in stepped])

    def _check_settings(self) -> None:
        """Raises RuntimeError if the step has changed a setting, which the user's optimizer would not have."""
        for group, of_pieces in zip(self._settings(), self.inner.param_groups, strict=True):
            for name, value in of_pieces.items():
                if name != "params" and value is not group.get(name):
                    raise RuntimeError(
                        f"fastsync: {type(self.inner).__name__}.step() has changed {name!r} in param_groups, and with "
                        "shard_optimizer settings are the user's alone. Keep such numbers in optimizer.state[parameter]"
                    )

    def means(self) -> dict[str, Tensor]:
        """Returns the means over ranks, by parameter's name. Every rank must call it."""
        self.renew()
        have_means, parameters = self._sync._engine.have_means(), self._groups.parameters
        means = {}
        whole = []  # of each dtype, because one collective is faster than many
        chosen = [index for index in parameters if have_means and have_means[index]]
        for dtype in sorted({parameters[index].dtype for index in chosen}, key=str):
            alike = [index for index in chosen if parameters[index].dtype == dtype]
            sizes = [parameters[index].numel() for index in alike]
            whole.append(parameters[alike[0]].detach().new_zeros(sum(sizes)))
            parts = whole[-1].split(sizes)
            for index, part in zip(alike, parts, strict=True):
                like = parameters[index]
                means[index] = part.as_strided(like.shape, like.stride(), part.storage_offset())
        for piece in self._shards:
            if piece.index in means and 0 in self._home.ranks():  # each host has all means
                piece.of(means[piece.index]).copy_(piece.means)
        # Two numbers are a length that nothing else compares. So a rank that asks alone is told, and the others, too.
        if self._sync._group.size() > 1:
            self._sync._engine.compare([0.0, 0.0], "asking for the means of shards, as every rank has to,")
        with every_rank_calls("averaged_gradients", self._sync._group):
            for each in whole:
                dist.all_reduce(each, group=self._sync._group)
        return {self._groups.names[index]: mean for index, mean in means.items()}

    def renew(self) -> None:
        """Makes pieces anew if this rank has other shards now."""
        number = self._sync._engine.pieces_number()
        if number == self._number:
            return
        if self._home.are_pieces_alone:
            self._state.give_whole()
        self._home.renew()
        parameters, rounding = self._groups.parameters, self._groups.rounding
        self._shards = [
            Piece(index, begin, parameters[index], means) for index, begin, means in self._sync._engine.pieces()
        ]
        if self._groups.kind.is_tensorwise:
            owned = self._home.owned()
            self._pieces = [Piece(i, 0, parameters[i], self._home.whole_means(i), is_whole=True) for i in owned]
        else:
            others = parameters.keys() - {piece.index for piece in self._shards}
            self._pieces = [*self._shards, *(_without_values(index, parameters[index]) for index in sorted(others))]
        for piece in self._pieces:
            if piece.index in rounding:
                piece.take_master(self._home.held(piece, MASTER), rounding[piece.index])
        self.inner = self._new_optimizer()
        self._state.forget_pieces()
        self._number = number


def _without_values(index: int, parameter: Tensor) -> Piece:
    """Returns a piece of a parameter that other ranks step, for the numbers in its state."""
    return Piece(index, 0, parameter, parameter.detach().new_empty(0))

"""All parameters on each rank, and the optimizer's state of its own shard alone: ZeRO-1."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from .._torch_compat import foreach_copy_
from ..autotune.choose import Candidate, in_engine
from ..distributed import every_rank_calls
from ..errors import SyncError
from ..sync.compression import Compression
from ..sync.synchronizer import GradientSynchronizer
from .home import ShardHome, StatePart
from .owners import in_turns
from .piece import Piece, values_at

ROW_ALIGNMENT = 64
"""The alignment of a rank's row, in bytes. Rows then travel without a copy."""
MOST_UNDER_WAY = 2
"""How many buckets are gathered at a time. So the rows take no more memory than these buckets."""
GATHERED = ("the new parameters", "the optimizer's state")
NEW_PARAMETERS, STATE = range(2)
Place = tuple[int, int, int]
"""A parameter's index, the first value, and how many."""


class OwnShards(ShardHome):
    """Leaves all parameters where they are. After a step each rank sends the others the new values of its pieces."""

    are_pieces_alone = True

    def __init__(
        self,
        sync: GradientSynchronizer,
        parameters: Mapping[int, Tensor],
        rounding: Mapping[int, torch.dtype],
        has_owners: bool,
    ) -> None:
        super().__init__(sync, parameters, rounding)
        self._has_owners = has_owners
        self._engine = _C.ParameterGather(sync._group, list(GATHERED), "shard_optimizer")
        self._engine.set_compressions(in_engine([Candidate(Compression())]))
        self._means_at: list[list[list[Place]]] = []  # by bucket, and by rank
        self._places: list[list[list[Place]]] = []  # what ranks step, as many as travel at a time, and by rank
        self._held: dict[tuple[int, int, str], Tensor] = {}  # by parameter, first value and part
        self._owned_means: dict[int, Tensor] = {}
        self._spare: list[Tensor] = []  # memory of rows that have come

    def begin(self) -> None:
        self._sync._engine.set_shards_apart()

    def ranks(self) -> Sequence[int]:
        return range(self._sync._group.size())

    def renew(self) -> None:
        """Takes over the pieces that the engine has now. What it holds is gone."""
        self._means_at = self._sync._engine.places()
        self._places = self._owned_places() if self._has_owners else self._means_at
        self._held, self._owned_means = {}, {}

    def _owned_places(self) -> list[list[list[Place]]]:
        """Returns whole parameters, of one dtype at a time."""
        numel = {index: parameter.numel() for index, parameter in self._parameters.items()}
        dtypes = {i: (str(p.dtype), str(self._rounding.get(i))) for i, p in self._parameters.items()}
        places: list[list[list[Place]]] = []
        for dtype in sorted(set(dtypes.values())):
            owner_of = {index: owner for index, owner in self.owner_of.items() if dtypes[index] == dtype}
            num_bytes = {index: self._parameters[index].element_size() * numel[index] for index in owner_of}
            turns = in_turns(owner_of, len(self.ranks()), num_bytes)
            places += [[[(index, 0, numel[index]) for index in indices] for indices in turn] for turn in turns]
        return places

    def whole_means(self, index: int) -> Tensor:
        if index not in self._owned_means:
            parameter = self._parameters[index].detach()
            self._owned_means[index] = parameter.new_empty(parameter.numel())
        return self._owned_means[index]

    def send_means(self, pieces: Sequence[Piece], stepped: Collection[int]) -> None:
        """Sends them by an all-to-all of each dtype."""
        means = {(piece.index, piece.begin): piece.means for piece in pieces}
        for dtype in sorted({self._parameters[index].dtype for index in stepped}, key=str):
            self._send_means(means, {index for index in stepped if self._parameters[index].dtype == dtype})

    def _send_means(self, means: Mapping[tuple[int, int], Tensor], indices: Collection[int]) -> None:
        rank, group = self._sync._group.rank(), self._sync._group
        of_ranks = [
            [place for shards in self._means_at for place in shards[source] if place[0] in indices]
            for source in self.ranks()
        ]
        arriving = [[place for place in places if self.owner_of[place[0]] == rank] for places in of_ranks]
        leaving = [[place for place in of_ranks[rank] if self.owner_of[place[0]] == owner] for owner in self.ranks()]
        like = self._parameters[min(indices)].detach()
        sent, received = (like.new_empty(sum(map(_num_values, each))) for each in (leaving, arriving))
        if sent.numel() > 0:
            foreach_copy_(_split(sent, list(chain(*leaving))), [means[i, begin] for i, begin, _ in chain(*leaving)])
        sizes, own_sizes = [*map(_num_values, arriving)], [*map(_num_values, leaving)]
        with every_rank_calls("optimizer.step", group):
            dist.all_to_all_single(received, sent, sizes, own_sizes, group)
        if received.numel() > 0:
            targets = [values_at(self.whole_means(index), begin, numel) for index, begin, numel in chain(*arriving)]
            foreach_copy_(targets, _split(received, list(chain(*arriving))))

    def stand_for(self, part: StatePart) -> Tensor:
        """Returns a tensor of the parameter's shape without memory."""
        return torch.empty_like(self._parameters[part[0]], dtype=self.dtype(part), device="meta", requires_grad=False)

    def held(self, piece: Piece, part: str) -> Tensor:
        key = (piece.index, piece.begin, part)
        if key not in self._held:
            self._held[key] = torch.empty_like(piece.means, dtype=self.dtype((piece.index, part)))
        return self._held[key]

    def copies(self, parts: Collection[StatePart]) -> dict[StatePart, Tensor]:
        """Gathers the state. Ranks first compare what they ask for, so that a rank that asks alone is told."""
        what = "gathering the optimizer's state, as state_dict() and detach() do on every rank,"
        told = self._sync._engine.compare([float(zlib.crc32(repr(sorted(parts)).encode()))], what)
        if any(theirs != told[0] for theirs in told):
            reason = "ranks have state of different parameters"
            differ = [rank for rank, theirs in enumerate(told) if theirs != told[0]]
            text = f"fastsync: {what} found that {reason}: load the same state on every rank"
            raise SyncError(text, ranks=differ, reason=reason)
        copies = {part: torch.empty_like(self._parameters[part[0]].detach(), dtype=self.dtype(part)) for part in parts}
        for name in sorted({name for _, name in parts}):
            whole = {index: copy for (index, part), copy in copies.items() if part == name}
            self._gather(STATE, lambda index, begin, name=name: self._held[index, begin, name], whole)  # type: ignore[misc]
        return copies

    def share(self, stepped: Collection[int]) -> None:
        self._share(stepped, has_failed=False)

    def fail(self, stepped: Collection[int]) -> None:
        self._share(stepped, has_failed=True)

    def wire_bytes(self) -> int:
        return int(self._engine.module_stats()[NEW_PARAMETERS]["wire_bytes"])

    def end(self) -> None:
        pass

    def _share(self, stepped: Collection[int], has_failed: bool) -> None:
        whole = {index: self._parameters[index].detach() for index in stepped}
        failed = self._gather(NEW_PARAMETERS, None, whole, has_failed)
        if failed and not has_failed:
            reason = f"rank {failed[0]} has failed"
            raise SyncError(
                f"fastsync: the step of the optimizer failed on rank {self._sync._group.rank()} of "
                f"{self._sync._group.size()}: {reason}",
                ranks=failed,
                step=self._sync._engine.num_steps() - 1,
                reason=reason,
            )

    def _gather(
        self,
        module: int,
        own: Callable[[int, int], Tensor] | None,
        whole: Mapping[int, Tensor],
        has_failed: bool = False,
    ) -> list[int]:
        """Gathers whole tensors of the pieces that each rank has. Returns the ranks that have failed.

        Args:
            module: what is gathered, for errors.
            own: returns this rank's values by parameter and first value; None if they are in the whole tensors.
            whole: the tensors that take the values, by parameter.
            has_failed: whether this rank has failed.
        """
        failed: set[int] = set()
        under_way: list[_Rows] = []
        for shards in self._places:
            chosen = [[place for place in shard if place[0] in whole] for shard in shards]
            if not any(chosen):
                continue
            if len(under_way) == MOST_UNDER_WAY:
                failed.update(self._finish(under_way.pop(0), whole))
            under_way.append(self._begin(module, own, whole, chosen, has_failed))
        for rows in under_way:
            failed.update(self._finish(rows, whole))
        return sorted(failed)

    def _finish(self, rows: _Rows, whole: Mapping[int, Tensor]) -> list[int]:
        failed = rows.finish(whole)
        self._spare.append(rows.memory)
        return failed

    def _memory_for(self, num_bytes: int, device: torch.device) -> Tensor:
        """Returns memory for rows. It is used again, because the first writes to new pages cost as much as a copy."""
        memory = self._spare.pop() if self._spare else None
        if memory is None or memory.numel() < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return memory

    def _begin(
        self,
        module: int,
        own: Callable[[int, int], Tensor] | None,
        whole: Mapping[int, Tensor],
        shards: list[list[Place]],
        has_failed: bool,
    ) -> _Rows:
        """Begins to gather a bucket. Each rank has a row, with whether it has failed at the end."""
        first = next(place[0] for shard in shards for place in shard)
        like = whole[first]
        dtype = self._rounding.get(first, like.dtype) if module == NEW_PARAMETERS else like.dtype
        unit = ROW_ALIGNMENT // dtype.itemsize
        longest = max(map(_num_values, shards))
        length = longest // unit * unit + unit
        num_bytes = len(shards) * length * dtype.itemsize
        memory = self._memory_for(num_bytes, like.device)
        values = memory[:num_bytes].view(dtype).view(len(shards), length)
        rank = self._sync._group.rank()
        row, places = values[rank], shards[rank]
        row[-1] = has_failed
        if places:
            sources = [values_at(whole[i], begin, n) if own is None else own(i, begin) for i, begin, n in places]
            foreach_copy_(_split(row, places), sources)
        work = self._engine.all_gather(module, values.view(-1), [values.shape[1]])
        return _Rows(work, memory, values, shards, None if own is not None else rank)


@dataclass
class _Rows:
    """A bucket's rows that are on their way."""

    work: _C.GatherWork
    memory: Tensor
    """Of the values."""
    values: Tensor
    shards: list[list[Place]]
    in_place: int | None
    """The rank whose values are in the whole tensors already."""

    def finish(self, whole: Mapping[int, Tensor]) -> list[int]:
        """Waits for the rows, and puts them into the whole tensors. Returns the ranks that have failed."""
        self.work.wait()
        for rank, places in enumerate(self.shards):
            if places and rank != self.in_place:
                targets = [values_at(whole[index], begin, numel) for index, begin, numel in places]
                foreach_copy_(targets, _split(self.values[rank], places))
        if self.values.device.type != "cpu":
            return []  # the host would have to wait; ranks are told before the next step
        return [rank for rank, has_failed in enumerate(self.values[:, -1].tolist()) if has_failed]


def _num_values(places: Sequence[Place]) -> int:
    return sum(numel for _, _, numel in places)


def _split(row: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """Returns the values of each place in a row."""
    return list(torch.split(row[: _num_values(places)], [numel for _, _, numel in places]))

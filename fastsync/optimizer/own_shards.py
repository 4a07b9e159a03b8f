"""All parameters on each rank, and the optimizer's state of its own shard alone: ZeRO-1."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
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
from .arrival import Arrivals
from .home import ShardHome, StatePart
from .owners import in_turns
from .piece import Piece, values_at

ROW_ALIGNMENT = 64
"""The alignment of a rank's row, in bytes. Rows then travel without a copy."""
MOST_UNDER_WAY = 2
"""How many buckets are gathered at a time, unless the next forward may wait for them. So the rows take no more memory
than these buckets."""
GATHERED = ("the new parameters", "the optimizer's state")
NEW_PARAMETERS, STATE = range(2)
Place = tuple[int, int, int]
"""A parameter's index, the first value, and how many."""


class OwnShards(ShardHome):
    """Leaves all parameters where they are. After a step each rank sends the others the new values of its pieces.

    Buckets take turns: while the new values of one are on their way, a rank steps its pieces of the next.
    """

    are_pieces_alone = True

    def __init__(
        self,
        sync: GradientSynchronizer,
        parameters: Mapping[int, Tensor],
        rounding: Mapping[int, torch.dtype],
        has_owners: bool,
        arrivals: Arrivals | None,
    ) -> None:
        """Takes arrivals if the next forward may wait for new values, and None if a step does."""
        super().__init__(sync, parameters, rounding)
        self._has_owners, self._arrivals = has_owners, arrivals
        # A rank whose parameter has left its memory refuses the step, and still sends what others wait for.
        self._values = {index: parameter.detach() for index, parameter in parameters.items()}
        self._engine = _C.ParameterGather(sync._group, list(GATHERED), "shard_optimizer")
        self._engine.set_compressions(in_engine([Candidate(Compression())]))
        self._means_at: list[list[list[Place]]] = []  # by bucket, and by rank
        self._places: list[list[list[Place]]] = []  # what ranks step, as many as travel at a time, and by rank
        self._entry_of: dict[int, int] = {}  # where in these places a parameter is
        self._sent: deque[Callable[[], None]] = deque()  # on their way: the functions take them in
        self._told = _Told()
        self._held: dict[tuple[int, int, str], Tensor] = {}  # by parameter, first value and part
        self._owned_means: dict[int, Tensor] = {}
        self._spare: deque[Tensor] = deque()  # memory of rows that have come, in the order in which it is needed again

    def begin(self) -> None:
        self._sync._engine.set_shards_apart()

    def ranks(self) -> Sequence[int]:
        return range(self._sync._group.size())

    def renew(self) -> None:
        """Takes over the pieces that the engine has now. What it holds is gone."""
        self._means_at = self._sync._engine.places()
        self._places = self._owned_places() if self._has_owners else self._means_at
        self._entry_of = {place[0]: entry for entry, shards in enumerate(self._places) for place in chain(*shards)}
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
            self._gather_state(name, whole)
        return copies

    def turns(self, stepped: Sequence[int]) -> list[Sequence[int]]:
        """Returns a turn for each bucket. Owners balance their costs over all parameters, and so have one turn."""
        if self._has_owners:
            return super().turns(stepped)
        of_entry: dict[int, list[int]] = {}
        for index in stepped:
            of_entry.setdefault(self._entry_of.get(index, 0), []).append(index)
        return [of_entry[entry] for entry in self._in_order(of_entry)]

    def _in_order(self, entries: Iterable[int]) -> list[int]:
        """Returns entries of ``_places`` as they are gathered. A forward uses the last buckets first."""
        return sorted(entries, reverse=self._arrivals is not None)

    def begin_share(self, stepped: Collection[int]) -> None:
        self._begin_share(stepped, has_failed=False)

    def share(self) -> None:
        while self._sent:
            self._sent.popleft()()
        self._told.check()

    def fail(self, stepped: Collection[int]) -> None:
        self._begin_share(stepped, has_failed=True)
        try:
            while self._sent:
                self._sent.popleft()()
            with suppress(SyncError):  # this rank has an error of its own
                self.wait_for_parameters()
        finally:
            self._told.failed.clear()

    def failed_late(self) -> list[int]:
        self.wait_for_parameters()
        flags, self._told.flags = self._told.flags, []
        return sorted({rank for each in flags for rank in _ranks_of(each.wait())})

    def _begin_share(self, stepped: Collection[int], has_failed: bool) -> None:
        whole = {index: self._values[index] for index in stepped}
        group = self._sync._group
        self._told.where = (group.rank(), group.size(), self._sync._engine.num_steps() - 1)
        for entry in self._in_order({self._entry_of[index] for index in stepped if index in self._entry_of}):
            shards = [[place for place in shard if place[0] in whole] for shard in self._places[entry]]
            if len(self._sent) == MOST_UNDER_WAY:
                self._sent.popleft()()
            rows = self._begin(NEW_PARAMETERS, None, whole, shards, has_failed)
            if self._arrivals is None or has_failed:
                self._sent.append(partial(_take_in, rows, whole, self._spare, self._told))
            else:
                sent = sorted({place[0] for place in chain(*shards)})
                parameters = [self._parameters[index] for index in sent]
                self._arrivals.begin(parameters, partial(_arrive, rows, whole, self._spare, self._told))

    def wait_for_parameters(self) -> None:
        if self._arrivals is not None:
            self._arrivals.wait()

    def wire_bytes(self) -> int:
        return int(self._engine.module_stats()[NEW_PARAMETERS]["wire_bytes"])

    def end(self) -> None:
        self.wait_for_parameters()

    def _gather_state(self, name: str, whole: Mapping[int, Tensor]) -> None:
        """Gathers a part of the state of whole parameters, from the pieces that each rank has."""
        under_way: deque[_Rows] = deque()
        for shards in self._places:
            chosen = [[place for place in shard if place[0] in whole] for shard in shards]
            if not any(chosen):
                continue
            if len(under_way) == MOST_UNDER_WAY:
                under_way.popleft().finish(whole, self._spare)
            under_way.append(self._begin(STATE, lambda index, begin: self._held[index, begin, name], whole, chosen))
        for rows in under_way:
            rows.finish(whole, self._spare)

    def _memory_for(self, num_bytes: int, device: torch.device) -> Tensor:
        """Returns memory for rows. It is used again, because the first writes to new pages cost as much as a copy."""
        memory = self._spare.popleft() if self._spare else None
        if memory is None or memory.numel() < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return memory

    def _begin(
        self,
        module: int,
        own: Callable[[int, int], Tensor] | None,
        whole: Mapping[int, Tensor],
        shards: list[list[Place]],
        has_failed: bool = False,
    ) -> _Rows:
        """Begins to gather places of whole tensors. Each rank has a row, with whether it has failed at the end.

        Args:
            module: what is gathered, for errors.
            own: returns this rank's values by parameter and first value; None if they are in the whole tensors.
            whole: the tensors that take the values, by parameter.
            shards: the places, by rank.
            has_failed: whether this rank has failed.
        """
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
    memory: Tensor | None
    """Of the values. None once it was handed back."""
    values: Tensor
    shards: list[list[Place]]
    in_place: int | None
    """The rank whose values are in the whole tensors already."""

    def finish(self, whole: Mapping[int, Tensor], spare: deque[Tensor]) -> None:
        """Waits for the rows, puts them into the whole tensors, and hands back their memory."""
        self.work.wait()
        for rank, places in enumerate(self.shards):
            if places and rank != self.in_place:
                targets = [values_at(whole[index], begin, numel) for index, begin, numel in places]
                foreach_copy_(targets, _split(self.values[rank], places))
        if self.memory is not None:
            spare.append(self.memory)
            self.memory = None


@dataclass
class _Told:
    """What rows of new parameters tell of the ranks that sent them."""

    where: tuple[int, int, int] = (0, 1, 0)
    """This rank, how many there are, and the step, for errors."""
    failed: set[int] = field(default_factory=set)
    """The ranks that have failed."""
    flags: list[_C.HostCopy] = field(default_factory=list)
    """The same of each row on a device. The host hears of it before the next step."""

    def check(self) -> None:
        """Raises SyncError if a rank has failed."""
        failed = sorted(self.failed)
        self.failed.clear()
        if failed:
            (rank, world_size, step), reason = self.where, f"rank {failed[0]} has failed"
            text = f"fastsync: the step of the optimizer failed on rank {rank} of {world_size}: {reason}"
            raise SyncError(text, ranks=failed, step=step, reason=reason)


def _take_in(rows: _Rows, whole: Mapping[int, Tensor], spare: deque[Tensor], told: _Told) -> None:
    rows.finish(whole, spare)
    flags = rows.values[:, -1]
    if flags.is_cpu:
        told.failed.update(_ranks_of(flags))
    else:
        told.flags.append(_C.HostCopy(flags))


def _arrive(rows: _Rows, whole: Mapping[int, Tensor], spare: deque[Tensor], told: _Told) -> None:
    """Does so in a use of a parameter. It knows no handle, see Note [First use of a parameter]."""
    _take_in(rows, whole, spare, told)
    told.check()


def _ranks_of(flags: Tensor) -> list[int]:
    return [rank for rank, has_failed in enumerate(flags.tolist()) if has_failed]


def _num_values(places: Sequence[Place]) -> int:
    return sum(numel for _, _, numel in places)


def _split(row: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """Returns the values of each place in a row."""
    return list(torch.split(row[: _num_values(places)], [numel for _, _, numel in places]))

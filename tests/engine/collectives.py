"""Collectives of ``torch.distributed`` called at random, and what their definitions say they return."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
Op = dist.ReduceOp

INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REDUCED = (*INTEGERS, *FLOATS, torch.bool, torch.complex64)
MOVED = (*REDUCED, torch.int16, torch.complex128)
# Nothing, less than a vector, more than a rank can write in a round.
NUMELS = (0, 1, 3, 1000, 100_003)


class Case(NamedTuple):
    """What the ranks call next. It is the same on all of them."""

    name: str
    dtype: torch.dtype
    numel: int
    op: Any
    root: int
    strided: bool
    seed: int


def draw(rng: random.Random, size: int, names: Iterable[str] | None = None) -> Case:
    name = rng.choice(list(names or COLLECTIVES))
    reduces = "reduce" in name
    dtype = rng.choice(REDUCED if reduces else MOVED)
    if dtype.is_complex:
        ops: tuple[Any, ...] = (Op.SUM, Op.AVG)
    elif dtype is torch.bool:
        ops = (Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR, Op.PRODUCT)
    elif dtype.is_floating_point:
        ops = (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)
    else:
        ops = (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR)
    numel = rng.choice(NUMELS) if rng.random() < 0.8 else rng.randrange(300_000)
    return Case(name, dtype, numel, rng.choice(ops), rng.randrange(size), rng.random() < 0.3, rng.randrange(1 << 30))


def values(case: Case, rank: int, numel: int | None = None, part: int = 0) -> Tensor:
    """A rank's input. Sums and products of the few values are exact in every dtype."""
    generator = torch.Generator().manual_seed(case.seed + 1000 * part + rank)
    count = case.numel if numel is None else numel
    low = 0 if case.dtype in (torch.uint8, torch.bool) else -3
    drawn = torch.randint(low, 2 if case.dtype is torch.bool else 4, (2, count), generator=generator)
    real = drawn[0].to(case.dtype)
    return real + 1j * drawn[1] if case.dtype.is_complex else real


def laid_out(case: Case, tensor: Tensor) -> Tensor:
    """The tensor, with gaps between its values if the case asks for that."""
    if not case.strided:
        return tensor
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def reduced(case: Case, inputs: Sequence[Tensor]) -> Tensor:
    result = inputs[0].clone()
    for other in inputs[1:]:
        if case.op in (Op.SUM, Op.AVG):
            result = result + other
        elif case.op == Op.PRODUCT:
            result = result * other
        elif case.op == Op.MIN:
            result = torch.minimum(result, other)
        elif case.op == Op.MAX:
            result = torch.maximum(result, other)
        else:
            bitwise = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}
            result = bitwise[case.op](result, other)
    if case.op != Op.AVG:
        return result
    if case.dtype.is_complex:  # whose parts are divided, each by itself
        return torch.view_as_complex(torch.view_as_real(result) / len(inputs))
    return result / len(inputs)


class Called(NamedTuple):
    work: dist.Work | None
    outputs: list[Tensor]
    expected: list[Tensor]


Collective = Callable[[Case, Group, bool], Called]


def all_reduce(case: Case, group: Group, wait: bool) -> Called:
    tensor = laid_out(case, values(case, group.rank()))
    work = dist.all_reduce(tensor, case.op, group, async_op=not wait)
    return Called(work, [tensor], [reduced(case, [values(case, rank) for rank in range(group.size())])])


def reduce(case: Case, group: Group, wait: bool) -> Called:
    tensor = laid_out(case, values(case, group.rank()))
    work = dist.reduce(tensor, group=group, group_dst=case.root, op=case.op, async_op=not wait)
    if group.rank() != case.root:
        return Called(work, [], [])
    return Called(work, [tensor], [reduced(case, [values(case, rank) for rank in range(group.size())])])


def broadcast(case: Case, group: Group, wait: bool) -> Called:
    tensor = laid_out(case, values(case, group.rank()))
    work = dist.broadcast(tensor, group=group, group_src=case.root, async_op=not wait)
    return Called(work, [tensor], [values(case, case.root)])


def all_gather(case: Case, group: Group, wait: bool) -> Called:
    expected = [values(case, rank) for rank in range(group.size())]
    outputs = [laid_out(case, torch.zeros_like(each)) for each in expected]
    work = dist.all_gather(outputs, laid_out(case, expected[group.rank()]), group, async_op=not wait)
    return Called(work, outputs, expected)


def all_gather_into_tensor(case: Case, group: Group, wait: bool) -> Called:
    expected = torch.cat([values(case, rank) for rank in range(group.size())])
    output = laid_out(case, torch.zeros_like(expected))
    own = laid_out(case, values(case, group.rank()))
    work = dist.all_gather_into_tensor(output, own, group, async_op=not wait)
    return Called(work, [output], [expected])


def reduce_scatter(case: Case, group: Group, wait: bool) -> Called:
    ranks = range(group.size())
    inputs = [laid_out(case, values(case, group.rank(), part=part)) for part in ranks]
    output = laid_out(case, torch.zeros_like(inputs[0]))
    work = dist.reduce_scatter(output, inputs, case.op, group, async_op=not wait)
    return Called(work, [output], [reduced(case, [values(case, rank, part=group.rank()) for rank in ranks])])


def reduce_scatter_tensor(case: Case, group: Group, wait: bool) -> Called:
    ranks = range(group.size())
    whole = laid_out(case, torch.cat([values(case, group.rank(), part=part) for part in ranks]))
    output = laid_out(case, torch.zeros(case.numel, dtype=case.dtype))
    work = dist.reduce_scatter_tensor(output, whole, case.op, group, async_op=not wait)
    return Called(work, [output], [reduced(case, [values(case, rank, part=group.rank()) for rank in ranks])])


def split_of(case: Case, source: int, to: int) -> int:
    return random.Random(f"{case.seed} {source} {to}").choice((0, case.numel // 7, case.numel))


def all_to_all_single(case: Case, group: Group, wait: bool) -> Called:
    own, ranks = group.rank(), range(group.size())
    sends = [split_of(case, own, to) for to in ranks]
    receives = [split_of(case, source, own) for source in ranks]
    whole = torch.cat([values(case, own, numel, part) for part, numel in enumerate(sends)])
    output = laid_out(case, torch.zeros(sum(receives), dtype=case.dtype))
    work = dist.all_to_all_single(output, laid_out(case, whole), receives, sends, group, async_op=not wait)
    return Called(work, [output], [torch.cat([values(case, source, receives[source], own) for source in ranks])])


def all_to_all(case: Case, group: Group, wait: bool) -> Called:
    own, ranks = group.rank(), range(group.size())
    inputs = [laid_out(case, values(case, own, split_of(case, own, to), to)) for to in ranks]
    expected = [values(case, source, split_of(case, source, own), own) for source in ranks]
    outputs = [laid_out(case, torch.zeros_like(each)) for each in expected]
    if case.dtype.is_complex:  # which dist.all_to_all views as real
        outputs, inputs = [each.contiguous() for each in outputs], [each.contiguous() for each in inputs]
    work = dist.all_to_all(outputs, inputs, group, async_op=not wait)
    return Called(work, outputs, expected)


def gather(case: Case, group: Group, wait: bool) -> Called:
    expected = [values(case, rank) for rank in range(group.size())] if group.rank() == case.root else []
    outputs = [laid_out(case, torch.zeros_like(each)) for each in expected]
    own = laid_out(case, values(case, group.rank()))
    work = dist.gather(own, outputs or None, group=group, group_dst=case.root, async_op=not wait)
    return Called(work, outputs, expected)


def scatter(case: Case, group: Group, wait: bool) -> Called:
    is_root = group.rank() == case.root
    inputs = [laid_out(case, values(case, case.root, part=part)) for part in range(group.size())] if is_root else None
    output = laid_out(case, torch.zeros(case.numel, dtype=case.dtype))
    work = dist.scatter(output, inputs, group=group, group_src=case.root, async_op=not wait)
    return Called(work, [output], [values(case, case.root, part=group.rank())])


def coalesced_all_reduce(case: Case, group: Group, wait: bool) -> Called:
    ranks = range(group.size())
    tensors = [laid_out(case, values(case, group.rank(), part=part)) for part in range(3)]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = case.op
    work = group.allreduce_coalesced([torch.view_as_real(t) if case.dtype.is_complex else t for t in tensors], options)
    if wait:
        work.wait()
    expected = [reduced(case, [values(case, rank, part=part) for rank in ranks]) for part in range(3)]
    return Called(work, tensors, expected)


COLLECTIVES: dict[str, Collective] = {
    function.__name__: function
    for function in (
        all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor,
        all_to_all_single, all_to_all, gather, scatter, coalesced_all_reduce,
    )
}  # fmt: skip


def call_at_random(group: Group, seed: int, count: int, names: Iterable[str] | None = None) -> None:
    """Calls so many collectives, of which some are waited for at once, and some later, in another order."""
    rng, order = random.Random(seed), random.Random(seed + group.rank() + 1)
    called: list[tuple[Case, Called]] = []
    for _ in range(count):
        case = draw(rng, group.size(), names)
        called.append((case, COLLECTIVES[case.name](case, group, rng.random() < 0.5)))
        if rng.random() < 0.3:
            order.shuffle(called)
            while called:
                check(*called.pop())
    for each in called:
        check(*each)


def check(case: Case, called: Called) -> None:
    if called.work is not None:
        called.work.wait()
        assert called.work.is_completed()
    for output, expected in zip(called.outputs, called.expected, strict=True):
        assert torch.equal(output, expected), case


class Ended(NamedTuple):
    """What became of a group in trouble."""

    ranks: list[int]
    error: str
    """Empty if all went well."""
    seconds: float
    """How long the call took that has failed."""


def call_in_trouble(
    rank: int, world_size: int, seed: int, signal_number: int, victim: int, timeout: float
) -> list[Ended]:
    """Two threads call collectives at random in random groups, until the victim gets the signal and after it."""
    draws = random.Random(seed)
    members = [sorted(draws.sample(range(world_size), draws.randint(2, world_size))) for _ in range(4)]
    # Who waits for the victim in one group comes late to another.
    limits = [timedelta(seconds=timeout if victim in ranks else 20 * timeout) for ranks in members]
    groups = [
        dist.new_group(ranks, backend="fastsync", timeout=limit) for ranks, limit in zip(members, limits, strict=True)
    ]
    ended: list[Ended] = []
    threads = [
        threading.Thread(
            target=lambda first=first: ended.extend(
                _call_in_groups(rank, groups[first::2], members[first::2], f"{seed} {first}", signal_number, victim)
            )
        )
        for first in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def _call_in_groups(
    rank: int, groups: Sequence[Any], members: Sequence[list[int]], seed: str, signal_number: int, victim: int
) -> list[Ended]:
    rng = random.Random(seed)
    moment, calls = rng.randrange(10, 60), 80
    called: dict[int, list[tuple[Case, Called]]] = {index: [] for index, ranks in enumerate(members) if rank in ranks}
    ended: list[Ended] = []

    def go(index: int, case: Case, wait: bool) -> None:
        called[index].append((case, COLLECTIVES[case.name](case, groups[index], wait)))

    def check_all(index: int) -> None:
        while called[index]:
            check(*called[index].pop(0))

    def finish(index: int) -> None:
        check_all(index)
        dist.barrier(groups[index])

    def settle(what: Callable[..., None], index: int, *options: Any) -> None:
        began = time.monotonic()
        try:
            what(index, *options)
        except dist.DistBackendError as error:
            del called[index]
            ended.append(Ended(members[index], str(error), time.monotonic() - began))

    for number in range(calls):
        index, wait, checks = rng.randrange(len(groups)), rng.random() < 0.5, rng.random() < 0.3
        case = draw(rng, len(members[index]))
        if rank == victim and number == moment:
            os.kill(os.getpid(), signal_number)
        if index in called:
            settle(go, index, case, wait)
        if index in called and checks:
            settle(check_all, index)
    for index in list(called):
        settle(finish, index)
        if index in called:
            ended.append(Ended(members[index], "", 0.0))
    return ended


def check_trouble(of_ranks: Sequence[list[Ended] | None], signal_number: int, victim: int, timeout: float) -> None:
    """Groups with the victim have failed in time, with its name. The others have done all they were asked.

    While the victim is stopped, who waits for it in one group may be the one that is late in another.
    """
    late = {victim}
    if signal_number == signal.SIGSTOP:
        late |= {rank for rank, ended in enumerate(of_ranks) if any(_names(each, victim) for each in ended or ())}
    for ended in [each for of_rank in of_ranks if of_rank is not None for each in of_rank]:
        if victim in ended.ranks:
            assert any(_names(ended, rank) for rank in late), ended
            assert ended.seconds < timeout + 5, ended
        else:
            assert not ended.error, ended


def _names(ended: Ended, rank: int) -> bool:
    return rank in ended.ranks and f"rank {ended.ranks.index(rank)}" in ended.error

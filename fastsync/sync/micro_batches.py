"""``attach(micro_batches=8)``: a step of so many micro-batches gives the same bits on any number of ranks.

Note [The same bits]
~~~~~~~~~~~~~~~~~~~~
Floating-point sums depend on their order. So the order must not depend on which rank has run what.

- The sum over micro-batches is a complete binary tree over their indices: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
- Each rank runs a block of neighbours that is a whole subtree. 8 over 3 ranks are 4, 2 and 2. It adds them up by the
  tree, and keeps one sum for each level. So each rank ends with one node of the tree, and nothing was sent so far.
- Then all ranks add these nodes by what is left of the tree: Note [Sums by a tree] in csrc/passes/pack_unpack.h. The
  place of a rank's row tells its node. The root is divided by the number of micro-batches, in one rounding.
- If there are more ranks than micro-batches, the last ranks have nothing, and their rows do not count.
- A parameter that a micro-batch does not reach counts as zeros there. If none of them reaches it, ``.grad`` is None.
- The norm adds up squares parameter by parameter, in blocks of a fixed size: csrc/sums/stats_in_order.h.
- Before each micro-batch torch's generators, and others that are asked for, are seeded by the seed, the step and the
  index.

A step that runs again on fewer ranks deals all micro-batches anew. Its sums are the same, so nothing else has to know.
"""

from __future__ import annotations

import hashlib
import random
import warnings
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _C
from .._torch_compat import foreach_add_, own_buffers, version_of
from .compression import Auto, Compression
from .freed_memory import keep_freed
from .machine import describe_machine

MOST_MICRO_BATCHES = 2**15
CACHED_BYTES = 2**20
"""How many gradients are added up at a time."""

Gradients: TypeAlias = list[Tensor | None]
"""A gradient for each parameter, or None."""


def block_of(rank: int, num_ranks: int, micro_batches: int) -> range:
    """Returns the micro-batches that a rank runs. Blocks are aligned, and the first ranks have the largest."""
    busy = min(num_ranks, micro_batches)
    if rank >= busy:
        return range(0)
    halves = 2 << (busy.bit_length() - 1)  # as many small blocks fill the tree, or half as many large ones
    num_large = halves - busy
    first = 2 * rank if rank < num_large else num_large + rank
    last = first + (2 if rank < num_large else 1)
    return range(first * micro_batches // halves, last * micro_batches // halves)


class Others(NamedTuple):
    """Which generators a loop over micro-batches seeds besides torch's."""

    python: bool
    numpy: bool


class MicroBatches:
    """What one engine knows of its micro-batches, step after step."""

    def __init__(self, number: int, named: Mapping[str, Tensor]) -> None:
        is_whole = type(number) is int and 1 <= number <= MOST_MICRO_BATCHES
        if not is_whole or number & (number - 1):
            raise ValueError(
                f"micro_batches: expected a power of two up to {MOST_MICRO_BATCHES}, got {number!r}; sums over "
                "micro-batches are a binary tree, and ranks take whole parts of it"
            )
        self.number = number
        self._loop: weakref.ref[Iterator[int]] | None = None  # the newest one
        self._knows_machines = False  # whether the ranks of this group have been compared
        self._check(named)
        self._parameters = list(named.values())
        if self._parameters[0].is_cpu:
            # A sum for each level of the tree, the newest gradients, and temporary values of a backward.
            most = number.bit_length() + 2
            num_bytes = most * sum(each.nbytes for each in self._parameters)
            keep_freed(num_bytes)
            weakref.finalize(self, keep_freed, -num_bytes).atexit = False

    def _check(self, named: Mapping[str, Tensor]) -> None:
        """Raises ValueError for parameters whose sums would not have the same bits."""
        devices = {parameter.device for parameter in named.values()}
        if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            where = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"micro_batches: all parameters have to be on one CPU or GPU, and they are on {where}")
        for name, parameter in named.items():
            dtype = parameter.grad_dtype or parameter.dtype
            if parameter.requires_grad and dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"micro_batches: parameter {name} has gradients of {dtype}, and sums keep their bits in float32 "
                    "and float64 alone; keep parameters in float32, and use torch.autocast"
                )

    def check_compression(self, compression: Compression | Auto) -> None:
        """Raises ValueError unless gradients travel as they are, and on one level."""
        if not isinstance(compression, Compression) or compression.wire != "none" or compression.ranks_per_node > 1:
            raise ValueError(
                f"compression: micro_batches needs 'none', got {compression}; what a wire rounds depends on the number "
                "of ranks"
            )

    def begin(self, engine: _C.Synchronizer) -> None:
        """Has a new engine average sums over micro-batches."""
        engine.set_micro_batches(self.number)
        self._knows_machines = False

    def run(
        self,
        modules: Iterable[nn.Module],
        group: dist.ProcessGroup,
        seed: int,
        step: int,
        average: Callable[[], None],
        others: Others,
    ) -> Iterator[int]:
        """Yields the indices of this rank's micro-batches, and averages behind the last one.

        See Note [The same bits]. ``modules`` have the parameters, ``average`` makes the means of all ranks, and
        ``others`` tells which generators are seeded besides torch's. A loop that was left before has ended.
        """
        before = None if self._loop is None else self._loop()
        if isinstance(before, Generator):
            before.close()  # first, because it puts back generators
        loop = self._run(list(modules), group, seed, step, average, others)
        self._loop = weakref.ref(loop)
        return loop

    def _run(
        self,
        modules: Sequence[nn.Module],
        group: dist.ProcessGroup,
        seed: int,
        step: int,
        average: Callable[[], None],
        others: Others,
    ) -> Iterator[int]:
        check_no_batch_norm(modules)
        versions = _versions_of_buffers(modules)
        self._take_gradients()
        sums = _SumsByTree()
        with _generators.seeded(self._parameters[0].device, others) as set_seed:
            for index in block_of(group.rank(), group.size(), self.number):
                set_seed(seed_of(seed, step, index))
                yield index
                sums.add(self._take_gradients())
        _check_buffers_are_unchanged(versions, modules)
        for parameter, gradient in zip(self._parameters, sums.root() or self._take_gradients(), strict=True):
            parameter.grad = gradient
        average()
        self._warn_of_unlike_machines(group)

    def _take_gradients(self) -> Gradients:
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    def _warn_of_unlike_machines(self, group: dist.ProcessGroup) -> None:
        """Warns once if ranks may round differently. Every rank has to call it."""
        if self._knows_machines or group.size() == 1:
            return
        machines = [""] * group.size()
        dist.all_gather_object(machines, describe_machine(self._parameters), group=group)
        self._knows_machines = True
        other = next((rank for rank, each in enumerate(machines) if each != machines[0]), None)
        if other is not None:
            warnings.warn(
                "fastsync: micro_batches gives the same bits on any number of ranks if all of them compute alike, and "
                f"they may not. Rank 0 has: {machines[0]}. Rank {other} has: {machines[other]}. Use machines of one "
                "type, and set one number of threads, by OMP_NUM_THREADS or torch.set_num_threads",
                stacklevel=2,
            )


class _SumsByTree:
    """A binary counter: of each size, a power of two, there is at most one sum of so many micro-batches."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, Gradients]] = []  # from the largest to the smallest

    def add(self, gradients: Gradients) -> None:
        size, smaller = 1, []
        while self._sums and self._sums[-1][0] == size:
            smaller.append(self._sums.pop()[1])
            size *= 2
        self._sums.append((size, _sum_of(gradients, smaller)))

    def root(self) -> Gradients:
        """Returns the sum of all, or nothing if there was none."""
        return self._sums[0][1] if self._sums else []


@torch.no_grad()
def _sum_of(gradients: Gradients, sums: Sequence[Gradients]) -> Gradients:
    """Returns the gradients plus the first sum, plus the second, and so on, in memory of theirs.

    All that is to be added to some parameters comes first, while they are in the cache.
    """
    total = list(gradients)
    for part in _parts_of(gradients):
        for each in sums:
            total[part] = _added(each[part], total[part])
    return total


def _parts_of(gradients: Gradients) -> Iterator[slice]:
    """Yields neighbours that fit into a cache together, or one that does not."""
    first = num_bytes = 0
    for index, gradient in enumerate(gradients):
        num_bytes += 0 if gradient is None else gradient.nbytes
        if num_bytes >= CACHED_BYTES or index + 1 == len(gradients):
            yield slice(first, index + 1)
            first, num_bytes = index + 1, 0


def _added(left: Gradients, right: Gradients) -> Gradients:
    """Returns the sums, in the memory of one of the two."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    for a, b in zip(left, right, strict=True):
        if (a is None) != (b is None):
            alone = b if a is None else a
            assert alone is not None
            alone.add_(0.0)  # the other counts as zeros, which make 0 of -0
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def seed_of(seed: int, step: int, index: int) -> int:
    """Returns what the generators of a micro-batch are seeded with."""
    digest = hashlib.blake2b(f"{seed},{step},{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Generators:
    """The generators that loops over micro-batches seed. Behind the last loop they go on from where they were.

    Loops over several handles may be under way at a time, and end in any order.
    """

    def __init__(self) -> None:
        self._num_loops = 0
        self._put_back: dict[Hashable, Callable[[], object]] = {}

    @contextmanager
    def seeded(self, device: torch.device, others: Others) -> Iterator[Callable[[int], None]]:
        """Gives what seeds all generators: torch's of the CPU and of this device, and ``others``."""
        if others.numpy:
            import numpy as np  # which fastsync itself does not need: an error comes before anything is kept

        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index])
        seeders: list[Callable[[int], object]] = [generator.manual_seed for generator in generators]
        for each in generators:
            self._keep(each.device, partial(each.set_state, each.get_state()))
        if others.python:
            seeders.append(random.seed)
            self._keep("python", partial(random.setstate, random.getstate()))
        if others.numpy:
            seeders.append(lambda seed: np.random.seed(seed % 2**32))  # noqa: NPY002
            self._keep("numpy", partial(np.random.set_state, np.random.get_state()))  # noqa: NPY002

        def set_seed(seed: int) -> None:
            for seeder in seeders:
                seeder(seed)

        self._num_loops += 1
        try:
            yield set_seed
        finally:
            self._num_loops -= 1
            while self._num_loops == 0 and self._put_back:
                self._put_back.popitem()[1]()

    def _keep(self, generator: Hashable, put_back: Callable[[], object]) -> None:
        self._put_back.setdefault(generator, put_back)


_generators = _Generators()


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_no_batch_norm(modules: Iterable[nn.Module]) -> None:
    """Raises ValueError for BatchNorm in train mode. Without running statistics it depends on a micro-batch alone."""
    for module in modules:
        if not isinstance(module, _BATCH_NORMS) or not module.training:
            continue
        if module.running_mean is not None or isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"micro_batches: the model has a {type(module).__name__} of {module.num_features} features in train "
                "mode, whose running statistics depend on which micro-batches a rank has run; use nn.GroupNorm, or "
                "freeze the statistics by the layer's eval()"
            )


Versions: TypeAlias = dict[tuple[nn.Module, str], tuple[Tensor, int]]


def _versions_of_buffers(modules: Iterable[nn.Module]) -> Versions:
    return {
        (module, name): (buffer, version_of(buffer))
        for module in modules
        for name, buffer in own_buffers(module).items()
        if buffer is not None and not buffer.is_inference()
    }


def _check_buffers_are_unchanged(before: Versions, modules: Iterable[nn.Module]) -> None:
    after = _versions_of_buffers(modules)
    for (module, name), (buffer, version) in before.items():
        now, newest = after.get((module, name), (None, 0))
        if now is not buffer or newest != version:
            raise ValueError(
                f"micro_batches: a forward has changed the buffer {name!r} of a {type(module).__name__}, so it would "
                "depend on which micro-batches a rank has run; change buffers outside the loop over micro_batches(), "
                "alike on all ranks"
            )

"""A rank of MPI that times a collective, for ``python -m benchmarks collectives --methods mpi``.

    mpirun -n N python mpi_collectives.py FILE

FILE is JSON: collective, number of values, and number of untimed and timed repetitions. Rank 0 adds
``samples``, seconds as ``collectives`` takes them, ``correct`` and ``library``. It needs mpi4py and NumPy alone, so it
has no torch, whose threads would be in its way.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK, RANKS = COMM.Get_rank(), COMM.Get_size()


class Step:
    """One call of a collective, on input that is made anew each time: rank r has r + 1 everywhere."""

    def __init__(self, numel: int) -> None:
        self.whole, self.sent = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
        self.piece = np.zeros(numel // RANKS, np.float32)

    def prepare(self) -> None:
        for values in (self.whole, self.sent, self.piece):
            values.fill(RANK + 1)


def all_reduce(step: Step) -> None:
    COMM.Allreduce(MPI.IN_PLACE, step.whole)


def broadcast(step: Step) -> None:
    COMM.Bcast(step.whole, 0)


def all_gather(step: Step) -> None:
    COMM.Allgather(step.piece, step.whole)


def reduce_scatter(step: Step) -> None:
    COMM.Reduce_scatter_block(step.whole, step.piece)


def all_to_all(step: Step) -> None:
    COMM.Alltoall(step.sent, step.whole)


def barrier(step: Step) -> None:
    COMM.Barrier()


def _in_pieces(step: Step) -> bool:
    return bool((step.whole == np.repeat(np.arange(1, RANKS + 1), step.piece.size)).all())


SUM = RANKS * (RANKS + 1) / 2
COLLECTIVES: dict[str, tuple[Callable[[Step], None], Callable[[Step], bool]]] = {
    "all_reduce": (all_reduce, lambda step: bool((step.whole == SUM).all())),
    "broadcast": (broadcast, lambda step: bool((step.whole == 1).all())),
    "all_gather": (all_gather, _in_pieces),
    "reduce_scatter": (reduce_scatter, lambda step: bool((step.piece == SUM).all())),
    "all_to_all": (all_to_all, _in_pieces),
    "barrier": (barrier, lambda step: True),
}


def measure(collective: str, numel: int, warmup: int, repetitions: int) -> tuple[list[float], bool]:
    """Seconds from when the last rank calls until the slowest has its result, and whether it is right on all ranks."""
    step, (call, is_right) = Step(numel), COLLECTIVES[collective]
    spans = np.zeros((2, warmup + repetitions))
    for repetition in range(warmup + repetitions):
        step.prepare()
        COMM.Barrier()
        spans[0, repetition] = time.perf_counter()  # of a clock that processes of a machine share
        call(step)
        spans[1, repetition] = time.perf_counter()
    COMM.Allreduce(MPI.IN_PLACE, spans, MPI.MAX)
    return (spans[1] - spans[0])[warmup:].tolist(), COMM.allreduce(is_right(step), MPI.LAND)


def main(file: Path) -> None:
    call = json.loads(file.read_text(encoding="utf-8"))
    samples, correct = measure(**call)
    library = MPI.Get_library_version().split(",")[0].strip("\0 ")
    if RANK == 0:
        measured = call | {"samples": samples, "correct": correct, "library": library}
        file.write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

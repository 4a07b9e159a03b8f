"""What was chosen, in the engine's own types."""

from collections.abc import Sequence

from . import _C
from .auto import Candidate
from .compression import Compression


def engine_schedule(phases: Sequence[tuple[int, Sequence[Candidate]]]) -> _C.Schedule:
    """Candidates from each first step on. Of several, the engine chooses one a bucket, as ``auto.choose`` does."""
    return _C.Schedule([(step, [_candidate(candidate) for candidate in candidates]) for step, candidates in phases])


def _candidate(candidate: Candidate) -> _C.Candidate:
    return _C.Candidate(_compression(candidate.compression), list(candidate.points))


def _compression(compression: Compression) -> _C.Compression:
    return _C.Compression(
        compression.wire,
        sums_in_float32=compression.reduce == "fp32",
        error_feedback=compression.error_feedback,
        is_stochastic=compression.rounding == "stochastic",
        algorithm=compression.algorithm,
        ranks_per_node=compression.ranks_per_node or 1,
    )

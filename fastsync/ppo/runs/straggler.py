"""Stragglers: which rank makes the others wait, how long, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastsync.ppo.runs.metrics import PhaseTimes, mean

WORK = ("environment", "policy", "learning", "reporting")
REMEDIES = {
    "environment": "give all ranks fewer environments, step them in processes (--vectorization async), or move that "
    "rank to cores of its own",
    "policy": "that rank's cores or GPU do other work too: move it, or pin each rank to cores of its own",
    "learning": "that rank's cores or GPU do other work too: move it, pin each rank to cores of its own, or give each "
    "fewer threads (--num-threads)",
    "reporting": "save more seldom (--checkpoint-interval), or put --runs-dir on a faster disk",
    "communication": "the way to that rank is slow: look at its network with fastsync doctor, or send fewer bytes "
    "(--compression)",
}
"""What the user can do, by what a rank spends more time with."""
NOTABLE_SHARE = 0.02
"""Share of the time below which waiting is not worth a word: ranks are never equally fast."""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for most."""

    rank: int
    seconds: float
    """How long each of the others has waited for it, on average."""
    share: float
    """Of all measured time."""
    phase: str
    """What it spends more time with than the others: one of PhaseTimes. "communication" where it works no longer than
    they do, so that its way to them must be slow."""

    def __str__(self) -> str:
        waiting = f"rank {self.rank} makes the others wait in {self.phase}: {self.seconds:.1f} s, {self.share:.0%}"
        return f"{waiting}; {REMEDIES[self.phase]}"


class WaitingTimes:
    """Adds up who waited, and for whom.

    All ranks leave a collective at about the same moment, so the rank that spends least time in it came last: that is
    the one the others waited for, and what they spent more than it is what they waited. This is judged update by
    update, for ranks may take turns at being slow, which totals would hide.
    """

    def __init__(self, world_size: int) -> None:
        self.times = [PhaseTimes() for _ in range(world_size)]
        """Seconds of each rank so far."""
        self.waited = [0.0] * world_size
        """Seconds that each rank has waited for others so far."""
        self._caused = [0.0] * world_size
        self._longer = [dict.fromkeys(WORK, 0.0) for _ in range(world_size)]

    def add(self, times: Sequence[PhaseTimes]) -> list[float]:
        """Counts one update in which rank r spent ``times[r]``, and returns how long each rank waited in it."""
        communication = [rank.communication for rank in times]
        least = min(communication)
        waited = [seconds - least for seconds in communication]
        last = communication.index(least)
        others = [rank for rank in range(len(times)) if rank != last]
        self.times = [total + new for total, new in zip(self.times, times, strict=True)]
        self.waited = [total + new for total, new in zip(self.waited, waited, strict=True)]
        if others:
            self._caused[last] += mean([waited[rank] for rank in others])
            for phase in WORK:
                usual = mean([getattr(times[rank], phase) for rank in others])
                self._longer[last][phase] += getattr(times[last], phase) - usual
        return waited

    @property
    def straggler(self) -> Straggler | None:
        """None where nobody makes the others wait for a notable time."""
        caused = max(self._caused)
        total = mean([times.total for times in self.times])
        if caused <= NOTABLE_SHARE * total:
            return None
        rank = self._caused.index(caused)
        phase, longer = max(self._longer[rank].items(), key=lambda item: item[1])
        return Straggler(rank, caused, caused / total, phase if longer > 0.25 * caused else "communication")

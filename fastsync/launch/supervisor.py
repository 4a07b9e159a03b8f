"""Starts ranks on this host, and lets the others live when one is lost."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes

from ..elastic.members_store import JOINS, KEYS_OF_FIRST, STORE
from ..elastic.membership import PROCESS, Membership, newest_membership, rank_of_process
from ..errors import RankLostError
from .environment import threads_of_rank
from .main_file import check_found_by_processes, missing_main_left_out
from .torchrun import LAUNCHERS, handled, run_rank, signals_passed_on

POLL_SECONDS = 0.05
START_METHOD = "spawn"
SOON_SECONDS = 10.0
MOST_SOON = 3
"""A process that ends within SOON_SECONDS has not trained. After so many in a row, no others are started."""


class Supervisor:
    """Holds the store, and starts and watches the ranks. No rank ends because another one does.

    Args:
        entrypoint: what each rank runs: a program, or a function at the top level of a module.
        words: its arguments.
        nproc: number of ranks.
        command: the user's command, which begins what is printed when a rank is lost.
        place: where the ranks meet, for the same.
        replaces: another rank is started when one is lost.
        ranks_tell: the ranks print themselves that they go on.
    """

    def __init__(
        self,
        entrypoint: str | Callable[..., Any],
        words: Sequence[Any],
        nproc: int,
        *,
        command: str,
        place: str,
        replaces: bool = False,
        ranks_tell: bool = False,
    ) -> None:
        # It would report each rank that has ended, as a failure of all.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
        # All ranks are on this host. By itself the store would listen to other hosts, too.
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        port: int = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._agreed = PrefixStore(KEYS_OF_FIRST, self._store)
        self._entrypoint, self._words, self._replaces = entrypoint, tuple(words), replaces
        self._command, self._place, self._ranks_tell = command, place, ranks_tell
        self.returned: list[Any] = []
        """What the function has returned on the ranks that have come to its end."""
        self._num_started = self._num_soon = 0
        self._running: dict[int, tuple[PContext, float]] = {}
        self._local_ranks: dict[int, int] = {}  # a replacement has that of the rank before
        self._failed: dict[int, int] = {}  # statuses of ranks that have failed by themselves, such as by an error
        self._nproc = nproc

    def _start(self, variables: dict[str, int]) -> None:
        number, self._num_started = self._num_started, self._num_started + 1
        self._local_ranks[number] = variables["LOCAL_RANK"]
        # What torchrun's agent sets. A rank that joins begins in a group of its own.
        attempt = number if JOINS in variables else 0
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port, "TORCHELASTIC_RESTART_COUNT": attempt}
        own = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            STORE: f"127.0.0.1:{self._store.port}",
            PROCESS: number,
        }
        environment = {name: str(value) for name, value in (variables | place | own).items()}
        if isinstance(self._entrypoint, str):  # a function has begun with torch by then; see run_rank
            environment["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] if threads_of_rank() else "1"
        with missing_main_left_out():
            rank = start_processes(
                f"rank {number}",
                self._entrypoint,
                {0: self._words},
                {0: environment},
                DefaultLogsSpecs(log_dir=os.devnull),
                start_method=START_METHOD,
            )
        self._running[number] = rank, time.monotonic()

    def run(self) -> int:
        """Starts the ranks, and waits until all have ended.

        Returns 0 if one of them has come to the end of its script. If the ranks have never met, all of them have to.
        """
        is_done, has_failed, size = False, False, self._nproc
        try:
            for first in range(size):
                self._start({"RANK": first, "LOCAL_RANK": first, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
            while self._running and not self._are_left_behind() and not self._are_too_late():
                time.sleep(POLL_SECONDS)
                for number, (rank, since) in list(self._running.items()):
                    if (result := rank.wait(timeout=0)) is None:
                        continue
                    del self._running[number]
                    if not result.failures:
                        is_done = True
                        self.returned += result.return_values.values()
                        continue
                    has_failed = True
                    if not self._goes_on_without(number, result.failures[0].exitcode, since, is_done):
                        return 1
            left = self._running
            why = (
                "has not joined, and no rank is left that could take it in"
                if left and self._are_too_late()
                else "is stopped, and the others have gone on without it"
            )
            for number in left:
                print(f"{self._command}: rank {number} {why}, so it is ended", file=sys.stderr, flush=True)
            if is_done and self._failed and not self._ranks_tell:  # which stands far above by now
                failed = " and ".join(f"rank {rank} failed with status {code}" for rank, code in self._failed.items())
                told = f"{self._command}: others have come to the end; {failed}, and what failed stands above"
                print(told, file=sys.stderr, flush=True)
        finally:
            for rank, _ in self._running.values():
                rank.close(signal.SIGTERM, timeout=5)
        return 0 if is_done and (not has_failed or self._newest() is not None) else 1

    def _are_left_behind(self) -> bool:
        """Whether those that still run were members, were taken for lost because they are stopped, and stay so."""
        # Another may have broken off, or waits no longer for a member that has ended. It may have a file to write.
        if not all(_is_stopped(pid) for rank, _ in self._running.values() for pid in rank.pids().values()):
            return False
        newest = self._newest()
        ranks = {rank_of_process(self._agreed, number) for number in self._running}
        return newest is not None and None not in ranks and ranks.isdisjoint(newest.members)

    def _are_too_late(self) -> bool:
        """Whether those that still run are replacements which have not joined, and no member is left to take them in.

        They would only wait. Where the script's own error has ended the others, it would end them, too.
        """
        if any(number < self._nproc for number in self._running):
            return False
        newest = self._newest()
        if newest is None or any(rank_of_process(self._agreed, number) is not None for number in self._running):
            return False
        # Members that have decided to take one in may have ended before it knows, and then it goes on alone.
        known = {rank_of_process(self._agreed, number) for number in range(self._num_started)}
        return newest.is_over or known.issuperset(newest.members)

    def _newest(self) -> Membership | None:
        """Returns the newest membership; None if the ranks have not met."""
        return newest_membership(self._agreed) if self._agreed.check(["newest"]) else None

    def _goes_on_without(self, number: int, code: int, since: float, is_done: bool) -> bool:
        """Says how a rank has ended, and starts another one if that is asked for. Returns whether the others go on."""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has failed with status {code}"
        if code > 0:
            self._failed[number] = code
        self._num_soon = self._num_soon + 1 if time.monotonic() - since < SOON_SECONDS else 0
        newest = self._newest()
        have_met, is_over = newest is not None, newest is not None and newest.is_over
        are_left = bool(self._running) and not self._are_left_behind() and not self._are_too_late()
        go = "1 rank goes on" if len(self._running) == 1 else f"{len(self._running)} ranks go on"
        next_ = go if are_left else "no rank is left"
        if not have_met and not is_done:
            next_ = f"the ranks have not met in {self._place} yet, so all of them end"
        elif self._replaces and are_left and not is_over:
            if self._num_soon < MOST_SOON:
                next_ += f", and rank {self._num_started} is started in its place"
                self._start(
                    {
                        "RANK": 0,
                        "LOCAL_RANK": self._local_ranks[number],
                        "WORLD_SIZE": 1,
                        "LOCAL_WORLD_SIZE": 1,
                        JOINS: 1,
                    }
                )
            else:
                next_ += f"; {MOST_SOON} in a row have ended within {SOON_SECONDS:g} s, so none is started in its place"
        go_on = have_met or is_done
        if not (self._ranks_tell and go_on and are_left):
            print(f"{self._command}: rank {number} {how}; {next_}", file=sys.stderr, flush=True)
        return go_on


def _is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped a process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def launch_survivors(fn: Callable[..., Any], nproc: int, *args: Any, stop_timeout: float) -> list[Any]:
    """Calls ``fn(*args)`` on ranks as ``launch_ranks``, but lets the others live when one is lost.

    Signals are passed on to the ranks as there. The error of a rank is printed at once.

    Returns:
        The results of the ranks that have returned.

    Raises:
        ValueError: as there.
        SignalException: as there.
    """
    check_found_by_processes(fn)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = handled(LAUNCHERS)
    told: dict[str, Any] = {"command": "fastsync train", "place": "the training", "ranks_tell": True}
    supervisor = Supervisor(_run_rank_aloud, (fn, args), nproc, **told)
    with signals_passed_on(stop_timeout) as received:
        supervisor.run()
    if received and not supervisor.returned:  # they were told to stop before they could react
        raise SignalException(f"ended by {received[0].name}", sigval=signal.SIGTERM)
    return supervisor.returned


def _run_rank_aloud(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return run_rank(fn, args)
    except RankLostError as error:
        print(error, file=sys.stderr)  # the other rank has failed, so where this one stood tells nothing
        sys.exit(1)
    except Exception:
        traceback.print_exc()  # no launcher reports it
        sys.exit(1)

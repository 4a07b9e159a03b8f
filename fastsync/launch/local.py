"""``fastsync launch local``: starts ranks of a script on this host, and lets the others live when one is lost."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes

from .._membership import Membership
from ..elastic import BEGUN, JOINS, STORE
from .jobs import Script
from .signals import handling

POLL_SECONDS = 0.05
SOON_SECONDS = 10.0
MOST_SOON = 3
"""A process that ends within SOON_SECONDS has not trained. After so many in a row, no others are started."""


class Supervisor:
    """Holds the store, and starts and watches the ranks. No rank ends because another one does."""

    def __init__(self, words: Sequence[str], nproc: int, replaces: bool) -> None:
        # It would report each rank that has ended, as a failure of all.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._command = [sys.executable, "-u", *words]
        self._replaces = replaces
        self._num_started = self._num_soon = 0
        self._running: dict[int, tuple[PContext, float]] = {}
        self._nproc = nproc

    def _start(self, variables: dict[str, int]) -> None:
        number, self._num_started = self._num_started, self._num_started + 1
        # What torchrun's agent sets. A rank that joins begins in a group of its own.
        attempt = number if JOINS in variables else 0
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port, "TORCHELASTIC_RESTART_COUNT": attempt}
        own = {"TORCHELASTIC_USE_AGENT_STORE": "True", STORE: f"127.0.0.1:{self._store.port}"}
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment = {name: str(value) for name, value in (variables | place | own | threads).items()}
        command, *words = self._command
        rank = start_processes(
            f"rank {number}",
            command,
            {0: tuple(words)},
            {0: os.environ | environment},
            DefaultLogsSpecs(log_dir=os.devnull),
        )
        self._running[number] = rank, time.monotonic()

    def run(self) -> int:
        """Starts the ranks, and waits until all have ended. Returns 0 if one of them has ended its script."""
        is_done, size = False, self._nproc
        try:
            for first in range(size):
                self._start({"RANK": first, "LOCAL_RANK": first, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
            while self._running:
                time.sleep(POLL_SECONDS)
                for number, (rank, since) in list(self._running.items()):
                    if (code := _status(rank)) is not None:
                        del self._running[number]
                        is_done |= code == 0
                        if code != 0 and not self._goes_on_without(number, code, since, is_done):
                            return 1
        finally:
            for rank, _ in self._running.values():
                rank.close(signal.SIGTERM, timeout=5)
        return 0 if is_done else 1

    def _goes_on_without(self, number: int, code: int, since: float, is_done: bool) -> bool:
        """Says how a rank has ended, and starts another one if that is asked for. Returns whether the others go on."""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has failed with status {code}"
        self._num_soon = self._num_soon + 1 if time.monotonic() - since < SOON_SECONDS else 0
        have_met = self._store.check([BEGUN])
        is_over = have_met and Membership.from_json(self._store.get(BEGUN)).is_over
        next_ = f"{len(self._running)} ranks go on" if self._running else "no rank is left"
        if not have_met and not is_done:
            next_ = "the ranks have not met in fastsync.Elastic yet, so all of them end"
        elif self._replaces and self._running and not is_over:
            if self._num_soon < MOST_SOON:
                next_ += f", and rank {self._num_started} is started in its place"
                self._start({"RANK": 0, "LOCAL_RANK": number, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, JOINS: 1})
            else:
                next_ += f"; {MOST_SOON} in a row have ended within {SOON_SECONDS:g} s, so none is started in its place"
        print(f"fastsync launch local: rank {number} {how}; {next_}", file=sys.stderr, flush=True)
        return have_met or is_done


def _status(rank: PContext) -> int | None:
    """Returns the exit status of a rank, below 0 for a signal; None while it runs."""
    result = rank.wait(timeout=0)
    if result is None:
        return None
    return result.failures[0].exitcode if result.failures else 0


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the launcher's own options, and the script or -m and a module, whose options may look like those."""
    end = 0
    while end < len(arguments) and arguments[end].startswith("-") and arguments[end] not in ("-m", "--"):
        end += 2 if arguments[end] in ("-n", "--nproc") else 1
    rest = arguments[end:]
    return arguments[:end], rest[1:] if rest[:1] == ["--"] else rest


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks of a command line, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fastsync launch local",
        usage="%(prog)s [-n RANKS] [--replace] {SCRIPT | -m MODULE} ...",
        description="Start ranks of a script on this host. When one is lost, the others live on; a script that uses "
        "fastsync.Elastic goes on with them.",
    )
    parser.add_argument("-n", "--nproc", type=int, default=2, metavar="RANKS", help="number of ranks (default: 2)")
    parser.add_argument("--replace", action="store_true", help="start another rank when one is lost")
    own, words = _split(arguments)
    options = parser.parse_args(own)
    if options.nproc < 1:
        raise ValueError(f"nproc={options.nproc} must be at least 1")
    if not words:
        raise ValueError("name a script, or -m and a module, as in: fastsync launch local -n 4 train.py")
    Script(words).check_file()

    def stop(number: int, frame: object) -> None:
        raise SignalException(f"ended by {signal.Signals(number).name}", sigval=signal.Signals(number))

    try:
        with handling(stop, (signal.SIGTERM,)):
            return Supervisor(words, options.nproc, options.replace).run()
    except SignalException as ended:
        return 128 + ended.sigval

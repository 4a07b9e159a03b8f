"""Starting ranks with torchrun's launcher: on this machine, or this machine's share of several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fastsync.launch.signals import STOP_SIGNALS, handling

LAUNCHERS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a launch. The launcher sets handlers for them and leaves them behind."""

END_SECONDS = 5
"""How long ranks have that are to end at once, before they are killed: those that still import do not listen."""

STOPPED_SECONDS = 1
"""How long ranks have that are to end and whose process is stopped: long enough for one that is about to go on."""


@dataclass(frozen=True)
class Nodes:
    """The machines that take part, and which of them this one is. The same launch is started on each."""

    number: int = 1
    rank: int = 0
    """This machine's number. Ranks count on from those of the machines before."""
    master_addr: str = "localhost"
    """Machine 0, as the others reach it."""
    master_port: int = 29500
    """A free port there."""
    timeout: float = 900.0
    """Seconds that machines wait for each other."""


def launch_ranks(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    nodes: Nodes | None = None,
    max_restarts: int = 0,
    stop_timeout: float = 30.0,
) -> list[Any]:
    """Calls ``fn(*args)`` on ``nproc`` ranks, each a process of its own, and returns their results in rank order.

    ``fn`` is a function at the top level of a module; ``args`` and results travel by pickle. The ranks find each other
    through the environment variables that torchrun sets, as ``fastsync.distributed.process_group`` reads them.

    SIGTERM and SIGUSR1 are passed on to the ranks as SIGTERM. They may end their work in order, and what they return
    is returned; after ``stop_timeout`` seconds, or at a second signal, they are ended. Ctrl-C ends ranks at once and
    without a word, wherever they are.

    Args:
        fn: what each rank does.
        nproc: number of ranks on this machine.
        *args: what ``fn`` is called with.
        nodes: the machines; by default this one only. Results are those of this machine's ranks.
        max_restarts: how often all ranks are started again when one has failed.
        stop_timeout: seconds that ranks have to end in order when they are told to.

    Raises:
        ChildFailedError: a rank raised or died. Its traceback has been logged. One whose process was found stopped
            counts as the first that failed: what others raised, they raised because it did not come.
        SignalException: a signal ended the launch before there were ranks, or they did not end in time.
    """
    if nodes is None or nodes.number == 1:
        # Port 0: any that is free.
        place: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
        run_id, number = str(uuid.uuid4()), 1
    else:
        place = {
            "rdzv_backend": "static",
            "rdzv_endpoint": f"{nodes.master_addr}:{nodes.master_port}",
            "rdzv_configs": {"rank": nodes.rank, "timeout": max(1, round(nodes.timeout))},
        }
        run_id, number = "fastsync", nodes.number
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:  # older launchers have 30 s
        place["shutdown_timeout"] = END_SECONDS
    config = LaunchConfig(
        min_nodes=number,
        max_nodes=number,
        nproc_per_node=nproc,
        run_id=run_id,
        max_restarts=max_restarts,
        start_method="spawn",
        signals_to_handle=",".join(number.name for number in LAUNCHERS),
        **place,
    )
    pids = multiprocessing.get_context("spawn").RawArray("i", nproc)
    with (
        _signals_passed_on(stop_timeout) as received,
        _ctrl_c_kept_from_children(),
        _stopped_ranks_killed(pids) as killed,
    ):
        try:
            results = elastic_launch(config, _as_rank)(fn, args, pids)
        except ChildFailedError as error:
            of_this_attempt = [local for local, pid in killed.items() if pids[local] == pid]
            if of_this_attempt:
                first = 0 if nodes is None else nodes.rank * nproc
                failures = {first + local: _stopped(local, pids[local]) for local in of_this_attempt}
                raise ChildFailedError(error.name, {**error.failures, **failures}) from error
            if received and error.get_first_failure()[1].exitcode == -signal.SIGTERM:
                # It was told to stop before it could listen.
                raise SignalException(f"ended by {received[0].name}", sigval=signal.SIGTERM) from None
            raise
    return [results[rank] for rank in sorted(results)]


@contextmanager
def _signals_passed_on(stop_timeout: float) -> Iterator[list[signal.Signals]]:
    """Passes signals on to the ranks and goes on waiting for them. Yields a list that holds the first once it came.

    The launcher's own way is to stop waiting and to expect that they exit. But a rank that has returned stays until
    the launcher has read its result, so that ranks which end in order would be killed in the end.
    """
    first: list[signal.Signals] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        ranks = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
        if first or not ranks:
            received = first[0] if first else signal.Signals(number)
            raise SignalException(f"ended by {received.name}", sigval=signal.SIGTERM)
        first.append(signal.Signals(number))
        signal.setitimer(signal.ITIMER_REAL, stop_timeout)
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)

    with handling(pass_on, (*STOP_SIGNALS, signal.SIGALRM), restored=LAUNCHERS):
        try:
            yield first
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def thread_meanwhile(work: Callable[[threading.Event], object], name: str) -> Iterator[None]:
    """Runs ``work`` in a thread for the time of a ``with`` block, the end of which sets the event that it is given."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _ctrl_c_kept_from_children() -> Iterator[None]:
    """Lets Ctrl-C, which a terminal sends to all processes, end this process and not, meanwhile, each rank's imports.

    A process that is started inherits which signals wait. They wait for the main thread, which starts ranks; this one
    here takes them, and Python runs the handler in the main thread as always.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # multiprocessing's helper, which Slurm signals too. Started later, it would let Ctrl-C through again.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    with thread_meanwhile(lambda over: over.wait(), "takes Ctrl-C"):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _stopped_ranks_killed(pids: Sequence[int]) -> Iterator[dict[int, int]]:
    """Kills ranks that are to end, as the launcher tells them when another one has failed, and cannot: stopped ones.

    The launcher itself would wait for half a minute. Yields a dict of those that were killed, by their number here.
    """
    killed: dict[int, int] = {}

    def watch(over: threading.Event) -> None:
        since: dict[int, float] = {}
        while not over.wait(STOPPED_SECONDS / 4):
            for local, pid in enumerate(pids):
                if not _is_stopped_and_told_to_end(pid):
                    since.pop(pid, None)
                elif time.monotonic() - since.setdefault(pid, time.monotonic()) > STOPPED_SECONDS:
                    killed[local] = pid
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    with thread_meanwhile(watch, "watches for stopped ranks"):
        yield killed


def _is_stopped_and_told_to_end(pid: int) -> bool:
    """Tells whether that child is stopped, and a signal that would end it waits until it goes on. See proc(5)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return False
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    waiting = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return (
        int(status["PPid"]) == os.getpid()
        and status["State"][0] in "Tt"
        and any(waiting >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGINT))
    )


def _stopped(local_rank: int, pid: int) -> ProcessFailure:
    failure = ProcessFailure(local_rank, pid, -signal.SIGKILL, error_file="")
    failure.message = f"its process {pid} was stopped, as by SIGSTOP or a debugger, and had to be killed"
    failure.timestamp = 0
    return failure


def _as_rank(fn: Callable[..., Any], args: tuple[Any, ...], pids: MutableSequence[int]) -> Any:
    pids[int(os.environ["LOCAL_RANK"])] = os.getpid()
    # From here on Ctrl-C ends it, also where it waits for others in C++, and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does
    return fn(*args)

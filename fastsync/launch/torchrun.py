"""Starting ranks on this machine with torchrun's launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessContext

from .environment import threads_of_rank
from .main_file import check_found_by_processes, missing_main_left_out
from .signals import STOP_SIGNALS, handling

LAUNCHERS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a launch. The launcher sets handlers for them and leaves them behind."""

END_SECONDS = 5
"""Seconds that ranks have to end before they are killed. Ranks that still import do not react to signals."""

PATIENCE = 1
"""Seconds after which a message names the ranks that still run."""


def launch_ranks(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    max_restarts: int = 0,
    stop_timeout: float = 30.0,
    say: Callable[[str], None] = lambda sentence: None,
    killed: list[str] | None = None,
) -> list[Any]:
    """Calls ``fn(*args)`` on ``nproc`` ranks, each a process of its own, and returns their results in rank order.

    The ranks find each other through the environment variables that torchrun sets, as
    ``fastsync.distributed.process_group`` reads them. SIGTERM and SIGUSR1 are passed on to the ranks as SIGTERM, so
    that they can end in order and return. After ``stop_timeout`` seconds, or at a second signal, they are ended. Ctrl-C
    ends ranks at once; those that still import print a traceback. When a rank has failed, the others are told to end.
    Ranks that still run after 5 seconds are killed, such as one that SIGSTOP has stopped.

    Args:
        fn: the function that each rank calls, at the top level of a module. Arguments and results travel by pickle.
        nproc: number of ranks.
        *args: the arguments of ``fn``.
        max_restarts: how often all ranks are started again when one has failed.
        stop_timeout: seconds that ranks have to end in order when they are told to.
        say: is called with a sentence about ranks that do not end at once after another one has failed.
        killed: is filled with descriptions of those that had to be killed when the last rank failed.

    Raises:
        ValueError: ``fn`` stands in a script that is no file, as one from standard input.
        ChildFailedError: a rank raised or died. Its traceback has been logged.
        SignalException: a signal ended the launch before there were ranks, or they did not end in time.
    """
    check_found_by_processes(fn)
    # Older versions of the launcher have no such setting, and take 30 seconds.
    ending: dict[str, Any] = {"shutdown_timeout": END_SECONDS} if "shutdown_timeout" in vars(LaunchConfig) else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any port that is free
        local_addr="localhost",
        max_restarts=max_restarts,
        start_method="spawn",
        signals_to_handle=handled(LAUNCHERS),
        **ending,
    )
    # A batch system may also signal multiprocessing's helper process, which inherits the blocked signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    with _ended_soon(say, [] if killed is None else killed), signals_passed_on(stop_timeout) as received:
        try:
            with missing_main_left_out():
                results = elastic_launch(config, run_rank)(fn, args)
        except ChildFailedError as error:
            if received and error.get_first_failure()[1].exitcode == -signal.SIGTERM:
                # The rank was told to stop before it could react.
                raise SignalException(f"ended by {received[0].name}", sigval=signal.SIGTERM) from None
            raise
    return [results[rank] for rank in sorted(results)]


def handled(numbers: Iterable[signal.Signals]) -> str:
    """Returns the names of signals for torch's launcher: without SIGHUP if nohup has this process ignore it."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set[signal.Signals]()
    return ",".join(number.name for number in numbers if number not in ignored)


@contextmanager
def signals_passed_on(stop_timeout: float) -> Iterator[list[signal.Signals]]:
    """Passes signals on to the ranks, this process's children. Yields a list that holds the first signal once it came.

    The launcher itself would stop waiting for the ranks. But a rank ends only when the launcher has read its result. So
    the launcher would kill ranks that end in order.
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
def _ended_soon(say: Callable[[str], None], killed: list[str]) -> Iterator[None]:
    """Ends the other ranks within END_SECONDS after one has failed. Older launchers give them 30 seconds."""
    # The method is replaced because the launcher makes its processes itself, and has no setting for this time: the
    # shutdown_timeout of newer ones is for signals. Whoever ends ranks beside it, as a thread could, may be faster than
    # it looks: it would then blame one of those that were ended, and not the one that has failed.
    join = ProcessContext.join

    def end_first(context: Any, *args: Any, **kwargs: Any) -> Any:
        failed = [rank for rank, process in enumerate(context.processes) if process.exitcode]
        if failed:
            killed[:] = _end(context.processes, failed[0], say)
            context.sentinels = {
                context.processes[failed[0]].sentinel: failed[0]
            }  # so that it blames no rank that was ended
        return join(context, *args, **kwargs)

    ProcessContext.join = end_first  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ProcessContext.join = join  # type: ignore[method-assign]


def _end(ranks: Sequence[BaseProcess], failed: int, say: Callable[[str], None]) -> list[str]:
    """Ends the ranks that still run after one has failed. Returns descriptions of those that had to be killed.

    A rank that the kernel does not let die yet is left to the launcher.
    """
    running = {rank: process for rank, process in enumerate(ranks) if process.is_alive()}
    for process in running.values():
        process.terminate()
    _wait(running.values(), PATIENCE)
    late = {rank: _described(rank, process) for rank, process in running.items() if process.is_alive()}
    if not late:
        return []
    seconds = END_SECONDS - PATIENCE
    say(f"rank {failed} failed. In {seconds} s SIGKILL ends what still runs: {' and '.join(late.values())}")
    _wait(running.values(), seconds)
    killed = {rank: name for rank, name in late.items() if running[rank].is_alive()}
    for rank in killed:
        running[rank].kill()
    _wait(running.values(), END_SECONDS)
    return list(killed.values())


def _wait(processes: Iterable[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _described(rank: int, process: BaseProcess) -> str:
    state = ""
    with suppress(OSError):  # the process may have just ended
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return f"rank {rank} (process {process.pid}{', which is stopped' if state == 'T' else ''})"


def run_rank(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls ``fn(*args)`` as a rank. torchrun's report shows this function's name."""
    # Ctrl-C then ends the rank without a traceback, even while C++ waits for other ranks. So does torch's
    # PR_SET_PDEATHSIG when the launcher dies.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        # It was killed while this rank imported. The rank would wait for its store, or train with nobody watching.
        print("the launcher of this rank has died, so the rank ends", file=sys.stderr)
        sys.exit(1)
    if threads_of_rank() is None:  # as torchrun does
        torch.set_num_threads(1)
    return fn(*args)

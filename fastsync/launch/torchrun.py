"""Starting ranks on this machine with torchrun's launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .signals import STOP_SIGNALS, handling

LAUNCHERS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a launch. The launcher sets handlers for them and leaves them behind."""

END_SECONDS = 5
"""How long ranks have to end at once, before they are killed: those that still import do not listen."""


def launch_ranks(
    fn: Callable[..., Any], nproc: int, *args: Any, max_restarts: int = 0, stop_timeout: float = 30.0
) -> list[Any]:
    """Calls ``fn(*args)`` on ``nproc`` ranks, each a process of its own, and returns their results in rank order.

    The ranks find each other through the environment variables that torchrun sets, as
    ``fastsync.distributed.process_group`` reads them. SIGTERM and SIGUSR1 are passed on to the ranks as SIGTERM, so
    that they can end in order and return. After ``stop_timeout`` seconds, or at a second signal, they are ended. Ctrl-C
    ends ranks at once; those that still import print a traceback.

    Args:
        fn: what each rank does: a function at the top level of a module. Arguments and results travel by pickle.
        nproc: number of ranks.
        *args: what ``fn`` is called with.
        max_restarts: how often all ranks are started again when one has failed.
        stop_timeout: seconds that ranks have to end in order when they are told to.

    Raises:
        ChildFailedError: a rank raised or died. Its traceback has been logged.
        SignalException: a signal ended the launch before there were ranks, or they did not end in time.
    """
    # Older launchers have 30 seconds.
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
        signals_to_handle=",".join(number.name for number in LAUNCHERS),
        **ending,
    )
    # multiprocessing's helper, which a batch system may signal too, inherits what is blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    with _signals_passed_on(stop_timeout) as received:
        try:
            results = elastic_launch(config, run_rank)(fn, args)
        except ChildFailedError as error:
            if received and error.get_first_failure()[1].exitcode == -signal.SIGTERM:
                # It was told to stop before it could listen.
                raise SignalException(f"ended by {received[0].name}", sigval=signal.SIGTERM) from None
            raise
    return [results[rank] for rank in sorted(results)]


@contextmanager
def _signals_passed_on(stop_timeout: float) -> Iterator[list[signal.Signals]]:
    """Passes signals on to the ranks. Yields a list that holds the first signal once it came.

    The launcher's own way is to stop waiting for the ranks. But a rank that has returned stays until the launcher has
    read its result, so the launcher would kill ranks that end in order.
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


def run_rank(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls ``fn(*args)`` as a rank. torchrun's report has this name."""
    # From here on Ctrl-C ends it, also where it waits for others in C++, and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does
    return fn(*args)

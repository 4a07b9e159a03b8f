"""Copies of one environment in processes of their own: how they start, what is said of them, and how they end."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.async_vector_env import _async_worker

from ...launch.main_file import missing_main_left_out
from ...launch.signals import STOP_SIGNALS
from .interface import UNSEEN, CopiesDifferError, EnvironmentFailedError
from .lookup import EnvSource

SILENT_SECONDS = 20.0
"""Seconds after which a message names an environment that has not answered. The next one comes after twice as many."""
CLOSE_SECONDS = 10.0
"""Seconds that environments have to close after a training. Then their processes are killed."""
FAILED_CLOSE_SECONDS = 3.0
"""The same after an error. It is less than what the launcher leaves a rank beside one that has failed."""
EXIT_SECONDS = 5.0
"""Seconds that a process has to end after its connection has."""


class EnvironmentProcesses(AsyncVectorEnv):
    """A vector environment whose processes close their environments at the end, also when the rank has died.

    Each process has a process group, with what the environment starts, such as a simulator. Where it cannot close its
    environment in time, the group is killed. Ctrl-C and signals to a whole job do not reach it: the rank needs the
    process to save, and ends it afterwards.

    Args:
        makers: each makes an environment.
        name: the user's name of the environment.
        first_index: number of the first one, among those of all ranks.
        **options: those of gymnasium's class.

    Raises:
        EnvironmentFailedError: here and in every call, if a process ends by itself.
    """

    def __init__(
        self, makers: Sequence[Callable[[], gymnasium.Env[Any, Any]]], *, name: str, first_index: int, **options: Any
    ) -> None:
        self._name, self._first_index = name, first_index
        self.parent_pipes, self.processes = [], []
        _start_fork_server()
        try:
            with missing_main_left_out():
                super().__init__(makers, context="forkserver", worker=_work, **options)
        except BaseException:
            self.end(FAILED_CLOSE_SECONDS)
            raise

    def _check_spaces(self) -> None:
        """Is gymnasium's first call of the processes."""
        ends: Any = [_RankEnd(self, index, pipe) for index, pipe in enumerate(self.parent_pipes)]
        self.parent_pipes = ends
        try:
            super()._check_spaces()  # type: ignore[no-untyped-call]
        except EnvironmentFailedError:
            raise
        except RuntimeError as error:  # gymnasium raises no other one here
            raise CopiesDifferError(str(error)) from error

    def end(self, seconds: float) -> None:
        """Has the environments closed, and their processes ended, in so many seconds."""
        if self.closed:
            return
        self.closed = True
        for pipe in self.parent_pipes:
            if pipe is not None:
                with suppress(OSError):
                    pipe.send(("close", None))
                pipe.close()
        deadline = time.monotonic() + seconds
        late = []
        for index, process in enumerate(self.processes):
            if process.pid is None:  # it has not been started
                continue
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                late.append(index)
            if process.exitcode != 0:  # what it has started may still run
                _kill(process)
        if late and seconds:
            names = " and ".join(map(self.called, late))
            _say(f"{names} did not close within {seconds:g} s, so SIGKILL ended its process and what that has started")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Is called by ``close``."""
        self.end(0.0 if terminate else CLOSE_SECONDS if timeout is None else timeout)

    def called(self, index: int) -> str:
        """Returns what messages call an environment of this rank."""
        number = self._first_index + index
        which = f"environment {number}" if number < UNSEEN else f"environment {number - UNSEEN} of the evaluation"
        return f"{which} (env={self._name!r}, process {self.processes[index].pid})"

    def ended(self, index: int) -> EnvironmentFailedError:
        """Returns the error for an environment whose process has ended its connection."""
        process = self.processes[index]
        process.join(EXIT_SECONDS)
        code = process.exitcode
        if code is None:
            how = "has closed its connection"
        elif code >= 0:
            how = f"has ended by itself, with status {code}; what it printed may say why"
        else:
            how = f"was ended by {signal.Signals(-code).name}"
            how += "; was the memory used up?" if -code == signal.SIGKILL else ""
        return EnvironmentFailedError(f"{self.called(index)} {how}")

    def say_silent(self, since: int, seconds: float) -> None:
        """Names the environments that have not answered. Those before ``since`` have."""
        pipes: list[Any] = self.parent_pipes[since:]
        late = [self.called(since + number) for number, pipe in enumerate(pipes) if pipe and not pipe.has_answered(0.0)]
        _say(f"no answer for {seconds:g} s from {' and '.join(late)}; the training waits")


class _RankEnd:
    """The rank's end of the connection to an environment's process."""

    def __init__(self, owner: EnvironmentProcesses, index: int, pipe: Connection[Any, Any]) -> None:
        self._owner, self._index, self._pipe = owner, index, pipe
        self.close, self.poll = pipe.close, pipe.poll
        self._answers = select.poll()  # Connection.poll would make one each time
        self._answers.register(pipe.fileno(), select.POLLIN)

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    def send(self, command: Any) -> None:
        try:
            self._pipe.send(command)
        except ConnectionError as error:
            if self._owner.closed:
                raise
            raise self._owner.ended(self._index) from error

    def has_answered(self, seconds: float) -> bool:
        """Whether there is an answer, or the process has ended, within so many seconds."""
        return bool(self._answers.poll(1000 * seconds))

    def recv(self) -> Any:
        silent, said_after = 0.0, SILENT_SECONDS
        while not self.has_answered(said_after - silent):
            silent, said_after = said_after, 2 * said_after
            self._owner.say_silent(self._index, silent)
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._owner.ended(self._index) from error


class _WorkerEnd:
    """The process's end. Where the rank is gone, the process closes its environment and ends, without a word."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe

    def send(self, answer: Any) -> None:
        try:
            self._pipe.send(answer)
        except ConnectionError:
            sys.exit()

    def recv(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            sys.exit()


def _work(
    index: int, maker: Callable[[], gymnasium.Env[Any, Any]], pipe: Connection[Any, Any],
    rank_end: Connection[Any, Any], *others: Any,
) -> None:  # fmt: skip
    """Is what each process does."""
    with suppress(PermissionError):  # it leads a session already
        os.setpgid(0, 0)
    for number in (*STOP_SIGNALS, signal.SIGINT):
        # An ignored signal would be ignored by programs that the environment starts, too, which it ends by SIGTERM.
        signal.signal(number, _take_no_notice)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    rank_end.close()  # or this process would hold the connection open after the rank's end
    threading.Thread(target=_end_after_rank, args=(pipe.fileno(),), daemon=True).start()
    _async_worker(index, maker, _WorkerEnd(pipe), rank_end, *others)  # type: ignore[arg-type]


def _take_no_notice(number: int, frame: object) -> None:
    pass


def _end_after_rank(descriptor: int) -> None:
    """Kills this process and what it has started, if it still runs some seconds after the rank has left it."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)  # POLLHUP comes without being asked for
    hung_up.poll()
    time.sleep(CLOSE_SECONDS + 1)
    os.killpg(0, signal.SIGKILL)


def _start_fork_server() -> None:
    """Starts the process that the environments' are forked from. They then begin with SIGINT blocked."""
    # A fork server has no threads and no CUDA context, so it can be forked. A process that trains cannot.
    get_context("forkserver").set_forkserver_preload([EnvSource.__module__])
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _kill(process: BaseProcess) -> None:
    """Kills a process and its group."""
    assert process.pid is not None
    with suppress(ProcessLookupError):  # the group is empty, or the process has not come to make it
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _say(sentence: str) -> None:
    # Not sys.stderr: other ranks than rank 0 print into a file there, and rank 0 waits for them.
    print(f"fastsync train: {sentence}", file=sys.__stderr__ or sys.stderr, flush=True)

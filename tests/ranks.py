"""Runs a function on several ranks: fresh processes, one process group, a time limit, results in rank order.

``run_ranks`` is the only way in which the tests start ranks, so that none of them can hang or leave a process behind;
``on_ranks`` makes a test of what ranks do.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

# How long the other ranks may go on after one has failed, so that their errors can be reported as well: longer than
# they ask each other who is missing.
GRACE_SECONDS = 5.0
# How long a hanging rank gets to write down where it hangs.
STACK_SECONDS = 0.5
# Gloo's words for a time-out: of the receive that ran out of time, and of another one over the same connection.
GLOO_TIMED_OUT = "(Timed out waiting|Application timeout caused pair closure)"


class RankError(RuntimeError):
    """A rank raised or died. ``rank`` is the one that failed first; the message holds every traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RankTimeoutError(TimeoutError):
    """Some ranks did not finish in time. The message tells where each of them stood."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    shared_memory: bool = True,
    lost: Collection[int] = (),
) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` on ``world_size`` fresh ranks and returns their results in rank order.

    ``fn`` is a function at the top level of a module. ``args`` and results travel by pickle, tensors as copies. In each
    rank the default process group (``backend``) is initialised and torch runs on one thread. With NCCL in ``backend``
    rank r uses CUDA device r modulo the number of devices; ranks may share one. Without ``shared_memory`` ranks on the
    CPU send each other messages, as those of several hosts do. The ``lost`` ones are stopped or killed on their way:
    nobody waits for them, and their results are None.

    Raises:
        RankError: a rank raised (its traceback is in the message) or its process died.
        RankTimeoutError: not all ranks were done ``timeout`` seconds after the start, which includes importing torch.
    """
    call = pickle.dumps((fn, args))
    context = fresh_process_context()
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                arguments = (rank, world_size, call, name, timeout, backend, shared_memory)
                process = context.Process(target=_rank_main, args=arguments)
                process.start()
                processes.append(process)
            _wait_for_all([process for rank, process in enumerate(processes) if rank not in lost], deadline)
            _raise_first_failure(processes, folder, lost)
            _raise_if_running(processes, folder, timeout, lost)
        finally:
            for process in processes:
                process.kill()
                process.join()
        files = [_file(folder, rank, "result") for rank in range(world_size)]
        return [None if rank in lost else pickle.loads(file.read_bytes()) for rank, file in enumerate(files)]


def on_ranks(
    world_size: int | None = None,
    *,
    cases: Mapping[str, Iterable[Any]] | None = None,
    parametrized: Sequence[str] = (),
    before: Callable[[], object] | None = None,
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of what each of so many ranks does: ``body(rank, world_size, *parameters)``.

    What the body takes beyond the first two are the test's parameters and fixtures, which reach the ranks by pickle.
    Without a number the world size is a parameter too. ``options`` are those of ``run_ranks``; of ``parametrized`` ones
    the test's parameters tell the values. ``before`` is called before there are ranks.

    The ranks call the body for each combination of ``cases``, one after the other, each in a new process group: values
    by the parameter's name. Names with a comma between them have their values in tuples. ``shared_memory`` is that of
    ``run_ranks``, and the body need not take it.
    """
    combined = [
        {name: value for names, values in zip(cases, case, strict=True) for name, value in _named(names, values)}
        for case in (itertools.product(*cases.values()) if cases else [])
    ]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        _, given, *all_parameters = inspect.signature(body).parameters.values()
        parameters = [each for each in all_parameters if not combined or each.name not in combined[0]]
        taken = [each.name for each in all_parameters]

        def on_a_rank(rank: int, world_size: int, *arguments: Any) -> None:
            told = dict(zip((each.name for each in parameters), arguments, strict=True))
            random_state = torch.get_rng_state()
            for number, case in enumerate(combined or [{}]):
                if combined:  # each begins with what a fresh rank has
                    torch.set_default_device(None)
                    torch.set_default_dtype(torch.float32)
                    renew_group(number, case.get("shared_memory"))
                    torch.set_rng_state(random_state)
                own = {name: value for name, value in case.items() if name in taken}
                try:
                    body(rank, world_size, **told, **own)
                except BaseException as error:
                    if case and hasattr(error, "add_note"):
                        error.add_note(f"the case was {case}")
                    raise

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            size = arguments[given.name] if world_size is None else world_size
            told = {name: arguments[name] for name in parametrized}
            if before is not None:
                before()
            run_ranks(test, size, *(arguments[each.name] for each in parameters), **options, **told)

        told = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in parametrized]
        of_size = [given] if world_size is None else []
        test.__signature__ = inspect.Signature([*of_size, *parameters, *told])  # type: ignore[attr-defined]
        test.on_a_rank = on_a_rank  # type: ignore[attr-defined]
        return test

    return decorate


def pair_of(rank: int, world_size: int, **options: Any) -> dist.ProcessGroup:
    """The group of this rank and its neighbour. Pairs may each have a case of their own, and wait at the same time."""
    pairs = [dist.new_group([first, first + 1], **options) for first in range(0, world_size, 2)]
    return pairs[rank // 2]


def _named(names: str, values: Any) -> Iterable[tuple[str, Any]]:
    return zip(names.split(", "), values, strict=True) if "," in names else [(names, values)]


def fresh_process_context() -> BaseContext:
    """Starts processes that know nothing of this one.

    Importing torch takes seconds. So where there is no GPU, whose driver must not be carried over a fork, they are
    forked from a server that has imported all that ``tests.preload`` names, and has done nothing else.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def open_group(file: str, rank: int, world_size: int, *, backend: str = "gloo", timeout: float = 120.0) -> None:
    """Opens the default process group by way of a file that is new, and returns once all ranks are connected.

    A rank that ended before that would break off connections that others still wait for.
    """
    store, limit = dist.FileStore(file, world_size), timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    store.set(f"connected {rank}", "")
    store.wait([f"connected {other}" for other in range(world_size)], limit)


_reopen: Callable[[int], None]
"""Opens the default process group of this rank once more."""


def renew_group(number: int, shared_memory: bool | None = None) -> None:
    """On a rank: opens the default process group anew, as for fresh ranks, for the case with this number from 0."""
    if shared_memory is not None:
        os.environ["FASTSYNC_SHARED_MEMORY"] = str(int(shared_memory))
    if number > 0:
        close_group()
        _reopen(number)


def close_group() -> None:
    """Ends the default process group, if there is one, and what is left of models in it."""
    if not dist.is_initialized():
        return
    world = dist.group.WORLD
    dist.destroy_process_group()
    gc.collect()  # DDP is part of reference cycles and holds the group
    # Whoever ends the group waits for its threads, which may want the GIL. This lets go of it, unlike DDP.
    del world


def _rank_main(
    rank: int, world_size: int, call: bytes, folder_name: str, timeout: float, backend: str, shared_memory: bool
) -> None:
    folder = Path(folder_name)
    os.environ["FASTSYNC_SHARED_MEMORY"] = str(int(shared_memory))
    with open(os.devnull, "w") as nowhere:  # what ranks print is no output of the tests
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    faulthandler.register(signal.SIGUSR1, file=_file(folder, rank, "stack").open("w"), all_threads=True)
    try:
        torch.set_num_threads(1)
        if "nccl" in backend:
            torch.cuda.set_device(rank % torch.cuda.device_count())
            if world_size > torch.cuda.device_count():
                # NCCL refuses before 2.30, unless they look as if they were on different hosts.
                os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_MULTI_RANK_GPU_ENABLE="1")
        # DDP and optimizers import it; imported while a group is open, it keeps the group's threads alive until the
        # interpreter shuts down, which may then abort.
        importlib.import_module("torch._dynamo")
        global _reopen

        def _reopen(number: int) -> None:
            open_group(str(folder / f"store{number}"), rank, world_size, backend=backend, timeout=timeout)

        _reopen(0)
        fn, args = pickle.loads(call)
        result = pickle.dumps(getattr(fn, "on_a_rank", fn)(rank, world_size, *args))
        close_group()
        _file(folder, rank, "result").write_bytes(result)
    except BaseException:
        # The monotonic clock is the machine's, so it orders the failures of different processes.
        failed_at = time.monotonic()
        _file(folder, rank, "error").write_bytes(pickle.dumps((failed_at, traceback.format_exc())))
        sys.stdout.flush()
        sys.stderr.flush()
        # A process group whose peers are stuck may block in its destructor: leave without running any.
        os._exit(1)


def _wait_for_all(processes: Sequence[BaseProcess], deadline: float) -> None:
    """Returns when all have ended, when the deadline has passed, or a moment after one has failed."""
    while running := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        wait([process.sentinel for process in running], timeout=remaining)


def _raise_first_failure(processes: Sequence[BaseProcess], folder: Path, lost: Collection[int]) -> None:
    failures: list[tuple[float, int, str]] = []
    for rank, process in enumerate(processes):
        if not process.exitcode or (rank in lost and process.exitcode < 0):
            continue
        if _file(folder, rank, "error").exists():
            failed_at, text = pickle.loads(_file(folder, rank, "error").read_bytes())
        else:
            # A rank that could not even write its error died first: the others only noticed that it was gone.
            code = process.exitcode
            failed_at, text = 0.0, f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        failures.append((failed_at, rank, text))
    if failures:
        failures.sort()
        rank = failures[0][1]
        reports = "\n".join(f"rank {rank}:\n{text}" for _, rank, text in failures)
        raise RankError(rank, f"rank {rank} of {len(processes)} failed first\n{reports}")


def _raise_if_running(processes: Sequence[BaseProcess], folder: Path, timeout: float, lost: Collection[int]) -> None:
    running = {rank: process for rank, process in enumerate(processes) if process.exitcode is None and rank not in lost}
    if not running:
        return
    for rank, process in running.items():
        # Without the handler, which a rank that is still importing has not set up, the signal would end the process.
        if process.pid is not None and _file(folder, rank, "stack").exists():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    stacks = "\n".join(f"rank {rank} stood at:\n{_read_stack(folder, rank)}" for rank in running)
    raise RankTimeoutError(f"ranks {list(running)} of {len(processes)} did not finish within {timeout:g} s\n{stacks}")


def _read_stack(folder: Path, rank: int) -> str:
    file = _file(folder, rank, "stack")
    return file.read_text() if file.exists() else "its start: it was still importing"


def _file(folder: Path, rank: int, kind: Literal["result", "error", "stack"]) -> Path:
    return folder / f"{rank}.{kind}"

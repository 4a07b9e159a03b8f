"""Commands and scripts as users run them, in processes that are forked from the tests' server.

Interpreters of their own would import torch for seconds. What has to hold for these, a few tests show with real ones.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from fastsync.launch import supervisor, torchrun
from tests.ranks import fresh_process_context


def until(condition: Callable[[], object], what: str, timeout: float = 150.0) -> None:
    """Waits for it."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout:g} s"
        time.sleep(0.02)


def _state_and_group(pid: int | str) -> tuple[str, int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
        return state.replace("Z", ""), int(group)
    return "", 0


def state_of(pid: int) -> str:
    """Of a process, as in proc(5); nothing where it is gone, or only waits for a parent that asks for its status."""
    return _state_and_group(pid)[0]


def runs_in_group(group: int) -> bool:
    """Whether a process of the group has not ended yet."""
    pids = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
    return any(state and its_group == group for state, its_group in map(_state_and_group, pids))


@contextmanager
def forked_ranks(start_method: str | None = None) -> Iterator[None]:
    """Launchers fork their ranks from the server, or start them by another method of multiprocessing's."""
    start_method, launch = start_method or fresh_process_context().get_start_method(), torchrun.elastic_launch
    before, supervisor.START_METHOD = supervisor.START_METHOD, start_method

    def launch_forked(config: torchrun.LaunchConfig, entry_point: object) -> object:
        return launch(replace(config, start_method=start_method), entry_point)

    torchrun.elastic_launch = launch_forked
    try:
        yield
    finally:
        torchrun.elastic_launch = launch
        supervisor.START_METHOD = before


class Command:
    """``main(words)`` as the only work of a process, in a session of its own, and ranks that it launches.

    What ``main`` returns is its exit status. ``variables`` are set in its environment.
    """

    def __init__(self, main: Callable[[Sequence[str]], object], folder: Path, *words: str, **variables: str) -> None:
        self._said = [Path(tempfile.mkstemp(dir=folder, suffix=f".std{each}")[1]) for each in ("out", "err")]
        arguments = (main, folder, words, variables, self._said)
        self._process = fresh_process_context().Process(target=_main, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def out(self) -> str:
        return self._said[0].read_text()

    @property
    def err(self) -> str:
        return self._said[1].read_text()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Its exit status, once it has ended."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"not done within {timeout:g} s\n{self.out}{self.err}"
        return self._process.exitcode

    def kill(self) -> None:
        """Ends it, its ranks, and what else it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        until(lambda: not runs_in_group(self.pid), "the end of all that was killed")


def _main(
    main: Callable[[Sequence[str]], object],
    folder: Path,
    words: Sequence[str],
    variables: dict[str, str],
    said: list[Path],
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ |= variables
    torch.set_num_threads(1)
    _write_to(*said)
    # It has no server, and has done nothing so far that a fork could not take along, unless there is a GPU.
    with forked_ranks("spawn" if torch.cuda.is_available() else "fork"):
        sys.exit(main(words))


def _write_to(out: Path, err: Path) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run_script(script: Path, *words: str, nproc: int) -> str:
    """Runs a script to its end, as torchrun does on so many ranks; without any, as ``python`` does.

    Returns the last line that it prints.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        said.touch()
        if nproc:
            try:
                with forked_ranks():
                    torchrun.launch_ranks(_run_script, nproc, script, words, said)
            except ChildFailedError as error:
                raise AssertionError(_all_of(folder)) from error
        else:
            process = fresh_process_context().Process(target=_run_script, args=(script, words, said))
            process.start()
            try:
                process.join()
            finally:
                process.kill()  # where a time limit has ended the wait
            assert process.exitcode == 0, _all_of(folder)
        return said.read_text().splitlines()[-1]


def _all_of(folder: str) -> str:
    return "".join(path.read_text() for path in Path(folder).iterdir())


def _run_script(script: Path, words: Sequence[str], said: Path) -> None:
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)  # as torchrun does
    _write_to(said, said.with_suffix(".err"))
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")

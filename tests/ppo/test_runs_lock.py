"""A run is one training's: another is told who trains there, changes nothing, and comes in when that is dead."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from fastsync.ppo.ppo import Settings
from fastsync.ppo.preflight import check_run
from fastsync.ppo.runs.folder import CHECKPOINTS, close_run, find_run, open_run
from fastsync.ppo.runs.lock import LOCK
from tests.ppo.test_runs_folder import everything, save
from tests.ranks import fresh_process_context


def hold_a_run(runs_dir: str, said: Connection) -> None:
    os.setsid()
    open_run(Settings(runs_dir=runs_dir, run_name="run", resume="auto"), 1)
    if os.fork() > 0:  # the other is as environments in processes, which may outlive their rank for a moment
        said.send("open")
    time.sleep(60)


@contextmanager
def a_run_that_is_alive(runs_dir: Path) -> Iterator[BaseProcess]:
    """``open_run`` by another process, in a group of its own."""
    context = fresh_process_context()
    said, saying = context.Pipe(duplex=False)
    process = context.Process(target=hold_a_run, args=(str(runs_dir), saying))
    process.start()
    try:
        assert said.recv() == "open"
        yield process
    finally:
        assert process.pid
        os.killpg(process.pid, signal.SIGKILL)
        process.join()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return Settings(runs_dir=str(tmp_path), run_name="run", resume="auto")


@pytest.mark.parametrize("exists", [False, True])
def test_a_run_that_is_alive_is_left_alone(settings: Settings, tmp_path: Path, exists: bool):
    run = tmp_path / "run"
    if exists:
        save(run, 10)
    with a_run_that_is_alive(tmp_path) as process:
        save(run, 10, 20)
        (run / CHECKPOINTS / "step-000000030.pt.tmp").write_bytes(b"being written")
        before = everything(tmp_path)
        message = rf"run is in use: process {process.pid} on {socket.gethostname()}, which began at 20.*trains there"
        file = str(run / CHECKPOINTS / "step-000000010.pt")
        for resume in ("auto", str(run), file):
            resumed = replace(settings, resume=resume, learning_rate=0.5)
            for door in (open_run, find_run, check_run):
                with pytest.raises(ValueError, match=message):
                    door(resumed, 1)
        assert everything(tmp_path) == before
        process.kill()
        process.join()
        # The process that it started is still there.
        _, checkpoint, _ = open_run(settings, 1)
        assert checkpoint is not None
        assert checkpoint.step == 20
        close_run(run)
    assert not (run / LOCK).exists()


def test_who_is_refused_keeps_nobody_out(settings: Settings, tmp_path: Path):
    save(tmp_path / "run", 10)
    with pytest.raises(ValueError, match="cannot be resumed"):
        open_run(replace(settings, hidden_sizes=(8,)), 1)
    assert not (tmp_path / "run" / LOCK).exists()
    with a_run_that_is_alive(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(lock: object) -> None:
        raise OSError(38, "Function not implemented")

    save(tmp_path / "run", 10)
    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    _, _, notes = open_run(settings, 1)
    assert notes[0] == (
        f"{tmp_path / 'run'} cannot be locked (Function not implemented): see to it that nobody else trains there"
    )
    close_run(tmp_path / "run")

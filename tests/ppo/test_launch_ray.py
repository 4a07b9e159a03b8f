"""Ranks as workers of Ray, the real one, where it is installed: `make test-trainers` has an environment with it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastsync.ppo.cli import Launch, launch
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.checkpoints import load_checkpoint

pytestmark = pytest.mark.timeout(600)  # Ray's processes import for long on few cores


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def figures(run: Path) -> list[str]:
    return (run / "progress.csv").read_text().splitlines()[1:]


def kill_who_saves(run: Path, seen: list[str]) -> None:
    """Kills the rank that writes checkpoints, once there is one; its lock says which it is. Notes the first figures."""
    while not list((run / "checkpoints").glob("step-*.pt")):
        time.sleep(0.05)
    host, pid, _ = (run / ".lock").read_text().split()
    assert host == socket.gethostname()
    seen += figures(run)[:1]
    os.kill(int(pid), signal.SIGKILL)


def test_the_trainer_goes_on_from_its_last_checkpoint_when_a_worker_dies(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/x"
    seen: list[str] = []
    killer = threading.Thread(target=kill_who_saves, args=(run, seen), daemon=True)
    killer.start()
    settings = Settings(run_name="x", total_steps=100_000, checkpoint_interval=0.5)
    assert launch(Launch(launcher="ray", nproc=2, max_restarts=1, settings=settings)) == 0
    killer.join()
    assert figures(run)[:1] == seen  # with their times: it has not begun anew
    assert load_checkpoint(max((run / "checkpoints").glob("step-*.pt"))).step >= 100_000

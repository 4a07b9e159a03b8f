"""Ranks as workers of Ray, the real one, where it is installed: `make test-trainers` has an environment with it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from fastsync.integrations.ray import launch_on_ray
from fastsync.ppo.cli import Launch, launch
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.checkpoints import load_checkpoint
from tests.refused import refused

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


@pytest.mark.parametrize(
    ("num_gpus", "use_gpu", "backend"),
    [(2, None, "nccl"), (1, None, "gloo"), (2, False, "gloo"), (2, True, "nccl"), (1, True, None)],
)
def test_workers_take_the_device_that_is_asked_for(
    num_gpus: int, use_gpu: bool | None, backend: str | None, monkeypatch: pytest.MonkeyPatch
):
    """With something in the place of Ray."""
    ray = mock.MagicMock()
    ray.cluster_resources.return_value = {"CPU": 8.0, "GPU": float(num_gpus)}
    for name in ("ray", "ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, ray)
    if backend is None:
        refused(lambda: launch_on_ray(print, 2, use_gpu=use_gpu), "Ray's cluster has 1 GPUs, for 2 ranks;")
        return
    launch_on_ray(print, 2, use_gpu=use_gpu)
    assert ray.TorchConfig.call_args.kwargs["backend"] == backend
    ray.ScalingConfig.assert_called_once_with(num_workers=2, use_gpu=backend == "nccl")

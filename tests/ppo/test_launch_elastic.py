"""Elastic torchrun: two agents, here on one machine, of which one leaves and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fastsync.ppo.runs.checkpoints import Checkpoint, load_checkpoint
from tests.ppo.test_launch_torchrun import LIMIT, ROOT, children, free_port

# Otherwise agents that were there before do not tell one that joins where to meet: it waits, and all give up.
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def agent(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1"]
    settings = f"last_call_timeout=2,is_host={port > 0}"  # how many seconds an agent that could begin waits for more
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{abs(port)}", "--rdzv-conf", settings]
    training = ["-m", "fastsync.train", "--run-name", "x", "--resume", "auto", "--checkpoint-interval", "0.2"]
    words = [*command, *rendezvous, "--rdzv-id", "x", *training, "--total-steps", "100000000", "--timeout", "20"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=folder,
        env=os.environ | ELASTIC | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=(folder / "said").open("a"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def checkpoint_of(world_size: int, after: int, folder: Path) -> Checkpoint:
    """Waits for one that so many ranks have saved after that step."""
    deadline = time.monotonic() + 2 * LIMIT
    while time.monotonic() < deadline:
        with suppress(ValueError, RuntimeError, OSError):  # none yet, or removed meanwhile
            newest = load_checkpoint(max((folder / "runs/x/checkpoints").glob("step-*.pt")))
            if newest.world_size == world_size and newest.step > after:
                return newest
        time.sleep(0.1)
    pytest.fail(f"{world_size} ranks saved nothing after step {after}\n{(folder / 'said').read_text()}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_machine_leaves_and_comes_back(tmp_path: Path):
    port = free_port()
    agents = [agent(tmp_path, port), agent(tmp_path, -port)]
    try:
        of_two = checkpoint_of(2, 0, tmp_path)
        rank = children(agents[1].pid)
        for pid in (agents[1].pid, *rank):
            os.kill(pid, signal.SIGKILL)
        of_one = checkpoint_of(1, of_two.step, tmp_path)
        agents.append(agent(tmp_path, -port))
        checkpoint_of(2, of_one.step, tmp_path)
    finally:
        for each in agents:
            each.send_signal(signal.SIGTERM)
        for each in agents:
            each.wait(LIMIT)
    going_on = [line for line in (tmp_path / "said").read_text().splitlines() if line.startswith("resuming from step")]
    assert len(going_on) == 2

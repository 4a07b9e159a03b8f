"""Runs that are killed or stopped, and gone on with: bitwise the runs that were not, where that can be."""

from __future__ import annotations

import csv
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fastsync.cli import main
from fastsync.ppo.cli import option_words
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.checkpoints import Checkpoint, CheckpointFolder
from fastsync.ppo.runs.folder import check_run
from fastsync.ppo.session import Session
from tests.forked import Command
from tests.models import group_of_one
from tests.ppo.test_runs_checkpoints import assert_same

# Whatever a run carries from one update to the next.
FULL = Settings(
    total_steps=3_000, num_envs=4, num_steps=16, num_epochs=2, compression="fp16+ef", precision="fp16",
    norm_observations=True, norm_rewards=True, lr_schedule="adaptive", target_kl=0.01,
    checkpoint_interval=0, resume="auto",
)  # fmt: skip
LIMIT = 120.0


def start(settings: Settings, world_size: int) -> Command:
    words = ("train", "--nproc", str(world_size), *option_words(settings))
    return Command(main, Path(settings.runs_dir), *words)


def finish(settings: Settings, world_size: int) -> str:
    """A run to its end. Returns what it says."""
    job = start(settings, world_size)
    try:
        assert job.wait(LIMIT) == 0, job.err
    finally:
        job.kill()
    return job.out


def newest_of(run: Path) -> Checkpoint:
    found = CheckpointFolder(run / "checkpoints", keep=3).newest()
    assert found is not None
    return found[1]


def newest(settings: Settings) -> Checkpoint:
    return newest_of(Path(settings.runs_dir) / str(settings.run_name))


def assert_same_end(run: Path, other: Path) -> None:
    """Bitwise the same training."""
    for part in ("step", "update", "learner", "environments", "window", "best_return"):
        assert_same(getattr(newest_of(run), part), getattr(newest_of(other), part), f"the end differs: {part}")


def progress(settings: Settings) -> list[dict[str, str]]:
    """progress.csv without what clocks say, and what ranks use of the machine."""
    rows = csv.DictReader((Path(settings.runs_dir) / str(settings.run_name) / "progress.csv").open())
    left_out = re.compile("second|rank[0-9]+/(cores|memory)")
    return [{name: value for name, value in row.items() if not left_out.search(name)} for row in rows]


def num_rows(settings: Settings) -> int:
    """Updates that progress.csv tells of."""
    path = Path(settings.runs_dir) / str(settings.run_name) / "progress.csv"
    return max(0, len(path.read_text().splitlines()) - 1) if path.exists() else 0


@pytest.mark.sampled(2)
@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("env", "sync"),
    [
        ("CartPole-v1", "gradients"),
        pytest.param("Pendulum-v1", "gradients", marks=pytest.mark.slow),
        ("CartPole-v1", "diloco"),
    ],
)
def test_a_run_that_is_killed_anywhere_ends_bitwise_as_one_that_is_not(tmp_path: Path, env: str, sync: Any):
    """In its own vectorisation, and as copies; where ranks average gradients, or learn by themselves for 5 rollouts."""
    every = 1 if sync == "gradients" else 5
    whole = replace(FULL, env=env, sync=sync, sync_every=every, runs_dir=str(tmp_path), run_name="whole")
    finish(whole, 2)
    assert sum(float(row["speed/wire_bytes"]) > 0 for row in progress(whole)) == -(-num_rows(whole) // every)

    killed = replace(whole, run_name="killed")
    chance = random.Random(env)
    resumed_from = []
    for part in (0.3, 0.6):
        job = start(killed, 2)
        deadline = time.monotonic() + LIMIT
        try:
            while num_rows(killed) < part * num_rows(whole) and job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.03))  # an update with its checkpoint takes about as long
            assert job.poll() is None, f"the run has ended too early to be killed: {job.err}"
        finally:
            job.kill()
        resumed_from.append(newest(killed).step)
    finish(killed, 2)

    assert resumed_from == sorted(set(resumed_from))
    assert resumed_from[-1] < newest(whole).step
    assert_same_end(tmp_path / "killed", tmp_path / "whole")
    assert progress(killed) == progress(whole)


@pytest.mark.parametrize("sync", ["local_sgd", "diloco"])
def test_weights_are_common_at_every_end_of_a_run_that_is_made_longer(tmp_path: Path, sync: Any):
    settings = replace(FULL, sync=sync, sync_every=3, total_steps=500, runs_dir=str(tmp_path), run_name="run")
    finish(settings, 2)  # which compares the ranks' weights
    assert newest(settings).update % 3  # so that the last outer step came early
    longer = replace(settings, total_steps=1_000)
    finish(longer, 2)
    with pytest.raises(ValueError, match=f"sync='gradients' cannot resume a run with sync='{sync}'"):
        check_run(replace(longer, sync="gradients", sync_every=1), 2)


def test_a_run_goes_on_with_other_settings_and_another_world_size(tmp_path: Path):
    settings = replace(FULL, total_steps=500, runs_dir=str(tmp_path), run_name="run")
    finish(settings, 2)
    step = newest(settings).step
    said = finish(replace(settings, total_steps=1_000, precision="fp32", fused=False), 1)
    assert newest(settings).step >= 1_000 > step
    assert "the world size is 1 from here on, it was 2" in said
    assert "precision is 'fp32' from here on, it was 'fp16'" in said
    assert "the residuals of error feedback are dropped" in said
    assert "the environments of ranks [0] could not be restored exactly" in said
    assert "this run is not bitwise what it would have been without the interruption" in said


class OnGpu:
    """A part of a learner that is on a GPU, which a fake tensor needs none for."""

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": {"weight": torch.empty(2, device="cuda")}, "state": [torch.empty(3, device="cuda"), 1]}


def test_what_ranks_gather_and_save_lies_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gathered = list[Any]()
    parts = ("policy", "optimizer", "scaler", "sync", "learning_rate", "outer")
    ppo: Any = SimpleNamespace(**{name: OnGpu() for name in parts}, reward_normalizer=None, step=1, update=1)
    ppo.streams = SimpleNamespace(num_draws=1)
    ppo.exchange = SimpleNamespace(gather_objects=lambda mine: [gathered.append(mine)])
    environments: Any = SimpleNamespace(state=dict)
    nothing: Any = None
    with group_of_one(), FakeTensorMode():
        opened = tmp_path, None, list[str]()
        session = Session(FULL, environments, torch.device("cpu"), nothing, nothing, opened)
        session._ppo = ppo
        monkeypatch.setattr(session._checkpoints, "save", lambda checkpoint, _: gathered.append(checkpoint.learner))
        session._write(0.0)
    mine, learner = gathered
    of_part = [each for each in tree_leaves((mine, learner)) if isinstance(each, torch.Tensor)]
    assert len(of_part) > 2 * len(parts)
    assert {each.device.type for each in of_part} == {"cpu"}

"""Runs that are killed or stopped, and gone on with: bitwise the runs that were not, where that can be."""

from __future__ import annotations

import csv
import random
import time
from contextlib import redirect_stdout
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.runs.checkpoints import Checkpoint, CheckpointFolder
from fastsync.ppo.runs.folder import check_run
from tests.ppo.test_runs_checkpoints import assert_same
from tests.ranks import fresh_process_context, open_group

# Whatever a run carries from one update to the next.
FULL = Settings(
    total_steps=3_000, num_envs=4, num_steps=16, num_epochs=2, compression="fp16+ef", precision="fp16",
    norm_observations=True, norm_rewards=True, lr_schedule="adaptive", target_kl=0.01,
    checkpoint_interval=0, resume="auto",
)  # fmt: skip
LIMIT = 120.0


def run_once(settings: Settings, folder: str, store: str, rank: int, world_size: int) -> None:
    """One rank's life. What it says goes into the file "said"."""
    torch.set_num_threads(1)
    open_group(store, rank, world_size)
    with (Path(folder) / "said").open("a") as said, redirect_stdout(said):
        train(settings, torch.device("cpu"))


class Job:
    """Ranks, each a process of its own."""

    def __init__(self, settings: Settings, world_size: int, folder: Path) -> None:
        context = fresh_process_context()
        store = folder / f"store-{time.monotonic_ns()}"
        self.ranks: list[BaseProcess] = [
            context.Process(target=run_once, args=(settings, str(folder), str(store), rank, world_size))
            for rank in range(world_size)
        ]
        for rank in self.ranks:
            rank.start()

    def wait(self, seconds: float) -> bool:
        """Whether all ranks have ended by then."""
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        return all(rank.exitcode is not None for rank in self.ranks)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()


def finish(settings: Settings, world_size: int, folder: Path) -> None:
    job = Job(settings, world_size, folder)
    try:
        assert job.wait(LIMIT), "the run did not end in time"
        assert [rank.exitcode for rank in job.ranks] == [0] * world_size
    finally:
        job.kill()


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
    """progress.csv without what clocks say."""
    rows = csv.DictReader((Path(settings.runs_dir) / str(settings.run_name) / "progress.csv").open())
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


def num_rows(settings: Settings) -> int:
    """Updates that progress.csv tells of."""
    path = Path(settings.runs_dir) / str(settings.run_name) / "progress.csv"
    return max(0, len(path.read_text().splitlines()) - 1) if path.exists() else 0


@pytest.mark.parametrize(
    ("env", "sync"), [("CartPole-v1", "gradients"), ("Pendulum-v1", "gradients"), ("CartPole-v1", "diloco")]
)
def test_a_run_that_is_killed_anywhere_ends_bitwise_as_one_that_is_not(tmp_path: Path, env: str, sync: Any):
    """In its own vectorisation, and as copies; where ranks average gradients, or learn by themselves for 5 rollouts."""
    every = 1 if sync == "gradients" else 5
    whole = replace(FULL, env=env, sync=sync, sync_every=every, runs_dir=str(tmp_path), run_name="whole")
    finish(whole, 2, tmp_path)
    assert sum(float(row["speed/wire_bytes"]) > 0 for row in progress(whole)) == -(-num_rows(whole) // every)

    killed = replace(whole, run_name="killed")
    chance = random.Random(env)
    resumed_from = []
    for part in (0.3, 0.6):
        job = Job(killed, 2, tmp_path)
        deadline = time.monotonic() + LIMIT
        try:
            while num_rows(killed) < part * num_rows(whole) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.03))  # an update with its checkpoint takes about as long
            assert not all(rank.exitcode is not None for rank in job.ranks), "the run has ended too early to be killed"
        finally:
            job.kill()
        resumed_from.append(newest(killed).step)
    finish(killed, 2, tmp_path)

    assert resumed_from == sorted(set(resumed_from))
    assert resumed_from[-1] < newest(whole).step
    assert_same_end(tmp_path / "killed", tmp_path / "whole")
    assert progress(killed) == progress(whole)


@pytest.mark.parametrize("sync", ["local_sgd", "diloco"])
def test_weights_are_common_at_every_end_of_a_run_that_is_made_longer(tmp_path: Path, sync: Any):
    settings = replace(FULL, sync=sync, sync_every=3, total_steps=500, runs_dir=str(tmp_path), run_name="run")
    finish(settings, 2, tmp_path)  # which compares the ranks' weights
    assert newest(settings).update % 3  # so that the last outer step came early
    longer = replace(settings, total_steps=1_000)
    finish(longer, 2, tmp_path)
    with pytest.raises(ValueError, match=f"sync='gradients' cannot resume a run with sync='{sync}'"):
        check_run(replace(longer, sync="gradients", sync_every=1), 2)


def test_a_run_goes_on_with_other_settings_and_another_world_size(tmp_path: Path):
    settings = replace(FULL, total_steps=500, runs_dir=str(tmp_path), run_name="run")
    finish(settings, 2, tmp_path)
    step = newest(settings).step
    finish(replace(settings, total_steps=1_000, precision="fp32", fused=False), 1, tmp_path)
    assert newest(settings).step >= 1_000 > step
    said = (tmp_path / "said").read_text()
    assert "the world size is 1 from here on, it was 2" in said
    assert "precision is 'fp32' from here on, it was 'fp16'" in said
    assert "the residuals of error feedback are dropped" in said
    assert "the environments of ranks [0] could not be restored exactly" in said
    assert "this run is not bitwise what it would have been without the interruption" in said

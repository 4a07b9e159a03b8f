"""Runs that are killed or stopped, and gone on with: bitwise the runs that were not, where that can be."""

from __future__ import annotations

import csv
import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fastsync.cli import main
from fastsync.ppo.cli import option_words
from fastsync.ppo.evaluate import find_checkpoint
from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.runs.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint
from fastsync.ppo.runs.folder import check_run
from fastsync.ppo.session import Session
from tests.forked import Command
from tests.models import group_of_one
from tests.ppo.test_runs_checkpoints import assert_same
from tests.ranks import RankError, run_ranks

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
    ppo.streams = [SimpleNamespace(num_draws=1)]
    ppo.exchange = SimpleNamespace(gather_objects=lambda mine: gathered.append(mine) or [mine])
    space = spaces.Discrete(2)
    environments: Any = SimpleNamespace(state=dict, single_observation_space=space, single_action_space=space)
    nothing: Any = None
    with group_of_one(), FakeTensorMode():
        opened = tmp_path, None, list[str]()
        session = Session(FULL, [environments], torch.device("cpu"), nothing, nothing, opened, tmp_path)
        session._ppo = ppo
        ppo.policy.recurrent, states = True, torch.zeros(3, 2, device="cuda")
        ppo.collectors = [SimpleNamespace(memory=SimpleNamespace(states=states))]
        monkeypatch.setattr(session._checkpoints, "save", lambda checkpoint, _: gathered.append(checkpoint.learner))
        session._write(0.0)
    mine, learner = gathered
    of_part = [each for each in tree_leaves((mine, learner)) if isinstance(each, torch.Tensor)]
    assert len(of_part) > 2 * len(parts)
    assert {each.device.type for each in of_part} == {"cpu"}


def written(file: Path, size: int, actions: int | list[float], reward: float = 1.0) -> dict[str, str]:
    file.write_text(json.dumps([size, actions, reward]), encoding="utf-8")
    return {"file": str(file)}


def in_file(folder: Path) -> Settings:
    return Settings(
        env="tests.toy_envs:read_from", env_kwargs=written(folder / "env", 3, 2), total_steps=100, num_envs=2,
        num_steps=16, num_epochs=1, runs_dir=str(folder), run_name="run", resume="auto",
    )  # fmt: skip


def train_once(rank: int, world_size: int, settings: Settings) -> None:
    train(settings, torch.device("cpu"))


def test_an_environment_of_another_shape_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = in_file(tmp_path)
    run_ranks(train_once, 1, settings)
    for size, actions, message in (
        (
            4,
            2,
            r"env='tests.toy_envs:read_from' has observations of shape (4,), and the run's checkpoint was made with ",
        ),
        (3, 5, r"env='tests.toy_envs:read_from' has actions of 5 choices, and the run's checkpoint was made with "),
    ):
        written(tmp_path / "env", size, actions)
        with pytest.raises(RankError, match=re.escape(message)):
            run_ranks(train_once, 1, replace(settings, total_steps=200))
        words = ["--config", str(tmp_path / "run" / "settings.yaml"), "--resume", "auto", "--total-steps", "200"]
        assert main(["train", *words]) == 2
        assert message in capsys.readouterr().err
        assert main(["eval", str(tmp_path / "run")]) == 2
        assert message in capsys.readouterr().err


def test_an_environment_with_other_bounds_of_actions_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = replace(in_file(tmp_path), action_distribution="beta", env_kwargs=written(tmp_path / "env", 3, [-1, 1]))
    run_ranks(train_once, 1, settings)
    played = ["eval", str(tmp_path / "run"), "--episodes", "1"]
    assert main(played) == 0
    other = json.dumps(written(tmp_path / "other", 3, [-1, 2]))
    assert main([*played, "--env-kwargs", other]) == 2
    boxes = (
        "has actions Box(-1.0, 2.0, (1,), float32), and the training's environment has Box(-1.0, 1.0, (1,), float32)"
    )
    assert boxes in capsys.readouterr().err
    written(tmp_path / "env", 3, [-1, 2])
    message = "has actions in bounds -1.0 to 2.0, and the run's checkpoint was made with actions in bounds -1.0 to 1.0"
    for words in (played, ["train", "--config", str(tmp_path / "run" / "settings.yaml"), "--resume", "auto"]):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_after_a_change_the_best_is_chosen_by_new_episodes_only(tmp_path: Path):
    """Whatever those before were worth: here they get better rewards than ever, and the policy a huge learning rate."""
    settings = in_file(tmp_path)
    best = tmp_path / "run" / "checkpoints" / "best.pt"
    run_ranks(train_once, 1, settings)
    first = load_checkpoint(best).step
    written(tmp_path / "env", 3, 2, reward=9.0)
    changed = replace(settings, total_steps=200, learning_rate=0.1)
    run_ranks(train_once, 1, changed)
    assert load_checkpoint(best).step == first
    run_ranks(train_once, 1, replace(changed, total_steps=250))  # the change is in the checkpoint by now
    assert load_checkpoint(best).step == first
    run_ranks(train_once, 1, replace(changed, total_steps=900))
    assert load_checkpoint(best).step > first


def test_a_few_lucky_episodes_make_no_checkpoint_the_best(tmp_path: Path):
    settings = replace(in_file(tmp_path), checkpoint_interval=0.0, eval_episodes=40)
    best = tmp_path / "run" / "checkpoints" / "best.pt"
    run_ranks(train_once, 1, settings)
    newest = find_checkpoint(tmp_path / "run")[1]
    assert 0 < len(newest.window) < 40
    assert not best.exists()
    run_ranks(train_once, 1, replace(settings, total_steps=900))
    assert len(load_checkpoint(best).window) >= 40


def test_rows_beyond_the_checkpoint_are_taken_back_at_once(tmp_path: Path):
    settings = in_file(tmp_path)
    run_ranks(train_once, 1, settings)
    whole = (tmp_path / "run" / "progress.csv").read_text(encoding="utf-8")
    with (tmp_path / "run" / "progress.csv").open("a", encoding="utf-8") as file:
        file.write("900" + "," * whole.splitlines()[0].count(",") + "\n90")
    run_ranks(train_once, 1, settings)  # nothing is left to do
    assert (tmp_path / "run" / "progress.csv").read_text(encoding="utf-8") == whole

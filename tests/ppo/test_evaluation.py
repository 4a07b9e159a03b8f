"""Evaluations on the way of a training: what they say, which checkpoint they choose, and that they change nothing."""

from __future__ import annotations

import csv
import math
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gymnasium import spaces
from torch import Tensor, nn

from fastsync.ppo import evaluation, load_policy
from fastsync.ppo.cli import check_environment
from fastsync.ppo.envs.make import make_one
from fastsync.ppo.envs.parts import PartsInARow
from fastsync.ppo.evaluate import find_checkpoint
from fastsync.ppo.evaluation import Evaluator, make_players, play
from fastsync.ppo.exchange import Exchange
from fastsync.ppo.policies import make_policy
from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.runs.checkpoints import Checkpoint
from fastsync.ppo.runs.folder import CHECKPOINTS
from tests.ppo.test_modes import WithLayer
from tests.ppo.test_runs_checkpoints import assert_same
from tests.ranks import run_ranks
from tests.refused import refused
from tests.toy_envs import Countdown, Endless, InDict, OneForbidden, Payout, SeesAndMayNot, SeveralForbidden

TINY = Settings(
    total_steps=1_500, num_envs=4, num_steps=32, num_epochs=2, gamma=0.98, learning_rate=1e-3, clip_value_loss=False,
    checkpoint_interval=1e9,
)  # fmt: skip


class Draws(Countdown):
    """Draws from every generator that a process shares."""

    def draw(self) -> float:
        return float(np.random.rand() + random.random() + torch.rand(()).item())  # noqa: NPY002


class Counts(nn.Module):
    """Has a buffer that each forward changes, in whatever mode."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        return rows * (1 + 1e-3 * self.calls)


class WithCounts(WithLayer):
    layer = Counts


def train_each(rank: int, world_size: int, runs: dict[str, Settings]) -> dict[str, dict[str, Tensor]]:
    learnt = {}
    for name, settings in runs.items():
        policy, _ = train(replace(settings, run_name=name), torch.device("cpu"))
        learnt[name] = {key: value.clone() for key, value in policy.state_dict().items()}
    return learnt


def ran(
    settings: Settings | Path, *, ranks: int = 1, how: Callable[..., object] = train_each, **changes: Any
) -> Settings:
    """Trains the run called "run", of these settings or in this folder, and returns what it was trained with."""
    if isinstance(settings, Path):
        settings = replace(TINY, env="tests.toy_envs:Payout", runs_dir=str(settings))
    settings = replace(settings, **changes)
    run_ranks(how, ranks, {"run": settings})
    return settings


def newest(tmp_path: Path) -> Checkpoint:
    return find_checkpoint(tmp_path / "run", newest=True)[1]


@pytest.mark.parametrize("kind", [{}, {"env": f"{__name__}:Draws", "policy": f"{__name__}:WithCounts"}], ids=str)
def test_the_weights_are_bitwise_the_same_with_and_without_evaluations(tmp_path: Path, kind: dict[str, Any]):
    plain = replace(TINY, runs_dir=str(tmp_path), **kind)
    evaluated = replace(plain, eval_interval=400, eval_episodes=3)
    for learnt in run_ranks(train_each, 2, {"plain": plain, "evaluated": evaluated}):
        assert_same(learnt["plain"], learnt["evaluated"])
    rows = read_rows(tmp_path / "evaluated")
    returns = [row["evaluation/return"] for row in rows if row["evaluation/return"]]
    assert len(returns) == 4  # once each 400 steps, and at the end
    assert rows[-1]["evaluation/return"]
    assert all(float(row["rank1/evaluation_seconds"]) >= 0 for row in rows)


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_best_evaluation_chooses_the_best_checkpoint(tmp_path: Path):
    """Another environment is played than is trained in, which pays the opposite."""
    ran(tmp_path, ranks=2, learning_rate=0.01, eval_interval=300, eval_env=f"{__name__}:Opposite")
    rows = read_rows(tmp_path / "run")
    evaluated = [(float(row["evaluation/return"]), int(row["step"])) for row in rows if row["evaluation/return"]]
    assert float(rows[-1]["episodes/return"]) > 20 > evaluated[-1][0]
    best_return = max(value for value, _ in evaluated)
    first_best = next(step for value, step in evaluated if value == best_return)
    file, best = find_checkpoint(tmp_path / "run")
    assert (file.name, best.step, best.best_return) == ("best.pt", first_best, best_return)
    assert newest(tmp_path).step == evaluated[-1][1]


class Opposite(Payout):
    def step(self, action: Any):
        return super().step(1 - action)


def test_a_run_that_goes_on_compares_with_the_best_evaluation_so_far(tmp_path: Path):
    """And one from its checkpoint has a best one of its own."""
    settings = ran(tmp_path, eval_interval=500, learning_rate=0.05)
    file = tmp_path / "run" / CHECKPOINTS / "best.pt"
    before = file.read_bytes()
    longer = ran(settings, resume="auto", total_steps=1_800, learning_rate=1e-5)
    assert file.read_bytes() == before  # it had the best return that there is
    run_ranks(train_each, 1, {"again": replace(longer, resume=str(file))})
    assert (tmp_path / "again" / CHECKPOINTS / "best.pt").exists()
    # Without evaluations the returns of the training count, which are other figures.
    ran(longer, eval_interval=0, total_steps=2_200)
    assert file.read_bytes() != before


class Stopping(Payout):
    """Tells its process to stop."""

    num_steps, stops_at = 0, -1

    def step(self, action: Any):
        Stopping.num_steps += 1
        if Stopping.num_steps == Stopping.stops_at:
            signal.raise_signal(signal.SIGTERM)
        return super().step(action)


def train_and_stop(rank: int, world_size: int, runs: dict[str, Settings]) -> None:
    Stopping.stops_at = 150  # in the second update: each has some 100 steps
    train_each(rank, world_size, runs)


def test_an_evaluation_that_a_stop_left_out_is_made_up(tmp_path: Path):
    stopping = {"env": f"{__name__}:Stopping", "eval_env": "tests.toy_envs:Payout"}
    settings = ran(tmp_path, how=train_and_stop, eval_interval=200, **stopping)
    ran(settings, resume="auto")
    rows = read_rows(tmp_path / "run")
    assert 200 < int(rows[1]["step"]) < int(rows[2]["step"]) < 400
    assert [bool(row["evaluation/return"]) for row in rows[:3]] == [False, False, True]


class SlowAndEndless(Endless):
    def step(self, action: Any):
        time.sleep(0.001)
        return super().step(action)


def evaluate_for_ever(rank: int, world_size: int, settings: Settings) -> Any:
    """Rank 0 plays an episode without an end. Rank 1 has none to play, and is asked to stop at last."""
    evaluation.SLICE_SECONDS = 0.01
    policy = make_policy(settings, Countdown.observation_space, Countdown.action_space)
    with make_one(settings) as training:
        evaluator = Evaluator(settings, training)
    exchange = Exchange(torch.device("cpu"))
    exchange.use_group(dist.new_group(timeout=timedelta(seconds=3)))
    began = time.monotonic()
    return evaluator.evaluate(policy, exchange, lambda: rank == 1 and time.monotonic() - began > 4)


def test_ranks_wait_for_long_episodes_and_a_stop_ends_them():
    """The group's time-out is shorter than the episode."""
    settings = replace(TINY, eval_episodes=1, eval_interval=1, env=f"{__name__}:SlowAndEndless")
    assert run_ranks(evaluate_for_ever, 2, settings) == [None, None]


class NeverEnds(Payout):
    """Tells its process to stop, and has no end."""

    def step(self, action: Any):
        if self.row == 0:
            signal.raise_signal(signal.SIGTERM)
        observation, reward, *_ = super().step(action)
        return observation, reward, False, False, {}


def test_a_stop_amid_an_evaluation_saves_and_the_evaluation_is_made_up(tmp_path: Path):
    settings = ran(tmp_path, how=train_in_slices, eval_interval=200, eval_episodes=1, eval_env=f"{__name__}:NeverEnds")
    assert 200 < newest(tmp_path).step < 400
    assert newest(tmp_path).evaluated_step == 0
    ran(settings, resume="auto", eval_env="tests.toy_envs:Payout")
    rows = read_rows(tmp_path / "run")
    assert [bool(row["evaluation/return"]) for row in rows[:3]] == [False, False, True]


def test_a_stop_amid_the_last_evaluation_is_told_and_the_evaluation_is_made_up(tmp_path: Path):
    settings = ran(tmp_path, how=train_in_slices, total_steps=200, eval_interval=200, eval_env=f"{__name__}:NeverEnds")
    before, rows = newest(tmp_path), read_rows(tmp_path / "run")
    assert not rows[-1]["evaluation/return"]
    ran(settings, ranks=2, resume="auto", eval_env="tests.toy_envs:Payout")
    *same, made_up = read_rows(tmp_path / "run")
    assert [row["step"] for row in same] == [row["step"] for row in rows]
    assert made_up["evaluation/return"]
    assert (made_up["step"], made_up["update"]) == (rows[-1]["step"], rows[-1]["update"])
    after = find_checkpoint(tmp_path / "run")[1]
    assert after.evaluated_step == after.step == before.step
    assert_same(after.learner, before.learner, "the learner")  # nothing more was learnt


def test_a_run_that_is_done_can_be_evaluated_later(tmp_path: Path):
    settings = ran(tmp_path, total_steps=200)
    step = newest(tmp_path).step
    best = tmp_path / "run" / CHECKPOINTS / "best.pt"
    before = best.read_bytes()
    for _ in range(2):
        ran(settings, resume="auto", eval_interval=100)
        assert [bool(row.get("evaluation/return")) for row in read_rows(tmp_path / "run")] == [False, False, True]
    assert newest(tmp_path).step == step
    assert best.read_bytes() == before  # it was chosen by other figures
    told = replace(settings, run_name="run", resume="auto", eval_interval=100)
    assert "nothing is left to do: the run has taken" in run_ranks(what_a_training_says, 1, told)[0]


def test_ranks_that_differ_take_their_mean_before_a_last_evaluation(tmp_path: Path):
    """A stop between two means of DiLoCo, and then fewer steps than have been taken."""
    stopping = {"env": f"{__name__}:Stopping", "eval_env": "tests.toy_envs:Payout", "eval_interval": 1_000_000}
    settings = ran(tmp_path, ranks=2, how=train_and_stop, sync="diloco", sync_every=8, **stopping)
    step = newest(tmp_path).step
    ran(settings, ranks=2, resume="auto", total_steps=1)  # it compares the weights
    after = newest(tmp_path)
    assert after.evaluated_step == after.step > step


def train_in_slices(rank: int, world_size: int, runs: dict[str, Settings]) -> None:
    evaluation.SLICE_SECONDS = 0.01
    train_each(rank, world_size, runs)


def what_a_training_says(rank: int, world_size: int, settings: Settings) -> str:
    with redirect_stdout(StringIO()) as said:
        train(settings, torch.device("cpu"))
    return said.getvalue()


def test_the_table_counts_the_last_evaluation(tmp_path: Path):
    """It is the only one, and no update comes after it."""
    settings = replace(TINY, runs_dir=str(tmp_path), env="tests.toy_envs:Payout", total_steps=300, eval_interval=300)
    settings = replace(settings, eval_env=f"{__name__}:Slow", eval_episodes=1)
    (said,) = run_ranks(what_a_training_says, 1, settings)
    share, seconds = (
        re.search(r"time in evaluation\s*│\s*([\d.]+)%", said),
        re.search(r"steps\s*│ .* in ([\d.]+) s", said),
    )
    assert share is not None, said
    assert seconds is not None, said
    assert 0 < float(share[1]) <= 100
    assert float(seconds[1]) >= 0.5  # of an episode's five steps


class Slow(Payout):
    def step(self, action: Any):
        time.sleep(0.1)
        return super().step(action)


def test_episodes_are_the_same_each_time_whoever_plays_them():
    settings = replace(TINY, eval_episodes=5, eval_interval=1, env=f"{__name__}:Draws")
    one, again = run_ranks(evaluate, 1, settings)[0]
    assert one == again
    assert len(one) == 5
    assert len({episode.length for episode in one}) > 1
    settings = replace(settings, env="tests.toy_envs:Countdown")  # which depends on nothing but its own seed
    (alone, _), *others = (each for size in (1, 2, 3, 7) for each in run_ranks(evaluate, size, settings))
    assert all(each == alone for pair in others for each in pair)


def evaluate(rank: int, world_size: int, settings: Settings) -> list[Any]:
    torch.manual_seed(0)
    policy = make_policy(settings, Countdown.observation_space, Countdown.action_space)
    with make_one(settings) as training:
        evaluator = Evaluator(settings, training)
    return [evaluator.evaluate(policy, Exchange(torch.device("cpu"))) for _ in range(2)]


def test_an_episode_that_never_ends_is_cut_in_each_environment():
    policy = make_policy(TINY, Countdown.observation_space, Countdown.action_space)
    said = list[str]()
    with make_players("tests.toy_envs:Endless", seed=0, indices=range(2**31, 2**31 + 3)) as environments:
        episodes = play(policy, environments, 3, max_steps=9, say=said.append)
    assert [(each.environment - 2**31, each.episode_return, each.length) for each in episodes] == [
        (number, 9.0, 9) for number in range(3)
    ]
    assert said[-1] == "3 of 3 episodes were cut after 9 steps"


def test_an_environment_that_does_not_suit_the_policy_is_refused_before_ranks_start():
    for env, message in (
        (
            "tests.toy_envs:Payout",
            r"eval_env='tests.toy_envs:Payout' has observations Box.* training's environment has",
        ),
        ("Pendulum-v9", "^eval_env='Pendulum-v9' cannot be made"),
        ("tests.toy_envs:Binary", "^eval_env='tests.toy_envs:Binary' has actions MultiBinary"),
        (f"{__name__}:normalised", r"^eval_env='.*:normalised' normalises by Scaled.* set --norm-rewards: "),
    ):
        with pytest.raises(ValueError, match=message):
            check_environment(replace(TINY, eval_interval=5, eval_env=env))
    refused(lambda: Settings(eval_env="x:y"), "eval_env='x:y' needs eval_interval, such as")


class Scaled(gymnasium.wrappers.NormalizeReward[Any, Any]):
    """A wrapper of a user's own."""


def normalised() -> Any:
    return Scaled(Countdown())


def refused_by_a_rank(rank: int, world_size: int, settings: Settings) -> str:
    return refused(lambda: train(settings, torch.device("cpu")), "eval_env")


def test_a_script_hears_of_a_wrong_environment_before_it_learns(tmp_path: Path):
    settings = replace(TINY, runs_dir=str(tmp_path), run_name="run", eval_interval=1000, eval_env="Pendulum-v1")
    refusals = run_ranks(refused_by_a_rank, 2, settings)
    assert all(each.startswith("eval_env='Pendulum-v1' has observations") for each in refusals)
    assert not (tmp_path / "run" / "progress.csv").exists()


def test_an_environment_that_only_vectors_have_is_refused_before_ranks_start():
    env_id = "OnlyVectors-v0"
    gymnasium.register(env_id, vector_entry_point="gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv")
    try:
        check_environment(replace(TINY, env=env_id))
        refused(lambda: check_environment(replace(TINY, env=env_id, eval_interval=1)), "entry_point")
    finally:
        del gymnasium.registry[env_id]


def test_a_loaded_policy_acts(tmp_path: Path):
    ran(tmp_path, learning_rate=0.01, total_steps=4_000)
    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    policy, env = load_policy(tmp_path / "run"), Payout()
    assert generators == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    assert not policy.training
    observation, _ = env.reset()
    rewards, over = list[float](), False
    while not over:
        action = policy.act(observation)
        observation, reward, over, _, _ = env.step(action)
        rewards.append(reward)
    assert sum(rewards) == 31.0  # the best there is
    assert policy.act(np.stack([observation] * 3)).tolist() == [1, 1, 1]
    refused(lambda: policy.act(np.zeros(3)), "observations:")
    refused(lambda: load_policy(tmp_path / "nowhere"), "nowhere' is neither a checkpoint nor the folder")


@pytest.mark.parametrize("kind", ["Continuous", "FromFive", "Several"])
def test_actions_are_the_environments_own(kind: str):
    """Shifted to their start, or clipped to their bounds."""
    with make_players(f"tests.toy_envs:{kind}", seed=0) as environments:
        space = environments.single_action_space
        policy = make_policy(TINY, environments.single_observation_space, space)
        with torch.no_grad():
            policy.actor[-1].weight.mul_(1e6)
        observation = environments.reset()[0]
    chosen = policy.act(observation)
    assert space.contains(chosen)
    assert policy.act(observation[None]).shape == (1, *space.shape)


def test_a_policy_also_acts_by_samples():
    with make_players("tests.toy_envs:OneForbidden", seed=0) as environments:
        policy = make_policy(TINY, environments.single_observation_space, environments.single_action_space)
    observations, masks = np.zeros((4000, 3), np.float32), np.tile([1, 0, 1], (4000, 1))
    with torch.no_grad():
        policy.actor[-1].weight.zero_()
        policy.actor[-1].bias.copy_(torch.tensor([0.75, 5.0, 0.25]).log())
    torch.manual_seed(0)
    chosen = policy.act(observations, masks, deterministic=False)
    assert set(chosen.tolist()) == {0, 2}
    assert np.mean(chosen == 0) == pytest.approx(0.75, abs=0.03)
    assert set(policy.act(observations, masks).tolist()) == {0}
    torch.manual_seed(0)
    assert np.array_equal(chosen, policy.act(observations, masks, deterministic=False))


def test_samples_of_real_actions_have_their_deviation():
    space = spaces.Box(-100.0, 100.0, (2,))
    policy = make_policy(replace(TINY, log_std_init=0.5), Countdown.observation_space, space)
    observations = np.zeros((4000, *Countdown.observation_space.shape), np.float32)
    torch.manual_seed(0)
    noise = policy.act(observations, deterministic=False) - policy.act(observations)
    assert noise.mean(0) == pytest.approx([0, 0], abs=0.1)
    assert noise.std(0) == pytest.approx([math.exp(0.5)] * 2, rel=0.05)


@pytest.mark.parametrize("kind", ["OneForbidden", "InDict", "SeveralForbidden", "SeesAndMayNot"])
def test_evaluations_take_only_actions_that_the_mask_allows(kind: str):
    """These environments fail if a forbidden action is taken."""
    settings = replace(TINY, env=f"tests.toy_envs:{kind}", eval_interval=1, eval_episodes=6)
    episodes, again = run_ranks(play_each, 1, settings)[0]
    assert len(episodes) == 6
    assert again == episodes


def play_each(rank: int, world_size: int, settings: Settings) -> list[Any]:
    with make_one(settings) as training:
        policy = make_policy(settings, training.single_observation_space, training.single_action_space)
        evaluator = Evaluator(settings, training)
    return [evaluator.evaluate(policy, Exchange(torch.device("cpu"))) for _ in range(2)]


@pytest.mark.parametrize("kind", [OneForbidden, SeveralForbidden])
def test_a_loaded_policy_acts_by_the_mask(kind: Any, tmp_path: Path):
    ran(tmp_path, env=f"tests.toy_envs:{kind.__name__}", total_steps=200)
    policy, env = load_policy(tmp_path / "run"), kind()
    for seed in range(4):
        (observation, info), over = env.reset(seed=seed), False
        mask = info["action_mask"]
        while not over:
            observation, _, terminated, truncated, info = env.step(policy.act(observation, mask))
            mask, over = info.get("action_mask", mask), terminated or truncated
    several = np.stack([observation] * 3)
    masks = tuple(np.stack([each] * 3) for each in mask) if isinstance(mask, tuple) else np.stack([mask] * 3)
    assert len(policy.act(several, masks)) == 3
    for seen in (observation, several):
        refused(lambda: policy.act(seen), "action_mask:")
    refused(lambda: policy.act(observation, np.ones(2)), "action_mask:")


@pytest.mark.parametrize("kind", [InDict, SeesAndMayNot])
def test_a_loaded_policy_acts_on_rows_of_parts(kind: Any):
    settings = replace(TINY, env=f"tests.toy_envs:{kind.__name__}")
    env = PartsInARow(kind(), masks_in_info=kind is SeesAndMayNot)
    policy = make_policy(settings, env.observation_space, env.action_space)
    (row, _), over = env.reset(seed=1), False
    while not over:
        row, _, terminated, truncated, _ = env.step(policy.act(row))
        over = terminated or truncated
    refused(lambda: policy.act(np.asarray(kind().reset(seed=1)[0])), "observations:")


def test_masks_where_there_are_none_or_beside_an_image_are_refused():
    policy = make_policy(TINY, Countdown.observation_space, Countdown.action_space)
    refused(lambda: policy.act(np.zeros(3), np.ones(3)), "action_mask:")
    env = PartsInARow(SeesAndMayNot(), masks_in_info=True)
    settings = replace(TINY, env="tests.toy_envs:SeesAndMayNot")
    policy = make_policy(settings, env.observation_space, env.action_space)
    image, info = SeesAndMayNot().reset(seed=1)
    refused(lambda: policy.act(image, info["action_mask"]), ".PartsInARow(env, masks_in_info=True)")


def test_environments_of_evaluations_get_arguments_and_their_number():
    levels = []
    settings = replace(TINY, env="tests.toy_envs:at_level", env_kwargs={"first": 10}, eval_interval=1, eval_episodes=3)
    with make_players(settings.env, settings.env_kwargs, seed=0, indices=range(2**31, 2**31 + 3)) as environments:
        levels += environments.reset()[:, 0].tolist()
    assert levels == [10, 11, 12]
    run_ranks(play_each, 1, settings)


def test_an_evaluation_that_fails_names_its_environment():
    policy = make_policy(TINY, Countdown.observation_space, Countdown.action_space)
    with (
        make_players("tests.toy_envs:Faulty", seed=0, indices=[2**31 + 4]) as environments,
        pytest.raises(RuntimeError, match=r"environment 4 of the evaluation \(Faulty\) failed in step 2 of episode 0"),
    ):
        play(policy, environments, 1)

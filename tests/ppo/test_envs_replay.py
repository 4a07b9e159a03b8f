"""Saved environments go on exactly where they were; where they cannot, that is found out and said."""

from __future__ import annotations

import io
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from fastsync.ppo.envs import resume as episodes
from fastsync.ppo.envs import vector
from fastsync.ppo.envs.atari import LifeByLife
from fastsync.ppo.envs.interface import begun_anew, redistribute
from fastsync.ppo.envs.make import Environments, Step, make_environments, try_environments
from fastsync.ppo.envs.resume import EpisodeRecorder, Trial, seed_from
from fastsync.ppo.envs.spaces import random_actions
from tests.ppo.test_envs import settings
from tests.toy_envs import Countdown


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def as_lists(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return [str(data.dtype), data.tolist()]
    if isinstance(data, dict):
        return {name: as_lists(value) for name, value in data.items()}
    return [as_lists(value) for value in data] if isinstance(data, list) else data


def assert_same_steps(left: Step, right: Step) -> None:
    for name in ("observations", "rewards", "terminated", "truncated", "valid"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    assert left.episodes == right.episodes
    assert left.final_observations.keys() == right.final_observations.keys()
    for index, observation in left.final_observations.items():
        np.testing.assert_array_equal(observation, right.final_observations[index])


def play(environments: Environments, num_steps: int, generator: np.random.Generator) -> list[Step]:
    space, num_envs = environments.single_action_space, environments.num_envs
    return [environments.step(random_actions(space, num_envs, generator)) for _ in range(num_steps)]


def found_restorable(env: str, **changes: Any) -> Trial:
    return try_environments(settings(env, **changes), seconds=3600)


def assert_goes_on(env: str, *, before: int, after: int, num_envs: int = 3, **changes: Any) -> None:
    chosen = settings(env, num_envs, **changes)
    with make_environments(chosen, rank=0) as first, make_environments(chosen, rank=0, restart=9) as second:
        first.reset()
        steps = play(first, before, np.random.default_rng(1))
        observations = second.restore(through_a_file(first.state()))
        assert second.begun_anew == []
        assert second.restored.all()
        np.testing.assert_array_equal(observations, steps[-1].observations)
        assert as_lists(second.state()) == as_lists(first.state())  # it can be saved again
        expected = play(first, after, np.random.default_rng(2))
        for left, right in zip(expected, play(second, after, np.random.default_rng(2)), strict=True):
            assert_same_steps(left, right)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("env", ["Countdown", "Several", "Continuous"])
def test_copies_go_on_from_every_moment(env: str, autoreset: str):
    """Episodes last up to 7 steps, so among 9 moments are their beginnings, their ends, and restarts."""
    assert found_restorable(f"tests.toy_envs:{env}", autoreset=autoreset) == Trial(True)
    for before in range(1, 10):
        assert_goes_on(f"tests.toy_envs:{env}", before=before, after=12, autoreset=autoreset)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_copies_in_processes_go_on(autoreset: str):
    """One set of processes is put to several moments of another, one after the other."""
    chosen = settings("tests.toy_envs:Countdown", 3, vectorization="async", autoreset=autoreset)
    with make_environments(chosen, rank=0) as first, make_environments(chosen, rank=0) as second:
        first.reset()
        for moment in range(8):
            last = play(first, 1, np.random.default_rng(moment))[-1]
            np.testing.assert_array_equal(second.restore(through_a_file(first.state())), last.observations)
            assert second.begun_anew == []
            state = through_a_file(first.state())
            expected = play(first, 9, np.random.default_rng(2))
            for left, right in zip(expected, play(second, 9, np.random.default_rng(2)), strict=True):
                assert_same_steps(left, right)
            first.restore(state)


@pytest.mark.parametrize("before", [1, 37, 100])
def test_cartpole_in_its_own_vectorisation_goes_on(before: int):
    assert found_restorable("CartPole-v1") == Trial(True)
    assert_goes_on("CartPole-v1", before=before, after=100, num_envs=8)


@pytest.mark.parametrize(
    ("env", "package"),
    [
        ("Acrobot-v1", "gymnasium"),
        ("Pendulum-v1", "gymnasium"),
        ("LunarLander-v3", "Box2D"),
        ("HalfCheetah-v5", "mujoco"),
        ("Hopper-v5", "mujoco"),
    ],
)
def test_environments_of_gymnasium_go_on(env: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves its log where it runs
    assert found_restorable(env) == Trial(True)
    assert_goes_on(env, before=220, after=230, num_envs=2)


def test_games_go_on(capfd: pytest.CaptureFixture[str]):
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    assert found_restorable("ALE/Breakout-v5") == Trial(True)
    assert_goes_on("ALE/Breakout-v5", before=150, after=150, num_envs=1)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ("tests.toy_envs:Unseeded", "leads to other observations"),
        ("tests.toy_envs:Leaky", "observations"),
        ("BipedalWalker-v3", "differ"),
        ("NoSuchEnv-v0", "a trial to save and restore it failed with ValueError"),
    ],
)
def test_environments_that_cannot_go_back_are_found_out(env: str, reason: str):
    if env.startswith("Bipedal"):
        pytest.importorskip("Box2D")
    trial = found_restorable(env)
    assert not trial.is_restorable
    assert reason in str(trial.note)


def test_a_trial_that_takes_too_long_is_given_up():
    trial = try_environments(settings("tests.toy_envs:Countdown"), seconds=0)
    assert trial == Trial(True, "0 s were not long enough to try out whether the environments can be saved exactly")


def test_those_begin_new_episodes_and_say_so():
    chosen = settings("tests.toy_envs:Leaky", 2)
    with (
        make_environments(chosen, rank=1, is_restorable=False) as first,
        make_environments(chosen, rank=1, is_restorable=False) as second,
    ):
        old = first.reset().copy()
        play(first, 1, np.random.default_rng(0))
        state = through_a_file(first.state())
        assert [sorted(episode) for episode in state["episodes"]] == [["episode"], ["episode"]]
        new = second.restore(state)
        assert second.begun_anew == [2, 3]
        assert not (new == old).all(axis=1).any()
        plain = Countdown()
        for index, observation in zip((2, 3), new, strict=True):
            assert observation[2] == plain.reset(seed=seed_from(1, index, 1))[0][2]
        episodes = [e for step in play(second, 8, np.random.default_rng(0)) for e in step.episodes]
        assert {e.index: e.length for e in episodes[::-1]} == {i: int(new[i, 2]) for i in range(2)}


@pytest.mark.parametrize("name", ["observation", "ended", "actions"])
def test_a_replay_that_leads_elsewhere_is_noticed(name: str):
    """One of three environments has other contents than were recorded: it alone begins anew."""
    chosen = settings("tests.toy_envs:Countdown", 3)
    with make_environments(chosen, rank=1) as first, make_environments(chosen, rank=1) as second:
        first.reset()
        steps = play(first, 2, np.random.default_rng(0))
        state = first.state()
        episode = state["episodes"][1]
        episode[name] = [True, False] if name == "ended" else episode[name] + 1
        observations = second.restore(through_a_file(state))
        assert second.begun_anew == [4]
        assert second.restored.tolist() == [True, False, True]
        same = (observations == steps[-1].observations).all(axis=1)
        assert same.tolist() == [True, False, True]


def test_a_state_saved_between_episodes_goes_on_in_the_other_mode():
    with (
        make_environments(settings("tests.toy_envs:Countdown", 6), rank=0) as first,
        make_environments(settings("tests.toy_envs:Countdown", 6, autoreset="same_step"), rank=0) as second,
    ):
        first.reset()
        ended = np.zeros(6, dtype=np.bool_)
        while not 0 < ended.sum() < 6:
            (step,) = play(first, 1, np.random.default_rng(0))
            ended = step.terminated | step.truncated
        observations = second.restore(first.state())
        assert second.begun_anew == np.flatnonzero(ended).tolist()
        after = play(second, 1, np.random.default_rng(0))[-1]
        assert after.valid.all()
        np.testing.assert_array_equal(observations[~ended], step.observations[~ended])


def test_actions_are_kept_when_the_caller_writes_to_them_again():
    env = EpisodeRecorder(Countdown(), seed=0, index=0)
    env.reset()
    actions = np.array([1.0])
    env.step(actions)
    actions[:] = 7
    snapshot = env.snapshot
    assert snapshot is not None
    assert snapshot["actions"].tolist() == [[1.0]]


def test_an_episode_that_is_too_long_begins_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(episodes, "MAX_ACTIONS", 3)
    chosen = settings("tests.toy_envs:Countdown", 1)
    with make_environments(chosen, rank=0) as first, make_environments(chosen, rank=0) as second:
        first.reset()
        play(first, 3, np.random.default_rng(0))
        assert len(first.state()["episodes"][0]["actions"]) == 3
        with pytest.warns(UserWarning, match="an episode has more than 3 steps, so its actions are no longer kept"):
            play(first, 1, np.random.default_rng(0))
        state = first.state()
        assert state["episodes"] == [{"episode": 0}]
        observations = second.restore(through_a_file(state))
        assert second.begun_anew == [0]
        np.testing.assert_array_equal(observations[0], Countdown().reset(seed=seed_from(1, 0, 1))[0])
        # The next one is kept again.
        while first.state()["episodes"] == [{"episode": 0}]:
            play(first, 1, np.random.default_rng(0))
        assert [len(episode["actions"]) for episode in first.state()["episodes"]] == [0]


def take_states(num_ranks: int, num_envs: int) -> tuple[list[dict[str, Any]], Any]:
    states, observations = [], []
    for rank in range(num_ranks):
        with make_environments(settings("tests.toy_envs:Countdown", num_envs), rank=rank) as environments:
            environments.reset()
            for number in range(5):
                actions = np.array([(number + rank * num_envs + i) % 3 for i in range(num_envs)])
                last = environments.step(actions).observations
            states.append(through_a_file(environments.state()))
            observations.append(last)
    return states, np.concatenate(observations)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ((2, 2), (2, 2), None),
        ((2, 2), (1, 4), "the 4 environments go on where they were, spread over the ranks anew"),
        ((1, 4), (4, 1), "the 4 environments go on where they were, spread over the ranks anew"),
        ((2, 3), (2, 1), "2 of 6 environments go on where they were; the others are dropped"),
        ((2, 2), (3, 3), "the 4 environments go on where they were, and 5 new ones begin"),
    ],
)
def test_another_world_takes_the_environments_over(old: tuple[int, int], new: tuple[int, int], sentence: str | None):
    states, expected = take_states(*old)
    world_size, num_envs = new
    rows = []
    for rank in range(world_size):
        state, said = redistribute(states, rank=rank, world_size=world_size, num_envs=num_envs)
        assert said == sentence
        with make_environments(settings("tests.toy_envs:Countdown", num_envs), rank=rank) as environments:
            rows += list(environments.reset() if state is None else environments.restore(state))
            assert environments.begun_anew == []
            lengths = environments.state()["lengths"].tolist()
            saved = torch.cat([s["lengths"] for s in states])[rank * num_envs :][:num_envs].tolist()
            assert lengths == saved + [0] * (num_envs - len(saved))
    common = min(len(rows), len(expected))
    np.testing.assert_array_equal(rows[:common], expected[:common])
    for index in range(common, len(rows)):
        np.testing.assert_array_equal(rows[index], Countdown().reset(seed=seed_from(1, index, 0))[0])


def test_own_vectorisations_do_not_go_on_in_another_world():
    states = []
    for rank in range(2):
        with make_environments(settings("CartPole-v1", 2), rank=rank) as environments:
            environments.reset()
            states.append(environments.state())
    assert redistribute(states, rank=1, world_size=2, num_envs=2) == (states[1], None)
    sentence = "all 4 environments begin new episodes: those saved can only go on in the same number per rank"
    assert redistribute(states, rank=0, world_size=1, num_envs=4) == (None, sentence)


def test_begun_anew_names_the_environments():
    assert begun_anew([]) is None
    assert str(begun_anew([7, 3])).startswith("2 environments (3, 7) could not be brought back")
    assert "(0, 1, 2, 3, 4, 5, 6, 7, ...)" in str(begun_anew(range(20)))


def test_own_vectorisations_that_have_gone_too_far_begin_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vector, "MAX_BYTES", 5)
    with make_environments(settings("CartPole-v1", 2), rank=0) as first:
        first.reset()
        play(first, 2, np.random.default_rng(0))
        assert len(first.state()["actions"]) == 4
        with pytest.warns(UserWarning, match="no longer kept: if the run is resumed, they begin new episodes"):
            play(first, 1, np.random.default_rng(0))
        assert "actions" not in first.state()
        with make_environments(settings("CartPole-v1", 2), rank=0, restart=7) as second:
            second.restore(through_a_file(first.state()))
            assert second.begun_anew == [0, 1]


def test_an_own_vectorisation_that_is_led_elsewhere_begins_anew():
    with make_environments(settings("CartPole-v1", 2), rank=0) as first:
        first.reset()
        play(first, 5, np.random.default_rng(0))
        state = first.state()
        state["actions"][3] ^= 1
        with make_environments(settings("CartPole-v1", 2), rank=0, restart=7) as second:
            second.restore(through_a_file(state))
            assert second.begun_anew == [0, 1]


class Game(gymnasium.Env[Any, Any]):
    """Loses a life with every third UP and is over with the second; an UP gives 5 points."""

    observation_space = spaces.Box(0, 255, (1,), dtype=np.uint8)
    action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self.ale = self
        self.log: list[str] = []

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE", "UP"]

    def lives(self) -> int:
        return 2 - self.presses // 3

    def reset(self, *, seed: int | None = None, options: Any = None):
        self.log.append(f"new {seed}")
        self.presses = 0
        return np.zeros(1, np.uint8), {}

    def step(self, action: Any):
        self.log.append(self.get_action_meanings()[action])
        self.presses += action == 2
        return np.array([self.presses], np.uint8), 5.0 * (action == 2), self.lives() == 0, False, {}


def test_lives_are_episodes_and_games_are_scored():
    game = Game()
    env = LifeByLife(game)
    env.reset(seed=4)
    assert game.log == ["new 4", "FIRE"]
    results = [env.step(2) for _ in range(3)]
    assert [result[1:4] for result in results] == [(1, False, False), (1, False, False), (1, True, False)]
    assert env.resets_go_on
    assert not any("game" in result[4] for result in results)
    env.reset()
    assert game.log[-2:] == ["NOOP", "FIRE"]
    results = [env.step(2) for _ in range(3)]
    assert results[-1][2]
    assert not env.resets_go_on
    assert results[-1][4]["game"] == {"score": 30.0, "length": 6}
    env.reset()
    assert game.log[-2:] == ["new None", "FIRE"]
    env.step(2), env.step(2), env.step(2)
    env.reset(seed=8)  # a seed asks for a new game, whatever is left of the old one
    assert game.log[-2:] == ["new 8", "FIRE"]
    env.step(2), env.step(2), env.step(2)
    env.reset()
    env.step(2), env.step(2)
    assert env.step(2)[4]["game"] == {"score": 30.0, "length": 6}

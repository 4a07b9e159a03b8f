"""Saved environments go on exactly where they were, or not at all."""

from __future__ import annotations

import io
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from fastsync.ppo.envs.atari import LifeByLife
from fastsync.ppo.envs.interface import Environments, Step
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.envs.spaces import random_actions
from tests.ppo.test_envs import settings


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


def play(environments: Environments, num_steps: int, generator: np.random.Generator) -> list[Step]:
    space, num_envs = environments.single_action_space, environments.num_envs
    return [environments.step(random_actions(space, num_envs, generator)) for _ in range(num_steps)]


def assert_goes_on(env: str, *, before: int, after: int, num_envs: int = 3, **changes: Any) -> None:
    chosen = settings(env, num_envs, **changes)
    with make_environments(chosen, rank=0) as first, make_environments(chosen, rank=0, restart=9) as second:
        first.reset()
        steps = play(first, before, np.random.default_rng(1))
        observations = second.restore(through_a_file(first.state()))
        assert observations is not None
        np.testing.assert_array_equal(observations, steps[-1].observations)
        assert as_lists(second.state()) == as_lists(first.state())  # it can be saved again
        expected = play(first, after, np.random.default_rng(2))
        for left, right in zip(expected, play(second, after, np.random.default_rng(2)), strict=True):
            assert_same_steps(left, right)


@pytest.mark.parametrize("env", ["Countdown", "Several", "Continuous"])
def test_copies_go_on_from_every_moment(env: str):
    """Episodes last up to 7 steps, so among 9 moments are their beginnings, their ends, and restarts."""
    for before in range(1, 10):
        assert_goes_on(f"tests.toy_envs:{env}", before=before, after=12)


def test_copies_in_processes_go_on():
    """One set of processes is put to several moments of another, one after the other."""
    chosen = settings("tests.toy_envs:Countdown", 3, vectorization="async")
    with make_environments(chosen, rank=0) as first, make_environments(chosen, rank=0) as second:
        first.reset()
        for moment in range(8):
            last = play(first, 1, np.random.default_rng(moment))[-1]
            np.testing.assert_array_equal(second.restore(through_a_file(first.state())), last.observations)
            state = through_a_file(first.state())
            expected = play(first, 9, np.random.default_rng(2))
            for left, right in zip(expected, play(second, 9, np.random.default_rng(2)), strict=True):
                assert_same_steps(left, right)
            first.restore(state)


@pytest.mark.parametrize("kinds", [("vector_entry_point", "sync"), ("sync", "vector_entry_point")])
def test_states_of_another_vectorization_are_not_restored(kinds: tuple[str, str]):
    saved, other = (settings("CartPole-v1", 2, vectorization=kind) for kind in kinds)
    with make_environments(saved, rank=0) as first, make_environments(other, rank=0) as second:
        first.reset()
        assert second.restore(through_a_file(first.state())) is None
        assert second.reset().shape == (2, 4)


def test_cartpole_in_its_own_vectorisation_goes_on():
    assert_goes_on("CartPole-v1", before=37, after=100, num_envs=8)


@pytest.mark.parametrize(
    ("env", "package"),
    [
        ("Acrobot-v1", "gymnasium"),
        ("LunarLander-v3", "Box2D"),
        ("HalfCheetah-v5", "mujoco"),
        pytest.param("ALE/Breakout-v5", "ale_py", marks=pytest.mark.slow),
    ],
)
def test_environments_of_gymnasium_go_on(env: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves its log where it runs
    assert_goes_on(env, before=220, after=230, num_envs=2)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_what_does_not_come_back_is_reset_to_other_episodes(vectorization: str):
    chosen = settings("tests.toy_envs:Unseeded", 2, vectorization=vectorization)
    with make_environments(chosen, rank=1) as first, make_environments(chosen, rank=1, restart=9) as second:
        old = first.reset().copy()
        play(first, 1, np.random.default_rng(0))
        assert second.restore(through_a_file(first.state())) is None
        new = second.reset()
        assert not (new == old).all(axis=1).any()
        steps = play(second, 8, np.random.default_rng(0))
        assert steps[0].valid.all()
        lengths = {episode.environment: episode.length for step in steps[::-1] for episode in step.episodes}
        assert lengths == {2 + index: int(new[index, 2]) for index in range(2)}


@pytest.mark.parametrize("env", ["tests.toy_envs:Leaky", "BipedalWalker-v3"])
def test_what_is_no_function_of_its_seed_does_not_come_back(env: str):
    """In the first episode of each all is the same, so that only what follows tells."""
    if env.startswith("Bipedal"):
        pytest.importorskip("Box2D")
    with make_environments(settings(env, 1), rank=0) as first, make_environments(settings(env, 1), rank=0) as second:
        first.reset()
        play(first, 1, np.random.default_rng(0))
        assert second.restore(through_a_file(first.state())) is None


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
    env.step(2)
    env.reset(seed=8)  # a seed asks for a new game, whatever is left of the old one
    assert game.log[-2:] == ["new 8", "FIRE"]

"""EnvPool behind the same interface: seeds by number, whole games, new episodes after a restart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.envs.spaces import random_actions
from tests.ppo.test_envs import settings

pytest.importorskip("envpool")
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered")


def first_observations(num_envs: int, **where: int) -> Any:
    with make_environments(settings("CartPole-v1", num_envs, vectorization="envpool"), **where) as environments:
        return environments.reset()


def test_environments_are_seeded_by_their_number_and_the_restart():
    together = first_observations(4, rank=0)
    spread = np.concatenate([first_observations(2, rank=rank) for rank in range(2)])
    np.testing.assert_array_equal(together, spread)
    assert len(np.unique(np.concatenate([together, first_observations(4, rank=0, restart=128)]), axis=0)) == 8


@pytest.mark.parametrize(
    ("cores", "local_world_size", "num_envs", "threads"), [(8, 2, 16, 4), (2, 4, 16, 1), (64, 2, 3, 3)]
)
def test_the_ranks_of_a_machine_share_its_cores(
    cores: int, local_world_size: int, num_envs: int, threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fastsync._C.num_usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
    with make_environments(settings("CartPole-v1", num_envs, vectorization="envpool"), rank=0) as environments:
        assert environments._pool.spec.config.num_threads == threads  # type: ignore[attr-defined]


def test_accounts_are_sums_of_rewards():
    with make_environments(settings("CartPole-v1", 4, vectorization="envpool"), rank=0) as environments:
        environments.reset()
        generator, lengths, ended, invalid = np.random.default_rng(0), np.zeros(4, int), 0, 0
        for _ in range(200):
            step = environments.step(random_actions(environments.single_action_space, 4, generator))
            lengths += step.valid
            invalid += (~step.valid).sum()
            for episode in step.episodes:
                ended += 1
                assert (episode.episode_return, episode.length) == (
                    lengths[episode.environment],
                    lengths[episode.environment],
                )
                lengths[episode.environment] = 0
        assert ended > 20
        assert invalid >= ended - 4


def test_they_cannot_go_on():
    chosen = settings("CartPole-v1", 2, vectorization="envpool")
    with make_environments(chosen, rank=1) as first, make_environments(chosen, rank=1, restart=8) as second:
        old = first.reset()
        assert second.restore(first.state()) is None
        assert not (old == second.reset()).any()


def test_games_are_scored_whole():
    chosen = settings("ALE/Breakout-v5", 2, vectorization="envpool")
    with make_environments(chosen, rank=0) as environments:
        assert environments.single_observation_space.shape == (4, 84, 84)
        environments.reset()
        generator, lives, games = np.random.default_rng(0), 0, []
        for _ in range(400):
            step = environments.step(random_actions(environments.single_action_space, 2, generator))
            assert np.isin(step.rewards, [-1, 0, 1]).all()
            lives += (step.terminated | step.truncated).sum()
            games += step.episodes
    assert len(games) > 1
    assert lives > 3 * len(games)
    assert all(game.length > 100 for game in games)


def test_an_unknown_environment_is_refused():
    with pytest.raises(ValueError, match=r"EnvPool has no 'CartPole-v7'; .*; did you mean .*CartPole-v1"):
        make_environments(settings("CartPole-v7", vectorization="envpool"), rank=0)

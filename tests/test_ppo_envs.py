"""Vector environments: the fast one is the slow one, unsupported ones are refused, ranks see different ones."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from fastsync.ppo.envs import check_envs, make_envs, space_sizes


def test_cartpole_uses_its_own_vectorisation():
    envs = make_envs("CartPole-v1", 3)
    assert isinstance(envs, CartPoleVectorEnv)
    assert space_sizes(envs) == (4, 2)


def test_others_are_stepped_one_after_the_other():
    envs = make_envs("Acrobot-v1", 2)
    assert isinstance(envs, SyncVectorEnv)
    assert space_sizes(envs) == (6, 3)


def test_vectorised_cartpole_is_cartpole():
    """Step for step what single environments do, through terminations, truncations at 500 steps, and restarts."""
    num_envs = 8
    envs = make_envs("CartPole-v1", num_envs)
    assert isinstance(envs, CartPoleVectorEnv)
    singles = [gymnasium.make("CartPole-v1") for _ in range(num_envs)]

    def copy_state(index: int) -> None:
        assert envs.state is not None
        singles[index].unwrapped.state = envs.state[:, index].copy()  # type: ignore[attr-defined]

    observations, _ = envs.reset(seed=7)
    for index, single in enumerate(singles):
        single.reset()
        copy_state(index)
    rng = np.random.default_rng(0)
    restarting = np.zeros(num_envs, dtype=bool)
    num_terminated = num_truncated = 0
    for _ in range(1500):
        # A controller that balances for 500 steps; the more often an environment ignores it, the sooner it falls.
        balance = (
            0.05 * observations[:, 0] + 0.1 * observations[:, 1] + observations[:, 2] + 0.5 * observations[:, 3]
        ) > 0
        ignore = rng.random(num_envs) < np.linspace(0, 0.6, num_envs)
        actions = np.where(ignore, rng.integers(0, 2, num_envs), balance)
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        for index, single in enumerate(singles):
            got = (rewards[index], terminated[index], truncated[index])
            if restarting[index]:
                assert got == (0, False, False)
                assert (np.abs(observations[index]) <= 0.05).all()
                single.reset()
                copy_state(index)
            else:
                observation, *expected, _ = single.step(int(actions[index]))
                assert got == tuple(expected)
                np.testing.assert_array_equal(observations[index], observation)
        num_terminated += terminated.sum()
        num_truncated += truncated.sum()
        restarting = terminated | truncated
    assert num_terminated > 10
    assert num_truncated >= 4


@pytest.mark.parametrize("env", ["CartPole-v1", "Acrobot-v1"])
def test_equal_seeds_give_equal_episodes_and_the_seeds_of_two_ranks_do_not(env: str):
    num_envs, seed = 4, 3
    first, again, next_rank = (
        make_envs(env, num_envs).reset(seed=number)[0] for number in (seed, seed, seed + num_envs)
    )
    np.testing.assert_array_equal(first, again)
    everything = np.concatenate([first, next_rank])
    assert len(np.unique(everything, axis=0)) == 2 * num_envs


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("NoSuchEnv-v0", "env='NoSuchEnv-v0' cannot be made: .*NoSuchEnv"),
        ("no_such_module:Env-v0", "env='no_such_module:Env-v0' cannot be made: .*no_such_module"),
        ("Pendulum-v1", r"env='Pendulum-v1' has actions Box.*; only Discrete spaces"),
    ],
)
def test_environments_that_cannot_be_learnt_are_refused(env: str, message: str):
    with pytest.raises(ValueError, match=message):
        make_envs(env, 2)


class Pixels(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(0, 255, (8, 8, 3), dtype=np.uint8)
    action_space = spaces.Discrete(2)


def test_images_are_refused():
    envs = SyncVectorEnv([Pixels])
    with pytest.raises(ValueError, match=r"env='Pixels' has observations Box.*; only one-dimensional Box spaces"):
        check_envs("Pixels", envs)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED, None])
def test_other_autoreset_modes_are_refused(mode: AutoresetMode | None):
    envs = make_envs("CartPole-v1", 1)
    envs.metadata = envs.metadata | {"autoreset_mode": mode}
    with pytest.raises(ValueError, match=r"env='CartPole-v1' has metadata\['autoreset_mode'\]="):
        check_envs("CartPole-v1", envs)

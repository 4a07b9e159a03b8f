"""Environments step as single ones would, ranks share none, actions arrive in their space, bad ones are refused."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from fastsync.doctor import install_command
from fastsync.ppo.cli import check_environment
from fastsync.ppo.envs.interface import Environments, Episode, seed_from
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.envs.spaces import random_actions
from fastsync.ppo.envs.vector import RecordedEnvironments, VectorizedEnvironments
from fastsync.ppo.ppo import Settings
from tests.ranks import fresh_process_context
from tests.toy_envs import Countdown, Named, OwnVector


def settings(env: str, num_envs: int = 4, **changes: Any) -> Settings:
    return Settings(env=env, num_envs=num_envs, num_steps=4, **{"num_minibatches": 1} | changes)


class PlainCopies:
    """What Environments must do, written without thought for speed: single environments, one after the other."""

    def __init__(self, seed: int, first: int, num_envs: int) -> None:
        self.seed, self.first = seed, first
        self.envs = [Countdown() for _ in range(num_envs)]
        self.episode = [-1] * num_envs
        self.ended = [False] * num_envs
        self.account = [(0.0, 0)] * num_envs
        self.first_observations = [self.restart(i) for i in range(num_envs)]

    def restart(self, i: int) -> Any:
        self.episode[i] += 1
        self.ended[i] = False
        self.account[i] = (0.0, 0)
        return self.envs[i].reset(seed=seed_from(self.seed, self.first + i, self.episode[i]))[0]

    def step(self, i: int, action: int) -> tuple[Any, ...]:
        """Observation, reward, terminated, truncated, valid, episode."""
        if self.ended[i]:
            return self.restart(i), 0.0, False, False, False, None
        observation, reward, terminated, truncated, _ = self.envs[i].step(action)
        self.account[i] = (self.account[i][0] + reward, self.account[i][1] + 1)
        if not (terminated or truncated):
            return observation, reward, False, False, True, None
        self.ended[i] = True
        return observation, reward, terminated, truncated, True, Episode(self.first + i, *self.account[i])


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_steps_and_accounts_are_those_of_single_environments(vectorization: str):
    rng = np.random.default_rng(0)
    seen = {"terminated": 0, "truncated": 0, "invalid": 0}
    chosen = settings("tests.toy_envs:Countdown", 3, seed=5, vectorization=vectorization)
    with make_environments(chosen, rank=2) as environments:
        plain = PlainCopies(seed=5, first=6, num_envs=3)
        np.testing.assert_array_equal(environments.reset(), plain.first_observations)
        for _ in range(60):
            actions = rng.integers(0, 3, 3)
            step = environments.step(actions)
            rows = [plain.step(i, int(actions[i])) for i in range(3)]
            np.testing.assert_array_equal(step.observations, [row[0] for row in rows])
            np.testing.assert_array_equal(step.rewards, [row[1] for row in rows])
            assert step.terminated.tolist() == [row[2] for row in rows]
            assert step.truncated.tolist() == [row[3] for row in rows]
            assert step.valid.tolist() == [row[4] for row in rows]
            assert step.episodes == [row[5] for row in rows if row[5]]
            seen["terminated"] += step.terminated.sum()
            seen["truncated"] += step.truncated.sum()
            seen["invalid"] += (~step.valid).sum()
    assert seen["terminated"] > 5
    assert seen["truncated"] > 5
    assert seen["invalid"] > 10


def play(environments: Environments, num_steps: int) -> list[list[Any]]:
    """Observations per environment, with actions that depend on the environment's global number only."""
    observations = [environments.reset().copy()]
    generators = [np.random.default_rng(environments.first_index + i) for i in range(environments.num_envs)]
    for _ in range(num_steps):
        actions = np.array([generator.integers(0, 3) for generator in generators])
        observations.append(environments.step(actions).observations.copy())
    return [[row[i].tolist() for row in observations] for i in range(environments.num_envs)]


def test_environments_are_the_same_however_they_are_spread_over_ranks():
    with make_environments(settings("tests.toy_envs:Countdown", 4), rank=0) as together:
        expected = play(together, 20)
    spread = []
    for rank in range(2):
        with make_environments(settings("tests.toy_envs:Countdown", 2), rank=rank) as part:
            spread += play(part, 20)
    assert spread == expected
    assert len({str(row) for row in expected}) == 4
    with make_environments(settings("tests.toy_envs:Countdown", 4, seed=2), rank=0) as other:
        assert not any(row in expected for row in play(other, 20))


def test_own_vectorisation_is_chosen_where_there_is_one():
    with make_environments(settings("CartPole-v1"), rank=0) as own:
        assert isinstance(own, VectorizedEnvironments)
    with make_environments(settings("Acrobot-v1"), rank=0) as copies:
        assert isinstance(copies, RecordedEnvironments)


def test_dictionaries_are_flattened():
    with make_environments(settings("tests.toy_envs:Named", 2), rank=0) as environments:
        rows = environments.reset()
        assert rows.shape == (2, 2 + 8 + 9 + 9 + 2)
        assert environments.single_observation_space.shape == rows.shape[1:]
        for index, row in enumerate(rows):
            observation, _ = Named().reset(seed=seed_from(1, index, 0))
            np.testing.assert_array_equal(row, spaces.flatten(Named.observation_space, observation))


def test_own_vectorisation_differs_by_rank_and_by_restart_only():
    def first(rank: int, restart: int) -> Any:
        with make_environments(settings("CartPole-v1"), rank=rank, restart=restart) as environments:
            return environments.reset()

    np.testing.assert_array_equal(first(0, 0), first(0, 0))
    rows = np.concatenate([first(0, 0), first(1, 0), first(0, 64)])
    assert len(np.unique(rows, axis=0)) == 12


@pytest.mark.parametrize(
    ("env", "actions", "rewards"),
    [
        ("Continuous", np.array([[-3.0, 5.0], [0.5, -7.0]], dtype=np.float32), [1 - 1 + 2, 1 + 0.5 - 7]),
        ("FromFive", np.array([0, 2]), [1 + 5, 1 + 7]),
        ("Several", np.array([[0, 0], [1, 2]]), [1 + 10, 1 + 1 + 12]),
    ],
)
def test_actions_arrive_in_their_space(env: str, actions: Any, rewards: list[float]):
    with make_environments(settings(f"tests.toy_envs:{env}", 2), rank=0) as environments:
        environments.reset()
        assert environments.step(actions).rewards.tolist() == rewards
        tried = random_actions(environments.single_action_space, 2, np.random.default_rng(0))
        assert (tried.shape, tried.dtype) == (actions.shape, actions.dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": "NoSuchEnv-v0"}, "env='NoSuchEnv-v0' cannot be made: .*NoSuchEnv"),
        ({"env": "CartPol-v1"}, "cannot be made: .*Did you mean: `CartPole`"),
        ({"env": "tests.toy_envs:Nothing"}, "the module tests.toy_envs has no function 'Nothing'"),
        ({"env": "tests.toy_envs:not_an_environment"}, "returned 7; the function must return a gymnasium.Env"),
        ({"env": "tests.toy_envs:Grid"}, r"observations Box.*; vectors \(a Box of one dimension\).*FlattenObservation"),
        ({"env": "tests.toy_envs:ChannelsLast"}, r"images of shape \(96, 80, 3\); .*\(C, H, W\).*TransformObservation"),
        ({"env": "tests.toy_envs:SmallImage"}, "H and W must be at least 36: .*ResizeObservation"),
        (
            {"env": "tests.toy_envs:Image", "norm_observations": True},
            "norm_observations=True is for vectors, .* leave norm_observations at False",
        ),
        ({"env": "tests.toy_envs:Binary"}, "has actions MultiBinary.*TransformAction"),
        ({"env": "tests.toy_envs:Whole"}, "a Box of one dimension and real numbers can be learnt"),
        (
            {"env": "Acrobot-v1", "vectorization": "vector_entry_point"},
            "env='Acrobot-v1' has no vectorised implementation of its own; choose vectorization='sync' or 'async'",
        ),
    ],
)
def test_what_cannot_be_learnt_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_environments(settings(**changes), rank=0)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            "tests.toy_envs:OldStep",
            r"env='tests.toy_envs:OldStep' cannot be played: ValueError: .*; reset\(seed=...\)",
        ),
        (
            "tests.toy_envs:needs_an_argument",
            "needs_an_argument. cannot be made: TypeError: .*size",
        ),
        ("broken_module:make", "env='broken_module:make' cannot be made: SyntaxError: "),
        ("module_here:nothing", "the module module_here has no function 'nothing'"),
    ],
)
def test_mistakes_in_own_environments_are_told_before_ranks_start(
    env: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also those in modules that lie in the current folder, which commands do not have on the import path."""
    (tmp_path / "broken_module.py").write_text("def make(:")
    (tmp_path / "module_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with pytest.raises(ValueError, match=message):
        check_environment(settings(env))


@pytest.mark.parametrize(
    ("env", "module", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("LunarLander-v3", "Box2D", "box2d"),
        ("HalfCheetah-v5", "mujoco", "mujoco"),
    ],
)
def test_a_missing_extra_is_named(env: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch):
    for name in list(sys.modules):
        if name.startswith(("gymnasium.envs.box2d", "gymnasium.envs.mujoco")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=re.escape(install_command(extra))):
        make_environments(settings(env), rank=0)


@pytest.fixture
def own_vector(request: pytest.FixtureRequest) -> Iterator[str]:
    def make(num_envs: int, **_: Any) -> OwnVector:
        return OwnVector(num_envs, **request.param)

    gymnasium.register("OwnVector-v0", entry_point=Countdown, vector_entry_point=make)
    yield "OwnVector-v0"
    del gymnasium.registry["OwnVector-v0"]


@pytest.mark.parametrize(
    "own_vector",
    [{"mode": AutoresetMode.DISABLED}, {"mode": AutoresetMode.SAME_STEP}, {"mode": None}],
    indirect=True,
)
@pytest.mark.filterwarnings("ignore:.*AutoresetMode")
def test_other_autoreset_modes_are_refused(own_vector: str):
    with pytest.raises(ValueError, match=r"env='OwnVector-v0' has metadata\['autoreset_mode'\]="):
        make_environments(settings(own_vector), rank=0)


@pytest.mark.parametrize("env", ["Hangs", "HangsInClose"])
def test_processes_that_hang_are_ended(env: str):
    with make_environments(settings(f"tests.toy_envs:{env}", 2, vectorization="async"), rank=0) as environments:
        environments.reset()
        assert isinstance(environments, RecordedEnvironments)
        assert isinstance(environments._vector, AsyncVectorEnv)
        processes = environment_processes(environments)
        if env == "Hangs":
            environments._vector.step_async(np.array([[0.0], [1e8]], dtype=np.float32))
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


def environment_processes(environments: Environments) -> list[Any]:
    return environments._vector.processes  # type: ignore[attr-defined,no-any-return]


def test_processes_outlive_signals_to_the_whole_job_and_their_end_is_told():
    chosen = settings("tests.toy_envs:Countdown", 2, vectorization="async")
    with make_environments(chosen, rank=0) as environments:
        environments.reset()
        first, second = environment_processes(environments)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(first.pid, number)
            os.kill(second.pid, number)
        environments.step(np.zeros(2, np.int64))
        assert len(environments.state()["episodes"]) == 2
        first.kill()
        first.join()
        with pytest.raises((EOFError, ConnectionError)):
            environments.step(np.zeros(2, np.int64))
    assert not second.is_alive()


def leave_processes(said: Path, how: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # they tell that their pipe broke
    left = make_environments(settings("tests.toy_envs:Countdown", 2, vectorization="async"), rank=0)
    left.reset()
    said.write_text(" ".join(str(process.pid) for process in environment_processes(left)))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["of itself", "killed"])
def test_processes_that_nobody_closed_end_with_their_rank(tmp_path: Path, how: str):
    said = tmp_path / "pids"
    rank = fresh_process_context().Process(target=leave_processes, args=(said, how))
    rank.start()
    rank.join()
    assert rank.exitcode == (0 if how == "of itself" else -signal.SIGKILL)
    pids = [int(pid) for pid in said.read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 100
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert alive == []


def is_running(pid: int) -> bool:
    """Not where it has ended and nobody has asked how."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False

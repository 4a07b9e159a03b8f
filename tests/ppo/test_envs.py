"""Environments step as single ones would, ranks share none, actions arrive in their space, bad ones are refused."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from fastsync.doctor import install_command
from fastsync.ppo.cli import check_environment
from fastsync.ppo.envs import processes as processes_of_environments
from fastsync.ppo.envs import vector
from fastsync.ppo.envs.interface import EnvironmentFailedError, Environments, Step, seed_from
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.envs.spaces import random_actions
from fastsync.ppo.envs.vector import RecordedEnvironments, VectorizedEnvironments
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.metrics import add_infos
from tests.forked import state_of, until
from tests.ranks import fresh_process_context
from tests.refused import refused
from tests.toy_envs import Countdown, Gridded, Named


def settings(env: str, num_envs: int = 4, **changes: Any) -> Settings:
    return Settings(env=env, num_envs=num_envs, num_steps=4, **{"num_minibatches": 1} | changes)


def test_processes_give_what_copies_in_this_process_give():
    """What that has to be tests/ppo/test_rollout.py says."""
    seen: list[list[Any]] = []
    for vectorization in ("sync", "async"):
        chosen = settings("tests.toy_envs:Countdown", 3, seed=5, vectorization=vectorization)
        generator = np.random.default_rng(0)
        with make_environments(chosen, rank=2) as environments:
            seen.append([environments.reset().copy()])
            for _ in range(60):
                step = environments.step(generator.integers(0, 3, 3))
                columns = (step.observations, step.rewards, step.valid, step.terminated, step.truncated)
                seen[-1] += [*map(np.copy, columns), *step.episodes]
    np.testing.assert_equal(seen[0], seen[1])


def test_dictionaries_are_flattened():
    with make_environments(settings("tests.toy_envs:Named", 2), rank=0) as environments:
        rows = environments.reset()
        assert rows.shape == (2, 2 + 8 + 9 + 9 + 2)
        assert environments.single_observation_space.shape == rows.shape[1:]
        for index, row in enumerate(rows):
            observation, _ = Named().reset(seed=seed_from(1, index, 0))
            np.testing.assert_array_equal(row, spaces.flatten(Named.observation_space, observation))


@pytest.mark.parametrize(("env", "size"), [("Gridded", 12), ("Single", 1), ("own", 12)])
def test_what_is_no_vector_is_flattened(env: str, size: int, monkeypatch: pytest.MonkeyPatch):
    def make(num_envs: int, **_: Any) -> SyncVectorEnv:
        return SyncVectorEnv([Gridded] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)

    spec = EnvSpec("OwnVector-v0", entry_point=Gridded, vector_entry_point=make)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    with make_environments(settings(spec.id if env == "own" else f"tests.toy_envs:{env}", 2), rank=0) as environments:
        assert isinstance(environments, VectorizedEnvironments) == (env == "own")
        assert environments.single_observation_space.shape == (size,)
        assert environments.reset().shape == environments.step(np.zeros(2, np.int64)).observations.shape == (2, size)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("env", ["DrawsFromNumpy", "DrawsFromPython", "DrawsFromSpaces", "ForgetsItsSeed"])
def test_generators_that_nobody_seeds_are_seeded(env: str, vectorization: str):
    """By seed, rank and restart."""

    def rows(rank: int, restart: int = 0, **changes: Any) -> Any:
        chosen = settings(f"tests.toy_envs:{env}", 2, vectorization=vectorization, **changes)
        with make_environments(chosen, rank=rank, restart=restart) as environments:
            first = environments.reset().copy()
            return np.stack([first, *(environments.step(np.zeros(2, np.int64)).observations.copy() for _ in range(20))])

    seen = rows(0)
    np.testing.assert_array_equal(rows(0), seen)
    for other in (rows(1), rows(0, restart=64), rows(0, seed=2)):
        assert not np.array_equal(other, seen)


@pytest.mark.parametrize("env", ["Meddling", "MeddlingWithReals"])
def test_an_environment_may_change_its_action_in_place(env: str):
    with make_environments(settings(f"tests.toy_envs:{env}", 2), rank=0) as environments:
        environments.reset()
        actions = random_actions(environments.single_action_space, 2, np.random.default_rng(0)) + 1
        before = actions.copy()
        environments.step(actions)
        np.testing.assert_array_equal(actions, before)


def test_own_vectorisation_differs_by_rank_and_by_restart_only():
    def first(rank: int, restart: int) -> Any:
        with make_environments(settings("CartPole-v1"), rank=rank, restart=restart) as environments:
            assert isinstance(environments, VectorizedEnvironments)
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
        ({"env": "CartPol-v1"}, "env='CartPol-v1' cannot be made: .*; did you mean CartPole-v1.*module:name"),
        ({"env": "tests.toy_envs:Nothing"}, "the module tests.toy_envs has no function 'Nothing'"),
        ({"env": "tests.toy_envs:payout"}, "did you mean Payout"),
        ({"env": "tests.toy_envs:not_an_environment"}, "returned 7; the function must return a gymnasium.Env"),
        ({"env": "tests.toy_envs:SmallImage"}, "H and W must be at least 36: .*ResizeObservation"),
        (
            {"env": "tests.toy_envs:Image", "norm_observations": True},
            "norm_observations=True is for vectors, .* set norm_observ",
        ),
        ({"env": "tests.toy_envs:Binary"}, "has actions MultiBinary.*TransformAction"),
        ({"env": "Acrobot-v1", "vectorization": "vector_entry_point"}, "has no vectorised implementation of its own"),
    ],
)
def test_what_cannot_be_learnt_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_environments(settings(**changes), rank=0)


def test_mistakes_in_own_environments_are_told_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also those in modules that lie in the current folder, which commands do not have on the import path."""
    (tmp_path / "broken_module.py").write_text("def make(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    mistakes = {
        "tests.toy_envs:OldStep": r"cannot be played: .*\(OldStep\) failed in step 1 .* ValueError: .*; reset\(seed=",
        "broken_module:make": "cannot be made: SyntaxError: ",
    }
    for env, mistake in mistakes.items():
        with pytest.raises(ValueError, match=f"env='{env}' {mistake}"):
            check_environment(settings(env))


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ("Faulty", r"step 2 of episode 0: KeyError: 'of my own'"),
        (
            "WrongShape",
            r"step 2 of episode 0: ValueError: the observation has the shape \(2,\); observation_space has ",
        ),
        (
            "WrongDtype",
            "step 2 of episode 0: ValueError: the observation has the dtype complex64; observation_space has ",
        ),
        ("NoReward", "step 2 of episode 0: ValueError: the reward is None; it must be a number"),
        ("NanRewardLater", "step 2 of episode 0: ValueError: the reward is nan; it must be finite"),
        ("FaultyReset", r"reset\(\) of episode 2: ValueError: "),
    ],
)
def test_an_environment_that_fails_is_named_with_its_step(env: str, reason: str):
    kind = "async" if env == "Faulty" else "sync"
    chosen = settings(f"tests.toy_envs:{env}", 2, vectorization=kind)
    with make_environments(chosen, rank=3) as environments:
        environments.reset()
        with pytest.raises(RuntimeError, match=rf"environment [67] \({env}\) failed in {reason}"):
            step_often(environments)


class Talkative(Countdown):
    """Puts into ``info`` what gymnasium cannot join, and numbers of several kinds."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index

    def reset(self, **given: Any):
        return super().reset(**given)[0], {"share": "not yet", "path": []}

    def step(self, action: Any):
        observation, reward, *ended, _ = super().step(action)
        info = {"path": np.zeros(2 + self.index), "alone": np.array([self.index]), "label": "won"}
        info["winner"] = None if self.index else 1
        return observation, reward, *ended, info | {"share": 1 if self.index == 0 else 0.5}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_whatever_info_holds_only_numbers_to_log_are_read(vectorization: str):
    chosen = settings(f"{__name__}:Talkative", 3, vectorization=vectorization, log_info=("share", "winner", "alone"))
    with make_environments(chosen, rank=0) as environments:
        environments.reset()
        step = environments.step(np.zeros(3, np.int64))
        assert set(step.infos) == {"share", "_share", "winner", "_winner", "alone", "_alone"}
        numbers: dict[str, list[float]] = {"share": [], "winner": [], "alone": []}
        add_infos(numbers, step)
        assert numbers == {"share": [1.0, 0.5, 0.5], "winner": [1.0], "alone": [0.0, 1.0, 2.0]}


@pytest.mark.parametrize(("name", "value"), [("path", r"array\(\["), ("label", "'won'")])
def test_what_is_no_number_cannot_be_logged(name: str, value: str):
    chosen = settings(f"{__name__}:Talkative", 3, log_info=(name,))
    with make_environments(chosen, rank=0) as environments:
        environments.reset()
        with pytest.raises(RuntimeError, match=rf"environment 0 \(Talkative\) .*info\['{name}'\] is {value}.* numbers"):
            environments.step(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match=rf"cannot be played: .*info\['{name}'\]"):
        check_environment(chosen)
    infos = {name: np.array([None, np.bool_(True)]), f"_{name}": np.array([False, True])}
    some = Step(*(np.ones(2, np.bool_) for _ in range(5)), [], infos)
    numbers: dict[str, list[float]] = {name: []}
    add_infos(numbers, some)  # as gymnasium joins numpy's truth values
    assert numbers == {name: [1.0]}
    joined = Step(*(np.zeros(2, np.bool_) for _ in range(5)), [], {name: np.array([[1, 2], [3, 4]])})
    with pytest.raises(ValueError, match=rf"(?s)info\['{name}'\] is .* log_info is for a number of each environment"):
        add_infos({name: []}, joined)


class Level(Countdown):
    """A level's size is in the bounds."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-1.0 - index, 1.0 + index, Countdown.observation_space.shape, np.float32)


def level_of_another_shape(index: int) -> Any:
    return gymnasium.wrappers.TransformObservation(
        Countdown(), lambda row: np.resize(row, 2 + index), spaces.Box(-np.inf, np.inf, (2 + index,), np.float32)
    )


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_copies_may_differ_in_bounds_alone(vectorization: str):
    with make_environments(settings(f"{__name__}:Level", 3, vectorization=vectorization), rank=0) as environments:
        assert environments.reset().shape[0] == 3
        environments.step(np.zeros(3, np.int64))
    chosen = settings(f"{__name__}:level_of_another_shape", 3, vectorization=vectorization)
    refused(lambda: make_environments(chosen, rank=0), "level_of_another_shape' has copies that differ")


def keep_the_refusal() -> None:
    chosen = settings(f"{__name__}:level_of_another_shape", 3, vectorization="async")
    try:
        make_environments(chosen, rank=0)
    except ValueError as error:
        kept.append(error)


kept: list[ValueError] = []


def test_a_process_that_keeps_the_refusal_ends() -> None:
    """Its traceback keeps the half-made environments, whose processes ignore the signal to end."""
    process = fresh_process_context().Process(target=keep_the_refusal)
    process.start()
    process.join(60)
    status = process.exitcode
    process.kill()
    assert status == 0


def step_often(environments: Environments) -> None:
    for _ in range(30):
        environments.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_function_gets_the_number_of_the_environment_and_arguments(vectorization: str):
    for kwargs, expected in ((None, [6, 7]), ({"first": 10}, [16, 17])):
        chosen = settings("tests.toy_envs:at_level", 2, vectorization=vectorization, env_kwargs=kwargs)
        with make_environments(chosen, rank=3) as environments:
            assert environments.reset()[:, 0].tolist() == expected


def test_arguments_reach_gymnasiums_environments():
    for env, kwargs in (("Pendulum-v1", {"g": 3.5}), ("CartPole-v1", {"sutton_barto_reward": True})):
        with make_environments(settings(env, env_kwargs=kwargs), rank=0) as environments:
            made = environments._vector
            seen = made.get_attr("g")[0] if env == "Pendulum-v1" else made._sutton_barto_reward
            assert seen == next(iter(kwargs.values()))
    for env in ("Pendulum-v1", "CartPole-v1", "tests.toy_envs:at_level"):
        with pytest.raises(ValueError, match=rf"env='{env}' with env_kwargs=\{{'size': 2\}} cannot be made: TypeError"):
            make_environments(settings(env, env_kwargs={"size": 2}), rank=0)


def test_bounds_that_the_first_actions_hardly_suit_are_warned_of():
    with make_environments(settings("tests.toy_envs:Wide"), rank=0) as environments:
        (note,) = environments.notes
    assert note.startswith(
        "warning: env='tests.toy_envs:Wide' takes actions in [0, 1000] (number 1), and 1 more like it, but the policy "
        "begins with mean 0 and standard deviation 1, and its actions are only clipped. Set action_distribution to "
        "'tanh_normal' or 'beta', which are scaled, or wrap the environment in gymnasium.wrappers.RescaleAction(env, -1"
    )
    with make_environments(settings("tests.toy_envs:Hundreds", action_distribution="beta"), rank=0) as environments:
        assert not environments.notes
    started = {"log_std_init": 5.0}  # at a standard deviation of 148
    for env, changes in (("Pendulum-v1", {}), ("tests.toy_envs:Continuous", {}), ("tests.toy_envs:Hundreds", started)):
        with make_environments(settings(env, **changes), rank=0) as environments:
            assert not environments.notes


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(ValueError, match=re.escape(install_command("atari"))):
        make_environments(settings("ALE/Pong-v5"), rank=0)


def test_other_autoreset_modes_are_refused(monkeypatch: pytest.MonkeyPatch):
    def make(num_envs: int, **_: Any) -> SyncVectorEnv:
        return SyncVectorEnv([Countdown] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    spec = EnvSpec("OwnVector-v0", entry_point=Countdown, vector_entry_point=make)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    refused(lambda: make_environments(settings(spec.id), rank=0), "env='OwnVector-v0' has")


@pytest.mark.parametrize("env", ["Hangs", "HangsInClose"])
def test_processes_that_hang_are_ended(
    env: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vector, "CLOSE_SECONDS", 0.3)
    with make_environments(settings(f"tests.toy_envs:{env}", 2, vectorization="async"), rank=1) as environments:
        environments.reset()
        assert isinstance(environments, RecordedEnvironments)
        assert isinstance(environments._vector, AsyncVectorEnv)
        processes = environment_processes(environments)
        if env == "Hangs":
            environments._vector.step_async(np.array([[0.0], [1e8]], dtype=np.float32))
    ended = [process.exitcode for process in processes]
    assert ended == ([0, -signal.SIGKILL] if env == "Hangs" else [-signal.SIGKILL] * 2)
    names = [
        f"environment {2 + i} (env='tests.toy_envs:{env}', process {processes[i].pid})" for i in (0, 1) if ended[i]
    ]
    assert f"fastsync train: {' and '.join(names)} did not close within 0.3 s" in capfd.readouterr().err


@pytest.mark.parametrize(("env", "ended"), [("Simulated", 0), ("SimulatedHangs", -signal.SIGKILL)])
def test_simulators_end_with_their_environment(
    env: str, ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector, "CLOSE_SECONDS", 0.3 if ended else 10.0)
    kwargs = {"folder": str(tmp_path)}
    chosen = settings(f"tests.toy_envs:{env}", 2, vectorization="async", env_kwargs=kwargs)
    with make_environments(chosen, rank=0) as environments:
        environments.reset()
        processes = environment_processes(environments)
    assert [process.exitcode for process in processes] == [ended] * 2
    simulators = [int(path.name) for path in tmp_path.iterdir()]
    assert len(simulators) == 4  # two of them belong to environments that only told their spaces
    until(lambda: not any(map(state_of, simulators)), "the end of the simulators")


def test_an_environment_that_does_not_answer_is_named_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes_of_environments, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(vector, "FAILED_CLOSE_SECONDS", 0.1)
    chosen = settings("tests.toy_envs:Countdown", 3, vectorization="async")
    said = ""
    with make_environments(chosen, rank=0) as environments:
        environments.reset()
        processes = environment_processes(environments)
        names = [f"environment {i} (env='tests.toy_envs:Countdown', process {processes[i].pid})" for i in (1, 2)]
        expected = f"fastsync train: no answer for 0.1 s from {' and '.join(names)}; the training waits"
        for stopped in processes[1:]:
            os.kill(stopped.pid, signal.SIGSTOP)
        stepped = threading.Thread(target=environments.step, args=(np.zeros(3, np.int64),))
        stepped.start()

        def is_said() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return expected in said

        until(is_said, "the second message")
        for stopped in processes[1:]:
            os.kill(stopped.pid, signal.SIGCONT)
        stepped.join()


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
        first.kill()
        first.join()
        told = rf"environment 0 \(env='tests.toy_envs:Countdown', process {first.pid}\) was ended by SIGKILL"
        with pytest.raises(EnvironmentFailedError, match=told):
            environments.step(np.zeros(2, np.int64))
    assert second.exitcode == 0


def leave_processes(said: Path, stderr: Path) -> None:
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    chosen = settings("tests.toy_envs:Simulated", 2, vectorization="async", env_kwargs={"folder": str(said)})
    left = make_environments(chosen, rank=0)
    left.reset()
    for process in environment_processes(left):
        (said / str(process.pid)).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_that_nobody_closed_end_with_their_rank_and_without_a_word(tmp_path: Path) -> None:
    said, stderr = tmp_path / "pids", tmp_path / "stderr"
    said.mkdir()
    rank = fresh_process_context().Process(target=leave_processes, args=(said, stderr))
    rank.start()
    rank.join()
    assert rank.exitcode == -signal.SIGKILL
    pids = [int(path.name) for path in said.iterdir()]
    assert len(pids) == 2 + 4
    until(lambda: not any(map(state_of, pids)), "the end of the environments' processes and simulators")
    assert "Traceback" not in stderr.read_text()


@pytest.mark.parametrize("maker", ["ends_itself", "ends_in_making"])
def test_an_environment_that_ends_its_process_is_named(maker: str) -> None:
    chosen = settings(f"{__name__}:{maker}", 2, vectorization="async")
    told = r"environment 1 \(env='.*', process \d+\) has ended by itself, with status 3"
    with pytest.raises(EnvironmentFailedError, match=told):
        one_step(chosen)


def one_step(chosen: Settings) -> None:
    with make_environments(chosen, rank=0) as environments:
        environments.reset()
        environments.step(np.zeros(2, np.int64))


class EndsItself(Countdown):
    def step(self, action: Any) -> Any:
        os._exit(3)


def ends_itself(index: int) -> gymnasium.Env[Any, Any]:
    return EndsItself() if index else Countdown()


def ends_in_making(index: int) -> gymnasium.Env[Any, Any]:
    return Countdown() if index == 0 else sys.exit(3)

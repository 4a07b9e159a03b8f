"""Environments that step together in torch: the rollout of the same ones in numpy, on their device, without a wait."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gymnasium import spaces

from fastsync.cli import main
from fastsync.ppo import distributions
from fastsync.ppo.cli import check_environment
from fastsync.ppo.distributions import Beta, TanhNormal
from fastsync.ppo.envs.interface import UNSEEN
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.envs.tensors import OnHost, TensorEnvironments
from fastsync.ppo.envs.vector import VectorizedEnvironments
from fastsync.ppo.evaluation import make_players, play
from fastsync.ppo.policies import make_policy
from fastsync.ppo.ppo import Collector, Rollout, Settings
from fastsync.ppo.random_streams import RandomStreams
from tests import fake_device
from tests.forked import Command
from tests.refused import refused
from tests.torch_envs import FlagsOfFloats, TorchCartPole

SETTINGS = Settings(
    env="tests.torch_envs:cart_pole", env_kwargs={"limit": 30}, num_envs=6, num_steps=64, hidden_sizes=(16,),
    fused=False, log_info=("speed",),
)  # fmt: skip


def rollouts(environments: Any, device: torch.device, number: int = 2) -> list[Rollout]:
    """Copies, for the next one overwrites them."""
    torch.manual_seed(0)
    with environments:
        spaces = environments.single_observation_space, environments.single_action_space
        policy = make_policy(SETTINGS, *spaces).to(device)
        streams = RandomStreams(0, first_index=0, num_envs=6, device=device)
        collector, collected = Collector(SETTINGS, environments, policy, streams), []
        for _ in range(number):
            rollout = collector.collect()
            copies = {
                name: value.clone() for name, value in rollout._asdict().items() if isinstance(value, torch.Tensor)
            }
            collected.append(rollout._replace(**copies))
        return collected


def assert_same_rollouts(ones: list[Rollout], others: list[Rollout]) -> None:
    for one, other in zip(ones, others, strict=True):
        for name, value in one._asdict().items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.cpu(), getattr(other, name).cpu()), name
        assert one.episodes == other.episodes
        assert one.infos == pytest.approx(other.infos)
    assert sum(len(each.episodes) for each in ones) > 10
    assert any((each.done & ~each.terminated).any() for each in ones)


def test_a_rollout_of_tensors_is_that_of_arrays():
    cpu = torch.device("cpu")
    tensors = make_environments(SETTINGS, rank=0)
    assert isinstance(tensors, TensorEnvironments)
    arrays = VectorizedEnvironments(OnHost(TorchCartPole(6, limit=30)), seed=tensors._seed, first_index=0)
    assert_same_rollouts(rollouts(tensors, cpu), rollouts(arrays, cpu))


@pytest.mark.parametrize("tells", [True, False])
def test_environments_may_reset_within_the_last_step(tells: bool):
    """Its observation is told, or that before it is taken. The step after it is not one to learn from."""
    settings = replace(SETTINGS, env="tests.torch_envs:same_step", env_kwargs={"tells": tells}, log_info=())
    environments = make_environments(settings, rank=0)
    assert "resets within the last step" in environments.notes[0]
    source = environments._vector.env
    first, second = rollouts(environments, torch.device("cpu"))
    ends = [(step, env) for step, env in first.done.nonzero().tolist() if step < len(first.done) - 1]
    assert len(ends) > 10
    for (step, env), final in zip(ends, source.final, strict=False):
        assert torch.equal(first.observations[step + 1, env], final)
    assert torch.equal(first.valid[1:], ~first.done[:-1])
    assert torch.equal(second.valid[0], ~first.done[-1])
    assert not (first.done & ~first.valid).any()
    assert (first.rewards == first.valid).all()
    lengths = [episode.length for episode in first.episodes]
    assert lengths == [episode.episode_return for episode in first.episodes]
    assert max(lengths) == 20  # the first ones; later ones have taken a step unseen


def _stays_on_its_device(rank: int, world_size: int) -> None:
    fake_device.load()
    device, waits = torch.device(fake_device.DEVICE), []
    extension = fake_device.load_device()
    for num_steps in (64, 8):
        settings = replace(SETTINGS, num_steps=num_steps)
        environments = make_environments(settings, rank=0, device=device)
        assert environments.notes == []
        policy = make_policy(settings, environments.single_observation_space, environments.single_action_space)
        streams = RandomStreams(0, first_index=0, num_envs=6, device=device)
        collector = Collector(replace(settings, log_info=()), environments, policy.to(device), streams)
        extension.take_host_waits()
        rollout = collector.collect()
        waits.append(extension.take_host_waits())
        assert {rollout.observations.device.type, rollout.rewards.device.type, rollout.done.device.type} == {
            device.type
        }
    assert waits[0] == waits[1], waits  # none in a step


def test_nothing_of_a_step_waits_for_the_device():
    fake_device.run_ranks(_stays_on_its_device, 1)


def test_a_run_on_two_ranks_is_evaluated_resumed_and_played(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run = str(tmp_path / "run")
    words = [
        "--env", SETTINGS.env, "--env-kwargs", '{"limit": 30}', "--num-envs", "6", "--num-steps", "32", "--nproc", "2",
        "--eval-interval", "500", "--eval-episodes", "3", "--log-info", "speed", "--runs-dir", str(tmp_path),
        "--run-name", "run", "--resume", "auto",
    ]  # fmt: skip
    for num_steps in ("1000", "2000"):
        job = Command(main, tmp_path, "train", *words, "--total-steps", num_steps)
        try:
            assert job.wait(120) == 0, job.err
        finally:
            job.kill()
    assert "could not be restored exactly, and begin new episodes" in job.out
    rows = list(csv.DictReader((tmp_path / "run" / "progress.csv").open()))
    assert float(rows[-1]["info/speed"]) > 0
    assert sum(bool(row["evaluation/return"]) for row in rows) == 4
    assert 5 < float(rows[-1]["episodes/return"]) <= 30
    assert main(["eval", run, "--episodes", "2"]) == 0
    assert "over 2 episodes" in capfd.readouterr().out
    assert main(["eval", run, "--render"]) == 2
    assert "cannot be drawn" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("env", "given", "told"),
    [
        ("cart_pole", {"vectorization": "sync"}, "takes num_envs"),
        ("disabled", {}, "autoreset_mode"),
        ("not_a_vector", {}, "must return a gymnasium.vector.VectorEnv"),
        ("elsewhere", {}, "observes a tensor of shape (4, 4)"),
    ],
)
def test_environments_that_do_not_suit_are_refused(env: str, given: dict[str, Any], told: str):
    settings = Settings(env=f"tests.torch_envs:{env}", **given)
    refused(lambda: make_environments(settings, rank=0), f"env='tests.torch_envs:{env}'", told)


@pytest.mark.parametrize("kind", ["Privileged", "FrozenLake-v1"])
def test_arrays_of_a_function_of_num_envs_are_flattened_in_evaluations_too(kind: str):
    settings = Settings(env="tests.torch_envs:of_arrays", env_kwargs={"kind": kind}, eval_interval=1)
    check_environment(settings)
    with make_players(settings.env, settings.env_kwargs, seed=0, indices=range(UNSEEN, UNSEEN + 2)) as players:
        policy = make_policy(settings, players.single_observation_space, players.single_action_space)
        assert len(play(policy, players, 2)) == 2


def test_players_that_step_together_have_flags_and_reset_in_the_next_step():
    vector = OnHost(FlagsOfFloats(2))
    vector.reset(seed=0)
    assert [flags.dtype for flags in vector.step(torch.zeros(2, dtype=torch.int64))[2:4]] == [bool, bool]
    refused(lambda: make_players("tests.torch_envs:disabled", seed=0), "env='tests.torch_envs:disabled'", "autoreset")


def test_a_simulator_for_gpus_is_tried_there_before_ranks_start():
    settings = Settings(env="tests.torch_envs:on_gpus_only", device="cuda", eval_interval=1)
    assert check_environment(settings)[0].shape == (4,)
    with pytest.raises(ValueError, match="no simulator for cpu"):
        check_environment(replace(settings, device="cpu"))


def _copies_its_constants_once(rank: int, world_size: int) -> None:
    fake_device.load()
    box = spaces.Box(-2.0, 3.0, (3,))
    for distribution in (TanhNormal(box, log_std_init=0.0), Beta(box)):
        distribution.to(fake_device.DEVICE)
        outputs = torch.zeros(4, distribution.num_outputs).to(fake_device.DEVICE).requires_grad_()
        actions = torch.full((4, 3), 0.5).to(fake_device.DEVICE)
        with torch.inference_mode():
            distribution.scaled(actions)
            distribution.log_prob_and_entropy(outputs, actions)
        with fake_device.unwaited():
            distribution.scaled(actions)
            _, entropies = distribution.log_prob_and_entropy(outputs, actions)
        entropies.sum().backward()
        assert outputs.grad is not None


def test_no_action_within_bounds_waits_for_the_device():
    fake_device.run_ranks(_copies_its_constants_once, 1)


def test_a_rollout_computes_no_entropies():
    box = spaces.Box(-2.0, 3.0, (3,))
    for distribution in (TanhNormal(box, log_std_init=0.0), Beta(box)):
        outputs, actions = torch.randn(4, distribution.num_outputs), torch.rand(4, 3)
        expected = distribution.log_prob_and_entropy(outputs, actions)[0]
        with mock.patch.object(torch.Tensor, "digamma", None), mock.patch.object(distributions, "_QUADRATURE", None):
            assert torch.equal(distribution.log_prob(outputs, actions), expected)

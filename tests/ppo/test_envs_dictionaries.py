"""Dictionaries of observations: what rows are made of them, and that trainings go on, remember and learn with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation
from torch import Tensor

from fastsync.ppo.envs.dictionaries import PackedSpace, Packer, images_of, numbers_of, pack_vector
from fastsync.ppo.envs.make import make_environments, try_environments
from fastsync.ppo.envs.vector import VectorizedEnvironments
from fastsync.ppo.evaluate import find_checkpoint, load_policy, make_environment, play
from fastsync.ppo.policies import make_policy
from fastsync.ppo.ppo import Settings, train
from tests.ranks import run_ranks
from tests.toy_envs import Named, OwnVector, Pictured

NAMED = Settings(env="tests.toy_envs:Named", num_envs=4, num_steps=8, num_minibatches=2, num_epochs=2)
PICTURED = replace(NAMED, env="tests.toy_envs:Pictured")


def stacked(observations: Any) -> Any:
    if isinstance(observations[0], dict):
        return {key: stacked([each[key] for each in observations]) for key in observations[0]}
    return np.stack(observations)


def looks(kind: type[Named] | type[Pictured], number: int = 5) -> list[Any]:
    env = kind()
    return [env.reset(seed=seed)[0] for seed in range(number)]


def test_numbers_are_those_that_gymnasium_flattens_to():
    packer = Packer(Named.observation_space)
    seen = looks(Named)
    rows = np.stack([packer(each) for each in seen])
    assert rows.dtype == packer.space.dtype == np.float64
    np.testing.assert_array_equal(rows, [spaces.flatten(Named.observation_space, each) for each in seen])
    assert packer.space == spaces.flatten_space(Named.observation_space)


@pytest.mark.parametrize("value", [1, 5])
def test_whole_numbers_outside_of_their_space_are_refused(value: int):
    packer = Packer(spaces.Dict(first=spaces.Discrete(3), second=spaces.Discrete(3, start=2)))
    packer({"first": 2, "second": np.int64(4)})
    with pytest.raises(ValueError, match=rf"an observation is outside of Discrete\(3, start=2\): {value}; mend"):
        packer({"first": 0, "second": np.int64(value)})


def test_rows_hold_numbers_and_images():
    packer = Packer(Pictured.observation_space)
    seen = stacked(looks(Pictured))
    rows = torch.from_numpy(np.stack([packer(each) for each in looks(Pictured)]))
    space = packer.space
    assert isinstance(space, PackedSpace)
    assert rows.shape == (5, *space.shape)
    assert numbers_of(rows, space.num_numbers).flatten().tolist() == seen["noise"].tolist()
    far, near = images_of(rows.unflatten(0, (5, 1)), space)
    assert torch.equal(far.squeeze(1), torch.from_numpy(seen["far"]))
    assert torch.equal(near.squeeze(1), torch.from_numpy(seen["near"]))


class Grey(Pictured):
    """Of its pictures the near one has no channels."""

    observation_space = spaces.Dict(
        {**Pictured.observation_space.spaces, "near": spaces.Box(0, 255, (36, 40), dtype=np.uint8)}
    )

    def look(self) -> Any:
        return {**super().look(), "near": super().look()["near"][0]}


def test_frames_of_a_stack_are_channels():
    env = FrameStackObservation(Grey(), 2)
    assert isinstance(env.observation_space, spaces.Dict)
    packer = Packer(env.observation_space)
    assert isinstance(packer.space, PackedSpace)
    assert packer.space.images == {"far": (2, 37, 41), "near": (2, 36, 40)}
    env.reset(seed=1)
    seen = env.step(0)[0]
    row = torch.from_numpy(packer(seen)).unsqueeze(0)
    assert numbers_of(row, packer.space.num_numbers).flatten().tolist() == seen["noise"].tolist()
    far, near = images_of(row, packer.space)
    assert torch.equal(far.squeeze(0), torch.from_numpy(seen["far"].squeeze(1)))
    assert torch.equal(near.squeeze(0), torch.from_numpy(seen["near"]))
    assert seen["near"][0, 0, 0] == seen["near"][1, 0, 0] + 1  # one step more remained


@pytest.mark.parametrize("settings", [NAMED, PICTURED])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_environments_with_dictionaries_can_be_saved_and_restored(settings: Settings, autoreset: Any):
    trial = try_environments(replace(settings, autoreset=autoreset), seconds=100)
    assert (trial.is_restorable, trial.note) == (True, None)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_last_observations_are_rows_too(vectorization: Any):
    settings = replace(NAMED, autoreset="same_step", vectorization=vectorization)
    with make_environments(settings, rank=0) as environments:
        environments.reset()
        finals = [row for _ in range(8) for row in environments.step(np.zeros(4)).final_observations.values()]
    assert len(finals) >= 4
    assert all(row[2 + 1] == 1.0 for row in finals)  # behind two numbers: none remain, counted from -1


def test_images_come_from_processes():
    rows = []
    for vectorization in ("sync", "async"):
        with make_environments(replace(PICTURED, vectorization=vectorization), rank=0) as environments:
            rows.append([environments.reset(), *(environments.step(np.zeros(4)).observations for _ in range(3))])
    for here, there in zip(*rows, strict=True):
        assert here.dtype == np.uint8
        np.testing.assert_array_equal(here, there)


class OwnDictionaries(OwnVector):
    def __init__(self, mode: AutoresetMode, are_final_ones_batched: bool) -> None:
        super().__init__(2, mode)
        self.are_final_ones_batched = are_final_ones_batched
        self.single_observation_space = spaces.Dict(count=spaces.Discrete(100), zero=spaces.Box(0, 9, (1,)))

    def reset(self, *, seed: Any = None, options: Any = None):
        return self.named(super().reset()[0]), {}

    def step(self, actions: Any):
        observations, *others, infos = super().step(actions)
        if "final_obs" in infos:
            last = {"count": np.int64(self.count), "zero": np.zeros(1, np.float32)}
            infos["final_obs"] = stacked([last, last]) if self.are_final_ones_batched else np.array([last, last])
        return self.named(observations), *others, infos

    def named(self, zeros: Any) -> Any:
        return {"count": np.full(2, self.count), "zero": zeros}


@pytest.mark.parametrize("are_final_ones_batched", [False, True])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_environments_vectorised_by_themselves_give_rows(mode: AutoresetMode, are_final_ones_batched: bool):
    vector = pack_vector(OwnDictionaries(mode, are_final_ones_batched))
    environments = VectorizedEnvironments(vector, seed=1, first_index=0)
    assert environments.single_observation_space.shape == (101,)
    assert environments.reset().argmax(axis=1).tolist() == [0, 0]
    steps = [environments.step(np.zeros(2, np.int64)) for _ in range(3)]
    assert [step.observations.argmax(axis=1).tolist() for step in steps] == [[1, 1], [2, 2], [3, 3]]
    finals = {index: int(row.argmax()) for index, row in steps[-1].final_observations.items()}
    assert finals == ({0: 3, 1: 3} if mode == AutoresetMode.SAME_STEP else {})


class OnlyPictures(Pictured):
    observation_space = spaces.Dict(near=spaces.Box(0, 255, (3, 36, 40), dtype=np.uint8))

    def look(self) -> Any:
        return {"near": super().look()["near"]}


def test_pictures_alone_are_learnt_from():
    with make_environments(replace(PICTURED, env=f"{__name__}:OnlyPictures"), rank=0) as environments:
        policy = make_policy(PICTURED, environments.single_observation_space, environments.single_action_space)
        outputs, values, _ = policy(torch.from_numpy(environments.reset()))
    assert (outputs.shape, values.shape) == ((4, 3), (4,))


class ChannelsLast(Pictured):
    observation_space = spaces.Dict(eye=spaces.Dict(far=spaces.Box(0, 255, (96, 80, 3), dtype=np.uint8)))


class SmallPicture(Pictured):
    observation_space = spaces.Dict(near=spaces.Box(0, 255, (3, 7, 7), dtype=np.uint8), place=spaces.Discrete(3))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("OnlyPictures", r"norm_observations=True is for vectors, but .* has nothing but images"),
        ("SmallPicture", r"shape \(3, 7, 7\) under 'near'.* at least 36.*FlattenObservation"),
        ("ChannelsLast", r"shape \(96, 80, 3\) under 'eye.far'; .*put the channels first"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(env: str, message: str):
    with pytest.raises(ValueError, match=message):
        make_environments(replace(PICTURED, env=f"{__name__}:{env}", norm_observations=True), rank=0)


def test_envpools_dictionaries_are_refused():
    pytest.importorskip("envpool")
    with pytest.raises(ValueError, match=r"of EnvPool has dictionaries of observations.*'sync' or 'async'"):
        make_environments(replace(NAMED, env="CartpoleBalance-v1", vectorization="envpool"), rank=0)


def train_all(rank: int, world_size: int, folder: str) -> list[dict[str, Tensor]]:
    """Each run at once, and in two halves."""
    del rank, world_size
    torch.set_num_threads(1)
    device = torch.device("cpu")
    weights = []
    for name, settings in {
        "named": replace(NAMED, norm_observations=True, norm_rewards=True),
        "pictured": replace(PICTURED, norm_observations=True, lstm_size=8, autoreset="same_step"),
    }.items():
        steps = 8 * 4 * 2
        run = replace(settings, runs_dir=folder, lr_schedule="constant", total_steps=4 * steps, run_name=name)
        weights.append(train(run, device)[0].state_dict())
        halves = replace(run, run_name=f"{name} in halves", resume="auto")
        train(replace(halves, total_steps=2 * steps), device)
        weights.append(train(halves, device)[0].state_dict())
    return weights


def test_runs_of_two_ranks_go_on_bitwise(tmp_path: Path):
    for whole_named, named, whole_pictured, pictured in run_ranks(train_all, 2, str(tmp_path), timeout=240):
        for whole, halves in ((whole_named, named), (whole_pictured, pictured)):
            assert all(torch.equal(value, halves[name]) for name, value in whole.items())
            assert whole["normalizer.count"] > 0
        assert len(whole_pictured["normalizer.mean"]) == 1


def learn(rank: int, world_size: int, folder: str) -> float:
    del rank, world_size
    torch.set_num_threads(1)
    settings = Settings(
        env="tests.toy_envs:Both", total_steps=4_000, num_envs=8, num_steps=16, num_epochs=6, gamma=0.0,
        learning_rate=2e-3, runs_dir=folder, run_name="learns", seed=3,
    )  # fmt: skip
    return train(settings, torch.device("cpu"))[1].mean_return


def test_picture_and_number_are_learnt_from(tmp_path: Path):
    (mean_return,) = run_ranks(learn, 1, str(tmp_path), timeout=240)
    assert mean_return > 5.5  # of 8, while it learns; chance has 4
    checkpoint = find_checkpoint(tmp_path / "learns")
    with make_environment(checkpoint, seed=1) as environment:
        result = play(load_policy(checkpoint, environment), environment, 10)
    assert np.mean(result.returns) > 7

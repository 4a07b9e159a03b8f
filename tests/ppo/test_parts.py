"""Dict observations with images, and masks of actions: what the network gets, and that nothing forbidden is done."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from fastsync.cli import main
from fastsync.ppo.cli import check_environment
from fastsync.ppo.envs import parts
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.envs.parts import PartsInARow, forbids_all
from fastsync.ppo.policies import Policy, hidden_layers, make_policy
from fastsync.ppo.ppo import PPO, Settings, train
from fastsync.ppo.runs.checkpoints import CheckpointFolder
from tests import toy_envs
from tests.models import group_of_one
from tests.ppo.test_runs_checkpoints import assert_same
from tests.ranks import run_ranks
from tests.refused import refused
from tests.toy_envs import OneForbidden, Seeing

TOY = "tests.toy_envs"
TINY = Settings(total_steps=300, num_envs=4, num_steps=16, num_epochs=2, lr_schedule="constant")


def test_images_in_a_dict_go_through_convolutions_and_the_rest_through_layers():
    settings = replace(TINY, env=f"{TOY}:Seeing", norm_observations=True, num_steps=4, num_epochs=1)
    with group_of_one(), make_environments(settings, rank=0) as environments:
        row = environments.reset()[0]
        ppo = PPO(settings, [environments], torch.device("cpu"))
        assert row.shape == (4 + 2 + 6 + 2 * 36 * 40 + 3 * 40 * 36,)
        parts = ppo.policy.parts
        assert parts
        numbers, (near, far) = parts.split(torch.from_numpy(row))
        seen = Seeing()
        seen.remaining = seen.length = int(numbers[5])
        seen.noise = float(numbers[4]) - 100
        expected = seen.look()
        assert numbers[:4].argmax() == expected["kind"]
        np.testing.assert_array_equal(near, expected["near"])
        np.testing.assert_array_equal(far, np.moveaxis(expected["far"]["camera"], -1, 0))
        sizes = [tuple(weight.shape) for weight in ppo.policy.trunk.parameters() if weight.dim() == 2]  # type: ignore[union-attr]
        assert sizes == [(64, 12), (64, 64), (512, 64), (512, 64)]
        assert ppo.policy.actor[0].in_features == 64 + 2 * 512  # type: ignore[index]
        ppo.learn(ppo.collect())
        normalizer = ppo.policy.normalizer
        assert normalizer
        assert normalizer.mean.shape == (12,)
        assert 100 < normalizer.mean[4] < 104
        assert torch.equal(normalizer(torch.from_numpy(row))[12:], torch.from_numpy(row)[12:])  # pixels stay


def test_forbidden_actions_have_no_probability():
    with make_environments(replace(TINY, env=f"{TOY}:OneForbidden"), rank=0) as environments:
        space = environments.single_observation_space
        assert environments.notes == [
            "env='tests.toy_envs:OneForbidden' has an action_mask: the policy takes only actions that it allows"
        ]
    policy = make_policy(TINY, space, spaces.Discrete(3))
    rows = torch.tensor([[0.1, 0.2, 0.3, 1, 1, 1], [0.1, 0.2, 0.3, 0, 1, 1], [0.1, 0.2, 0.3, 0, 1, 0]])
    outputs, values = policy(rows)
    probabilities = outputs.softmax(-1)
    assert probabilities.eq(0).tolist() == [[False] * 3, [True, False, False], [True, False, True]]
    torch.testing.assert_close(probabilities[1, 1:], probabilities[0, 1:] / probabilities[0, 1:].sum())
    assert values[0] == values[1] == values[2]  # the network does not see the mask
    log_prob, entropy = policy.distribution.log_prob_and_entropy(outputs, torch.tensor([0, 1, 1]))
    assert (log_prob[2].item(), entropy[2].item()) == (0.0, 0.0)
    (entropy.sum() + log_prob.sum()).backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in policy.parameters())


def train_once(rank: int, world_size: int, settings: Settings) -> list[float]:
    return train(settings, torch.device("cpu"))[1].returns


class OfMyOwn(Policy):
    def __init__(self, observations: Any, actions: Any, settings: Any) -> None:
        super().__init__(observations, actions, settings)
        sizes = (observations.shape[0], 8)
        self.actor = hidden_layers((*sizes, self.distribution.num_outputs), "relu")
        self.critic = hidden_layers((*sizes, 1), "tanh")


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ("OneForbidden", {"policy": f"{__name__}:OfMyOwn"}),
        ("InDict", {"fused": False}),
        ("SeveralForbidden", {"precision": "bf16"}),
        ("SeesAndMayNot", {}),
    ],
)
def test_forbidden_actions_are_never_taken(env: str, changes: dict[str, Any]):
    """The environment would fail."""
    settings = replace(TINY, env=f"{TOY}:{env}", **changes)
    check_environment(settings)
    with group_of_one(), make_environments(settings, rank=0) as environments:
        ppo = PPO(settings, [environments], torch.device("cpu"))
        for _ in range(2):
            ppo.learn(ppo.collect())


def test_a_run_with_masks_goes_on_bitwise_and_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = replace(TINY, env=f"{TOY}:OneForbidden", runs_dir=str(tmp_path), run_name="run", resume="auto")
    more = replace(settings, total_steps=2 * settings.total_steps)
    first, second = run_ranks(train_once, 2, replace(more, run_name="whole"))
    assert first == second
    for each in (settings, more):
        run_ranks(train_once, 2, each)
    whole, run = (CheckpointFolder(tmp_path / name / "checkpoints").newest() for name in ("whole", "run"))
    assert whole
    assert run
    assert_same(run[1].learner, whole[1].learner, "the learner")
    assert main(["eval", str(tmp_path / "run"), "--episodes", "3"]) == 0
    assert "over 3 episodes" in capsys.readouterr().out


def test_masks_of_another_size_are_refused():
    with (
        make_environments(replace(TINY, env=f"{TOY}:WrongMask"), rank=0) as environments,
        pytest.raises(
            RuntimeError, match=r"failed in reset\(\) .*info\['action_mask'\] has 4 entries, and there are 3 "
        ),
    ):
        environments.reset()
    with pytest.raises(
        ValueError, match=r"WrongDict': the observations' 'action_mask' has 3 entries, and there are 2 "
    ):
        make_environments(replace(TINY, env=f"{TOY}:WrongDict"), rank=0)


def floats_for_pixels(look: Any) -> Any:
    look["far"]["camera"] = look["far"]["camera"] / np.float32(255)
    return look


def channels_first(look: Any) -> Any:
    look["far"]["camera"] = np.moveaxis(look["far"]["camera"], -1, 0)
    return look


def too_many(look: Any) -> Any:
    look["far"]["where"] = np.zeros(3, np.float32)
    return look


def without_a_part(look: Any) -> Any:
    del look["far"]["camera"]
    return look


def a_number_alone(look: Any) -> Any:
    look["alone"] = 0.5
    return look


def wide_integers(look: Any) -> Any:
    look["near"] = look["near"].astype(np.int64)
    return look


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (floats_for_pixels, r"\['far'\]\['camera'\] has the shape \(40, 36, 3\) and the dtype float32; .* and uint8"),
        (channels_first, r"\['far'\]\['camera'\] has the shape \(3, 40, 36\) and the dtype uint8; .* \(40, 36, 3\)"),
        (too_many, r"\['far'\]\['where'\] has the shape \(3,\)"),
        (without_a_part, r"the observation has no part 'far.camera'"),
        (wide_integers, None),
        (a_number_alone, None),
    ],
)
@pytest.mark.parametrize("with_images", [True, False])
def test_a_part_of_another_shape_or_dtype_is_named(
    change: Any, message: str | None, with_images: bool, monkeypatch: pytest.MonkeyPatch
):
    look, space = Seeing.look, spaces.Dict({**Seeing.observation_space, "alone": spaces.Box(-1, 1, (1,))})
    monkeypatch.setattr(Seeing, "observation_space", space)
    monkeypatch.setattr(Seeing, "look", lambda self: change(look(self) | {"alone": np.zeros(1, np.float32)}))
    if not with_images:  # then the whole is flattened
        monkeypatch.setattr(parts, "_is_image", lambda space: False)
    with make_environments(replace(TINY, env=f"{TOY}:Seeing"), rank=0) as environments:
        assert isinstance(environments.single_observation_space, parts.PartsSpace) == with_images
        with pytest.raises(RuntimeError, match=message) if message else nullcontext():
            environments.reset()


def test_normalising_images_alone_is_refused():
    with pytest.raises(ValueError, match="norm_observations=True is for vectors"):
        make_environments(replace(TINY, env=f"{TOY}:SeesAndMayNot", norm_observations=True), rank=0)


@pytest.mark.parametrize("kind", [Seeing, OneForbidden])
def test_an_own_vectorisation_has_no_parts(kind: Any, monkeypatch: pytest.MonkeyPatch):
    def make(num_envs: int, **_: Any) -> SyncVectorEnv:
        return SyncVectorEnv([kind] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)

    spec = EnvSpec("InOneGo-v0", entry_point=kind, vector_entry_point=make)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    with pytest.raises(ValueError, match=r"images in a dictionary or a mask of actions; choose vectorization='sync'"):
        make_environments(replace(TINY, env=spec.id), rank=0)


def played(environments: Any) -> int:
    """The number of episodes that end in 20 steps."""
    environments.reset()
    return sum(len(environments.step(np.zeros(TINY.num_envs, np.int64)).episodes) for _ in range(20))


def test_a_mask_that_forbids_everything_is_refused_until_the_episode_ends():
    settings = replace(TINY, env=f"{TOY}:ForbidsAll")
    with (
        make_environments(settings, rank=0) as environments,
        pytest.raises(
            RuntimeError,
            match=r"environment 0 \(ForbidsAll\) failed in step 3 of episode 0: .*info\['action_mask'\] forbids every",
        ),
    ):
        played(environments)
    settings = replace(settings, env=f"{TOY}:ForbidsAllAtTheEnd")
    with make_environments(settings, rank=0) as environments:
        assert played(environments) > 1
        policy = make_policy(TINY, environments.single_observation_space, environments.single_action_space)
    refused(lambda: policy.act(np.zeros(3, np.float32), np.zeros(3)), "action_mask:")
    with pytest.raises(ValueError, match="action_mask: it forbids every action"):
        policy.act(np.zeros(6, np.float32))  # a row that holds the mask
    assert forbids_all(np.array([[1, 0, 1, 1, 0], [0, 0, 1, 1, 1]]), spaces.MultiDiscrete([2, 3]))
    assert not forbids_all(np.array([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1]]), spaces.MultiDiscrete([2, 3]))


def test_a_part_without_a_fixed_size_is_named():
    with pytest.raises(
        ValueError, match=r":NoSize' has .*: observation\['seen'\]\[1\] is a Sequence, .* with a Box in"
    ):
        make_environments(replace(TINY, env=f"{TOY}:NoSize"), rank=0)


@pytest.mark.parametrize(
    ("env", "given"),
    [("Privileged", {"norm_observations": True}), ("PrivilegedForbids", {}), ("PrivilegedForbids", {"fused": False})],
)
def test_only_the_critic_sees_what_critic_keys_name(env: str, given: dict[str, Any]):
    settings = Settings(env=f"tests.toy_envs:{env}", critic_keys=("state",), num_envs=3, hidden_sizes=(8, 8), **given)
    with make_environments(settings, rank=0) as environments:
        rows = environments.reset()
        space = environments.single_observation_space
        policy = make_policy(settings, space, environments.single_action_space)
    seen = torch.from_numpy(rows).to(policy.observation_dtype)
    others = seen.clone()
    others[:, :3] += 5  # the first ones
    (outputs, values), (same, changed) = policy(seen), policy(others)
    assert torch.equal(outputs, same)
    assert (values != changed).all()
    expected = policy.act(rows)
    np.testing.assert_array_equal(policy.act(rows[:, 3:]), expected)
    np.testing.assert_array_equal(policy.act(rows[0, 3:]), expected[0])
    if size := space.parts.mask_size:
        np.testing.assert_array_equal(policy.act(rows[:, 3:-size], rows[:, -size:]), expected)


@pytest.mark.parametrize(("env", "mask"), [("Privileged", None), ("PrivilegedForbids", np.ones(3))])
def test_a_policy_with_critic_keys_says_what_makes_its_rows(env: str, mask: Any):
    """The key comes last in the Dict, and first in a row."""
    settings = Settings(env=f"{TOY}:{env}", critic_keys=("state",), num_envs=1)
    with make_environments(settings, rank=0) as environments:
        policy = make_policy(settings, environments.single_observation_space, environments.single_action_space)
    has_masks = mask is not None
    told = f"PartsInARow(env, masks_in_info={has_masks}, critic_keys=('state',))"
    refused(lambda: policy.act(np.zeros(1), mask), "observations:", told)
    wrapped = PartsInARow(getattr(toy_envs, env)(), masks_in_info=has_masks, critic_keys=("state",))
    assert wrapped.observation_space == environments.single_observation_space
    seen, _ = wrapped.reset(seed=0)
    assert (seen[2], wrapped.observation_space.parts) == (1 if has_masks else 7, policy.parts)


def test_critic_keys_that_do_not_suit_are_refused():
    def make(env: str = f"{TOY}:Privileged", keys: tuple[str, ...] = ("state",), **given: Any) -> None:
        settings = Settings(env=env, critic_keys=keys, **given)
        with make_environments(settings, rank=0) as made:
            make_policy(settings, made.single_observation_space, made.single_action_space)

    for call, told in {
        lambda: make(keys=("sate",)): "its observations have seen, state; did you mean",
        lambda: make(keys=("seen", "state")): "leave nothing for the actor",
        lambda: make(f"{TOY}:Countdown"): "are of a Dict",
        lambda: make(f"{TOY}:PrivilegedForbids", ("camera",)): "'camera' has an image",
        lambda: make("CartPole-v1", vectorization="vector_entry_point"): "is taken as it is",
        lambda: make("tests.torch_envs:cart_pole"): "give a function that makes one environment",
        lambda: make(network="shared"): "a critic of its own",
        lambda: make(recurrent="gru"): "recurrent='gru'",
        lambda: make(policy=f"{__name__}:Shares"): "has a trunk",
    }.items():
        refused(call, "critic_keys=", told)


class Shares(Policy):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.trunk = torch.nn.Linear(5, 4)
        self.actor, self.critic = torch.nn.Linear(4, 3), torch.nn.Linear(4, 1)

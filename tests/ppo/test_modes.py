"""Policies whose layers have a mode or buffers of their own: Dropout, BatchNorm, running means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsync.cli import main
from fastsync.ppo.cli import check_environment
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.policies import Policy, explain_batch_norm
from fastsync.ppo.ppo import PPO, Settings, train
from fastsync.ppo.runs.checkpoints import CheckpointFolder
from tests.models import group_of_one
from tests.ppo.test_runs_checkpoints import assert_same
from tests.ranks import run_ranks
from tests.refused import refused

TINY = Settings(total_steps=600, num_envs=4, num_steps=16, num_epochs=2, lr_schedule="constant")


class Centred(nn.Module):
    """Subtracts a running mean, which every forward changes, in whatever mode. Each kind of buffer is there."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("newest", torch.zeros(size, dtype=torch.float64), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
            self.newest = rows.flatten(0, -2).mean(0).double()  # another tensor each time
            self.mean.lerp_(self.newest.float(), 0.1)
        return rows - self.mean


class Recording(nn.Module):
    """Notes the modes that it was called in."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.seen = set[bool]()

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.add(self.training)
        return rows


class WithLayer(Policy):
    layer: Any

    def __init__(self, observations: Any, actions: Any, settings: Any) -> None:
        super().__init__(observations, actions, settings)

        def network(num_outputs: int) -> nn.Sequential:
            first = nn.Linear(observations.shape[0], 8)
            return nn.Sequential(first, nn.Tanh(), type(self).layer(8), nn.Linear(8, num_outputs))

        self.actor, self.critic = network(self.distribution.num_outputs), network(1)


class Dropped(WithLayer):
    @staticmethod
    def layer(size: int) -> nn.Module:
        return nn.Dropout(0.5)


class Normed(WithLayer):
    layer = nn.BatchNorm1d


class WithMeans(WithLayer):
    layer = Centred


class Recorded(WithLayer):
    layer = Recording

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.critic.eval()  # frozen


@pytest.mark.parametrize("given", [{"num_minibatches": 4}, {"num_minibatches": 2, "num_micro_batches": 2}])
def test_a_minibatch_of_one_row_is_too_few_for_batch_norm(given: dict[str, int]):
    settings = replace(TINY, env="Acrobot-v1", num_envs=1, num_steps=4, **given)
    with group_of_one(), make_environments(settings, rank=0) as environments:
        ppo = PPO(settings, [environments], torch.device("cpu"), policy=Normed)
        rollouts = ppo.collect()
        refused(lambda: ppo.learn(rollouts), "a minibatch has 1 on each rank")
    with pytest.raises(ValueError, match=r"a minibatch has 1 on each rank"):  # also before ranks start
        check_environment(replace(settings, policy=f"{__name__}:Normed"))


def test_batch_norm_and_micro_batches_are_refused_before_ranks_start():
    settings = replace(TINY, env="Acrobot-v1", num_envs=2, micro_batches=2, policy=f"{__name__}:Normed")
    refused(lambda: check_environment(settings), "micro_batches: the model has a BatchNorm1d")


@pytest.mark.parametrize(("layer", "num_rows"), [(nn.BatchNorm1d, 2), (nn.Dropout, 1)])
def test_an_error_that_is_not_batch_norms_stays(layer: type[nn.Module], num_rows: int):
    said = ValueError("Expected more than 1 value per channel")
    with pytest.raises(ValueError, match="Expected") as raised, explain_batch_norm(nn.Sequential(layer(1)), num_rows):
        raise said
    assert raised.value is said


def test_a_policy_acts_in_eval_mode_and_learns_in_train_mode_but_for_what_is_frozen():
    settings = replace(TINY, env="Acrobot-v1")
    with group_of_one(), make_environments(settings, rank=0) as environments:
        ppo = PPO(settings, [environments], torch.device("cpu"), policy=Recorded)
        of_actor, of_critic = (network[2].seen for network in (ppo.policy.actor, ppo.policy.critic))
        rollouts = ppo.collect()
        assert (of_actor, of_critic) == ({False}, {False})
        of_actor.clear()
        ppo.learn(rollouts)
        assert (of_actor, of_critic) == ({True}, {False})
        assert ppo.policy.training
        assert not ppo.policy.critic.training


def train_once(rank: int, world_size: int, settings: Settings) -> dict[str, Tensor]:
    """Of which each rank compares its weights and buffers with the others'."""
    policy, _ = train(settings, torch.device("cpu"))
    return dict(policy.named_buffers())


@pytest.mark.parametrize(
    ("kind", "world_size", "changes"),
    [
        ("Normed", 2, {}),
        ("Normed", 3, {"norm_observations": True, "compression": "int8+ef"}),
        ("Normed", 2, {"sync": "local_sgd", "sync_every": 2, "target_kl": 1e-4}),
        ("WithMeans", 2, {"num_micro_batches": 2, "target_kl": 1e-4}),
        ("WithMeans", 3, {"sync": "diloco", "sync_every": 3}),
        ("Dropped", 1, {}),
    ],
)
def test_buffers_are_common_and_evaluation_repeats_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, world_size: int, changes: dict[str, Any]
):
    settings = replace(TINY, policy=f"{__name__}:{kind}", runs_dir=str(tmp_path), run_name="run", **changes)
    check_environment(settings)
    first, *others = run_ranks(train_once, world_size, settings)
    for other in others:
        assert_same(other, first, "buffers")
    assert all(bool(buffer.ne(0).any()) for buffer in first.values())
    for _ in range(2):
        assert main(["eval", str(tmp_path / "run"), "--episodes", "3"]) == 0
    played, again = capsys.readouterr().out.splitlines()
    assert played == again


@pytest.mark.parametrize("kind", ["Dropped", "Normed"])
def test_a_run_goes_on_bitwise_with_what_its_layers_drop_and_keep(tmp_path: Path, kind: str):
    settings = replace(TINY, policy=f"{__name__}:{kind}", runs_dir=str(tmp_path), resume="auto", run_name="whole")
    run_ranks(train_once, 2, replace(settings, total_steps=1200))
    run_ranks(train_once, 2, replace(settings, run_name="part"))
    run_ranks(train_once, 2, replace(settings, run_name="part", total_steps=1200))
    whole, part = (CheckpointFolder(tmp_path / name / "checkpoints").newest() for name in ("whole", "part"))
    assert whole
    assert part
    assert_same(part[1].learner, whole[1].learner, "the learner")
    assert not torch.equal(*(each["torch_random"][0] for each in whole[1].environments))  # ranks drop other units

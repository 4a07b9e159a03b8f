"""N ranks with B environments each train what one rank with N · B environments trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.runs.metrics import TrainResult
from tests.ranks import run_ranks

NUM_ENVS = 4
SETTINGS = Settings(total_steps=1_000, num_steps=16, num_epochs=3, vectorization="sync", hidden_sizes=(16, 16))
RUNS: dict[str, dict[str, Any]] = {
    "fp64": {"precision": "fp64"},
    "fp64 early stop": {"precision": "fp64", "target_kl": 0.002, "clip_value_loss": True},
    "fp64 continuous": {"env": "Pendulum-v1", "precision": "fp64", "lr_schedule": "adaptive", "target_kl": 0.01}
    | {"norm_observations": True, "norm_rewards": True},
    "fp64 recurrent": {"env": "tests.toy_envs:masked_cart_pole", "precision": "fp64", "recurrent": "lstm"},
    "fp64 beta": {"env": "Pendulum-v1", "precision": "fp64", "action_distribution": "beta"},
    "fp32": {"num_micro_batches": 2},
}
Outcome = tuple[dict[str, Tensor], TrainResult]


def train_all(rank: int, world_size: int, runs_dir: str) -> dict[str, Outcome]:
    outcomes = {}
    for name, changes in RUNS.items():
        own = {"num_envs": NUM_ENVS // world_size, "runs_dir": runs_dir, "run_name": f"{name} {world_size}"}
        settings = replace(SETTINGS, **changes, **own)
        policy, result = train(settings, torch.device("cpu"))
        outcomes[name] = ({key: value.clone() for key, value in policy.state_dict().items()}, result)
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """By world size: 1 and 2."""
    runs_dir = str(tmp_path_factory.mktemp("runs"))
    return [run_ranks(train_all, world_size, runs_dir, timeout=200)[0] for world_size in (1, 2)]


@pytest.mark.parametrize("name", RUNS)
def test_the_number_of_ranks_does_not_matter(outcomes: list[dict[str, Outcome]], name: str):
    (weights, result), (other_weights, other) = (outcome[name] for outcome in outcomes)
    assert result.returns
    # Sums over ranks add up in another order than sums over rows, so not every bit is the same; but no action is
    # another one, as the same episodes show.
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if name.startswith("fp64") else {"rtol": 1e-3, "atol": 1e-5}
    for key, weight in weights.items():
        torch.testing.assert_close(other_weights[key], weight, **tolerance)
    assert other.step == result.step
    if weights["critic.0.weight"].dtype == torch.float64:
        assert other.returns == pytest.approx(result.returns, rel=1e-9)
    else:
        assert other.returns == result.returns

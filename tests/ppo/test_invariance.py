"""With micro_batches any number of ranks trains the same to the bit; without, nearly the same."""

from __future__ import annotations

import csv
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsync.ppo.cli import Launch, check_environment, parse
from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.runs.loggers import PROGRESS
from fastsync.ppo.runs.metrics import TrainResult
from tests.ranks import run_ranks

NUM_ENVS = 4
SETTINGS = Settings(total_steps=1_000, num_steps=16, num_epochs=3, hidden_sizes=(16, 16), checkpoint_interval=0)
RUNS: dict[str, dict[str, Any]] = {
    "early stop": {"precision": "fp64", "target_kl": 0.002, "vectorization": "sync"},
    "continuous": {"env": "Pendulum-v1", "precision": "fp64", "lr_schedule": "adaptive", "target_kl": 0.01}
    | {"norm_observations": True, "norm_rewards": True, "vectorization": "sync"},
    "recurrent": {"env": "tests.toy_envs:masked_cart_pole", "precision": "fp64", "recurrent": "lstm"},
    "beta": {"env": "Pendulum-v1", "precision": "fp64", "vectorization": "sync", "action_distribution": "beta"},
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
def test_one_rank_trains_what_two_with_half_of_its_environments_do(outcomes: list[dict[str, Outcome]], name: str):
    (weights, result), (other_weights, other) = (outcome[name] for outcome in outcomes)
    assert result.returns
    # Sums over ranks add up in another order than sums over rows, so not every bit is the same; but no action is
    # another one, as the same episodes show.
    for key, weight in weights.items():
        torch.testing.assert_close(other_weights[key], weight, rtol=1e-9, atol=1e-11)
    assert other.step == result.step
    assert other.returns == pytest.approx(result.returns, rel=1e-9)


# ---- to the bit -----------------------------------------------------------------------------------------------------

SAME_BITS = replace(SETTINGS, num_envs=8, micro_batches=4)
CARTPOLE = {"num_micro_batches": 2, "target_kl": 0.01}
PENDULUM = {"env": "Pendulum-v1", "lr_schedule": "adaptive", "target_kl": 0.01, "recurrent": "gru"} | {
    "norm_rewards": True, "norm_observations": True,
    "num_minibatches": 5, "num_steps": 25, "total_steps": 2_400, "eval_interval": 800, "eval_episodes": 3,
}  # fmt: skip


def _train(rank: int, world_size: int, settings: Settings) -> str:
    policy, _ = train(replace(settings, run_name=settings.run_name or str(world_size)), torch.device("cpu"))
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in policy.state_dict().values())).hexdigest()


def _progress(runs_dir: Path, name: str) -> list[dict[str, str]]:
    """progress.csv without what clocks and single ranks say."""
    rows = csv.DictReader((runs_dir / name / PROGRESS).open())
    return [{k: v for k, v in row.items() if not k.startswith(("rank", "speed/", "seconds"))} for row in rows]


@pytest.mark.parametrize("changes", [CARTPOLE, PENDULUM], ids=["CartPole", "Pendulum"])
def test_the_number_of_ranks_does_not_change_a_bit(changes: dict[str, Any], tmp_path: Path):
    """Nor does another one from some step on, where the learning rate does not follow the number of steps to go."""
    settings = replace(SAME_BITS, runs_dir=str(tmp_path), **changes)
    (alone,) = run_ranks(_train, 1, settings)
    rows = _progress(tmp_path, "1")
    assert sum(row["episodes/return"] != "" for row in rows) > 1
    assert run_ranks(_train, 4, settings) == [alone] * 4
    assert _progress(tmp_path, "4") == rows
    resumed = replace(settings, run_name="resumed", resume="auto")
    run_ranks(_train, 3, replace(resumed, total_steps=1_600) if changes is PENDULUM else resumed)
    assert run_ranks(_train, 2, resumed) == [alone] * 2
    assert _progress(tmp_path, "resumed") == rows


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"micro_batches": 3}, "micro_batches=3 must be a power of two"),
        ({"micro_batches": 8, "num_envs": 12}, "micro_batches=8 does not divide the 12 environments of all ranks"),
        ({"compression": "fp16"}, "micro_batches=4 needs compression='none', got 'fp16'"),
        ({"sync": "diloco"}, "micro_batches=4 needs sync='gradients', got 'diloco'"),
        ({"on_lost_rank": "continue"}, "a lost rank's environments are gone"),
        ({"lr_scaling": "sqrt"}, "lr_scaling='sqrt' follows the number of ranks"),
        ({"num_minibatches": 6, "num_steps": 16}, "num_minibatches=6 does not divide the 32 rows of a micro-batch's"),
    ],
)
def test_what_depends_on_the_number_of_ranks_is_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        replace(SAME_BITS, **changes)


def test_more_ranks_than_micro_batches_are_refused():
    assert [list(SAME_BITS.parts_of(rank, 3)) for rank in range(3)] == [[0, 1], [2], [3]]
    with pytest.raises(ValueError, match="micro_batches=4 leaves some of 5 ranks without environments"):
        SAME_BITS.parts_of(0, 5)


def test_a_preset_keeps_the_environments_of_all_ranks():
    words = ["--config", "CartPole-v1", "--nproc", "4"]
    assert parse(Launch, "train", words).settings.num_envs == 2
    settings = parse(Launch, "train", [*words, "--micro-batches", "4"]).settings
    assert (settings.num_envs, settings.envs_together) == (8, 2)
    check_environment(settings)

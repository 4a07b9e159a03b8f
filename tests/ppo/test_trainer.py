"""Whole trainings on two ranks: the same weights everywhere, the same run twice, files from rank 0."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastsync.ppo.cli import train_rank
from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.runs.checkpoints import CheckpointFolder
from fastsync.ppo.runs.metrics import TrainResult
from tests.ranks import RankError, run_ranks
from tests.refused import refused

TINY = Settings(
    total_steps=1_000, num_envs=4, num_steps=32, num_epochs=2, gamma=0.98, learning_rate=1e-3, clip_value_loss=False
)
KINDS = {
    "acrobot": {"env": "Acrobot-v1", "norm_observations": True, "norm_rewards": True},
    "pendulum": {"env": "Pendulum-v1", "target_kl": 0.01, "lr_schedule": "adaptive"},
    "bf16": {"precision": "bf16", "lr_scaling": "sqrt", "warmup_updates": 2},
    "fp16": {"precision": "fp16", "clip_value_loss": True},
    "critic keys": {"env": "tests.toy_envs:Privileged", "critic_keys": ("state",), "norm_observations": True},
    "asynchronous": {"vectorization": "async", "anneal_clip": True},
}
"""One run each of what else there is to set."""
Outcome = dict[str, tuple[dict[str, Tensor], TrainResult]]
Outcomes = list[Outcome]


def train_each(rank: int, world_size: int, runs: dict[str, Settings]) -> Outcome:
    """Trains once for each of ``runs``."""
    outcome = {}
    for name, settings in runs.items():
        policy, result = train(replace(settings, run_name=name), torch.device("cpu"))
        outcome[name] = (policy.state_dict(), result)
    return outcome


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(runs_dir: Path) -> Outcomes:
    tiny = replace(TINY, runs_dir=str(runs_dir))
    runs = {
        "plain": tiny,
        "again": tiny,
        "other seed": replace(tiny, seed=2),
        "stops early": replace(tiny, target_kl=1e-4),
        "accumulates": replace(tiny, num_micro_batches=4),
        "16 bits": replace(tiny, compression="fp16"),
    }
    runs |= {name: replace(tiny, total_steps=600, **kind) for name, kind in KINDS.items()}
    return run_ranks(train_each, 2, runs, timeout=200)


def assert_bitwise_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("name", ["plain", "16 bits", "stops early", "accumulates", *KINDS])
def test_ranks_end_with_bitwise_equal_weights_and_the_same_figures(outcomes: Outcomes, name: str):
    (weights_0, result_0), (weights_1, result_1) = (outcome[name] for outcome in outcomes)
    assert_bitwise_equal(weights_0, weights_1)
    assert result_0.returns == result_1.returns
    assert result_0.step == result_1.step
    assert result_0.sync.wire_bytes == result_1.sync.wire_bytes
    assert all(weight.isfinite().all() for weight in weights_0.values())


def test_the_same_seed_gives_bitwise_the_same_policy(outcomes: Outcomes):
    (weights, result), (weights_again, result_again) = outcomes[0]["plain"], outcomes[0]["again"]
    assert_bitwise_equal(weights, weights_again)
    assert result.returns == result_again.returns
    other, _ = outcomes[0]["other seed"]
    assert not torch.equal(weights["actor.0.weight"], other["actor.0.weight"])


def test_steps_are_counted_over_ranks_without_restarts(outcomes: Outcomes):
    _, result = outcomes[0]["plain"]
    rows_per_update = 2 * (TINY.num_envs * TINY.num_steps)
    assert TINY.total_steps <= result.step < TINY.total_steps + rows_per_update
    # Some episodes ended, so some rows were restarts.
    assert result.returns
    assert result.step % rows_per_update


def test_rank_0_writes_the_runs_files(outcomes: Outcomes, runs_dir: Path):
    folder = runs_dir / "plain"
    names = {path.name.split(".")[0] for path in folder.iterdir() if not path.name.startswith(".")}
    assert names == {"checkpoints", "events", "progress", "settings"}
    found = CheckpointFolder(folder / "checkpoints", keep=3).newest()
    assert found is not None
    weights, result = outcomes[0]["plain"]
    assert_bitwise_equal(weights, found[1].learner["model"])
    assert found[1].step == result.step
    rows = list(csv.DictReader((folder / "progress.csv").open()))
    assert int(rows[-1]["step"]) == result.step
    assert float(rows[0]["rank1/communication_seconds"]) > 0


def test_gradients_may_be_accumulated(outcomes: Outcomes):
    (weights, result), (plain_weights, plain) = outcomes[0]["accumulates"], outcomes[0]["plain"]
    torch.testing.assert_close(weights, plain_weights, rtol=1e-4, atol=1e-5)
    assert result.sync.wire_bytes == plain.sync.wire_bytes  # one sync a minibatch, whatever it was cut into


def test_ranks_stop_early_together(outcomes: Outcomes, runs_dir: Path):
    """That they stop at the same minibatch shows in that they end at all, and with the same weights."""
    rows = list(csv.DictReader((runs_dir / "stops early" / "progress.csv").open()))
    taken = [float(row["learning/optimizer_steps"]) for row in rows]
    assert min(taken) < TINY.num_epochs * TINY.num_minibatches


def test_compression_halves_the_bytes(outcomes: Outcomes):
    (_, plain), (_, compressed) = outcomes[0]["plain"], outcomes[0]["16 bits"]
    # Where the ranks share memory, what tells that they average what belongs together stays at full width.
    assert compressed.sync.wire_bytes == pytest.approx(plain.sync.wire_bytes / 2, rel=0.01)


def test_what_is_not_finite_is_not_learnt_from_for_long(tmp_path: Path):
    settings = replace(TINY, env="tests.toy_envs:HugeReward", runs_dir=str(tmp_path))
    message = r"policy_loss.* of rank 0 in update 1 are not finite: are there nan or inf in the environment's rewards"
    with pytest.raises(RankError, match=message):
        run_ranks(train_each, 2, {"nan": settings})
    assert not (tmp_path / "nan" / "checkpoints").exists()


FAILING = [
    ("BlowsUp", {}),
    ("BlowsUp", {"norm_observations": True, "norm_rewards": True}),
    ("BlowsUp", {"fused": False, "network": "shared", "clip_value_loss": True}),
    ("BlowsUp", {"num_steps": 10, "num_minibatches": 2, "vectorization": "async"}),  # ends with the rollout
    ("BlowsUpToInf", {"activation": "relu", "norm_advantages": "none"}),
    ("BlowsUpToMuch", {"activation": "relu", "norm_observations": True}),
    ("BlowsUpToMuch", {"precision": "bf16", "activation": "elu"}),
    ("BlowsUp", {"precision": "fp16", "num_micro_batches": 2}),
    ("BlowsUpOverReals", {"compression": "fp16"}),
]


def test_an_episode_may_terminate_with_what_is_not_finite(tmp_path: Path):
    """Nobody needs the value of that observation. What is learnt is what it would be without."""
    base = replace(TINY, runs_dir=str(tmp_path), total_steps=600)
    runs = {
        f"{index}": replace(base, env=f"tests.toy_envs:{env}", **given) for index, (env, given) in enumerate(FAILING)
    }
    for outcome in run_ranks(train_each, 2, runs):
        for weights, result in outcome.values():
            assert all(weight.isfinite().all() for weight in weights.values())
            assert len(result.returns) > 20


def test_a_rollout_may_only_reset_environments(tmp_path: Path):
    """Which is every second one here. It is not learnt from."""
    one = replace(TINY, env="tests.toy_envs:OneStep", num_steps=1, num_minibatches=1, total_steps=60)
    one = replace(one, runs_dir=str(tmp_path), norm_observations=True, norm_rewards=True)
    runs = {
        "one": one,
        "local": replace(one, sync="local_sgd", sync_every=2),
        "raw": replace(one, norm_advantages="none"),
    }
    for outcome in run_ranks(train_each, 2, runs):
        for weights, result in outcome.values():
            assert all(weight.isfinite().all() for weight in weights.values())
            assert result.step >= 60
    rows = list(csv.DictReader((tmp_path / "one" / "progress.csv").open()))
    assert [row["learning/optimizer_steps"] for row in rows[:4]] == ["2.0", "0.0", "2.0", "0.0"]
    assert [row["learning/value_loss"] == "" for row in rows[:4]] == [False, True, False, True]


def test_a_truncated_episode_must_end_with_what_is_finite(tmp_path: Path):
    settings = replace(TINY, env="tests.toy_envs:BlowsUpInTime", runs_dir=str(tmp_path))
    message = r"environment 4 has truncated an episode whose last observation is not finite.* return terminated=True"
    with pytest.raises(RankError, match=message):
        run_ranks(train_each, 2, {"truncated": settings})


def test_a_training_in_fp16_ends_when_grad_scaler_has_no_scale_left(tmp_path: Path):
    settings = replace(
        TINY, env="tests.toy_envs:HugeReward", runs_dir=str(tmp_path), precision="fp16", total_steps=8_000
    )
    refused(lambda: run_ranks(train_each, 1, {"nan": settings}), "of rank 0 in update", kind=RankError)


@pytest.mark.parametrize(("device", "backend"), [("auto", None), ("cpu", "fastsync"), ("cuda", "nccl")])
@pytest.mark.parametrize("opens", ["cli.process_group", "session.process_group"])
def test_the_device_of_the_settings_decides_the_backend(
    device: Any, backend: str | None, opens: str, monkeypatch: pytest.MonkeyPatch
):
    settings = Settings(device=device, timeout=7.0)
    open_group = mock.Mock(side_effect=RuntimeError("no further"))
    monkeypatch.setattr(f"fastsync.ppo.{opens}", open_group)
    refused(lambda: (train_rank if opens.startswith("cli") else train)(settings), "no further", kind=RuntimeError)
    open_group.assert_called_once_with(7.0, backend=backend)


def test_the_device_of_the_settings_is_no_other_than_the_one_that_is_passed():
    refused(lambda: train(Settings(device="cuda"), torch.device("cpu")), "device='cpu', but the settings have")

"""Whole trainings on two ranks: the same weights everywhere, the same run twice, files from rank 0."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.runs.checkpoints import CheckpointFolder
from fastsync.ppo.runs.metrics import TrainResult
from tests.models import STAMP
from tests.ranks import RankError, run_ranks

CPU = torch.device("cpu")
TINY = Settings(total_steps=2_000, num_envs=4, num_epochs=2, sync="cat")
KINDS = {
    "acrobot": {"env": "Acrobot-v1", "norm_observations": True, "norm_rewards": True},
    "pendulum": {"env": "Pendulum-v1", "autoreset": "same_step", "target_kl": 0.01, "lr_schedule": "adaptive"},
    "memory": {"lstm_size": 8, "num_minibatches": 2, "num_micro_batches": 2, "hidden_sizes": (16,)},
    "bf16": {"precision": "bf16", "lr_scaling": "sqrt", "warmup_updates": 2},
    "fp16": {"precision": "fp16", "clip_value_loss": True},
    "asynchronous": {"vectorization": "async", "anneal_clip": True},
}
"""One run each of what else there is to set."""
Outcomes = list[dict[str, tuple[dict[str, Tensor], TrainResult]]]


def train_each(
    rank: int, world_size: int, runs: dict[str, Settings]
) -> dict[str, tuple[dict[str, Tensor], TrainResult]]:
    """Trains once for each of ``runs``."""
    outcome = {}
    for name, settings in runs.items():
        policy, result = train(replace(settings, run_name=name), CPU)
        outcome[name] = (policy.state_dict(), result)
    return outcome


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(runs_dir: Path) -> Outcomes:
    tiny = replace(TINY, runs_dir=str(runs_dir))
    runs = {
        "cat": tiny,
        "cat again": tiny,
        "other seed": replace(tiny, seed=2),
        "ddp": replace(tiny, sync="ddp"),
        "fastsync": replace(tiny, sync="fastsync"),
        "stops early": replace(tiny, sync="fastsync", target_kl=1e-4),
        "stops early ddp": replace(tiny, sync="ddp", target_kl=1e-4),
        "accumulates": replace(tiny, sync="fastsync", num_micro_batches=4),
        "fastsync fp16": replace(tiny, sync="fastsync", compression="fp16"),
    }
    runs |= {name: replace(tiny, total_steps=600, sync="fastsync", **kind) for name, kind in KINDS.items()}
    return run_ranks(train_each, 2, runs, timeout=200)


def assert_bitwise_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name in first:
        assert torch.equal(first[name], second[name]), name


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cat", "ddp", "fastsync", "fastsync fp16", "stops early", "accumulates", *KINDS])
def test_ranks_end_with_bitwise_equal_weights_and_the_same_figures(outcomes: Outcomes, name: str):
    (weights_0, result_0), (weights_1, result_1) = (outcome[name] for outcome in outcomes)
    assert_bitwise_equal(weights_0, weights_1)
    assert result_0.returns == result_1.returns
    assert result_0.step == result_1.step
    assert result_0.sync == result_1.sync
    assert all(weight.isfinite().all() for weight in weights_0.values())


def test_the_same_seed_gives_bitwise_the_same_policy(outcomes: Outcomes):
    (weights, result), (weights_again, result_again) = outcomes[0]["cat"], outcomes[0]["cat again"]
    assert_bitwise_equal(weights, weights_again)
    assert result.returns == result_again.returns
    other, _ = outcomes[0]["other seed"]
    assert not torch.equal(weights["actor.0.weight"], other["actor.0.weight"])


def test_ways_of_syncing_train_the_same_policy(outcomes: Outcomes):
    """With two ranks the mean of two gradients has one rounding in either way, so not even the last bit differs."""
    assert_bitwise_equal(outcomes[0]["cat"][0], outcomes[0]["ddp"][0])


def test_steps_are_counted_over_ranks_without_restarts(outcomes: Outcomes):
    _, result = outcomes[0]["cat"]
    rows_per_update = 2 * (TINY.num_envs * TINY.num_steps)
    assert TINY.total_steps <= result.step < TINY.total_steps + rows_per_update
    # Some episodes ended, so some rows were restarts.
    assert result.returns
    assert result.step % rows_per_update


def test_rank_0_writes_the_runs_files(outcomes: Outcomes, runs_dir: Path):
    folder = runs_dir / "cat"
    names = {path.name.split(".")[0] for path in folder.iterdir() if not path.name.startswith(".")}
    assert names == {"checkpoints", "events", "learning_curve", "progress", "settings"}
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    found = CheckpointFolder(folder / "checkpoints", keep=3).newest()
    assert found is not None
    weights, result = outcomes[0]["cat"]
    assert_bitwise_equal(weights, found[1].learner["model"])
    assert found[1].step == result.step
    assert found[1].world_size == 2
    assert found[1].settings["run_name"] == "cat"


def test_progress_is_logged(outcomes: Outcomes, runs_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(runs_dir / "fastsync")).Reload()
    assert {"episodes/return", "learning/policy_loss", "learning/grad_norm", "speed/steps_per_second"} <= set(
        log.Tags()["scalars"]
    )
    last = log.Scalars("episodes/return")[-1]
    _, result = outcomes[0]["fastsync"]
    assert last.step == result.step
    assert last.value == pytest.approx(result.mean_return)
    rows = list(csv.DictReader((runs_dir / "fastsync" / "progress.csv").open()))
    assert int(rows[-1]["step"]) == result.step
    assert float(rows[0]["rank1/communication_seconds"]) > 0


def test_the_engine_trains_what_ddp_trains(outcomes: Outcomes):
    # The norm that scales the gradients is summed in another order, so the last bits may differ.
    assert_close(outcomes[0]["fastsync"][0], outcomes[0]["ddp"][0])


def test_gradients_may_be_accumulated(outcomes: Outcomes):
    assert_close(outcomes[0]["accumulates"][0], outcomes[0]["fastsync"][0])
    # One sync a minibatch, whatever it was cut into.
    assert outcomes[0]["accumulates"][1].sync.wire_bytes == outcomes[0]["fastsync"][1].sync.wire_bytes


def test_ranks_stop_early_together(outcomes: Outcomes, runs_dir: Path):
    """That they stop at the same minibatch shows in that they end at all, and with the same weights."""
    rows = list(csv.DictReader((runs_dir / "stops early" / "progress.csv").open()))
    taken = [float(row["learning/optimizer_steps"]) for row in rows]
    assert min(taken) < TINY.num_epochs * TINY.num_minibatches
    assert_close(outcomes[0]["stops early"][0], outcomes[0]["stops early ddp"][0])


def test_compression_halves_the_bytes(outcomes: Outcomes):
    (_, plain), (_, compressed) = outcomes[0]["fastsync"], outcomes[0]["fastsync fp16"]
    (weights, bare) = outcomes[0]["cat"]
    assert bare.sync.wire_bytes is not None
    assert plain.sync.wire_bytes is not None
    # Each gradient begins at a multiple of 8 values, the last one ends there. With them goes, for each parameter,
    # whether it has one, and what tells that the ranks average what belongs together.
    num_values = sum(weight.numel() for weight in weights.values())
    num_on_wire = sum(-(-weight.numel() // 8) * 8 for weight in weights.values())
    num_on_wire += len(weights) + STAMP * len(outcomes)
    assert plain.sync.wire_bytes == bare.sync.wire_bytes * num_on_wire / num_values
    # Where the ranks share memory, what tells that stays at full width.
    assert compressed.sync.wire_bytes == pytest.approx(plain.sync.wire_bytes / 2, rel=0.01)


def refuse_second_run(rank: int, world_size: int, settings: Settings) -> None:
    train(settings, CPU)


def test_a_run_folder_is_not_written_over(tmp_path: Path):
    (tmp_path / "taken").mkdir()
    settings = replace(TINY, runs_dir=str(tmp_path), run_name="taken")
    with pytest.raises(RankError, match=r"ValueError: .*taken"):
        run_ranks(refuse_second_run, 1, settings, timeout=120)


def train_on_nan(rank: int, world_size: int, settings: Settings) -> None:
    train(settings, CPU)


def test_what_is_not_finite_is_not_learnt_from_for_long(tmp_path: Path):
    settings = replace(TINY, env="tests.toy_envs:NanReward", runs_dir=str(tmp_path), run_name="nan")
    message = r"policy_loss.* of rank 0 in update 1 are not finite: are there nan or inf in the environment's rewards"
    with pytest.raises(RankError, match=message):
        run_ranks(train_on_nan, 2, settings, timeout=120)
    assert not (tmp_path / "nan" / "checkpoints").exists()

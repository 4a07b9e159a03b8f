"""Whole trainings on two ranks: the same weights everywhere, the same run twice, files from rank 0."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastsync.distributed import dist_mean
from fastsync.ppo import ppo
from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.runs.checkpoints import CheckpointFolder
from fastsync.ppo.runs.metrics import TrainResult
from tests.models import STAMP
from tests.ranks import RankError, run_ranks

CPU = torch.device("cpu")
TINY = Settings(total_steps=2_000, num_envs=4, num_epochs=2)
KINDS = {
    "acrobot": {"env": "Acrobot-v1", "norm_observations": True, "norm_rewards": True},
    "pendulum": {"env": "Pendulum-v1", "target_kl": 0.01, "lr_schedule": "adaptive"},
    "bf16": {"precision": "bf16", "lr_scaling": "sqrt", "warmup_updates": 2},
    "fp16": {"precision": "fp16", "clip_value_loss": True},
    "asynchronous": {"vectorization": "async", "anneal_clip": True},
}
"""One run each of what else there is to set."""
Outcomes = list[dict[str, tuple[dict[str, Tensor], TrainResult]]]


class PlainDDP:
    """DDP as it comes, in the place of what ``attach_by`` returns. It does not tell what it cost."""

    def __init__(self, settings: Settings, policy: nn.Module) -> None:
        self.model = DistributedDataParallel(policy)

    def no_sync(self) -> Any:
        return self.model.no_sync()

    def piggyback(self, name: str, tensor: Tensor) -> None:
        self._mean = {name: dist_mean(tensor)}

    def piggybacked(self) -> dict[str, Tensor]:
        return self._mean

    def stats(self) -> Any:
        return SimpleNamespace(exposed_time=0.0, wire_bytes=0)

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": {}}


def clip_plainly(sync: PlainDDP, max_norm: float, *, optimizer: Any, scaler: Any) -> Tensor:
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(sync.model.parameters(), max_norm)


def loss_through_ddp(self: Any, part: Any, remaining: float) -> Any:
    return ppo.minibatch_loss(self.sync.model, self.policy, part, self.settings, remaining)


@contextmanager
def plain_ddp() -> Iterator[None]:
    with (
        mock.patch.multiple(ppo, attach_by=PlainDDP, clip_grad_norm_=clip_plainly),
        mock.patch.object(ppo.PPO, "_loss", loss_through_ddp),
    ):
        yield


def train_each(
    rank: int, world_size: int, runs: dict[str, Settings]
) -> dict[str, tuple[dict[str, Tensor], TrainResult]]:
    """Trains once for each of ``runs``."""
    outcome = {}
    for name, settings in runs.items():
        with plain_ddp() if name.startswith("ddp") else nullcontext():
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
        "plain": tiny,
        "again": tiny,
        "other seed": replace(tiny, seed=2),
        "ddp": tiny,
        "stops early": replace(tiny, target_kl=1e-4),
        "ddp stops early": replace(tiny, target_kl=1e-4),
        "accumulates": replace(tiny, num_micro_batches=4),
        "16 bits": replace(tiny, compression="fp16"),
    }
    runs |= {name: replace(tiny, total_steps=600, **kind) for name, kind in KINDS.items()}
    return run_ranks(train_each, 2, runs, timeout=200)


def assert_bitwise_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name in first:
        assert torch.equal(first[name], second[name]), name


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "ddp", "16 bits", "stops early", "accumulates", *KINDS])
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
    assert found[1].world_size == 2
    assert found[1].settings["run_name"] == "plain"


def test_progress_is_logged(outcomes: Outcomes, runs_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(runs_dir / "plain")).Reload()
    assert {"episodes/return", "learning/policy_loss", "learning/grad_norm", "speed/steps_per_second"} <= set(
        log.Tags()["scalars"]
    )
    last = log.Scalars("episodes/return")[-1]
    _, result = outcomes[0]["plain"]
    assert last.step == result.step
    assert last.value == pytest.approx(result.mean_return)
    rows = list(csv.DictReader((runs_dir / "plain" / "progress.csv").open()))
    assert int(rows[-1]["step"]) == result.step
    assert float(rows[0]["rank1/communication_seconds"]) > 0


def test_the_engine_trains_what_ddp_trains(outcomes: Outcomes):
    # The norm that scales the gradients is summed in another order, so the last bits may differ.
    assert_close(outcomes[0]["plain"][0], outcomes[0]["ddp"][0])


def test_gradients_may_be_accumulated(outcomes: Outcomes):
    assert_close(outcomes[0]["accumulates"][0], outcomes[0]["plain"][0])
    # One sync a minibatch, whatever it was cut into.
    assert outcomes[0]["accumulates"][1].sync.wire_bytes == outcomes[0]["plain"][1].sync.wire_bytes


def test_ranks_stop_early_together(outcomes: Outcomes, runs_dir: Path):
    """That they stop at the same minibatch shows in that they end at all, and with the same weights."""
    rows = list(csv.DictReader((runs_dir / "stops early" / "progress.csv").open()))
    taken = [float(row["learning/optimizer_steps"]) for row in rows]
    assert min(taken) < TINY.num_epochs * TINY.num_minibatches
    assert_close(outcomes[0]["stops early"][0], outcomes[0]["ddp stops early"][0])


def test_compression_halves_the_bytes(outcomes: Outcomes, runs_dir: Path):
    (_, plain), (_, compressed) = outcomes[0]["plain"], outcomes[0]["16 bits"]
    weights, _ = outcomes[0]["plain"]
    # Each gradient begins at a multiple of 8 values, the last one ends there. With them goes, for each parameter,
    # whether it has one, and what tells that the ranks average what belongs together.
    num_on_wire = sum(-(-weight.numel() // 8) * 8 for weight in weights.values())
    num_on_wire += len(weights) + STAMP * len(outcomes)
    rows = csv.DictReader((runs_dir / "plain" / "progress.csv").open())
    num_steps = sum(float(row["learning/optimizer_steps"]) for row in rows)
    assert plain.sync.wire_bytes == 4 * num_on_wire * num_steps
    # Where the ranks share memory, what tells that stays at full width.
    assert compressed.sync.wire_bytes == pytest.approx(plain.sync.wire_bytes / 2, rel=0.01)


def train_on_nan(rank: int, world_size: int, settings: Settings) -> None:
    train(settings, CPU)


def test_what_is_not_finite_is_not_learnt_from_for_long(tmp_path: Path):
    settings = replace(TINY, env="tests.toy_envs:NanReward", runs_dir=str(tmp_path), run_name="nan")
    message = r"policy_loss.* of rank 0 in update 1 are not finite: are there nan or inf in the environment's rewards"
    with pytest.raises(RankError, match=message):
        run_ranks(train_on_nan, 2, settings, timeout=120)
    assert not (tmp_path / "nan" / "checkpoints").exists()

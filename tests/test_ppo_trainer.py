"""Whole trainings on two ranks: the same weights everywhere, the same run twice, files from rank 0, CartPole learnt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastsync.ppo.checkpoint import load_checkpoint
from fastsync.ppo.config import Settings
from fastsync.ppo.metrics import TrainResult
from fastsync.ppo.trainer import rank_generator, train
from tests.ranks import RankError, run_ranks

CPU = torch.device("cpu")
TINY = Settings(total_steps=2_000, num_envs=4, num_epochs=2, sync="cat")
Outcomes = list[dict[str, tuple[dict[str, Tensor], TrainResult]]]


def train_each(
    rank: int, world_size: int, runs: dict[str, Settings]
) -> dict[str, tuple[dict[str, Tensor], TrainResult]]:
    """Trains once for each of ``runs``; every rank has a folder of its own to write to, if it writes."""
    outcome = {}
    for name, settings in runs.items():
        folder = str(Path(settings.runs_dir) / f"rank{rank}")
        policy, result = train(replace(settings, runs_dir=folder, run_name=name), CPU)
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
        "fastsync fp16": replace(tiny, sync="fastsync", compression="fp16"),
        "acrobot": replace(tiny, env="Acrobot-v1"),
    }
    return run_ranks(train_each, 2, runs, timeout=180)


def assert_bitwise_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("name", ["cat", "ddp", "fastsync", "fastsync fp16", "acrobot"])
def test_ranks_end_with_bitwise_equal_weights_and_the_same_figures(outcomes: Outcomes, name: str):
    (weights_0, result_0), (weights_1, result_1) = (outcome[name] for outcome in outcomes)
    assert_bitwise_equal(weights_0, weights_1)
    assert result_0.returns == result_1.returns
    assert result_0.step == result_1.step
    assert result_0.sync == result_1.sync


def test_the_same_seed_gives_bitwise_the_same_policy(outcomes: Outcomes):
    (weights, result), (weights_again, result_again) = outcomes[0]["cat"], outcomes[0]["cat again"]
    assert_bitwise_equal(weights, weights_again)
    assert result.returns == result_again.returns
    other, _ = outcomes[0]["other seed"]
    assert not torch.equal(weights["actor.0.weight"], other["actor.0.weight"])


def test_ways_of_syncing_train_the_same_policy(outcomes: Outcomes):
    """With two ranks the mean of two gradients has one rounding in either way, so not even the last bit differs."""
    assert_bitwise_equal(outcomes[0]["cat"][0], outcomes[0]["ddp"][0])


def test_steps_are_counted_over_ranks_without_restarts(
    outcomes: Outcomes,
):
    _, result = outcomes[0]["cat"]
    rows_per_update = 2 * TINY.batch_size
    assert TINY.total_steps <= result.step < TINY.total_steps + rows_per_update
    # Some episodes ended, so some rows were restarts.
    assert result.returns
    assert result.step % rows_per_update


def test_each_way_tells_what_it_measured(outcomes: Outcomes):
    weights, result = outcomes[0]["cat"]
    assert result.sync.seconds is not None
    assert 0 < result.sync.seconds < result.seconds
    gradient_bytes = sum(weight.nbytes for weight in weights.values())
    assert result.sync.wire_bytes is not None
    num_updates, remainder = divmod(result.sync.wire_bytes, gradient_bytes)
    assert remainder == 0
    assert num_updates % (TINY.num_epochs * TINY.num_minibatches) == 0
    assert vars(outcomes[0]["ddp"][1].sync) == {"seconds": None, "exposed_seconds": None, "wire_bytes": None}


def test_only_rank_0_writes(runs_dir: Path, outcomes: Outcomes):
    assert [folder.name for folder in runs_dir.iterdir()] == ["rank0"]
    folder = runs_dir / "rank0" / "cat"
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    checkpoint = load_checkpoint(folder / "checkpoint.pt")
    weights, result = outcomes[0]["cat"]
    assert_bitwise_equal(checkpoint.model, weights)
    assert checkpoint.step == result.step
    assert checkpoint.config.env == "CartPole-v1"


def test_tensorboard_log_holds_the_run(runs_dir: Path, outcomes: Outcomes):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(runs_dir / "rank0" / "cat")).Reload()
    assert {"episodes/return", "learning/policy_loss", "learning/grad_norm", "speed/steps_per_second"} <= set(
        log.Tags()["scalars"]
    )
    last = log.Scalars("episodes/return")[-1]
    _, result = outcomes[0]["cat"]
    assert last.step == result.step
    assert last.value == pytest.approx(result.mean_return)


def test_the_engine_trains_what_ddp_trains(outcomes: Outcomes):
    (engine, _), (ddp, _) = outcomes[0]["fastsync"], outcomes[0]["ddp"]
    for name, weight in engine.items():
        # The norm that scales the gradients is summed in another order, so the last bits may differ.
        torch.testing.assert_close(weight, ddp[name], rtol=1e-4, atol=1e-5)


def test_compression_halves_the_bytes(outcomes: Outcomes):
    (_, plain), (_, compressed) = outcomes[0]["fastsync"], outcomes[0]["fastsync fp16"]
    assert plain.sync.wire_bytes == outcomes[0]["cat"][1].sync.wire_bytes
    assert plain.sync.wire_bytes is not None
    assert compressed.sync.wire_bytes == plain.sync.wire_bytes / 2


def refuse_second_run(rank: int, world_size: int, settings: Settings) -> None:
    train(settings, CPU)


def test_a_run_folder_is_not_written_over(tmp_path: Path):
    (tmp_path / "taken").mkdir()
    settings = replace(TINY, runs_dir=str(tmp_path), run_name="taken")
    with pytest.raises(RankError, match=r"ValueError: the run folder .*taken exists already; choose another run_name"):
        run_ranks(refuse_second_run, 1, settings, timeout=120)


def test_ranks_have_streams_of_their_own():
    draws = {
        float(torch.rand((), generator=rank_generator(seed, rank, CPU))) for seed in range(10) for rank in range(10)
    }
    assert len(draws) == 100


def test_cartpole_is_learnt(tmp_path: Path):
    """With the settings that a user gets who sets nothing."""
    settings = Settings(runs_dir=str(tmp_path))
    first, _ = run_ranks(train_each, 2, {"cartpole": settings}, timeout=220)
    _, result = first["cartpole"]
    assert len(result.returns) == 100
    assert result.mean_return >= 475

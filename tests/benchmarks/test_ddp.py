"""``python -m benchmarks ddp``: tiny trainings on real ranks, and no assertion about speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.baselines.gradients import Rounding
from benchmarks.baselines.methods import METHODS
from benchmarks.baselines.models import TRAININGS, ModelGradients
from benchmarks.baselines.training_steps import NO_DDP, NO_SYNC, PARTS, whole_steps
from benchmarks.commands.ddp import breakdown
from tests.models import group_of_one

pytestmark = pytest.mark.end_to_end

CPU = torch.device("cpu")


def test_ddp_measures_whole_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    methods = ("ddp", "ddp/fp16_compress_hook", "fastsync.attach/none", "fastsync.attach/fp16")
    options = ("--models", "mlp", "--batch-size", "8", "--repetitions", "3", "--warmup", "2")
    assert main(["ddp", *options, "--methods", *methods, "--json", str(tmp_path / "rows.json")]) == 0
    said = capfd.readouterr().out
    rows = {row["method"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert rows.keys() == {NO_DDP, NO_SYNC, "all_reduce/fp32", "all_reduce/fp16", *methods}
    for method, row in rows.items():
        assert method in said
        assert row["correct"]
        assert len(row["samples"]) == 3
        assert row["settings"].items() >= {"model": "mlp", "batch_size": 8, "world_size": 2}.items()
    medians = {method: row["quantiles"]["median"] for method, row in rows.items()}
    for method in rows.keys() & methods:
        figures = rows[method]["figures"]
        assert figures["samples_per_second"] == pytest.approx(2 * 8 / medians[method])
        without = NO_DDP if method.startswith("fastsync.attach/") else NO_SYNC
        assert figures["exposed"] == pytest.approx(medians[method] - medians[without])
    assert rows["fastsync.attach/fp16"]["figures"]["wire_bytes"] < rows["fastsync.attach/none"]["figures"]["wire_bytes"]


def test_methods_that_bring_adamw_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTSYNC_SHARED_MEMORY", "0")  # else nothing overlaps
    methods = ("ddp+adamw", "fastsync.shard_optimizer+adamw", "fastsync.shard_optimizer:overlap+adamw")
    options = ("--models", "mlp", "--batch-size", "8", "--repetitions", "3", "--warmup", "2")
    assert main(["ddp", *options, "--methods", *methods, "--json", str(tmp_path / "rows.json")]) == 0
    rows = {row["method"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert {*methods} <= rows.keys()
    for row in (rows[method] for method in methods):
        assert row["correct"]
        assert row["figures"]["exposed"] is None
        assert row["figures"]["samples_per_second"] == pytest.approx(2 * 8 / row["quantiles"]["median"])


@pytest.mark.slow
def test_models_under_fully_shard_are_measured_too(tmp_path: Path):
    methods = (
        "fully_shard/bf16",
        "fastsync.register_fsdp:gradients/none",
        "fastsync.register_fsdp:gradients/int8+ef",
        "fastsync.register_fsdp/none",
        "fastsync.register_fsdp/int8",
    )
    options = ("--batch-size", "1", "--repetitions", "2", "--warmup", "2")
    arguments = ["--models", "gpt2", *options, "--methods", *methods, "--json", str(tmp_path / "rows.json")]
    assert main(["ddp", *arguments]) == 0
    rows = {row["method"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert rows.keys() == {NO_DDP, NO_SYNC, *methods}
    assert all(row["correct"] and len(row["samples"]) == 2 for row in rows.values())
    assert rows[methods[1]]["figures"]["error"] < 1e-6
    assert rows[methods[2]]["figures"]["wire_bytes"] < 0.3 * rows[methods[1]]["figures"]["wire_bytes"]
    assert rows[methods[3]]["figures"]["error"] < 1e-6 < rows[methods[4]]["figures"]["error"]


@pytest.mark.parametrize("name", TRAININGS)
def test_steps_leave_weights_and_gradients_as_they_were(name: str):
    """So that what is checked after the last repetition is what every one of them had to give."""
    training = TRAININGS[name]["small"]
    with group_of_one():
        gradients = ModelGradients(training, 2, CPU, seed=0)
        assert gradients.noise == 0
        step = whole_steps(["fastsync.attach/none"], training)["fastsync.attach/none"].build(
            gradients, torch.distributed.group.WORLD
        )
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in step.model.parameters()])
        for _ in range(2):
            step.prepare()
            step.run()
            assert gradients.is_mean(step.result(), Rounding(torch.float32))
            assert gradients.is_own(step.result())
        after = torch.cat([parameter.detach().reshape(-1) for parameter in step.model.parameters()])
    assert torch.equal(after, weights)
    assert gradients.flat_grads.abs().max() > 0
    assert gradients.flat_grads.isfinite().all()


def test_breakdown():
    medians = {NO_DDP: 5.0, NO_SYNC: 6.0, "ddp": 8.0, "all_reduce/fp32": 4.0}
    assert breakdown("ddp", METHODS["ddp"], medians, num_samples=16) == {
        "over_no_ddp": 3.0,
        "exposed": 2.0,
        "hidden": 0.5,
        "samples_per_second": 2.0,
    }
    # Without DDP there is none of its overhead: half of the all_reduce is exposed, not a quarter.
    attached = breakdown(
        "fastsync.attach/none", METHODS["fastsync.attach/none"], medians | {"fastsync.attach/none": 7.0}, 16
    )
    assert (attached["over_no_ddp"], attached["exposed"], attached["hidden"]) == (2.0, 2.0, 0.5)
    no_sync = breakdown(NO_SYNC, PARTS[NO_SYNC], medians, num_samples=16)
    assert (no_sync["over_no_ddp"], no_sync["exposed"], no_sync["hidden"]) == (1.0, None, None)

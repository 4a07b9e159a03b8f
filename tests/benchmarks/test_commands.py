"""The benchmark commands: real runs on real ranks, tiny budgets, and no assertion about speed."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.__main__ import main
from benchmarks.baselines.methods import (
    BY_DEFAULT,
    METHODS,
    OPTIMIZER_LIMITS,
    STEPPING,
    BareAllReduce,
    Method,
    TrainingStep,
    with_their_limits,
)
from benchmarks.baselines.workloads import SIZES, size_of
from benchmarks.harness.collect import collect
from benchmarks.harness.measure import COSTS, bandwidths, measure, ratios
from benchmarks.harness.records import Record, RowFile, quantiles, read_json
from benchmarks.harness.timing import Sampling, rounds, slowest_rank
from tests.ranks import run_ranks

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_sync_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """All methods by default, and one on request of each kind."""
    on_request = {f"fastsync.attach/{name}" for name in ("none+two_shot", "fp16+one_shot", "lowrank", "auto")}
    methods = [method for method in METHODS if method in BY_DEFAULT or method in on_request]
    options = ("--sizes", "5k", "--repetitions", "3", "--warmup", "2", "--json", str(tmp_path / "rows.json"))
    assert main(["sync", *options, "--methods", *methods]) == 0
    said = capfd.readouterr().out
    rows = {row["method"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    refused = "ddp/bf16_compress_hook"
    assert list(rows) == [method for method in methods if method != refused]
    assert f"{refused} is left out: it takes nccl, and these ranks have gloo" in said
    values = SIZES["5k"].numel
    for method, row in rows.items():
        assert method in said
        assert row["correct"]
        assert len(row["samples"]) == 3
        assert min(row["samples"]) > 0
        assert row["quantiles"] == quantiles(row["samples"])
        assert (row["settings"]["world_size"], row["settings"]["numel"]) == (2, values)
        assert row["environment"]["torch"] == torch.__version__
    blocks = sum(-(-math.prod(shape) // 128) for shape in SIZES["5k"].shapes)
    assert rows["ddp/powerSGD_hook"]["figures"]["error"] > 0
    for entry_point in ("register_comm_hook", "attach"):
        for compression, width in {"none": 4, "fp16": 2, "bf16": 2}.items():
            figures = rows[f"fastsync.{entry_point}/{compression}"]["figures"]
            # attach sends a little of its own along, and what ranks send each other is whole blocks.
            assert 1 <= figures["wire_bytes"] / (width * values) < 1.05
            assert all(figures[cost] > 0 for cost in COSTS)
        assert 1 <= rows[f"fastsync.{entry_point}/int8"]["figures"]["wire_bytes"] / (132 * blocks) < 1.05
    assert rows["ddp"]["figures"]["wire_bytes"] is None


@pytest.mark.parametrize("optimizer", STEPPING)
def test_sync_with_an_optimizer(optimizer: str, tmp_path: Path):
    options = ("--sizes", "5k", "--repetitions", "2", "--warmup", "2", "--json", str(tmp_path / "rows.json"))
    assert main(["sync", *options, "--optimizer", optimizer, "--device", "cpu"]) == 0
    rows = {row["method"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert {*STEPPING[optimizer], "no_sync"} <= rows.keys()
    assert all(row["correct"] for row in rows.values())
    figures = {name: rows[name]["figures"] for name in STEPPING[optimizer]}
    assert all(each["over_ddp"] and each["over_shared_sum"] for each in figures.values())
    assert figures[f"ddp+{optimizer}"]["over_ddp"] == figures[OPTIMIZER_LIMITS[optimizer]]["over_shared_sum"] == 1


def test_sizes_are_models_or_bytes():
    assert size_of("5k") is SIZES["5k"]
    assert size_of("1004B").shapes == [(9, 2)] * 5 + [(8, 2)] * 10 + [(1,)]
    assert [size_of(name).repetitions for name in ("1KiB", "16MiB", "1GiB")] == [300, 64, 5]
    for name, message in {"1KB": "not a number of bytes", "60B": "at least 64B", "66B": "multiple of 4B"}.items():
        with pytest.raises(ValueError, match=message):
            size_of(name)


def test_bandwidths_are_those_of_nccl_tests():
    medians = {"ddp": 0.75, "all_reduce/fp16": 0.25, "no_sync": 0.25, "fastsync.attach/fp16": 0.25}
    # What ddp adds to the step without sync, so that a link of 16 kB/s is seen as one.
    assert bandwidths("ddp", medians, 1000, 4) == {"algbw": 8000.0, "busbw": 12000.0}
    assert bandwidths("all_reduce/fp16", medians, 1000, 1) == {"algbw": 16000.0, "busbw": 0.0}
    assert bandwidths("all_reduce/fp16", {"all_reduce/fp16": 0.25}, 1000, 2) == {"algbw": 16000.0, "busbw": 16000.0}
    assert bandwidths("no_sync", medians, 1000, 4) == {"algbw": None, "busbw": None}


class WrongOnRank1(BareAllReduce):
    def result(self) -> torch.Tensor:
        return super().result() + dist.get_rank()


def measure_with_wrong_methods(rank: int, world_size: int) -> list[Record]:
    del rank, world_size
    METHODS["wrong"] = Method(lambda workload, group: TrainingStep(workload.model()))
    METHODS["wrong on rank 1"] = Method(lambda workload, group: WrongOnRank1(workload, group, torch.float32))
    names = with_their_limits(("wrong", "wrong on rank 1", "cat"))
    return measure("5k", names, Sampling(warmup=2, repetitions=4, seed=0))


def test_what_is_wrong_is_not_timed():
    first, second = run_ranks(measure_with_wrong_methods, 2)
    assert first == second
    rows = {record.method: record for record in first}
    wrong = {"wrong", "wrong on rank 1"}
    assert {method for method, row in rows.items() if not row.correct} == wrong
    assert all(len(row.samples) == (0 if method in wrong else 4) for method, row in rows.items())


def row(method: str, correct: bool = True) -> Record:
    return Record("sync", method, {"size": "5k"}, {}, correct, [1.0], {})


def add_rows_then(ending: str, rows: RowFile) -> list[str]:
    if os.environ["RANK"] == "0":
        rows.add([row("ddp"), row("cat", correct=ending != "wrong")])
    if ending == "failure" and os.environ["RANK"] == "0":
        raise RuntimeError("a rank fails")
    if ending == "interrupt" and os.environ["RANK"] == "0":
        os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
    if ending == "interrupt":
        time.sleep(100)
    return ["a note"]


@pytest.mark.parametrize(
    ("ending", "status", "note"),
    [
        ("wrong", 1, "WRONG: cat at {'size': '5k'}"),
        ("failure", 1, "failed first"),
        ("interrupt", 130, "interrupted"),
    ],
)
def test_rows_are_kept_whatever_ends_the_ranks(tmp_path: Path, ending: str, status: int, note: str):
    collected = collect(add_rows_then, 2, ending, tmp_path / "rows.json")
    assert collected.status == status
    assert collected.records == read_json(tmp_path / "rows.json") == [row("ddp"), row("cat", ending != "wrong")]
    assert note in collected.notes[-1]
    assert multiprocessing.active_children() == []


def test_every_round_has_everyone_nobody_always_follows_the_same_and_the_slowest_rank_counts():
    orders = list(rounds("abcde", 50, seed=3))
    assert all(sorted(order) == list("abcde") for order in orders)
    followers = {(first, second) for order in orders for first, second in pairwise(order)}
    assert len(followers) == 5 * 4
    assert slowest_rank([[1.0, 5.0, 2.0], [3.0, 4.0, 2.0]]) == [3.0, 5.0, 2.0]


def test_records_survive_json(tmp_path: Path):
    record = Record("sync", "ddp", {"size": "5k"}, {"own_share": None}, True, [0.25, 0.5, 0.75], {"torch": "2"})
    rows = RowFile(tmp_path / "rows.json")
    assert rows.read() == []
    rows.add([record])
    rows.add([record])
    assert rows.read() == read_json(rows.path) == [record, record]
    assert json.loads(rows.path.read_text())[1]["quantiles"] == {"p10": 0.3, "median": 0.5, "p90": 0.7}
    rows.path.write_text('[{"method": "ddp"}]')
    with pytest.raises(ValueError, match=r"rows\.json holds no rows of a benchmark"):
        rows.read()


def test_ratios():
    medians = {"no_sync": 1.0, "all_reduce/fp32": 4.0, "all_reduce/bf16": 2.0, "fastsync.attach/bf16": 4.0}
    unknown = dict.fromkeys(("over_no_sync", "over_all_reduce", "over_ddp", "over_shared_sum"))
    attached = unknown | {"over_no_sync": 3.0, "over_all_reduce": 1.5}
    assert ratios("fastsync.attach/bf16", medians) == attached
    assert ratios("fastsync.attach/bf16", medians | {"shared_memory_sum": 2.0}) == attached | {"over_shared_sum": 1.5}
    medians |= {"ddp": 6.0}
    assert ratios("ddp", medians) == unknown | {"over_no_sync": 5.0, "over_all_reduce": 1.25, "over_ddp": 1.0}
    # It sends something else than any of the bare all_reduces.
    power_sgd = ratios("ddp/powerSGD_hook", medians | {"ddp/powerSGD_hook": 6.0})
    assert power_sgd == unknown | {"over_no_sync": 5.0, "over_ddp": 1.0}
    assert ratios("no_sync", medians) == unknown


def test_bytes_beside_processes_that_never_sleep(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    options = ("--sizes", "1KiB", "4KiB", "--busy", "1", "--repetitions", "2", "--warmup", "2", "--device", "cpu")
    assert main(["sync", *options, "--methods", "fastsync.attach/fp16", "--json", str(tmp_path / "rows.json")]) == 0
    rows = {(row.method, row.settings["size"]): row for row in read_json(tmp_path / "rows.json")}
    methods = ("no_sync", "all_reduce/fp16", "fastsync.attach/fp16")
    assert rows.keys() == {(method, size) for method in methods for size in ("1KiB", "4KiB")}
    assert all(row.correct and row.settings["busy"] == 1 for row in rows.values())
    assert "1 busy processes beside them" in capfd.readouterr().out

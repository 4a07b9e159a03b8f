"""``python -m benchmarks ops``: tiny runs, and no assertion about speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.baselines.passes import COPY, PACKS, PASSES, UNPACKS, WIRES, Buffers, Pass, is_right
from benchmarks.commands.ops import measure, report
from benchmarks.harness.ahead import FIRST_CYCLES, MOST_CYCLES, Gpu, HostAhead
from benchmarks.harness.collect import Collected

CPU = torch.device("cpu")
SETTINGS = {"repetitions": 2, "warmup": 1, "seed": 0}
SIZE = {"size": "4000B", "num_tensors": 7, "wire": "fp16", "input_sets": 3}


def buffers(wire: str = "fp16", device: torch.device = CPU) -> Buffers:
    made = Buffers(1000, 7, WIRES[wire], device)
    made.pack()
    return made


@pytest.mark.end_to_end
def test_ops_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    chosen = ("--sizes", "2KiB", "--tensors", "1", "6", "--wires", "bf16", "none", "--device", "cpu")
    path = tmp_path / "rows.json"
    assert main(["ops", *chosen, "--repetitions", "2", "--warmup", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    cases = [(row["settings"]["num_tensors"], row["settings"]["wire"], row["method"]) for row in rows]
    assert cases == [(n, wire, method) for n in (1, 6) for wire in ("bf16", "none") for method in [*PACKS, *UNPACKS]]
    for row in rows:
        assert row["correct"]
        assert len(row["samples"]) == 2
        assert row["figures"]["bytes"] == 512 * (6 if row["settings"]["wire"] == "bf16" else 8)
        if row["method"] == COPY:
            assert row["figures"]["of_copy"] == 1
        if row["method"].startswith("fastsync"):
            assert row["figures"]["launches"] == 1
    assert "fastsync.pack" in capfd.readouterr().out


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", PASSES)
def test_all_methods_are_right(name: str, wire: str):
    assert [method for method in PASSES[name] if not is_right(name, PASSES[name][method], buffers(wire))] == []


def wrong_pack(made: Buffers) -> None:
    made.pack()
    made.wire[3] += 1


def wrong_norm(made: Buffers) -> None:
    made.unpack()
    made.stats *= 1.1


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("pack", Pass(wrong_pack)),
        ("unpack", Pass(wrong_norm, Buffers.norm_in_stats)),
        ("unpack", Pass(lambda made: None)),
    ],
)
def test_what_is_wrong_is_found(name: str, method: Pass):
    assert not is_right(name, method, buffers())


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PASSES, "pack", {**PACKS, "wrong": Pass(wrong_pack)})  # type: ignore[arg-type]
    rows = {record.method: record for record in measure("pack", [buffers(), buffers()], SETTINGS, CPU)}
    assert [method for method, record in rows.items() if not record.correct] == ["wrong"]
    assert {method: len(record.samples) for method, record in rows.items()} == dict.fromkeys(PACKS, 2) | {"wrong": 0}


class FakeGpu(Gpu):
    """The host is ahead of it if it sleeps for so many cycles."""

    def __init__(self, until_ahead: int) -> None:
        self.until_ahead = until_ahead
        self.sleeps: list[int] = []

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles)

    def mark(self) -> FakeMark:
        return FakeMark(self.sleeps[-1] < self.until_ahead)


class FakeMark:
    def __init__(self, has_passed: bool) -> None:
        self._has_passed = has_passed

    def query(self) -> bool:
        return self._has_passed

    def synchronize(self) -> None:
        self._has_passed = True

    def elapsed_time(self, end_event: FakeMark) -> float:
        assert end_event.query()
        return 3.0  # milliseconds


def test_a_gpu_sleeps_longer_until_the_host_is_ahead():
    gpu, calls = FakeGpu(until_ahead=4 * FIRST_CYCLES), []
    clock = HostAhead(gpu)
    times = clock.time([lambda: calls.append(1), lambda: calls.append(2)])
    assert gpu.sleeps == [FIRST_CYCLES, 2 * FIRST_CYCLES, 4 * FIRST_CYCLES]
    assert calls == [1, 2] * 3
    assert times.device == 0.003
    assert 0 < times.host < 1
    clock.time([])  # at once as long as was needed
    assert gpu.sleeps[3:] == [4 * FIRST_CYCLES]


def test_a_host_that_is_never_ahead_is_timed_all_the_same():
    gpu = FakeGpu(until_ahead=2 * MOST_CYCLES)
    assert HostAhead(gpu).time([]).device == 0.003
    assert gpu.sleeps[-1] == MOST_CYCLES


def test_kernels_and_the_hosts_share_are_rows_of_their_own(capfd: pytest.CaptureFixture[str]):
    sets = [buffers() for _ in range(3)]
    records = measure("pack", sets, SETTINGS | SIZE, CPU, HostAhead(FakeGpu(until_ahead=0)))
    for record in records:
        assert record.correct
        assert record.samples == [0.001, 0.001]  # of each of three calls
        assert record.figures["host"] is not None
        assert record.figures["host"] > 0
    report(Collected(records, [], 0))
    assert "host, µs" in capfd.readouterr().out
    report(Collected(measure("pack", sets, SETTINGS | SIZE, CPU), [], 0))
    assert "host, µs" not in capfd.readouterr().out


@pytest.mark.gpu
def test_kernels_are_counted_and_timed_on_a_gpu():
    cuda = torch.device("cuda")
    for name, most in {"pack": 2, "unpack": 2}.items():
        records = measure(name, [buffers(device=cuda), buffers(device=cuda)], SETTINGS, cuda)
        rows = {record.method: record for record in records}
        assert all(record.correct for record in rows.values())
        ours = next(record for method, record in rows.items() if method.startswith("fastsync"))
        assert 1 <= ours.figures["launches"] <= most
        assert min(ours.samples) > 0
        assert ours.figures["host"] > 0

"""``python -m benchmarks ops``: tiny runs, and no assertion about speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.baselines.passes import COPY, PACKS, PASSES, UNPACKS, WIRES, Buffers, Pass, is_right
from benchmarks.commands.ops import measure

CPU = torch.device("cpu")
SETTINGS = {"repetitions": 2, "warmup": 1, "seed": 0}


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

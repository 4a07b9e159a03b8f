"""tools/prove_gpu.py, with commands that stand in for those that need a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import prove_gpu
from tools.prove_gpu import ROOT, Command, Part, all_parts, main, marked, run

pytestmark = pytest.mark.end_to_end


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go. There is a GPU."""
    monkeypatch.setattr(prove_gpu, "OUT", tmp_path / "out")
    monkeypatch.setattr(prove_gpu, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(prove_gpu, "machine", lambda: ("NVIDIA H200", "torch 2.11.0+cu130, CUDA 13.0"))
    return tmp_path / "out"


def test_the_plan_shows_commands_within_the_limits_and_make_hands_it_on(capsys: pytest.CaptureFixture[str]) -> None:
    parts = all_parts()
    assert main(["--plan"]) == 0
    heads = re.findall(r"^(\w+): at most \d+ s$", capsys.readouterr().out, re.MULTILINE)
    assert heads == [name for name in parts if name != "carry"]
    assert all(0 < command.limit <= part.limit < 480 for part in parts.values() for command in part.commands)
    make = ["make", "-s", "prove-gpu", "PLAN=1", "PART=build", f"PROVE_PYTHON={sys.executable}"]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert re.search(r"450 s  FASTSYNC_CUDA=1 MAX_JOBS=\d+ .*setup.py build_ext --inplace\n", printed)


def test_every_gpu_test_is_in_a_part() -> None:
    command = [sys.executable, "-m", "pytest", "tests", "--collect-only", "-q", "-m", "gpu"]
    environment = {**os.environ, "TESTS_WITHOUT_RANKS": "1"}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200).stdout
    tests = re.findall(r"^(tests/\w+/\w+\.py)::(.+)$", printed, re.MULTILINE)
    assert len(tests) > 100
    run_by = {name: " ".join(map(str, each.commands)) for name, each in all_parts().items()}
    for file, test in tests:
        assert f"{file} " in (run_by["captured"] if "captur" in test else run_by["tests"] + run_by["ranks"])
    assert run_by["generic"].count("FASTSYNC_KERNELS=aten ") == run_by["tests"].count(" -m gpu ")


def test_at_its_limit_a_command_ends_with_all_that_it_started_and_what_it_printed_is_kept(tmp_path: Path) -> None:
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    for end, status, limit in (("time.sleep(600)", None, 5.0), ("sys.exit(7)", 7, 60.0)):
        code = f"import os, subprocess, sys, time; {start}; print(os.environ['PROVE_GPU'], flush=True); {end}"
        log, began = tmp_path / f"{status}.log", time.monotonic()
        assert run(Command((sys.executable, "-c", code), 60), log, limit) == status
        assert time.monotonic() - began < 60
        (mark,) = re.findall(r"^[0-9a-f]{32}$", log.read_text(), re.MULTILINE)
        assert marked(f"PROVE_GPU={mark}") == []
    assert run(Command(("no-such-program",), 1), tmp_path / "log", 1.0) == 127


def test_one_failure_stops_neither_its_part_nor_the_next(out: Path) -> None:
    def part(name: str, limit: float, *codes: str) -> Part:
        return Part(name, limit, "tests", [Command((sys.executable, "-c", code), limit) for code in codes])

    parts = {
        "tests": part("tests", 60, "raise SystemExit('broken')", "print(3, 'passed,', 1, 'skipped in 2.00s')"),
        "ranks": part("ranks", 1, "import time; time.sleep(60)", "print(2, 'failed in 2.00s')"),
        "build": part("build", 60, "print('  kernels on cuda        fused CUDA')", "raise SystemExit(5)"),
    }
    assert main([], parts) == 1
    assert main(["build"], parts) == 0
    head, _, *lines = (out / "summary.txt").read_text().splitlines()
    assert head == "prove-gpu: NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0"
    found = [re.match(r"(\w+) +(.+?) +\d+ s  \S+ \S+  (.*)", line) for line in lines]
    failed, late = ("tests", "FAILED", "3 passed, 1 skipped"), ("ranks", "TIMED OUT", "")
    built = ("build", "passed", "kernels on cuda        fused CUDA")
    assert [match and match.groups() for match in found] == [failed, late, built]


def test_rows_of_all_benchmarks_come_back(out: Path) -> None:
    commands = []
    for each in (prove_gpu.FUSED, prove_gpu.GENERIC):
        rows = prove_gpu.KEPT / f"{each['FASTSYNC_KERNELS']}.json"
        code = f"import pathlib; pathlib.Path({str(rows)!r}).write_text('[1]')"
        commands.append(Command((sys.executable, "-c", code), 60, each, rows))
    assert main([], {"kernels": Part("kernels", 60, "benchmarks", commands)}) == 0
    assert json.loads((out / "benchmarks.json").read_text()) == {"auto": [1], "aten": [1]}

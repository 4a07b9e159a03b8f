"""tools/prove_gpu.py, with commands that stand in for those that need a GPU."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.forked import state_of, until
from tools import prove_gpu
from tools.prove_gpu import ROOT, Command, all_parts, main, run

pytestmark = pytest.mark.end_to_end


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go. There is a GPU."""
    monkeypatch.setattr(prove_gpu, "OUT", tmp_path / "out")
    monkeypatch.setattr(prove_gpu, "machine", lambda: ("NVIDIA H200", "torch 2.11.0+cu130, CUDA 13.0"))
    return tmp_path / "out"


def test_every_gpu_test_is_in_a_part(request: pytest.FixtureRequest) -> None:
    """Of those that this session has collected: all of them, as CI runs it."""
    run_by = {name: " ".join(map(str, each)) for name, each in all_parts().items()}
    for item in request.session.items:
        if item.get_closest_marker("gpu"):
            part = run_by["captured"] if "captur" in item.name else run_by["tests"] + run_by["ranks"]
            assert f"{item.path.relative_to(ROOT)} " in part
    assert run_by["generic"].count("FASTSYNC_KERNELS=aten ") == run_by["tests"].count(" -m gpu ")


def test_at_its_limit_a_command_ends_with_what_it_started_and_what_it_printed_is_kept(tmp_path: Path) -> None:
    for end, status, limit in (("sleep 600", None, 2.0), ("exit 7", 7, 60.0)):
        log, began = tmp_path / f"{status}.log", time.monotonic()
        command = ("bash", "-c", f"(trap '' TERM; exec sleep 600) & echo child $!; {end}")
        assert run(Command(command, 60), log, limit) == status
        assert time.monotonic() - began < 60
        (child,) = re.findall(r"^child (\d+)$", log.read_text(), re.MULTILINE)
        until(lambda child=int(child): not state_of(child), "the end of what it had started")


def test_one_failure_stops_neither_its_part_nor_the_next(out: Path) -> None:
    def part(limit: float, *codes: str) -> list[Command]:
        return [Command((sys.executable, "-c", code), limit) for code in codes]

    parts = {
        "tests": part(60, "raise SystemExit('broken')", "print(3, 'passed,', 1, 'skipped in 2.00s')"),
        "ranks": part(1, "import time; time.sleep(60)", "print(2, 'failed in 2.00s')"),
        "build": part(60, "print('  kernels on cuda        fused CUDA')", "raise SystemExit(5)"),
    }
    assert main([], parts) == 1
    assert main(["build"], parts) == 0
    head, *lines = [line[18:] for line in (out / "summary.txt").read_text().splitlines()]
    assert head == "prove-gpu: NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0"
    found = [re.match(r"(\w+) +(.+?) +\d+ s  (.*)", line) for line in lines]
    failed, late = ("tests", "FAILED", "3 passed, 1 skipped"), ("ranks", "TIMED OUT", "2 failed")
    built = ("build", "passed", "kernels on cuda        fused CUDA")
    assert [match and match.groups() for match in found] == [failed, late, built, None, built]

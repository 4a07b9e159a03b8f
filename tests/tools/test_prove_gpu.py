"""tools/prove_gpu.py, with commands that stand in for those that need a GPU."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import tyro
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from tools import prove_gpu
from tools.prove_gpu import ROOT, Command, Part, all_parts, main, rehearsed

pytestmark = pytest.mark.end_to_end


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go. There is a GPU, and nothing is missing."""
    monkeypatch.setattr(prove_gpu, "OUT", tmp_path / "out")
    monkeypatch.setattr(prove_gpu, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(prove_gpu, "INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(prove_gpu, "machine", lambda: ("NVIDIA H200", "9.0", "torch 2.11.0+cu130, CUDA 13.0"))
    monkeypatch.setattr(prove_gpu, "needs", list)
    return tmp_path / "out"


def selects(command: Command, item: pytest.Item) -> bool:
    """Whether it runs this test."""
    words = list(command.words)
    if f"tests/{item.path.relative_to(ROOT / 'tests')}" not in words:
        return False
    keywords = words[words.index("-k") + 1] if "-k" in words else ""
    return not keywords or Expression.compile(keywords).evaluate(KeywordMatcher.from_item(item))


def test_every_gpu_test_is_in_one_part(request: pytest.FixtureRequest) -> None:
    """Of those that this session has collected: all of them, as CI runs it."""
    parts = all_parts()
    for item in request.session.items:
        if item.get_closest_marker("gpu"):
            of_parts = ["operators", "steps", "captured", "ranks", "trainings", "tests", "generic"]
            by = [name for name in of_parts for each in parts[name].commands if selects(each, item)]
            assert [name for name in by if name != "generic"] or by == ["generic"], item
            assert len(set(by) - {"generic"}) <= 1, item
    assert parts["generic"].commands[1].environment["FASTSYNC_KERNELS"] == "aten"


def test_the_benchmarks_take_these_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(prove_gpu, "OUT", ROOT)
    commands = [each for part in all_parts().values() for each in part.commands if each.rows]
    assert [each.words[3] for each in commands] == ["ops", "sync", "sync", "stream", "ppo"]
    for each in commands:
        module = importlib.import_module(f"benchmarks.commands.{each.words[3]}")
        tyro.cli(module.Options, args=list(each.words[4:]))


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_rehearsal_runs_what_goes_without_a_gpu(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are as it is in their parts: tests are collected, of which there are some."""
    parts = {name: all_parts()[name] for name in ("captured", "stream")}
    assert main(["--rehearse"], parts) == 0, (out / "figures.log").read_text()
    assert [path.name for path in sorted(out.iterdir())] == ["figures.log", "rows.json", "summary.txt", "tests.log"]
    assert {row["benchmark"] for row in json.loads((out / "rows.json").read_text())} == {"stream"}
    captured, stream, *_ = [line[18:] for line in (out / "summary.txt").read_text().splitlines()][1:]
    assert re.fullmatch(r"captured   passed    +\d+ s  12/\d+ tests collected.*", captured)
    assert re.search(r"fastsync.attach/none +│ +no │", stream)
    kept = {name: [" ".join(each.words) for each in rehearsed(part).commands] for name, part in all_parts().items()}
    assert [words for words in kept["build"] if "setup.py" in words or "rm" in words] == []
    assert not any("cuda" in words or "share-gpus" in words for name in ("ops", "sync", "ppo") for words in kept[name])


def test_parts_for_which_no_time_is_left_are_named(out: Path) -> None:
    def part(code: str) -> Part:
        return Part("tests", 60, [Command((sys.executable, "-c", code), 60)], least=1.0)

    assert main(["--minutes", "0.05"], {"slow": part("import time; time.sleep(60)"), "next": part("")}) == 4
    lines = [line[18:] for line in (out / "summary.txt").read_text().splitlines()]
    assert re.fullmatch(r"slow +CUT SHORT +\d+ s  ", lines[1])
    assert re.fullmatch(r"next +LEFT OUT +0 s  -?\d+ s were left of 0.05 minutes", lines[2])
    assert re.fullmatch(r"prove-gpu: 1 CUT SHORT, 1 LEFT OUT, in \d+ s", lines[3])


def test_one_failure_stops_neither_its_part_nor_the_next(out: Path) -> None:
    def part(limit: float, *codes: str) -> Part:
        return Part("tests", 100, [Command((sys.executable, "-c", code), limit) for code in codes])

    parts = {
        "tests": part(60, "raise SystemExit('broken')", "print(3, 'passed,', 1, 'skipped in 2.00s')"),
        "ranks": part(1, "import time; time.sleep(60)", "print(2, 'failed in 2.00s')"),
        "build": part(60, "print('  kernels on cuda        fused CUDA')", "raise SystemExit(5)"),
    }
    assert main([], parts) == 1
    assert main(["build"], parts) == 0
    head, *lines = [line[18:] for line in (out / "summary.txt").read_text().splitlines()]
    assert re.fullmatch(r"prove-gpu: NVIDIA H200, torch 2.11.0\+cu130, CUDA 13.0, \d+ cores", head)
    found = [re.match(r"(\w+) +(.+?) +\d+ s  (.*)", line) for line in lines if not line.startswith("prove-gpu")]
    failed, late = ("tests", "FAILED", "3 passed, 1 skipped"), ("ranks", "TIMED OUT", "2 failed")
    built = ("build", "passed", "kernels on cuda        fused CUDA")
    assert [match and match.groups() for match in found] == [failed, late, built, built]
    assert re.fullmatch(r"prove-gpu: 1 FAILED, 1 TIMED OUT, 1 passed, in \d+ s", lines[3])

"""make prove-gpu: with commands that stand in for those that need a GPU. Nothing here takes one, or proves anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tools.prove_gpu import __main__ as prove_gpu
from tools.prove_gpu import figures, results, wheels
from tools.prove_gpu.parts import PARTS, Part, files_of, obstacle
from tools.prove_gpu.results import LARGEST, Result, kept, publish, summary
from tools.prove_gpu.running import Command, run
from tools.prove_gpu.wheels import ROOT

pytestmark = pytest.mark.end_to_end

GPU = {
    "torch": "torch 2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "gpus": ["NVIDIA H200"], "built": True,
    "driver": "580.1", "commit": None,
}  # fmt: skip
NO_GPU = {**GPU, "gpus": [], "nccl": None, "driver": None}
CPU_TORCH = {**NO_GPU, "torch": "torch 2.13.0+cpu is built without CUDA", "cuda": None, "built": False}


def python(code: str, limit: float = 60.0, **environment: str) -> Command:
    return Command((sys.executable, "-c", code), limit, environment)


def part(name: str, *commands: Command, limit: float = 60.0) -> Part:
    return Part(name, "something", limit, lambda folder: commands)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Of what is kept between calls, and of what is published. There is a GPU, and all packages are here."""
    monkeypatch.setattr(prove_gpu, "WORK", tmp_path / "work")
    monkeypatch.setattr(prove_gpu, "probe", lambda: GPU)
    monkeypatch.setattr(prove_gpu, "_install", lambda: "all packages are here")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(prove_gpu, "_use_site", lambda: None)
    return tmp_path / "work", tmp_path / "out"


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_the_plan_shows_every_part_and_runs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert prove_gpu.main(["--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert [head.split(":")[0] for head in heads] == list(PARTS)
    assert all(re.search(r"at most \d+ s$", head) for head in heads)
    assert all(re.match(r" +\d+ s  ", line) for line in lines if line.startswith(" "))
    assert any("FASTSYNC_CUDA=1 MAX_JOBS=" in line and "setup.py build_ext --inplace" in line for line in lines)


def test_make_hands_part_and_plan_on() -> None:
    command = [
        "make",
        "--no-print-directory",
        "-s",
        "prove-gpu",
        "PLAN=1",
        "PART=build ops",
        f"PROVE_PYTHON={sys.executable}",
    ]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert [line.split(":")[0] for line in printed.splitlines() if not line.startswith(" ")] == ["build", "ops"]


def test_no_part_may_take_eight_minutes() -> None:
    for each in PARTS.values():
        assert each.limit < 480
        assert all(0 < command.limit <= each.limit for command in each.commands(Path("folder")))


def test_every_gpu_test_is_in_one_part() -> None:
    """By what pytest itself collects, of the files that speak of GPUs. Captured steps are told by their names."""
    texts = {path: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    files = [str(path) for path, text in texts.items() if "gpu" in text or "device" in text]
    command = [sys.executable, "-m", "pytest", *files, "--collect-only", "-q", "-m", "gpu"]
    environment = {**os.environ, "TESTS_WITHOUT_RANKS": "1"}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200).stdout
    tests = [match.groups() for match in re.finditer(r"^(tests/\w+\.py)::(.+)$", printed, re.MULTILINE)]
    assert len(tests) > 100
    captured = {file for file, name in tests if "captur" in name}
    assert set(files_of("captured")) == captured
    assert sorted(files_of("tests") + files_of("ranks")) == sorted(
        {file for file, name in tests if "captur" not in name}
    )
    assert len(files_of("ranks")) == 3


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        prove_gpu.main(["banana"])
    assert "no part banana: choose from carry, build" in capsys.readouterr().err


# ---- without a GPU --------------------------------------------------------------------------------------------------


def test_without_a_gpu_each_part_says_so_and_the_status_is_3(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove_gpu, "probe", lambda: CPU_TORCH)
    for name in PARTS:
        if name != "carry":
            assert prove_gpu.main([name]) == 3
            said = "no GPU: torch 2.13.0+cpu is built without CUDA"
            assert f"{name}: not run after 0 s: {said}" in capsys.readouterr().out
    assert (folders[1] / "summary.txt").read_text().count("no GPU: torch") == len(PARTS) - 1


def test_what_a_part_lacks_is_named() -> None:
    assert obstacle(PARTS["carry"], CPU_TORCH) is None
    assert obstacle(PARTS["build"], NO_GPU) is None
    assert obstacle(PARTS["tests"], NO_GPU) == "no GPU: torch sees none"
    assert obstacle(PARTS["tests"], {**GPU, "built": False}) == (
        "the extension is not built with CUDA: run the part build first"
    )
    assert obstacle(PARTS["tests"], GPU) is None


def test_without_compute_sanitizer_its_part_has_not_run(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.prove_gpu.parts.shutil.which", lambda name: None)
    assert prove_gpu.main(["sanitizer"]) == 1
    assert "sanitizer: not run after 0 s: compute-sanitizer is not on the PATH" in capsys.readouterr().out


def test_the_machine_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = prove_gpu.probe()
    assert str(machine["torch"]).startswith("torch 2")
    monkeypatch.setattr(prove_gpu, "PROBE", "import os; os.abort()")
    assert prove_gpu.probe()["torch"] == "asking torch for GPUs hangs or crashes"


# ---- running --------------------------------------------------------------------------------------------------------


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_at_its_limit_a_command_ends_with_all_that_it_started_and_its_output_is_kept(tmp_path: Path) -> None:
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print('pid', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    began = time.monotonic()
    outcome = run(python(code, limit=2.0), tmp_path, tmp_path / "log")
    assert outcome.status is None
    assert time.monotonic() - began < 30
    log = (tmp_path / "log").read_text()
    assert log.startswith("\n$ ")
    assert "ended at its limit of 2 s" in log
    pid = int(log.split("\npid ")[1].split()[0])
    deadline = time.monotonic() + 10
    while not is_gone(pid):
        assert time.monotonic() < deadline, "what the command had started is still there"
        time.sleep(0.02)


def test_what_a_command_leaves_running_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess; print('pid', subprocess.Popen(['sleep', '600']).pid)"
    assert run(python(code), tmp_path, tmp_path / "log").status == 0
    pid = int((tmp_path / "log").read_text().split("\npid ")[1].split()[0])
    deadline = time.monotonic() + 10
    while not is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_how_a_command_ended_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run(python("raise SystemExit(7)"), tmp_path, log).status == 7
    assert run(python("import os; os.abort()"), tmp_path, log).status == -6
    assert run(Command(("no-such-program",), 1.0), tmp_path, log).status == 127
    assert run(python("import os; print(os.environ['NAME'])", NAME="given here"), tmp_path, log).status == 0
    for said in ("exit status 7", "died of SIGABRT", "No such file", "NAME='given here' ", "\ngiven here\n"):
        assert said in log.read_text()


def test_one_failure_stops_neither_its_part_nor_the_next(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "of", lambda name, folder: "")
    parts = {
        "tests": part("tests", python("raise SystemExit('broken')"), python("print('after it')")),
        "ranks": part("ranks", python("import time; time.sleep(60)", limit=0.5), python("print('after that')")),
        "ops": part("ops", python("print('at the end')")),
    }
    assert prove_gpu.main([], parts) == 1
    statuses = {result.part: result.status for result in kept(folders[0], list(parts))}
    assert statuses == {"tests": "failed", "ranks": "timed out", "ops": "passed"}
    text = (folders[1] / "summary.txt").read_text()
    assert text.startswith("prove-gpu: FAILED: tests, ranks\n")
    assert text in capsys.readouterr().out
    for name, said in {"tests": "after it", "ranks": "after that", "benchmarks": "at the end"}.items():
        assert f"\n{said}\n" in (folders[1] / f"{name}.log").read_text()
    assert prove_gpu.main(["ops"], parts) == 0


def test_what_has_ended_is_published_when_the_next_part_begins(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """So that it is not lost where somebody ends the whole call."""
    copied = python(f"import shutil; shutil.copytree({str(folders[1])!r}, {str(tmp_path / 'seen')!r})")
    parts = {"tests": part("tests", python("print('proved')")), "ranks": part("ranks", copied)}
    assert prove_gpu.main([], parts) == 0
    lines = (tmp_path / "seen" / "summary.txt").read_text().splitlines()
    assert lines[0] == "prove-gpu: FAILED: ranks"
    assert lines[5].split(" s  ")[1] == "the call was ended before the part"
    assert "\nproved\n" in (tmp_path / "seen" / "tests.log").read_text()


def test_who_is_told_to_end_ends_what_runs(tmp_path: Path) -> None:
    """The command is in a process group of its own, and would stay."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tools.prove_gpu import __main__ as m\n"
        "from tools.prove_gpu.running import Command, run\n"
        "m.signal.signal(m.signal.SIGTERM, m._stop)\n"
        f"run(Command(('sh', '-c', 'echo pid $$; exec sleep 600'), 60), Path('.'), Path({str(tmp_path / 'log')!r}))\n"
    )
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        deadline = time.monotonic() + 30
        while not log.exists() or "\npid " not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        assert process.wait(timeout=30) == 128 + 15
    pid = int(log.read_text().split("\npid ")[1].split()[0])
    while not is_gone(pid):
        assert time.monotonic() < deadline + 30
        time.sleep(0.02)


def test_a_parts_limit_counts_for_all_of_its_commands(folders: tuple[Path, Path]) -> None:
    sleeps = python("import time; time.sleep(60)")
    parts = {"tests": part("tests", sleeps, python("print('never')"), limit=1.0)}
    began = time.monotonic()
    assert prove_gpu.main([], parts) == 1
    assert time.monotonic() - began < 30
    assert "[not begun: the part's 1 s are over]" in (folders[1] / "tests.log").read_text()


# ---- what is published ----------------------------------------------------------------------------------------------


def all_results(said: str) -> list[Result]:
    return [Result(name, "passed", 479.6, said, "2026-01-01 00:00:00") for name in PARTS]


def test_the_summary_fits_a_screen() -> None:
    machine = {**GPU, "gpus": ["NVIDIA H200 NVL, a name that is quite long"] * 8, "commit": "0123456789ab-dirty"}
    lines = summary(all_results("many words " * 30), machine, "2026-01-02 00:00:00").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert lines[0] == "prove-gpu: all that ran has passed"
    assert [line.split()[0] for line in lines[4:] if "passed" in line] == list(PARTS)
    assert sum(line.startswith("    ") for line in lines) == 24 - 4 - len(PARTS)


def row(way: str, samples: Sequence[float], **settings: Any) -> dict[str, Any]:
    return {"benchmark": "sync", "way": way, "settings": settings, "figures": {}, "samples": list(samples)}


def test_at_most_eight_files_of_which_none_is_too_large(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    for name in PARTS:
        (work / name).mkdir(parents=True)
        (work / name / "log.txt").write_bytes(b"first\n" + b"x" * (LARGEST + 1) + b"\nlast\n")
    many = [row("ddp", [0.1] * 1_000_000, size="12m", world_size=nproc) for nproc in (1, 2, 3, 4)]
    (work / "sync" / "sync-1.json").write_text(json.dumps(many))
    publish(all_results("fine"), GPU, "now", work, out)
    files = {path.name: path.stat().st_size for path in out.iterdir()}
    assert len(files) == 8
    assert max(files.values()) < 16 << 20
    assert (out / "ranks.log").read_text().startswith("ranks: passed after 480 s: fine\n")
    log = (out / "benchmarks.log").read_text()
    assert log.count("first\n") == log.count("\nlast\n") == 5
    assert "bytes cut]" in log
    rows = json.loads((out / "benchmarks.json").read_text())
    assert [(each["settings"]["world_size"], each["samples"]) for each in rows] == [(n, []) for n in (1, 2, 3, 4)]


def test_failed_tests_stand_above_the_log(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "test_fp32_sums.xml").write_text(
        "<testsuites><testsuite><testcase classname='tests.test_fp32_sums' name='test_a'/>"
        "<testcase classname='tests.test_fp32_sums' name='test_b'><failure message='no match&#10;more'/></testcase>"
        "<testcase classname='tests.test_fp32_sums' name='test_c'><skipped message='two GPUs'/></testcase>"
        "</testsuite></testsuites>"
    )
    assert figures.of("ranks", folder) == "1 passed, 1 failed, 1 skipped, first test_b"
    publish([Result("ranks", "failed", 1.0, "said", "now")], GPU, "now", tmp_path, tmp_path / "out")
    lines = (tmp_path / "out" / "ranks.log").read_text().splitlines()
    assert lines[:2] == ["ranks: failed after 1 s: said", "FAILED tests.test_fp32_sums::test_b: no match"]


def test_figures_of_benchmarks(tmp_path: Path) -> None:
    ways = {"ddp": 0.004, "fastsync.register_comm_hook/none": 0.003, "fastsync.attach/none": 0.002}
    rows = [row(way, [seconds], size="12m", world_size=1) for way, seconds in ways.items()]
    (tmp_path / "sync-1.json").write_text(json.dumps(rows))
    (tmp_path / "result.json").write_text("{}")
    assert figures.of("sync", tmp_path) == "ms ddp/hook/attach: 12m×1 4.00/3.00/2.00"
    (tmp_path / "sync-1.json").write_text("[")
    assert figures.of("sync", tmp_path).startswith("unreadable results: JSONDecodeError")


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("x.cu(3): error: no such thing\nmore: error: follows\n  CUDA half    not built\n")
    assert figures.of("build", tmp_path) == "x.cu(3): error: no such thing, CUDA half not built"


def test_where_there_are_no_figures_the_last_words_stand(folders: tuple[Path, Path]) -> None:
    code = python("raise SystemExit('device=cuda: there is no GPU')")
    assert prove_gpu.main([], {"ops": part("ops", code)}) == 1
    assert "failed" in (line := (folders[1] / "summary.txt").read_text().splitlines()[4])
    assert line.endswith("device=cuda: there is no GPU")


def test_figures_of_the_sanitizer(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(
        "$ compute-sanitizer --tool memcheck x\n========= ERROR SUMMARY: 0 errors\n"
        "$ compute-sanitizer --tool racecheck x\n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
        "$ compute-sanitizer --tool synccheck x\n"
    )
    said = "memcheck: 0 errors; racecheck: 1 hazard displayed (1 error, 0 warnings); synccheck: no summary"
    assert figures.of("sanitizer", tmp_path) == said


# ---- wheels ---------------------------------------------------------------------------------------------------------


def test_without_a_network_the_folder_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "CARRIED", tmp_path)
    monkeypatch.setattr(wheels, "PACKAGES", ("tyro", "Farama_Notifications"))
    monkeypatch.setattr(wheels, "COMPILED", ())
    (tmp_path / "farama_notifications-0.0.6-py3-none-any.whl").touch()
    asked: list[str] = []
    monkeypatch.setattr(wheels, "_run", lambda command: bool(asked.append(command[-1])))
    assert wheels.fill() == f"1 wheels, 0.0 MiB in {tmp_path.name}; no network, or no such wheel: tyro"
    assert all(word.startswith("tyro") for word in asked)
    (tmp_path / "tyro-1.0-py3-none-any.whl").touch()
    assert wheels.fill() == f"2 wheels, 0.0 MiB in {tmp_path.name}; nothing to fetch"


def make_wheel(folder: Path, name: str, version: str, tags: str) -> None:
    with ZipFile(folder / f"{name}-{version}-{tags}.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"tags = {tags!r}\n")
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")


def test_only_what_is_missing_or_too_old_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "CARRIED", tmp_path)
    monkeypatch.setattr(wheels, "SITE", tmp_path / "site")
    monkeypatch.setattr(wheels, "PACKAGES", ("pytest>=8", "pytest-timeout>=1000", "not-there"))
    monkeypatch.setattr(wheels, "COMPILED", ("made_up",))
    here = f"cp3{sys.version_info.minor}"
    make_wheel(tmp_path, "pytest", "9.9", "py3-none-any")
    make_wheel(tmp_path, "pytest_timeout", "1000.1", "py2.py3-none-any")
    for python in (here, "cp399"):
        make_wheel(tmp_path, "made_up", "1.0", f"{python}-{python}-manylinux2014_x86_64")
    assert wheels.install() == "missing here and not carried: not-there"
    assert {path.name for path in (tmp_path / "site").glob("*.py")} == {"pytest_timeout.py", "made_up.py"}
    assert f"{here}-{here}" in (tmp_path / "site" / "made_up.py").read_text()


def test_what_the_benchmarks_and_tests_import_is_named(tmp_path: Path) -> None:
    """Or is torch's, or too large to carry."""
    from benchmarks.__main__ import REQUIRED

    named = {wheels._name(package.partition(">=")[0]) for package in (*wheels.PACKAGES, *wheels.COMPILED)}
    assert set(REQUIRED) - named == {"jinja2", "matplotlib", "numpy", "scipy"}
    assert results.output_folder() != tmp_path

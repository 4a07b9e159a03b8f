"""What parts have found: kept from call to call, and written as at most eight files, of which one is a summary."""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.prove_gpu import figures
from tools.prove_gpu.wheels import ROOT

WORK = ROOT / "build/prove-gpu-work"
BENCHMARKS = ("ops", "sync", "ddp", "ppo", "cost")
LOGS = {
    "build": ("carry", "build"),
    "tests": ("tests",),
    "ranks": ("ranks",),
    "captured": ("captured",),
    "sanitizer": ("sanitizer",),
    "benchmarks": BENCHMARKS,
}
"""Which parts share a file. With summary.txt and benchmarks.json that makes eight."""
LINES, COLUMNS = 24, 100
LARGEST = 15 << 20
"""Bytes of a file."""
PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "failed", "timed out", "not run"
SHARED = "Two ranks on one GPU take turns there: what they take says nothing about how training scales."


@dataclass(frozen=True)
class Result:
    """How a part ended."""

    part: str
    status: str
    seconds: float
    said: str
    """Its figures, or why it did not run."""
    call: str
    """When the command began that ran it."""

    def keep(self, work: Path) -> None:
        """Writes it down for later calls."""
        (work / self.part / "result.json").write_text(json.dumps(asdict(self)))


def output_folder() -> Path:
    """Where the files go: the folder that OUT names, or one under build/."""
    return Path(os.environ.get("OUT") or ROOT / "build/prove-gpu")


def kept(work: Path, names: Sequence[str]) -> list[Result]:
    """What these parts found when they last ran."""
    paths = [work / name / "result.json" for name in names]
    return [Result(**json.loads(path.read_text())) for path in paths if path.exists()]


def summary(results: Sequence[Result], machine: Mapping[str, object], call: str) -> str:
    """One screen: the verdict, the machine, and a line or two for each part."""
    wrong = [result.part for result in results if result.status in (FAILED, TIMED_OUT)]
    idle = [result.part for result in results if result.status == NOT_RUN]
    verdict = [f"FAILED: {', '.join(wrong)}"] if wrong else []
    verdict += [f"not run: {', '.join(idle)}"] if idle else []
    lines = [f"prove-gpu: {'; '.join(verdict) or 'all that ran has passed'}", _machine(machine), SHARED, ""]
    second_lines = LINES - len(lines) - len(results)
    for result in results:
        earlier = "" if result.call == call else f"[of {result.call}] "
        head = f"{result.part:<10}{result.status:<10}{result.seconds:5.0f} s  "
        first, *rest = textwrap.wrap(earlier + result.said, COLUMNS - len(head)) or [""]
        if rest and second_lines > 0:
            second_lines -= 1
            lines += [head + first, " " * len(head) + " ".join(rest)]
        else:
            lines.append(head + " ".join([first, *rest]))
    return "\n".join(map(_cut, lines)) + "\n"


def publish(results: Sequence[Result], machine: Mapping[str, object], call: str, work: Path, out: Path) -> str:
    """Writes all files, what a reader wants first at their top, and returns the summary."""
    out.mkdir(parents=True, exist_ok=True)
    text = summary(results, machine, call)
    (out / "summary.txt").write_text(text)
    for name, parts in LOGS.items():
        chosen = [result for result in results if result.part in parts]
        if chosen:
            share = LARGEST // len(chosen)
            (out / f"{name}.log").write_bytes(b"".join(_log(result, work, share) for result in chosen))
    rows = [row for part in BENCHMARKS for row in figures.rows_of(work / part)]
    if rows:
        (out / "benchmarks.json").write_bytes(_as_json(rows))
    return text


def last_words(log: Path) -> str:
    """The last line that a command printed: where there are no figures, it tells why more often than not."""
    lines = (line.strip() for line in log.read_text(errors="replace").splitlines())
    return next((line for line in reversed(list(lines)) if line and not line.startswith(("[", "$"))), "")


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _machine(machine: Mapping[str, object]) -> str:
    gpus = machine["gpus"]
    facts = [
        ", ".join(map(str, gpus)) if isinstance(gpus, list) and gpus else "no GPU",
        str(machine["torch"]),
        f"CUDA {machine['cuda']}",
        f"NCCL {machine['nccl']}",
        f"driver {machine['driver']}",
        f"commit {machine['commit']}",
    ]
    return ", ".join(fact for fact in facts if not fact.endswith("None"))


def _log(result: Result, work: Path, largest: int) -> bytes:
    """A part's result and the tests that failed, and then what its commands printed, cut in the middle."""
    folder = work / result.part
    head = [f"{result.part}: {result.status} after {result.seconds:.0f} s: {result.said}"]
    head += [f"FAILED {line}"[:1000] for line in figures.failed_tests(folder)[:200]]
    top = ("\n".join(head) + "\n" + "-" * COLUMNS + "\n").encode()
    log = folder / "log.txt"
    printed = log.read_bytes() if log.exists() else b""
    room = largest - len(top) - 100
    if len(printed) > room:
        cut = len(printed) - room
        printed = printed[: room // 2] + f"\n[{cut} bytes cut]\n".encode() + printed[len(printed) - room // 2 :]
    return top + printed + b"\n"


def _as_json(rows: Sequence[figures.Row]) -> bytes:
    """An array with a row a line, as ``python -m benchmarks`` reads it; without samples where they are too many."""

    def array(rows: Sequence[figures.Row]) -> bytes:
        return ("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n").encode()

    whole = array(rows)
    return whole if len(whole) <= LARGEST else array([{**row, "samples": []} for row in rows])


def _cut(line: str) -> str:
    return line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"

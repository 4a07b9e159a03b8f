"""The few figures of each part that its line in the summary has room for, from what its commands left."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

Row = Mapping[str, Any]
ATTACH, HOOK, DDP = "fastsync.attach/none", "fastsync.register_comm_hook/none", "ddp"


def of(name: str, folder: Path) -> str:
    """A part's figures, empty where it has left none. What a part has left half-written is no reason to fail."""
    try:
        return FIGURES[name](folder)
    except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError, TypeError, ElementTree.ParseError) as error:
        return f"unreadable results: {error!r}"


def rows_of(folder: Path) -> list[Row]:
    """The rows of all benchmarks in a part's folder."""
    return [row for path in sorted(folder.glob("*.json")) if path.name != "result.json" for row in _read(path)]


def failed_tests(folder: Path) -> list[str]:
    """Each test that failed, with the first line of what it said."""
    return [f"{case.get('classname')}::{case.get('name')}: {reason}" for case, reason in _cases(folder) if reason]


def _read(path: Path) -> list[Row]:
    return json.loads(path.read_text())


def _cases(folder: Path) -> Iterator[tuple[ElementTree.Element, str]]:
    for path in sorted(folder.rglob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            failure = next((child for child in case if child.tag in ("failure", "error")), None)
            said = "" if failure is None else (failure.get("message") or "failed")
            yield case, said.strip().splitlines()[0] if said.strip() else ""


def _tests(folder: Path) -> str:
    cases = list(_cases(folder))
    failed = sum(bool(reason) for _, reason in cases)
    skipped = sum(case.find("skipped") is not None for case, _ in cases)
    counts = {"passed": len(cases) - failed - skipped, "failed": failed, "skipped": skipped}
    words = [f"{count} {name}" for name, count in counts.items() if count]
    first = next((f"first {case.get('name')}" for case, reason in cases if reason), None)
    return ", ".join([*words, *([first] if first else [])]) if cases else ""


def _sanitizer(folder: Path) -> str:
    """What each tool found; one that was ended has no line for it."""
    found: dict[str, str] = {}
    tool = ""
    for line in (folder / "log.txt").read_text(errors="replace").splitlines():
        if started := re.search(r"compute-sanitizer --tool (\w+)", line):
            tool = started.group(1)
            found[tool] = "no summary"
        elif tool and (summary := re.search(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", line)):
            found[tool] = summary.group(1)
    return "; ".join(f"{name}: {text}" for name, text in found.items())


def _build(folder: Path) -> str:
    log = (folder / "log.txt").read_text(errors="replace")
    facts: list[tuple[str, str]] = re.findall(r"^  (CUDA half|cuda:\d+|nccl) +(.*)$", log, re.MULTILINE)
    errors = re.findall(r"^.*\b(?:error|Error): .*$", log, re.MULTILINE)
    return ", ".join([*errors[:1], *(f"{name} {fact}" for name, fact in facts)])


def _carry(folder: Path) -> str:
    lines = [line for line in (folder / "log.txt").read_text().splitlines() if "wheels" in line and "$" not in line]
    return lines[-1] if lines else ""


def _ops(folder: Path) -> str:
    """Of the largest sizes in many tensors, over float16: how near to a copy, in how many launches."""
    rows = {
        (row["settings"]["pass"], row["settings"]["size"]): row["figures"]
        for row in rows_of(folder)
        if row["way"].startswith("fastsync")
        and (row["settings"]["num_tensors"], row["settings"]["wire"]) == (160, "fp16")
    }
    return "; ".join(
        f"{name} {size} {figures['of_copy']:.0%} of copy, {figures['launches']} launches"
        for (name, size), figures in rows.items()
        if size != "1MiB" and figures["of_copy"] is not None
    )


def _per_size(rows: list[Row], value: Callable[[Row], float], form: str) -> Iterator[str]:
    """For each number of ranks and size, DDP's value and ours."""
    settings = dict.fromkeys((row["settings"]["world_size"], _size(row)) for row in rows)
    for world_size, size in settings:
        of_way = {
            row["way"]: value(row)
            for row in rows
            if (row["settings"]["world_size"], _size(row)) == (world_size, size) and row["samples"]
        }
        values = "/".join(format(of_way[way], form) if way in of_way else "–" for way in (DDP, HOOK, ATTACH))
        yield f"{size}×{world_size} {values}"


def _size(row: Row) -> str:
    return row["settings"].get("size") or row["settings"]["model"]


def _steps(folder: Path) -> str:
    medians = ", ".join(_per_size(rows_of(folder), lambda row: 1e3 * median(row["samples"]), ".2f"))
    return f"ms ddp/hook/attach: {medians}" if medians else ""


def _ppo(folder: Path) -> str:
    said = []
    for row in rows_of(folder):
        if row["way"] == "fastsync, 1 rank":
            over = row["figures"].get("over_CleanRL's loop")
            rival = "" if over is None else f", {over:.1f} × CleanRL's loop"
            speed = row["figures"]["steps_per_second"]
            said.append(f"{row['settings']['hyperparameters']}: {speed:,.0f} steps/s{rival}")
    return "; ".join(said)


def _cost(folder: Path) -> str:
    largest = [row for row in rows_of(folder) if row["settings"]["size"] == "12m"]
    if not largest:
        return ""

    def of(key: str, scale: float) -> str:
        return ", ".join(_per_size(largest, lambda row: scale * (row["figures"][key] or 0), ".0f"))

    return (
        f"ddp/hook/attach: host µs {of('host_time', 1e6)}; launches {of('launches', 1)}; "
        f"MiB {of('peak_memory', 2**-20)}"
    )


FIGURES: Mapping[str, Callable[[Path], str]] = {
    "carry": _carry,
    "build": _build,
    "tests": _tests,
    "ranks": _tests,
    "captured": _tests,
    "sanitizer": _sanitizer,
    "ops": _ops,
    "sync": _steps,
    "ddp": _steps,
    "ppo": _ppo,
    "cost": _cost,
}

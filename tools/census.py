"""Writes the lines of each folder into CONTRIBUTING.md: ``python -m tools.census``, in tens."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
ROW = re.compile(r"^\| (`(?P<folder>[\w/]+)`(?P<rest>, the rest without `ppo`)?) \| (?P<lines>[\d,]+) \|", re.MULTILINE)


def files() -> list[str]:
    """Those that git knows, and that are there."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, encoding="utf-8", check=True)
    return [file for file in listed.stdout.splitlines() if (ROOT / file).is_file()]


def lines_of(folder: str, others: tuple[str, ...] = ()) -> int:
    """The lines of a folder, without rows of benchmarks and without other folders inside."""
    left_out = ("benchmarks/results", *others)
    return sum(
        (ROOT / file).read_bytes().count(b"\n")
        for file in files()
        if file.startswith(f"{folder}/") and not file.startswith(tuple(f"{other}/" for other in left_out))
    )


def counted(page: str) -> dict[str, tuple[int, int]]:
    """For each row of the table what it says, and what is there."""
    rows = list(ROW.finditer(page))
    named = tuple(row["folder"] for row in rows if row["folder"].startswith("fastsync/"))
    return {
        row[1]: (int(row["lines"].replace(",", "")), lines_of(row["folder"], named if row["rest"] else ()))
        for row in rows
    }


def written(page: str) -> str:
    """Returns the page with the lines that are there."""
    there = {name: lines for name, (_, lines) in counted(page).items()}
    return ROW.sub(lambda row: f"| {row[1]} | {round(there[row[1]], -1):,} |", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

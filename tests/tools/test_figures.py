"""Every figure in README and docs is that of its rows, and rows are of one clean commit and one machine a table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.harness.records import Record, RowFile, read_json
from tools import figures
from tools.figures import EXCEPT, KNOWN_AS_DIRTY, MARKER, PAGES, RESULTS, ROOT, faults, tables, written


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_are_those_of_the_rows(page: Path) -> None:
    text = page.read_text()
    assert text == written(text), "run: python -m tools.figures"
    assert list(faults(text)) == []


FIGURE = re.compile(r"[\d,.±×÷%→:\[\]\s−+]*\d[\d,.±×÷%→:\[\]\s−+]*(at [\d.]+ [km](,.*|\s\(v\d\))?)?", re.IGNORECASE)
"""A cell that holds figures and nothing else."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_of_figures_say_where_these_come_from(page: Path) -> None:
    for table, above in tables(page.read_text()):
        bare = [
            cell.strip()
            for line in table.splitlines()[2:]
            for cell in line.strip("|").split("|")[1:]
            if not MARKER.search(cell) and FIGURE.fullmatch(cell.strip())
        ]
        assert not bare or EXCEPT.fullmatch(above), bare


def test_kept_rows_are_of_clean_commits() -> None:
    for file in RESULTS.glob("*.json"):
        commits = {str(row.environment["commit"]) for row in read_json(file)}
        unclean = {commit for commit in commits if commit == "None" or "dirty" in commit}
        assert not unclean or file.stem.split("_")[0] in KNOWN_AS_DIRTY, file
        assert not unclean or commits == {"27b31da732fc-dirty"}, file  # as docs/reference/gpu.md says


def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **commits: str) -> None:
    """A file of rows for each name, whose ddp takes 2 s and whose attach 0.5 s."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    for name, commit in commits.items():
        where = {"commit": commit, "cpu": "a CPU", "cores": 2, "gpu": None}
        RowFile(tmp_path / f"{name}_a-machine_2026-01-01.json").add(
            [
                Record("sync", method, {"size": size}, {"sent_bytes": 3e6}, True, [seconds] * 3, where)
                for size in ("5k", "12m")
                for method, seconds in (("ddp", 2.0), ("attach", 0.5))
            ]
        )
    for cached in (figures.file_of, figures.rows_of, figures.figure_of):
        cached.cache_clear()


def test_a_page_gets_the_figures_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(tmp_path, monkeypatch, here="abc")
    page = (
        "| DDP | ?<!-- = here; ddp; size=5k; ms ,.0f --> | "
        "9.9<!-- = here; attach; size=12m; vs ddp; times .2f --> × |\n"
        "It sends **1,000**<!-- = here; ddp; size=5k; sent_bytes/1e6 .1f --> MB, "
        "and takes −5<!-- = here; attach; size=5k; vs ddp; beyond .0f --> ms more.\n"
    )
    right = written(page)
    assert re.sub(r"<!--.*?-->", "", right) == (
        "| DDP | 2,000 | 4.00 × |\nIt sends **3.0** MB, and takes −1500 ms more.\n"
    )
    assert written(right) == right
    assert list(faults(right)) == []


def test_trainings_are_compared_by_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    for cached in (figures.file_of, figures.rows_of, figures.figure_of):
        cached.cache_clear()

    def row(method: str, seed: int, steps: float, reached: float = 1.0) -> Record:
        found = {"steps": steps, "steps_per_second": 1.0, "reached": reached, "compile_seconds": None}
        # Who needs fewer steps takes longer, so seconds would say the contrary.
        return Record("ppo --until", method, {"seed": seed, "trainer": method}, found, True, [1e6 / steps], {})

    RowFile(tmp_path / "until_a-machine_2026-01-01.json").add(
        [row("ours", seed, 1000.0 + seed) for seed in range(6)]
        + [row("theirs", seed, 3000.0 + seed, float(seed < 5)) for seed in range(6)]
    )
    page = (
        "?<!-- = until; theirs; steps_interval ,.0f -->, ?<!-- = until; ours; vs theirs; fewer_steps .2f -->, "
        "?<!-- = until; ours; vs theirs; logrank_steps .1g -->"
    )
    assert re.sub(r"<!--.*?-->", "", written(page)) == "3,002 [3,000, –], 1.00 [1.00, 1.00], < 0.001"


def test_rows_that_do_not_go_together_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(tmp_path, monkeypatch, here="abc", there="def", changed="abc-dirty")

    def cell(name: str) -> str:
        return f"?<!-- = {name}; ddp; size=5k; ms .0f -->"

    assert list(faults(f"{cell('here')} and {cell('there')} in a text")) == []
    (mixed,) = faults(f"| a | {cell('here')} |\n| b | {cell('there')} |")
    assert "several commits or machines" in mixed
    (dirty,) = faults(cell("changed"))
    assert "measured at commit abc-dirty" in dirty
    assert list(faults("no figure <!-- = here; ddp; ms .0f -->")) == ["a comment has no figure before it"]
    for wrong, message in (
        ("nowhere; ddp; ms .0f", "has 0 files called nowhere"),
        ("here; hook; ms .0f", r"no rows of 'hook' .*; there are \['attach', 'ddp'\]"),
        ("here; ddp; size=1g; ms .0f", "no rows of 'ddp' with {'size': '1g'}"),
        ("here; ddp; joules .0f", "'joules' is neither a quantity"),
    ):
        with pytest.raises(ValueError, match=message):
            written(f"?<!-- = {wrong} -->")

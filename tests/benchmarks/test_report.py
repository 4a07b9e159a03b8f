"""Reports: what they show of rows that are made up, and what they refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.__main__ import main
from benchmarks.commands import ddp, sync
from benchmarks.harness.records import Record, RowFile, read_json
from benchmarks.report import pictures
from benchmarks.report.efficiency import points
from benchmarks.report.page import Document, Section, check_folder, to_html, write_page
from benchmarks.report.rows import environment_of, rows_document
from benchmarks.report.scaling import scaling_document
from benchmarks.report.table import Table
from tests.benchmarks.rows import WHERE, scaling_rows, step_row


class Page(HTMLParser):
    """What a page shows: its text, the lines of its tables, and what describes its pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.rows, self.pictures, self.tags = "", list[list[str]](), list[str](), set[str]()
        self._is_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._is_cell = tag == "td"
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        if tag == "img":
            self.pictures.append(dict(attrs)["alt"] or "")

    def handle_endtag(self, tag: str) -> None:
        self._is_cell = self._is_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._is_cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of made-up rows, to be read."""
    folder, records = tmp_path_factory.mktemp("report"), scaling_rows()
    RowFile(folder / "rows.json").add(records)
    write_page(folder, scaling_document(records, "python -m benchmarks scaling --oversubscribe"))
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "index.html").read_text())


def test_the_page_loads_nothing(folder: Path, page: Page):
    assert not re.search(r"https?://|//cdn|@import|url\(", (folder / "index.html").read_text())
    assert not {"script", "link", "iframe", "object", "base"} & page.tags
    assert {path.name for path in folder.iterdir()} == {"rows.json", "index.html", "efficiency.svg", "breakdown.svg"}


def test_the_page_shows_what_was_measured(page: Page):
    # T(2) is twice T(1), with launches from 0.9 to 1.1 of that.
    assert ["ddp", "1 rank", "1000.000", "[900.000, 1100.000]", "100.0%", "reference", "3"] in page.rows
    assert ["ddp", "2 ranks", "2000.000", "[1800.000, 2200.000]", "50.0%", "[40.9%, 61.1%]", "3"] in page.rows
    assert "ddp on 4 ranks (oversubscribed): 4000.0 ms a step" in page.text
    assert "Measuring itself costs 1.0 µs a step" in page.text
    assert "holds the median with a probability of 75%" in page.text
    assert "90% of cases for 3" in page.text
    assert "python -m benchmarks scaling --oversubscribe" in page.text
    assert ["cpu", "a CPU"] in page.rows
    assert "weak efficiency" in page.text
    assert "strong efficiency" not in page.text


def test_what_is_oversubscribed_is_marked_everywhere(page: Page):
    for row in page.rows:
        if len(row) > 1 and re.match(r"\d ranks?", row[1]):
            assert ("oversubscribed" in row[1]) == row[1].startswith("4 ranks")
    for description in page.pictures:
        assert "4 ranks (oversubscribed)" in description
        assert "2 ranks (oversubscribed)" not in description
    assert "oversubscribed: more ranks than a machine has cores or GPUs" in page.text


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn from here on."""
    kept: list[Figure] = []
    write = pictures._svg
    monkeypatch.setattr(pictures, "_svg", lambda figure: kept.append(figure) or write(figure))
    return kept


def test_the_efficiency_picture_has_a_line_for_each_way_and_the_ideal(figures: list[Figure]):
    pictures.efficiency_picture(points(scaling_rows()), "weak")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4\noversubscribed"]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["ideal", "ddp", "fastsync.attach/fp16"]
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 3]
    assert [list(line.get_ydata()) for line in lines] == [[1.0, 0.5, 0.25]] * 2


def test_the_stacks_of_the_breakdown_are_as_high_as_the_step(figures: list[Figure]):
    found = points([*scaling_rows(), step_row(8, [0.25, 0.25], way="ddp", launch=0, compute=0.5, stragglers=0.25)])
    pictures.breakdown_picture(found)
    for way, axes in zip(("ddp", "fastsync.attach/fp16"), figures[0].axes, strict=True):
        stacks = [0.0] * 4
        for bar in axes.patches:
            stacks[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
        steps = [point.step.value * 1e3 for point in found if point.way == way]
        assert stacks[: len(steps)] == pytest.approx(steps)
    # On 8 ranks the parts without communication take longer than the step: what is negative is shown as that.
    assert min(bar.get_height() for bar in figures[0].axes[0].patches) < 0


def test_the_same_rows_give_the_same_picture():
    first, second = (pictures.efficiency_picture(points(scaling_rows()), "weak") for _ in range(2))
    assert first == second


def test_what_is_less_than_nothing_is_said_to_be_noise():
    rows = [
        step_row(ranks, [step, step], way="ddp", launch=0, compute=compute, stragglers=0.0)
        for ranks, step, compute in ((1, 0.5, 0.5), (2, 0.4, 0.5))
    ]
    document = scaling_document(rows, "python -m benchmarks scaling")
    assert document.summary[0].startswith("ddp on 2 ranks: 400.0 ms a step, exposed communication within noise; ")
    (time,) = [section.table for section in document.sections if section.title == "Where the time goes"]
    assert list(time.rows[-1])[-2:] == ["within noise", "within noise"]
    assert list(time.rows[0])[-2:] == ["0.000", "0%"]
    ddp_hidden, sync_step = ddp.COLUMNS["hidden"], sync.COLUMNS_OF_A_SIZE
    shown = {-1.22: "none", 0.0: "0%", 0.5: "50%", 1.0: "100%", 1.1: "within noise", None: ""}
    for share, text in shown.items():
        assert ddp_hidden(replace(rows[0], figures={"hidden": share})) == text
    figures = dict.fromkeys(("over_no_sync", "over_all_reduce", "over_ddp", "over_shared_sum"))
    for over, ratio, text in (
        (None, None, ""),
        (2.0, 0.5, "0.50"),
        (-1.0, -0.5, "within noise"),
        (-1.0, 0.5, "within noise"),
    ):
        row = replace(rows[0], figures=figures | {"over_no_sync": over, "over_ddp": ratio})
        assert sync_step["× ddp"](row) == text
        assert sync_step["over no_sync, ms"](row) == ("within noise" if over == -1.0 else "2000.000" if over else "")


def test_a_report_of_nothing_says_so():
    text = to_html(scaling_document([], "python -m benchmarks scaling", ["interrupted; launches before are reported"]))
    assert "Nothing was measured." in text
    assert "interrupted; launches before are reported" in text


def test_one_launch_claims_nothing():
    document = scaling_document([step_row(1, [1.0]), step_row(2, [1.25])], "command")
    assert "one launch of a world size" in document.notes[0]
    page = Page(to_html(document))
    assert ["ddp", "2 ranks", "1250.000", "not known", "80.0%", "not known", "1"] in page.rows
    assert not re.search(r"\b(nan|inf)\b", page.text)


def test_text_stays_text():
    section = Section("x", Table(("way", "a|b"), [("<script>alert(1)</script>", "1 & 2 | 3")]))
    page = Page(to_html(Document("<b>", ["a * b_c"], [section], "rows", {"cpu": "<cpu>"}, "run '<a>' & go")))
    assert "script" not in page.tags
    assert ["<script>alert(1)</script>", "1 & 2 | 3"] in page.rows
    assert "run '<a>' & go" in page.text


def test_a_report_replaces_no_other(tmp_path: Path):
    check_folder(tmp_path / "new")
    check_folder(tmp_path)
    (tmp_path / "rows.json").touch()
    with pytest.raises(ValueError, match="holds a report already; name another folder"):
        check_folder(tmp_path)
    with pytest.raises(ValueError, match="is a file; name a folder"):
        check_folder(tmp_path / "rows.json")


def test_rows_of_any_benchmark_have_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def row(way: str, size: str, correct: bool = True) -> Record:
        settings = {"size": size, "world_size": 2, "backend": "gloo"}
        return Record("sync", way, settings, {}, correct, [0.001, 0.002, 0.003] if correct else [], WHERE)

    RowFile(tmp_path / "rows.json").add([row("ddp", "5k"), row("ddp", "12m"), row("cat", "5k", correct=False)])
    folder = tmp_path / "report"
    assert main(["report", str(tmp_path / "rows.json"), "--report", str(folder)]) == 0
    assert str(folder / "index.html") in capsys.readouterr().out
    page = Page((folder / "index.html").read_text())
    assert "All rows: world_size 2, backend gloo." in page.text
    assert ["ddp", "size 5k", "2.000 [1.200, 2.800]", "3", "right"] in page.rows
    assert ["cat", "", "", "0", "WRONG"] in page.rows
    assert "WRONG: cat at" in page.text
    assert read_json(folder / "rows.json") == read_json(tmp_path / "rows.json")
    assert main(["report", str(tmp_path / "rows.json"), "--report", str(folder)]) == 2
    assert main(["report", str(tmp_path / "nowhere.json"), "--report", str(tmp_path / "new")]) == 2
    assert "nowhere.json: there is no such file" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_rows_of_scaling_have_the_report_that_scaling_writes(folder: Path, tmp_path: Path):
    assert main(["report", str(folder / "rows.json"), "--report", str(tmp_path / "again")]) == 0
    for name in ("rows.json", "efficiency.svg", "breakdown.svg"):
        assert (tmp_path / "again" / name).read_text() == (folder / name).read_text()


def test_what_is_oversubscribed_is_marked_in_rows_of_any_benchmark():
    records = [
        Record("sync", "ddp", {"size": "5k", "world_size": size} | more, {}, True, [0.001], WHERE)
        for size, more in ((2, {}), (4, {"oversubscribed": True}))
    ]
    rows = Page(to_html(rows_document(records, "title", "command"))).rows
    assert [row[:2] for row in rows if row and row[0] == "ddp"] == [
        ["ddp", "world_size 2"],
        ["ddp", "world_size 4, oversubscribed"],
    ]


RESULTS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_published_rows_have_a_report(path: Path):
    records = read_json(path)
    rows = json.loads(path.read_text())
    assert [record.quantiles for record in records] == [pytest.approx(row["quantiles"]) for row in rows]
    assert len(records) > 5
    document = (
        scaling_document(records, "command") if "scaling" in path.name else rows_document(records, "title", "command")
    )
    assert len(document.sections) >= 1


def test_the_reference_is_marked_where_it_is_oversubscribed():
    document = scaling_document([step_row(n, [1.0] * 3, oversubscribed=True) for n in (4, 8)], "command")
    assert "relative to ddp on 4 ranks (oversubscribed)" in document.sections[0].text


def test_rows_of_several_jobs_have_no_report_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [step_row(n, [1.0], scaling=scaling) for n in (1, 2) for scaling in ("weak", "strong")]
    RowFile(tmp_path / "rows.json").add(rows)
    assert main(["report", str(tmp_path / "rows.json"), "--report", str(tmp_path / "report")]) == 2
    assert "the rows are of several jobs" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_machines_that_differ_are_all_named():
    elsewhere = WHERE | {"cpu": "another CPU", "time": "2026-01-02T00:00:00+00:00"}
    records = [step_row(1, [1.0]), replace(step_row(2, [1.0]), environment=elsewhere)]
    assert environment_of(records) == {
        "time": "2026-01-01T00:00:00+00:00 … 2026-01-02T00:00:00+00:00",
        "torch": "2.13.0",
        "cpu": "a CPU, another CPU",
        "cores": "2",
    }

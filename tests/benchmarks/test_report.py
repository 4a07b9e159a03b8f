"""Reports: what stands in them is what was measured, and the page needs nothing else."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from benchmarks.__main__ import main
from benchmarks.commands import ddp, sync
from benchmarks.harness.records import Record, RowFile, read_json
from benchmarks.report import pictures as drawn
from benchmarks.report.document import Document, Section, Table
from benchmarks.report.efficiency import DEFINITIONS, points, sweep
from benchmarks.report.folder import check_folder, to_html, to_markdown, write_report
from benchmarks.report.rows import environment_of, rows_document
from benchmarks.report.scaling import interval, scaling_document
from tests.benchmarks.rows import WHERE, all_reduce_row, scaling_rows, step_row

FILES = {"rows.json", "rows.csv", "report.md", "index.html", "efficiency.svg", "breakdown.svg", "busbw.svg"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of made-up rows, to be read."""
    folder, records = tmp_path_factory.mktemp("report"), scaling_rows()
    RowFile(folder / "rows.json").add(records)
    write_report(folder, scaling_document(records, "python -m benchmarks scaling --oversubscribe"), records)
    return folder


class Page(HTMLParser):
    """What a page has in it, and what it would load."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_loads_nothing(folder: Path):
    text = (folder / "index.html").read_text()
    page = Page(text)
    assert not re.search(r"https?://|//cdn|@import|url\(", text)
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 3
    for image in images:
        assert (image["src"] or "").startswith("data:image/svg+xml;base64,")
        assert image["alt"]


def test_everything_is_in_the_folder_and_agrees(folder: Path):
    assert {path.name for path in folder.iterdir()} == FILES
    rows = json.loads((folder / "rows.json").read_text())
    lines = list(csv.DictReader((folder / "rows.csv").open()))
    assert len(lines) == len(rows) == 22
    for row, line in zip(rows, lines, strict=True):
        assert line["way"] == row["way"]
        assert line["settings.world_size"] == str(row["settings"]["world_size"])
        assert float(line["median"]) == row["quantiles"]["median"]
        assert line["environment.torch"] == "2.13.0"
    markdown, page = (folder / "report.md").read_text(), " ".join(Page((folder / "index.html").read_text()).words)
    for name in ("efficiency", "breakdown", "busbw"):
        assert f"]({name}.svg)" in markdown
        assert "<svg" in (folder / f"{name}.svg").read_text()
    for text in (markdown, page):
        assert "python -m benchmarks scaling --oversubscribe" in text
        assert "a CPU" in text
        assert all(word in text for word in DEFINITIONS if word != "strong efficiency")
        assert "strong efficiency" not in text
        assert "Measuring itself costs 1.0 µs a step" in text
        assert "holds the median with a probability of 75%" in text
    # T(2) is twice T(1), with launches from 0.9 to 1.1 of that.
    assert "| ddp | 1 rank | 1000.000 | [900.000, 1100.000] | 100.0% | reference | 3 |" in markdown
    assert "| ddp | 2 ranks | 2000.000 | [1800.000, 2200.000] | 50.0% | [40.9%, 61.1%] | 3 |" in markdown


def test_what_is_oversubscribed_is_marked_everywhere(folder: Path):
    page = Page((folder / "index.html").read_text())
    markdown = (folder / "report.md").read_text()
    for line in markdown.splitlines():
        if re.match(r"\| .* \| \d ranks?", line):
            assert ("oversubscribed" in line) == ("| 4 ranks" in line)
    assert sum(attributes.get("class") == "oversubscribed" for tag, attributes in page.tags if tag == "tr") == 6
    for tag, attributes in page.tags:
        if tag == "img":
            assert re.search(r"4 ranks \(oversubscribed\)", attributes["alt"] or "")
            assert not re.search(r"2 ranks \(oversubscribed\)", attributes["alt"] or "")
    rows = json.loads((folder / "rows.json").read_text())
    assert all(("oversubscribed" in row["settings"]) == (row["settings"]["world_size"] == 4) for row in rows)
    lines = csv.DictReader((folder / "rows.csv").open())
    assert all((line["settings.oversubscribed"] == "True") == (line["settings.world_size"] == "4") for line in lines)
    assert "oversubscribed: more ranks than a machine has cores or GPUs" in markdown


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn from here on."""
    kept: list[Figure] = []
    write = drawn._svg

    def keep(figure: Figure) -> str:
        kept.append(figure)
        return write(figure)

    monkeypatch.setattr(drawn, "_svg", keep)
    return kept


def test_the_efficiency_picture_has_intervals_the_ideal_and_marks(figures: list[Figure]):
    drawn.efficiency_picture(points(scaling_rows()), "weak")
    (axes,) = figures[0].axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["1", "2", "4\noversubscribed"]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["ideal", "ddp", "fastsync.attach/fp16"]
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 3]
    assert [list(line.get_ydata()) for line in lines] == [[1.0, 0.5, 0.25]] * 2
    hollow = [line for line in axes.get_lines() if line.get_markerfacecolor() == "white"]
    assert [round(float(line.get_ydata()[0]), 6) for line in hollow] == [0.25, 0.25]
    ends = [
        [round(float(value), 3) for value in line.get_ydata()]
        for line in axes.get_lines()
        if len(line.get_xdata()) == 2
    ]
    assert [0.409, 0.611] in ends


def test_the_stacks_of_the_breakdown_are_as_high_as_the_step(figures: list[Figure]):
    rows = [*scaling_rows(), step_row(8, [0.25, 0.25], way="ddp", launch=0, compute=0.5, stragglers=0.25)]
    found = points(rows)
    drawn.breakdown_picture(found)
    for way, axes in zip(("ddp", "fastsync.attach/fp16"), figures[0].axes, strict=True):
        stacks = [0.0] * 4
        for container in axes.containers:
            assert isinstance(container, BarContainer)
            for bar in container:
                if bar.get_facecolor()[3] > 0:  # no frame
                    stacks[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
        steps = [point.step * 1e3 for point in found if point.way == way]
        assert stacks[: len(steps)] == pytest.approx(steps)
        labels = [label.get_text() for label in axes.get_xticklabels()]
        assert labels[:3] == ["1", "2", "4\nover-\nsubscribed"]
    # On 8 ranks the parts without communication take longer than the step: what is negative is shown as that.
    assert min(bar.get_height() for container in figures[0].axes[0].containers for bar in container) < 0


def test_the_bandwidth_picture_is_log_log_and_marked(figures: list[Figure]):
    drawn.bandwidth_picture(sweep(scaling_rows()))
    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    texts = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert texts == ["2 ranks", "4 ranks (oversubscribed)"]
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([1.0, 1.0])
    assert list(axes.get_lines()[1].get_ydata()) == pytest.approx([1.5, 1.5])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1KiB", "1MiB"]


def test_the_same_rows_give_the_same_picture():
    assert drawn.efficiency_picture(points(scaling_rows()), "weak") == drawn.efficiency_picture(
        points(scaling_rows()), "weak"
    )


def test_what_is_less_than_nothing_is_said_to_be_noise():
    rows = [
        step_row(ranks, [step, step], way="ddp", launch=0, compute=compute, stragglers=0.0)
        for ranks, step, compute in ((1, 0.5, 0.5), (2, 0.4, 0.5))
    ]
    document = scaling_document(rows, "python -m benchmarks scaling")
    assert document.summary[0].startswith("ddp on 2 ranks: 400.0 ms a step, exposed communication within noise; ")
    (time,) = [section.table for section in document.sections if section.title == "Where the time goes"]
    assert time is not None
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


def test_a_report_of_nothing_says_so(tmp_path: Path):
    document = scaling_document([], "python -m benchmarks scaling", ["interrupted; launches before are reported"])
    write_report(tmp_path, document, [])
    for name in ("report.md", "index.html"):
        text = (tmp_path / name).read_text()
        assert "Nothing was measured." in text
        assert "interrupted; launches before are reported" in text


def test_one_launch_and_one_sample_claim_nothing():
    document = scaling_document([step_row(1, [1.0]), step_row(2, [1.25]), all_reduce_row(2, 4096, [1.0])], "command")
    assert "one launch of a world size" in document.notes[0]
    text = to_markdown(document)
    assert "| ddp | 2 ranks | 1250.000 | not known | 80.0% | not known | 1 |" in text
    assert not re.search(r"\b(nan|inf)\b", text)
    assert interval(0.5, 0.75, 100, "%") == "[50.0%, 75.0%]"


def test_text_stays_text():
    table = Table(("way", "a|b"), [("<script>alert(1)</script>", "1 & 2 | 3")])
    document = Document(
        "<b>", ["a * b_c"], [Section("x", table=table)], {"w<": "m>"}, {"cpu": "<cpu>"}, "run '<a>' & go"
    )
    page = to_html(document)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert Page(page)
    markdown = to_markdown(document)
    assert r"| \<script\>alert(1)\</script\> | 1 & 2 \| 3 |" in markdown
    assert r"a \* b\_c" in markdown


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
    markdown = (folder / "report.md").read_text()
    assert "All rows: world\\_size 2, backend gloo." in markdown
    assert "| way | settings | median [p10, p90], ms | noise within the launch | samples | result |" in markdown
    assert "| ddp | size 5k | 2.000 [1.200, 2.800] | ± 200.0% | 3 | right |" in markdown
    assert "| cat |  |  | not known | 0 | WRONG |" in markdown
    assert "WRONG: cat at" in markdown
    assert read_json(folder / "rows.json") == read_json(tmp_path / "rows.json")
    Page((folder / "index.html").read_text())
    assert main(["report", str(tmp_path / "rows.json"), "--report", str(folder)]) == 2
    assert main(["report", str(tmp_path / "nowhere.json"), "--report", str(tmp_path / "new")]) == 2
    assert "nowhere.json: there is no such file" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_rows_of_scaling_have_the_report_that_scaling_writes(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    again = tmp_path_factory.mktemp("again")
    assert main(["report", str(folder / "rows.json"), "--report", str(again)]) == 0
    for name in FILES - {"index.html", "report.md"}:
        assert (again / name).read_text() == (folder / name).read_text()


def test_noise_is_named_after_what_it_is_of():
    record = replace(step_row(2, [1.0, 2.0]), benchmark="ppo")
    (section,) = rows_document([record], "title", "command").sections
    assert section.table is not None
    assert section.table.headings[3] == "noise between launches"


def test_what_is_oversubscribed_is_marked_in_rows_of_any_benchmark(tmp_path: Path):
    records = [
        Record("sync", "ddp", {"size": "5k", "world_size": size} | more, {}, True, [0.001], WHERE)
        for size, more in ((2, {}), (4, {"oversubscribed": True}))
    ]
    document = rows_document(records, "title", "command")
    assert "| ddp | world\\_size 4, oversubscribed |" in to_markdown(document)
    assert "| ddp | world\\_size 2 |" in to_markdown(document)
    tags = Page(to_html(document)).tags
    assert sum(attributes.get("class") == "oversubscribed" for tag, attributes in tags if tag == "tr") == 1


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

"""Reports: what they say of rows that are made up, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.commands import headline
from benchmarks.harness.records import Record, RowFile, read_json
from benchmarks.report.page import Document, to_html
from benchmarks.report.scaling import scaling_document
from tests.benchmarks.rows import scaling_rows, step_row


def lines(document: Document) -> list[list[str]]:
    return [list(row) for section in document.sections for row in section.table.rows]


def test_a_scaling_report_says_what_was_measured():
    document = scaling_document(scaling_rows(), "python -m benchmarks scaling --oversubscribe")
    rows = lines(document)
    # T(2) is twice T(1), with launches from 0.9 to 1.1 of that.
    assert ["ddp", "1 rank", "1000.000", "[900.000, 1100.000]", "100.0%", "[81.8%, 122.2%]", "3"] in rows
    assert ["ddp", "2 ranks", "2000.000", "[1800.000, 2200.000]", "50.0%", "[40.9%, 61.1%]", "3"] in rows
    assert any(sentence.startswith("ddp on 4 ranks (oversubscribed): 4000.0 ms") for sentence in document.summary)
    assert document.summary[0].endswith("the fastest there; a step without communication on 1 rank takes 1000.0 ms.")
    for row in rows:
        assert ("oversubscribed" in row[1]) == row[1].startswith("4 ranks")
    page = to_html(document)
    assert "python -m benchmarks scaling --oversubscribe" in page
    for tag in ("<script", "<link", "<iframe", "http://", "https://"):  # it loads nothing
        assert tag not in page


def test_one_launch_claims_nothing():
    document = scaling_document([step_row(1, [1.0]), step_row(2, [1.25])], "command")
    assert "one launch of a world size" in document.notes[0]
    assert ["ddp", "2 ranks", "1250.000", "not known", "80.0%", "not known", "1"] in lines(document)


def test_a_report_replaces_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows, folder = tmp_path / "rows.json", tmp_path / "report"
    RowFile(rows).add(scaling_rows())
    for expected, said in ((0, "index.html"), (2, "holds a report already; name another folder")):
        if expected == 0:
            assert main(["scaling", "--rows", str(rows), "--report", str(folder)]) == 0
        else:
            with pytest.raises(SystemExit, match=r"^2$"):
                main(["scaling", "--rows", str(rows), "--report", str(folder)])
        captured = capsys.readouterr()
        assert said in " ".join((captured.out + captured.err).replace("│", " ").split())
    assert {path.name for path in folder.iterdir()} == {"rows.json", "index.html", "efficiency.svg", "breakdown.svg"}
    assert read_json(folder / "rows.json") == scaling_rows()
    two_jobs = [step_row(n, [1.0], scaling=kind) for n in (1, 2) for kind in ("weak", "strong")]
    RowFile(tmp_path / "two.json").add(two_jobs)
    for name, said in (("two", "the rows are of several jobs"), ("nowhere", "nowhere.json: there is no such file")):
        assert main(["scaling", "--rows", str(tmp_path / f"{name}.json"), "--report", str(tmp_path / "new")]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_headline_is_drawn_from_kept_rows(tmp_path: Path):
    names = ("sync-headline", "link-headline", "scaling-gpt2", "ppo_2-core")
    rows = [next(path for path in RESULTS if path.name.startswith(name)) for name in names]
    alone, between, gpt, update = map(headline.read_panel, rows)
    assert alone.title == "Synchronisation alone, one host: 2 ranks"
    assert between.title == "Synchronisation alone, 2 simulated hosts × 2 ranks, 1 Gbit/s"
    assert gpt.title == "The whole step of a small GPT, 2 ranks"
    assert [bar.label for bar in gpt.bars] == ["DDP", "attach", "attach, fp16"]
    assert [round(bar.ms, 1) for bar in update.bars] == [17.2, 16.2]
    assert main(["headline", *map(str, rows), "--picture", str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_headline_refuses_rows_of_other_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RowFile(tmp_path / "rows.json").add([Record("sync", "ddp", {}, {}, True, [1.0], {})])
    assert main(["headline", str(tmp_path / "rows.json"), "--picture", str(tmp_path / "picture.png")]) == 2
    assert "rows.json has no rows of fastsync.attach/fp16, fastsync.attach/int8+ef" in capsys.readouterr().err
    assert not (tmp_path / "picture.png").exists()


def test_pictures_of_a_report_are_as_narrow_as_a_phone():
    """390 points, so that 11 of text are 11 of a phone's."""
    document = scaling_document(scaling_rows(), "command")
    for section in document.sections:
        assert float(re.search(r'width="([\d.]+)pt"', section.picture.svg)[1]) <= 390
    assert "min-width" not in to_html(document)


RESULTS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_published_rows_can_be_read(path: Path):
    records = read_json(path)
    rows = json.loads(path.read_text())
    assert [record.quantiles for record in records] == [pytest.approx(row["quantiles"]) for row in rows]
    assert len(records) > 0
    if "scaling" in path.name:
        assert len(scaling_document(records, "command").sections) == 2

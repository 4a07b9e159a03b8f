"""The benchmark of training between sites, at a small size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.commands import outer, outer_loss
from benchmarks.harness.records import Record, RowFile, read_json
from tests.benchmarks.rows import WHERE
from tests.forked import Command


def run(main: Callable[[Sequence[str]], int], folder: Path, *words: str) -> str:
    """Runs a command, and returns what it says on standard error."""
    command = Command(main, folder, *words)
    try:
        assert command.wait(150) == 0, command.err
    finally:
        command.kill()
    return command.err


@pytest.mark.end_to_end
@pytest.mark.usefixtures("namespaces")
def test_outer_steps_send_less_than_steps(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    options = ["--rate", "1gbit", "--sites", "2", "--numel", "200000", "--rounds", "1", "--step-time", "0.001"]
    methods = ["ddp", "fastsync.DiLoCo/int8+ef, H=50", "fastsync.DiLoCo/topk, H=30"]
    said = run(outer.main, tmp_path, *options, "--methods", *methods, "--json", str(path))
    sent = {record.method: record.figures["bytes_a_step"] for record in read_json(path)}
    assert sent[methods[2]] < sent[methods[1]] < sent[methods[0]] / 50
    assert "[network 1 of 1] 2 ranks on 2 simulated hosts, links of 1 Gbit/s: starting" in said
    assert "[0 of 4] ddp: timed" in said
    assert "same gradients" not in said  # which would be a warning that ranks train on the same data


@pytest.mark.end_to_end
def test_losses_are_shown_and_drawn_over_the_time_of_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, links, picture = tmp_path / "rows.json", tmp_path / "links.json", tmp_path / "loss.png"
    options = ["--steps", "4", "--warm-steps", "1", "--validate-every", "2", "--batch", "1", "--methods", "int8/2"]
    run(outer_loss.main, tmp_path, *options, "--seeds", "0", "--starts", "warm", "--json", str(rows))
    assert [record.method for record in read_json(rows)] == ["each step", "int8/2"]
    settings = {"link": 10**8, "step_time": 0.1}
    timed = [
        Record("outer", method, settings, {}, True, [seconds], WHERE)
        for method, seconds in (("ddp", 0.5), ("fastsync.DiLoCo/int8+ef, H=50", 0.12))
    ]
    RowFile(links).add(timed)
    shown = ["--rows", str(rows), "--links", str(links), "--picture", str(picture)]
    assert outer_loss.main(shown) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "int8/2" in capsys.readouterr().out
    by_method = {record.method: record for record in timed}
    assert outer_loss.seconds_a_step("each step", by_method) == 0.5
    assert outer_loss.seconds_a_step("int8-lr1/10", by_method) == pytest.approx(0.1 + 0.02 * 50 / 10)


@pytest.mark.slow
def test_a_cnn_is_trained_by_a_wire_at_each_step(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    options = ["--model", "cnn", "--steps", "60", "--validate-every", "30", "--batch", "16", "--starts", "scratch"]
    run(outer_loss.main, tmp_path, *options, "--seeds", "0", "--methods", "attach/lowrank", "--json", str(rows))
    none, lowrank = read_json(rows)
    assert (none.method, lowrank.method) == ("each step", "attach/lowrank")
    for record in (none, lowrank):
        assert record.figures["60"] < record.figures["30"] < 2.3  # nats of a guess
    assert none.figures != lowrank.figures
    timed = {"fastsync.attach/lowrank": Record("outer", "fastsync.attach/lowrank", {}, {}, True, [0.2], WHERE)}
    assert outer_loss.seconds_a_step("attach/lowrank", timed) == 0.2

"""``benchmarks stream`` on CPU ranks, where no method may hold up the thread that computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.commands.stream import Times, figures

pytestmark = pytest.mark.end_to_end


def test_gradients_are_right_and_wait_for_the_late_rank_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Layers that fill several buckets of DDP, so that something is on its way."""
    options = ("--width", "192", "--sleep", "3", "--repetitions", "1", "--json", str(tmp_path / "rows.json"))
    assert main(["stream", *options, "--methods", "ddp", "fastsync.attach/none"]) == 0
    said = capfd.readouterr().out
    for row in json.loads((tmp_path / "rows.json").read_text()):
        assert f"{row['method']} " in said
        assert row["correct"]
        assert row["settings"]["implementation"] == "gloo"
        assert (row["figures"]["held_up"], len(row["samples"])) == (0.0, 1)


def test_who_comes_to_the_first_layer_with_the_gradients_was_held_up():
    of = {reached: figures([Times(reached, host=0.01, gradients=2.0)]) for reached in (0.1, 1.9)}
    assert [of[reached]["held_up"] for reached in of] == [0.0, 1.0]
    assert (of[0.1]["host"], of[0.1]["gradients"]) == (0.01, 2.0)

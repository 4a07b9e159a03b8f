"""``benchmarks collectives``: right results over each backend, and bandwidths as nccl-tests defines them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.baselines import mpi
from benchmarks.commands.collectives import COLLECTIVES, Options


@pytest.mark.end_to_end
def test_each_collective_is_right_over_each_backend(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    options = ("--sizes", "64B", "1KiB", "--repetitions", "2", "--json", str(tmp_path / "rows.json"))
    options += ("--plot", str(tmp_path / "times.svg"))
    assert main(["collectives", *options, "--collectives", *COLLECTIVES]) == 0
    drawn = (tmp_path / "times.svg").read_text()
    assert all(f"<!-- {name}, 2 ranks -->" in drawn for name in COLLECTIVES if name != "barrier")
    said = capfd.readouterr().out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["settings"]["collective"] for row in rows} == set(COLLECTIVES)
    for row in rows:
        assert f"{row['settings']['collective']}, 2 gloo ranks" in said
        assert row["correct"]
        assert len(row["samples"]) == 2
        assert row["method"] != "gloo" or row["figures"]["over_gloo"] == 1.0


@pytest.mark.end_to_end
@pytest.mark.skipif(not mpi.is_installed(), reason="needs `make baselines`")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_mpi_is_timed_with_the_right_results(collective: str):
    times = mpi.time_collective(collective, numel=64, ranks=2, warmup=1, repetitions=3, timeout=60)
    assert times.correct
    assert len(times.samples) == 3
    assert min(times.samples) > 0
    assert times.library.startswith("Open MPI")


def test_bus_bandwidths_are_those_of_nccl_tests():
    factors = {name: kind.bus_factor(4) for name, kind in COLLECTIVES.items()}
    assert (factors["all_reduce"], factors["broadcast"], factors["all_gather"]) == (1.5, 1.0, 0.75)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"collectives": ("sum",)}, "'sum' is none of"),
        ({"sizes": ("8",)}, "'8' is not"),
        ({"plot": Path("times.pdf")}, "must be the name of a file that ends in .svg or .png"),
        ({"nproc": 1}, "must be at least 2"),
    ],
)
def test_what_is_refused(option: dict[str, Any], error: str):
    with pytest.raises(ValueError, match=error):
        Options(**option)

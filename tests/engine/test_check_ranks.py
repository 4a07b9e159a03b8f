"""``fastsync doctor --ranks``: ranks that meet, average gradients and compare what they run on."""

import subprocess
import sys

import pytest
import torch

from fastsync.launch import check_ranks
from fastsync.launch.check_ranks import Measured, check
from tests.ranks import on_ranks

FACTS = {"torch": "2.13.0", "cores": "4"}


@pytest.mark.end_to_end
def test_ranks_of_this_host() -> None:
    command = [sys.executable, "-m", "fastsync.cli", "doctor", "--ranks", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert "ranks 0, 1" in result.stdout
    assert "the 2 ranks average gradients" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_a_launcher_has_started_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"--ranks 2: torchrun has started 3"):
        check(2)


@pytest.mark.parametrize(
    ("other", "wrong", "obstacles"),
    [
        ({}, "", []),
        ({"cores": "8"}, "", []),
        ({}, "rank 1 has 1.0 where the mean is 1.5", ["rank 1 has 1.0 where the mean is 1.5"]),
    ],
)
def test_what_differs(other: dict[str, str], wrong: str, obstacles: list[str]) -> None:
    measured = [Measured("process group"), Measured("process group", wrong=wrong)]
    assert check_ranks._obstacles([FACTS, FACTS | other], measured) == obstacles


@on_ranks(2)
def test_ranks_of_unlike_versions_are_told_so_and_average_nothing(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(check_ranks, "version", lambda: f"0.{rank}")
        _, facts, measured = check_ranks._meet(torch.device("cpu"))
    assert check_ranks._obstacles(facts) == ["fastsync: install the same version on every rank"]
    assert measured == []

"""``fastsync doctor --ranks``: ranks that meet, average gradients and compare what they run on."""

import subprocess
import sys
from dataclasses import replace

import pytest

from fastsync.launch import check_ranks
from fastsync.launch.check_ranks import Found, check

FOUND = Found("first", "10.0.0.1", {"torch": "2.13.0", "cores": "4"}, "process group", {16: 1e-4, 2**20: 2e-3})


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
    ("other", "obstacles"),
    [
        (FOUND, []),
        (replace(FOUND, host="second", facts={**FOUND.facts, "cores": "8"}), []),
        (replace(FOUND, facts={**FOUND.facts, "torch": "2.12.0"}), ["torch: install the same version on every rank"]),
        (replace(FOUND, wrong="rank 1 has 1.0 where the mean is 1.5"), ["rank 1 has 1.0 where the mean is 1.5"]),
    ],
)
def test_what_differs(other: Found, obstacles: list[str]) -> None:
    assert check_ranks._obstacles([FOUND, other, FOUND]) == obstacles

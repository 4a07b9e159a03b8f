"""Training on real data ends where it does without compression: within the noise of seeds.

The short runs are for every day; ``make test-slow`` trains longer, with more seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.convergence import COMPRESSIONS, Run, Train, compare, table, train_all, train_digits, train_text
from tests.ranks import run_ranks

WITHIN_NOISE = [name for name in COMPRESSIONS if name not in ("none", "int8")]
"""int8 without error feedback is in the table of the long runs, whatever it gives."""


def runs_of(
    title: str, train: Train, num_seeds: int, num_steps: int, names: Sequence[str] = ("none", *WITHIN_NOISE)
) -> dict[str, list[Run]]:
    """Prints the table of what comes out on two ranks, with the compressions of these names."""
    compressions = {name: COMPRESSIONS[name] for name in names}
    of_rank = run_ranks(train_all, 2, train, compressions, range(num_seeds), num_steps, timeout=550)
    assert of_rank[0].keys() == of_rank[1].keys()
    for name, runs in of_rank[0].items():
        for one, other in zip(runs, of_rank[1][name], strict=True):
            assert one == other, f"{name}: the ranks ended with different models"
    losses = {name: [run.loss for run in runs] for name, runs in of_rank[0].items()}
    print(f"\n{table(f'{title}, {num_steps} steps', losses)}\n")
    return of_rank[0]


def assert_within_noise(runs: dict[str, list[Run]]) -> None:
    full_width = runs["none"]
    for name in WITHIN_NOISE:
        found = compare([run.loss for run in runs[name]], [run.loss for run in full_width])
        assert found.is_within_noise, f"{name}: {found}"
        for one, other in zip(runs[name], full_width, strict=True):
            assert one.weight != other.weight, f"{name} changed nothing: did it run?"


def test_a_shift_as_large_as_the_noise_is_noticed() -> None:
    full_width: Sequence[float] = (0.10, 0.12, 0.14, 0.11, 0.13)
    noise = compare(full_width, full_width).noise
    assert noise == pytest.approx(0.0158, abs=1e-4)
    assert compare(full_width, full_width).is_within_noise
    for shift in (noise, -noise):
        assert not compare([loss + shift for loss in full_width], full_width).is_within_noise
    scattered = [loss + scatter for loss, scatter in zip(full_width, (0.03, -0.03, 0.04, -0.04, 0.0), strict=True)]
    assert not compare(scattered, full_width).is_within_noise, "on average right, by chance"


def test_digits() -> None:
    runs = runs_of("Digits, perceptron", train_digits, num_seeds=5, num_steps=150)
    assert max(run.loss for run in runs["none"]) < math.log(10) / 5, "it began with log(10)"
    assert_within_noise(runs)


def test_text() -> None:
    runs = runs_of("Coriolanus, character transformer", train_text, num_seeds=5, num_steps=60)
    assert max(run.loss for run in runs["none"]) < 2.9, "characters at their frequencies have 3.3"
    assert_within_noise(runs)


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize(
    ("title", "train", "num_steps"),
    [("Digits, perceptron", train_digits, 1000), ("Coriolanus, character transformer", train_text, 300)],
)
def test_long_runs(title: str, train: Train, num_steps: int) -> None:
    assert_within_noise(runs_of(title, train, num_seeds=8, num_steps=num_steps, names=list(COMPRESSIONS)))

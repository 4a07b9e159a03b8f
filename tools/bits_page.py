"""Writes the table and the picture of docs/guides/same_bits.md: ``python -m tools.bits_page``. It takes minutes.

The table has one digest for each model and optimizer, which all trainings of tests/drill/same_bits.py end with.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

import fastsync
from benchmarks.report.looks import OTHERS
from benchmarks.report.pictures import SOFT, STYLE, WIDTH
from tests.drill.same_bits import trainings
from tests.engine.trained_by_micro_batches import MODELS, OPTIMIZERS
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "guides" / "same_bits.md", ROOT / "docs" / "pictures" / "same_bits.svg"
TABLE = re.compile(r"(<!-- digests -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = {"mlp": "MLP", "cnn": "CNN with GroupNorm", "gpt": "GPT"}
NUM_DIGITS = 12

NUM_STEPS, MICRO_BATCHES, KILLED_IN = 150, 8, 75


def table() -> str:
    """Trains in all ways. Raises RuntimeError if two of them end with other digests."""
    rows, numbers = [], set()
    for kind in MODELS:
        for optimizer in OPTIMIZERS:
            with tempfile.TemporaryDirectory() as folder:
                ended = list(trainings(kind, optimizer, Path(folder)))
            digests = {digest for _, of_ranks in ended for digest in of_ranks}
            if len(digests) > 1:
                raise RuntimeError(f"{kind}, {optimizer} have ended with other digests: {ended}")
            rows.append(f"| {NAMES[kind]} | {optimizer} | `{digests.pop()[:NUM_DIGITS]}…` |")
            numbers.add(len(ended))
    return "\n".join([f"| model | optimizer | sha256 of all {numbers.pop()} trainings |", "|---|---|---|", *rows])


class Curve(NamedTuple):
    """What a training was before each step."""

    losses: list[float]  # on other data
    weights: list[Tensor]


def trained(rank: int, world_size: int, store: str, victim: int | None, has_one_order: bool) -> Curve:
    """Trains a small network. Without one order of sums, ranks accumulate and average."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = fastsync.attach(model, micro_batches=MICRO_BATCHES if has_one_order else None)
    elastic = fastsync.Elastic(model, optimizer, sync, store=dist.FileStore(store, -1), timeout=20.0)

    def loss_on(seed: int) -> Tensor:
        inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
        loss: Tensor = (model(inputs) - inputs.square().sum(1, keepdim=True) / 8).square().mean()
        return loss

    curve = Curve([], [])
    for step in elastic.steps(NUM_STEPS):
        with step:
            with torch.no_grad():
                curve.losses[step.index :] = [loss_on(10**6).item()]
            curve.weights[step.index :] = [nn.utils.parameters_to_vector(model.parameters()).detach()]
            if rank == victim and step.index == KILLED_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            first = step.index * MICRO_BATCHES
            if has_one_order:
                for index in sync.micro_batches():
                    loss_on(first + index).backward()
            else:
                own = range(MICRO_BATCHES)[rank * MICRO_BATCHES // world_size :][: MICRO_BATCHES // world_size]
                for index in own:
                    with nullcontext() if index == own[-1] else sync.no_sync():
                        (loss_on(first + index) / len(own)).backward()
            optimizer.step()
    return curve


def curve(world_size: int, victim: int | None = None, *, has_one_order: bool = True) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        lost = [] if victim is None else [victim]
        of_ranks = run_ranks(trained, world_size, f"{folder}/store", victim, has_one_order, lost=lost)
    curve: Curve = of_ranks[0]
    return curve


def draw() -> None:
    """Draws losses on some numbers of ranks; and how far weights are from those of one rank, without micro_batches."""
    alone = curve(1)
    same = {"4 ranks": curve(4), "3 ranks, of which one is killed": curve(3, victim=1)}
    if any(each.losses != alone.losses for each in same.values()):
        raise RuntimeError("trainings with micro_batches have ended with other losses")
    reference = curve(1, has_one_order=False)
    other = {f"{ranks} ranks": curve(ranks, has_one_order=False) for ranks in (2, 4)}
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH, 5.6))
        above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
        above.plot(alone.losses, color="#c0c0c0", linewidth=8, label="1 rank")
        for (name, each), colour, dashes in zip(same.items(), ("#0072B2", "#D55E00"), ((4, 4), (1, 3)), strict=True):
            above.plot(each.losses, color=colour, linewidth=2.5, linestyle=(0, dashes), label=name)
        above.axvline(KILLED_IN, color=SOFT, linewidth=0.8)
        above.set(yscale="log", ylabel="loss", title="with micro_batches=8: the same bits")
        above.legend(loc="upper right")
        for (name, each), look in zip(other.items(), OTHERS[2:], strict=False):
            pairs = zip(each.weights, reference.weights, strict=True)
            away = [((one - two).norm() / two.norm()).item() or None for one, two in pairs]
            below.plot(away, label=name, color=look.colour, linestyle=(0, look.dashes))
        below.set(yscale="log", xlabel="step", ylabel="weights, away\nfrom 1 rank's", title="without")
        below.legend(loc="lower right")
        figure.savefig(PICTURE, metadata={"Date": None} if PICTURE.suffix == ".svg" else None)


def main() -> None:
    """Rewrites the page's table, and the picture."""
    draw()
    machine = f"torch {torch.__version__.partition('+')[0]}, {platform.machine()}"
    new = f"{table()}\n\n{machine}.\n"
    PAGE.write_text(TABLE.sub(lambda match: f"{match[1]}{new}{match[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()

"""``python -m benchmarks sharded``: training steps under ``fully_shard``, with PyTorch's reduce-scatter and ours.

As ``ddp`` measures them, of a GPT. Parameters stay whole from forward to backward, so that gradients alone travel in
the backward. The optimizer's step, of shards, and the all-gather of parameters before the next forward are parts of a
step, the same ones for all: ``sync`` with these ways measures what gradients take by themselves. Over links of a known
rate it is ``link``, with ``--benchmark ddp`` or ``sync``, and these ways.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.baselines.ways import SHARDED
from benchmarks.commands import ddp
from benchmarks.harness.options import run_on_ranks


@dataclass(frozen=True)
class Options(ddp.Options):
    """Measure training steps of models under fully_shard: PyTorch's reduce-scatter, and fastsync's with every wire."""

    models: tuple[ddp.ModelName, ...] = ("gpt2",)
    """What is trained."""
    ways: tuple[ddp.WayName, ...] = tuple(SHARDED)
    """Ways to synchronise. The plain model and DDP under no_sync are always measured as well."""


def main(arguments: Sequence[str]) -> int:
    """Measures and reports. Returns the exit status."""
    return run_on_ranks("sharded", Options, ddp.measure_all, ddp.report, arguments)

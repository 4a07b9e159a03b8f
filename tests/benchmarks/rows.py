"""Rows of benchmarks that are made up, with figures that are easy to check."""

from __future__ import annotations

from benchmarks.harness.records import Record

WHERE = {"time": "2026-01-01T00:00:00+00:00", "torch": "2.13.0", "cpu": "a CPU", "cores": 2, "gpu": None}


def step_row(
    world_size: int,
    samples: list[float],
    *,
    method: str = "ddp",
    scaling: str = "weak",
    launch: int = 0,
    compute: float = 0.5,
    stragglers: float = 0.125,
    oversubscribed: bool = False,
    correct: bool = True,
) -> Record:
    """As a launch of scaling gives one for each method."""
    batch_size = 8 // world_size if scaling == "strong" else 8
    settings = {"model": "mlp", "numel": 10, "batch_size": batch_size, "world_size": world_size, "backend": "gloo"}
    settings |= {"repetitions": len(samples), "seed": launch, "scaling": scaling, "launch": launch, "nodes": 1}
    settings |= {"oversubscribed": True} if oversubscribed else {}
    figures = {"compute": compute, "stragglers": stragglers, "overhead": 1e-6}
    return Record("scaling", method, settings, figures, correct, samples, WHERE)


def scaling_rows() -> list[Record]:
    """Two methods and the plain step on 1, 2 and 4 ranks, 4 of them oversubscribed, three launches each."""
    return [
        step_row(n, [n * factor, n * factor], method=method, launch=launch, oversubscribed=n == 4)
        for launch, factor in enumerate((0.9, 1.0, 1.1))
        for n in (1, 2, 4)
        for method in ("no_ddp", "ddp", "fastsync.attach/fp16")
    ]

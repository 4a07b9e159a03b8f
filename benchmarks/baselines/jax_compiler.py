"""Seconds that JAX takes to trace and compile."""

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.baselines.training import Outcome

EVENT = "/jax/core/compile/"
"""All of JAX's events of tracing, lowering and compiling begin so."""


def stopwatch() -> list[float]:
    """The seconds of each, from now on; the list grows."""
    from jax import monitoring

    seconds = list[float]()

    def listen(event: str, duration: float, **_: object) -> None:
        if event.startswith(EVENT):
            seconds.append(duration)

    monitoring.register_event_duration_secs_listener(listen)
    return seconds


def told(outcome: Outcome, compiled: list[float] | None, versions: Mapping[str, str]) -> Outcome:
    """The outcome with versions, and with the seconds of compiling where there was any."""
    return replace(outcome, compile_seconds=None if compiled is None else sum(compiled), versions=versions)

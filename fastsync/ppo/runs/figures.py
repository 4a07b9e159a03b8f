"""Figures of a run as text, for lines of progress and for the panel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

LABELS = {
    "learning/policy_loss": "policy loss", "learning/value_loss": "value loss", "learning/approx_kl": "KL",
    "learning/entropy": "entropy", "learning/explained_variance": "explained variance",
}  # fmt: skip
IN_LOGS_ONLY = {f"learning/{name}" for name in ("clip_fraction", "grad_norm", "optimizer_steps", "learning_rate")}


def labelled_metrics(scalars: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yields labels and values of the metrics that are shown: the usual ones, then the user's own."""
    own = [name for name in scalars if name.startswith(("learning/", "info/")) and name not in IN_LOGS_ONLY]
    for name, label in (LABELS | {name: name.split("/", 1)[1] for name in own if name not in LABELS}).items():
        yield label, scalars.get(name, math.nan)


def packed(parts: Sequence[str], width: int, indent: str = "") -> list[str]:
    """Puts parts into lines of at most ``width`` columns, unless a part alone is longer."""
    lines: list[str] = []
    for part in parts:
        joined = f"{lines[-1]}  {part}" if lines else ""
        if lines and len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(f"{indent}{part}")
    return lines


def format_return(value: float, decimals: int = 1) -> str:
    """Formats a return with so many decimals or, if it is small, with three significant digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.{decimals}f}"
    return f"{value:.{max(decimals, 2 - math.floor(math.log10(abs(value))))}f}"


def format_share(part: float, whole: float, digits: int = 1) -> str:
    """Formats a share such as "12.5%"; a dash if it was not measured."""
    return "-" if math.isnan(part) or not whole > 0 else f"{part / whole:.{digits}%}"


def duration(seconds: float) -> str:
    """Formats seconds such as "42 s" or "1:02:03"."""
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.0f} s" if round(seconds) < 60 else str(timedelta(seconds=round(seconds)))

"""Ranks that have the same gradients in their first step are warned of it. Some tests mean that."""

from __future__ import annotations

import os


def same_data_is_meant() -> None:
    """Turns the warning off for the engines that this rank makes from now on, and with it the check of steps."""
    os.environ["FASTSYNC_STEP_CHECK"] = "0"

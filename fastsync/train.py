"""Trains a policy as one rank: ``python -m fastsync.train`` alone, or started on every rank by torchrun."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.errors import record

if TYPE_CHECKING:
    from fastsync.ppo.config import Settings


def require_extra() -> None:
    """Ends the process with one sentence if something that training needs is not installed."""
    from fastsync.doctor import TRAIN_MODULES

    missing = [name for name in TRAIN_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"training needs {', '.join(missing)}, which the extra 'train' installs: pip install 'fastsync[train]'"
        )


def train_rank(settings: Settings) -> None:
    """Trains as the rank that the environment variables of torchrun name, or as the only one."""
    import torch

    from fastsync.distributed import process_group
    from fastsync.ppo.trainer import train

    if "OMP_NUM_THREADS" not in os.environ:
        # As torchrun does: more threads gain nothing on networks this small, and cost much where a core is busy.
        torch.set_num_threads(1)

    with process_group(settings.timeout) as device:
        train(settings, device)


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the settings from the command line and trains."""
    require_extra()
    import tyro

    from fastsync.ppo.config import Settings

    train_rank(tyro.cli(Settings, prog="python -m fastsync.train", args=arguments))


if __name__ == "__main__":
    main()

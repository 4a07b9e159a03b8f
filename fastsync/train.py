"""Trains a policy as one rank: ``python -m fastsync.train`` alone, or started on every rank by torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed.elastic.multiprocessing.errors import record

from fastsync.ppo.config import Settings

STOPPED = 128 + 15
"""Exit status of a training that was asked to stop, and did in order: what shells have for SIGTERM."""


@dataclass(frozen=True)
class Arguments:
    """Train a policy with PPO, as the only rank or as one of those that torchrun starts."""

    config: str | None = None
    """A YAML file of settings, or the name of a preset, such as CartPole-v1. What else is typed wins over it."""
    settings: Settings = field(default_factory=Settings)


def require_extra() -> None:
    """Ends the process with one sentence if something that training needs is not installed."""
    from fastsync.doctor import missing_train_packages

    missing = missing_train_packages()
    if missing:
        sys.exit(
            f"training needs {', '.join(missing)}, which the extra 'train' installs: pip install 'fastsync[train]'"
        )


def train_rank(settings: Settings) -> str | None:
    """Trains as the rank that the environment variables of torchrun name, or as the only one.

    Returns:
        The name of the signal that stopped it before its end, if one did.
    """
    import torch

    from fastsync.distributed import process_group
    from fastsync.ppo.trainer import train

    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        # As torchrun does: more threads gain nothing on networks this small, and cost much where a core is busy.
        torch.set_num_threads(1)

    with process_group(settings.timeout) as device:
        # Those of rank 0 count: it alone has to see the folder of a run, whose settings may come from there.
        of_rank_0 = [settings]
        torch.distributed.broadcast_object_list(of_rank_0)
        return train(of_rank_0[0], device)[1].stopped_by


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the settings from the command line and trains.

    A rank that is alone exits with status 143 if it was stopped by a signal. Under torchrun it exits with 0, for
    torchrun takes everything else for a failure; it has had the signal itself, and answers for the job. Settings that
    cannot work end rank 0 with one sentence and status 2.
    """
    require_extra()
    from fastsync.command_line import parse
    from fastsync.ppo.preflight import check_environment, check_run

    prog = "python -m fastsync.train"
    settings = parse(Arguments, prog, arguments).settings
    if os.environ.get("RANK", "0") == "0":
        try:
            check_environment(settings)
            check_run(settings, int(os.environ.get("WORLD_SIZE", "1")))
        except ValueError as error:
            print(f"{prog}: {error}", file=sys.stderr)
            sys.exit(2)
    if train_rank(settings) and "RANK" not in os.environ:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()

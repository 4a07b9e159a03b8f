"""Trains a policy as one rank: ``python -m fastsync.ppo`` alone, or started on every rank by torchrun or srun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.errors import record

from ..printable import print_what_can_be

if TYPE_CHECKING:
    from .settings import RunSettings


def require_extra() -> None:
    """Ends the process with one sentence if something that training needs is not installed."""
    from ..doctor import install_command, missing_train_packages

    missing = missing_train_packages()
    if missing:
        sys.exit(f"training needs {', '.join(missing)}: {install_command('train')}")


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the settings from the command line and trains.

    If a signal has stopped the training, rank 0 exits with status 143, which srun and mpirun pass on. Under torchrun it
    exits with 0, because torchrun takes any other status for a failure. torchrun has received the signal itself, and
    reports it. Settings that cannot work end rank 0 with one sentence and status 2.
    """
    print_what_can_be()
    require_extra()
    from ..launch.environment import this_rank
    from .cli import STOPPED, Arguments, check_device, check_environment, parse, say_which_settings, train_rank
    from .runs.folder import check_run
    from .survivors import check_not_joining

    prog = "python -m fastsync.ppo"
    try:
        options = parse(Arguments, prog, arguments)
        settings = options.settings
        check_not_joining()
        this = this_rank()
        if this.rank == 0:
            _check_name(settings)
            check_device(settings)
            check_run(settings, this.world_size, check_environment(settings))
            say_which_settings(prog, options.config, settings)
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)
    if train_rank(settings) and this.rank == 0 and this.launcher != "torchrun":
        sys.exit(STOPPED)


def _check_name(settings: RunSettings) -> None:
    """Checks that ranks that torchrun starts again would find their run.

    Raises:
        ValueError: they would begin another run, because the name of this one has its time.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and settings.run_name is None and settings.resume != "auto":
        raise ValueError(
            f"torchrun starts the ranks again up to {restarts} times, and they find their run by its name: "
            "add --run-name NAME"
        )


if __name__ == "__main__":
    main()

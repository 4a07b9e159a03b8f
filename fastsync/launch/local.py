"""``fastsync launch local``: starts ranks of a script on this host, and lets the others live when one is lost."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.elastic.multiprocessing import SignalException

from .script import Script
from .signals import handling
from .supervisor import Supervisor
from .torchrun import LAUNCHERS, handled

NPROC = ("-n", "--nproc", "--nproc-per-node", "--nproc_per_node")
"""The option for the number of ranks, with torchrun's names of it."""


class LocalScript(Script):
    """A script or a module that this machine starts."""

    starter: ClassVar[str] = "local starts Python"
    missing: ClassVar[str] = "name a script, or -m and a module, as in: fastsync launch local -n 4 train.py"

    def check_file(self) -> None:
        """Raises ValueError if it is neither a file nor a folder here, or if it is a pipe."""
        script = Path(self.words[0])
        if script.name != "-m" and not script.exists():
            raise ValueError(f"{str(script)!r} is no file{'' if script.is_absolute() else f' in {Path.cwd()}'}")
        super().check_file()


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the launcher's own options, and the script or -m and a module, whose options may look like those."""
    end = 0
    while end < len(arguments) and arguments[end].startswith("-") and arguments[end] not in ("-m", "--", "-"):
        end += 2 if arguments[end] in NPROC else 1
    rest = arguments[end:]
    return arguments[:end], rest[1:] if rest[:1] == ["--"] else rest


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks of a command line, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fastsync launch local",
        usage="%(prog)s [-n RANKS] [--replace] {SCRIPT | -m MODULE} ...",
        description="Start ranks of a script on this host. When one is lost, the others live on; a script that uses "
        "fastsync.Elastic or DiLoCo goes on with them.",
    )
    parser.add_argument(*NPROC[:2], type=int, default=2, metavar="RANKS", help="number of ranks (default: 2)")
    parser.add_argument(*NPROC[2:], type=int, dest="nproc", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--replace", action="store_true", help="start another rank when one is lost")
    own, words = _split(arguments)
    options = parser.parse_args(own)
    if options.nproc < 1:
        raise ValueError(f"nproc={options.nproc} must be at least 1")
    LocalScript(words).check_file()

    def stop(number: int, frame: object) -> None:
        raise SignalException(f"ended by {signal.Signals(number).name}", sigval=signal.Signals(number))

    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", handled((signal.SIGTERM, *LAUNCHERS)))
    try:
        with handling(stop, (signal.SIGTERM,)):
            told: dict[str, Any] = {"command": "fastsync launch local", "place": "fastsync.Elastic or DiLoCo"}
            return Supervisor(sys.executable, ["-u", *words], options.nproc, replaces=options.replace, **told).run()
    except SignalException as ended:
        return 128 + ended.sigval

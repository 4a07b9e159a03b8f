"""The ``fastsync`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import __version__
from .messages import did_you_mean
from .printable import print_what_can_be

COMMANDS = {
    "train": "train a policy with PPO on several ranks",
    "launch": "start ranks of a script on this host, or write the file by which Slurm, Kubernetes or SkyPilot does",
    "eval": "play episodes with a trained policy",
    "export": "write a trained policy into an ONNX or TorchScript file",
    "plot": "draw learning curves of runs",
    "doctor": "tell what works on this machine, and what does not",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit status."""
    print_what_can_be()
    parser = argparse.ArgumentParser(prog="fastsync", description="Gradient synchronisation for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fastsync {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in COMMANDS.items():
        # The others have no help here: `fastsync train --help` shows the settings.
        commands.add_parser(name, help=what, add_help=False)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        print(
            f"fastsync: {words[0]!r} is not one of {', '.join(COMMANDS)}{did_you_mean(words[0], COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    # Words after the subcommand belong to it, even if they look like options of this parser.
    options, rest = parser.parse_known_args(words[:1])
    rest += words[1:]
    return _run(options.command, rest)


def _run(command: str, arguments: Sequence[str]) -> int:
    """Runs a subcommand. It tells a user's mistake in one sentence."""
    try:
        try:
            main = {
                "train": _train, "launch": _launch, "eval": _eval, "export": _export, "plot": _plot, "doctor": _doctor,
            }[command]()  # fmt: skip
        except ImportError as error:  # the extension is not built
            sys.exit(f"fastsync {command}: {error}")
        return main(arguments)
    except ValueError as error:
        print(f"fastsync {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fastsync {command}: ended by SIGINT", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has had enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        return 141  # as of a command that SIGPIPE ends


def _doctor() -> Callable[[Sequence[str]], int]:
    from . import doctor

    def main(arguments: Sequence[str]) -> int:
        parser = argparse.ArgumentParser(prog="fastsync doctor", description=f"{COMMANDS['doctor'].capitalize()}.")
        parser.add_argument(
            "--ranks",
            type=_number_of_ranks,
            nargs="?",
            const=0,
            metavar="N",
            help="start N ranks on this host (2), or check those that torchrun or srun has started: they meet, compare "
            "versions, average gradients, and tell how long it takes",
        )
        num_ranks = parser.parse_args(arguments).ranks
        if num_ranks is None:
            return doctor.main()
        doctor.load("_C")
        from .launch import check_ranks

        return check_ranks.check(num_ranks or None)

    return main


def _number_of_ranks(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {word!r}")
    return int(word)


def _train() -> Callable[[Sequence[str]], int]:
    from .ppo.__main__ import require_extra

    require_extra()
    from .launch.environment import this_rank
    from .ppo import cli

    def main(arguments: Sequence[str]) -> int:
        options, this = cli.parse(cli.Launch, "fastsync train", arguments), this_rank()
        if options.launcher == "torchrun" and this.world_size > 1:
            raise ValueError(
                f"{this.launcher} has started {this.world_size} of these commands, and each would start ranks of its "
                "own; start one, or let that launcher start ranks: python -m fastsync.ppo"
            )
        return cli.launch(options)

    return main


def _eval() -> Callable[[Sequence[str]], int]:
    from .ppo.__main__ import require_extra

    require_extra()
    from .ppo import evaluate

    return evaluate.main


def _export() -> Callable[[Sequence[str]], int]:
    from .ppo.__main__ import require_extra

    require_extra()
    from .ppo import export

    return export.main


def _plot() -> Callable[[Sequence[str]], int]:
    from .ppo.__main__ import require_extra

    require_extra()
    from .ppo import plot

    return plot.main


def _launch() -> Callable[[Sequence[str]], int]:
    from .launch import jobs

    return lambda arguments: jobs.main(arguments, _read_trainer, _settings_of_trainer)


def _read_trainer(kind: type[Any], prog: str, words: Sequence[str]) -> tuple[Any, Any]:
    """Reads a job for the trainer. Only this needs its extra; a user's own script does not."""
    from .ppo.__main__ import require_extra

    require_extra()
    try:
        from .ppo import job
    except ImportError as error:  # the extension is not built
        raise ValueError(str(error)) from None
    return job.read(kind, prog, words)


def _settings_of_trainer() -> set[str]:
    """Returns the names of the trainer's settings; none if it is not installed."""
    try:
        from .ppo import job
    except ImportError:
        return set()
    return job.names_of_settings()


if __name__ == "__main__":
    sys.exit(main())

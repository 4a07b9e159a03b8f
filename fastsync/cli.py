"""The ``fastsync`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from . import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit status."""
    parser = argparse.ArgumentParser(prog="fastsync", description="Gradient synchronisation for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fastsync {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    # These subcommands have no help here: `fastsync train --help` shows the settings.
    commands.add_parser("train", help="train a policy with PPO on several ranks", add_help=False)
    commands.add_parser(
        "launch", help="write the file by which Slurm, Kubernetes or SkyPilot starts ranks", add_help=False
    )
    commands.add_parser("eval", help="play episodes with a trained policy", add_help=False)
    commands.add_parser("plot", help="draw learning curves of runs", add_help=False)
    commands.add_parser("doctor", help="tell what works on this machine, and what does not")
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Words after the subcommand belong to it, even if they look like options of this parser.
    options, rest = parser.parse_known_args(words[:1])
    rest += words[1:]
    if options.command != "doctor":
        return _run(options.command, rest)
    commands.choices["doctor"].parse_args(rest)
    from . import doctor

    return doctor.main()


def _run(command: str, arguments: Sequence[str]) -> int:
    """Runs a subcommand that reads its own options. It tells a user's mistake in one sentence."""
    try:
        main = {"train": _train, "launch": _launch, "eval": _eval, "plot": _plot}[command]()
    except ImportError as error:  # the extension is not built
        sys.exit(f"fastsync {command}: {error}")
    try:
        return main(arguments)
    except ValueError as error:
        print(f"fastsync {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fastsync {command}: ended by SIGINT", file=sys.stderr)
        return 130


def _train() -> Callable[[Sequence[str]], int]:
    from .train import require_extra

    require_extra()
    from .launch.environment import this_rank
    from .ppo import cli

    def main(arguments: Sequence[str]) -> int:
        options, this = cli.parse(cli.Launch, "fastsync train", arguments), this_rank()
        if options.launcher == "torchrun" and this.world_size > 1:
            raise ValueError(
                f"{this.launcher} has started {this.world_size} of these commands, and each would start ranks of its "
                "own; start one, or let that launcher start ranks: python -m fastsync.train"
            )
        return cli.launch(options)

    return main


def _eval() -> Callable[[Sequence[str]], int]:
    from .train import require_extra

    require_extra()
    from .ppo import evaluate

    return evaluate.main


def _plot() -> Callable[[Sequence[str]], int]:
    from .train import require_extra

    require_extra()
    from .ppo import plot

    return plot.main


def _launch() -> Callable[[Sequence[str]], int]:
    from .launch import jobs  # it needs no extra for a user's own script

    return jobs.main


if __name__ == "__main__":
    sys.exit(main())

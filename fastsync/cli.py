"""The ``fastsync`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit status."""
    parser = argparse.ArgumentParser(prog="fastsync", description="Gradient synchronisation for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    # No help of its own: `fastsync train --help` shows the settings.
    commands.add_parser("train", help="train a policy with PPO on several ranks of this machine", add_help=False)
    commands.add_parser("doctor", help="tell what works on this machine, and what does not")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "train":
        return _train(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    from fastsync import doctor

    return doctor.main()


def _train(arguments: Sequence[str]) -> int:
    from fastsync.train import require_extra

    require_extra()
    import tyro

    from fastsync.launch import Launch, launch

    options = tyro.cli(Launch, prog="fastsync train", args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    try:
        return launch(options)
    except ValueError as error:
        print(f"fastsync train: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

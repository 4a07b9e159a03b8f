"""Settings from the command line: a YAML file or preset first, and over it what is typed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

from fastsync.ppo.settings_file import load_settings

Command = TypeVar("Command")


def parse(command: type[Command], prog: str, arguments: Sequence[str] | None) -> Command:
    """Reads a command line. Errors end the process with status 2 and one message.

    Args:
        command: the dataclass to fill; its ``settings`` are Settings, and its ``config`` names a file or preset.
        prog: the name of the command, for messages.
        arguments: the words behind it; by default those that this process was started with.
    """
    finder = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    source = finder.parse_known_args(arguments)[0].config
    make: Callable[..., Command] = command
    default = make()
    if source is not None:
        try:
            default = make(settings=load_settings(source))
        except ValueError as error:
            print(f"{prog}: {error}", file=sys.stderr)
            sys.exit(2)
    return tyro.cli(command, prog=prog, args=arguments, default=default, config=(tyro.conf.OmitArgPrefixes,))

"""Settings from the command line: first a YAML file, a preset, or the run that goes on, and over it what is typed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

from fastsync.ppo.config import Settings
from fastsync.ppo.run_folder import settings_of_run
from fastsync.ppo.settings_file import load_settings

Command = TypeVar("Command")


def parse(command: type[Command], prog: str, arguments: Sequence[str] | None) -> Command:
    """Reads a command line. Errors end the process with status 2 and one message.

    Args:
        command: the dataclass to fill; its ``settings`` are Settings, and its ``config`` names a file or preset.
        prog: the name of the command, for messages.
        arguments: the words behind it; by default those that this process was started with.
    """
    make: Callable[..., Command] = command
    try:
        settings = _settings_before(prog, arguments)
        default = make() if settings is None else make(settings=settings)
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)
    return tyro.cli(command, prog=prog, args=arguments, default=default, config=(tyro.conf.OmitArgPrefixes,))


def _settings_before(prog: str, arguments: Sequence[str] | None) -> Settings | None:
    """What settings are before the command line changes them, if they are other than the defaults."""
    finder = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    finder.add_argument("--resume")
    finder.add_argument("--run-name", "--run_name")
    finder.add_argument("--runs-dir", "--runs_dir", default=Settings().runs_dir)
    found = finder.parse_known_args(arguments)[0]
    if found.config is not None:
        return load_settings(found.config)
    if found.resume is not None:
        return settings_of_run(found.resume, found.run_name, found.runs_dir)
    return None

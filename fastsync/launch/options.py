"""Reading the options of a command into a dataclass, by tyro."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any, TypeVar

import tyro

Options = TypeVar("Options")


def read_options(kind: type[Options], prog: str, words: Sequence[str], **more: Any) -> Options:
    """Reads the words of a command line. tyro's errors of single options end the process with status 2.

    Args:
        kind: the dataclass, whose ``__post_init__`` may refuse values.
        prog: the name of the command, for messages.
        words: what stands after it.
        **more: for ``tyro.cli``.

    Raises:
        ValueError: the dataclass has refused the values. tyro would name its class, which no user knows.
    """
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            options: Options = tyro.cli(kind, prog=prog, args=words, **more)
            return options
    except SystemExit as ended:
        if (refusal := _refusal_behind(ended)) is not None:
            said = io.StringIO()
            raise ValueError(*refusal.args) from None
        raise
    finally:
        sys.stderr.write(said.getvalue())


def _refusal_behind(error: BaseException | None) -> ValueError | None:
    """Returns the error of a ``__post_init__`` that has led to another error, if there is one."""
    while error is not None:
        frames = traceback.walk_tb(error.__traceback__)
        if isinstance(error, ValueError) and any(frame.f_code.co_name == "__post_init__" for frame, _ in frames):
            return error
        error = error.__context__
    return None

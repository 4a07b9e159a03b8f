"""A script of the user's, as the work of a job or of ranks on this host."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

ONCE = "which can be read only once, and every rank reads the script; save it as a file"


@dataclass(frozen=True)
class Script:
    """A script or a module of the user's, with its options, as torchrun takes them.

    Raises:
        ValueError: torchrun could not start it.
    """

    words: Sequence[str]
    own: ClassVar[str | None] = ""
    resumes: ClassVar[str | None] = None
    from_folder: ClassVar[str | None] = ""
    starter: ClassVar[str] = "the file starts torchrun"
    """What starts the script, for messages."""
    missing: ClassVar[str] = "nothing stands behind --: name a script, or -m and a module, as for torchrun"
    """The message if there is none."""

    def __post_init__(self) -> None:
        first = self.words[0] if self.words else ""
        if re.fullmatch(r"torchrun|python[\d.]*", Path(first).name):
            raise ValueError(f"leave {first!r} out: {self.starter}, which takes a script, or -m and a module")
        if first == "-":
            raise ValueError(f"{first!r} stands for a pipe, {ONCE}")
        if first.startswith("-") and first != "-m":
            raise ValueError(f"{first!r} stands behind --, where a script comes first, or -m and a module")
        if not self.words or list(self.words) == ["-m"]:
            raise ValueError(self.missing)

    def command(self, run_name: str, runs_dir: str | None = None) -> list[str]:
        """Returns the words after torchrun's options."""
        return list(self.words)

    def check_file(self) -> None:
        """Raises ValueError for a pipe, and if a relative path is no file here. Others may be on another machine."""
        script = Path(self.words[0])
        if script.is_fifo() or script.is_char_device():
            raise ValueError(f"{str(script)!r} is a pipe or a terminal, {ONCE}")
        if script.name == "-m" or script.exists():
            return
        if not script.is_absolute():
            raise ValueError(f"{str(script)!r} is no file in this folder, where the job looks for it")
        print(f"fastsync launch: warning: {script} is not on this machine", file=sys.stderr)

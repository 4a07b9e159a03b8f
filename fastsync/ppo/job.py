"""The trainer as the work of a job, which ``fastsync launch slurm`` and its like write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import Any, ClassVar

from ..launch.jobs import Kind, check_options, names_of_options
from .cli import SYNONYMS, Arguments, option_words, parse
from .ppo import Settings


@dataclass(frozen=True)
class Trainer:
    """The PPO trainer. A file of settings is read now, so later changes to it have no effect."""

    settings: Settings
    own: ClassVar[str | None] = None
    resumes: ClassVar[str | None] = ""

    @property
    def from_folder(self) -> str | None:
        """See ``Script``. Names such as my_env:MyEnv are of the user's own modules, which have to be there, too."""
        asked = self.settings
        named = (asked.env, asked.eval_env, asked.policy, asked.loss, asked.advantages)
        return "" if any(":" in (name or "") for name in named) else None

    def __post_init__(self) -> None:
        if self.settings.resume not in (None, "auto"):
            raise ValueError(f"resume={self.settings.resume!r}: jobs always use resume=auto; set run_name instead")
        if self.settings.on_lost_rank == "continue":
            raise ValueError(
                "on_lost_rank='continue': these jobs start ranks by torchrun, which ends all ranks of a machine with a "
                "lost one; leave it out, and have the job come back from its last checkpoint"
            )

    def command(self, run_name: str, runs_dir: str | None = None) -> list[str]:
        """Returns the words after torchrun's options. A name in the settings comes before ``run_name``."""
        asked = self.settings
        settings = replace(asked, run_name=asked.run_name or run_name, runs_dir=runs_dir or asked.runs_dir)
        return ["-m", "fastsync.ppo", *option_words(settings, "resume"), "--resume", "auto"]

    def check_file(self) -> None:
        """Does nothing, because the trainer is installed."""


def read(kind: type[Kind], prog: str, words: Sequence[str]) -> tuple[Kind, Trainer]:
    """Reads a kind's options and the trainer's settings. Errors of tyro end the process.

    Raises:
        ValueError: an option is known to neither, or a setting does not suit.
    """
    both = make_dataclass(kind.__name__, [], bases=(kind, Arguments), frozen=True)
    both.__doc__ = kind.__doc__
    check_options(prog, kind, words, names_of_options(both) | names_of_settings())
    job: Any = parse(both, prog, words)
    return job, Trainer(job.settings)


def names_of_settings() -> set[str]:
    """Returns the names of the options that settings have, with those of other trainers."""
    others = {name.lstrip("-").replace("-", "_") for name in SYNONYMS}
    return names_of_options(Settings) | others | {"config"}

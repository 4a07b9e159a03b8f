"""What ranks do in the tests of the launcher, and the launch: ``python -m tests.ppo.launched WORK ARGUMENTS``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fastsync.distributed import process_group
from fastsync.launch.signals import StopSignals
from fastsync.ppo.cli import Launch, launch, parse
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.folder import CHECKPOINTS
from tests.forked import state_of, until


def say(settings: Settings, name: str, text: str) -> None:
    """Leaves a file for the test, whole or not at all."""
    unfinished = Path(settings.runs_dir) / f"{name}.tmp"
    unfinished.write_text(text)
    unfinished.rename(unfinished.with_suffix(""))


def until_told_to_stop(settings: Settings) -> str | None:
    """Ranks that talk to each other until one of them is told to stop."""
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    with process_group(settings.timeout), StopSignals() as signals:
        assert dist.get_rank() == int(rank)
        checkpoints = Path(settings.runs_dir) / str(settings.run_name) / CHECKPOINTS
        checkpoints.mkdir(parents=True, exist_ok=True)
        (checkpoints / "step-000000001.pt").touch()
        say(settings, f"attempt{attempt}-rank{rank}", f"{os.getpid()} {dist.get_world_size()} {settings.run_name}")
        stop = torch.tensor(0.0)
        while not stop:
            time.sleep(0.02)
            stop.fill_(signals.requested)
            try:
                dist.all_reduce(stop)
            except RuntimeError:
                time.sleep(2.0)  # a forked rank ends sooner than the launcher looks who was the first
                raise
        say(settings, f"attempt{attempt}-end{rank}", str(signals.received and signals.received.name))
    return signals.received.name if signals.received else "a signal to another rank"


def deaf(settings: Settings) -> None:
    """A rank that takes notice of nothing, not even twice."""
    with StopSignals(same_within=3600):
        say(settings, "attempt0-rank0", f"{os.getpid()} 1 {settings.run_name}")
        time.sleep(3600)


def not_listening_yet(settings: Settings) -> None:
    """A rank that has not come to the point where it takes notice of signals."""
    say(settings, "attempt0-rank0", f"{os.getpid()} 1 {settings.run_name}")
    time.sleep(3600)


def in_the_rendezvous(settings: Settings) -> None:
    """Rank 0 waits for a rank that does not come."""
    say(settings, f"attempt0-rank{os.environ['RANK']}", f"{os.getpid()}")
    if os.environ["RANK"] != "0":
        time.sleep(3600)
    with process_group(settings.timeout):
        pass


def beside_a_stopped_rank(settings: Settings) -> None:
    """Rank 0 fails when rank 1 has been stopped."""
    if os.environ["RANK"] == "1":
        say(settings, "attempt0-rank1", f"{os.getpid()}")
        os.kill(os.getpid(), signal.SIGSTOP)
    file = Path(settings.runs_dir) / "attempt0-rank1"
    until(lambda: file.exists() and state_of(int(file.read_text())) == "T", "the stop of rank 1")
    raise RuntimeError("as told")


EVERYTHING = (until_told_to_stop, deaf, not_listening_yet, in_the_rendezvous, beside_a_stopped_rank)
WORK = {work.__name__: work for work in EVERYTHING}


def main(words: Sequence[str]) -> int:
    return launch(parse(Launch, "launched", words[1:]), WORK[words[0]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measures again what README and docs print, one after the other: ``python -m tools.measure FOLDER``.

For a quiet machine and a commit without changes. Rows go to ``FOLDER/THEME.json``. What is there already is not
measured again, and trainings that are missing are added, so the same command goes on after a stop. ``--only ppo-until``
takes the themes that begin so, and ``--list`` says how long each takes on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.baselines.methods import WHOLE_WITH_ADAMW
from benchmarks.harness.records import environment, torch

METHODS = (
    "ddp", "ddp/bucket_view", "ddp/fp16_compress_hook", "fastsync.register_comm_hook/none", "fastsync.attach/none",
    "fastsync.attach/fp16", "fastsync.attach/int8+ef",
)  # fmt: skip
COLLECTIVES = "all_reduce broadcast all_gather reduce_scatter all_to_all"
UNTIL = "ppo --until --threads 1 --resume --env"
UNTIL_BY = "--nproc 1 --trainers sb3 cleanrl sbx fastsync"


@dataclass(frozen=True)
class Measurement:
    theme: str
    """As the file of rows is called."""
    command: str
    minutes: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment."""

    @property
    def words(self) -> list[str]:
        """Those of the command, without where its rows go: for scaling that is a folder, and else a file."""
        where = "--report" if self.command.startswith("scaling ") else "--json"
        return [*self.command.split(), where]

    @property
    def resumes(self) -> bool:
        return "--resume" in self.command


PLAN = (
    Measurement("sync-headline", f"sync --device cpu --sizes 12m --methods {' '.join(METHODS)}", 1),
    Measurement(
        "link-headline",
        "link --rate 1gbit --ranks 4 --ranks-per-host 2 --sizes 12m --repetitions 8 --methods " + " ".join(METHODS),
        2,
    ),
    Measurement("scaling-gpt2", "scaling --world-sizes 1,2 --model gpt2 --repetitions 6", 3),
    Measurement("sync-adamw", "sync --optimizer adamw --sizes 5k 0.5m 12m", 1),
    Measurement("sync-adamw-messages", "sync --optimizer adamw --sizes 0.5m 12m", 1, {"FASTSYNC_SHARED_MEMORY": "0"}),
    Measurement("link-adamw", "link --rate 1gbit --ranks 2 --optimizer adamw --sizes 12m", 2),
    *(
        Measurement(
            f"link-overlap-{rate}",
            f"link --benchmark ddp --rate {rate} --ranks 2 --models gpt2 --methods {' '.join(WHOLE_WITH_ADAMW)}",
            2,
        )
        for rate in ("1gbit", "10gbit")
    ),
    Measurement("sync-muon", "sync --optimizer muon --sizes 12m", 3),
    Measurement("micro_batches", "micro_batches", 1),
    Measurement("collectives-2-ranks", f"collectives --methods gloo fastsync mpi --collectives {COLLECTIVES}", 1),
    *(
        Measurement(
            f"collectives-{ranks}-ranks",
            f"collectives --methods gloo fastsync mpi --nproc {ranks} --oversubscribe --repetitions 60",
            1,
        )
        for ranks in (4, 8)
    ),
    Measurement("ppo", "ppo --hyperparameters cleanrl zoo --total-steps 60000 --repetitions 4", 10),
    Measurement("ppo-1024-environments", "ppo --num-envs 1024 --total-steps 500000 --repetitions 3", 2),
    Measurement("recovery", "recovery --repetitions 8 --oversubscribe", 15),
    Measurement("ppo-until-cartpole", f"{UNTIL} CartPole-v1 {UNTIL_BY}", 10),
    Measurement("ppo-until-acrobot", f"{UNTIL} Acrobot-v1 {UNTIL_BY}", 10),
    Measurement("ppo-until-pendulum", f"{UNTIL} Pendulum-v1 {UNTIL_BY}", 10),
    Measurement(
        "ppo-until-lunarlander-scopes",
        f"{UNTIL} LunarLander-v3 --nproc 1 --trainers sb3 fastsync --norm-advantages minibatch rollout "
        "--repetitions 30 --total-steps 2000000",
        350,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a measurement failed, or 2 if the tree was changed after its commit."""
    parser = argparse.ArgumentParser(prog="python -m tools.measure", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/measured"))
    parser.add_argument("--only", default="", help="the themes that begin so")
    parser.add_argument("--list", action="store_true", help="say what would be measured, and for how many minutes")
    options = parser.parse_args(arguments)
    chosen = [each for each in PLAN if each.theme.startswith(options.only)]
    if options.list:
        print("\n".join(f"{each.minutes:4} minutes  {each.theme}: {each.command}" for each in chosen))
        return 0
    commit = environment(torch.device("cpu"))["commit"]
    if commit is None or "dirty" in commit:
        print(f"python -m tools.measure: the tree is at {commit}; commit what has changed first", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    return max((measure(each, options.folder) for each in chosen), default=0)


def measure(each: Measurement, folder: Path) -> int:
    """Runs a benchmark, unless its rows are there. Rows that it has when it fails get another name."""
    rows = folder / (each.theme if each.words[-1] == "--report" else f"{each.theme}.json")
    if rows.exists() and not each.resumes:
        print(f"{each.theme}: {rows} is there")
        return 0
    print(f"{each.theme}: some {each.minutes} minutes", flush=True)
    command = [sys.executable, "-m", "benchmarks", *each.words, str(rows)]
    status = subprocess.run(command, env={**os.environ, **each.variables}).returncode
    if status and rows.exists() and not each.resumes:
        rows.rename(rows.with_name(f"{rows.name}.failed"))
    return int(bool(status))


if __name__ == "__main__":
    sys.exit(main())

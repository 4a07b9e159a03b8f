"""The batch script: what it holds, and what it does with a srun and a scontrol that are not the real ones."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.run import parse_args as torchrun_arguments

from fastsync.cli import main
from fastsync.launch.jobs import Slurm, content
from fastsync.launch.script import Script
from fastsync.ppo.cli import Arguments, Launch, option_words, parse
from fastsync.ppo.job import Trainer
from fastsync.ppo.ppo import Settings
from fastsync.ppo.settings import load_settings
from tests.forked import until

ODD = Settings(
    env="it's:mine", hidden_sizes=(8, 4), anneal_clip=True, norm_advantages="none", target_kl=0.01, learning_rate=1e-5,
    run_name="a run",
)  # fmt: skip


@pytest.mark.parametrize("settings", [Settings(), ODD, load_settings("Atari", Settings)])
def test_the_command_line_gives_the_settings_back(settings: Settings):
    assert parse(Launch, "test", option_words(settings, "resume")).settings == settings


def test_the_script_is_written_once_and_asks_for_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "launch", "slurm", "--nodes", "3", "--nproc", "4", "--config", "CartPole-v1", "--seed", "7",
    ]  # fmt: skip
    assert main(arguments) == 0
    lines = (tmp_path / "train.sbatch").read_text().splitlines()
    directives = [
        "job-name=fastsync", "output=%x-%j.out", "open-mode=append", "nodes=3", "ntasks-per-node=1",
        "cpus-per-task=4", "signal=B:USR1@120", "requeue",
    ]  # fmt: skip
    # Slurm stops to read them at the first command.
    assert lines[: 1 + len(directives)] == ["#!/bin/bash", *(f"#SBATCH --{directive}" for directive in directives)]
    assert main(arguments) == 2
    assert "fastsync launch: file='train.sbatch' exists already" in capsys.readouterr().err


# Two machines, one after the other, as srun would start a task on each; then a task waits, as ranks do. To srun itself
# SIGTERM means to kill its tasks; it passes SIGUSR1 on to them.
SRUN = """#!/bin/bash
while [[ $1 = --* ]]; do shift; done  # its own options
for SLURM_NODEID in 0 1; do
    SLURM_NODEID=$SLURM_NODEID "$@"
done
trap 'signalled=1; kill -USR1 %1' USR1
trap 'signalled=1; kill -KILL %1' TERM
(
    trap 'echo told to save >> "$LOG"; exit $ENDS_WITH' USR1
    echo started >> "$LOG"
    while [ "$WAITS" = 1 ]; do sleep 0.05; done
    exit "$ENDS_WITH"
) &
wait %1
status=$?
if [ "$signalled" ]; then
    wait %1
    status=$?
fi
exit "$status"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf '%s\\n' first second; else echo "scontrol $*" >> "$LOG"; fi
"""
TORCHRUN = """#!/bin/bash
printf '%q ' "$@" >> "$LOG"; echo >> "$LOG"
"""


class Job:
    """The script, running among programs that are not the real ones."""

    def __init__(
        self, folder: Path, options: Slurm, work: Script | Trainer, *, ends_with: int, waits: bool = True
    ) -> None:
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", TORCHRUN)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "job.sbatch").write_text(content(options, work))
        self._log = folder / "log"
        self.process = subprocess.Popen(
            ["bash", str(folder / "job.sbatch")],
            env={
                "PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(self._log), "ENDS_WITH": str(ends_with),
                "WAITS": str(int(waits)), "SLURM_JOB_ID": "41234", "SLURM_JOB_NAME": "fastsync",
                "SLURM_JOB_NODELIST": "[first,second]", "SLURM_CPUS_PER_TASK": "8",
            },
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def log(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def signalled(self, number: signal.Signals) -> int:
        """Its exit status, when it gets a signal once the ranks are there."""
        until(lambda: "started" in self.log(), "the ranks' start")
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.mark.parametrize(("run_name", "expected"), [(None, "fastsync-41234"), ("a 'run' of $HOME",) * 2])
def test_each_machine_gets_its_launcher(run_name: str | None, expected: str, tmp_path: Path):
    options = Slurm(nodes=2, nproc=4, max_restarts=2, setup="export SEEN=1")
    job = Job(tmp_path, options, Trainer(replace(ODD, run_name=run_name)), ends_with=0, waits=False)
    assert job.process.wait(30) == 0
    *commands, last = map(shlex.split, job.log())
    assert (len(commands), last) == (2, ["started"])
    for node, command in enumerate(commands):
        asked = torchrun_arguments(command)
        assert (asked.nnodes, asked.node_rank, asked.nproc_per_node, asked.max_restarts) == ("2", node, "4", 2)
        assert (asked.master_addr, asked.master_port) == ("first", 25234)
        assert asked.signals_to_handle.endswith(",SIGUSR1")
        assert (asked.module, asked.training_script) == (True, "fastsync.ppo")
        settings = parse(Arguments, "test", asked.training_script_args).settings
        assert settings == replace(ODD, run_name=expected, resume="auto")


@pytest.mark.parametrize(
    ("number", "ends_with", "last"),
    [
        (signal.SIGUSR1, 143, ["told to save", "scontrol requeue 41234"]),  # before its time is up
        (signal.SIGUSR1, 0, ["started", "told to save"]),  # it comes to its end meanwhile
        (signal.SIGTERM, 143, ["started", "told to save"]),  # somebody ends it
    ],
)
def test_a_signal_has_the_job_save_and_queued_again_if_it_is_to_go_on(
    tmp_path: Path, number: signal.Signals, ends_with: int, last: list[str]
):
    job = Job(tmp_path, Slurm(setup=""), Trainer(Settings()), ends_with=ends_with)
    assert job.signalled(number) == ends_with
    assert job.log()[-2:] == last


def test_the_status_is_that_of_the_ranks(tmp_path: Path):
    job = Job(tmp_path, Slurm(setup=""), Trainer(Settings()), ends_with=1, waits=False)
    assert job.process.wait(30) == 1


@pytest.mark.parametrize("words", [["train.py", "--lr", "0.1", "it's"], ["-m", "mypackage.train", "--nodes", "3"]])
def test_a_script_of_ones_own_is_what_the_launchers_start(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["launch", "slurm", "--nodes", "2", "--nproc", "2", "--cpus-per-node", "6", "--", *words]) == 0
    assert capsys.readouterr().out == "wrote train.sbatch. Submit it with: sbatch train.sbatch\n"
    script = (tmp_path / "train.sbatch").read_text()
    assert "#SBATCH --cpus-per-task=6\n" in script
    assert f"\nsource {sys.prefix}/bin/activate\n" in script  # of the environment that tests run in
    # It may not go on from a checkpoint, so that the job would begin again for ever.
    assert not re.search(r"^#SBATCH --(requeue|signal)", script, re.MULTILINE)
    setup = "unset OMP_NUM_THREADS; trap 'echo $OMP_NUM_THREADS >> $LOG' EXIT"
    job = Job(tmp_path, Slurm(nodes=2, nproc=2, setup=setup), Script(words), ends_with=0, waits=False)
    assert job.process.wait(30) == 0
    *commands, started, threads = map(shlex.split, job.log())
    assert (len(commands), started, threads) == (2, ["started"], ["4"])  # the cores, shared by two ranks
    for command in commands:
        asked = torchrun_arguments(command)
        assert asked.module == (words[0] == "-m")
        assert [asked.training_script, *asked.training_script_args] == words[words[0] == "-m" :]

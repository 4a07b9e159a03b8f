"""The batch script under a real Slurm of one machine, where Debian's slurm-wlm and munge are installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastsync.ppo.jobs import Slurm, slurm_script
from fastsync.ppo.ppo import Settings
from tests.ppo.test_launch_torchrun import LIMIT, ROOT, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(localhost)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
SwitchType=switch/none
MpiDefault=none
TaskPlugin=task/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={controller}
SlurmdPort={node}
NodeName={host} NodeAddr=localhost CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster of this machine; yields the environment in which its commands find it."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"no Slurm here: {', '.join(missing)} missing")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons start jobs as root only")
    host = socket.gethostname().split(".")[0]
    (tmp_path / "key").write_bytes(os.urandom(128))
    (tmp_path / "key").chmod(0o400)
    ports = {"controller": free_port(), "node": free_port()}
    configuration = CONFIGURATION.format(host=host, folder=tmp_path, cpus=os.cpu_count(), **ports)
    (tmp_path / "slurm.conf").write_text(configuration)
    munge = [f"--{name}={tmp_path}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    subprocess.run(["munged", "--force", f"--key-file={tmp_path}/key", *munge], check=True)
    try:
        for daemon in ("slurmctld", "slurmd"):
            subprocess.run([daemon, "-f", tmp_path / "slurm.conf"], check=True)
        yield os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    finally:
        for pid in ("slurmd.pid", "slurmctld.pid", "munge.pid-file"):
            if (tmp_path / pid).exists():
                os.kill(int((tmp_path / pid).read_text()), signal.SIGTERM)


def wait_until(holds: Callable[[], object], file: Path) -> None:
    deadline = time.monotonic() + 2 * LIMIT
    while not holds():
        assert time.monotonic() < deadline, file.read_text() if file.exists() else "the job has not begun"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_job_saves_before_its_time_is_up_and_goes_on(slurm: dict[str, str], tmp_path: Path):
    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, env=slurm, check=True, capture_output=True, text=True).stdout

    (tmp_path / "fastsync").write_text(f'#!/bin/sh\nexec {sys.executable} -m fastsync.cli "$@"\n')
    (tmp_path / "fastsync").chmod(0o755)
    job = Slurm(nproc=2, setup=f"export PATH={tmp_path}:$PATH PYTHONPATH={ROOT}", settings=Settings(total_steps=10**9))
    (tmp_path / "job.sbatch").write_text(slurm_script(job))
    number = run("sbatch", "--parsable", "job.sbatch").strip()
    said = tmp_path / f"fastsync-{number}.out"
    wait_until(lambda: said.exists() and "step " in said.read_text(), said)
    run("scancel", "--batch", "--signal=USR1", number)  # as Slurm does when the time is nearly up
    wait_until(lambda: "the job goes back into the queue" in said.read_text(), said)
    assert "Traceback" not in said.read_text()
    wait_until(lambda: "JobState=PENDING" in run("scontrol", "show", "job", number), said)
    run("scontrol", "update", f"jobid={number}", "starttime=now")  # not in two minutes
    wait_until(lambda: "going on from step" in said.read_text(), said)
    run("scancel", "--batch", "--signal=TERM", number)
    wait_until(lambda: "JobState=FAILED" in run("scontrol", "show", "job", number), said)
    assert said.read_text().count("stopped by SIG") == 2

"""A Slurm of two nodes, both this machine: srun starts the ranks, and sbatch the file of ``fastsync launch``."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.forked import until
from tests.ppo.test_launch_torchrun import ROOT, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=127.0.0.3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=main Nodes=ALL Default=YES State=UP
"""
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from fastsync.distributed import dist_sum, process_group
with process_group(timeout=60):
    total = int(dist_sum(torch.ones(1)))
    print("rank", dist.get_rank(), "local", os.environ["LOCAL_RANK"], "sum", total, *sys.argv[1:], flush=True)
"""

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.skipif(
        missing := [name for name in PROGRAMS if not shutil.which(name)], reason=f"no Slurm here: {missing}"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmctld and slurmd start as root"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment by which commands find it."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as daemons:
        folder, host = Path(name), socket.gethostname()
        folder.chmod(0o755)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        (folder / "state").mkdir()
        file = folder / "slurm.conf"
        file.write_text(CONFIGURATION.format(folder=folder, host=host, ports=[free_port() for _ in range(3)]))

        def start(*command: str) -> None:
            log = (folder / f"{command[0]}{len(list(folder.iterdir()))}.log").open("w")
            process = subprocess.Popen(command, stdout=log, stderr=log)
            daemons.callback(lambda: (process.terminate(), process.wait(30), log.close()))

        own = [f"--{kind}-file={folder}/munge.{end}" for kind, end in (("key", "key"), ("pid", "pid"), ("log", "log"))]
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *own, f"--seed-file={folder}/seed")
        until(lambda: (folder / "munge.sock").exists(), "the start of munged", 30)
        start("slurmctld", "-D", "-f", str(file))
        for node in ("127.0.0.2", "127.0.0.3"):  # names that lead to this machine everywhere
            start("slurmd", "-D", "-N", node, "-f", str(file))
        of_a_step = {name for name in os.environ if name.startswith(("SLURM_", "PMI"))}
        environment = {name: value for name, value in os.environ.items() if name not in of_a_step}
        environment |= {"SLURM_CONF": str(file), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}

        def idle() -> bool:
            said = subprocess.run(
                ["sinfo", "-h", "-o", "%t %D"], env=environment, capture_output=True, text=True, check=False
            )
            return said.stdout == "idle 2\n"

        until(idle, "the start of Slurm's nodes", 60)
        yield environment


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*command: str | Path, folder: Path, slurm: dict[str, str]) -> str:
    said = subprocess.run(
        list(map(str, command)), cwd=folder, env=slurm, capture_output=True, text=True, timeout=200, check=False
    )
    assert said.returncode == 0, said.stdout + said.stderr + "".join(file.read_text() for file in folder.glob("*.out"))
    return said.stdout


def ranks(said: str) -> list[str]:
    return sorted(line for line in said.splitlines() if line.startswith("rank"))


def test_srun_starts_the_ranks_of_two_nodes(slurm: dict[str, str], script: Path) -> None:
    said = run("srun", "-N2", "-n", "3", sys.executable, script, "mine", folder=script.parent, slurm=slurm)
    assert ranks(said) == [f"rank {rank} local {rank % 2} sum 3 mine" for rank in range(3)]


def test_a_batch_script_trains_on_two_nodes_without_the_environment_of_sbatch(
    slurm: dict[str, str], script: Path
) -> None:
    folder = script.parent
    fastsync = (sys.executable, "-m", "fastsync.cli")
    setup = ["--setup", f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT} CUDA_VISIBLE_DEVICES="]
    run(*fastsync, "launch", "slurm", "--nodes", "2", *setup, "--", "train.py", "it's", folder=folder, slurm=slurm)
    run("sbatch", "--export=NONE", "--wait", "train.sbatch", folder=folder, slurm=slurm)
    (file,) = folder.glob("fastsync-*.out")
    assert ranks(file.read_text()) == [f"rank {rank} local 0 sum 2 it's" for rank in range(2)]

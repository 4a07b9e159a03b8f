"""Which rank a process is, by the variables of torchrun, Slurm and MPI. Those of PALS and of bare PMI are read only in
their documentation; the others were seen in real processes.

``tests/ppo/test_launch_real_slurm.py`` has a Slurm that runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastsync import cli
from fastsync.distributed import _backend_for, dist_sum, process_group
from fastsync.launch.environment import Rank, first_host, this_rank
from tests.ranks import on_ranks
from tests.refused import refused

ROOT = Path(__file__).parents[2]
LAUNCHERS = r"RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|SLURM.*|OMPI_.*|PMIX?_.*|MPI_LOCAL.*|(PALS|MV2|FLUX|JSM)_.*"


Variables = dict[str, object]
SetOnly = Callable[[Variables], None]


def slurm(rank: int, size: int = 2, *, nodes: str = "here", tasks: str = "2", **more: object) -> Variables:
    """What a task of a job's first step sees."""
    step = {"STEP_ID": 0, "STEP_NUM_TASKS": size, "STEP_NODELIST": nodes, "STEP_TASKS_PER_NODE": tasks}
    task = {"JOB_ID": 7, "PROCID": rank, "LOCALID": rank, "NODEID": 0, "NTASKS": size}
    return {f"SLURM_{name}": value for name, value in (step | task | more).items()}


def open_mpi(rank: int, size: int = 2, local_size: int = 2, **more: object) -> Variables:
    own = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % local_size, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in own.items()} | {"PMIX_RANK": rank, **more}


def hydra(rank: int, size: int = 2, local_size: int = 2) -> Variables:
    local = {"MPI_LOCALRANKID": rank % local_size, "MPI_LOCALNRANKS": local_size}
    return {"PMI_RANK": rank, "PMI_SIZE": size} | local


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> SetOnly:
    """Sets variables, and no others of a launcher."""

    def set_them(variables: Variables) -> None:
        for name in filter(re.compile(LAUNCHERS).fullmatch, list(os.environ)):
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_them


TORCHRUN = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Rank()),
        (TORCHRUN, Rank("torchrun", 3, 4, 1, 2)),
        (TORCHRUN | slurm(0), Rank("torchrun", 3, 4, 1, 2)),  # torchrun in a task of srun's
        ({"RANK": 0, "WORLD_SIZE": 1}, Rank("torchrun", 0, 1, None, None)),
        (slurm(1), Rank("Slurm", 1, 2, 1, 2, "here", 20007)),
        (
            slurm(
                5,
                8,
                nodes="n[08-09],login",
                tasks="2(x2),4",
                LOCALID=1,
                NODEID=2,
                JOB_ID=40123,
                STEP_ID=2,
                GPUS_ON_NODE=4,
            ),
            Rank("Slurm", 5, 8, 1, 4, "n08", 20000 + (40123 + 2018) % 12000, 4),
        ),
        # --distribution=arbitrary
        (slurm(0, nodes="a,b", tasks="1,1", NODEID=1), Rank("Slurm", 0, 2, 0, 1, None, 20007)),
        ({name: value for name, value in slurm(0).items() if "STEP" not in name}, Rank()),  # a batch script
        (slurm(0) | {"SLURM_STEP_NUM_TASKS": 1, "SLURM_NTASKS": 4}, Rank()),  # salloc's shell on a node
        (slurm(0, 1, tasks="1"), Rank()),  # srun --pty bash
        (open_mpi(3, 4), Rank("Open MPI", 3, 4, 1, 2)),
        (open_mpi(1, 2) | slurm(0, tasks="1,1", nodes="a,b"), Rank("Open MPI", 1, 2, 1, 2)),  # its daemons are tasks
        (open_mpi(1, 2, PMIX_NAMESPACE="1267531777"), Rank("Open MPI", 1, 2, 1, 2, port=20096)),
        (open_mpi(0, 1, 1), Rank()),
        (hydra(1), Rank("MPI's Hydra", 1, 2, 1, 2)),
        (slurm(1) | {"PMI_RANK": 1, "PMI_SIZE": 2}, Rank("Slurm", 1, 2, 1, 2, "here", 20007)),  # srun --mpi=pmi2
        (slurm(1) | {"PMIX_RANK": 1}, Rank("Slurm", 1, 2, 1, 2, "here", 20007)),  # srun --mpi=pmix
        # srun that tells all that PALS does
        (
            slurm(1) | {"PMI_RANK": 1, "PMI_SIZE": 2, "PMI_LOCAL_RANK": 1, "PMI_LOCAL_SIZE": 2},
            Rank("Slurm", 1, 2, 1, 2, "here", 20007),
        ),
        ({"PMI_RANK": 1, "PMI_SIZE": 2}, Rank("PMI", 1, 2, None, None)),
    ],
)
def test_a_rank_is_what_its_launcher_says(only: SetOnly, variables: Variables, expected: Rank) -> None:
    only(variables)
    assert this_rank() == expected


def test_launchers_that_do_not_say_enough_are_refused(only: SetOnly) -> None:
    only({"PMIX_RANK": 1})
    refused(lambda: this_rank(), "PMIX_RANK=1 is set,")
    for variables, way_out in (
        (open_mpi(0, 4), "Open MPI does not .*: mpirun -x MASTER_ADDR=HOST"),
        (hydra(0, 4), "Hydra does not .*: mpiexec -genv MASTER_ADDR HOST"),
        (slurm(0, nodes="a,b", tasks="1,1", NODEID=1), "Slurm does not .*: export MASTER_ADDR=HOST"),
    ):
        only(variables)
        with pytest.raises(RuntimeError, match=f"^MASTER_ADDR is missing: .*{way_out}"), process_group(timeout=1):
            pass


def test_the_variables_of_torchrun_are_set_inside_the_block_only(only: SetOnly) -> None:
    only(slurm(2, 4, nodes="n[1-2]", tasks="2,2", LOCALID=0, NODEID=1) | {"MASTER_PORT": 1234})
    before = dict(os.environ)
    with this_rank().variables():
        place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        assert (place, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (["2", "4", "0", "2"], "n1", "1234")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[01-04,07]", "node01"),
        ("a,b", "a"),
        ("rack[0-1]node[08-15,17],login1", "rack0node08"),
        ("gpu[3,5].cluster,x", "gpu3.cluster"),
        ("node-a-[1]", "node-a-1"),
    ],
)
def test_the_first_host_of_slurms_lists(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
    if shutil.which("scontrol"):
        found = subprocess.run(["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, check=False)
        assert found.returncode or found.stdout.splitlines()[0] == first


@on_ranks(2)
@pytest.mark.parametrize("launcher", ["slurm", "open_mpi", "hydra"])
def test_ranks_meet_by_the_variables_of_a_launcher(rank: int, world_size: int, launcher: str, port: int) -> None:
    """Twice, the second time while rank 0 still holds the first group."""
    dist.destroy_process_group()
    variables = {"slurm": slurm, "open_mpi": open_mpi, "hydra": hydra}[launcher](rank)
    os.environ.update({name: str(value) for name, value in (variables | {"MASTER_PORT": port}).items()})
    for _ in range(2):
        with process_group(timeout=60) as device:
            assert (dist.get_rank(), dist.get_world_size(), device.type) == (rank, world_size, "cpu")
            assert dist_sum(torch.ones(1)).item() == 2
            assert (os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]) == (str(rank), "localhost")
        assert "RANK" not in os.environ


@on_ranks(1)
def test_a_rank_whose_peers_do_not_come_says_by_whose_variables_it_waits(rank: int, world_size: int, port: int) -> None:
    dist.destroy_process_group()
    os.environ.update({name: str(value) for name, value in (slurm(0) | {"MASTER_PORT": port}).items()})
    message = rf"^rank 0 of 2, by the variables of Slurm, did not meet the others at localhost:{port} within 1 s: .*"
    with pytest.raises(RuntimeError, match=message), process_group(timeout=1.0):
        pass


@pytest.mark.parametrize(
    ("shell", "is_alone"), [(["bash"], True), (["bash", "-i"], True), (["bash", "-c", "cat; cat"], False)]
)
def test_a_shell_of_several_tasks_is_alone(only: SetOnly, shell: list[str], is_alone: bool) -> None:
    """srun -n 4 --pty bash: only the first task has a terminal."""
    with subprocess.Popen(shell, stdin=subprocess.PIPE) as task:
        while not Path(f"/proc/{task.pid}/cmdline").read_bytes():  # Linux shows it a moment after the start
            time.sleep(0.01)
        only(slurm(0, 4, tasks="4", TASK_PID=task.pid))
        assert this_rank().world_size == (1 if is_alone else 4)


def test_a_slurm_job_without_srun_is_told_that_it_trains_alone(only: SetOnly) -> None:
    only({"SLURM_JOB_ID": 7, "SLURM_PROCID": 0, "SLURM_NTASKS": 8})
    message = "trains alone, in a Slurm job of 8 tasks .* Put srun before"
    with pytest.warns(UserWarning, match=message) as told, process_group(timeout=10, backend="gloo"):
        pass
    assert told[0].filename == __file__


def test_nccl_is_chosen_where_slurm_shows_each_rank_its_own_gpu(only: SetOnly, monkeypatch: pytest.MonkeyPatch) -> None:
    only(slurm(1, GPUS_ON_NODE=2))
    assert _backend_for(1, this_rank()) == "nccl"
    only(slurm(1, GPUS_ON_NODE=1))
    with pytest.warns(UserWarning, match="rank 0 sees 1 GPU"):
        assert _backend_for(1, this_rank()) == "fastsync"


def test_fastsync_train_starts_ranks_once(only: SetOnly, capsys: pytest.CaptureFixture[str]) -> None:
    only(slurm(0))
    assert cli.main(["train", "--env", "CartPole-v1"]) == 2
    assert "Slurm has started 2 of these commands" in capsys.readouterr().err


@pytest.mark.end_to_end
@pytest.mark.parametrize("command", ["mpirun.openmpi --allow-run-as-root --oversubscribe", "mpiexec.hydra"])
def test_mpi_starts_ranks(command: str, only: SetOnly, tmp_path: Path) -> None:
    program, *options = command.split()
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    only({})
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\nfrom pathlib import Path\n"
        "from fastsync.distributed import dist_sum, process_group\n"
        f"with process_group(timeout=60): Path({str(tmp_path)!r}, 'rank' + str(dist.get_rank())).write_text("
        "str(dist_sum(torch.ones(1)).item()))\n"
    )
    said = subprocess.run(
        [program, *options, "-n", "2", sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True,
        timeout=150, check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    sums = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert sums == {"rank0": "2.0", "rank1": "2.0"}, said.stdout + said.stderr

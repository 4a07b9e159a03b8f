"""The files for Kubernetes and SkyPilot: what they ask for, by the tools' own schemas, and that their commands run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args as torchrun_arguments

from fastsync.cli import main
from fastsync.launch.environment import threads_of_rank
from fastsync.launch.jobs import KINDS, Kubernetes, SkyPilot, content
from fastsync.launch.script import Script
from fastsync.ppo.cli import Arguments, parse
from fastsync.ppo.evaluate import find_checkpoint
from tests.ppo.test_launch_torchrun import ROOT, free_port
from tests.refused import refused
from tests.tools.test_docs import faults

pytestmark = pytest.mark.end_to_end

TINY = ("--total-steps", "1000", "--num-envs", "4", "--compression", "int8+ef")


def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """What ``fastsync launch`` writes."""
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 0
    (file,) = tmp_path.glob("*.yaml")
    content: dict[str, Any] = yaml.safe_load(file.read_text())
    return content


def test_a_train_job_is_what_kubeflow_says_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="make test-trainers has an environment with it")
    job = launch(
        tmp_path, monkeypatch, "kubernetes", "--image", "registry/mine", "--nodes", "2", "--nproc", "8",
        "--gpus-per-node", "8", "--memory", "64Gi", "--claim", "disk",
    )  # fmt: skip
    model = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert model is not None
    # What the schema does not know, the model leaves out.
    assert model.to_dict() == job
    spec = job["spec"]
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (2, 8)
    assert spec["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8, "memory": "64Gi"}
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]] == ["/dev/shm", "/runs"]
    assert "--runs-dir /runs --run-name fastsync --resume auto" in " ".join(spec["trainer"]["command"])


def test_the_command_of_a_train_job_trains_on_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both are this machine."""
    job = launch(tmp_path, monkeypatch, "kubernetes", "--image", "mine", "--nodes", "2", "--name", "mine", *TINY)
    trainer = job["spec"]["trainer"]
    # What Kubeflow sets in a pod.
    sets = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"]}
    sets |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    environment |= {f"PET_{name}": str(value) for name, value in sets.items()}

    def pod(rank: int) -> subprocess.Popen[str]:
        own = environment | {"PET_NODE_RANK": str(rank)}
        return subprocess.Popen(trainer["command"], cwd=tmp_path, env=own, stdout=subprocess.PIPE, text=True)

    pods = [pod(rank) for rank in range(2)]
    try:
        said = [each.communicate(timeout=150)[0] for each in pods]
    finally:
        for each in pods:
            each.terminate()  # torchrun ends its ranks
            each.wait(60)
    assert [each.returncode for each in pods] == [0, 0], said
    # The title stands over the table, once: the ranks have compared their weights before, and one of them prints.
    assert said[0].count("on 2 ranks, compression int8+ef") == 1
    assert "written to runs/mine" in said[0].splitlines()
    assert find_checkpoint(tmp_path / "runs" / "mine", newest=True)[1].step >= 1000


def test_a_task_of_skypilot_asks_for_what_was_said_and_starts_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = launch(
        tmp_path, monkeypatch, "skypilot", "--nodes", "2", "--nproc", "3", "--name", "mine",
        "--setup", "pip install here\npip list", *TINY,
    )  # fmt: skip
    assert list(task) == ["name", "num_nodes", "resources", "setup", "run"]
    assert (task["name"], task["num_nodes"], task["resources"]) == ("mine", 2, {"cpus": "3+"})
    assert task["setup"] == "pip install here\npip list\n"
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    # What SkyPilot sets on a machine.
    sets = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    environment = os.environ | sets | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    printed = subprocess.run(["bash", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True)
    asked = torchrun_arguments(printed.stdout.split("\0")[:-1])
    assert (asked.nnodes, asked.node_rank, asked.nproc_per_node) == ("2", 1, "3")
    assert (asked.master_addr, asked.master_port) == ("10.0.0.1", 29500)
    assert (asked.module, asked.training_script) == (True, "fastsync.ppo")
    settings = parse(Arguments, "test", asked.training_script_args).settings
    assert (settings.total_steps, settings.compression, settings.run_name) == (1000, "int8+ef", "mine")
    assert settings.resume == "auto"


@pytest.mark.parametrize(
    "words",
    [["--nproc-per-node", "8", "--", "train.py"], ["--nproc_per_node=8", "--", "train.py"], ["--nproc-per-node", "8"]],
)
def test_torchruns_name_of_an_option_is_understood(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    job = launch(tmp_path, monkeypatch, "kubernetes", "--image", "mine", *words)
    assert job["spec"]["trainer"]["numProcPerNode"] == 8


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["launch", "slurm", "--file", "jobs/train.sbatch", "--", "train.py"]) == 2
    assert "file='jobs/train.sbatch' cannot be written: No such file or directory" in capsys.readouterr().err


def test_scripts_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    assert launch(tmp_path, monkeypatch, "skypilot", "--env", "my_env:MyEnv")["workdir"] == "."
    (tmp_path / "sky.yaml").unlink()
    script = ("--", "train.py", "--lr", "it's")
    task = launch(tmp_path, monkeypatch, "skypilot", "--nproc", "8", "--accelerators", "H100:8", *script)
    assert (task["workdir"], task["resources"]) == (".", {"cpus": "8+", "accelerators": "H100:8"})
    assert shlex.split(task["run"])[-3:] == ["train.py", "--lr", "it's"]
    assert task["setup"].splitlines()[-1] == "python -c 'import fastsync'"  # which fails where nobody installed it
    (tmp_path / "sky.yaml").unlink()
    job = launch(tmp_path, monkeypatch, "kubernetes", "--image", "mine", "--", "-m", "mypackage.train", "--lr", "1")
    assert job["spec"]["trainer"]["command"] == ["torchrun", "-m", "mypackage.train", "--lr", "1"]


def test_help_shows_the_kinds_and_the_form_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {kind:<10}  " in told for kind in KINDS)
    assert "fastsync launch slurm --nodes 2 --nproc 8 -- train.py --lr 0.1\n" in told
    assert max(map(len, told.splitlines())) <= 80
    assert faults(told) == []
    assert main(["launch"]) == 2
    assert capsys.readouterr().err == told


def test_skypilot_reads_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sky = pytest.importorskip("sky", reason="make test-trainers has an environment with SkyPilot")
    launch(
        tmp_path, monkeypatch, "skypilot", "--nodes", "2", "--nproc", "8", "--name", "mine",
        "--setup", "pip install here", *TINY,
    )  # fmt: skip
    task = sky.Task.from_yaml(str(tmp_path / "sky.yaml"))  # refuses what its schema does not know
    assert (task.name, task.num_nodes, task.setup) == ("mine", 2, "pip install here\n")
    assert "-m fastsync.ppo" in task.run


def test_what_an_option_is_given_is_no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for number, setup in enumerate((["--setup", "source env.sh; python prep.py"], ["--setup=python prep.py"])):
        assert main(["launch", "slurm", *setup, "--file", f"job{number}.py", "--", "train.py"]) == 0
        assert setup[-1].removeprefix("--setup=") in (tmp_path / f"job{number}.py").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kubernetes"], "image is missing: say which container image"),
        (["slurm", "--nodes", "0"], "nodes=0 must be at least 1"),
        (["skypilot", "--resume", "runs/mine"], "jobs always use resume=auto"),
        (["slurm", "--on-lost-rank", "continue"], "torchrun, which ends all ranks of a machine with a lost one"),
        (["slurm", "--nodse", "2"], "--nodse is no option of fastsync launch slurm; did you mean nodes?"),
        (
            ["slurm", "--partition", "a", "--time=1", "--nodes", "2", "--", "x.py"],
            "sbatch --partition a --time=1 train.sb",
        ),
        (["slurm", "--account", "me", "--env", "CartPole-v1"], "pass it there: sbatch --account me train.sbatch."),
        (["slurm", "train.py", "--lr", "1"], "put -- before your own script: fastsync launch slurm -- train.py --lr 1"),
        (["--", "train.py"], "one of slurm, kubernetes, skypilot comes first"),
        (["slurm", "--"], "nothing stands behind --"),
        (["slurm", "--", "python3", "train.py"], "leave 'python3' out"),
        (["slurm", "--", "--nproc", "2", "train.py"], "'--nproc' stands behind --, where a script comes first"),
        (["slurm", "--", "-"], "'-' stands for a pipe, which can be read only once"),
        (["slurm", "x.py", "--lr", "1", "--file", "a.sh", "--nodes=2"], "slurm --file a.sh --nodes=2 -- x.py --lr 1"),
        (
            ["slurm", "--file", "a.sh", "--env", "CartPol", "--", "x.py"],
            "settings of the trainer do not go with a script",
        ),
        (["slurm", "--file", "a.sh", "--mem=1G", "--", "x.py"], "fastsync launch slurm --file a.sh -- x.py --mem=1G"),
        (["slurm", "--replace", "--", "x.py"], "--replace is an option of fastsync launch local"),
        (["kubernetes", "--image", "i", "--name", "My Job", "--", "x.py"], "name='My Job': expected at most 63 small"),
        (["kubernetes", "--image", "i", "--memory", "lots"], "memory='lots': expected a quantity of Kubernetes"),
        (["skypilot", "--accelerators", "eight"], "accelerators='eight': expected a kind of GPU and a number"),
        (["skypilot", "--name", "My Job"], "name='My Job': expected letters and digits"),
        (["slurm", "--", "train.py"], "'train.py' is no file in this folder"),
        (["kubernets"], "'kubernets' is not one of local, slurm, kubernetes, skypilot; did you mean kubernetes?"),
    ],
)
def test_what_cannot_be_written_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fastsync launch: ")
    assert message in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Kubernetes, {"name": "a-1", "memory": "1.5Gi", "claim": "a.b-c"}),
        (Kubernetes, {"name": "a" * 63, "memory": "2e9", "gpus_per_node": 0}),
        *(
            (SkyPilot, {"accelerators": each})
            for each in ("A100", "H100:8", "T4:0.5", "tpu-v5e-8", "Trainium:1", "L4:24GB+")
        ),
        (SkyPilot, {"name": "My.Job--1"}),
    ],
)
def test_what_clusters_take_is_taken(kind: type[Kubernetes | SkyPilot], options: dict[str, Any]) -> None:
    kind(**options)


def test_arguments_with_lines_come_to_the_script_from_skypilots_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.py").write_text("")
    text = "one\n\n  two: 'x'\n# three\n"
    task = launch(tmp_path, monkeypatch, "skypilot", "--", "train.py", "--note", text)
    assert shlex.split(task["run"])[-3:] == ["train.py", "--note", text]


def test_arguments_that_yaml_cannot_hold_are_refused_for_skypilot():
    job = KINDS["skypilot"]()
    refused(lambda: content(job, Script(["-m", "mine", "--note", "a\rb"])), "which no block of YAML can hold")


def test_threads_are_those_that_omp_num_threads_asks_for(monkeypatch: pytest.MonkeyPatch):
    for value, threads in (("", None), (" ", None), ("4", 4), ("4,2", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert threads_of_rank() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    refused(lambda: threads_of_rank(), "OMP_NUM_THREADS='many'")

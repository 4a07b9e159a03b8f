"""Launching: real processes through torchrun's launcher, that are told to stop, killed, and started again."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from fastsync.distributed import dist_sum, process_group
from fastsync.launch.torchrun import launch_ranks, run_rank
from fastsync.ppo.__main__ import main as train_main
from fastsync.ppo.cli import Launch, launch
from fastsync.ppo.ppo import Settings
from tests.forked import Command, forked_ranks, state_of, until
from tests.ppo.launched import main
from tests.ranks import fresh_process_context
from tests.refused import refused

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).parents[2]
LIMIT = 60
"""Seconds after which a test gives up waiting."""


def rank_or_failure(failing: int) -> int:
    rank = int(os.environ["RANK"])
    if rank == failing:
        raise RuntimeError("as told")
    return rank


def test_it_returns_what_the_ranks_return_and_raises_if_one_does() -> None:
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in signals]
    with forked_ranks():
        assert launch_ranks(rank_or_failure, 2, -1) == [0, 1]
        with pytest.raises(ChildFailedError) as error:
            launch_ranks(rank_or_failure, 2, 1)
    assert error.value.get_first_failure()[0] == 1
    assert [signal.getsignal(number) for number in signals] == before


class Launched:
    """A launcher that runs. It and its ranks are forked."""

    def __init__(self, folder: Path, work: str, *words: str) -> None:
        self._folder = folder
        self.command = Command(main, folder, work, "--runs-dir", str(folder), *words)

    def waits_for(self, name: str) -> list[str]:
        """What a rank has said, once it did."""
        file = self._folder / name
        until(lambda: file.exists() or self.command.poll() is not None, f"the writing of {name}", LIMIT)
        assert file.exists(), f"ended with {self.command.poll()}: {self.command.err}"
        return file.read_text().split()

    def ends(self) -> tuple[int, str]:
        """Its exit status, and the last line that it wrote."""
        return self.command.wait(LIMIT), (self.command.err.strip().splitlines() or [""])[-1]


@contextmanager
def launched(folder: Path, *words: str, work: str = "until_told_to_stop") -> Iterator[Launched]:
    launcher = Launched(folder, work, *words)
    try:
        yield launcher
    finally:
        launcher.command.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("resume", [None, "auto"])
def test_the_way_to_go_on_is_that_of_the_run(
    resume: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def save_and_stop(work: object, nproc: int, settings: Settings, **options: object) -> list[str | None]:
        assert settings.resume == "auto"  # of ranks that are started again
        checkpoints = tmp_path / "runs" / "a b" / "checkpoints"
        checkpoints.mkdir(parents=True)
        (checkpoints / "step-000000002.pt").touch()
        return [None, "SIGTERM"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fastsync.ppo.cli.launch_ranks", save_and_stop)
    settings = Settings(resume=resume, run_name="a b")
    assert launch(Launch(nproc=2, max_restarts=1, settings=settings)) == 143
    command = shlex.split(capsys.readouterr().err.partition(" with: ")[2])
    config = ["--config", "runs/a b/settings.yaml", "--resume", "auto"]
    assert command == ["fastsync", "train", "--nproc", "2", "--max-restarts", "1", *config]


def hang_up() -> str:
    os.kill(os.getppid(), signal.SIGHUP)
    return "went on"


def launch_as_nohup_does(said: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    said.write_text(launch_ranks(hang_up, 1)[0])


def test_a_launch_ignores_what_nohup_ignores(tmp_path: Path):
    process = fresh_process_context().Process(target=launch_as_nohup_does, args=(tmp_path / "said",))
    process.start()
    process.join()
    assert (tmp_path / "said").read_text() == "went on"


def test_ranks_that_torchrun_starts_again_need_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    refused(lambda: train_main(["--env", "CartPole-v1"]), "2", kind=SystemExit)
    message = "torchrun starts the ranks again up to 3 times, and they find their run by its name: add --run-name NAME"
    assert message in capsys.readouterr().err


def test_a_rank_that_is_stopped_alone_stops_the_job(tmp_path: Path):
    with launched(tmp_path, "--nproc", "2", "--run-name", "mine", "--max-restarts", "1") as launcher:
        launcher.waits_for("attempt0-rank0")
        pid, world_size, name = launcher.waits_for("attempt0-rank1")
        os.kill(int(pid), signal.SIGUSR1)
        status, said = launcher.ends()
    assert (world_size, name) == ("2", "mine")
    assert status == 143
    # Both came to their own end, rather than being killed.
    assert launcher.waits_for("attempt0-end1") == ["SIGUSR1"]
    assert launcher.waits_for("attempt0-end0")
    assert said.startswith("fastsync train: stopped by SIGUSR1. ")
    assert said.endswith(f"--nproc 2 --max-restarts 1 --config {tmp_path}/mine/settings.yaml --resume auto")
    assert not (tmp_path / "attempt1-rank0").exists()


def test_a_lost_job_comes_back_under_its_name_until_the_rank_that_is_lost_is_named(tmp_path: Path):
    with launched(tmp_path, "--nproc", "2", "--max-restarts", "1") as launcher:
        *_, name = launcher.waits_for("attempt0-rank0")
        pid, *_ = launcher.waits_for("attempt0-rank1")
        os.kill(int(pid), signal.SIGKILL)
        again = [launcher.waits_for(f"attempt1-rank{rank}") for rank in range(2)]
        assert [words[1:] for words in again] == [["2", name]] * 2
        pid = again[1][0]
        os.kill(int(pid), signal.SIGKILL)
        status, said = launcher.ends()
    assert status == 1
    assert said.startswith("fastsync train: torchrun saw rank ")  # perhaps the other one, which says that this is lost
    assert f"Signal 9 (SIGKILL) received by PID {pid}" in launcher.command.err


@pytest.mark.parametrize(
    ("work", "number", "expected"),
    [
        ("deaf", signal.SIGTERM, 143),
        ("not_listening_yet", signal.SIGINT, 130),
    ],
)
def test_ranks_that_do_not_stop_are_ended(tmp_path: Path, work: str, number: signal.Signals, expected: int):
    with launched(tmp_path, "--stop-timeout", "1", work=work) as launcher:
        pid, _, name = launcher.waits_for("attempt0-rank0")
        os.kill(launcher.command.pid, number)
        status, said = launcher.ends()
    assert status == expected
    assert said == f"fastsync train: ended by {number.name} before {tmp_path / name} had a checkpoint"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_rank_that_does_not_end_beside_a_failed_one_is_named_and_killed(tmp_path: Path):
    """SIGTERM does not reach a process that SIGSTOP has stopped."""
    with launched(tmp_path, "--nproc", "2", work="beside_a_stopped_rank") as launcher:
        (pid,) = launcher.waits_for("attempt0-rank1")
        status, said = launcher.ends()
    assert status == 1
    stopped = f"rank 1 (process {pid}, which is stopped)"
    waits = f"fastsync train: rank 0 failed. In 4 s SIGKILL ends what still runs: {stopped}"
    assert waits in launcher.command.err.splitlines()
    assert said == f"fastsync train: SIGKILL ended {stopped}; torchrun saw rank 0 fail first: RuntimeError: as told"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_ctrl_c_ends_ranks_that_still_start_in_seconds(tmp_path: Path):
    """As a terminal sends it: to all processes. --timeout is no measure for it."""
    with launched(tmp_path, "--nproc", "2", "--timeout", "3600", work="in_the_rendezvous") as launcher:
        for rank in range(2):
            launcher.waits_for(f"attempt0-rank{rank}")
        time.sleep(0.5)
        os.killpg(launcher.command.pid, signal.SIGINT)
        status, line = launcher.ends()
    assert status == 130
    assert line.startswith("fastsync train: ended by SIGINT before ")
    assert line.endswith(" had a checkpoint")


def three_groups() -> list[float]:
    """One after the other."""
    sums = []
    for _ in range(3):
        with process_group(timeout=60, backend="gloo"):
            sums.append(dist_sum(torch.ones(1)).item())
    return sums


def test_groups_of_torchruns_ranks_follow_each_other() -> None:
    """They meet in one store, which still holds the addresses of the groups before."""
    with forked_ranks():
        assert launch_ranks(three_groups, 4) == [[4.0] * 3] * 4


def a_launcher_that_dies(folder: Path) -> None:
    multiprocessing.get_context("fork").Process(target=a_rank_that_begins_late, args=(folder,)).start()
    os.kill(os.getpid(), signal.SIGKILL)


def a_rank_that_begins_late(folder: Path) -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    (folder / str(os.getpid())).touch()
    launcher.join()
    run_rank((folder / "has worked").touch, ())


def test_a_rank_that_still_imports_when_its_launcher_dies_does_not_begin(tmp_path: Path) -> None:
    launcher = fresh_process_context().Process(target=a_launcher_that_dies, args=(tmp_path,))
    launcher.start()
    launcher.join()
    until(lambda: list(tmp_path.iterdir()), "the rank's beginning")
    until(lambda: not any(state_of(int(path.name)) for path in tmp_path.glob("[0-9]*")), "the rank's end")
    assert not (tmp_path / "has worked").exists()


FROM_STANDARD_INPUT = """
from fastsync.launch.torchrun import launch_ranks
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.ppo import Settings
from tests.ppo.test_launch_torchrun import rank_or_failure

def own():
    pass

settings = Settings(env="tests.toy_envs:Countdown", num_envs=2, num_steps=4, num_minibatches=1, vectorization="async")
with make_environments(settings, rank=0) as environments:
    print(environments.reset().shape)
print(launch_ranks(rank_or_failure, 1, -1))
launch_ranks(own, 1)
"""


def test_a_script_from_standard_input_starts_processes(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-"], input=FROM_STANDARD_INPUT, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.stdout.splitlines() == ["(2, 3)", "[0]"], ran.stderr
    assert "ValueError: own is defined in <stdin>, which is no file" in ran.stderr

"""Run folders: new ones, those that a run goes on in, who is kept out, and what is said about what changed."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from filelock import FileLock

from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.checkpoints import CheckpointFolder
from fastsync.ppo.runs.folder import CHECKPOINTS, Opened, changes, check_run, default_run_name, locked, open_run
from fastsync.ppo.settings import load_settings
from tests.ppo.test_runs_checkpoints import make_checkpoint
from tests.ranks import fresh_process_context
from tests.refused import refused


def opened(settings: Settings, world_size: int = 2) -> Opened:
    with open_run(settings, world_size) as run:
        return run


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(runs_dir=str(tmp_path), seed=3)


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint = make_checkpoint(step, settings=Settings(seed=3).as_dict())
        CheckpointFolder(folder / CHECKPOINTS, keep=9).save(checkpoint, float(step))


def test_a_new_run_has_a_folder_of_its_own_with_its_settings(settings: Settings, tmp_path: Path):
    folder, checkpoint, notes = opened(settings)
    assert folder.parent == tmp_path
    assert folder.name.startswith("CartPole-v1-none-3-20")
    assert (checkpoint, notes) == (None, [])
    # With its name, so that one can go on with this file.
    assert load_settings(str(folder / "settings.yaml"), Settings) == replace(settings, run_name=folder.name)
    named = replace(settings, run_name="mine")
    (tmp_path / "mine").mkdir()
    refused(lambda: opened(named), "mine exists already; choose another run_name")
    assert list((tmp_path / "mine").iterdir()) == []


def test_auto_begins_and_then_goes_on(settings: Settings, tmp_path: Path):
    auto = replace(settings, resume="auto")
    folder, checkpoint, notes = opened(auto)
    assert (folder, checkpoint, notes) == (tmp_path / "CartPole-v1-none-3", None, [])
    again = opened(auto)  # it stopped before its first checkpoint
    assert again == (folder, None, [f"{folder} has no checkpoint to resume from: the run begins anew"])
    save(folder, 10, 20)
    folder, checkpoint, notes = opened(auto)
    assert checkpoint is not None
    assert checkpoint.step == 20
    assert notes == [f"resuming from step 20 ({folder / CHECKPOINTS / 'step-000000020.pt'})"]
    # Whoever begins another run with this file does not mean to go on with this one.
    assert load_settings(str(folder / "settings.yaml"), Settings).resume is None


def test_auto_does_not_begin_anew_over_damaged_ones(settings: Settings, tmp_path: Path):
    save(tmp_path / "run", 10)
    (tmp_path / "run" / CHECKPOINTS / "step-000000010.pt").write_bytes(b"half")
    auto = replace(settings, resume="auto", run_name="run")
    refused(lambda: opened(auto), "none of the 1 checkpoints", kind=RuntimeError)
    refused(lambda: check_run(auto, 2), "resume='auto': none of the 1 checkpoints")


def test_a_checkpoint_begins_a_run_of_its_own(settings: Settings, tmp_path: Path):
    save(tmp_path / "run", 10, 20)
    file = tmp_path / "run" / CHECKPOINTS / "step-000000010.pt"
    before = everything(tmp_path / "run")
    folder, checkpoint, notes = opened(replace(settings, resume=str(file), run_name="new"))
    assert folder == tmp_path / "new"
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert notes == [f"resuming from step 10 ({file})"]
    assert everything(tmp_path / "run") == before


def test_ranks_that_were_started_again_go_on_in_the_run_that_they_began(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path / "old", 10)
    file = tmp_path / "old" / CHECKPOINTS / "step-000000010.pt"
    new = replace(settings, resume=str(file), run_name="new")
    assert opened(new)[1].step == 10  # type: ignore[union-attr]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert opened(new)[1].step == 10  # type: ignore[union-attr]  # lost before their first checkpoint
    save(tmp_path / "new", 20)
    assert opened(new)[1].step == 20  # type: ignore[union-attr]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    refused(lambda: opened(new), "new exists already")


def test_a_refused_resume_changes_nothing(settings: Settings, tmp_path: Path):
    run = tmp_path / "run"
    opened(replace(settings, run_name="run"))
    save(run, 10, 20)
    before = everything(tmp_path)
    file = str(run / CHECKPOINTS / "step-000000010.pt")
    for resume, name in (("auto", "run"), (file, "new")):
        other = replace(settings, hidden_sizes=(8,), resume=resume, run_name=name)
        for enter in (opened, check_run):
            refused(lambda: enter(other, 2), "hidden_sizes=(8,) cannot resume")
        check_run(replace(other, hidden_sizes=(64, 64)), 2)
    assert everything(tmp_path) == before


def hold_a_run(settings: Settings, said: Connection) -> None:
    os.setsid()
    with open_run(settings, 1):
        said.send("open")
        signal.pause()


@contextmanager
def a_run_that_is_alive(settings: Settings) -> Iterator[BaseProcess]:
    """``open_run`` by another process."""
    context = fresh_process_context()
    said, saying = context.Pipe(duplex=False)
    process = context.Process(target=hold_a_run, args=(settings, saying))
    process.start()
    try:
        assert said.recv() == "open"
        yield process
    finally:
        process.kill()
        process.join()


def test_a_run_that_is_alive_is_left_alone(settings: Settings, tmp_path: Path):
    auto = replace(settings, run_name="run", resume="auto")
    with a_run_that_is_alive(auto) as process:
        save(tmp_path / "run", 10, 20)
        before = everything(tmp_path)
        for enter in (opened, check_run):
            refused(lambda: enter(replace(auto, learning_rate=0.5), 1), "run is in use: another process trains there;")
        assert everything(tmp_path) == before
        process.kill()
        process.join()
        checkpoint = opened(auto)[1]
        assert checkpoint is not None
        assert checkpoint.step == 20


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def acquire(lock: FileLock) -> None:
        assert not getattr(lock, "fallback_to_soft", False)  # its marker would outlive a killed process
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.warns(UserWarning, match="cannot be locked: make sure that no other process trains"), locked(tmp_path):
        pass


def test_runs_that_are_started_within_a_second_have_different_names():
    name = default_run_name(Settings(), 1e9)
    assert name.endswith(f"-{os.getpid()}")
    assert default_run_name(Settings(), None) == "CartPole-v1-none-1"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_changes_are_told_and_another_environment_is_refused():
    checkpoint = make_checkpoint(1, settings=Settings().as_dict())
    assert changes(checkpoint, Settings(resume="auto", run_name="x", runs_dir="y"), 2) == []
    assert changes(checkpoint, Settings(learning_rate=0.5, total_steps=7), 4) == [
        "the world size is 4 from here on, it was 2",
        "learning_rate is 0.5 from here on, it was 0.00025",
        "total_steps is 7 from here on, it was 500000",
    ]
    refused(lambda: changes(checkpoint, Settings(env="Acrobot-v1"), 2), "env='Acrobot-v1' cannot resume a run with")


@pytest.mark.parametrize("name", ["../x", ".", "/x", "a/../../x"])
def test_a_run_stays_in_its_runs_dir(tmp_path: Path, name: str):
    settings = Settings(runs_dir=str(tmp_path / "runs"), run_name=name)
    for enter in (opened, check_run):
        refused(lambda: enter(settings, 1), "' is not inside runs_dir='")
    assert list(tmp_path.iterdir()) == []

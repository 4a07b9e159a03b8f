"""Run folders: new ones, those that a run goes on in, and what is said about what changed."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastsync.ppo.ppo import Settings
from fastsync.ppo.preflight import check_run
from fastsync.ppo.runs import folder as run_folder
from fastsync.ppo.runs.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint
from fastsync.ppo.runs.folder import (
    CHECKPOINTS,
    changes,
    check_room,
    close_run,
    default_run_name,
    find_run,
    open_run,
    settings_of_run,
)
from fastsync.ppo.settings import load_settings
from tests.ppo.test_runs_checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(runs_dir=str(tmp_path), seed=3)


def checkpoint_at(step: int) -> Checkpoint:
    return make_checkpoint(step, settings=Settings(seed=3).as_dict())


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        CheckpointFolder(folder / CHECKPOINTS, keep=9).save(checkpoint_at(step), float(step))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / CHECKPOINTS).iterdir())


def test_names_tell_what_runs():
    settings = Settings(env="ALE/Pong-v5", compression="fp16", seed=7)
    assert default_run_name(settings, None) == "ALE-Pong-v5-fp16-7"
    assert default_run_name(settings, 0.0).startswith("ALE-Pong-v5-fp16-7-19")
    assert default_run_name(Settings(env="a.b:make"), None) == "a.b-make-none-1"


def test_a_new_run_has_a_folder_of_its_own_with_its_settings(settings: Settings, tmp_path: Path):
    folder, checkpoint, notes = open_run(settings, 2)
    assert folder.parent == tmp_path
    assert folder.name.startswith("CartPole-v1-none-3-20")
    assert (checkpoint, notes) == (None, [])
    assert load_settings(str(folder / "settings.yaml"), Settings) == settings
    named = replace(settings, run_name="mine")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match=r"mine exists already; choose another run_name.*resume='auto'"):
        open_run(named, 2)
    assert list((tmp_path / "mine").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder.name, "mine"])


def test_auto_begins_and_then_goes_on(settings: Settings, tmp_path: Path):
    auto = replace(settings, resume="auto")
    folder, checkpoint, notes = open_run(auto, 2)
    assert (folder, checkpoint, notes) == (tmp_path / "CartPole-v1-none-3", None, [])
    assert open_run(auto, 2)[1] is None  # it stopped before its first checkpoint
    save(folder, 10, 20)
    folder, checkpoint, notes = open_run(auto, 2)
    assert checkpoint is not None
    assert checkpoint.step == 20
    assert notes == [f"going on from step 20 ({folder / CHECKPOINTS / 'step-000000020.pt'})"]
    # Whoever begins another run with this file does not mean to go on with this one.
    assert load_settings(str(folder / "settings.yaml"), Settings).resume is None
    other = open_run(replace(auto, run_name="other"), 2)
    assert (other[0], other[1]) == (tmp_path / "other", None)


def test_auto_passes_over_damaged_checkpoints(settings: Settings, tmp_path: Path):
    auto = replace(settings, resume="auto", run_name="run")
    save(tmp_path / "run", 10, 20)
    damaged = tmp_path / "run" / CHECKPOINTS / "step-000000020.pt"
    damaged.write_bytes(b"half")
    _, checkpoint, notes = open_run(auto, 2)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert "step-000000020.pt is damaged" in notes[0]
    assert "going on from step 10" in notes[1]
    assert "step-000000020.pt.set-aside" in notes[2]
    # It is not in the way of what the run saves when it comes to that step again.
    save(tmp_path / "run", 20)
    assert open_run(auto, 2)[1].step == 20  # type: ignore[union-attr]


def test_auto_does_not_begin_anew_over_damaged_ones(settings: Settings, tmp_path: Path):
    save(tmp_path / "run", 10)
    (tmp_path / "run" / CHECKPOINTS / "step-000000010.pt").write_bytes(b"half")
    with pytest.raises(RuntimeError, match=r"(?s)none of the 1 checkpoints.*step-000000010.pt is damaged"):
        open_run(replace(settings, resume="auto", run_name="run"), 2)


@pytest.mark.parametrize("inside", ["", CHECKPOINTS])
def test_a_folder_goes_on_from_its_newest(settings: Settings, tmp_path: Path, inside: str):
    save(tmp_path / "elsewhere" / "run", 10, 20)
    folder, checkpoint, _ = open_run(replace(settings, resume=str(tmp_path / "elsewhere" / "run" / inside)), 2)
    assert folder == tmp_path / "elsewhere" / "run"
    assert checkpoint is not None
    assert checkpoint.step == 20


@pytest.mark.parametrize("name", ["step-000000010.pt", "best-000000010.pt"])
def test_a_file_goes_on_from_there_and_later_ones_are_set_aside(settings: Settings, tmp_path: Path, name: str):
    run = tmp_path / "run"
    save(run, 10)
    for step in (20, 30):
        CheckpointFolder(run / CHECKPOINTS, keep=9).save(checkpoint_at(step), 0.0)
    folder, checkpoint, notes = open_run(replace(settings, resume=str(run / CHECKPOINTS / name)), 2)
    assert folder == run
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert notes[1] == (
        "set aside, as they are of later steps: step-000000020.pt.set-aside, step-000000030.pt.set-aside"
    )
    assert names(run) == [
        "best-000000010.pt",
        "step-000000010.pt",
        "step-000000020.pt.set-aside",
        "step-000000030.pt.set-aside",
    ]
    for path in (run / CHECKPOINTS).glob("*.set-aside"):
        load_checkpoint(path)


def test_a_copied_file_begins_a_run_of_its_own(settings: Settings, tmp_path: Path):
    save(tmp_path / "run", 10)
    copy = tmp_path / "copy.pt"
    copy.write_bytes((tmp_path / "run" / CHECKPOINTS / "step-000000010.pt").read_bytes())
    folder, checkpoint, notes = open_run(replace(settings, resume=str(copy), run_name="new"), 2)
    assert folder == tmp_path / "new"
    assert checkpoint is not None
    assert notes == [f"going on from step 10 ({copy})"]
    assert names(tmp_path / "run") == ["best-000000010.pt", "step-000000010.pt"]


def test_what_is_not_there_cannot_be_resumed(settings: Settings, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="nowhere' is neither 'auto', nor a run's folder, nor a checkpoint"):
        open_run(replace(settings, resume=str(tmp_path / "nowhere")), 2)
    with pytest.raises(ValueError, match=r"holds no checkpoints in .*checkpoints"):
        open_run(replace(settings, resume=str(tmp_path / "empty")), 2)
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("resume", [None, "auto", "file"])
def test_ranks_that_are_started_again_find_their_run(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str | None
):
    if resume == "file":
        save(tmp_path / "before", 5)
        resume = str(tmp_path / "before" / CHECKPOINTS / "step-000000005.pt")
    settings = replace(settings, resume=resume)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    folder, _, _ = open_run(settings, 2)
    save(folder, 10)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again, checkpoint, _ = open_run(settings, 2)
    assert again == folder
    assert checkpoint is not None
    assert checkpoint.step == 10
    # Another launcher has nothing to do with this run.
    monkeypatch.setattr(os, "getppid", lambda: 1)
    if resume is None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.time", lambda: 0.0)
            assert open_run(settings, 2)[1] is None


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("resume", [None, "auto", "missing"])
def test_what_is_refused_is_refused_again_after_a_restart_and_nothing_is_touched(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str | None
):
    """A run of that name is there, and it is not this launcher's."""
    run = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    open_run(replace(settings, run_name="run"), 2)
    # The launcher of that run had the number that this one has now, and was killed.
    save(run, 10, 20)
    before = everything(run)
    refused = replace(settings, run_name="run", resume=resume)
    if resume == "auto":
        refused = replace(refused, env="Acrobot-v1")
    for count in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        with pytest.raises(ValueError, match=r"exists already|cannot be resumed|neither 'auto'"):
            open_run(refused, 2)
        after = everything(run)
        after.setdefault(str(run / ".launcher"), before[str(run / ".launcher")])
        assert after == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_refused_resume_changes_nothing(settings: Settings, tmp_path: Path):
    run = tmp_path / "run"
    open_run(replace(settings, run_name="run"), 2)
    save(run, 10, 20)
    before = everything(tmp_path)
    other = replace(settings, hidden_sizes=(8,), resume=str(run / CHECKPOINTS / "step-000000010.pt"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"hidden_sizes=\(8,\) cannot be resumed"):
            open_run(other, 2)
    found = find_run(replace(other, hidden_sizes=(64, 64), learning_rate=0.5), 2)
    assert (found.folder, found.begins) == (run, False)
    assert found.changes == ("learning_rate is 0.5 from here on, after 0.001",)
    assert everything(tmp_path) == before


def test_ranks_that_are_lost_while_the_folder_is_made_find_their_run_or_begin(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever write is the last one."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    write = run_folder.write_whole
    for num_writes in range(4):
        named = replace(settings, run_name=f"run {num_writes}")
        left = num_writes

        def crash_or_write(path: Path, content: bytes) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            write(path, content)

        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        with monkeypatch.context() as patch:
            patch.setattr(run_folder, "write_whole", crash_or_write)
            patch.setattr("shutil.rmtree", lambda *arguments, **options: None)  # a process that is gone removes nothing
            try:
                open_run(named, 2)
            except KeyboardInterrupt:
                assert not (tmp_path / f"run {num_writes}").exists()
            else:
                break
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert open_run(named, 2)[0] == tmp_path / f"run {num_writes}"
    assert num_writes == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert open_run(named, 2)[:2] == (tmp_path / "run 2", None)
    close_run(tmp_path / "run 2")
    assert [path.name for path in (tmp_path / "run 2").iterdir()] == ["settings.yaml"]


def test_a_run_knows_its_settings(settings: Settings, tmp_path: Path):
    own = replace(settings, learning_rate=0.5, run_name="run")
    folder, _, _ = open_run(own, 2)
    save(folder, 10)
    runs_dir = str(tmp_path)
    same = replace(own, run_name=None)
    assert settings_of_run("auto", "run", runs_dir, Settings) == own
    assert settings_of_run("auto", "other", runs_dir, Settings) is None
    assert settings_of_run("auto", None, runs_dir, Settings) is None
    assert settings_of_run(str(folder), None, runs_dir, Settings) == same
    assert settings_of_run(str(folder / CHECKPOINTS), None, runs_dir, Settings) == same
    file = folder / CHECKPOINTS / "step-000000010.pt"
    assert settings_of_run(str(file), None, runs_dir, Settings) == Settings(seed=3, runs_dir=runs_dir)
    file.write_bytes(b"half")
    assert settings_of_run(str(file), None, runs_dir, Settings) is None
    (folder / "settings.yaml").write_text("sed: 5")
    with pytest.raises(ValueError, match="'sed' is no setting"):
        settings_of_run(str(folder), None, runs_dir, Settings)


OLD = "the checkpoint has a setting that this version of fastsync does not: old=1"


def checkpoint_of(**changes: Any) -> Checkpoint:
    return make_checkpoint(1, settings=Settings(**changes).as_dict() | {"old": 1})


def test_changes_are_told():
    checkpoint = checkpoint_of()
    assert changes(checkpoint, Settings(resume="auto", run_name="x", runs_dir="y"), 2) == [OLD]
    assert changes(checkpoint, Settings(learning_rate=0.5, total_steps=7, num_envs=16), 4) == [
        OLD,
        "the run goes on with world size 4 after 2: all ranks have 64 environments after 64",
        "total_steps is 7 from here on, after 200000",
        "num_envs is 16 from here on, after 32",
        "learning_rate is 0.5 from here on, after 0.001",
    ]


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ({"env": "Acrobot-v1"}, "env='CartPole-v1' cannot be resumed from a run with env='Acrobot-v1'"),
        ({"hidden_sizes": (8,)}, r"hidden_sizes=\(64, 64\) cannot be resumed from a run with hidden_sizes=\(8,\)"),
        ({"lstm_size": 4}, "lstm_size=0 cannot be resumed"),
        ({"norm_observations": True}, "norm_observations=False cannot be resumed"),
    ],
)
def test_another_environment_or_network_is_refused(old: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        changes(checkpoint_of(**old), Settings(), 2)


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "/x", "a/../../x"])
@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_run_stays_in_its_runs_dir(tmp_path: Path, name: str, resume: str | None):
    settings = Settings(runs_dir=str(tmp_path / "runs"), run_name=name, resume=resume)
    if name == "":
        assert open_run(settings, 1)[0].name.startswith("CartPole-v1")  # as if there were none
        return
    for door in (open_run, find_run, check_run):
        with pytest.raises(ValueError, match=r"run_name='.*' is no folder inside runs_dir='.*/runs'"):
            door(settings, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_may_lie_deeper_in_its_runs_dir(settings: Settings, tmp_path: Path):
    assert open_run(replace(settings, run_name="a/b"), 1)[0] == tmp_path / "a" / "b"


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_cannot_be_written_is_told_before_ranks_start(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, exists: bool
):
    auto = replace(settings, run_name="run", resume="auto")
    if exists:
        save(tmp_path / "run", 10)
    check_run(auto, 1)
    before = everything(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=rf"the run folder {tmp_path}/run cannot be written: {os.strerror(number)}"):
        check_run(auto, 1)
    assert everything(tmp_path) == before


def test_a_folder_that_nobody_can_make_is_told(settings: Settings):
    with pytest.raises(ValueError, match="the run folder /proc/runs/run cannot be written: "):
        check_run(replace(settings, runs_dir="/proc/runs", run_name="run"), 1)


def test_room_for_a_checkpoint_is_looked_for(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    save(run, 10)
    size = (run / CHECKPOINTS / "step-000000010.pt").stat().st_size
    for free in (size, size - 1):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: shutil._ntuple_diskusage(9, 9, free))
        if free >= size:
            check_run(replace(settings, resume=str(run)), 1)
            check_room(tmp_path / "new", free)
        else:
            with pytest.raises(ValueError, match=rf"{run} has no room for a checkpoint: it takes [\d.]+ kB"):
                check_run(replace(settings, resume=str(run)), 1)
            with pytest.raises(ValueError, match=r"new has no room for a checkpoint"):
                check_room(tmp_path / "new", size)

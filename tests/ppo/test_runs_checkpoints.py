"""Checkpoints load back, survive crashes, show damage, and make way for newer ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint
from fastsync.ppo.runs.folder import changes

NAN = float("nan")


def make_checkpoint(step: int, **changes: Any) -> Checkpoint:
    torch.manual_seed(step)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    values: dict[str, Any] = {
        "settings": Settings(seed=step, run_name="a run", hidden_sizes=(8, 4)).as_dict(),
        "world_size": 2,
        "step": step,
        "update": step // 10,
        "seconds": 1.5,
        "learner": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        | {"scaler": {}, "sync": {}, "schedule": {}, "rewards": {}, "num_draws": 0},
        "environments": [
            {"environments": {"lengths": torch.arange(3), "kind": "x", "big": 2**127}},
            {"environments": {"lengths": torch.arange(2)}},
        ],
        "window": [[0, 1.5, 20]],
    }
    return Checkpoint(**values | changes)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Bitwise, all the way down."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        assert one.numpy().tobytes() == other.numpy().tobytes(), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}/{index}")
    else:
        assert one == other, where


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_everything_loads_back(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    saved = make_checkpoint(50)
    path = folder.save(saved, mean_return=12.5)
    assert path == tmp_path / "checkpoints" / "step-000000050.pt"
    assert_same(vars(load_checkpoint(path)), vars(replace(saved, best_return=12.5)))
    found = folder.newest()
    assert found is not None
    assert (found[0], found[1].step) == (path, 50)


def test_the_newest_and_the_best_stay(tmp_path: Path):
    returns = {10: NAN, 20: 5.0, 30: 9.0, 40: 7.0, 50: 9.0, 60: 8.0}
    best_return = float("-inf")
    for step, mean_return in returns.items():
        # As if the run were resumed before each save: a checkpoint knows the best return.
        path = CheckpointFolder(tmp_path, 2, best_return).save(make_checkpoint(step), mean_return)
        best_return = load_checkpoint(path).best_return
    assert names(tmp_path) == ["best.pt", "step-000000050.pt", "step-000000060.pt"]
    assert load_checkpoint(tmp_path / "best.pt").step == 30
    assert best_return == 9.0


def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, keep=3)
    folder.save(make_checkpoint(1), NAN)
    newest = folder.save(make_checkpoint(2), NAN)
    newest.write_bytes(newest.read_bytes()[:1000])
    warnings: list[str] = []
    found = folder.newest(warnings.append)
    assert found is not None
    assert found[1].step == 1
    (warning,) = warnings
    assert "step-000000002.pt is damaged" in warning
    # The run goes on from there and comes by the same step again.
    again = CheckpointFolder(tmp_path, keep=2)
    for step in (2, 3, 4, 5):
        again.save(make_checkpoint(step), 9.0)
    warnings.clear()
    assert again.newest(warnings.append)[1].step == 5  # type: ignore[index]
    assert warnings == []


def test_no_flipped_bit_of_what_was_saved_goes_unnoticed(tmp_path: Path):
    """In between are names, sizes and padding of the zip file, of which some bits mean nothing."""
    path = CheckpointFolder(tmp_path, keep=3).save(make_checkpoint(1), NAN)
    expected, whole, said = vars(load_checkpoint(path)), path.read_bytes(), []
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert_same(vars(load_checkpoint(path)), expected)
        except RuntimeError as error:
            said.append(str(error))
    assert len(said) > 100
    assert all("is damaged" in each for each in said)


def test_another_versions_file_is_named(tmp_path: Path):
    torch.save({"model": {}, "config": {}}, tmp_path / "old.pt")
    with pytest.raises(
        RuntimeError, match=r"old\.pt is not a checkpoint of this version of fastsync: it has no .*settings"
    ):
        load_checkpoint(tmp_path / "old.pt")


def test_nothing_in_a_file_is_executed(tmp_path: Path):
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"settings": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(RuntimeError, match="is not a checkpoint of fastsync: it holds objects, and not only data"):
        load_checkpoint(tmp_path / "trap.pt")
    assert not (tmp_path / "trapped").exists()


def test_settings_of_another_version_are_refused_but_not_those_of_a_script():
    settings = Settings(seed=7, run_name="a run", hidden_sizes=(8, 4))
    assert make_checkpoint(7).settings_as(Settings) == settings
    with pytest.raises(ValueError, match=r"settings do not suit .*num_envs"):
        make_checkpoint(7, settings=settings.as_dict() | {"num_envs": -3}).settings_as(Settings)
    with_more = make_checkpoint(7, settings=settings.as_dict() | {"kl_weight": 0.5})  # as of fastsync eval
    assert with_more.settings_as(Settings) == settings
    before = make_checkpoint(7, settings=settings.as_dict() | {"sync": "diloco", "bucket_cap_mb": 0.5})
    assert before.settings_as(Settings).bucket_cap_mb == Settings.bucket_cap_mb
    assert changes(with_more, settings, 2) == ["kl_weight is no setting here, it was 0.5"]


class Crash(BaseException):
    """What no handler of the code under test catches, as if the process were gone."""


def save_until_crash(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, num_calls: int) -> bool:
    """Saves, but after so many calls that change files the next one raises. Returns whether it came to that."""
    left = num_calls

    def counted(call: Any) -> Any:
        def crash_or_call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return call(*args, **kwargs)

        return crash_or_call

    with monkeypatch.context() as patch:
        for name in ("replace", "fsync"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        patch.setattr(Path, "open", counted(Path.open))
        try:
            folder.save(make_checkpoint(2), 4.0)
        except Crash:
            return True
    return False


@pytest.mark.parametrize("same_step", [False, True])
def test_a_crash_at_any_moment_leaves_a_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_step: bool):
    """Also where a checkpoint of other content takes the place of one of the same step."""
    for num_calls in range(100):
        folder = CheckpointFolder(tmp_path / str(num_calls), keep=2)
        folder.save(make_checkpoint(1), 3.0)
        if same_step:
            folder.save(make_checkpoint(2, seconds=9.0), NAN)
        (folder.folder / "left.tmp").touch()
        crashed = save_until_crash(CheckpointFolder(folder.folder, 2, 3.0), monkeypatch, num_calls)
        warnings: list[str] = []
        again = CheckpointFolder(folder.folder, keep=1)
        found, best = again.newest(warnings.append), load_checkpoint(folder.folder / "best.pt")
        assert warnings == []
        assert found is not None
        assert best.best_return == (3.0 if best.step == 1 else 4.0)
        if not crashed:
            assert found[1].step == best.step == 2
            assert found[1].seconds == 1.5
        # The next save leaves nothing behind of what was half done.
        again.save(make_checkpoint(3), 5.0)
        assert names(folder.folder) == ["best.pt", "step-000000003.pt"]
        if not crashed:
            break
    assert 8 < num_calls < 99


def test_a_full_disk_is_an_error_and_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(make_checkpoint(1), NAN)
    with monkeypatch.context() as patch:

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", full)
        message = rf"No space left on device: the checkpoint of step 2 is not saved, .*'{tmp_path}'"
        with pytest.raises(OSError, match=message):
            folder.save(make_checkpoint(2), NAN)
    assert names(tmp_path) == ["step-000000001.pt"]

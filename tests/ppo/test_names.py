"""What a user names: a module or a file of their own, ``~`` in a path, and an environment that leaves the folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fastsync.ppo.names import import_from, kept_folder, name_of
from fastsync.ppo.settings import RunSettings, load_settings
from tests.refused import refused

OWN = """
import os
from pathlib import Path

import gymnasium

from fastsync.ppo import ActorCritic

def wandering():
    os.chdir(Path(__file__).parent / "elsewhere")
    return gymnasium.make("CartPole-v1")

class Mine(ActorCritic):
    pass

gymnasium.register("Mine-v1", entry_point="own_envs:wandering")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "own_envs.py").write_text(OWN, encoding="utf-8")
    return tmp_path


def run(folder: Path, *words: str) -> str:
    """As the installed command, which does not look for modules in the working folder by itself."""
    script = f"import sys; sys.path[0:1] = []; from fastsync.cli import main; sys.exit(main({list(words)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.end_to_end
@pytest.mark.parametrize("env", ["own_envs:Mine-v1", "own_envs.py:wandering"])
def test_an_environment_that_leaves_the_working_folder(folder: Path, env: str):
    sizes = ("--total-steps", "150", "--num-envs", "2", "--num-steps", "16", "--policy", "own_envs:Mine")
    said = run(folder, "train", "--env", env, *sizes, "--run-name", "mine")
    assert "written to runs/mine" in said
    assert not list((folder / "elsewhere").iterdir())
    assert {"checkpoints", "progress.csv", "settings.yaml"} <= {each.name for each in (folder / "runs/mine").iterdir()}
    assert "over 1 episode" in run(folder, "eval", "runs/mine", "--episodes", "1")


def test_a_file_names_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "of_a_file.py").write_text("from beside import number", encoding="utf-8")
    (tmp_path / "inside" / "beside.py").write_text("number = 5", encoding="utf-8")
    (tmp_path / "random.py").write_text("", encoding="utf-8")
    assert import_from("loss", "inside/of_a_file.py:number") == 5
    for name, message in (
        ("random.py:f", "another module called random"),
        ("gone.py:f", "no file gone.py"),
        ("own", "must be module:Class or module:function, or a file's, as path/of/file.py:function"),
        ("own.py", "or a file's, as own.py:function"),
        ("<stdin>:mine", "has no name to import it by"),
        ("m:f.<locals>.g", "has no name to import it by"),
    ):
        with pytest.raises(ValueError, match=f"loss='{name}' .*{message}"):
            import_from("loss", name)


def test_names_of_what_a_script_passes():
    assert import_from("loss", name_of(kept_folder)) is kept_folder
    assert name_of(partial(run, Path())) == f"functools:partial({__name__}:run, {Path()!r})"
    given = {"scale": 0.5, "of": [kept_folder, ("a", None)], "by": {"x": torch.float32}, "in_": {"b", "a"}}
    named = f"scale=0.5, of=[{kept_folder.__module__}:kept_folder, ('a', None)], by={{'x': torch.float32}}"
    assert name_of(partial(run, **given)) == f"functools:partial({__name__}:run, {named}, in_={{'a', 'b'}})"
    assert name_of(lambda: 0) == f"{__name__}:test_names_of_what_a_script_passes.<locals>.<lambda>"


@dataclass
class Options:
    color: Color
    network: nn.Module


class Color(IntEnum):
    RED = 1


def test_names_of_objects_are_those_of_the_next_start():
    first, second = (name_of(partial(run, Options(Color.RED, nn.Tanh()), net=nn.ReLU())) for _ in range(2))
    options = f"{__name__}:Options(color={__name__}:Color.RED, network=torch.nn.modules.activation:Tanh(...))"
    assert first == second == f"functools:partial({__name__}:run, {options}, net=torch.nn.modules.activation:ReLU(...))"
    refused(lambda: import_from("loss", first), "has no name to import it by; resume by the")


def test_the_home_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunSettings(runs_dir="~/runs").runs_dir == str(tmp_path / "runs")
    assert RunSettings(resume="~/best.pt").resume == str(tmp_path / "best.pt")
    assert RunSettings().runs_dir == "runs"
    (tmp_path / "own.yaml").write_text("seed: 7", encoding="utf-8")
    assert load_settings("~/own.yaml", RunSettings).seed == 7


def test_the_working_folder_is_kept(tmp_path: Path):
    before = os.getcwd()
    with kept_folder():
        os.chdir(tmp_path)
    assert os.getcwd() == before

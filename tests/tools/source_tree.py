"""A copy of the sources and of what was compiled, to build in: other tests run on what lies in the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
FOLDERS = ("csrc", "fastsync", "tools")


def copy_tree(folder: Path) -> Path:
    """Returns ``folder``, in which nothing has to be compiled. Extensions are not linked there yet."""
    for name in FILES:
        shutil.copy2(ROOT / name, folder / name)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("*.so", "*.torch", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for built in [*ROOT.glob("build/torch-*"), ROOT / "build/units"]:
        if not built.name.endswith(("address", "undefined", "thread")):
            shutil.copytree(built, folder / "build" / built.name)
    return folder


def run(folder: Path, *command: str, **variables: str) -> str:
    """Returns what a command says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | variables
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout

"""Importing the package: as it is installed, and where its extension has not been built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "fastsync"


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` with ``folder`` first on the import path.

    -S keeps the import hook of an editable installation out, which would find the extension in spite of that.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def unbuilt(tmp_path: Path) -> Path:
    """A folder that holds the package without its extension."""
    shutil.copytree(PACKAGE, tmp_path / "fastsync", ignore=shutil.ignore_patterns("_*.so", "__pycache__"))
    return tmp_path


def test_all_public_names_are_there() -> None:
    import fastsync

    assert fastsync.__all__
    for name in fastsync.__all__:
        assert getattr(fastsync, name) is not None


def test_package_needs_no_import_of_torch_before_it() -> None:
    # The extension's libraries are torch's, and are found only once torch has loaded them.
    command = [sys.executable, "-c", "from fastsync import register_comm_hook"]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_unbuilt_package_says_what_to_do_in_one_sentence(unbuilt: Path) -> None:
    result = _python("from fastsync import register_comm_hook", unbuilt)
    assert result.returncode == 1
    sentence = result.stderr.strip().splitlines()[-1]
    assert sentence.startswith("ImportError: ")
    assert "not built" in sentence
    assert "pip install --no-build-isolation" in sentence


def test_doctor_runs_on_the_unbuilt_package(unbuilt: Path) -> None:
    result = _python("import sys; from fastsync import doctor; sys.exit(doctor.main())", unbuilt)
    assert result.returncode == 1, result.stderr
    assert "the engine: the extension does not load" in result.stdout
    assert "No module named 'fastsync._C'" in result.stdout

"""Importing the package: as it is installed, and where its extension has not been built."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ranks import run_ranks

PACKAGE = Path(__file__).resolve().parents[2] / "fastsync"


class Said(NamedTuple):
    status: int
    out: str
    err: str


def _run_with(rank: int, world_size: int, folder: Path, code: str) -> Said:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastsync"]:
        del sys.modules[name]
    # The import hook of an editable installation would find the extension in spite of what comes first on the path.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
    sys.path.insert(0, str(folder))
    status = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            exec(code, {})
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
        except Exception:
            traceback.print_exc()
            status = 1
    return Said(status, out.getvalue(), err.getvalue())


def _python(code: str, folder: Path) -> Said:
    """Runs ``code`` with ``folder`` first on the import path, and without a fastsync that was imported before."""
    (said,) = run_ranks(_run_with, 1, folder, code)
    return said


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
    assert result.status == 1
    sentence = result.err.strip().splitlines()[-1]
    assert sentence.startswith("ImportError: ")
    assert f"fastsync in {unbuilt}/fastsync has no extension" in sentence
    assert "No module named 'fastsync._C'" in sentence
    assert "run `pip install --no-build-isolation" in sentence


def test_unbuilt_package_says_it_in_the_trainer(unbuilt: Path) -> None:
    result = _python("import sys; from fastsync.cli import main; sys.exit(main(['train']))", unbuilt)
    assert result.status == 1
    (sentence,) = result.err.strip().splitlines()
    assert sentence.startswith(f"fastsync train: fastsync in {unbuilt}/fastsync has no extension")


def test_unbuilt_package_names_a_copy_that_is_built(unbuilt: Path) -> None:
    other = unbuilt / "elsewhere"
    (other / "fastsync").mkdir(parents=True)
    (other / "fastsync/_C.abi3.so").touch()
    (other / "fastsync_torch-0.1.0.dist-info").mkdir()
    (other / "fastsync_torch-0.1.0.dist-info/METADATA").write_text("Name: fastsync-torch\nVersion: 0.1.0\n")
    result = _python(f"import sys; sys.path.insert(1, '{other}'); from fastsync import attach", unbuilt)
    sentence = result.err.strip().splitlines()[-1]
    assert f"there is one in {other}/fastsync, but Python looks into {unbuilt} first" in sentence


def test_extension_for_another_torch_is_not_loaded(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "fastsync", ignore=shutil.ignore_patterns("__pycache__"))
    for note in (tmp_path / "fastsync").glob("*.torch"):
        note.write_text("1.2.3+cpu")
    result = _python("from fastsync import attach", tmp_path)
    assert "it was built for torch 1.2.3+cpu" in result.err.strip().splitlines()[-1]


def test_doctor_runs_on_the_unbuilt_package(unbuilt: Path) -> None:
    result = _python("import sys; from fastsync import doctor; sys.exit(doctor.main())", unbuilt)
    assert result.status == 1, result.err
    assert "the engine: fastsync in" in result.out
    assert "No module named 'fastsync._C'" in result.out


def test_an_import_changes_no_optimizer(tmp_path: Path) -> None:
    said = _python(
        "import torch.optim.optimizer as o; import fastsync, fastsync.ppo\n"
        "print(len(o._global_optimizer_pre_hooks), len(o._global_optimizer_post_hooks))",
        PACKAGE.parent,
    )
    assert said == (0, "0 0\n", "")

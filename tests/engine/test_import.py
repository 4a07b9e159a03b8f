"""Importing the package: as it is installed, and where its extension has not been built; and what the doctor says."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import io
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

import fastsync
from fastsync import doctor
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


def test_all_public_names_are_there_and_an_import_changes_no_optimizer() -> None:
    assert all(getattr(fastsync, name) is not None for name in fastsync.__all__)
    said = _python(
        "import torch.optim.optimizer as o; import fastsync, fastsync.ppo\n"
        "print(len(o._global_optimizer_pre_hooks), len(o._global_optimizer_post_hooks))",
        PACKAGE.parent,
    )
    assert said == (0, "0 0\n", "")


@pytest.mark.end_to_end
def test_package_needs_no_import_of_torch_before_it_and_may_lie_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    # The extension's libraries are torch's, and are found only once torch has loaded them.
    (tmp_path / "fastsync").mkdir()
    command = [sys.executable, "-c", "from fastsync import register_comm_hook"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_an_unbuilt_package_says_what_to_do(unbuilt: Path) -> None:
    lacks = f"fastsync in {unbuilt}/fastsync has no extension"
    for code, said in (
        ("from fastsync import register_comm_hook", f"ImportError: {lacks}"),
        ("import fastsync; fastsync.autotune.measure_group()", "AttributeError: module 'fastsync' has no"),
        ("import fastsync.ppo.ppo", f"ImportError: {lacks}"),
        ("import sys; from fastsync.cli import main; sys.exit(main(['train']))", f"fastsync train: {lacks}"),
    ):
        result = _python(code, unbuilt)
        sentence = result.err.strip().splitlines()[-1]
        assert (result.status, sentence[: len(said)]) == (1, said)
        assert "run `pip install --no-build-isolation" in sentence
    result = _python("import sys; from fastsync import doctor; sys.exit(doctor.main())", unbuilt)
    assert result.status == 1, result.err
    assert f"the engine: {lacks}" in result.out


def test_a_wheel_for_another_torch_names_the_one_to_take_at_import(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "fastsync", ignore=shutil.ignore_patterns("__pycache__"))
    for note in (tmp_path / "fastsync").glob("*.torch"):
        note.write_text("1.2.3")
    (tmp_path / "fastsync_torch-0.1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.4\nName: fastsync-torch\nVersion: 0.1.0+torch1.2.3.cpu\n"
    (tmp_path / "fastsync_torch-0.1.0.dist-info/METADATA").write_text(metadata)
    result = _python("import fastsync", tmp_path)
    assert result.status == 0, result.err
    wheel = f"torch{torch.__version__.split('+')[0]}.cpu"
    assert f"(it was built for torch 1.2.3): take the wheel for this torch, whose page ends in {wheel}: " in result.err
    assert f"`pip install --no-deps fastsync-torch==0.1.0+{wheel} --extra-index-url PAGE`" in result.err
    result = _python("import fastsync; fastsync.attach", tmp_path)
    assert "ImportError: " in result.err.strip().splitlines()[-1]
    assert "it was built for torch 1.2.3" in result.err.strip().splitlines()[-1]


def test_a_wheel_without_the_kernels_of_gpus_names_one_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (tmp_path / f"_C{suffix}").with_suffix(".torch").write_text(f"{torch.__version__}\nleft out on request")
    monkeypatch.setattr(doctor, "HERE", tmp_path)
    assert doctor.cuda_left_out().startswith("left out on request; to build again: `pip install ")
    monkeypatch.setattr(doctor, "version", lambda: "0.1.0+torch1.2.3.cpu")
    assert doctor.cuda_left_out().endswith("the version of one that has them ends in cu and CUDA's version")


# ---- the doctor -----------------------------------------------------------------------------------------------------


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(monkeypatch, capsys)


class Doctor:
    """What it says of another extension than the one that is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def of(self, status: int, *, with_cuda: bool = False) -> str:
        extension = SimpleNamespace(
            num_usable_cores=lambda: 2,
            shared_memory_obstacle=lambda: "",
            __file__="/somewhere/_C.so",
            built_with_cuda=lambda: with_cuda,
            kernels=lambda device_type: "fused" if with_cuda or device_type == "cpu" else "generic",
            build_info=lambda: {"torch": torch.__version__, "compiler": "g++ 12.2.0"},
        )
        self._monkeypatch.setattr(doctor, "load", lambda name: extension)
        return self.of_this(status)

    def of_this(self, status: int) -> str:
        assert doctor.main() == status
        return self._capsys.readouterr().out


def _limits(output: str) -> str:
    return output.split("will not work here\n")[1]


def test_this_installation_is_usable(say: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    output = say.of_this(0)
    for version in (platform.python_version(), torch.__version__, importlib.metadata.version("fastsync-torch")):
        assert version in output
    assert "the engine:" not in _limits(output)

    def fail_to_load(name: str) -> None:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(doctor, "load", fail_to_load)
    assert "the engine: undefined symbol: _ZN3c10" in _limits(say.of_this(1))


def test_what_a_machine_lacks_is_named(say: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "distributions", lambda name: [] if name in ("tyro", "gymnasium") else [name])
    output = say.of(0)
    assert "built with compiler    g++ 12.2.0" in output
    assert "fastsync train: gymnasium, tyro missing; install them: pip install " in output
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    limits = _limits(say.of(1))
    assert "NCCL: this torch has none; use Gloo" in limits
    assert "this torch has no Gloo" in limits


@pytest.mark.parametrize(
    ("threads", "is_wrong"), [("many", True), ("0", True), (" ", True), ("4", False), (None, False)]
)
def test_doctor_tells_of_threads_that_are_no_number(
    threads: str | None, is_wrong: bool, say: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert ("OMP_NUM_THREADS" in _limits(say.of(0))) == is_wrong


@pytest.mark.parametrize(
    ("torch_version", "chosen", "which"),
    [
        ("2.14.1+cu130", None, ", by torch's nccl-legacy"),
        ("2.14.1+cu130", "1", ", by torch's nccl2"),
        ("2.15.0+cu132", None, ", by torch's nccl2"),
        ("2.15.0+cu132", "0", ", by torch's nccl-legacy"),
        ("2.13.0", None, ""),
    ],
)
def test_doctor_tells_which_nccl_torch_takes(
    torch_version: str, chosen: str | None, which: str, say: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(torch_version))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.delattr(dist, "ProcessGroupNCCL2", raising=False)
    if which:
        monkeypatch.setattr(dist, "ProcessGroupNCCL2", object, raising=False)
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if chosen:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", chosen)
    assert f"  nccl                   2.30.7{which}\n" in say.of(0)


def _has_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(doctor.Path, "glob", lambda self, pattern: iter([self / name for name in names]))


def _note(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What setup.py has noted beside the extension."""
    monkeypatch.setattr(doctor, "HERE", folder)
    note = folder.joinpath(f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").with_suffix(".torch")
    note.write_text("\n".join([torch.__version__, *lines]))


@pytest.mark.parametrize("gpus", [[], ["nvidia0"]])
def test_kernels_of_a_torch_with_cuda(
    gpus: list[str], say: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without nvcc torch's own operations do all: a note says how to get faster. FASTSYNC_CUDA=1 asks for more."""
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    _has_gpus(monkeypatch, *gpus)
    _note(tmp_path, monkeypatch, "no nvcc was found; run: pip install 'cuda-toolkit[nvcc]==13.2.2'")
    reason = "no nvcc was found; run: pip install 'cuda-toolkit[nvcc]==13.2.2'; to build again: `pip install "
    for asked, with_cuda, status in (("", False, 0), ("0", False, 0), ("1", False, 1), ("", True, 0), ("1", True, 0)):
        monkeypatch.setenv("FASTSYNC_CUDA", asked)
        output = say.of(status, with_cuda=with_cuda)
        assert "\n  kernels on cpu         fused C++\n" in output
        generic = "generic: torch's own operations; install nvcc and build again for fused ones"
        assert f"\n  kernels on cuda        {'fused CUDA' if with_cuda else generic}\n" in output
        of_kernels = [line for line in _limits(output).splitlines() if line.startswith("  fused CUDA kernels")]
        of_whom = ", which FASTSYNC_CUDA=1 asks for" * status
        expected = f"  fused CUDA kernels{of_whom}: {reason}"
        assert [line[: len(expected)] for line in of_kernels] == [expected] * (not with_cuda)
        assert output.endswith("\nthe engine works here\n") == (status == 0)
    assert doctor.built_for() == torch.__version__
    _note(tmp_path, monkeypatch)
    monkeypatch.delenv("FASTSYNC_CUDA")
    assert "fused CUDA kernels: not built, and the build has noted no reason" in _limits(say.of(0))


def test_a_torch_without_cuda_is_no_fault(say: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever has installed it may have meant it, also beside a GPU. Building again would not help."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("FASTSYNC_CUDA", raising=False)
    _note(tmp_path, monkeypatch, "of the build")
    without = f"torch {torch.__version__} is built without CUDA"
    _has_gpus(monkeypatch)
    assert f"  fused CUDA kernels: {without}, and there is no NVIDIA GPU\n" in _limits(say.of(0))
    _has_gpus(monkeypatch, "nvidia0")
    advice = "to use a GPU, install a torch with CUDA (https://pytorch.org), then run `pip install --no-build-isolation"
    assert f"  fused CUDA kernels: {without}; {advice}" in _limits(say.of(0))
    monkeypatch.setenv("FASTSYNC_CUDA", "1")
    for gpus in (["nvidia0"], []):
        _has_gpus(monkeypatch, *gpus)
        assert f"  fused CUDA kernels, which FASTSYNC_CUDA=1 asks for: {without}; {advice}" in _limits(say.of(1))


def test_the_extra_has_what_the_trainer_imports() -> None:
    source = "".join(file.read_text() for file in (PACKAGE / "ppo").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE))
    others = {"torch", "fastsync", "ray", "ale_py", "matplotlib", "onnxruntime"}  # there, or of extras of their own
    needed = imported - sys.stdlib_module_names - others
    (extra,) = re.findall(r"^train = (\[.*\])$", (PACKAGE.parent / "pyproject.toml").read_text(), re.MULTILINE)
    names = [re.split("[<>=]", name)[0] for name in ast.literal_eval(extra)]
    modules_of = {
        name: {file.parts[0].removesuffix(".py") for file in importlib.metadata.files(name) or ()} for name in names
    }
    assert needed <= set().union(*modules_of.values())
    assert [name for name, modules in modules_of.items() if not needed & modules] == []

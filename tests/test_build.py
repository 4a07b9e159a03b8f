"""setup.py: what it builds, and what it says where it cannot."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import setuptools
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fastsync_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def built(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[setuptools.Extension]:
    """What setup.py hands on to be built once its ``main`` is called, which then builds nothing."""
    extensions: list[setuptools.Extension] = []
    monkeypatch.setattr(
        setup_script.setuptools, "setup", lambda *, ext_modules, cmdclass: extensions.extend(ext_modules)
    )
    for name in ("FASTSYNC_CUDA", "FASTSYNC_SANITIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")  # or main() would set it for all tests that follow
    return extensions


def _run_setup(*words: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Runs setup.py; ``path`` comes first on the import path."""
    return subprocess.run(
        [sys.executable, "setup.py", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def _sources(*patterns: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}


def _fake_toolkit(folder: Path, release: str) -> str:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(0o755)
    return str(folder)


@pytest.fixture
def no_torch(tmp_path: Path) -> Path:
    """A folder whose torch cannot be imported, as in pip's build isolation."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    return tmp_path


@pytest.mark.parametrize("command", ["build_ext", "dist_info"])
def test_without_torch_one_sentence_says_what_to_do(no_torch: Path, command: str) -> None:
    result = _run_setup("--quiet", command, path=no_torch)
    assert result.returncode == 1
    assert result.stderr.strip().count("\n") == 0
    assert "No module named 'torch'" in result.stderr
    assert (
        "pip install torch ninja 'setuptools>=77.0.3', then the same command with --no-build-isolation" in result.stderr
    )


def test_a_source_distribution_needs_no_torch(no_torch: Path) -> None:
    result = _run_setup("--quiet", "egg_info", "-e", str(no_torch), "sdist", "-d", str(no_torch), path=no_torch)
    assert result.returncode == 0, result.stderr
    (archive,) = no_torch.glob("fastsync_torch-*.tar.gz")
    with tarfile.open(archive) as files:
        assert any(name.endswith("/csrc/bindings.cpp") for name in files.getnames())


def test_too_old_setuptools_is_refused(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_script.setuptools, "__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"setuptools 65\.5\.0 is too old .*: pip install .* 'setuptools>=77"):
        setup_script.check_setuptools()


@pytest.mark.parametrize(
    ("setting", "way_out"),
    [
        ("FASTSYNC_CUDA", "1 insists on the CUDA half, 0 leaves it out"),
        ("FASTSYNC_SANITIZE", "address, undefined, thread build with that sanitizer"),
    ],
)
def test_unknown_setting_is_refused(
    setup_script: ModuleType,
    built: list[setuptools.Extension],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    way_out: str,
) -> None:
    monkeypatch.setenv(setting, "banana")
    with pytest.raises(SystemExit, match=f"{setting}='banana' means nothing: {way_out}"):
        setup_script.main()
    assert built == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="is about a torch without CUDA")
@pytest.mark.usefixtures("built")
def test_insisting_on_cuda_without_a_cuda_torch_fails_with_the_reason(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTSYNC_CUDA", "1")
    message = f"FASTSYNC_CUDA=1, but the CUDA half cannot be built: torch {torch.__version__}"
    with pytest.raises(SystemExit, match=re.escape(message)):
        setup_script.main()


@pytest.mark.skipif(torch.version.cuda is not None, reason="is about a torch without CUDA")
def test_leaving_cuda_out_by_itself_is_said(
    setup_script: ModuleType,
    built: list[setuptools.Extension],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FASTSYNC_CUDA", "")
    setup_script.main()
    assert [extension.name for extension in built] == ["fastsync._C", "fastsync._ppo"]
    assert "building the CPU half only: torch" in capfd.readouterr().err


def test_leaving_cuda_out_on_request_is_silent(
    setup_script: ModuleType,
    built: list[setuptools.Extension],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FASTSYNC_CUDA", "0")
    setup_script.main()
    assert [extension.name for extension in built] == ["fastsync._C", "fastsync._ppo"]
    assert "CPU half only" not in capfd.readouterr().err


def test_obstacles_to_the_cuda_half(setup_script: ModuleType, tmp_path: Path) -> None:
    toolkit = _fake_toolkit(tmp_path / "cuda", "13.0")
    obstacle = setup_script.cuda_obstacle
    assert "no cuda_runtime_api.h: point CUDA_HOME" in obstacle("2.13.0", "13.2", toolkit)
    (tmp_path / "cuda/include").mkdir()
    (tmp_path / "cuda/include/cuda_runtime_api.h").touch()
    assert obstacle("2.13.0", "13.2", toolkit) is None
    assert "torch.version.cuda is None" in obstacle("2.13.0+cpu", None, toolkit)
    assert "set CUDA_HOME or put nvcc on the PATH" in obstacle("2.13.0", "13.0", None)
    assert f"{tmp_path}/empty/bin/nvcc does not run" in obstacle("2.13.0", "13.0", f"{tmp_path}/empty")
    mismatch = obstacle("2.13.0", "12.8", toolkit)
    assert mismatch == f"torch 2.13.0 is built with CUDA 12.8, but the toolkit in {toolkit} is 13.0"


def test_the_toolkit_is_that_of_the_nvcc_behind_a_wrapper(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text("#!/bin/sh\necho '#$ _SPACE_= ' >&2\necho '#$ TOP=/opt/cuda-13.0/bin/..' >&2\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=":")
    for chosen, expected in ((None, "/opt/cuda-13.0"), ("/opt/mine", "/opt/mine")):
        monkeypatch.setenv("CUDA_HOME", "")
        monkeypatch.delenv("CUDA_HOME")
        monkeypatch.delenv("CUDA_PATH", raising=False)
        if chosen is not None:
            monkeypatch.setenv("CUDA_HOME", chosen)
        setup_script.choose_toolkit()
        assert os.environ["CUDA_HOME"] == expected


def test_an_nvcc_that_does_not_tell_chooses_no_toolkit(setup_script: ModuleType, tmp_path: Path) -> None:
    assert setup_script.toolkit_of(_fake_toolkit(tmp_path / "cuda", "13.0") + "/bin/nvcc") is None
    assert setup_script.toolkit_of(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize(
    ("setting", "obstacle", "built"),
    [("", None, True), ("", "no toolkit", False), ("0", None, False), ("0", "no toolkit", False), ("1", None, True)],
)
def test_when_the_cuda_half_is_built(setup_script: ModuleType, setting: str, obstacle: str | None, built: bool) -> None:
    assert setup_script.wants_cuda(setting, obstacle) is built


def test_insisting_without_a_toolkit_fails_with_the_reason(setup_script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="cannot be built: no CUDA toolkit was found"):
        setup_script.wants_cuda("1", setup_script.cuda_obstacle("2.13.0", "13.0", None))


def test_cpu_half_is_always_built(setup_script: ModuleType) -> None:
    extension, trainer = setup_script.make_extensions(with_cuda=False)
    assert set(trainer.sources) == _sources("csrc/ppo/*.cpp")
    assert set(extension.sources) == _sources("csrc/**/*.cpp") - set(trainer.sources)
    assert "-DFASTSYNC_WITH_CUDA" not in extension.extra_compile_args["cxx"]
    assert _sources("csrc/**/*.h") <= set(extension.depends)


@pytest.mark.parametrize(
    ("toolkit", "expected"),
    [
        ("13.0", "8.0;9.0;10.0;12.0+PTX"),
        ("12.8", "8.0;9.0;10.0;12.0+PTX"),
        ("12.6", "8.0;9.0+PTX"),
        ("11.8", "8.0;9.0+PTX"),
    ],
)
def test_architectures_are_those_that_the_toolkit_knows(setup_script: ModuleType, toolkit: str, expected: str) -> None:
    assert setup_script.architectures(toolkit) == expected


def test_cuda_half_adds_the_kernels(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    extension, trainer = setup_script.make_extensions(with_cuda=True)
    assert set(extension.sources) == _sources("csrc/**/*.cpp", "csrc/**/*.cu") - set(trainer.sources)
    assert "-DFASTSYNC_WITH_CUDA" not in trainer.extra_compile_args["cxx"]
    for compiler in ("cxx", "nvcc"):
        assert "-DFASTSYNC_WITH_CUDA" in extension.extra_compile_args[compiler]
        assert str(Path(torch.__file__).parent / "include") in _system_folders(extension.extra_compile_args[compiler])


def _system_folders(flags: list[str]) -> list[str]:
    """The folders of system headers, named in the one way that both g++ and nvcc take: a word of their own."""
    return [folder for option, folder in pairwise(flags) if option == "-isystem"]


def test_warnings_are_errors_only_on_request(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTSYNC_WERROR", raising=False)
    assert "-Werror" not in setup_script.make_extension("one", []).extra_compile_args["cxx"]
    monkeypatch.setenv("FASTSYNC_WERROR", "1")
    assert "-Werror" in setup_script.make_extension("one", []).extra_compile_args["cxx"]


def test_extension_brings_no_openmp_runtime_of_its_own() -> None:
    from fastsync import _C, _ppo

    for extension in (_C, _ppo):
        command = ["readelf", "-d", extension.__file__]
        libraries = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "libtorch_cpu" in libraries
        assert "omp" not in libraries

"""setup.py: what it builds, and what it says where it cannot."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import cpp_extension

from tests.tools.source_tree import copy_tree, run
from tools import compile

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fastsync_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sources(*patterns: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}


def _fake_toolkit(folder: Path, release: str, refusal: str = "") -> str:
    """A toolkit whose nvcc names this release, and compiles, or refuses with these words."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    refuses = f"echo '{refusal}' >&2; exit 1" if refusal else ":"
    says = f"echo 'Cuda compilation tools, release {release}, V{release}.88'"
    nvcc.write_text(
        f'#!/bin/sh\ncase $1 in --version) {says};; -c) {refuses};; *) echo "#\\$ TOP={folder}" >&2;; esac\n'
    )
    nvcc.chmod(0o755)
    (folder / "include").mkdir()
    (folder / "include/cuda_runtime_api.h").touch()
    return str(folder)


@pytest.fixture
def no_toolkit(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No toolkit is found, but those that a test makes; those of PyPI's packages in the folder that is returned."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: "/usr/local/cuda" not in str(path) and exists(path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    return tmp_path / "site-packages"


def test_without_torch_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    """As in pip's build isolation."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    command, environment = (
        [sys.executable, "setup.py", "--quiet", "build_ext"],
        os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    (sentence,) = result.stderr.strip().splitlines()
    assert "then the same command with --no-build-isolation" in sentence


def test_unknown_setting_is_refused(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_script.setuptools, "setup", lambda **_: pytest.fail("it builds"))
    monkeypatch.setenv("CUDA_HOME", "/nowhere")  # or main() would set it for all tests that follow
    monkeypatch.setenv("FASTSYNC_CUDA", "banana")
    with pytest.raises(SystemExit, match="FASTSYNC_CUDA='banana' means nothing: 1 insists on the CUDA half"):
        setup_script.main()


def test_what_keeps_a_toolkit_from_compiling_is_said(setup_script: ModuleType, tmp_path: Path) -> None:
    obstacle = setup_script.toolkit_obstacle
    toolkit = _fake_toolkit(tmp_path / "cuda", "13.0")
    assert obstacle(toolkit, "13.2") is None
    assert obstacle(toolkit, "12.8") == f"torch is built with CUDA 12.8, but the toolkit in {toolkit} is 13.0"
    assert obstacle(f"{tmp_path}/empty", "13.0") == f"{tmp_path}/empty/bin/nvcc does not run"
    broken = _fake_toolkit(tmp_path / "broken", "13.0", "ptxas x.ptx, line 9; fatal   : Unsupported .version 9.4")
    assert "does not compile (ptxas x.ptx, line 9; fatal   : Unsupported .version 9.4)" in obstacle(broken, "13.0")


@pytest.mark.usefixtures("no_toolkit")
def test_without_a_toolkit_the_reason_is_said(setup_script: ModuleType) -> None:
    assert setup_script.cuda_left_out("", "2.15.0", "13.2").startswith("no nvcc was found; ")
    with pytest.raises(SystemExit, match="FASTSYNC_CUDA=1, but the CUDA half cannot be built: no nvcc was found; "):
        setup_script.cuda_left_out("1", "2.15.0", "13.2")


def test_the_first_toolkit_that_works_is_taken_and_pypis_last(
    setup_script: ModuleType, no_toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose() -> str:
        monkeypatch.delenv("CUDA_HOME", raising=False)
        assert setup_script.cuda_left_out("", "2.15.0", "13.2") is None
        return os.environ["CUDA_HOME"]

    from_pypi = _fake_toolkit(no_toolkit / "nvidia/cu13", "13.2")
    assert choose() == from_pypi
    too_old = _fake_toolkit(tmp_path / "too-old", "11.5")
    monkeypatch.setenv("PATH", f"{too_old}/bin", prepend=":")
    assert choose() == from_pypi
    # A wrapper elsewhere tells where its toolkit is.
    system = _fake_toolkit(tmp_path / "system", "13.0")
    (tmp_path / "wrapper").mkdir()
    (tmp_path / "wrapper/nvcc").symlink_to(f"{system}/bin/nvcc")
    monkeypatch.setenv("PATH", f"{tmp_path}/wrapper", prepend=":")
    assert choose() == system


def test_architectures_are_those_that_the_toolkit_knows(setup_script: ModuleType) -> None:
    assert setup_script.architectures("12.8") == "8.0;9.0;10.0;12.0+PTX"
    assert setup_script.architectures("12.6") == "8.0;9.0+PTX"


def test_cuda_half_adds_the_kernels(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX")
    extension, trainer = setup_script.make_extensions(with_cuda=True)
    assert set(extension.sources) == _sources("csrc/**/*.cpp", "csrc/**/*.cu") - set(trainer.sources)
    assert "torch_cuda" in extension.libraries
    assert "torch_cuda" not in trainer.libraries
    flags = setup_script.make_flags(with_cuda=True)
    assert "-gencode=arch=compute_90,code=sm_90" in flags.nvcc
    for words in (flags.cxx, flags.nvcc):
        assert "-DFASTSYNC_WITH_CUDA" in words
        assert str(Path(torch.__file__).parent / "include") in _system_folders(words)


def _system_folders(flags: list[str]) -> list[str]:
    """The folders of system headers, named in the one way that both g++ and nvcc take: a word of their own."""
    return [folder for option, folder in pairwise(flags) if option == "-isystem"]


def test_a_compiler_with_a_static_libstdcxx_links_torchs(setup_script: ModuleType, tmp_path: Path) -> None:
    archive = subprocess.run(["g++", "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True).stdout
    if not os.path.isabs(archive):
        pytest.skip("this compiler has no libstdc++ to link statically")
    source, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    source.write_text("#include <iostream>\nvoid say(int number) { std::cout << number; }\n")
    command = ["g++", "-shared", "-fPIC", "-static-libstdc++", str(source), "-o", str(library)]
    subprocess.run([*command, *setup_script.loaded_libstdcxx()], check=True)
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "libstdc++.so" in needed


def test_extension_brings_no_openmp_runtime_of_its_own() -> None:
    from fastsync import _C, _ppo

    for extension in (_C, _ppo):
        command = ["readelf", "-d", extension.__file__]
        libraries = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "libtorch_cpu" in libraries
        assert "omp" not in libraries


@pytest.mark.end_to_end
def test_a_second_build_links_alone_and_notes_the_torch(tmp_path: Path) -> None:
    """What was compiled is taken by any way in. Without the note another torch would load the extension, and crash."""
    copy_tree(tmp_path)
    said = run(tmp_path, sys.executable, "setup.py", "build_ext", "--inplace")
    assert "fastsync: compiling what has changed of " in said
    assert "fastsync: [" not in said
    (note,) = (tmp_path / "fastsync").glob("_C.*.torch")
    assert note.read_text().splitlines()[0] == torch.__version__
    (library,) = (tmp_path / "fastsync").glob("_ppo.*.so")
    # A library of another torch, which is newer than these objects.
    for built in (tmp_path / "build").glob("lib*/fastsync/_ppo.*.so"):
        built.write_bytes(b"of another torch")
    run(tmp_path, sys.executable, "setup.py", "build_ext", "--inplace")
    assert library.read_bytes() != b"of another torch"


class Tree:
    """A few sources, compiled by a g++ that needs no torch."""

    def __init__(self, folder: Path) -> None:
        for name, text in {
            "csrc/torch_headers.h": "#include <vector>\n",
            "csrc/passes/cpu/loops.cpp": "int loop() { return AT; }\n",
            "csrc/engine/state.h": "inline int state() { return 1; }\n",
            "csrc/engine/state.cpp": '#include "engine/state.h"\nint two() { return 2 * state(); }\n',
            "csrc/engine/step.cpp": "int step() { return 1; }\n",
        }.items():
            compile.write(folder / name, text)

    def compiled(self, capfd: pytest.CaptureFixture[str], *flags: str) -> set[str]:
        """What was compiled now."""
        sources = compile.units(
            ["csrc/passes/cpu/loops.cpp", "csrc/engine/state.cpp", "csrc/engine/step.cpp"], Path("u")
        )
        both = ["-Icsrc", "-Wall", "-Werror", *flags]
        objects = compile.compile_units(
            sources, compile.Flags(cxx=both, loops=[*both, "-DAT=3"]), Path("o b$j"), num_jobs=2, is_quiet=False
        )
        assert all(Path(each).exists() for each in objects.values())
        said = capfd.readouterr()
        assert "warning:" not in said.err  # other tests of this process may have threads that still write there
        assert "error:" not in said.err
        return set(re.findall(r"^fastsync: \[\d/\d\] (.*)$", said.out, re.MULTILINE))


def test_what_has_changed_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "env g++")  # more than a word, such as "ccache g++"
    tree = Tree(tmp_path)
    headers, unit, loops = "'o b$j/precompiled.h'", "u/csrc_engine_0.cpp", "csrc/passes/cpu/loops.cpp"
    assert tree.compiled(capfd) == {headers, unit, loops}
    assert tree.compiled(capfd) == set()
    (tmp_path / "csrc/engine/state.h").write_text("inline int state() { return 3; }\n")
    assert tree.compiled(capfd) == {unit}
    (tmp_path / "csrc/torch_headers.h").write_text("#include <map>\n")
    assert tree.compiled(capfd) == {headers, unit}
    assert tree.compiled(capfd, "-O1") == {headers, unit, loops}
    (tmp_path / "csrc/engine/step.cpp").write_text("int step() { return nothing; }\n")
    with pytest.raises(SystemExit, match="the compiler's errors are above"):
        tree.compiled(capfd, "-O1")


def test_without_ninja_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="ninja, which runs the compilers, is missing; run: pip install ninja"):
        compile.compile_units([], compile.Flags([], []), tmp_path, num_jobs=1, is_quiet=True)

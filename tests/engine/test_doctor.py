"""fastsync doctor: what it prints, and the exit status that scripts can rely on."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import platform
import re
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fastsync import doctor


def _extension(with_cuda: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        num_usable_cores=lambda: 2,
        shared_memory_obstacle=lambda: "",
        __file__="/somewhere/_C.so",
        built_with_cuda=lambda: with_cuda,
        kernels=lambda device_type: "fused" if with_cuda or device_type == "cpu" else "generic",
        build_info=lambda: {"torch": torch.__version__, "compiler": "g++ 12.2.0"},
    )


def _use(monkeypatch: pytest.MonkeyPatch, extension: SimpleNamespace) -> None:
    monkeypatch.setattr(doctor, "_load_extension", lambda: (extension, ""))


def _limits(output: str) -> str:
    return output.split("will not work here\n")[1]


def test_this_installation_is_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    output = capsys.readouterr().out
    assert platform.python_version() in output
    assert torch.__version__ in output
    assert importlib.metadata.version("fastsync-torch") in output
    assert "extension              loads from" in output
    assert "the engine:" not in _limits(output)


def test_extension_that_does_not_load_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_to_load(name: str) -> None:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(doctor, "load", fail_to_load)
    assert doctor.main() == 1
    assert "the engine: undefined symbol: _ZN3c10" in _limits(capsys.readouterr().out)


def test_what_the_extension_was_built_with_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _use(monkeypatch, _extension(with_cuda=True))
    assert doctor.main() == 0
    output = capsys.readouterr().out
    assert "built with compiler    g++ 12.2.0" in output
    assert "CUDA half              built" in output
    assert "fused CUDA kernels" not in output


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has CUDA; there is no GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(doctor, "_has_nvidia_gpu", lambda: False)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("with_cuda", "said"),
    [
        (True, "fused CUDA"),
        (False, "generic: torch's own operations; install nvcc and build again for fused ones"),
    ],
)
def test_each_devices_kernels_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], with_cuda: bool, said: str
) -> None:
    _use(monkeypatch, _extension(with_cuda=with_cuda))
    doctor.main()
    output = capsys.readouterr().out
    assert "\n  kernels on cpu         fused C++\n" in output
    assert f"\n  kernels on cuda        {said}\n" in output


@pytest.mark.usefixtures("cuda")
def test_what_kept_the_cuda_kernels_out_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _use(monkeypatch, _extension())
    monkeypatch.setattr(doctor, "HERE", tmp_path)
    assert doctor.main() == 0
    assert "fused CUDA kernels: not built, and the build has noted no reason" in _limits(capsys.readouterr().out)
    note = tmp_path.joinpath(f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").with_suffix(".torch")
    note.write_text(f"{torch.__version__}\nno nvcc was found; run: pip install 'cuda-toolkit[nvcc]==13.2.2'")
    assert doctor.main() == 0
    line = "fused CUDA kernels: no nvcc was found; run: pip install 'cuda-toolkit[nvcc]==13.2.2'; to build again: `pip"
    assert line in _limits(capsys.readouterr().out)
    assert doctor.built_for() == torch.__version__


@pytest.mark.parametrize(("with_cuda", "gpu", "status"), [(False, True, 1), (True, True, 0), (False, False, 0)])
def test_an_nvidia_gpu_without_kernels_for_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch, with_cuda: bool, gpu: bool, status: int
) -> None:
    _use(monkeypatch, _extension(with_cuda=with_cuda))
    monkeypatch.setattr(doctor.Path, "glob", lambda self, pattern: iter([self / "nvidia0"] if gpu else []))
    assert doctor.main() == status


def test_missing_backends_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _use(monkeypatch, _extension())
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert doctor.main() == 1
    limits = _limits(capsys.readouterr().out)
    assert "NCCL: this torch has none; use Gloo" in limits
    assert "this torch has no Gloo" in limits


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _use(monkeypatch, _extension())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("tyro", "gymnasium") else object())
    assert doctor.main() == 0
    limits = _limits(capsys.readouterr().out)
    assert "fastsync train: gymnasium, tyro missing; install them: pip install " in limits


def test_the_list_of_training_modules_is_the_extra_and_what_the_trainer_imports() -> None:
    root = Path(doctor.__file__).parents[1]
    (extra,) = re.findall(r"^train = (\[.*\])$", (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert [re.split("[>=<]", name)[0] for name in ast.literal_eval(extra)] == list(doctor.TRAIN_MODULES)
    source = "".join(file.read_text() for file in (root / "fastsync" / "ppo").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE))
    others = {"torch", "fastsync", "ray", "ale_py"}  # there anyway, or of extras of their own
    assert imported - sys.stdlib_module_names - others == set(doctor.TRAIN_MODULES.values())

"""fastsync doctor: what it prints, and the exit status that scripts can rely on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
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
    assert "the CUDA half is not built" not in output


@pytest.mark.parametrize(
    ("torch_cuda", "way_out"), [(None, "install a torch with CUDA"), ("13.0", "rebuild with FASTSYNC_CUDA=1")]
)
def test_missing_cuda_half_comes_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], torch_cuda: str | None, way_out: str
) -> None:
    _use(monkeypatch, _extension())
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    assert doctor.main() == 0
    assert f"gradients on a GPU: the CUDA half is not built; {way_out}" in _limits(capsys.readouterr().out)


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
    assert "fastsync train: gymnasium, tyro missing; install them: pip install 'gymnasium>=1.4' matplotlib" in limits


def test_the_list_of_training_modules_is_the_extra() -> None:
    requirements = importlib.metadata.requires("fastsync-torch") or []
    extra = [line for line in requirements if line.endswith('extra == "train"')]
    # Without it only the utilisation of GPUs is unknown.
    extra = [line for line in extra if not line.startswith("nvidia-ml-py")]
    assert len(extra) == len(doctor.TRAIN_MODULES)
    for name, line in zip(doctor.TRAIN_MODULES, sorted(extra), strict=True):
        assert line.startswith(name)

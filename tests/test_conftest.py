"""The rule of the gpu marker: skipped without a GPU, failed where FAIL_WITHOUT_CUDA=1 asks for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def _run_gpu_test(tmp_path: Path, fail_without_cuda: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_needs_gpu.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    environment = {**os.environ, "FAIL_WITHOUT_CUDA": fail_without_cuda}
    return subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize(("setting", "status", "outcome"), [("0", 0, "1 skipped"), ("1", 1, "1 error")])
def test_gpu_marker_without_a_gpu(tmp_path: Path, setting: str, status: int, outcome: str) -> None:
    result = _run_gpu_test(tmp_path, setting)
    assert result.returncode == status
    assert outcome in result.stdout
    assert "torch sees no CUDA device" in result.stdout

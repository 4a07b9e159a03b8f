"""The rule of the gpu marker: skipped without a GPU, failed where FAIL_WITHOUT_CUDA=1 asks for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


TESTS = """
import os
import pytest

@pytest.mark.gpu
def test_that_is_skipped(): pass

def test_that_asks_for_failures(): os.environ["FAIL_WITHOUT_CUDA"] = "1"

@pytest.mark.gpu
def test_that_fails(): pass
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_gpu_marker_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "test_needs_gpu.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-rsE", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    environment = {**os.environ, "FAIL_WITHOUT_CUDA": "0", "TESTS_WITHOUT_RANKS": "1"}
    result = subprocess.run([*command, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "1 passed, 1 skipped, 1 error" in result.stdout

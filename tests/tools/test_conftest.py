"""The rule of the gpu marker: skipped without a GPU, failed where FAIL_WITHOUT_CUDA=1 asks for one."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import pytest_runtest_setup


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_gpu_marker_without_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_WITHOUT_CUDA", "1")
    pytest_runtest_setup(request.node)  # which has no such marker
    # Only for this test: another one looks at the markers of all tests.
    monkeypatch.setattr(request.node, "own_markers", [*request.node.own_markers, pytest.mark.gpu.mark])
    with pytest.raises(pytest.fail.Exception, match=r"^FAIL_WITHOUT_CUDA=1, but torch sees no CUDA device$"):
        pytest_runtest_setup(request.node)
    monkeypatch.setenv("FAIL_WITHOUT_CUDA", "0")
    with pytest.raises(pytest.skip.Exception, match=r"^torch sees no CUDA device$"):
        pytest_runtest_setup(request.node)

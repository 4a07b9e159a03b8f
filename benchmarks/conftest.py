"""The suites of pytest-benchmark, in the processes in which they run."""

from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One thread a rank, as torchrun sets it: what is compared is the passes, not how many cores they find."""
    torch.set_num_threads(1)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["torch"] = torch.__version__
    machine_info["torch_threads"] = torch.get_num_threads()

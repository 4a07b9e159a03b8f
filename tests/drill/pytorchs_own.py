"""PyTorch's own tests of torch.distributed, with ranks that are forked from this process."""

from __future__ import annotations

import importlib
import sys
import unittest
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

MODULE = "torch.testing._internal.distributed.distributed_test"


def import_tests(environment: Mapping[str, str], changed: pytest.MonkeyPatch) -> Any:
    """Imports their module anew, as one whose tests are for what the environment says."""
    for name, value in environment.items():
        changed.setenv(name, value)
    changed.setattr(importlib.import_module("torch.testing._internal.common_distributed"), "get_timeout", lambda _: 60)
    sys.modules.pop(MODULE, None)
    return importlib.import_module(MODULE)


def on_cpu(module: Any, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> Any:
    """Makes the class of their tests. ``around`` is what each rank runs in."""

    class TestOnCpu(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **options: Any) -> None:
            torch.set_num_threads(1)
            with around():
                super()._run(*args, **options)

    return TestOnCpu


def end_ranks() -> None:
    """Those of a test that was interrupted."""
    for rank in torch.multiprocessing.active_children():
        rank.kill()


def problem_of(test: unittest.TestCase) -> str:
    """Runs a test. Returns what it says if it does not pass."""
    result = unittest.TestResult()
    test.run(result)
    return "".join(text for _, text in (*result.failures, *result.errors, *result.skipped)).strip()


def compare(without: str, problem: Callable[[], str], name: str, reasons: Mapping[str, str]) -> None:
    """What passes without our part has to pass with it, or to have a reason: by a part of its error, or of its name."""
    if without:
        pytest.skip("does not pass without our part: needs a GPU, or what is not here")
    said = problem()
    if reason := next((why for part, why in reasons.items() if said and part in said + name), None):
        pytest.xfail(reason)
    assert not said, said.splitlines()[-1]

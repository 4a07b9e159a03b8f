"""PyTorch's own tests of collectives, messages and groups. What passes with Gloo has to pass with the backend fastsync.

A test that does not pass with Gloo needs a GPU, or what is not here.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import unittest
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

REASONS = {
    "monitored_barrier is only implemented for GLOO": "dist.monitored_barrier asks for Gloo by its name",
    "timed out in monitoredBarrier": "the test asks for the words of Gloo's time-out",
}
"""Of a difference: a part of its error, or of its test's name, and why it is none of ours."""
MODULE = "torch.testing._internal.distributed.distributed_test"
LEFT_OUT = ("ddp", "DistributedDataParallel", "gpu", "cuda", "nccl")
"""Parts of the names of tests that are run elsewhere, or need what is not here."""


class OurName(str):
    """The backend's name, for tests that compare it with Gloo's and know no other."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Theirs(NamedTuple):
    """The module with PyTorch's tests, and their class."""

    module: Any
    tests: Any
    names: list[str]


def load(as_backend: str, world_size: str, folder: str, changed: pytest.MonkeyPatch) -> Theirs:
    """Imports the tests as those of a backend, by whose name they skip themselves."""
    for name, value in {"BACKEND": as_backend, "WORLD_SIZE": world_size, "TEMP_DIR": folder}.items():
        changed.setenv(name, value)
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    changed.setattr(common, "get_timeout", lambda test: 60)
    sys.modules.pop(MODULE, None)
    module: Any = importlib.import_module(MODULE)

    class TestOnCpu(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **options: Any) -> None:
            torch.set_num_threads(1)
            super()._run(*args, **options)

    names = [name for name in dir(TestOnCpu) if name.startswith("test_")]
    chosen = [name for name in names if not any(part in name for part in LEFT_OUT)]
    return Theirs(module, TestOnCpu, [name for name in chosen if as_backend == "gloo" or "all_to_all" in name])


@pytest.fixture(scope="module", params=["2", "3"])
def theirs(request: pytest.FixtureRequest) -> Iterator[list[Theirs]]:
    """Gloo's tests, and those of all-to-all, which ask for MPI."""
    with pytest.MonkeyPatch.context() as changed, tempfile.TemporaryDirectory() as folder:
        yield [load(name, request.param, folder, changed) for name in ("gloo", "mpi")]
        sys.modules.pop(MODULE, None)
        for rank in torch.multiprocessing.active_children():  # of a test that was interrupted
            rank.kill()


def problem_of(theirs: Theirs, name: str, backend: str) -> str:
    """Runs a test. Returns what it says if it does not pass."""
    theirs.module.BACKEND, result = backend, unittest.TestResult()
    theirs.tests(name).run(result)
    return "".join(text for _, text in (*result.failures, *result.errors, *result.skipped)).strip()


def test_with_our_backend(theirs: list[Theirs], subtests: pytest.Subtests) -> None:
    for own, name in [(tests, name) for tests in theirs for name in tests.names]:
        with subtests.test(name):
            if problem_of(own, name, "gloo"):
                pytest.skip("does not pass with Gloo: needs a GPU, or what is not here")
            problem = problem_of(own, name, OurName("fastsync"))
            if reason := next((why for part, why in REASONS.items() if problem and part in problem + name), None):
                pytest.xfail(reason)
            assert not problem, problem.splitlines()[-1]

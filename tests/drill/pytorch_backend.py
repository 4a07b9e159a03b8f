"""PyTorch's own tests of collectives, messages and groups. What passes with Gloo has to pass with the backend fastsync.

A test that does not pass with Gloo needs a GPU, or what is not here.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from tests.drill import pytorchs_own

REASONS = {
    "monitored_barrier is only implemented for GLOO": "dist.monitored_barrier asks for Gloo by its name",
    "timed out in monitoredBarrier": "the test asks for the words of Gloo's time-out",
}
"""Of a difference: a part of its error, or of its test's name, and why it is none of ours."""
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
    environment = {"BACKEND": as_backend, "WORLD_SIZE": world_size, "TEMP_DIR": folder}
    module = pytorchs_own.import_tests(environment, changed)
    tests = pytorchs_own.on_cpu(module)
    names = [name for name in dir(tests) if name.startswith("test_")]
    chosen = [name for name in names if not any(part in name for part in LEFT_OUT)]
    return Theirs(module, tests, [name for name in chosen if as_backend == "gloo" or "all_to_all" in name])


@pytest.fixture(scope="module", params=["2", "3"])
def theirs(request: pytest.FixtureRequest) -> Iterator[list[Theirs]]:
    """Gloo's tests, and those of all-to-all, which ask for MPI."""
    with pytest.MonkeyPatch.context() as changed, tempfile.TemporaryDirectory() as folder:
        yield [load(name, request.param, folder, changed) for name in ("gloo", "mpi")]
        sys.modules.pop(pytorchs_own.MODULE, None)
        pytorchs_own.end_ranks()


def problem_of(theirs: Theirs, name: str, backend: str) -> str:
    theirs.module.BACKEND = backend
    return pytorchs_own.problem_of(theirs.tests(name))


def test_with_our_backend(theirs: list[Theirs], subtests: pytest.Subtests) -> None:
    for own, name in [(tests, name) for tests in theirs for name in tests.names]:
        with subtests.test(name):
            ours = partial(problem_of, own, name, OurName("fastsync"))
            pytorchs_own.compare(problem_of(own, name, "gloo"), ours, name, REASONS)

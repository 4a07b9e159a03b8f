"""Decides, for all tests, which of them run on this machine."""

from __future__ import annotations

import gc
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from multiprocessing import forkserver

import pytest

# torch 2.13's profiler writes to stderr, whenever it begins or ends, what is for tracing tools: lines of level 5.
QUIET = "6"
# c10d asks for the name of each address that connects. Where an answer is lost, it would be asked again after 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
# Processes that run tests get it from the one that has started them.
SEED = os.environ.setdefault("TESTS_SAMPLE", os.environ.get("TESTS_SEED") or f"{date.today():%Y%m%d}")

# A process that only hands out tests to others imports this file too, and would need seconds for torch: so what imports
# torch is imported where it is used.


def pytest_sessionstart(session: pytest.Session) -> None:
    """The server that ranks are forked from starts before a test gives it other things to import.

    One thread: several wait for each other in spinning loops, which take for ever where the cores have other work.
    TESTS_WITHOUT_RANKS=1 is for sessions that start no rank: the server takes seconds to import, and to end.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # others run the tests
    import torch

    from tests.ranks import fresh_process_context

    torch.set_num_threads(1)
    if os.environ.get("TESTS_WITHOUT_RANKS") != "1" and fresh_process_context().get_start_method() == "forkserver":
        forkserver.ensure_running()


def pytest_report_header() -> str:
    """What repeats this choice of cases."""
    return f"TESTS_SAMPLE={SEED} TESTS_SEED={os.environ.get('TESTS_SEED', '0')}"


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves one in n cases of a sampled test, and makes the others slow.

    They are other ones each day, and mixed: of two parameters, every second case would be all of one's values.
    """
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        (n,) = of_test[0].get_closest_marker("sampled").args
        mixed = sorted(of_test, key=lambda item: zlib.crc32(f"{SEED} {item.nodeid}".encode()))
        for item in mixed[-(-len(mixed) // n) :]:
            item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Takes what was imported and collected out of each later search for garbage, which took a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips gpu tests where they cannot run; FAIL_WITHOUT_CUDA=1 makes them fail, so that none skips in silence."""
    if item.get_closest_marker("gpu") is None or (reason := why_no_gpu()) is None:
        return
    if os.environ.get("FAIL_WITHOUT_CUDA") == "1":
        pytest.fail(f"FAIL_WITHOUT_CUDA=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def why_no_gpu() -> str | None:
    """What a gpu test lacks here, or None."""
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a test's tensors lie. While it runs on an emulated device, ``emulated.ops`` are the emulated operators;
    on a generic one, the operators are made of torch's own.
    """
    name, _, kernels = request.param.partition("-")
    if kernels == "generic":
        from tests import passes

        passes.use_kernels("aten")
        yield name
        passes.use_kernels("auto")
        return
    if name != "emulated":
        yield name
        return
    import torch

    from tests import emulated

    emulated.load()
    emulated.ops.namespace = "fastsync_emulated"
    torch.ops.fastsync_emulated.set_descending(kernels == "descending")
    yield "cpu"
    emulated.ops.namespace = "fastsync"


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    from tests.models import group_of_one

    with group_of_one():
        yield


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where there can be no network namespaces, which is found out by making some."""
    from benchmarks.network.namespaces import why_not

    if lacking := why_not():
        pytest.skip(f"no network namespaces: {lacking}")

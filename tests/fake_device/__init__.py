"""A device without hardware, for tests: the engine's way over streams, events and grouped messages, without a GPU.

PyTorch's PrivateUse1 backend under the name "fake_device". What is done on it is done at once, on the host, and it
notes who touches which memory on which stream, so that a missing wait is an error even where it did no harm:
``watched``.
``new_group`` gives a process group that keeps NCCL's rules and travels over Gloo.

``build()`` compiles the extension, once for all ranks; ``load()`` registers the device, in ranks only, for a process
keeps it until it ends.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock

from fastsync import _C as fastsync_C
from tests import ranks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / f"fake_device-torch-{torch.__version__}-{sys.implementation.cache_tag}"
DEVICE = "fake_device"
LIBRARY = BUILD / f"{DEVICE}.so"
TIME_LIMIT = 600.0  # seconds; it takes some 30 of two cores that have nothing else to do


def build() -> None:
    """Compiles what has changed."""
    sources = [*HERE.glob("*.cpp"), *HERE.glob("*.h"), *(ROOT / "csrc").rglob("*.h")]
    BUILD.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILD / "lock"):  # what several processes need, the first builds
        if LIBRARY.exists() and LIBRARY.stat().st_mtime > max(source.stat().st_mtime for source in sources):
            return
        command = [sys.executable, str(HERE / "setup.py"), "--quiet", "build_ext"]
        command += ["--build-lib", str(BUILD), "--build-temp", str(BUILD)]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where pip has put ninja
        subprocess.run(command, cwd=BUILD.parent, env={**os.environ, "PATH": path}, check=True, timeout=TIME_LIMIT)
        LIBRARY.touch()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """As ``tests.ranks.run_ranks``, with the extension ready to be loaded."""
    build()
    return ranks.run_ranks(fn, world_size, *args, shared_memory=False)  # as on a device


@cache
def load() -> Any:
    """Registers the device and its passes with torch and the engine. Returns the extension."""
    extension = load_device()
    fastsync_C.register_passes(DEVICE, extension.passes_over(fastsync_C.passes("cpu")))
    return extension


@cache
def load_device() -> Any:
    """As ``load``, for tests of a device that no passes were built for."""
    spec = importlib.util.spec_from_file_location(DEVICE, LIBRARY)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend(DEVICE)
    module = types.ModuleType(DEVICE)
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: extension.NUM_DEVICES  # type: ignore[attr-defined]
    torch._register_device_module(DEVICE, module)
    dist.Backend.register_backend(DEVICE, _new_backend, devices=[DEVICE])
    return extension


def _new_backend(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    return load_device().Group(gloo, rank, size)


def new_group(*, with_passes: bool = True) -> dist.ProcessGroup:
    """A process group of all ranks for the fake device."""
    load() if with_passes else load_device()
    group = dist.new_group(backend=DEVICE)
    assert isinstance(group, dist.ProcessGroup)
    return group


def backend_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device(DEVICE))


@contextmanager
def watched() -> Iterator[None]:
    """Raises AssertionError for each race, and for each block of memory that was let go while a stream used it."""
    load_device().take_violations()
    yield
    violations = load_device().take_violations()
    assert violations == [], "\n".join(["on the fake device:", *violations])


@contextmanager
def unwaited() -> Iterator[None]:
    """Raises AssertionError where the host waited for the device."""
    load_device().take_host_waits()
    yield
    waits = load_device().take_host_waits()
    assert waits == [], f"the host waited for: {', '.join(waits)}"

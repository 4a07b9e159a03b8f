"""A device without hardware, for tests: the engine's way over streams, events and grouped messages, without a GPU.

PyTorch's PrivateUse1 backend under the name "fake_device". What is done on it is done at once, on the host, and it
notes who touches which memory on which stream, so that a missing wait is an error even where it did no harm:
``watched``.
``new_group`` gives a process group that keeps NCCL's rules and travels over Gloo.

``build()`` compiles the extension, before there are ranks; ``load()`` registers the device, in ranks only, for a
process keeps it until it ends.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import setup
from tests import compiled, passes, ranks

DEVICE = "fake_device"
INCLUDED = [f"-I{compiled.ROOT / 'tests/fake_device'}", *setup.system_includes([sysconfig.get_path("include")])]
# All files at once, for most of a file's time goes into torch's headers.
SOURCES = {"tests/fake_device/bindings.cpp": ["-O0", *INCLUDED]}


def build() -> Path:
    """The extension, compiled where something has changed."""
    return compiled.library(DEVICE, SOURCES, "csrc/**/*.h", "tests/fake_device/*")


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """As ``tests.ranks.run_ranks``, with the extension ready to be loaded."""
    build()
    return ranks.run_ranks(fn, world_size, *args, shared_memory=False)  # as on a device


def on_ranks(world_size: int | None = None, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``tests.ranks.on_ranks``, with the extension ready to be loaded."""
    return ranks.on_ranks(world_size, before=build, shared_memory=False, **options)


@cache
def load() -> Any:
    """Registers the device and its passes with torch and the engine. Returns the extension."""
    extension = load_device()
    passes.register_passes(DEVICE, extension.passes_over(passes.passes_of("cpu")))
    return extension


@cache
def load_device() -> Any:
    """As ``load``, for tests of a device that no passes were built for."""
    spec = importlib.util.spec_from_file_location(DEVICE, build())
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend(DEVICE)
    module = types.ModuleType(DEVICE)
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: extension.NUM_DEVICES  # type: ignore[attr-defined]
    # torch.manual_seed() warns where a device has none.
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
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
    backend_of(group).bind()  # as a device_id does
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

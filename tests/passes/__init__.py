"""A library of C++ for tests and benchmarks, over the engine's passes. It has what the package does not need.

It registers ``torch.ops.fastsync.{pack,unpack,reduce}``, the passes on tensors. Importing this package compiles it
where something has changed, so that ranks find it ready.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from typing import Any

import setup
from fastsync import _C
from tests import compiled

SOURCES = {
    "tests/passes/ops.cpp": [],
    "tests/passes/bindings.cpp": setup.system_includes([sysconfig.get_path("include")]),
}


def _load() -> Any:
    path = compiled.library("passes", SOURCES, "csrc/passes/**/*.h", with_engine=_C.__file__)
    spec = importlib.util.spec_from_file_location("fastsync_passes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_library = _load()
use_kernels = _library.use_kernels
"""Overrides FASTSYNC_KERNELS from now on."""
passes_of = _library.passes_of
"""A capsule with the struct Passes that was built or registered for a type of device."""
register_passes = _library.register_passes
"""Gives a type of device passes of its own."""

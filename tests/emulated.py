"""The kernels of csrc/passes/cuda compiled for the host, with tests/cuda_shim in place of the CUDA runtime.

They become operators of their own for tensors on the CPU: ``torch.ops.fastsync_emulated``. What this proves is
arithmetic, indexing and barriers, and nothing about fences between blocks, streams or speed.
"""

from __future__ import annotations

import functools

import torch

from tests import compiled

SHIM = "tests/cuda_shim"
FLAGS = ["-Dfastsync=fastsync_emulated", f"-I{compiled.ROOT / SHIM}"]
# What the sanitizers find, fibers.cpp reports.
KERNEL_FLAGS = [*FLAGS, "-fsanitize=alignment,bounds", "-x", "c++"]
FIBERS = {f"{SHIM}/fibers.cpp": [*FLAGS, "-O2"]}
SOURCES = {
    "csrc/passes/cuda/pack_unpack.cu": KERNEL_FLAGS,
    f"{SHIM}/ops.cpp": FLAGS,
    "csrc/passes/backend.cpp": FLAGS,
    "csrc/passes/workspace.cpp": FLAGS,
    "csrc/passes/cuda_graphs.cpp": FLAGS,
    **FIBERS,
}


class Operators:
    """``torch.ops.fastsync``, or what stands in for it while a test runs on emulated kernels."""

    def __init__(self) -> None:
        self.namespace = "fastsync"

    def __getattr__(self, name: str) -> object:
        return getattr(getattr(torch.ops, self.namespace), name)


ops = Operators()


@functools.cache
def load() -> None:
    torch.ops.load_library(compiled.library("emulated", SOURCES, "csrc/**/*", f"{SHIM}/*", "tests/passes/*.cpp"))

"""The kernels of csrc/passes/cuda compiled for the host, with tests/cuda_shim in place of the CUDA runtime.

They become operators of their own for tensors on the CPU: ``torch.ops.fastsync_emulated``. What this proves is
arithmetic, indexing and barriers, and nothing about fences between blocks, streams or speed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils.cpp_extension import include_paths, library_paths

import setup

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build/emulated"
SHIM = "tests/cuda_shim"
# -O1: compiling takes longer than running. What the sanitizers find, fibers.cpp reports.
KERNEL_FLAGS = ["-fsanitize=alignment,bounds", "-x", "c++"]
SOURCES: dict[str, list[str]] = {
    "csrc/passes/cuda/pack_unpack.cu": KERNEL_FLAGS,
    f"{SHIM}/ops.cpp": [],
    "csrc/passes/backend.cpp": [],
    f"{SHIM}/fibers.cpp": ["-O2"],
}


class Operators:
    """``torch.ops.fastsync``, or what stands in for it while a test runs on emulated kernels."""

    def __init__(self) -> None:
        self.namespace = "fastsync"

    def __getattr__(self, name: str) -> object:
        return getattr(getattr(torch.ops, self.namespace), name)


ops = Operators()


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def flags() -> list[str]:
    own = ["-O1", "-fPIC", "-Wno-unknown-pragmas", "-Werror", "-Dfastsync=fastsync_emulated"]
    return [*setup.CXX_FLAGS, *own, f"-I{ROOT / SHIM}", f"-I{ROOT / 'csrc'}", *setup.system_includes(include_paths())]


def key() -> str:
    """What the library depends on: every file that may be included, the flags, torch."""
    digest = hashlib.sha256(repr((compiler(), flags(), SOURCES, torch.__version__)).encode())
    for path in sorted([*(ROOT / "csrc").rglob("*"), *(ROOT / SHIM).iterdir(), ROOT / "tests/emulated.py"]):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def run(command: list[str]) -> None:
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}"


def compile_library(name: Path, sources: dict[str, list[str]]) -> Path:
    """``name``.so, from sources and the flags of each beyond the common ones."""
    objects = [f"{name}-{Path(source).stem}.o" for source in sources]
    commands = [
        [compiler(), *flags(), *own, "-c", source, "-o", out]
        for (source, own), out in zip(sources.items(), objects, strict=True)
    ]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        list(pool.map(run, commands))
    torch_libraries = [f"-L{folder}" for folder in library_paths()] + ["-lc10", "-ltorch_cpu"]
    run([compiler(), "-shared", *objects, *torch_libraries, "-o", f"{name}.so"])
    for out in objects:
        Path(out).unlink()
    return Path(f"{name}.so")


def build() -> Path:
    """The library, compiled unless it is there already, in place of older ones."""
    library = FOLDER / f"{key()}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"):  # what several processes need, the first builds
        if not library.exists():
            old = list(FOLDER.glob("*.so"))
            os.replace(compile_library(FOLDER / f"unfinished-{os.getpid()}", SOURCES), library)
            for each in old:
                each.unlink(missing_ok=True)
    return library


@functools.cache
def load() -> None:
    torch.ops.load_library(build())

"""Libraries of C++ that tests compile: once for all processes, and again where something has changed."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils.cpp_extension import include_paths, library_paths

import setup

ROOT = Path(__file__).parent.parent
COMPILER = os.environ.get("CXX", "c++")
# -O1: compiling takes longer than running.
FLAGS = [*setup.CXX_FLAGS, "-O1", "-fPIC", "-Wno-unknown-pragmas", "-Werror", f"-I{ROOT / 'csrc'}"]
FLAGS += setup.system_includes(include_paths())
LIBRARIES = [f"-L{folder}" for folder in library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch_python"]
Sources = Mapping[str, Sequence[str]]
"""By file the flags beyond the common ones."""


def run(command: list[str]) -> None:
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}"


def compile_library(name: Path, sources: Sources, linked: Sequence[str]) -> Path:
    """``name``.so."""
    objects = [f"{name}-{Path(source).stem}.o" for source in sources]
    commands = [
        [COMPILER, *FLAGS, *own, "-c", source, "-o", out]
        for (source, own), out in zip(sources.items(), objects, strict=True)
    ]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        list(pool.map(run, commands))
    run([COMPILER, "-shared", *objects, *linked, *LIBRARIES, "-o", f"{name}.so"])
    for out in objects:
        Path(out).unlink()
    return Path(f"{name}.so")


def library(name: str, sources: Sources, *patterns: str, with_engine: str | None = None) -> Path:
    """build/``name``, compiled unless it is there already, in place of older ones. It depends on these files, too.

    ``with_engine``: the extension whose functions it calls.
    """
    linked = [with_engine] if with_engine else []
    digest = hashlib.sha256(repr((COMPILER, FLAGS, sources, linked, torch.__version__)).encode())
    for path in sorted(path for pattern in (*sources, *patterns) for path in ROOT.glob(pattern) if path.is_file()):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / name
    built = folder / f"{digest.hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # what several processes need, the first builds
        if not built.exists():
            old = list(folder.glob("*.so"))
            os.replace(compile_library(folder / f"unfinished-{os.getpid()}", sources, linked), built)
            for each in old:
                each.unlink(missing_ok=True)
    return built

"""Compiles the CPU half for 64-bit ARM, so that what only x86 has does not come in by accident: ``make check-aarch64``.

Every .cpp of the engine is compiled as setup.py would, but for the bindings, which take the other machine's Python.
torch's headers are the same everywhere. Nothing is linked or kept. Without the compiler it says so and succeeds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import setup  # noqa: E402

COMPILER = "aarch64-linux-gnu-g++"
PACKAGE = "g++-aarch64-linux-gnu"
WITHOUT_PYTHON = ["passes", "transport", "sums", "engine"]


def compiles(source: Path) -> bool:
    flags = [*setup.CXX_FLAGS, "-Werror", "-c", "-o", os.devnull]
    includes = [f"-I{ROOT / 'csrc'}", *setup.system_includes(include_paths())]
    result = subprocess.run([COMPILER, *flags, *includes, str(source)], capture_output=True, text=True, check=False)
    print(f"check-aarch64: {source.relative_to(ROOT)} {'FAILED' if result.returncode else 'compiles'}", flush=True)
    print(result.stderr, end="", flush=True)
    return result.returncode == 0


def main() -> int:
    if shutil.which(COMPILER) is None:
        print(f"check-aarch64: {COMPILER} is not on the PATH (Debian's {PACKAGE}): NOTHING was compiled for it")
        return 0
    sources = sorted(source for folder in WITHOUT_PYTHON for source in (ROOT / "csrc" / folder).rglob("*.cpp"))
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        results = list(pool.map(compiles, sources))
    print(f"check-aarch64: {sum(results)} of {len(results)} files compile")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the CPU half for 64-bit ARM, so that what only x86 has does not come in by accident: ``make check-aarch64``.

Every .cpp of the engine is compiled as setup.py would, but for the bindings, which take the other machine's Python.
torch's headers are the same everywhere. Nothing is linked or kept. Without the compiler it says so and succeeds.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import setup  # noqa: E402
from tools.compiling import compile_all  # noqa: E402

COMPILER = "aarch64-linux-gnu-g++"
PACKAGE = "g++-aarch64-linux-gnu"
WITHOUT_PYTHON = ["passes", "transport", "sums", "engine"]


def main() -> int:
    if shutil.which(COMPILER) is None:
        print(f"check-aarch64: {COMPILER} is not on the PATH (Debian's {PACKAGE}): NOTHING was compiled for it")
        return 0
    sources = sorted(source for folder in WITHOUT_PYTHON for source in (ROOT / "csrc" / folder).rglob("*.cpp"))
    command = [COMPILER, *setup.CXX_FLAGS, "-Werror", "-c", "-o", os.devnull, f"-I{ROOT / 'csrc'}"]
    command += setup.system_includes(include_paths())
    return compile_all("check-aarch64", [[*command, str(source)] for source in sources])


if __name__ == "__main__":
    sys.exit(main())

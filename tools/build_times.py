"""Says how long a build takes here, beside the time of a plain compiler for torch's headers, which compares machines.

``python -m tools.build_times`` builds a copy of the tree without CUDA, from nothing and after an edit.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from setup import HERE, make_flags
from tools.compile import host_compiler

TREE = ("csrc", "fastsync", "tools", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def seconds(command: list[str], folder: str) -> float:
    begin = time.monotonic()
    subprocess.run(command, cwd=folder, check=True, env=os.environ | {"FASTSYNC_CUDA": "0"})
    return time.monotonic() - begin


def main(edited: str = "csrc/engine/backward.cpp") -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path in (HERE / name for name in TREE):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, Path(folder, path.name))
        flags = [*make_flags(with_cuda=False).cxx, "-fsyntax-only", "-include", "torch_headers.h", "-x", "c++"]
        unit = min(seconds([*host_compiler(), *flags, os.devnull], folder) for _ in range(3))
        print(f"reading torch's headers: {unit:.1f} s, the unit of what follows", flush=True)
        for what in ("from nothing", f"after an edit of {edited}"):
            taken = seconds([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], folder)
            print(f"a build {what}: {taken:.1f} s, {taken / unit:.1f} times the unit", flush=True)
            Path(folder, edited).touch()


if __name__ == "__main__":
    main()

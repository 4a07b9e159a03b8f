"""Compiles the CUDA half for sm_80 and sm_90, so that it does not rot: ``make check-cuda``.

It takes nvcc, and neither a GPU nor a CUDA build of torch. Compiled are every csrc/passes/cuda/*.cu, and each .cpp that
is another one with the CUDA half. Nothing is linked or kept. Without nvcc it says so and succeeds.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
sys.path.insert(0, str(ROOT))
import setup  # noqa: E402

GENCODE = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"]
WITH_CUDA = "FASTSYNC_WITH_CUDA"
# torch's CUDA headers include this file, which only CUDA builds of torch carry. It holds macros about cuDNN.
MACROS = "c10/cuda/impl/cuda_cmake_macros.h"


def commands(nvcc: str, scratch: Path) -> list[list[str]]:
    toolkit = setup.toolkit_of(nvcc)
    if toolkit is None:
        raise SystemExit(f"check-cuda: {nvcc} --dryrun does not tell where its toolkit is")
    folders = [*include_paths(), sysconfig.get_path("include"), f"{toolkit}/include", str(scratch)]
    if not any((Path(folder) / MACROS).exists() for folder in folders):
        (scratch / MACROS).parent.mkdir(parents=True)
        (scratch / MACROS).touch()
    shared = [f"-D{WITH_CUDA}", f"-I{CSRC}", *setup.system_includes(folders)]
    kernel = [nvcc, *setup.NVCC_FLAGS, "-Werror=all-warnings", *GENCODE, *shared, "-c", "-o"]
    commands = [[*kernel, f"{scratch / file.stem}.o", str(file)] for file in sorted(CSRC.glob("passes/cuda/*.cu"))]
    glue = [os.environ.get("CXX", "c++"), "-fsyntax-only", *setup.CXX_FLAGS, "-Werror"]
    # All files if a header asks whether the CUDA half is there, for any of them may include it.
    in_header = any(WITH_CUDA in header.read_text() for header in CSRC.rglob("*.h"))
    sources = [file for file in sorted(CSRC.rglob("*.cpp")) if in_header or WITH_CUDA in file.read_text()]
    return commands + [[*glue, *shared, str(file)] for file in sources]


def compiles(command: Sequence[str]) -> bool:
    """Runs a command and prints what it says."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    verdict = "FAILED" if result.returncode else "ok"
    print(f"{shlex.join(command)}\n{result.stdout}check-cuda: {verdict}", flush=True)
    return result.returncode == 0


def main() -> int:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("check-cuda: nvcc is not on the PATH: NOTHING was compiled with it")
        return 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        results = list(pool.map(compiles, commands(nvcc, Path(folder))))
    print(f"check-cuda: {sum(results)} of {len(results)} files compile")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Compiles what this machine cannot run, so that it does not rot: ``tools/check_compile.py cuda`` or ``aarch64``.

cuda: every csrc/passes/cuda/*.cu by nvcc for sm_80 and sm_90, and each .cpp that is another one with the CUDA half. It
takes neither a GPU nor a CUDA build of torch. aarch64: every .cpp of the engine for 64-bit ARM, but for the bindings,
which take that machine's Python. Nothing is linked or kept. Without the compiler it says so and succeeds.
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
WITHOUT_PYTHON = ("passes", "transport", "sums", "engine")


def cuda_commands(nvcc: str, scratch: Path) -> list[list[str]]:
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
    glue = [os.environ.get("CXX", "c++"), "-fsyntax-only", *setup.CXX_FLAGS, "-Werror", "-DTORCH_EXTENSION_NAME=_C"]
    # All files if a header asks whether the CUDA half is there, for any of them may include it.
    in_header = any(WITH_CUDA in header.read_text() for header in CSRC.rglob("*.h"))
    sources = [file for file in sorted(CSRC.rglob("*.cpp")) if in_header or WITH_CUDA in file.read_text()]
    return commands + [[*glue, *shared, str(file)] for file in sources]


def aarch64_commands(compiler: str, scratch: Path) -> list[list[str]]:
    command = [compiler, *setup.CXX_FLAGS, "-Werror", f"-I{CSRC}", *setup.system_includes(include_paths()), "-c", "-o"]
    sources = sorted(file for folder in WITHOUT_PYTHON for file in (CSRC / folder).rglob("*.cpp"))
    return [[*command, str(scratch / f"{number}.o"), str(file)] for number, file in enumerate(sources)]


TARGETS = {"cuda": ("nvcc", cuda_commands), "aarch64": ("aarch64-linux-gnu-g++", aarch64_commands)}


def compile_all(label: str, commands: Sequence[Sequence[str]]) -> int:
    """Runs commands, ``MAX_JOBS`` at a time, by default 2, and prints what each says. Returns an exit status."""

    def succeeds(command: Sequence[str]) -> bool:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(f"{shlex.join(command)}\n{result.stdout}{label}: {'FAILED' if result.returncode else 'ok'}", flush=True)
        return result.returncode == 0

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        results = list(pool.map(succeeds, commands))
    print(f"{label}: {sum(results)} of {len(results)} files compile")
    return 0 if results and all(results) else 1


def main(target: str) -> int:
    name, commands = TARGETS[target]
    compiler = shutil.which(name)
    if compiler is None:
        print(f"check-{target}: {name} is not on the PATH: NOTHING was compiled with it")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return compile_all(f"check-{target}", commands(compiler, Path(folder)))


if __name__ == "__main__":
    if sys.argv[1:] not in [[target] for target in TARGETS]:
        sys.exit(f"usage: check_compile.py {' | '.join(TARGETS)}")
    sys.exit(main(sys.argv[1]))

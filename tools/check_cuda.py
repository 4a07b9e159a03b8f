"""Compiles the CUDA half without a GPU and without a CUDA build of torch, so that it cannot rot on machines like that.

Every csrc/passes/cuda/*.cu is compiled by nvcc for sm_80 and sm_90; every .cpp of csrc that is another one with the
CUDA half is syntax-checked as setup.py would compile it then. The rest the build itself compiles, CUDA or not. Nothing
is linked or kept. Where nvcc is not on the PATH it says so and succeeds.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import setup  # noqa: E402
from tools.compiling import compile_all  # noqa: E402

GENCODE = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"]
# torch's CUDA headers include this file, which only CUDA builds of torch carry. It holds macros about cuDNN.
MACROS = "c10/cuda/impl/cuda_cmake_macros.h"
WITH_CUDA = "FASTSYNC_WITH_CUDA"


def kernel_command(nvcc: str, source: Path, output: Path, folders: list[str]) -> list[str]:
    flags = [*setup.NVCC_FLAGS, "-Werror=all-warnings", f"-D{WITH_CUDA}", *GENCODE]
    includes = [f"-I{ROOT / 'csrc'}", *setup.system_includes(folders)]
    return [nvcc, *flags, *includes, "-c", str(source), "-o", str(output / f"{source.stem}.o")]


def glue_command(source: Path, folders: list[str]) -> list[str]:
    flags = [*setup.CXX_FLAGS, "-Werror", f"-D{WITH_CUDA}", "-DTORCH_EXTENSION_NAME=_C"]
    includes = [f"-I{ROOT / 'csrc'}", *setup.system_includes(folders)]
    return [os.environ.get("CXX", "c++"), "-fsyntax-only", *flags, *includes, str(source)]


def glue_sources() -> list[Path]:
    """The files that ask whether the CUDA half is there; all of them if a header does, for any may include it."""
    headers, sources = sorted((ROOT / "csrc").rglob("*.h")), sorted((ROOT / "csrc").rglob("*.cpp"))
    if any(WITH_CUDA in header.read_text() for header in headers):
        return sources
    return [source for source in sources if WITH_CUDA in source.read_text()]


def main() -> int:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("check-cuda: nvcc is not on the PATH: the CUDA half was NOT compiled")
        return 0
    toolkit = setup.toolkit_of(nvcc)
    if toolkit is None:
        raise SystemExit(f"check-cuda: {nvcc} --dryrun does not tell where its toolkit is")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folders = [*include_paths(), sysconfig.get_path("include"), f"{toolkit}/include"]
        if not any((Path(folder) / MACROS).exists() for folder in folders):
            (scratch / MACROS).parent.mkdir(parents=True)
            (scratch / MACROS).touch()
            folders.append(str(scratch))
        kernels = sorted((ROOT / "csrc/passes/cuda").glob("*.cu"))
        commands = [kernel_command(nvcc, source, scratch, folders) for source in kernels]
        commands += [glue_command(source, folders) for source in glue_sources()]
        if not commands:
            raise SystemExit("check-cuda: csrc holds no .cu and no .cpp")
        return compile_all("check-cuda", commands)


if __name__ == "__main__":
    sys.exit(main())

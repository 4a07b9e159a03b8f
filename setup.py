"""Builds ``fastsync._C``, the engine, and ``fastsync._ppo``, operators of the trainer, against the torch of this
environment; everything else is in pyproject.toml.

FASTSYNC_CUDA=1 insists on the CUDA half and fails with the reason, FASTSYNC_CUDA=0 leaves it out; unset, it is built
where it can be. FASTSYNC_WERROR=1 makes compiler warnings errors, FASTSYNC_SANITIZE=address, undefined or thread
has that sanitizer watch the C++ half. TORCH_CUDA_ARCH_LIST chooses the GPU architectures, MAX_JOBS the number of
parallel compilations.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

HERE = Path(__file__).resolve().parent
SETUPTOOLS_NEEDED = (77, 0, 3)
HOW_TO_BUILD = "pip install torch ninja 'setuptools>=77.0.3', then the same command with --no-build-isolation"
# Those that a toolkit knows, from which release on; the last one's PTX serves what comes after it.
CUDA_ARCHITECTURES = {"8.0": (11, 0), "9.0": (11, 8), "10.0": (12, 8), "12.0": (12, 8)}
# More compile faster in all, and slower after a change of one.
FILES_A_UNIT = 6

# -fopenmp belongs to compiling only. at::parallel_for is a template, so its parallel region is compiled into the
# extension, but the OpenMP runtime has to be the one that torch has loaded: linking another would give the process a
# second thread pool.
# -g0: Python asks for debug information, which takes as long to write as all else.
# -ffp-contract=off: the arithmetic must round like the reference, so no multiply-add may be fused.
CXX_FLAGS = [
    "-O3",
    "-g0",
    "-std=c++20",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]
# After the others, for the last -O counts. The sanitizers have gcc warn of what is uninitialised where nothing is.
SANITIZER_FLAGS = ["-fno-omit-frame-pointer", "-O1", "-g1", "-Wno-maybe-uninitialized"]
SANITIZERS = {
    "address": ["-fsanitize=address"],
    # It ends the process, as the others do. Not of vptrs: torch hides what tells the types of some of its classes.
    "undefined": ["-fsanitize=undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"],
    # It does not see the fences in torch's reference counts, which gcc warns of.
    "thread": ["-fsanitize=thread", "-Wno-tsan"],
}
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-lineinfo", "-Xcompiler=-fvisibility=hidden,-Wall,-Wextra"]


def fail(message: str) -> SystemExit:
    return SystemExit(f"fastsync: {message}")


def without_torch(error: ImportError) -> dict[str, type[setuptools.Command]]:
    """The commands that need torch, and say so. A source distribution needs none."""

    def run(self: setuptools.Command) -> None:
        raise fail(
            f"the extension is built for your torch, which cannot be imported here ({error}); pip's build isolation "
            f"hides it: {HOW_TO_BUILD}"
        )

    return {command.__name__: type(command.__name__, (command,), {"run": run}) for command in (build_ext, dist_info)}


def check_setuptools() -> None:
    version = tuple(int(part) for part in re.findall(r"\d+", setuptools.__version__)[:3])
    if version < SETUPTOOLS_NEEDED:
        raise fail(f"setuptools {setuptools.__version__} is too old to build with: {HOW_TO_BUILD}")


def toolkit_of(nvcc: str) -> str | None:
    """The folder of the toolkit that ``nvcc``, maybe a wrapper script, belongs to; None where it does not tell."""
    try:
        dryrun = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-E", os.devnull], capture_output=True, text=True)
    except OSError:
        return None
    top = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
    return os.path.normpath(top.group(1).strip()) if top and dryrun.returncode == 0 else None


def choose_toolkit() -> None:
    """Sets CUDA_HOME, unless it is set, to the toolkit of the nvcc on the PATH, before torch looks for one.

    torch takes the folder above the nvcc that it finds, which is no toolkit where that is a wrapper script.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is not None and not {"CUDA_HOME", "CUDA_PATH"} & os.environ.keys() and (toolkit := toolkit_of(nvcc)):
        os.environ["CUDA_HOME"] = toolkit


def toolkit_version(cuda_home: str) -> str | None:
    """The release of the nvcc under ``cuda_home``, such as "13.0"; None where there is none that runs."""
    try:
        text = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    release = re.search(r"release (\d+\.\d+)", text)
    return release.group(1) if release else None


def cuda_obstacle(torch_version: str, torch_cuda: str | None, cuda_home: str | None) -> str | None:
    """Why the CUDA half cannot be built against this torch; None where it can. A GPU need not be present."""
    if torch_cuda is None:
        return f"torch {torch_version} is built without CUDA (torch.version.cuda is None)"
    if cuda_home is None:
        return "no CUDA toolkit was found: set CUDA_HOME or put nvcc on the PATH"
    toolkit = toolkit_version(cuda_home)
    if toolkit is None:
        return f"{cuda_home}/bin/nvcc does not run: point CUDA_HOME at a CUDA toolkit"
    if toolkit.split(".")[0] != torch_cuda.split(".")[0]:
        return f"torch {torch_version} is built with CUDA {torch_cuda}, but the toolkit in {cuda_home} is {toolkit}"
    if not has_headers(cuda_home):
        return f"{cuda_home} has nvcc, but no cuda_runtime_api.h: point CUDA_HOME at a toolkit that has both"
    return None


def has_headers(cuda_home: str) -> bool:
    """Tells whether the C++ compiler finds the runtime's headers, in the toolkit or where the system has them.

    torch's own packages do not suffice: they bring cuda_runtime_api.h, but not crt/host_defines.h, which it includes.
    """
    header = ["-include", "cuda_runtime_api.h", "-I", f"{cuda_home}/include"]
    command = [os.environ.get("CXX", "c++"), "-E", *header, "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def architectures(toolkit: str) -> str:
    """TORCH_CUDA_ARCH_LIST for the toolkit of this release."""
    release = tuple(map(int, toolkit.split(".")))
    return ";".join(name for name, since in CUDA_ARCHITECTURES.items() if since <= release) + "+PTX"


def wants_cuda(setting: str, obstacle: str | None) -> bool:
    if setting not in ("", "0", "1"):
        raise fail(f"FASTSYNC_CUDA={setting!r} means nothing: 1 insists on the CUDA half, 0 leaves it out")
    if setting == "1" and obstacle is not None:
        raise fail(f"FASTSYNC_CUDA=1, but the CUDA half cannot be built: {obstacle}")
    if setting == "" and obstacle is not None:
        print(f"fastsync: building the CPU half only: {obstacle}", file=sys.stderr)
    return setting != "0" and obstacle is None


def check_sanitizer(setting: str) -> None:
    if setting not in ("", *SANITIZERS):
        raise fail(f"FASTSYNC_SANITIZE={setting!r} means nothing: {', '.join(SANITIZERS)} build with that sanitizer")


def files(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(HERE)) for path in HERE.glob(pattern))


def system_includes(folders: list[str]) -> list[str]:
    """The flags that g++ and nvcc both understand: nvcc refuses -isystem and its folder in one word."""
    return [word for folder in folders for word in ("-isystem", folder)]


def make_extension(name: str, sources: list[str], with_cuda: bool = False, sanitizer: str = "") -> setuptools.Extension:
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    cxx, nvcc = list(CXX_FLAGS), list(NVCC_FLAGS)
    if os.environ.get("FASTSYNC_WERROR") == "1":
        cxx.append("-Werror")
        nvcc.append("-Werror=all-warnings")
    if sanitizer:
        cxx += SANITIZERS[sanitizer] + SANITIZER_FLAGS
    if with_cuda:
        cxx.append("-DFASTSYNC_WITH_CUDA")
        nvcc.append("-DFASTSYNC_WITH_CUDA")
    extension = (CUDAExtension if with_cuda else CppExtension)(
        name,
        sources,
        depends=[path for path in files("csrc/**/*") if os.path.isfile(path)],
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=SANITIZERS.get(sanitizer, []),
    )
    # torch's headers become system headers: the warnings are for our own code.
    for flags in (cxx, nvcc):
        flags += system_includes(extension.include_dirs)
    extension.include_dirs = [str(HERE / "csrc")]
    return extension


def make_extensions(with_cuda: bool, sanitizer: str = "") -> list[setuptools.Extension]:
    trainer = files("csrc/ppo/*.cpp")
    engine = [source for source in files("csrc/**/*.cpp") if source not in trainer]
    kernels = files("csrc/**/*.cu") if with_cuda else []
    return [
        make_extension("fastsync._C", engine + kernels, with_cuda, sanitizer),
        make_extension("fastsync._ppo", trainer, sanitizer=sanitizer),
    ]


def units(sources: list[str], folder: Path) -> list[str]:
    """Writes sources of C++ that include up to FILES_A_UNIT of ``sources`` each, all of one folder.

    Most of a file's time goes into torch's headers, which a unit reads once.
    """
    others = [source for source in sources if not source.endswith(".cpp")]
    written = []
    for name, group in itertools.groupby(sorted(set(sources) - set(others), key=os.path.split), os.path.dirname):
        members = list(group)
        for index in range(0, len(members), FILES_A_UNIT):
            unit = folder / f"{name.replace('/', '_')}_{index // FILES_A_UNIT}.cpp"
            included = (os.path.relpath(member, "csrc") for member in members[index : index + FILES_A_UNIT])
            text = "".join(f'#include "{member}"\n' for member in included)
            if not unit.exists() or unit.read_text() != text:
                unit.parent.mkdir(parents=True, exist_ok=True)
                unit.write_text(text)
            written.append(str(unit))
    return written + others


def main() -> None:
    check_setuptools()
    try:
        import torch
    except ImportError as error:
        setuptools.setup(ext_modules=[setuptools.Extension("fastsync._C", [])], cmdclass=without_torch(error))
        return
    # torch looks there for ninja, which pip puts beside this Python.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    choose_toolkit()
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension

    obstacle = cuda_obstacle(torch.__version__, torch.version.cuda, CUDA_HOME)
    with_cuda = wants_cuda(os.environ.get("FASTSYNC_CUDA", ""), obstacle)
    if with_cuda and (toolkit := toolkit_version(CUDA_HOME)) is not None:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures(toolkit))
    sanitizer = os.environ.get("FASTSYNC_SANITIZE", "")
    check_sanitizer(sanitizer)
    objects = f"build/torch-{torch.__version__}-{sys.implementation.cache_tag}{f'-{sanitizer}' if sanitizer else ''}"

    class BuildInOneFolder(BuildExtension):
        """Keeps the objects of one torch and one Python in one folder under build/.

        pip, which would compile everything in a fresh folder each time, and `setup.py build_ext --inplace` share it,
        and objects compiled for another torch are never taken for this one's.
        """

        def finalize_options(self) -> None:
            if self.build_temp is None:
                self.build_temp = objects
            super().finalize_options()

        def run(self) -> None:
            for extension in self.extensions:
                extension.sources = units(extension.sources, Path("build/units"))
            super().run()
            # Another torch may load the extension, and crash. fastsync/installation.py reads this first.
            Path(self.get_ext_fullpath("fastsync._C")).with_suffix(".torch").write_text(torch.__version__)

    setuptools.setup(ext_modules=make_extensions(with_cuda, sanitizer), cmdclass={"build_ext": BuildInOneFolder})


if __name__ == "__main__":
    main()

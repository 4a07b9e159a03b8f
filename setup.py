"""Builds ``fastsync._C``, the engine, and ``fastsync._ppo``, operators of the trainer, against the torch of this
environment; everything else is in pyproject.toml.

FASTSYNC_CUDA=1 insists on the CUDA half and fails with the reason, FASTSYNC_CUDA=0 leaves it out; unset, it is built
where it can be. FASTSYNC_WHEEL=1 makes a wheel that others install: it names the torch that it needs, and goes with no
other. FASTSYNC_WERROR=1 makes compiler warnings errors, FASTSYNC_SANITIZE=address, undefined or thread
has that sanitizer watch the C++ half. TORCH_CUDA_ARCH_LIST chooses the GPU architectures, MAX_JOBS the number of
parallel compilations.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # pip runs this file from elsewhere
from tools.compile import Flags, compile_units, host_compiler, macros, units  # noqa: E402

SETUPTOOLS_NEEDED = (77, 0, 3)
HOW_TO_BUILD = "pip install torch numpy ninja 'setuptools>=77.0.3', then the same command with --no-build-isolation"
# numpy: torch's collectives of objects take it, though torch does not install it.
REQUIREMENTS = ["numpy", "torch>=2.11"]
# Those that a toolkit knows, from which release on; the last one's PTX serves what comes after it.
CUDA_ARCHITECTURES = {"8.0": (11, 0), "9.0": (11, 8), "10.0": (12, 8), "12.0": (12, 8)}
ON_REQUEST = "FASTSYNC_CUDA=0 was set when it was built"
TERMINAL = "/dev/tty"

# -fwrapv, -DNDEBUG: as Python's own flags have it, from which distutils takes them.
# -fopenmp belongs to compiling only. at::parallel_for is a template, so its parallel region is compiled into the
# extension, but the OpenMP runtime has to be the one that torch has loaded: linking another would give the process a
# second thread pool. clang is the exception: it calls LLVM's runtime, which torch's wheels for Linux do not bring.
# -g0: Python asks for debug information, which takes as long to write as all else.
# -Wno-psabi: vectors are passed between inlined functions alone, so how the ABI passes them does not matter.
# -ffp-contract=off: the arithmetic must round like the reference, so no multiply-add may be fused.
CXX_FLAGS = [
    "-g0",
    "-fPIC",
    "-fwrapv",
    "-DNDEBUG",
    "-std=c++20",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]
# After the others, for the last -g counts. The sanitizers have gcc warn of what is uninitialised where nothing is.
SANITIZER_FLAGS = ["-fno-omit-frame-pointer", "-g1", "-Wno-maybe-uninitialized"]
SANITIZERS = {
    "address": ["-fsanitize=address"],
    # It ends the process, as the others do. Not of vptrs: torch hides what tells the types of some of its classes.
    "undefined": ["-fsanitize=undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"],
    # It does not see the fences in torch's reference counts, which gcc warns of.
    "thread": ["-fsanitize=thread", "-Wno-tsan"],
}
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"]


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


def toolkit_version(cuda_home: str) -> str | None:
    """The release of the nvcc under ``cuda_home``, such as "13.0"; None where there is none that runs."""
    try:
        text = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    release = re.search(r"release (\d+\.\d+)", text)
    return release.group(1) if release else None


def toolkit_folders(torch_cuda: str) -> list[str]:
    """Where a toolkit may be: where CUDA_HOME says, or else the PATH or torch; then where PyPI's packages lie.

    The folder above the nvcc on the PATH, which torch takes, is no toolkit where that nvcc is a wrapper script.
    """
    nvcc = shutil.which("nvcc")
    chosen = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    usual = [chosen] if chosen else [(nvcc and toolkit_of(nvcc)) or "", "/usr/local/cuda"]
    from_pypi = [f"{folder}/nvidia/cu{torch_cuda.split('.')[0]}" for folder in sys.path]
    return [folder for folder in (*usual, *from_pypi) if folder == chosen or os.path.exists(f"{folder}/bin/nvcc")]


def compiler_of_nvcc() -> list[str]:
    """nvcc has a compiler of its own choice, unless the user names one."""
    return ["-ccbin", host_compiler()[-1]] if "CXX" in os.environ else []


def toolkit_obstacle(cuda_home: str, torch_cuda: str) -> str | None:
    """Why this toolkit cannot compile for a torch with CUDA ``torch_cuda``; None where it can."""
    toolkit = toolkit_version(cuda_home)
    if toolkit is None:
        return f"{cuda_home}/bin/nvcc does not run"
    if toolkit.split(".")[0] != torch_cuda.split(".")[0]:
        return f"torch is built with CUDA {torch_cuda}, but the toolkit in {cuda_home} is {toolkit}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "probe.cu").write_text("#include <cuda_bf16.h>\n__global__ void fill(float* x) { *x = 1; }\n")
        headers = ["-include", "cuda_runtime_api.h", "-I", f"{cuda_home}/include"]
        for command in (
            [*host_compiler(), "-E", *headers, "-x", "c++", os.devnull],
            [f"{cuda_home}/bin/nvcc", "-c", "probe.cu", "-o", "probe.o", *compiler_of_nvcc()],
        ):
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if result.returncode != 0:
                said = re.search(r"^.*\b(?:error|fatal)\b.*$", result.stderr, re.MULTILINE)
                reason = said.group() if said else f"{command[0]} exits with {result.returncode}"
                return f"the toolkit in {cuda_home} does not compile ({reason})"
    return None


def toolkit_release() -> str | None:
    """The release of CUDA's toolkit that the metadata of torch pins."""
    installed = next(iter(importlib.metadata.distributions(name="torch")), None)
    requirements = (installed and installed.requires) or []
    pins = [re.match(r"cuda-toolkit\b.*?==([\d.]+)", requirement) for requirement in requirements]
    return next((pin.group(1) for pin in pins if pin), None)


def toolkit_advice(torch_cuda: str, release: str | None) -> str:
    """How to get a toolkit: from PyPI, in the release of torch's other CUDA packages, where torch's metadata pins one.

    nvcc alone would come with the newest of what it calls, whose output it cannot read.
    """
    if release is not None:
        return f"run: pip install 'cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]=={release}'"
    return f"install a CUDA toolkit of release {torch_cuda}, and set CUDA_HOME"


def choose_toolkit(torch_version: str, torch_cuda: str | None) -> str | None:
    """Sets CUDA_HOME to the first toolkit that works with this torch. A GPU need not be present.

    Returns why the CUDA half cannot be built and what to do; None where it can.
    """
    if torch_cuda is None:
        return f"torch {torch_version} is built without CUDA; NVIDIA GPUs need one that has it"
    obstacles = []
    for folder in toolkit_folders(torch_cuda):
        obstacle = toolkit_obstacle(folder, torch_cuda)
        if obstacle is None:
            os.environ["CUDA_HOME"] = folder
            return None
        obstacles.append(obstacle)
    return "; ".join([*(obstacles or ["no nvcc was found"]), toolkit_advice(torch_cuda, toolkit_release())])


def architectures(toolkit: str) -> str:
    """TORCH_CUDA_ARCH_LIST for the toolkit of this release."""
    release = tuple(map(int, toolkit.split(".")))
    return ";".join(name for name, since in CUDA_ARCHITECTURES.items() if since <= release) + "+PTX"


def cuda_left_out(setting: str, torch_version: str, torch_cuda: str | None) -> str | None:
    """Why the CUDA half is left out; None where it is built."""
    if setting not in ("", "0", "1"):
        raise fail(f"FASTSYNC_CUDA={setting!r} means nothing: 1 insists on the CUDA half, 0 leaves it out")
    reason = ON_REQUEST if setting == "0" else choose_toolkit(torch_version, torch_cuda)
    if setting == "1" and reason is not None:
        raise fail(f"FASTSYNC_CUDA=1, but the CUDA half cannot be built: {reason}")
    return reason


def leave_note(path: Path, torch_version: str, left_out: str | None) -> None:
    """Writes what the extension was built for, and why without the CUDA half, for fastsync/doctor.py to read.

    Another torch may load the extension, and crash. The user is told on the terminal: pip hides what a build prints.
    """
    path.write_text("\n".join(filter(None, (torch_version, left_out))), encoding="utf-8")
    if left_out in (None, ON_REQUEST):
        return
    sentence = f"fastsync: built without its CUDA kernels: {left_out}"
    try:
        with open(TERMINAL, "w") as terminal:
            print(f"\n{sentence}", file=terminal)
    except OSError:
        print(sentence, file=sys.stderr)


def version_and_requirements(for_others: bool, torch_version: str, with_cuda: bool) -> dict[str, object]:
    """What setuptools is told of version and requirements.

    For others the version ends in the torch that was built for, and in the kernels: 0.1.0+torch2.13.0.cpu. On this
    machine another torch may come, for the extension can be built again.
    """
    if not for_others:
        return {"install_requires": REQUIREMENTS}
    public = torch_version.split("+")[0]
    kernels = f"cu{(toolkit_version(os.environ['CUDA_HOME']) or '').split('.')[0]}" if with_cuda else "cpu"
    return {
        "install_requires": ["numpy", f"torch=={public}"],
        "options": {"egg_info": {"tag_build": f"+torch{public}.{kernels}"}},
    }


def check_sanitizer(setting: str) -> None:
    if setting not in ("", *SANITIZERS):
        raise fail(f"FASTSYNC_SANITIZE={setting!r} means nothing: {', '.join(SANITIZERS)} build with that sanitizer")


def files(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(HERE)) for path in HERE.glob(pattern))


def system_includes(folders: list[str]) -> list[str]:
    """The flags that g++ and nvcc both understand: nvcc refuses -isystem and its folder in one word."""
    return [word for folder in folders for word in ("-isystem", folder)]


def runtime_library() -> str:
    """CUDA's runtime, as the linker is told of it. PyPI's has the name libcudart.so.13 alone."""
    folder = Path(os.environ["CUDA_HOME"], "lib")
    versioned = sorted(path.name for path in folder.glob("libcudart.so.*"))
    return f":{versioned[0]}" if versioned and not (folder / "libcudart.so").exists() else "cudart"


def loaded_libstdcxx() -> list[str]:
    """The libstdc++ that torch has loaded, for the linker; nothing where it is not found.

    Some compilers link theirs statically. Then the process has two that share locales: streams lose numbers, or crash.
    """
    maps = Path("/proc/self/maps")
    mapped = [line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()] if maps.exists() else []
    return [path for path in sorted(set(mapped)) if "/libstdc++.so" in path and os.path.exists(path)][:1]


def make_flags(with_cuda: bool, sanitizer: str = "") -> Flags:
    """One set for both extensions, because g++ takes precompiled headers for units with the same flags alone."""
    from torch.utils.cpp_extension import _get_cuda_arch_flags, include_paths

    # The user's first, for ours decide how values are rounded.
    of_user = shlex.split(f"{os.environ.get('CPPFLAGS', '')} {os.environ.get('CXXFLAGS', '')}")
    cxx, nvcc = [*of_user, *CXX_FLAGS], list(NVCC_FLAGS)
    if os.environ.get("FASTSYNC_WERROR") == "1":
        cxx.append("-Werror")
        nvcc.append("-Werror=all-warnings")
    if sanitizer:
        cxx += SANITIZERS[sanitizer] + SANITIZER_FLAGS
    # torch's headers become system headers: the warnings are for our own code.
    folders = [*include_paths("cuda" if with_cuda else "cpu"), sysconfig.get_path("include")]
    shared = [*(["-DFASTSYNC_WITH_CUDA"] if with_cuda else []), "-Icsrc", *system_includes(folders)]
    return Flags(
        cxx=[*cxx, "-O1", *shared],
        loops=[*cxx, "-O1" if sanitizer else "-O3", *shared],
        nvcc=[*nvcc, *compiler_of_nvcc(), *(_get_cuda_arch_flags() if with_cuda else []), *shared],
    )


def make_extension(name: str, sources: list[str], with_cuda: bool = False, sanitizer: str = "") -> setuptools.Extension:
    """What is linked with what."""
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    openmp = ["-fopenmp"] if "__clang__" in macros() else []
    link = [*SANITIZERS.get(sanitizer, []), *openmp, *loaded_libstdcxx()]
    extension = (CUDAExtension if with_cuda else CppExtension)(name, sources, extra_link_args=link)
    if with_cuda:
        extension.libraries = [runtime_library() if name == "cudart" else name for name in extension.libraries]
    return extension


def make_extensions(with_cuda: bool, sanitizer: str = "") -> list[setuptools.Extension]:
    trainer = files("csrc/ppo/*.cpp")
    engine = [source for source in files("csrc/**/*.cpp") if source not in trainer]
    kernels = files("csrc/**/*.cu") if with_cuda else []
    return [
        make_extension("fastsync._C", engine + kernels, with_cuda, sanitizer),
        make_extension("fastsync._ppo", trainer, sanitizer=sanitizer),
    ]


def main() -> None:
    check_setuptools()
    try:
        import torch
    except ImportError as error:
        setuptools.setup(
            ext_modules=[setuptools.Extension("fastsync._C", [])],
            cmdclass=without_torch(error),
            install_requires=REQUIREMENTS,
        )
        return
    # Where pip puts ninja, beside this Python.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    left_out = cuda_left_out(os.environ.get("FASTSYNC_CUDA", ""), torch.__version__, torch.version.cuda)
    if left_out is None and (toolkit := toolkit_version(os.environ["CUDA_HOME"])) is not None:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures(toolkit))
    sanitizer = os.environ.get("FASTSYNC_SANITIZE", "")
    check_sanitizer(sanitizer)
    flags = make_flags(left_out is None, sanitizer)
    objects = f"build/torch-{torch.__version__}-{sys.implementation.cache_tag}{f'-{sanitizer}' if sanitizer else ''}"

    class BuildByNinja(build_ext):
        """Compiles both extensions at once, and links each.

        Objects of one torch and one Python lie in one folder under build/. pip, which would compile everything in a
        fresh folder each time, and `setup.py build_ext --inplace` share it. Objects compiled for another torch are
        never taken for this one's, and linking is always done again.
        """

        def build_extensions(self) -> None:
            parts = {extension.name: units(extension.sources, Path("build/units")) for extension in self.extensions}
            jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
            longest_first = itertools.chain(*reversed(parts.values()))
            compiled = compile_units(longest_first, flags, Path(objects), jobs, is_quiet=self.verbose < 1)
            for extension in self.extensions:
                extension.extra_objects = [compiled[unit] for unit in parts[extension.name]]
                extension.sources = []
            # A library of another torch may be newer than these objects.
            self.force = self.compiler.force = True
            super().build_extensions()

        def run(self) -> None:
            super().run()
            note = Path(self.get_ext_fullpath("fastsync._C")).with_suffix(".torch")
            leave_note(note, torch.__version__, left_out)

    setuptools.setup(
        ext_modules=make_extensions(left_out is None, sanitizer),
        cmdclass={"build_ext": BuildByNinja},
        **version_and_requirements(os.environ.get("FASTSYNC_WHEEL") == "1", torch.__version__, left_out is None),
    )


if __name__ == "__main__":
    main()

"""The installation, and what this machine can do with it: ``fastsync doctor`` prints that.

It runs where the extension is missing or does not load, because that is when it is needed most.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import torch
import torch.distributed as dist

from .launch.environment import threads_of_rank

DISTRIBUTION = "fastsync-torch"
"""The name for pip; the name fastsync on PyPI is somebody else's."""
HERE = Path(__file__).resolve().parent


def load(extension: str) -> ModuleType:
    """Imports a compiled module of this package.

    Raises:
        ImportError: it is not built, or not for this torch and Python; the message says what to run.
    """
    try:
        # Compares versions without the build, such as "+cpu".
        if built_for().split("+")[0] != torch.__version__.split("+")[0]:
            raise ImportError(f"it was built for torch {built_for()}")
        return importlib.import_module(f"fastsync.{extension}")
    except ImportError as error:
        raise ImportError(_not_built_message(str(error))) from error


def num_usable_cores() -> int:
    """Returns the cores that this process may use at the same time, by its affinity and its container's limits."""
    try:
        cores: int = load("_C").num_usable_cores()
    except ImportError:
        cores = len(os.sched_getaffinity(0))
    return cores


def built_for() -> str:
    """Returns the version of torch that setup.py has noted for the extensions; if it is unknown, this torch's."""
    return next(iter(_note()), torch.__version__)


def cuda_left_out() -> str:
    """Returns why the extension has no CUDA kernels, and how to get them; empty if it has them."""
    if is_a_wheel_for_others() and _note()[1:]:
        return "this wheel was made without them; the version of one that has them ends in cu and CUDA's version"
    return "".join(f"{reason}; to build again: {rebuild_command()}" for reason in _note()[1:])


def _note() -> list[str]:
    """Reads the lines that setup.py noted beside the extension."""
    note = HERE.joinpath(f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").with_suffix(".torch")
    return note.read_text(encoding="utf-8").splitlines() if note.exists() else []


def rebuild_command() -> str:
    """Returns the command that builds this copy of fastsync again, and where to run it."""
    if (HERE.parent / "setup.py").exists():
        return f"`pip install --no-build-isolation --no-deps -e {shlex.quote(str(HERE.parent))}`"
    return "`pip install --no-build-isolation --no-deps --force-reinstall .` in fastsync's source tree"


def is_a_wheel_for_others() -> bool:
    """Tells whether this copy is from a wheel for one version of torch, and not from a source tree."""
    return "+torch" in version() and not (HERE.parent / "setup.py").exists()


def _how_to_get_extension() -> str:
    """Returns how to get an extension for this torch."""
    if not is_a_wheel_for_others():
        return f"run {rebuild_command()}"
    own, _, made_for = version().partition("+")
    label = f"torch{torch.__version__.split('+')[0]}.{made_for.rpartition('.')[2]}"
    wheel = shlex.join(["pip", "install", "--no-deps", f"{DISTRIBUTION}=={own}+{label}"])
    return f"take the wheel for this torch, whose page ends in {label}: `{wheel} --extra-index-url PAGE`"


def version() -> str:
    """Returns the version that pip has installed; empty if pip has not installed it."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra, wherever fastsync itself came from."""
    packages = _packages_of(extra)
    return shlex.join(["pip", "install", *(packages or ["--no-build-isolation", "-e", f".[{extra}]"])])


def _packages_of(extra: str) -> list[str]:
    """Returns the packages that pip installs for an extra; nothing if pip has not installed fastsync."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    return [line.split(";")[0] for line in lines if f'extra == "{extra}"' in line]


def _not_built_message(reason: str) -> str:
    python = sysconfig.get_python_version()
    return (
        f"fastsync in {HERE} has no extension that works with torch {torch.__version__} and Python {python} "
        f"({reason}): {_how_to_get_extension()}"
    )


Facts: TypeAlias = Sequence[tuple[str, str]]


def main() -> int:
    """Prints the report.

    Returns:
        0 if everything works that was asked for, even if it could be faster. 1 if the engine does not load, if this
        torch has no Gloo, or if FASTSYNC_CUDA=1 asks for fused CUDA kernels and there are none.
    """
    extension: ModuleType | None = None
    obstacles = []
    try:
        extension = load("_C")
    except ImportError as error:
        obstacles.append(f"the engine: {error}")
    has_nccl = dist.is_nccl_available()
    if not dist.is_gloo_available():
        obstacles.append("several ranks on the CPU: this torch has no Gloo; install a torch that has")
    limits = _limits(has_nccl)
    if extension is not None and not extension.built_with_cuda():
        if os.environ.get("FASTSYNC_CUDA") == "1":
            obstacles.append(f"fused CUDA kernels, which FASTSYNC_CUDA=1 asks for: {_why_no_kernels(are_wanted=True)}")
        else:
            limits.append(f"fused CUDA kernels: {_why_no_kernels(are_wanted=_has_nvidia_gpu())}")
    nccl = _nccl() if has_nccl else "not available"
    groups = [("gloo", "available" if dist.is_gloo_available() else "not available"), ("nccl", nccl)]
    print_section("versions", _versions())
    print_section("engine", [("extension", "does not load")] if extension is None else _engine(extension))
    print_section("process groups", groups if extension is None else [*groups, _shared_memory(extension)])
    print_section("devices", _devices(extension))
    print("will not work here")
    for line in [*obstacles, *limits] or ["nothing that doctor looks for"]:
        print(f"  {line}")
    asked = "not everything works that was asked for: see the first line of this list"
    print(f"\n{asked if obstacles else 'the engine works here'}")
    return 1 if obstacles else 0


def _versions() -> Facts:
    try:
        own = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        own = "not installed, only on the import path"
    return [
        ("fastsync", own),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("torch's CUDA", torch.version.cuda or "none"),
        ("platform", platform.platform()),
    ]


def _engine(extension: ModuleType) -> Facts:
    return [
        ("extension", f"loads from {extension.__file__}"),
        ("CUDA half", "built" if extension.built_with_cuda() else "not built"),
        *((f"built with {name}", version) for name, version in sorted(extension.build_info().items())),
    ]


def _nccl() -> str:
    """Returns NCCL's version, and which of torch's two backends for it ``nccl`` is, where there are two."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if not hasattr(dist, "ProcessGroupNCCL2"):
        return version
    chosen, is_default = os.environ.get("TORCH_DIST_USE_NCCL2"), torch.__version__ >= "2.15"
    is_new = chosen != "0" if is_default else chosen == "1"
    return f"{version}, by torch's {'nccl2' if is_new else 'nccl-legacy'}"


def _shared_memory(extension: ModuleType) -> tuple[str, str]:
    obstacle = extension.shared_memory_obstacle()
    ranks = "between CPU ranks of this host and network namespace"
    return "shared memory", f"not between CPU ranks: {obstacle}" if obstacle else ranks


def _devices(extension: ModuleType | None) -> Facts:
    facts = [("cpu", f"{num_usable_cores()} cores for this process, {torch.get_num_threads()} torch threads")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        facts.append((f"cuda:{index}", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {memory}"))
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu", *([accelerator.type] if accelerator else [])]
    return [*facts, *((f"kernels on {name}", _kernels(extension, name)) for name in types if extension)]


def _kernels(extension: ModuleType, device_type: str) -> str:
    """Returns in words which kernels the engine runs on a type of device."""
    if extension.kernels(device_type) == "fused":
        return f"fused {'CUDA' if device_type == 'cuda' else 'C++'}"
    advice = "" if extension.built_with_cuda() else "; install nvcc and build again for fused ones"
    return "generic: torch's own operations" + (advice if device_type == "cuda" else "")


def _has_nvidia_gpu() -> bool:
    """Tells whether torch sees an NVIDIA GPU, or whether the system has one that this torch cannot use."""
    return (torch.version.cuda is not None and torch.cuda.is_available()) or any(Path("/dev").glob("nvidia[0-9]*"))


def _limits(has_nccl: bool) -> list[str]:
    """Lists what does not work although the engine does, without the engine's kernels."""
    limits = []
    if not has_nccl or not torch.cuda.is_available():
        limits.append(f"NCCL: {'torch sees no GPU' if has_nccl else 'this torch has none'}; use Gloo")
    limits += [f"the threads of ranks: {obstacle}" for obstacle in _wrong_threads()]
    if missing := missing_train_packages():
        limits.append(f"fastsync train: {', '.join(missing)} missing; install them: {install_command('train')}")
    return limits


def _wrong_threads() -> list[str]:
    """Returns what is wrong with OMP_NUM_THREADS, if anything is."""
    try:
        threads_of_rank()
    except ValueError as error:
        return [str(error)]
    is_empty = not os.environ.get("OMP_NUM_THREADS", "unset").strip()
    return (
        ["OMP_NUM_THREADS is empty, which counts as not set; set a number, such as 4, or unset it"] if is_empty else []
    )


def _why_no_kernels(*, are_wanted: bool) -> str:
    """Returns why there are no fused CUDA kernels, and what to do."""
    if torch.version.cuda is not None:
        return cuda_left_out() or "not built, and the build has noted no reason"
    reason = f"torch {torch.__version__} is built without CUDA"
    if not are_wanted:
        return f"{reason}, and there is no NVIDIA GPU"
    return f"{reason}; to use a GPU, install a torch with CUDA (https://pytorch.org), then run {rebuild_command()}"


def missing_train_packages() -> list[str]:
    """Lists the packages that training needs and that this Python lacks."""
    names = [re.split("[<>=]", package)[0] for package in _packages_of("train")]
    return [name for name in names if not any(metadata.distributions(name=name))]


def print_section(title: str, facts: Facts) -> None:
    """Prints lines of names and values under a title."""
    print(title)
    for name, value in facts:
        print(f"  {name:<22} {value}")
    print()

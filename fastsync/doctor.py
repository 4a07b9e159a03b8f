"""The installation, and what this machine can do with it: ``fastsync doctor`` prints that.

It runs where the extension is missing or does not load, because that is when it is needed most.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shlex
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import torch
import torch.distributed as dist

DISTRIBUTION = "fastsync-torch"
"""The name for pip; the name fastsync on PyPI is somebody else's."""
HERE = Path(__file__).resolve().parent


def load(extension: str) -> ModuleType:
    """Imports a compiled module of this package.

    Raises:
        ImportError: it is not built, or not for this torch and Python; the message says what to run.
    """
    try:
        # Up to the build, such as "+cpu".
        if built_for().split("+")[0] != torch.__version__.split("+")[0]:
            raise ImportError(f"it was built for torch {built_for()}")
        return importlib.import_module(f"fastsync.{extension}")
    except ImportError as error:
        raise ImportError(_not_built(str(error))) from error


def built_for() -> str:
    """The version of torch that the extensions were built for, as setup.py notes it; this torch's if it is unknown."""
    return next(iter(_note()), torch.__version__)


def cuda_left_out() -> str:
    """Why the extension was built without its CUDA kernels, and how to get them; empty where it was built with them."""
    return "".join(f"{reason}; to build again: {rebuild_command()}" for reason in _note()[1:])


def _note() -> list[str]:
    """What setup.py noted beside the extension, a line for each."""
    note = HERE.joinpath(f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").with_suffix(".torch")
    return note.read_text().splitlines() if note.exists() else []


def rebuild_command() -> str:
    """The command that builds this copy of fastsync again, and where to run it."""
    if (HERE.parent / "setup.py").exists():
        return f"`pip install --no-build-isolation --no-deps -e {shlex.quote(str(HERE.parent))}`"
    return "`pip install --no-build-isolation --no-deps --force-reinstall .` in fastsync's source tree"


def install_command(extra: str) -> str:
    """The command that installs what an extra of fastsync brings, wherever fastsync itself came from."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return f"pip install --no-build-isolation -e '.[{extra}]'"
    return shlex.join(["pip", "install", *(line.split(";")[0] for line in lines if f'extra == "{extra}"' in line)])


def _not_built(reason: str) -> str:
    python = f"Python {sysconfig.get_python_version()}"
    sentence = (
        f"fastsync in {HERE} has no extension that works with torch {torch.__version__} and {python} ({reason}): "
    )
    if (copy := _built_copy()) is not None:
        sentence += f"there is one in {copy}, but Python looks into {HERE.parent} first; leave that folder, or "
    return f"{sentence}run {rebuild_command()}"


def _built_copy() -> Path | None:
    """An installed copy of fastsync that is not this one, as where Python is started in the source tree."""
    for distribution in metadata.distributions(name=DISTRIBUTION):
        folder = Path(str(distribution.locate_file("fastsync"))).resolve()
        if folder != HERE and any(folder.glob("_C.*.so")):
            return folder
    return None


TRAIN_MODULES = {
    "filelock": "filelock",
    "gymnasium": "gymnasium",
    "numpy": "numpy",
    "pyyaml": "yaml",
    "rich": "rich",
    "tensorboard": "tensorboard",
    "tyro": "tyro",
}
"""Packages of the extra "train" that training cannot do without, and the modules that they bring."""

Facts: TypeAlias = Sequence[tuple[str, str]]


def main() -> int:
    """Prints the report.

    Returns:
        0 if the engine works on this machine; 1 if not, or if there is an NVIDIA GPU and no kernels for it were built.
    """
    extension, error = _load_extension()
    obstacles = _engine_obstacles(extension, error)
    _print_section("versions", _versions())
    _print_section("engine", _engine(extension))
    _print_section("process groups", [*_backends(), *_shared_memory(extension)])
    _print_section("devices", _devices(extension))
    print("will not work here")
    for line in [*obstacles, *_gpu_limits(extension), *_training_limits()] or ["nothing that doctor looks for"]:
        print(f"  {line}")
    without_kernels = extension is not None and not extension.built_with_cuda() and _has_nvidia_gpu()
    return 1 if obstacles or without_kernels else 0


def _load_extension() -> tuple[ModuleType | None, str]:
    """The extension, or None and the reason why it does not load."""
    try:
        return load("_C"), ""
    except ImportError as error:
        return None, str(error)


def _versions() -> Facts:
    return [
        ("fastsync", _package_version()),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("torch's CUDA", torch.version.cuda or "none"),
        ("platform", platform.platform()),
    ]


def _package_version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "not installed, only on the import path"


def _engine(extension: ModuleType | None) -> Facts:
    if extension is None:
        return [("extension", "does not load")]
    built_with = [(f"built with {name}", version) for name, version in sorted(extension.build_info().items())]
    return [
        ("extension", f"loads from {extension.__file__}"),
        ("CUDA half", "built" if extension.built_with_cuda() else "not built"),
        *built_with,
    ]


def _backends() -> Facts:
    return [
        ("gloo", "available" if _has_gloo() else "not available"),
        ("nccl", ".".join(map(str, torch.cuda.nccl.version())) if _has_nccl() else "not available"),
    ]


def _shared_memory(extension: ModuleType | None) -> Facts:
    if extension is None:
        return []
    obstacle = extension.shared_memory_obstacle()
    ranks = "between CPU ranks of this host and network namespace"
    return [("shared memory", f"not between CPU ranks: {obstacle}" if obstacle else ranks)]


def _devices(extension: ModuleType | None) -> Facts:
    cores = extension.num_usable_cores() if extension else len(os.sched_getaffinity(0))
    cpu = f"{cores} cores for this process, {torch.get_num_threads()} torch threads"
    gpus = [(f"cuda:{index}", _describe_gpu(index)) for index in range(torch.cuda.device_count())]
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu", *([accelerator.type] if accelerator else [])]
    return [("cpu", cpu), *gpus, *((f"kernels on {name}", _kernels(extension, name)) for name in types if extension)]


def _kernels(extension: ModuleType, device_type: str) -> str:
    """Which kernels the engine runs on such a device, in words."""
    if extension.kernels(device_type) == "fused":
        return f"fused {'CUDA' if device_type == 'cuda' else 'C++'}"
    advice = "" if extension.built_with_cuda() else "; install nvcc and build again for fused ones"
    return "generic: torch's own operations" + (advice if device_type == "cuda" else "")


def _has_nvidia_gpu() -> bool:
    """As torch sees it, or the system, where torch is built without CUDA."""
    return (torch.version.cuda is not None and torch.cuda.is_available()) or any(Path("/dev").glob("nvidia[0-9]*"))


def _describe_gpu(index: int) -> str:
    device = torch.cuda.get_device_properties(index)
    return f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB"


def _engine_obstacles(extension: ModuleType | None, error: str) -> list[str]:
    """Lists what keeps the engine from working at all."""
    obstacles = [f"the engine: {error}"] if extension is None else []
    if not _has_gloo():
        obstacles.append("several ranks on the CPU: this torch has no Gloo; install a torch that has")
    return obstacles


def _gpu_limits(extension: ModuleType | None) -> list[str]:
    limits = []
    if not _has_nccl():
        limits.append("NCCL: this torch has none; use Gloo")
    elif not torch.cuda.is_available():
        limits.append("NCCL: torch sees no GPU; use Gloo")
    if extension is not None and not extension.built_with_cuda():
        limits.append(f"fused CUDA kernels: {cuda_left_out() or 'not built, and the build has noted no reason'}")
    return limits


def _training_limits() -> list[str]:
    missing = ", ".join(missing_train_packages())
    return [f"fastsync train: {missing} missing; install them: {install_command('train')}"] if missing else []


def missing_train_packages() -> list[str]:
    """Lists what training needs and this Python lacks."""
    return [package for package, module in TRAIN_MODULES.items() if importlib.util.find_spec(module) is None]


def _has_gloo() -> bool:
    return dist.is_available() and dist.is_gloo_available()


def _has_nccl() -> bool:
    return dist.is_available() and dist.is_nccl_available()


def _print_section(title: str, facts: Facts) -> None:
    print(title)
    for name, value in facts:
        print(f"  {name:<22} {value}")
    print()

"""The installation: the extensions, the torch they were built for, and what to run where something is missing, be this
a wheel or a source tree.
"""

from __future__ import annotations

import importlib
import shlex
import sysconfig
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

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

"""The user's functions and classes by name, "module:attribute", and the name of one that a script passes."""

from __future__ import annotations

import enum
import functools
import importlib
import numbers
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

if TYPE_CHECKING:
    from .settings import RunSettings

Named = TypeVar("Named", bound="RunSettings")

_WRITTEN = (numbers.Number, str, bytes, range, PurePath, torch.dtype, torch.device)
"""Types of values whose ``repr`` is the value."""

_importing: list[str] = []
"""Modules that are being imported because a setting names them, outermost first."""


def import_from(setting: str, name: str) -> Any:
    """Imports what a setting names as "module:attribute", or as "path/of/file.py:attribute".

    Raises:
        ValueError: there is no such module or attribute here.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        own = name if name.endswith(".py") else "path/of/file.py"
        raise ValueError(f"{setting}={name!r} must be module:Class or module:function, or a file's, as {own}:function")
    if not has_import_name(name):
        raise ValueError(
            f"{setting}={name!r} has no name to import it by; resume by the script that passed it, or define it at the "
            "top level of a module"
        )
    try:
        found = import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found
    except Exception as error:  # any error of the user's module
        raise ValueError(f"{setting}={name!r} cannot be imported: {type(error).__name__}: {error}") from error


def has_import_name(name: str) -> bool:
    """Returns whether ``import_from`` may find what ``name_of`` has called so."""
    return not (name.startswith("<") or "<" in name.rpartition(":")[2] or "(...)" in name or name.endswith(")"))


def function_from(setting: str, name: str) -> Callable[..., Any]:
    """Imports a function, as ``import_from``, which raises the same errors."""
    found = import_from(setting, name)
    if not callable(found):
        raise ValueError(f"{setting}={name!r} is {found!r}; it has to be a function")
    return found  # type: ignore[no-any-return]


def import_module(name: str) -> Any:
    """Imports a module of the user's. It looks in the current folder first, unlike a command that is no ``python -m``.

    A name that ends with ``.py`` is that of a file, whose folder is then one where Python looks.
    """
    folder, path = None, None
    if name.endswith(".py"):
        path = Path(name).expanduser().absolute()
        if not path.is_file():
            raise ModuleNotFoundError(f"there is no file {name}")
        folder, name = path.parent, path.stem
    look_in(folder or Path.cwd())
    _importing.append(name)
    try:
        module = importlib.import_module(name)
    finally:
        _importing.pop()
    if path is not None and not _is_of(module, path):
        raise ImportError(f"Python has another module called {name}, of {_file_of(module)}; rename {path.name}")
    return module


def look_in(folder: Path) -> None:
    """Has Python find modules in a folder, too."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextmanager
def kept_folder() -> Iterator[None]:
    """Goes back to the working folder at the end of a ``with`` block, which an environment may have left."""
    before = os.getcwd()
    try:
        yield
    finally:
        os.chdir(before)


def check_not_importing(what: str) -> None:
    """Raises RuntimeError if a module that a setting names runs ``what`` while it is imported."""
    if _importing:
        raise RuntimeError(
            f"the module {_importing[-1]} calls {what} as soon as it is imported; put the call below "
            'if __name__ == "__main__":'
        )


def name_of(thing: Any) -> str:
    """Returns the name by which ``import_from`` finds a function or a class again in this folder.

    What cannot be found again, such as a function inside a function, gets a name that says so. It is the same in the
    next start of the same script. So of an object among the arguments of a ``functools.partial`` it holds the class.
    """
    if isinstance(thing, functools.partial):
        given = [name_of(thing.func), *map(_argument_name, thing.args), *_keyword_names(thing.keywords)]
        return f"functools:partial({', '.join(given)})"
    is_bound = getattr(thing, "__self__", None) is not None
    named = thing if hasattr(thing, "__qualname__") and not is_bound else type(getattr(thing, "__self__", thing))
    name = f"{_module_name(named.__module__)}:{named.__qualname__}"
    if is_bound:
        return f"{name}(...).{thing.__name__}"
    return name if named is thing else f"{name}(...)"


Pair: TypeAlias = tuple[Any, Any]
"""What a caller gives, or None, and the usual."""


def resolve(
    settings: Named, policy: Pair = (None, None), loss: Pair = (None, None), advantages: Pair = (None, None)
) -> tuple[Named, Any, Any]:
    """Returns the settings with the names of what is given, and the loss and advantages that the run uses.

    Raises:
        ValueError: a name cannot be imported, or the settings name another function than the one that is given.
    """
    names: dict[str, Any] = {}
    for name, (given, usual) in {"policy": policy, "loss": loss, "advantages": advantages}.items():
        if given is None:
            continue
        written, named = getattr(settings, name), None if given is usual else name_of(given)
        if written not in (None, named):
            other = "fastsync's own" if named is None else repr(named)
            raise ValueError(f"{name}={written!r} in the settings, and {name}={other} in train(); leave one out")
        names[name] = named
    settings = replace(settings, **names)
    found: dict[str, Any] = {"loss": loss[0] or loss[1], "advantages": advantages[0] or advantages[1]}
    if policy[0] is None and settings.policy is not None:
        import_from("policy", settings.policy)  # before an environment may leave the working folder
    for name, (given, _) in {"loss": loss, "advantages": advantages}.items():
        if given is None and (written := getattr(settings, name)) is not None:
            found[name] = function_from(name, written)
    return settings, found["loss"], found["advantages"]


def _argument_name(value: Any) -> str:
    """Returns the value of an argument if that can be written, else the name of its function or class.

    ``repr`` of other objects may hold an address, which is another one in each start.
    """
    if isinstance(value, enum.Enum):
        return f"{name_of(type(value))}.{value.name}"
    if value is None or isinstance(value, _WRITTEN):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = (f"{_argument_name(key)}: {_argument_name(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        parts = ", ".join(map(_argument_name, value))
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_argument_name, value)))}}}"  # sets of strings have another order each time
    if is_dataclass(value) and not isinstance(value, type):
        own = {each.name: getattr(value, each.name) for each in fields(value) if each.repr}
        return f"{name_of(type(value))}({', '.join(_keyword_names(own))})"
    return name_of(value)


def _keyword_names(keywords: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_argument_name(value)}" for key, value in keywords.items()]


def _module_name(name: str) -> str:
    """Returns the name of a module. That of the script that runs is "script", or its path if it lies elsewhere."""
    main = sys.modules["__main__"]
    if name not in ("__main__", "__mp_main__"):  # the second is the first in a process that it has spawned
        return name
    if getattr(main, "__spec__", None) is not None:  # python -m
        return str(main.__spec__.name)  # type: ignore[union-attr]
    if _file_of(main) is None:  # a notebook, or an interpreter
        return name
    path, here = Path(str(_file_of(main))).absolute(), Path.cwd()
    if path.parent == here and path.suffix == ".py":
        return path.stem
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _file_of(module: Any) -> str | None:
    return getattr(module, "__file__", None)


def _is_of(module: Any, path: Path) -> bool:
    file = _file_of(module)
    return file is not None and os.path.exists(file) and os.path.samefile(file, path)

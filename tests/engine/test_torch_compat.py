"""torch's private names are all there. What the package learns by them, its features' tests show."""

from __future__ import annotations

import importlib
import inspect
import re

import torch

from fastsync._torch_compat import PRIVATE, Private

NEWEST_READ = (2, 14)


def version_of(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


TORCH = version_of(torch.__version__)


def is_there(name: str) -> bool:
    """Whether torch has the name: it leads to an object, or the class or module says it of its objects."""
    parts = name.split(".")
    owner = importlib.import_module("torch")
    for count in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        parts = parts[count:]
        break
    for part in parts[:-1]:
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    if hasattr(owner, parts[-1]):
        return True
    try:
        return re.search(rf"\b{parts[-1]}\b", inspect.getsource(owner)) is not None
    except (TypeError, OSError):  # the class is one of C++, or an alias
        return False


def lacking(names: tuple[Private, ...]) -> list[str]:
    """Lists those that the installed torch lacks. One newer than those read should have the names of the last."""
    version = min(TORCH, NEWEST_READ)
    expected = [each for each in names if version_of(each.first) <= version <= version_of(each.last)]
    return [each.name for each in expected if not is_there(each.name)]


def test_torch_has_every_private_name_that_is_used() -> None:
    assert lacking(PRIVATE) == []


def test_a_name_that_torch_lacks_is_named() -> None:
    gone = (
        Private("torch.distributed.distributed_c10d._get_default_stores"),
        Private("torch.nn.parallel.DistributedDataParallel._hooks_of_comm"),
        Private("torch.distributed.ProcessGroup._rename"),
        Private("torch.distributed.of_old._default"),
    )
    assert lacking((*PRIVATE[:3], *gone)) == [each.name for each in gone]

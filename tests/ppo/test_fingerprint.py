"""Fingerprints of functions: the same under every Python, others after every change of what is computed."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastsync.ppo import fingerprint as module
from fastsync.ppo import fused
from fastsync.ppo.distributions import Categorical, categorical, choose
from fastsync.ppo.fingerprint import fingerprint
from fastsync.ppo.policies import Policy
from fastsync.ppo.ppo import autocast, minibatch_loss, ppo_loss


def of_all_kinds(x: Any, /, y: tuple[int, ...] = (1, 2), *rest: Any, key: int | None = None, **others: Any) -> Any:
    """Has what Pythons have parsed, written or split into tokens in ways of their own."""
    name, text = f"{x!r:>{y[0]}} {{}} {'a'} {x + 1 = }" "and" f"{{ {x!s}{x:}", "\U0001fae8\x7f" "joined"  # fmt: skip
    table = {**others, "a": 1e22, "b": -0.0, "c": 1_000, "d": 0x1F, "e": 3j, "f": ..., "g": None, "h": b"\xff"}
    for index, *left in sorted(zip(rest, y, strict=True)):
        table[index, 1:2] = left if (found := index) else [*rest, found]
    try:
        with open(name) as file, open(text):
            yield file, *rest
    except (KeyError, ValueError) as error:
        raise TypeError(f"{error}") from None
    match key:
        case {"a": [int() as one, *_], **more} if one:
            return not 1 < one < 3, lambda a, *, b=~one: (a, b), more

    async def inner(given):
        """A function within."""
        return await given, [each async for each in given if each if not each]


METHODS = [*(getattr(Policy, name) for name in fused._METHODS), Categorical.log_prob_and_entropy]
FUNCTIONS: list[Callable[..., Any]] = [
    *(of_all_kinds, autocast, *METHODS),
    *(each.plain for each in (categorical, choose, ppo_loss)),
    minibatch_loss,
]

SCRIPT = """
import importlib.util, sys
def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module
fingerprint = load("fingerprint", sys.argv[1]).fingerprint
for file in sys.argv[2:]:
    (function,) = (each for each in vars(load("source", file)).values() if getattr(each, "__module__", "") == "source")
    print(fingerprint(function))
"""


def undecorated(function: Callable[..., Any]) -> str:
    lines = inspect.cleandoc("\n" + inspect.getsource(function)).splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("@"))


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_every_python_has_the_same(version: str, tmp_path: Path) -> None:
    """Without torch, which the others may lack."""
    environment = os.environ | {"PYENV_VERSION": version}  # without it pyenv's python3.10 may be none
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], env=environment, capture_output=True).returncode != 0:
        pytest.skip(f"there is no Python {version}")
    files = [tmp_path / f"{index}.py" for index in range(len(FUNCTIONS))]
    for file, function in zip(files, FUNCTIONS, strict=True):
        file.write_text(f"from __future__ import annotations\n{undecorated(function)}")
    command = [python, "-c", SCRIPT, module.__file__, *map(str, files)]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    assert said.split() == [fingerprint(function) for function in FUNCTIONS]


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("", "", True),
        ('"joined"', "'joi'  'ned'  # of two parts", True),
        ("(found := index)", "(found := left)", False),
        ("1e22", "1e21", False),
        ("-0.0", "0.0", False),
        ("!r", "!s", False),
        ("case {", "case {1: 2, ", False),
        ("key: int | None = None", "key: int | None = 0", False),
        (", /", "", False),
        ("if not each", "", False),
    ],
)
def test_what_is_computed_counts(old: str, new: str, is_same: bool, tmp_path: Path) -> None:
    source = undecorated(of_all_kinds)
    assert old in source
    file = tmp_path / "edited.py"
    file.write_text(f"from __future__ import annotations\n{source.replace(old, new)}")
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    edited = scope["of_all_kinds"]
    assert (fingerprint(edited) == fingerprint(of_all_kinds) == "1e1e4bc1ddf1f255") == is_same

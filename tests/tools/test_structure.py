"""The tree: no circles, few imports that run back up, few files and names at the top, and who may import what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fastsync
from tools import census

ROOT = Path(__file__).parents[2]
LAYERS = (
    ("distributed", "doctor"),
    ("autotune",),
    ("sync",),
    ("optimizer", "data"),
    ("elastic",),
    ("outer",),
    ("integrations",),
    ("launch",),
    ("ppo",),
    ("cli",),
)
"""From low to high. Other files at the top of ``fastsync`` are helpers, below all of these."""
MOST_IMPORTS_UP, MOST_FILES, MOST_NAMES = 8, 14, 20
EXTENSIONS = ("fastsync._C", "fastsync._ppo")


@dataclass(frozen=True)
class Import:
    by: str
    of: str
    """A module, or a name of one."""


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """All import statements: late ones, and those for types only, too."""
    home = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = home[: len(home) - node.level + 1] if node.level else []
            whole = ".".join([*start, *([node.module] if node.module else [])])
            yield from (Import(module, f"{whole}.{alias.name}") for alias in node.names)


def all_imports(folder: str) -> list[Import]:
    """Those of fastsync, by the files below a folder."""
    found = (
        each
        for file in sorted((ROOT / folder).rglob("*.py"))
        for each in imports_of(file.read_text(), module_of(file), file.name == "__init__.py")
    )
    return [each for each in found if each.of.split(".")[0] == "fastsync"]


MODULES = {module_of(file) for file in (ROOT / "fastsync").rglob("*.py")}


def between_modules(imports: list[Import]) -> set[tuple[str, str]]:
    """Pairs of modules, of which the first imports the second or a name of it."""
    pairs = set()
    for each in imports:
        module = each.of if each.of in (*MODULES, *EXTENSIONS) else each.of.rpartition(".")[0]
        assert module in (*MODULES, *EXTENSIONS), each
        pairs.add((each.by, module))
    return pairs


def circles(pairs: set[tuple[str, str]]) -> set[str]:
    """The modules that are in a circle, or between two: those that stay when ends are taken away."""
    while True:
        importing, imported = {by for by, _ in pairs}, {of for _, of in pairs}
        inner = {(by, of) for by, of in pairs if by in imported and of in importing}
        if inner == pairs:
            return importing
        pairs = inner


def layer_of(module: str) -> int:
    part = module.split(".")[1]
    known = {name: number for number, names in enumerate(LAYERS) for name in names}
    is_helper = (ROOT / "fastsync" / f"{part}.py").exists() or module in EXTENSIONS
    return known[part] if part in known or not is_helper else -1


def test_no_module_imports_itself_in_a_circle() -> None:
    assert circles(between_modules(all_imports("fastsync"))) == set()


def test_few_imports_run_back_up() -> None:
    pairs = {pair for pair in between_modules(all_imports("fastsync")) if "fastsync" not in pair}
    back_up = sorted((by, of) for by, of in pairs if layer_of(of) > layer_of(by))
    assert len(back_up) <= MOST_IMPORTS_UP, back_up


def test_few_files_and_names_are_at_the_top() -> None:
    assert len(list((ROOT / "fastsync").glob("*.py"))) <= MOST_FILES
    assert len(fastsync.__all__) <= MOST_NAMES
    assert fastsync.__all__ == sorted(fastsync.__all__)


OF_TORCH = "fastsync._torch_compat."
"""The names of torch's that it keeps private are all there, the trainer's too. They are none of fastsync's own."""


def private_names(imports: list[Import], *allowed: str) -> list[Import]:
    return [
        each
        for each in imports
        if not each.of.startswith(allowed)
        and any(part.startswith("_") and not part.startswith("__") for part in each.of.split("."))
    ]


def test_the_trainer_and_benchmarks_import_what_a_user_could() -> None:
    assert private_names(all_imports("fastsync/ppo"), "fastsync._ppo", OF_TORCH) == []
    assert private_names(all_imports("benchmarks")) == []


def test_what_is_forbidden_is_found() -> None:
    def found(source: str) -> list[Import]:
        return list(imports_of(source, "fastsync.ppo.cli", is_package=False))

    assert found("def f():\n    from .._checks import resolve_group") == [
        Import("fastsync.ppo.cli", "fastsync._checks.resolve_group")
    ]
    for source in ("from .. import _C", "from ..sync.attach import _buckets", "import fastsync._checks"):
        assert len(private_names(found(source))) == 1, source
    assert private_names(found("from .__main__ import main\nfrom .. import attach\nfrom ..sync import clip")) == []
    assert circles({("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")}) == {"b", "c"}
    assert circles({("a", "b"), ("a", "c"), ("b", "c")}) == set()


def test_the_census_of_contributing_is_about_right() -> None:
    counted = census.counted(census.PAGE.read_text())
    assert {"`fastsync/ppo`", "`tests`", "`fastsync`, the rest without `ppo`"} <= counted.keys()
    wrong = {name: numbers for name, numbers in counted.items() if abs(numbers[0] - numbers[1]) > numbers[1] / 10}
    assert wrong == {}, "run: python -m tools.census"

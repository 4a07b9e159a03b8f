"""Writes the tables of options into docs/reference, from the sources: ``python -m tools.reference``.

A table is between two comments, of which the first one names the file and the class. The text of an option is the
comment or the string behind its field. The table of pairs is that of tests/engine/pairs.py. A test compares the pages
with the sources.
"""

from __future__ import annotations

import ast
import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path

from tests.engine import pairs

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
TABLE = re.compile(r"(<!-- options: (?P<file>\S+) (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAIRS = re.compile(r"(<!-- pairs -->\n).*?(<!-- end -->)", re.DOTALL)
NO_OPTIONS = ("config", "settings")
"""Fields that are described in the text."""


def options_of(file: str, name: str) -> str:
    """Returns a Markdown table of the fields that a class defines itself."""
    source = (ROOT / file).read_text()
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field, after in pairwise([*body, ast.Pass()]):
        if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
            continue
        said = source.splitlines()[field.end_lineno - 1].partition("  # ")[2]
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said = " ".join(after.value.value.split())
        target = ast.unparse(field.target)
        if target not in NO_OPTIONS:
            rows.append(
                f"| `{_option(target, field)}` | {_default(file, field)} | {said.replace('|', chr(92) + '|')} |"
            )
    return "\n".join(rows)


def _option(name: str, field: ast.AnnAssign) -> str:
    positional = re.search(r"Positional.*metavar='(\w+)'", ast.unparse(field.annotation))
    return positional[1] if positional else f"--{name.replace('_', '-')}"


def _default(file: str, field: ast.AnnAssign) -> str:
    value = ast.unparse(field.value) if field.value else "()"
    if value.isupper():  # a constant of the module
        value = repr(getattr(import_module(file.removesuffix(".py").replace("/", ".")), value))
    return "" if value in ("None", "()") else f"`{value}`"


def written(text: str) -> str:
    """Returns a page with its tables as the sources have them."""
    text = TABLE.sub(lambda match: f"{match[1]}{options_of(match['file'], match['name'])}\n{match[4]}", text)
    return PAIRS.sub(lambda match: f"{match[1]}{pairs.table()}\n{match[2]}", text)


def main() -> None:
    """Rewrites the pages."""
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()

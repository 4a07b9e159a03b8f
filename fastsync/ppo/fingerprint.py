"""Fingerprints of functions: whether a source still is the one that an operator was proven equal to.

It is of the syntax tree, so comments, formatting and quotes do not count. Neither the text that ``ast.unparse`` writes
nor tokens would do: the first changed with Python 3.11, and Python 3.12 splits f-strings into other tokens.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

DECORATORS = {"fused.Operator", "staticmethod"}
"""Those that change nothing of what a function computes."""


def fingerprint(*functions: Callable[..., Any]) -> str:
    """Hashes functions' source without docstrings and comments. Empty if one has none, or decorators of one's own.

    The same source has the same fingerprint under every Python.
    """
    written = []
    for function in functions:
        try:
            definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):  # the last of a lambda within an expression
            return ""
        if not isinstance(definition, ast.FunctionDef) or hasattr(function, "__wrapped__"):
            return ""
        if not DECORATORS.issuperset(map(ast.unparse, definition.decorator_list)):
            return ""
        body = definition.body if ast.get_docstring(definition) is None else definition.body[1:]
        written.append(f"{_structure(definition.args)} {_structure(body)}")
    return hashlib.sha256("\n".join(written).encode()).hexdigest()[:16]


def _structure(node: object) -> str:
    """Writes a syntax tree. Empty fields are left out, because newer Pythons have more of them.

    So are empty parts of f-strings: Python 3.12 puts one behind ``{y}`` in ``{x:{y}}``.
    """
    if isinstance(node, list):
        return f"[{' '.join(map(_structure, node))}]"
    if isinstance(node, ast.JoinedStr):
        parts = [part for part in node.values if not isinstance(part, ast.Constant) or part.value != ""]
        return f"JoinedStr{_structure(parts)}"
    if not isinstance(node, ast.AST):
        return ascii(node)  # repr would show what this Python's Unicode knows
    named = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({' '.join(f'{name}={_structure(value)}' for name, value in named)})"

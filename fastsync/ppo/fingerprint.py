"""Fingerprints of functions, which tell whether a source is still the one that an operator was proven equal to.

A fingerprint is a hash of the syntax tree, so comments, formatting and quotes do not count. It uses neither
``ast.unparse``, whose text changed with Python 3.11, nor tokens, which changed with Python 3.12.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

DECORATORS = {"fused.Operator", "staticmethod"}
"""Decorators that do not change what a function computes."""


def fingerprint(*functions: Callable[..., Any]) -> str:
    """Hashes the source of functions without docstrings and comments. Returns "" if one has no source or other
    decorators.

    The same source has the same fingerprint under every Python.
    """
    written = []
    for function in functions:
        try:
            definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):  # SyntaxError: a lambda inside an expression
            return ""
        if not isinstance(definition, ast.FunctionDef) or hasattr(function, "__wrapped__"):
            return ""
        if not DECORATORS.issuperset(map(ast.unparse, definition.decorator_list)):
            return ""
        body = definition.body if ast.get_docstring(definition) is None else definition.body[1:]
        written.append(f"{_structure(definition.args)} {_structure(body)}")
    return hashlib.sha256("\n".join(written).encode()).hexdigest()[:16]


def _structure(node: object) -> str:
    """Returns a syntax tree as text. Empty fields are left out, because newer versions of Python have more of them.

    Empty strings in f-strings are left out too: Python 3.12 adds one after ``{y}`` in ``{x:{y}}``.
    """
    if isinstance(node, list):
        return f"[{' '.join(map(_structure, node))}]"
    if isinstance(node, ast.JoinedStr):
        parts = [part for part in node.values if not isinstance(part, ast.Constant) or part.value != ""]
        return f"JoinedStr{_structure(parts)}"
    if not isinstance(node, ast.AST):
        return ascii(node)  # repr depends on the version of Unicode
    named = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({' '.join(f'{name}={_structure(value)}' for name, value in named)})"

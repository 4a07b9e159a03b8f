"""torch's private names are in ``fastsync/_torch_compat.py``, and nowhere else in the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastsync._torch_compat import PRIVATE

PACKAGE = Path(__file__).parents[2] / "fastsync"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_torch_compat.py")
OF_TORCH = {private.name.rpartition(".")[2] for private in PRIVATE}
ROOTS = ("torch", "dist")
"""What modules call torch and its ``distributed``."""
OF_OTHERS = {"_replace", "_fields", "_async_worker", "_check_spaces"}
"""Private by their underscore alone, and none of torch's: of named tuples and gymnasium."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_by(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a module gives to something itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_object_of_ours(node: ast.expr) -> bool:
    """Where torch and the package have the same name for an attribute, whose is meant."""
    return isinstance(node, ast.Name) and node.id in ("self", "sync", "handle")


def private_names(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Yields lines and names of torch that a module should not know. Those in ``own`` are the package's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".") if alias.name.startswith("torch")]
            yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OF_OTHERS:
            is_own = node.attr in own and (node.attr not in OF_TORCH or is_object_of_ours(node.value))
            if root_of(node) in ROOTS or not is_own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in OF_TORCH and node.value not in own:
            yield node.lineno, node.value


OWN = {name for path in SOURCES for name in defined_by(ast.parse(path.read_text()))} | {"_C", "_ppo"}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch.nn.modules.module import _has_any_global_hook", ["_has_any_global_hook"]),
        ("from torch.utils._pytree import tree_map", ["_pytree"]),
        ("import torch._dynamo", ["_dynamo"]),
        ("torch._C._current_graph_task_id()", ["_current_graph_task_id", "_C"]),
        ("dist.distributed_c10d._world", ["_world"]),
        ("getattr(model, '_orig_mod', model)", ["_orig_mod"]),
        ("ddp_model.inner._comm_hooks", ["_comm_hooks"]),
        ("sys._getframe(1)", ["_getframe"]),
        ("self._engine", []),
        ("self._buffers", []),
        ("module._buffers", ["_buffers"]),
        ("torch.nn.functional.relu(x).__class__", []),
    ],
)
def test_private_names_of_torch_are_seen(code: str, names: list[str]) -> None:
    assert sorted(name for _, name in private_names(ast.parse(code), {"_engine", "_buffers", "_C"})) == sorted(names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_module_knows_private_names_of_torch(path: Path) -> None:
    assert [*private_names(ast.parse(path.read_text()), OWN)] == []

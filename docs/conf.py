"""Sphinx's settings for the site: ``make docs``."""

import ast
import os
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

from sphinx.application import Sphinx

import fastsync

project = "fastsync"
version = release = fastsync.__version__
copyright = "the fastsync authors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["pictures/*"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
autosummary_generate = True
python_maximum_signature_line_length = 88

html_theme = "pydata_sphinx_theme"
html_title = "fastsync"
html_extra_path = ["llms.txt"]
html_static_path = ["style"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_sidebars = {"*": []}  # pages outside of a folder have no others beside them
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": True,
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
}
copybutton_prompt_text = "$ "

ROOT = Path(__file__).parents[1]
HELP = ROOT / "build" / "docs-help"
KINDS = ("slurm", "kubernetes", "skypilot")
COMMANDS = {name: [name] for name in ("train", "eval", "launch")} | {
    f"launch-{kind}": ["launch", kind] for kind in KINDS
}


def write_helps(app: Sphinx) -> None:
    """Writes what ``--help`` of each command says, for the page of the command line."""
    HELP.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"COLUMNS": "84", "TERM": "dumb", "NO_COLOR": "1"}
    for name, words in COMMANDS.items():
        command = [sys.executable, "-m", "fastsync.cli", *words, "--help"]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        said = said.partition("╭─ settings options")[0]  # which have a page of their own
        lines = [part for line in said.splitlines() for part in textwrap.wrap(line.rstrip(), 88) or [""]]
        (HELP / f"{name}.txt").write_text("\n".join(lines))


SETTINGS = {"RunSettings": "settings.py", "Settings": "ppo.py"}


def write_settings(app: Sphinx) -> None:
    """Writes tables of the trainer's settings, from the comment or the string behind each field."""
    for name, file in SETTINGS.items():
        source = (ROOT / "fastsync" / "ppo" / file).read_text()
        (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
        rows = ["| option | default | meaning |", "|---|---|---|"]
        for field, after in pairwise(body):
            if not isinstance(field, ast.AnnAssign):
                continue
            said = source.splitlines()[field.end_lineno - 1].partition("  # ")[2]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                said = " ".join(after.value.value.split())
            option = ast.unparse(field.target).replace("_", "-")
            rows.append(f"| `--{option}` | `{ast.unparse(field.value)}` | {said.replace('|', chr(92) + '|')} |")
        (HELP / f"{name}.md").write_text("\n".join(rows) + "\n")


def mend_docstring(app: Sphinx, what: str, name: str, made: object, options: object, lines: list[str]) -> None:
    """Before napoleon, which takes what comes before a colon for the type of an attribute."""
    if name == "fastsync.AnyCompression":  # a union has the docstring of all unions
        lines[:] = [compression_alias()]
    if what in ("attribute", "property", "data") and lines:
        lines[0] = lines[0].replace(": ", " \N{EN DASH} ", 1)


def compression_alias() -> str:
    """Finds the string behind ``AnyCompression``."""
    body = ast.parse((ROOT / "fastsync" / "compression.py").read_text()).body
    return next(
        after.value.value
        for alias, after in pairwise(body)
        if isinstance(alias, ast.AnnAssign) and ast.unparse(alias.target) == "AnyCompression"
    )


def setup(app: Sphinx) -> None:
    """Sphinx calls it once."""
    app.connect("builder-inited", write_helps)
    app.connect("builder-inited", write_settings)
    app.connect("autodoc-process-docstring", mend_docstring, priority=400)

"""Sphinx's settings for the site: ``make docs``."""

import ast
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


def mend_docstring(app: Sphinx, what: str, name: str, made: object, options: object, lines: list[str]) -> None:
    """Before napoleon, which takes what comes before a colon for the type of an attribute."""
    if name == "fastsync.sync.compression.AnyCompression":  # a union has the docstring of all unions
        lines[:] = [compression_alias()]
    if what in ("attribute", "property", "data") and lines:
        lines[0] = lines[0].replace(": ", " \N{EN DASH} ", 1)


def compression_alias() -> str:
    """Finds the string behind ``AnyCompression``."""
    body = ast.parse((ROOT / "fastsync" / "sync" / "compression.py").read_text()).body
    return next(
        after.value.value
        for alias, after in pairwise(body)
        if isinstance(alias, ast.AnnAssign) and ast.unparse(alias.target) == "AnyCompression"
    )


def setup(app: Sphinx) -> None:
    """Sphinx calls it once."""
    app.connect("autodoc-process-docstring", mend_docstring, priority=400)

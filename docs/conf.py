"""Sphinx's settings for the site: ``make docs``."""

import os
import subprocess
import sys
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
autodoc_type_aliases = {"AnyCompression": "AnyCompression"}
napoleon_use_rtype = False
autosummary_generate = True
python_maximum_signature_line_length = 88

html_theme = "pydata_sphinx_theme"
html_title = "fastsync"
html_extra_path = ["llms.txt"]
html_static_path = ["style"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": True,
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
}
copybutton_prompt_text = "$ "

COMMANDS = {"train": ["train"], "eval": ["eval"], "launch-slurm": ["launch", "slurm"]}


def write_helps(app: Sphinx) -> None:
    """Writes what ``--help`` of each command says, for the page of the command line."""
    folder = Path(__file__).parents[1] / "build" / "docs-help"
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    for name, words in COMMANDS.items():
        command = [sys.executable, "-m", "fastsync.cli", *words, "--help"]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        (folder / f"{name}.txt").write_text("\n".join(line.rstrip() for line in said.splitlines()))


def setup(app: Sphinx) -> None:
    """Sphinx calls it once."""
    app.connect("builder-inited", write_helps)

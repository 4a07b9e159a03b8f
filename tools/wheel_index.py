"""Makes the pages by which pip finds wheels: ``python -m tools.wheel_index WHEELS PAGES [--wheels-at URL]``.

A wheel is for one torch, and of two versions pip takes the higher one, whatever torch is there. So each torch has pages
of its own, which a user names: ``pip install fastsync-torch==0.1.0+torch2.13.0.cpu --extra-index-url
PAGES/torch2.13.0.cpu``. They have the form of https://peps.python.org/pep-0503/. A version that names its torch is on
no other index, so nobody else's package of this name can take its place.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

PROJECT = "fastsync-torch"


def torch_of(wheel: Path) -> str:
    """The end of a wheel's version, such as ``torch2.13.0.cpu``.

    Raises:
        SystemExit: its version names no torch.
    """
    version = wheel.name.split("-")[1]
    if "+torch" not in version:
        raise SystemExit(f"{wheel} names no torch: was it made without FASTSYNC_WHEEL=1? See `make wheel`")
    return version.split("+")[1]


def page(lines: Sequence[str]) -> str:
    return "\n".join(["<!DOCTYPE html>", "<html><body>", *lines, "</body></html>", ""])


def link(address: str, text: str) -> str:
    return f'<a href="{html.escape(address)}">{html.escape(text)}</a><br>'


def write_pages(wheels: Sequence[Path], pages: Path, wheels_at: str) -> list[Path]:
    """Returns the folders that pip is told of, one for each torch. ``wheels_at`` is an address that ends in a slash."""
    folders = []
    for torch, group in itertools.groupby(sorted(wheels, key=torch_of), torch_of):
        links = [
            link(f"{wheels_at}{quote(wheel.name)}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}", wheel.name)
            for wheel in group
        ]
        folder = pages / torch
        (folder / PROJECT).mkdir(parents=True, exist_ok=True)
        (folder / PROJECT / "index.html").write_text(page(links))
        (folder / "index.html").write_text(page([link(f"{PROJECT}/", PROJECT)]))
        folders.append(folder)
    (pages / "index.html").write_text(page([link(f"{folder.name}/", folder.name) for folder in folders]))
    return folders


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wheel_index", description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, help="the folder that has the wheels")
    parser.add_argument("pages", type=Path, help="the folder to write into")
    parser.add_argument("--wheels-at", metavar="URL", help="where pip finds the wheels; the folder itself by default")
    options = parser.parse_args(arguments)
    wheels = sorted(options.wheels.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"no wheel in {options.wheels}")
    address = options.wheels_at or options.wheels.resolve().as_uri()
    for folder in write_pages(wheels, options.pages, f"{address.rstrip('/')}/"):
        print(f"{folder}: pip install {PROJECT}==VERSION+{folder.name} --extra-index-url {folder.resolve().as_uri()}")


if __name__ == "__main__":
    main()

"""Every page of the site on a phone: nothing is cut, and no page scrolls sideways. ``make test-docs`` runs it.

It needs the site in ``build/docs``, Playwright, and Chromium: one on the PATH, or the one of ``playwright install``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sync_api: Any = pytest.importorskip("playwright.sync_api", reason="needs `make test-docs`")

SITE = Path(__file__).parents[2] / "build" / "docs"
PAGES = sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html"))
WIDTH, HEIGHT = 390, 844
WIDEST = 'Math.max(...["html", "main", "article"].map(name => document.querySelector(name)?.scrollWidth ?? 0))'
CUT = """
() => [...document.querySelectorAll("main pre, main table, main img, main p, main td, main li")].filter(element => {
  const box = element.getBoundingClientRect();
  if (box.width === 0) return false;
  let scrolls = false;
  for (let outer = element; outer && outer.tagName !== "ARTICLE"; outer = outer.parentElement)
    scrolls ||= ["auto", "scroll"].includes(getComputedStyle(outer).overflowX);
  return !scrolls && (box.right > innerWidth + 1 || element.scrollWidth > element.clientWidth + 1);
}).map(element => element.tagName + ": " + element.innerText.slice(0, 60))
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        browser.close()


def test_what_is_cut_is_found(page: Any) -> None:
    page.goto(f"file://{SITE / 'index.html'}")
    page.add_style_tag(content="main pre, main div.highlight { overflow: hidden !important; max-width: 100px }")
    assert page.evaluate(CUT) != []


@pytest.mark.parametrize("name", PAGES or ["index.html"])
def test_nothing_is_cut(page: Any, name: str) -> None:
    page.goto(f"file://{SITE / name}")
    assert page.evaluate(WIDEST) <= WIDTH
    assert page.evaluate(CUT) == []

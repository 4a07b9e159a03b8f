"""What the README and the site say: names and messages that exist, links that lead somewhere, plain sentences."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fastsync

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
DETAILED = {
    "design.md",
    "measurements.md",
    "changelog.md",
    "compression.md",
    "outer_steps.md",
    "ppo_trainer.md",
    "change_it.md",
}
"""Pages for who wants to know exactly: their sentences may be longer."""
MOST_WORDS = 25
BANNED = ("rider", "doors", "roll call", "strand", "stand-in", "lane", "seat", "rival", "sits", "other than before")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page)], ids=name_of)
def test_code_is_python_and_calls_what_there_is(page: Path) -> None:
    for block in code_blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fastsync":
                assert hasattr(fastsync, node.attr), f"fastsync.{node.attr}"


def test_the_reference_has_every_public_name() -> None:
    reference = (DOCS / "reference" / "api.md").read_text()
    described = set(re.findall(r"auto(?:function|class|data):: (\w+)$", reference, re.MULTILINE))
    assert described == set(fastsync.__all__)


def said_by_the_sources() -> str:
    """All strings of the sources; what stands side by side is joined, as the compilers join it."""
    texts = []
    for file in sorted([*(ROOT / "fastsync").rglob("*.py"), ROOT / "setup.py"]):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                texts.append("".join(map(str, parts)))
    for file in sorted((ROOT / "csrc").rglob("*.cpp")):
        joined = re.sub(r'"\s*,?\s*"', "", file.read_text())
        texts += re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
    return "\n".join(texts) + "\nNo space left on device"  # which the system says


def test_every_message_of_the_troubleshooting_page_is_one() -> None:
    sources = said_by_the_sources()
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 50
    missing = [part for message in messages for part in message.split("…") if part.strip(" .,") not in sources]
    assert missing == []


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def sentences(page: Path) -> list[str]:
    """Those of the running text: without code, tables and headings."""
    text = re.sub(r"^(```|:::).*?^\1$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [
        "" if re.match(r"\s*\||    |#|\(|!\[", line) else re.sub(r"^\s*([-*:]|\d+\.) ", "\n", line)
        for line in text.splitlines()
    ]
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    plain = (re.sub(r"`[^`]*`", "code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each)) for each in paragraphs)
    return [" ".join(found.split()) for each in plain for found in re.split(r"(?<=[.!?:;])\s+", each) if found.strip()]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in DETAILED], ids=name_of)
def test_sentences_are_short_and_words_are_the_fields(page: Path) -> None:
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > MOST_WORDS]
    assert long == []
    found = [word for word in BANNED if re.search(rf"\b{word}s?\b", page.read_text(), re.IGNORECASE)]
    assert found == []

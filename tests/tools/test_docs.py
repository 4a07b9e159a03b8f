"""What the README and the site say: names and messages that exist, links that lead somewhere, plain sentences."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import fastsync
from fastsync import cli
from fastsync.launch.jobs import KINDS
from tools import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "csrc" / "README.md", *DOCS.rglob("*.md")])
FOLDERS = "csrc|tests|fastsync|benchmarks|docs|examples|tools"
MOST_WORDS = 30
BANNED = (
    "rider", "door", "roll call", "strand", "stand-in", "lane", "seat", "rival", "sits", "other than before",
    "GPU half", "CUDA half",
)  # fmt: skip


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def inline_code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_names_and_files_in_the_text_are_there(page: Path) -> None:
    for code in inline_code(page):
        for name in re.findall(r"\bfastsync\.([A-Za-z_]\w*)", code):
            assert hasattr(fastsync, name) or find_spec(f"fastsync.{name}"), code
        if match := re.fullmatch(
            r"((?:csrc|tests|fastsync|benchmarks|docs|examples|tools)/[\w/.-]*)(\{([\w,]+)\})?", code
        ):
            endings = match[3].split(",") if match[2] else [""]
            assert all((ROOT / (match[1] + ending)).exists() for ending in endings), code


DESCRIBED = re.findall(
    r"auto(?:function|class|data|exception):: ([\w.]+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE
)
"""The names of the reference: those of ``fastsync`` are short, and others say where they live."""


def made_of(name: str) -> Any:
    made: Any = fastsync
    for number, part in enumerate(parts := name.removeprefix("fastsync.").split(".")):
        module = f"fastsync.{'.'.join(parts[: number + 1])}"
        made = getattr(made, part) if hasattr(made, part) else import_module(module)
    return made


def test_the_reference_has_every_public_name() -> None:
    modules = {name for name in fastsync.__all__ if inspect.ismodule(getattr(fastsync, name))}
    of_modules = {name for name in modules if any(each.startswith(f"fastsync.{name}.") for each in DESCRIBED)}
    assert {name for name in DESCRIBED if "." not in name} | of_modules == set(fastsync.__all__)


def test_the_reference_has_what_public_names_return_and_take() -> None:
    described = {id(made_of(name)) for name in DESCRIBED}
    missing = {
        kind
        for name in DESCRIBED
        if ".ppo." not in name
        for kind in classes_of(made_of(name))
        if id(kind) not in described
    }
    assert missing == set()


def classes_of(made: Any) -> Iterator[type]:
    """Those of fastsync in the annotations of a function, or of a class's public methods, properties and fields."""
    parts = [made]
    if inspect.isclass(made):
        public = [each for name, each in vars(made).items() if not name.startswith("_")]
        parts += [each.fget if isinstance(each, property) else each for each in public]
    for part in parts:
        for annotation in getattr(part, "__annotations__", {}).values() if callable(part) else ():
            for name in re.findall(r"\w+", annotation if isinstance(annotation, str) else repr(annotation)):
                module = inspect.getmodule(part)
                kind = getattr(module, name, None)
                if inspect.isclass(kind) and kind.__module__.startswith("fastsync.") and not name.startswith("_"):
                    yield kind


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


@pytest.mark.parametrize("page", reference.PAGES, ids=name_of)
def test_tables_of_options_are_those_of_the_sources(page: Path) -> None:
    assert page.read_text() == reference.written(page.read_text()), "run: python -m tools.reference"


def plain(text: str) -> str:
    """Without code blocks, and with a word for each piece of code and each link."""
    text = re.sub(r"^(```|:::).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(`+).+?\1", "code", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[str]:
    """Those of the running text: without code, tables and headings."""
    lines = [
        "" if re.match(r"\s*\||    |#|\(|%|<!--", line) else re.sub(r"^\s*([-*:]|\d+\.) ", "\n", line)
        for line in plain(text).splitlines()
    ]
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    return [
        " ".join(found.split())
        for each in paragraphs
        for found in re.split(r"(?<=[.!?:;])\W*\s+", each)
        if found.strip()
    ]


def faults(text: str) -> list[str]:
    """Sentences that are too long, and words that are not the field's."""
    long = [sentence for sentence in sentences(text) if len(sentence.split()) > MOST_WORDS]
    return long + [word for word in BANNED if re.search(rf"\b{word}s?\b", plain(text), re.IGNORECASE)]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_sentences_are_short_and_words_are_the_fields(page: Path) -> None:
    assert faults(page.read_text()) == []


def docstrings(tree: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Those of a public name, its public methods and its fields, each entry of Args and Raises a paragraph."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield from docstrings(node, f"{name}.{node.name}")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            entries = re.sub(r"^ +\w+: ", "\n", inspect.cleandoc(node.value.value), flags=re.MULTILINE)
            yield name, re.sub(r"^ +", "", entries, flags=re.MULTILINE)


DOCUMENTED = [name for name in DESCRIBED if inspect.isroutine(made := made_of(name)) or inspect.isclass(made)]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_are_plain(name: str) -> None:
    tree = ast.parse(inspect.getsource(made_of(name)))
    assert {place: found for place, text in docstrings(tree, "") if (found := faults(text))} == {}


@pytest.mark.parametrize(
    "words", [["--help"], ["train"], ["eval"], ["export"], ["plot"], *(["launch", kind] for kind in KINDS)], ids=str
)
def test_help_texts_are_plain(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    text = re.sub(r"[│╭╰─╮╯]|\(default: .*?\)", " ", capsys.readouterr().out)
    assert len(text) > 300
    assert faults(re.sub(r"^ *--?\w.*?(?:  +|$)", "\n", text.replace("\n\n", "\n"), flags=re.MULTILINE)) == []


def test_long_sentences_and_private_words_are_found() -> None:
    assert faults("A word. " + "Word " * MOST_WORDS + "end.") != []
    assert faults("A rider travels beside it.") == ["rider"]
    assert faults("`rider` is code, and so is\n\n```\nrider\n```\n\nthis.") == []

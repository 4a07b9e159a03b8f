"""A document as Markdown, with its pictures as files beside it."""

from collections.abc import Iterator

from benchmarks.report.document import Document, Section, Table


def to_markdown(document: Document) -> str:
    return "\n\n".join(_blocks(document)) + "\n"


def _blocks(document: Document) -> Iterator[str]:
    yield f"# {_text(document.title)}"
    for sentence in document.summary:
        yield _text(sentence)
    if document.notes:
        yield _list(document.notes)
    for section in document.sections:
        yield from _section(section)
    yield "## Definitions"
    yield _list([f"**{_text(word)}**: {_text(meaning)}" for word, meaning in document.definitions.items()], plain=False)
    yield "## Where and how"
    yield _table(Table(("what", "is"), [*document.environment.items()]), align="left")
    yield f"```\n{document.command}\n```"


def _section(section: Section) -> Iterator[str]:
    yield f"## {_text(section.title)}"
    if section.text:
        yield _text(section.text)
    if section.picture:
        yield f"![{_text(section.picture.description)}]({section.picture.name}.svg)"
    if section.table:
        yield _table(section.table)


def _table(table: Table, align: str = "right") -> str:
    rule = ["---", *["---:" if align == "right" else "---"] * (len(table.headings) - 1)]
    rows = [[_text(cell) for cell in row] for row in (table.headings, *table.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def _list(items: list[str] | tuple[str, ...], plain: bool = True) -> str:
    return "\n".join(f"- {_text(item) if plain else item}" for item in items)


def _text(text: str) -> str:
    """With what Markdown would take for its own told apart."""
    for character in "\\`*_|<>":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())

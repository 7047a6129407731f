"""The pages of docs/ as data: fenced blocks, console sessions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: its language, its title (a file's name) or "", its text."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [
        Block(language=match["language"], title=match["title"] or "", text=match["text"])
        for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def session(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block (a line that begins with ``$``), and the output that
    is shown for it.
    """
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def shows(shown: str, printed: str) -> bool:
    """Say whether what was printed is what is shown, where ``...`` is any text and white space
    does not count.
    """
    pieces = [re.escape(" ".join(piece.split())) for piece in shown.split("...")]
    return (
        re.fullmatch(r"\s*" + r".*".join(pieces) + r"\s*", " ".join(printed.split()), re.DOTALL)
        is not None
    )

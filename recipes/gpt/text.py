"""Text as windows of character numbers: a file, or the reference of Python that each Python has."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import Dataset


class TextError(ValueError):
    """The text cannot be used."""


class Characters:
    """The characters of a text, with their numbers.

    Args:
        text: Whose characters they are.
    """

    def __init__(self, text: str) -> None:
        self.all = sorted(set(text))
        self._number = {character: number for number, character in enumerate(self.all)}

    def encode(self, text: str) -> torch.Tensor:
        """Return the numbers, shape ``(len(text),)``.

        Characters that are not known are left out.
        """
        known = (self._number[each] for each in text if each in self._number)
        return torch.tensor(list(known), dtype=torch.long)

    def decode(self, numbers: torch.Tensor) -> str:
        """Return the text of numbers, shape ``(n,)``."""
        return "".join(self.all[number] for number in numbers.tolist())


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Stretches of a text, and the same one character on; each of shape ``(context,)``.

    Args:
        numbers: Of the text.
        context: Characters of a stretch.
        shifted: Whether each begins anywhere in its place, anew in each epoch (the loader seeds
            that).
    """

    def __init__(self, numbers: torch.Tensor, context: int, *, shifted: bool) -> None:
        self._numbers, self._context, self._shifted = numbers, context, shifted

    def __len__(self) -> int:
        return (len(self._numbers) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * self._context
        if self._shifted:
            begin += int(torch.randint(self._context, ()))
        begin = min(begin, len(self._numbers) - self._context - 1)
        return (
            self._numbers[begin : begin + self._context],
            self._numbers[begin + 1 : begin + self._context + 1],
        )


def read_text(path: Path | None) -> str:
    """Return the text of a file.

    Without one, the topics of Python's ``help()``, 460 thousand characters.

    Raises:
        TextError: It cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(
            f"--text {path} cannot be read: {error}\nFix: name a file of text in UTF-8."
        ) from error


def split_numbers(numbers: torch.Tensor, context: int) -> tuple[Windows, Windows]:
    """Return what is learnt of a text, and its last tenth, which is held out.

    Args:
        numbers: Of its characters or tokens, shape ``(n,)``.
        context: Of a window.

    Raises:
        TextError: The text is too short.
    """
    end = len(numbers) * 9 // 10
    if len(numbers) - end < context + 1:
        raise TextError(
            f"the text has {len(numbers)} tokens; a tenth must be longer than --context"
            f" {context}.\nFix: a longer text, or a shorter context."
        )
    return Windows(numbers[:end], context, shifted=True), Windows(
        numbers[end:], context, shifted=False
    )

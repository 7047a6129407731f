"""Texts as numbers of symbols: characters, and pronunciations in braces such as ``{HH AH0 L OW1}``.

The symbols and their order are those of the public implementations that were trained on LJSpeech,
so that their embeddings fit: padding, hyphen, punctuation, letters, and the phonemes of the CMU
dictionary with and without stress.
"""

from __future__ import annotations

import re
import unicodedata

_VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW"
_CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH"
_PHONEMES = sorted(
    [each + stress for each in _VOWELS.split() for stress in ("", *"012")] + _CONSONANTS.split()
)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

SYMBOLS: tuple[str, ...] = (
    "_",
    "-",
    *"!'(),.:;? ",
    *_LETTERS,
    *(f"@{phoneme}" for phoneme in _PHONEMES),
)
"""All symbols; number 0 is padding."""

_NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS)}
_PRONUNCIATION = re.compile(r"\{([^{}]*)\}")


def numbers_of(text: str) -> list[int]:
    """Return the numbers of a text's symbols.

    Letters are taken without accents and in lower case, white space as one blank; what is no symbol
    is left out. Of a text without any symbol the list is empty.

    Example:
        >>> "".join(SYMBOLS[number] for number in numbers_of("Café  42!"))
        'cafe !'
        >>> [SYMBOLS[number] for number in numbers_of("{HH AY1}")]
        ['@HH', '@AY1']
    """
    found: list[int] = []
    # Those at odd places were in braces
    for place, part in enumerate(_PRONUNCIATION.split(text.strip())):
        named = [f"@{each}" for each in part.split()] if place % 2 else _characters(part)
        found += [_NUMBERS[symbol] for symbol in named if symbol in _NUMBERS and symbol != "_"]
    return (
        found
        if any(SYMBOLS[number].isalpha() or SYMBOLS[number][0] == "@" for number in found)
        else []
    )


def _characters(text: str) -> list[str]:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return list(re.sub(r"\s+", " ", plain.lower()))

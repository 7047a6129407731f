"""A tokenizer of Pegasus's kind, trained on the spot: a unigram model over pieces of words.

Ids 0 to 4 are ``<pad>``, ``</s>``, ``<mask_1>``, ``<mask_2>`` and ``<unk>``. The published
tokenizers also have 101 reserved ids, which only their pre-training uses.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.core.durable import replace_file
from recipes.pegasus.records import JsonLines, RecordError

_SPECIAL = ["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk>"]
_LONGEST_PIECE = 16
_LARGEST_ALPHABET = 300  # characters; others are <unk>
_MOST_RECORDS = 5000  # evenly spread over the file: as many tell which pieces are frequent
_WORDS = 80  # of a document


def load_tokenizer(
    path: Path, records: JsonLines, vocab_size: int, *, lowercase: bool = False
) -> Any:
    """Return the PegasusTokenizer that a file keeps; it is trained and kept where there is no file.

    Args:
        path: The pieces with their scores, as JSON.
        records: To train on.
        vocab_size: Most pieces.
        lowercase: Whether capitals are read as small letters, so that a word is the same at the
            begin of a sentence.

    Raises:
        RecordError: the file was made with other settings, or is damaged.
    """
    from transformers import PegasusTokenizer

    # Else its threads are in the way of forked workers
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        pieces = _train(records, vocab_size, lowercase=lowercase)
        made = {"vocab_size": vocab_size, "lowercase": lowercase, "pieces": pieces}
        replace_file(path, json.dumps(made, ensure_ascii=False).encode())
    kept = _kept_pieces(path, vocab_size, lowercase=lowercase)
    tokenizer = PegasusTokenizer(vocab=kept, offset=2, model_max_length=1024)
    return _with_small_letters(tokenizer) if lowercase else tokenizer


def _kept_pieces(path: Path, vocab_size: int, *, lowercase: bool) -> list[tuple[str, float]]:
    """Return the pieces in a file.

    Those of other settings would be taken for what was asked for.
    """
    try:
        kept = json.loads(path.read_bytes())
        pieces = [(str(piece), float(score)) for piece, score in kept["pieces"]]
        settings = int(kept["vocab_size"]), bool(kept["lowercase"])
    except (ValueError, TypeError, KeyError) as error:
        raise RecordError(
            f"{path} is no vocabulary, or a damaged one ({error!r}).\n"
            "Fix: delete it: from the same records it is made anew, the same."
        ) from None
    if settings != (vocab_size, lowercase):
        size, small = settings
        raise RecordError(
            f"{path} was made with --vocab-size {size} and --{'' if small else 'no-'}lowercase.\n"
            "Fix: give the run the same again, or a --run-dir of its own."
        )
    return pieces


def reload_tokenizer(folder: Path) -> Any:
    """Return the tokenizer that save_pretrained wrote.

    Transformers 5.17 forgets that it has read small letters only.

    Args:
        folder: Of the model and its tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer, saved = (
        AutoTokenizer.from_pretrained(folder, local_files_only=True),
        folder / "tokenizer.json",
    )
    kept = json.loads(saved.read_bytes()).get("normalizer") if saved.is_file() else None
    return (
        _with_small_letters(tokenizer)
        if {"type": "Lowercase"} in (kept or {}).get("normalizers", [])
        else tokenizer
    )


def _with_small_letters(tokenizer: Any) -> Any:
    """Return a tokenizer that reads capitals so."""
    from tokenizers import normalizers

    inner = tokenizer.backend_tokenizer
    inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), inner.normalizer])
    return tokenizer


def _train(records: JsonLines, vocab_size: int, *, lowercase: bool) -> list[tuple[str, float]]:
    """Return pieces with log-probabilities, the same for the same records.

    The trainer of unigram models gives other pieces each time, even in one thread. So pieces are
    found by merging pairs (BPE), which is a function of the texts, and their probabilities are how
    often they occur then. No piece has both letters and punctuation, so that a word is the same at
    the end of a sentence.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Lowercase(), spaces]) if lowercase else spaces
    )
    words = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.Punctuation()])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        limit_alphabet=_LARGEST_ALPHABET,
        max_token_length=_LONGEST_PIECE,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(records), trainer)
    counts = Counter(piece for text in _texts(records) for piece in tokenizer.encode(text).tokens)
    pieces = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    total = sum(counts.values())
    return [
        (piece, 0.0 if piece in _SPECIAL else math.log(max(counts[piece], 0.5) / total))
        for piece in pieces
    ]


def _texts(records: JsonLines) -> Iterator[str]:
    """Yield the texts that can be read; what cannot be is the loader's business."""
    for index in range(0, len(records), max(1, len(records) // _MOST_RECORDS)):
        try:
            document, summary = records[index]
        except RecordError:
            continue
        yield " ".join(document.split()[:_WORDS])
        yield summary

"""A summarisation corpus that every machine has.

Docstrings of installed packages, read as text and never imported.

A docstring's first paragraph is the summary. The document is that sentence among two or three
others of it, in an order that is drawn: which of them sums up the rest must be found, and be
written down. A record is one line of JSON with the keys ``document``, ``summary`` and ``name``, in
the order of the names of packages and files, each document once. Which records are held out is
decided by package. One record is in memory at a time, and a fingerprint of each.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import itertools
import json
import os
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

STANDARD_LIBRARY = "stdlib"
_NOT_READ = {"antigravity", "idlelib", "lib2to3", "this", "turtledemo"}
_FORMAT = 3
_LARGEST_FILE = 1_000_000  # bytes; larger ones are tables that a program has written
_SENTENCE_WORDS = range(3, 17)
_OTHERS = (2, 3)  # sentences beside the summary, fewest and most
# Underlines, and examples that run
_NO_WORDS = re.compile(r"^\s*([-=~^*]{3,}|(>>>|\.\.\. ).*)\s*$\n?", re.MULTILINE)
_ROLE = re.compile(r":[a-z:]+:`[~!]?([^`<]*)[^`]*`")  # :class:`Name`
_MARK = re.compile(r"[`*]+")
_BLANK_LINE = re.compile(r"\n\s*\n")
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+")
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_HOLDING = (  # statements, and parts of some, in which others lie
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
    ast.ExceptHandler,
    ast.match_case,
)


def collect(folder: Path, train: Sequence[str], held_out: Sequence[str]) -> tuple[Path, Path]:
    """Return the files of records to train on and to hold out; both are made if they are not there.

    A held-out record whose document or whose summary the training file has too is left out.

    Args:
        folder: Where the files are kept, under names that depend on what is read.
        train: Names of packages; ``"stdlib"`` is all of the standard library.
        held_out: Likewise.

    Raises:
        ValueError: for a package that is not installed, or is in both lists, or has no usable
            docstring.
    """
    both = sorted(set(train) & set(held_out))
    if both:
        raise ValueError(
            f"{', '.join(both)}: to train on and to hold out exclude each other.\n"
            "Fix: leave it out of --packages or of --held-out-packages."
        )
    sources = {name: sources_of(name) for name in (*train, *held_out)}
    stamp = hashlib.blake2b(
        json.dumps([_FORMAT, list(train), list(held_out), sys.version_info[:3]]).encode()
    )
    for name, paths in sources.items():
        stamp.update(repr((name, [(path.name, path.stat().st_size) for path in paths])).encode())
    paths = [folder / f"{which}-{stamp.hexdigest()[:12]}.jsonl" for which in ("train", "held-out")]
    if not all(path.exists() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        documents: set[bytes] = set()
        summaries: set[bytes] = set()
        _write(
            paths[0], [(name, sources[name]) for name in train], documents, summaries, fresh=False
        )
        _write(
            paths[1], [(name, sources[name]) for name in held_out], documents, summaries, fresh=True
        )
    return paths[0], paths[1]


def sources_of(package: str) -> list[Path]:
    """Return the Python files of a package, its tests left out, in the order of their names.

    Raises:
        ValueError: if it is not installed.
    """
    if package == STANDARD_LIBRARY:
        names = sorted(name for name in sys.stdlib_module_names if name not in _NOT_READ)
        return [path for name in names for path in sources_of(name)]
    if package in sys.stdlib_module_names:
        home = Path(sysconfig.get_paths()["stdlib"])
        return [path for path in (home / f"{package}.py",) if path.exists()] + _files_below(
            home / package
        )
    # Of a top-level name: nothing is imported
    spec = None if "." in package else importlib.util.find_spec(package)
    if spec is None:
        raise ValueError(
            f"{package!r} is not installed, or no name of a whole package.\n"
            "Fix: install it, or name others with --packages and --held-out-packages."
        )
    if spec.submodule_search_locations:
        return [
            path for home in spec.submodule_search_locations for path in _files_below(Path(home))
        ]
    return [Path(spec.origin)] if spec.origin is not None and spec.origin.endswith(".py") else []


def is_installed(package: str) -> bool:
    """Return whether a package can be read."""
    return (
        package in {STANDARD_LIBRARY, *sys.stdlib_module_names}
        or importlib.util.find_spec(package) is not None
    )


def _files_below(home: Path) -> list[Path]:
    found = (path.relative_to(home) for path in home.rglob("*.py"))
    return [
        home / path
        for path in sorted(found)
        if not any(part.startswith("test") for part in path.parts)
    ]


def records_in(source: str, name: str) -> Iterator[dict[str, str]]:
    """Yield the records in the text of a module.

    Args:
        source: Python code.
        name: What the record's names begin with.

    Raises:
        SyntaxError: if it is none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the code of others, such as an escape that is none
        tree = ast.parse(source)
    waiting: list[tuple[str, ast.AST]] = [(name, tree)]
    while waiting:
        path, parent = waiting.pop(0)
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, _DOCUMENTED):
                if isinstance(node, _HOLDING):
                    waiting.append((path, node))
                continue
            place = f"{path}.{node.name}"
            record = _record(ast.get_docstring(node, clean=False), place)
            if record is not None:
                yield record
            waiting.append((place, node))


def _record(docstring: str | None, name: str) -> dict[str, str] | None:
    parts = [] if docstring is None else _BLANK_LINE.split(inspect.cleandoc(docstring), maxsplit=1)
    if len(parts) < 2:
        return None
    summary, rest = (
        " ".join(_plain(part).split()) for part in (parts[0], _NO_WORDS.sub("", parts[1]))
    )
    fitting = (
        each for each in _BETWEEN_SENTENCES.split(rest) if len(each.split()) in _SENTENCE_WORDS
    )
    others = list(itertools.islice(fitting, _OTHERS[1]))
    if (
        not summary[:1].isalpha()
        or len(summary.split()) not in _SENTENCE_WORDS
        or len(others) < _OTHERS[0]
    ):
        return None
    sentences = [summary, *others]
    random.Random(" ".join(sentences)).shuffle(sentences)  # noqa: S311 - no secret
    return {"document": " ".join(sentences), "summary": summary, "name": name}


def _plain(text: str) -> str:
    return _MARK.sub("", _ROLE.sub(r"\1", text))


def _write(
    path: Path,
    sources: Sequence[tuple[str, Sequence[Path]]],
    documents: set[bytes],
    summaries: set[bytes],
    *,
    fresh: bool,
) -> None:
    """Write the records of some packages whose documents, and where `fresh` whose summaries, are
    not there yet.
    """
    known = frozenset(summaries)
    count, unfinished = 0, path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        for record in (
            record for package, paths in sources for record in _records_of(package, paths)
        ):
            document, summary = _fingerprint(record["document"]), _fingerprint(record["summary"])
            if document in documents or (fresh and summary in known):
                continue
            documents.add(document)
            summaries.add(summary)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
    if not count:
        unfinished.unlink()
        names = ", ".join(name for name, _ in sources)
        raise ValueError(
            f"{names}: no usable docstring in the sources.\nFix: name other packages too."
        )
    unfinished.replace(path)


def _records_of(package: str, paths: Sequence[Path]) -> Iterator[dict[str, str]]:
    for path in paths:
        try:
            if path.stat().st_size <= _LARGEST_FILE:
                yield from records_in(path.read_text(encoding="utf-8"), f"{package}:{path.stem}")
        except (OSError, SyntaxError, ValueError, RecursionError):
            # A template, or another language version: no record is lost that could be read
            continue


def _fingerprint(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.lower().split()).encode(), digest_size=12).digest()

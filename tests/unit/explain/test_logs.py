"""Reading logs: what was raised and printed, by whom and when, from any bytes and in bounded
memory.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.core.errors import RunDirectoryError
from holdfast.explain.collecting import collect_log, collect_stream
from holdfast.explain.evidence import Statement
from holdfast.explain.judging import judge
from holdfast.explain.logs.excerpt import read_excerpt
from holdfast.explain.logs.log_text import LogText, read_log
from holdfast.explain.verdict import Verdict

PLAIN = """step 1 loss 0.5
Traceback (most recent call last):
  File "/home/me/train.py", line 10, in <module>
    main()
    ~~~~^^
  File "/home/me/train.py", line 7, in main
    model(x)
ValueError: too small
  at least 3
"""


def read(text: str | bytes) -> LogText:
    return read_log(io.BytesIO(text.encode() if isinstance(text, str) else text), name="a.log")


def verdict_of(text: str | bytes) -> Verdict:
    return judge(
        collect_stream(io.BytesIO(text.encode() if isinstance(text, str) else text), name="a.log")
    )


def raised(text: str | bytes) -> list[Statement]:
    return [statement for statement in read(text).statements if statement.kind == "exception"]


def really_printed(code: str, *arguments: str) -> bytes:
    ended = subprocess.run(
        [sys.executable, *arguments, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return ended.stdout


def test_a_traceback_becomes_one_statement():
    """Class, message of several lines, frames with code, line number and place are read."""
    (statement,) = raised(PLAIN)
    assert (statement.exception, statement.text) == ("ValueError", "too small\n  at least 3")
    assert [(frame.line, frame.function, frame.code) for frame in statement.frames] == [
        (10, "<module>", "main()"),
        (7, "main", "model(x)"),
    ]
    assert statement.source == "a.log:8"
    assert statement.fatal is None


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[rank3]: ", 3),
        ("[default1]:", 1),
        ("[1,2]<stderr>:", 2),
        ("2024-05-01 12:00:00,123 ", None),
        ("2024-05-01T12:00:00.123456789Z stderr F ", None),
        ("\x1b[31m", None),
    ],
)
def test_what_launchers_and_loggers_put_before_a_line_is_taken_off(prefix, rank):
    """The traceback is read under every prefix, and a rank in it is used."""
    (statement,) = raised("".join(f"{prefix}{line}\n" for line in PLAIN.splitlines()))
    assert statement.exception == "ValueError"
    assert len(statement.frames) == 2
    assert statement.rank == rank
    assert (statement.unix_seconds is not None) == ("2024" in prefix)


def test_lines_of_json_are_opened():
    """A line of docker, and a traceback in a field of a logger that writes JSON, are read.

    Junk in braces is text.
    """
    docker = "".join(
        json.dumps({"log": f"{line}\n", "stream": "stderr"}) + "\n" for line in PLAIN.splitlines()
    )
    assert len(raised(docker)[0].frames) == 2
    (statement,) = raised(
        json.dumps({"level": "error", "event": "failed", "exception": PLAIN}) + "\n"
    )
    assert (statement.exception, len(statement.frames)) == ("ValueError", 2)
    assert read('{"error": ' + "[" * 9_000 + "\n").statements[0].kind == "line"


def test_interleaved_ranks_are_read_apart():
    """Lines of two ranks that alternate give two whole tracebacks."""
    lines = PLAIN.splitlines()[1:]
    other = [line.replace("ValueError: too small", "KeyError: 'x'") for line in lines]
    mixed = itertools.chain(
        *zip((f"[rank0]: {x}" for x in lines), (f"[rank1]: {x}" for x in other), strict=True)
    )
    found = raised("\n".join(mixed))
    assert {
        (statement.rank, statement.exception, len(statement.frames)) for statement in found
    } == {
        (0, "ValueError", 2),
        (1, "KeyError", 2),
    }


def test_a_member_of_a_group_is_the_verdict():
    """Of an ExceptionGroup, which says only how many it holds, a member with its own line is
    named.
    """
    code = (
        "try:\n  raise KeyError('a')\nexcept KeyError as e:\n  raise ExceptionGroup('two', [e,"
        " ValueError('b')])"
    )
    printed = really_printed(code)
    assert {statement.exception for statement in raised(printed)} >= {
        "KeyError",
        "ExceptionGroup",
        "ValueError",
    }
    assert (
        judge(collect_stream(io.BytesIO(printed), name="a.log", status=1)).title == "KeyError: 'a'"
    )


def test_a_syntax_error_has_no_header_and_is_found():
    """The form of a syntax error, which has no line 'Traceback', is read with its place."""
    (statement,) = raised(really_printed("def f(:\n  pass"))
    assert statement.exception == "SyntaxError"
    assert statement.frames[0].line == 1


class Endless(io.RawIOBase):
    """A log of so many bytes, made while it is read."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        super().__init__()
        self._blocks = iter(blocks)

    def read(self, size: int = -1) -> bytes:
        return next(self._blocks, b"")


def test_a_large_log_is_read_in_bounded_memory():
    """Of 50 MB the head, the tail and the traceback between are kept, with true line numbers, in
    below 20 MiB.
    """
    block = b"step 1 loss 0.5 all is fine here and nothing is wrong at all\n" * 4096
    count = 50_000_000 // len(block)
    middle = count // 2
    blocks = (
        PLAIN.partition("\n")[2].encode() if index == middle else block for index in range(count)
    )
    tracemalloc.start()
    kept = read_excerpt(Endless(blocks))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 << 20
    assert not kept.complete
    assert kept.total_lines == (count - 1) * 4096 + 8
    (error,) = [line for line in kept.lines if line.data.startswith(b"ValueError")]
    assert error.number == middle * 4096 + 7
    assert [kept.lines[0].number, kept.lines[-1].number] == [1, kept.total_lines]


def test_a_repeated_error_stays_limited_after_thousands_of_other_errors():
    """It would otherwise push the other errors out of what is kept."""
    repeated = b"ValueError: the same again\n"
    filler = b"nothing to see\n" * 4096
    others = [
        f"ValueError: {''.join(chr(97 + int(digit)) for digit in str(number))}\n".encode()
        for number in range(10_500)
    ]
    blocks = [filler] * 100 + [repeated * 30, b"".join(others), repeated * 5000] + [filler] * 100

    kept = read_excerpt(Endless(blocks))

    # 40 hits, and the 12 lines after the last one.
    assert sum(line.data == repeated.rstrip() for line in kept.lines) <= 52


def test_long_lines_of_digits_are_read_in_linear_time():
    """Masks of zeros and ones, 8 KiB a line, are judged before this test runs into its time
    limit.
    """
    found = read_log(io.BytesIO((b"01" * 4000 + b"\n") * 50), name="run.log")
    assert not found.says_done


def test_one_endless_line_is_cut():
    """A line of 50 MB without an end is kept by its beginning and its end."""
    blocks = [b"begin ", *[b"x" * (1 << 20)] * 50, b" Traceback"]
    (line,) = read_excerpt(Endless(blocks)).lines
    assert line.data.startswith(b"begin ")
    assert line.data.endswith(b" Traceback")
    assert len(line.data) < 1 << 17


@pytest.mark.parametrize("seed", range(5))
def test_junk_is_read_without_an_error(seed):
    """Random bytes, with pieces of tracebacks in them, give statements free of control
    characters.
    """
    generator = random.Random(seed)
    pieces = [
        PLAIN.encode(),
        b"Traceback (most recent call last):\n",
        b'  File "',
        b"\x1b[31m\x1b]0;x",
        b"\x00" * 99,
    ]
    junk = b"".join(
        (
            generator.choice(pieces)
            if generator.random() < 0.3
            else os.urandom(generator.randrange(200))
        )
        for _ in range(300)
    )
    for statement in read(junk).statements:
        shown = statement.text.replace("\n", "").replace("\t", "")
        assert all(character.isprintable() or ord(character) > 159 for character in shown)
        assert "\x1b" not in shown


def test_a_flood_of_errors_is_bounded():
    """Of 30,000 errors the first and the newest are kept, chains whole, so that judging them has
    an end.
    """
    flood = "".join(f"ValueError: {n}\nerror {n}\n" for n in range(15_000))
    chain = really_printed(
        "try:\n  {}['x']\nexcept KeyError as error:\n  raise RuntimeError('outer') from error"
    )
    found = read(flood.encode() + chain).statements
    assert len(found) < 4_000
    assert found[0].text == "0"
    assert [(each.exception, each.led_to_another) for each in found[-2:]] == [
        ("KeyError", True),
        ("RuntimeError", False),
    ]


def test_hostile_characters_are_taken_out():
    """Escape sequences, titles of terminals and characters that turn the writing do not reach a
    statement.
    """
    (statement,) = read("error: \x1b[2J\x1b]0;title\x07\u202eevil\u2066\x9b31m end\n").statements
    assert statement.text == "error: evil end"


def test_a_log_that_ends_inside_a_traceback_says_so() -> None:
    """The last frame of a traceback without its exception is named among what is missing."""
    verdict = verdict_of(
        'Traceback (most recent call last):\n  File "train.py", line 44, in step\n    loss.ba'
    )
    assert any('File "train.py", line 44, in step' in each for each in verdict.missing)


def test_what_never_ends_or_is_packed_is_refused(tmp_path: Path) -> None:
    """A device ends with an error instead of never, and a packed log is no log of junk."""
    log = tmp_path / "log.gz"
    log.write_bytes(gzip.compress(PLAIN.encode()))
    with pytest.raises(RunDirectoryError, match="zcat"):
        collect_log(log)
    with pytest.raises(RunDirectoryError, match="device"):
        collect_log(Path("/dev/zero"))

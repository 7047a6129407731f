"""Describe a failure in one short text, to paste into an assistant or an issue.

The text is Markdown. It has at most `MAX_TOKENS` tokens, and secrets in it are hidden.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.secret_words import HIDDEN, SECRET_OPTION, hide_in_words
from holdfast.core.text import capitalized, counted, moment
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.report.page.environment import environment
from holdfast.report.page.gathered_run import GatheredRun, RecordedStacks

MAX_TOKENS = 4_000
# Tokenizers split text into words, numbers and punctuation first. Most of them then split a number
# into groups of three digits, and a rare word into parts of about four letters.
_WORD_OR_SYMBOL = re.compile(r"(?P<word>[A-Za-z]+)|(?P<number>\d+)|(?P<newlines>\n+)|(?P<other>\S)")
_LETTERS_PER_TOKEN = 4
_DIGITS_PER_TOKEN = 3
_MAX_LINE_CHARACTERS = 300
_MAX_EVENTS = 40
# A value of an environment variable that is shorter than this is not searched in the text, because
# it may be an ordinary word.
_LEAST_SECRET_CHARACTERS = 8
# Variables of the shell that only look like secrets.
_HARMLESS_VARIABLES = ("PWD", "OLDPWD")
# Groups of the environment that help to understand a failure.
_ENVIRONMENT = ("versions", "machine", "code (git)", "policy, where it is not the usual",
                "hyperparameters")  # fmt: skip
# A private key in PEM format, whose beginning or end may be cut off.
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?"
    r"(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
    r"|\A[\s\S]*?-----END [A-Z ]{0,30}PRIVATE KEY-----"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the text.

    Args:
        title: Its heading.
        lines: Its lines.
        most_tokens: Its length at most, so that there is room for the sections after it.
        keeps_end: Whether the last lines are kept if there is no room for all of them. Otherwise,
            the first ones are kept.
        is_quoted: Whether the lines are a quotation of a program's output.
    """

    title: str
    lines: Sequence[str]
    most_tokens: int = MAX_TOKENS
    keeps_end: bool = False
    is_quoted: bool = False


def bundle_of_run(run: GatheredRun, verdict: Verdict) -> str:
    """Return the text about a run.

    Args:
        run: The recordings of the run.
        verdict: Why the attempt to describe has ended.
    """
    groups = environment(run)
    return _text(
        verdict,
        [
            Section(title="Command", lines=[run.command]),
            *_sections_of_verdict(verdict),
            Section(
                title="Environment", lines=list(_lines_of_environment(groups)), most_tokens=500
            ),
            Section(
                title="Output, its last lines",
                lines=run.output.splitlines(),
                most_tokens=1_200,
                keeps_end=True,
                is_quoted=True,
            ),
            Section(
                title="Events",
                lines=list(_lines_of_events(run)),
                most_tokens=800,
                keeps_end=True,
            ),
            Section(title="Stacks", lines=list(_lines_of_stacks(run.stacks)), is_quoted=True),
        ],
    )


def bundle_of_log(verdict: Verdict, last_lines: str) -> str:
    """Return the text about a log.

    Args:
        verdict: Why the program that wrote the log has ended.
        last_lines: The end of the log. Empty if it is not known.
    """
    log = Section(
        title="Log, its last lines", lines=last_lines.splitlines(), keeps_end=True, is_quoted=True
    )
    return _text(verdict, [*_sections_of_verdict(verdict), log])


# --- sections -------------------------------------------------------------------------------------


def _sections_of_verdict(verdict: Verdict) -> list[Section]:
    return [
        Section(title="What happened", lines=verdict.summary.splitlines()),
        Section(
            title="Evidence",
            lines=list(_lines_of_evidence(verdict.evidence)),
            most_tokens=1_200,
        ),
        Section(title="What holdfast recommends", lines=verdict.fix.splitlines()),
        Section(title="What was tried", lines=list(verdict.tried)),
        Section(title="Speed", lines=[finding.sentence() for finding in verdict.speed]),
        Section(title="Not known", lines=list(verdict.missing)),
    ]


def _lines_of_evidence(evidence: Iterable[Exhibit]) -> Iterable[str]:
    for exhibit in evidence:
        yield f"- {exhibit.heading}:"
        for line in exhibit.text.splitlines():
            yield f"      {line}"


def _lines_of_environment(groups: Mapping[str, Mapping[str, str]]) -> Iterable[str]:
    for title in _ENVIRONMENT:
        if title in groups:
            values = ", ".join(f"{name}={value}" for name, value in groups[title].items())
            yield f"- {title}: {values}"


def _lines_of_events(run: GatheredRun) -> Iterable[str]:
    for recorded in run.events[-_MAX_EVENTS:]:
        event = recorded.event
        yield f"- {moment(event.unix_seconds)} {event}"


def _lines_of_stacks(stacks: Sequence[RecordedStacks]) -> Iterable[str]:
    """Yield the stacks, the newest first: earlier ones may be of a false alarm."""
    for recorded in reversed(stacks):
        yield f"{recorded.name}:"
        yield from recorded.text.splitlines()


# --- the text -------------------------------------------------------------------------------------


def _text(verdict: Verdict, sections: Iterable[Section]) -> str:
    """Return the sections as text. The first ones get the room that they need."""
    title = capitalized(verdict.title)
    text = f"# {_without_secrets(title)} [{verdict.cause}, {verdict.family}]\n"
    if verdict.certainty is not None:
        text += f"\nCause: {verdict.certainty}\n"
    for section in sections:
        room = MAX_TOKENS - estimated_tokens(text)
        text += _section_within(section, min(room, section.most_tokens))
    return text


def _section_within(section: Section, most_tokens: int) -> str:
    """Return a section, without the lines for which there is no room. Empty if it has none."""
    content = _without_secrets("\n".join(section.lines)).strip("\n")
    lines = [_shortened(line.rstrip()) for line in content.splitlines()]
    # The quoted text may contain fences of its own, which are shorter.
    fence = "~~~~~~\n" if section.is_quoted else ""
    frame = f"\n## {section.title}\n\n{fence}(000,000 lines left out)\n{fence}"
    room = most_tokens - estimated_tokens(frame)
    kept: list[str] = []
    for line in reversed(lines) if section.keeps_end else lines:
        room -= estimated_tokens(f"{line}\n")
        if room < 0:
            break
        kept.append(line)
    if not kept:
        return ""
    left_out = len(lines) - len(kept)
    note = [f"({counted(left_out, 'line')} left out)"] if left_out else []
    shown = [*note, *reversed(kept)] if section.keeps_end else [*kept, *note]
    return f"\n## {section.title}\n\n{fence}" + "\n".join(shown) + f"\n{fence}"


def _shortened(line: str) -> str:
    if len(line) <= _MAX_LINE_CHARACTERS:
        return line
    return f"{line[: _MAX_LINE_CHARACTERS - 3]}..."


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a language model counts in a text, rather more than fewer."""
    count = 0
    for match in _WORD_OR_SYMBOL.finditer(text):
        length = match.end() - match.start()
        match match.lastgroup:
            case "word":
                count += -(-length // _LETTERS_PER_TOKEN)
            case "number":
                count += -(-length // _DIGITS_PER_TOKEN)
            case "newlines":
                count += 1
            case _:
                # A rare character is split into the bytes of its encoding.
                count += len(match.group().encode("utf-8", "replace"))
    return count


def _without_secrets_of_line(line: str) -> str:
    (shown,) = hide_in_words([line], nested=True)
    return shown


def _without_secrets(text: str) -> str:
    """Return a text with secrets hidden, and with ``~`` for the user's home directory.

    The values of this process's secret environment variables are hidden wherever they occur.
    """
    for name, value in os.environ.items():
        is_secret = SECRET_OPTION.fullmatch(name) is not None and name not in _HARMLESS_VARIABLES
        if is_secret and len(value) >= _LEAST_SECRET_CHARACTERS:
            text = text.replace(value, HIDDEN)
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    # Line by line, because a line such as "api_key=..." would otherwise hide all that follows.
    text = "\n".join(_without_secrets_of_line(line) for line in text.split("\n"))
    home = str(Path.home())
    return text if home == "/" else text.replace(home, "~")

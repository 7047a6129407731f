"""`holdfast explain H101|RUN|LOG`.

What an error means, or why a run ended, from its directory or from a bare log.
"""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from holdfast.cli.output import Json, console, failing_clearly, paged, print_json
from holdfast.core.errors import PolicyError
from holdfast.core.text import sanitise
from holdfast.explain.rules import catalogue, find_rule
from holdfast.explain.runs.recordings import near_path
from holdfast.explain.signatures import UNJUDGED, WELL
from holdfast.explain.verdict import Verdict
from holdfast.recorder.run_files import folder_of_first_host
from holdfast.report.verdicts import how_sure

_RULE = re.compile(r"[Hh]\d{3,4}")
_SENTENCE_END = re.compile(r"(?<=\.)\s")
_MOST_TO_DO = 160  # characters of the line that says what to do
_LIKE_A_RULE = re.compile(r"[Hh]?\d[\w-]{0,8}|[Hh]\w{0,8}")


def _rules(incomplete: str) -> list[tuple[str, str]]:
    """Complete the id of a rule; paths the shell completes itself."""
    rules = catalogue().values() if incomplete[:1] in ("H", "h") else ()
    return [(rule.id, rule.title) for rule in rules if rule.id.startswith(incomplete.upper())]


def run(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[RULE|RUN|LOG]",
            autocompletion=_rules,
            help=(
                "Id at the end of an error, such as H101; a run directory; a log file, or - for"
                " standard input. "
                "None lists all rules."
            ),
        ),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            min=0, help="Of a run that was restarted: the attempt, from 0; the newest by default."
        ),
    ] = None,
    status: Annotated[
        int | None,
        typer.Option(help="Of a log: the exit status that its command ended with, if you know it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a rule, or why a run ended.

    Exit codes for a run or a log: 0 it ended well, 10 and above the class of the cause, 2 wrong
        use.
    """
    with failing_clearly(as_json=as_json):
        if what is None:
            _refuse("a list of rules", attempt=attempt, status=status)
            _list(as_json=as_json)
            return
        if _RULE.fullmatch(what) or (_LIKE_A_RULE.fullmatch(what) and not Path(what).exists()):
            _refuse("a rule", attempt=attempt, status=status)
            _print_rule(what, as_json=as_json)
            return
        what = str(folder_of_first_host(Path(what))) if Path(what).is_dir() else what
        verdict = _judged(what, attempt, status)
    if as_json:
        print_json(verdict.as_json())
    else:
        print_verdict(console(), verdict, what)
    raise typer.Exit(verdict.exit_code)


def _refuse(what: str, *, attempt: int | None = None, status: int | None = None) -> None:
    """Refuse options that would be ignored (H105): whoever passes one expects that it counts."""
    given = {"--attempt": attempt, "--status": status}
    if names := [name for name, value in given.items() if value is not None]:
        raise PolicyError(
            f"{' and '.join(names)} for {what}",
            limit="--attempt is for a run directory, --status for a log",
            fix=f"leave {' and '.join(names)} out.",
            rule="H105",
        )


def _list(*, as_json: bool) -> None:
    if as_json:
        print_json([asdict(rule) for rule in catalogue().values()])
        return
    with paged() as out:
        for rule in catalogue().values():
            out.print(f"{rule.id}  {rule.title}", markup=False, highlight=False, soft_wrap=True)


def _print_rule(rule_id: str, *, as_json: bool) -> None:
    from rich.markdown import Markdown  # takes as long to import as a command to start

    rule = find_rule(rule_id)
    if as_json:
        print_json(asdict(rule))
    else:
        with paged() as out:
            out.print(Markdown(f"# {rule.id}: {rule.title}\n\n{rule.text}"))


def _judged(what: str, attempt: int | None, status: int | None) -> Verdict:
    from holdfast.explain.collecting import collect, collect_log, collect_stream
    from holdfast.explain.judging import judge

    if what == "-":
        _refuse("standard input", attempt=attempt)
        return judge(collect_stream(sys.stdin.buffer, name="standard input", status=status))
    path = Path(what).expanduser()
    if path.is_dir():
        _refuse("a run directory", status=status)
        return judge(collect(path, attempt))
    if path.exists():
        _refuse("a log", attempt=attempt)
        return judge(collect_log(path, status=status))
    near = near_path(path)
    raise PolicyError(
        f"{what!r} is not there",
        limit="`holdfast explain` takes the id of a rule, a run directory or a log file",
        fix=(
            f"did you mean {near}?"
            if near
            else "check the path; runs/last is the newest run of `holdfast run` here."
        ),
        rule="H732",
    )


def _colour(verdict: Verdict) -> str:
    """Return the colour of a title.

    Green only of a run that learned and that nothing speaks against.
    """
    if verdict.cause == UNJUDGED.id:
        return "default"
    if verdict.family == "ended well":
        return "green" if verdict.fix == WELL.fix else "yellow"
    return "yellow" if verdict.family == "unknown" else "red"


def print_verdict(out: Console, verdict: Verdict, source: str) -> None:
    """Print a verdict for people.

    Nothing in it is taken for markup or for commands of the terminal.
    """
    well = verdict.family == "ended well"
    nothing_to_do = verdict.fix == WELL.fix or verdict.cause == UNJUDGED.id
    colour = _colour(verdict)
    title = f"{verdict.title[:1].upper()}{verdict.title[1:]}"
    out.print(Text.assemble((title, f"bold {colour}"), f"  [{verdict.cause}, {verdict.family}]"))
    # For whoever reads no further: one line of evidence, and one to act on
    if not (well and nothing_to_do):
        for exhibit in [
            each for each in verdict.evidence if not well or each.source != "exit status"
        ][:1]:
            line, *more = exhibit.text.split("\n")
            line += f" {more[0].strip()}" if more and line.endswith(":") else ""
            words = verdict.where if line.startswith(verdict.title.removesuffix("...")) else line
            out.print(
                Text(f"Seen: {words} ({exhibit.source})" if words else f"Seen: {exhibit.source}")
            )
        sentence = _SENTENCE_END.split(verdict.fix, maxsplit=1)[0]
        out.print(Text(f"Do: {textwrap.shorten(sentence, _MOST_TO_DO, placeholder=' ...')}"))
    sure = how_sure(verdict)
    out.print(Text(f"{sure}{', ' if sure else ''}from {sanitise(source)}", style="dim"))
    _section(out, "What happened", [verdict.summary])
    if verdict.evidence:
        out.print(Text("\nEvidence", style="bold"))
        for exhibit in verdict.evidence:
            rank = f", rank {exhibit.rank}" if exhibit.rank is not None else ""
            out.print(
                Padding(Text(f"{exhibit.role}: {exhibit.source}{rank}", style="dim"), (0, 0, 0, 2))
            )
            out.print(Padding(Text(exhibit.text), (0, 0, 0, 4)))
    _section(out, "What to change", [verdict.fix])
    if verdict.changes:
        changes = " ".join(f"{name}={value}" for name, value in verdict.changes)
        _section(out, "A restart would set", [changes])
    _section(out, "What was tried", verdict.tried)
    if verdict.runner_up is not None:
        cause, title, confidence = verdict.runner_up
        _section(out, "It could also be", [f"{title} [{cause}] ({confidence:.0%})"])
    if verdict.family != "ended well":
        _section(out, "What would have made it surer", verdict.missing)
    elif gone := [each for each in verdict.missing if "not recorded any more" in each]:
        _section(out, "Not recorded any more", gone)
    out.print(Text(f"\n`holdfast explain {verdict.cause}` says more.", style="dim"))


def _section(out: Console, title: str, lines: list[str] | tuple[str, ...]) -> None:
    if not lines:
        return
    out.print(Text(f"\n{title}", style="bold"))
    for line in lines:
        out.print(Padding(Text(line), (0, 0, 0, 2)))

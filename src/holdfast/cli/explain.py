"""`holdfast explain H101|RUN|LOG`: explain an error, or why a run ended.

A run is explained from its run directory, or from a log file alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from holdfast.cli.output import Json, console, failing_clearly, paged, print_json
from holdfast.core.errors import PolicyError
from holdfast.core.text import capitalized, sanitise
from holdfast.explain.rules import catalogue, find_rule
from holdfast.explain.runs.recordings import near_path
from holdfast.explain.signatures import UNJUDGED, WELL
from holdfast.explain.signatures.ids import LOSS_FELL
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.recorder.run_files import folder_of_first_host

_RULE = re.compile(r"[Hh]\d{3,4}")
# Matches text that is probably meant as a rule id, unless a file has that name.
_LIKE_A_RULE = re.compile(r"[Hh]?\d[\w-]{0,8}|[Hh]\w{0,8}")


def _complete_rule(incomplete: str) -> list[tuple[str, str]]:
    """Return the ids and titles of the rules whose ids start with an incomplete word.

    Paths need no completion here, because the shell completes them.
    """
    if not incomplete.upper().startswith("H"):
        return []
    return [
        (rule.id, rule.title)
        for rule in catalogue().values()
        if rule.id.startswith(incomplete.upper())
    ]


def run(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="RULE|RUN|LOG|RECORD",
            autocompletion=_complete_rule,
            help=(
                "The id at the end of an error, such as H101; a run directory; a log file; - for"
                " standard input; or what another tool recorded: trainer_state.json, a TensorBoard"
                " event file, a CSV file of Lightning, a W&B run, or the directory of one; or the"
                " dumps of torch's flight recorder. Omit it to list all rules."
            ),
        ),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="For a run directory: the attempt to explain, from 0. The default is the newest.",
        ),
    ] = None,
    status: Annotated[
        int | None,
        typer.Option(metavar="N", help="For a log: the exit status of the command that wrote it."),
    ] = None,
    bundle: Annotated[
        bool,
        typer.Option(
            "--bundle",
            help=(
                "Print the evidence as Markdown of at most 4,000 tokens without secrets, to paste"
                " into an assistant or an issue."
            ),
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Explain a rule, why a run ended, or the loss that another tool recorded.

    Exit codes for a run, a log or a record: 0 if nothing failed, 10 and above for the class of the
    cause, 2 for incorrect usage.
    """
    with failing_clearly(as_json=as_json):
        if bundle:
            _refuse_bundle(topic, as_json=as_json)
        if topic is None:
            _refuse_options("a list of rules", attempt=attempt, status=status)
            _list_rules(as_json=as_json)
            return
        if _names_a_rule(topic):
            _refuse_options("a rule", attempt=attempt, status=status)
            _print_rule(topic, as_json=as_json)
            return
        if Path(topic).is_dir():
            topic = str(folder_of_first_host(Path(topic)))
        verdict = _judge(topic, attempt, status)
        if bundle:
            sys.stdout.write(_bundle_of(topic, verdict))
    if bundle:
        raise typer.Exit(verdict.exit_code)
    if as_json:
        print_json(verdict.as_json())
    else:
        print_verdict(console(), verdict, topic)
    raise typer.Exit(verdict.exit_code)


def _names_a_rule(topic: str) -> bool:
    if _RULE.fullmatch(topic):
        return True
    return _LIKE_A_RULE.fullmatch(topic) is not None and not Path(topic).exists()


def _refuse_options(subject: str, *, attempt: int | None = None, status: int | None = None) -> None:
    """Refuse options that would have no effect.

    Args:
        subject: What is explained, for the error message.
        attempt: The value of ``--attempt``, if it has no effect.
        status: The value of ``--status``, if it has no effect.

    Raises:
        PolicyError: H105 if either value is not None.
    """
    values = {"--attempt": attempt, "--status": status}
    names = " and ".join(name for name, value in values.items() if value is not None)
    if names:
        raise PolicyError(
            f"{names} for {subject}",
            limit="--attempt applies to a run directory, --status to a log",
            fix=f"omit {names}.",
            rule="H105",
        )


def _list_rules(*, as_json: bool) -> None:
    if as_json:
        print_json([asdict(rule) for rule in catalogue().values()])
        return
    with paged() as out:
        for rule in catalogue().values():
            out.print(f"{rule.id}  {rule.title}", markup=False, highlight=False, soft_wrap=True)


def _print_rule(rule_id: str, *, as_json: bool) -> None:
    # A module-level import would double the startup time of `holdfast explain`.
    from rich.markdown import Markdown

    rule = find_rule(rule_id)
    if as_json:
        print_json(asdict(rule))
        return
    with paged() as out:
        out.print(Markdown(f"# {rule.id}: {rule.title}\n\n{rule.text}"))


def _judge(topic: str, attempt: int | None, status: int | None) -> Verdict:
    """Return the verdict on a run directory, a log file, or standard input (``-``).

    Raises:
        PolicyError: H105 for an option that does not apply, H732 if the path does not exist.
        RunDirectoryError: If the run or the log cannot be read; see `collect` and `collect_log`.
    """
    from holdfast.explain.collecting import collect, collect_log, collect_stream
    from holdfast.explain.judging import judge

    if topic == "-":
        _refuse_options("standard input", attempt=attempt)
        return judge(collect_stream(sys.stdin.buffer, name="standard input", status=status))
    path = Path(topic).expanduser()
    verdict = _verdict_on_record(path, attempt, status)
    if verdict is None:
        verdict = _verdict_on_dumps(path, attempt, status)
    if verdict is not None:
        return verdict
    if path.is_dir():
        _refuse_options("a run directory", status=status)
        return judge(collect(path, attempt))
    if path.exists():
        _refuse_options("a log", attempt=attempt)
        return judge(collect_log(path, status=status))
    fix = "check the path; runs/last is the newest run in this directory."
    near = near_path(path)
    if near is not None:
        fix = f"did you mean {near}?"
    raise PolicyError(
        f"{topic!r} does not exist",
        limit="`holdfast explain` accepts a rule id, a run directory, a log, a record or dumps",
        fix=fix,
        rule="H732",
    )


def _verdict_on_record(path: Path, attempt: int | None, status: int | None) -> Verdict | None:
    """Return the verdict on what another tool recorded, or None if the path is no such record."""
    from holdfast.explain.records.finding import find_record

    found = find_record(path)
    if found is None:
        return None
    # These imports load the catalog of rules.
    from holdfast.explain.records.reading import read_record
    from holdfast.explain.records.verdict import judge_record

    _refuse_options("the record of another tool", attempt=attempt, status=status)
    return judge_record(read_record(found))


def _verdict_on_dumps(path: Path, attempt: int | None, status: int | None) -> Verdict | None:
    """Return the verdict on dumps of torch's flight recorder, or None if the path holds none."""
    from holdfast.explain.flight.judging import judge_dumps
    from holdfast.explain.runs.recordings import holds_recordings, unreadable_error

    try:
        if not path.exists() or (path.is_dir() and holds_recordings(path)):
            return None
        verdict = judge_dumps(path)
    except OSError as error:
        raise unreadable_error(path, error) from error
    if verdict is not None:
        _refuse_options("dumps of the flight recorder", attempt=attempt, status=status)
    return verdict


def _refuse_bundle(topic: str | None, *, as_json: bool) -> None:
    """Refuse ``--bundle`` for a rule, for the list of rules, and with ``--json``.

    Raises:
        PolicyError: H105 in these cases.
    """
    if topic is None or _names_a_rule(topic) or as_json:
        raise PolicyError(
            "--bundle with --json" if as_json else "--bundle without a run or a log",
            limit="a bundle is Markdown about a run directory or a log",
            fix="name one of them, for example: holdfast explain runs/last --bundle",
            rule="H105",
        )


def _bundle_of(topic: str, verdict: Verdict) -> str:
    """Return the evidence about a run or a log as Markdown."""
    # These imports load half of the code of the run's page.
    from holdfast.explain.records.finding import find_record
    from holdfast.report.bundle import bundle_of_log, bundle_of_run
    from holdfast.report.page.attachments import read_end
    from holdfast.report.page.gathering import gather

    path = Path(topic).expanduser()
    if find_record(path) is not None:
        return bundle_of_log(verdict, "")
    if path.is_dir():
        return bundle_of_run(gather(path), verdict)
    return bundle_of_log(verdict, read_end(path) if path.is_file() else "")


# --- Text -----------------------------------------------------------------------------------------


def print_verdict(out: Console, verdict: Verdict, source: str) -> None:
    """Print a verdict as text.

    Text in the verdict is never interpreted as markup or as a terminal control sequence.

    Args:
        out: The console to print to.
        verdict: The verdict.
        source: The run directory or log that the verdict is about.
    """
    _print_headline(out, verdict)
    certainty = f"{verdict.certainty}, " if verdict.certainty else ""
    out.print(Text(f"{certainty}from {sanitise(source)}", style="dim"))
    _print_section(out, "What happened", [verdict.summary])
    _print_evidence(out, verdict.evidence)
    if verdict.fix:
        _print_section(out, "What to change", [verdict.fix])
    if verdict.changes:
        changes = " ".join(f"{name}={value}" for name, value in verdict.changes)
        _print_section(out, "A restart would set", [changes])
    _print_speed(out, verdict)
    _print_section(out, "What was tried", verdict.tried)
    if verdict.runner_up is not None:
        cause, title = verdict.runner_up
        _print_section(out, "It could also be", [f"{title} [{cause}]"])
    if verdict.family != "ended well":
        _print_section(out, "What would have made this more certain", verdict.missing)
    else:
        lost_steps = [words for words in verdict.missing if "not recorded any more" in words]
        _print_section(out, "Not recorded any more", lost_steps)
    out.print(Text(f"\nFor details, run `holdfast explain {verdict.cause}`.", style="dim"))


def _print_headline(out: Console, verdict: Verdict) -> None:
    """Print a summary: the title, the most important evidence, and the fix in one sentence."""
    title = capitalized(verdict.title)
    style = f"bold {_color(verdict)}"
    out.print(Text.assemble((title, style), f"  [{verdict.cause}, {verdict.family}]"))
    if not verdict.needs_action:
        return
    exhibit = _decisive_exhibit(verdict)
    if exhibit is not None:
        out.print(Text(f"Seen: {_describe_exhibit(verdict, exhibit)}"))
    if verdict.fix:
        out.print(Text(f"Do: {verdict.first_advice}"))


def _color(verdict: Verdict) -> str:
    """Return the color of the title, which is green only if the run certainly ended well."""
    if verdict.cause == UNJUDGED.id:
        return "default"
    if verdict.family == "ended well":
        return "green" if verdict.fix == WELL.fix else "yellow"
    if verdict.family == "learning":
        return "green" if verdict.cause == LOSS_FELL else "yellow"
    return "yellow" if verdict.family == "unknown" else "red"


def _decisive_exhibit(verdict: Verdict) -> Exhibit | None:
    """Return the strongest piece of evidence, skipping the exit status if the run ended well."""
    for exhibit in verdict.evidence:
        if verdict.family != "ended well" or exhibit.source != "exit status":
            return exhibit
    return None


def _describe_exhibit(verdict: Verdict, exhibit: Exhibit) -> str:
    """Return the first line of a piece of evidence and its source.

    If the title already quotes the line, return the location of the error instead of the line.
    """
    first_line, *more_lines = exhibit.text.split("\n")
    if first_line.endswith(":") and more_lines:
        # For example, an error in `load_state_dict` lists the first keys on the next line.
        first_line += f" {more_lines[0].strip()}"
    if first_line.startswith(verdict.title.removesuffix("...")):
        return f"{verdict.where} ({exhibit.source})" if verdict.where else exhibit.source
    if not first_line:
        return exhibit.source
    return f"{first_line} ({exhibit.source})"


def _print_evidence(out: Console, evidence: Sequence[Exhibit]) -> None:
    if not evidence:
        return
    out.print(Text("\nEvidence", style="bold"))
    for exhibit in evidence:
        out.print(Padding(Text(exhibit.heading, style="dim"), (0, 0, 0, 2)))
        out.print(Padding(Text(exhibit.text), (0, 0, 0, 4)))


def _print_speed(out: Console, verdict: Verdict) -> None:
    """Print what the training loop spent its time on, and what would make it faster."""
    lines = []
    for finding in verdict.speed:
        lines.append(finding.sentence())
        # If the run's speed is the verdict, its fix was printed above.
        if finding.fix and finding.fix != verdict.fix:
            lines.append(f"To make it faster: {finding.fix}")
    _print_section(out, "Speed", lines)


def _print_section(out: Console, title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    out.print(Text(f"\n{title}", style="bold"))
    for line in lines:
        out.print(Padding(Text(line), (0, 0, 0, 2)))

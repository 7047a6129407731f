"""Collect the evidence for a verdict, from a run directory or from a bare log.

If some of the evidence cannot be read, `Evidence.missing` says so and the rest is still collected.
This module does not judge the evidence. For an attempt of a supervised run, `runs.attempts`
collects it.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import RunDirectoryError
from holdfast.explain.evidence import NO_STATUS, Ending, Evidence
from holdfast.explain.logs.excerpt import Readable
from holdfast.explain.logs.log_text import LogText, read_log
from holdfast.explain.runs.attempts import collect_attempt
from holdfast.explain.runs.divergence import (
    find_nan_at_end,
    find_printed_divergence,
    find_recorded_divergence,
)
from holdfast.explain.runs.guard_records import (
    collect_guard_statements,
    describe_remedies,
    find_closing,
)
from holdfast.explain.runs.learning import judge_learning_from_output
from holdfast.explain.runs.recorded_steps import read_guard_steps
from holdfast.explain.runs.recordings import Recordings, open_recordings, unreadable_error
from holdfast.explain.speed.reading import collect_time_use
from holdfast.explain.speed.rules import find_causes

_MAX_QUOTED_CHARACTERS = 300
# The first bytes of gzip, zstd, zip, xz and bzip2 files.
_MAGIC_OF_ARCHIVES = (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\xfd7zX", b"BZh")


def collect_log(path: Path, *, status: int | None = None) -> Evidence:
    """Return the evidence in a log file.

    Args:
        path: A text file or a pipe.
        status: Exit status of the command that wrote the log, or None if unknown.

    Raises:
        RunDirectoryError: H733 if the file cannot be read or is not text.
    """
    try:
        if not (path.is_file() or path.is_fifo()):
            # If the path does not exist, `stat` raises an OSError that gives the reason.
            path.stat()
            raise _not_a_log_error(
                path, "is a device or a socket", "name a file, or - for standard input."
            )
        with path.open("rb") as stream:
            if stream.peek(4).startswith(_MAGIC_OF_ARCHIVES):
                raise _not_a_log_error(
                    path, "is compressed", "decompress it: zcat LOG | holdfast explain -."
                )
            return collect_stream(stream, name=path.name, status=status)
    except OSError as error:
        raise unreadable_error(path, error) from error


def _not_a_log_error(path: Path, problem: str, fix: str) -> RunDirectoryError:
    """Return the error H733 for a file that is not a log."""
    return RunDirectoryError(
        f"{path} {problem}", limit="a log must be a text file or a pipe", fix=fix, rule="H733"
    )


def collect_stream(stream: Readable, *, name: str, status: int | None = None) -> Evidence:
    """Return the evidence in a log that is read from a stream.

    Args:
        stream: A binary stream that contains the log, which may be of any size.
        name: The name of the log in `Statement.source`.
        status: Exit status of the command that wrote the log, or None if unknown.
    """
    log = read_log(stream, name=name, alone=True)
    divergence = find_printed_divergence(log, name=name)
    endings = list(log.endings)
    if status is not None:
        endings.append(Ending(status=status))
    return Evidence(
        source=name,
        missing=tuple(_missing_of_log(log, status)),
        statements=log.statements,
        endings=tuple(endings),
        divergence=divergence,
        nan_at_end=find_nan_at_end(log, name=name) if divergence is None else None,
        learning=judge_learning_from_output(log) if status == 0 else None,
        printed_loss_count=len(log.losses),
        output_says_done=log.says_done,
    )


def _missing_of_log(log: LogText, status: int | None) -> list[str]:
    """Return one clause for each piece of evidence that a log lacks, for `Evidence.missing`."""
    missing = []
    if status is None:
        missing.append(NO_STATUS)
    if not log.complete:
        missing.append(
            f"only the beginning and the end of its {log.total_lines:,} lines were fully analyzed;"
            " the middle was only searched for error words"
        )
    if log.total_lines == 0:
        missing.append("the log is empty")
    if log.cut_off:
        missing.append(
            f"the log ends inside a traceback, at {log.cut_off[:_MAX_QUOTED_CHARACTERS]}"
        )
    return missing


def collect(run: Path, attempt: int | None = None) -> Evidence:
    """Return the evidence about one attempt of a run.

    Args:
        run: A run directory that ``holdfast run`` created or that was passed to a Guard.
        attempt: The number of the attempt, counted from 0, or None for the newest attempt. Ignored
            if the run had no supervisor.

    Raises:
        RunDirectoryError: H731 if the directory contains no recording, H733 if it cannot be read,
            H734 if a newer version of holdfast created it.
        PolicyError: H105 if the run has no attempt with this number.
    """
    recordings = open_recordings(run)
    if recordings.supervised:
        return collect_attempt(recordings, attempt)
    return _collect_guard(recordings)


def _collect_guard(recordings: Recordings) -> Evidence:
    """Return the evidence about a run that Guards recorded without a supervisor."""
    folders = recordings.guards([])
    recordings.note_overwritten_steps({folder: f"guard {folder.name}" for folder in folders})
    events = []
    for folder in folders:
        events += recordings.events(folder)
    events.sort(key=lambda event: event.unix_seconds)
    steps = [step for folder in folders for step in read_guard_steps(folder)]
    newest = max(steps, key=lambda step: step.unix_seconds, default=None)
    statements = collect_guard_statements(
        events, last_step=newest.unix_seconds if newest is not None else 0.0
    )
    closing = find_closing(events)
    missing = [
        *recordings.missing,
        "no exit status and no output: the run was not started with `holdfast run`",
    ]
    if closing is None and not any(statement.fatal for statement in statements):
        missing.append(
            "no record of a Guard closing: the run was cut off, or its script does not call"
            " `guard.close()`"
        )
    divergence, _ = find_recorded_divergence([], folders)
    return Evidence(
        source=str(recordings.run),
        missing=tuple(missing),
        statements=tuple(statements),
        events=tuple(events),
        tried=tuple(describe_remedies(events)),
        divergence=divergence,
        # Without `holdfast run`, only a slow rank is known.
        speed=find_causes(collect_time_use([], events, attempt=0)),
        steps=newest.global_step if newest is not None else None,
        guard_closing=closing,
    )

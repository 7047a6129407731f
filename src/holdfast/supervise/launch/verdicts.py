"""Obtain the verdict on an attempt from ``explain``, and write it to the run directory.

``explain`` is imported only when an attempt has ended, so that the supervisor starts quickly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.durable import replace_file
from holdfast.core.events import process_events
from holdfast.core.events.data import EventData
from holdfast.explain.verdict import Verdict
from holdfast.recorder.run_files import VERDICT_FILE

# Rule id of an unknown cause.
_UNKNOWN = "H1600"
# Rule id of a failure that was caused by the failure of another rank.
_ANOTHER_RANK_FAILED = "H114"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptJudgement:
    """The verdict on an attempt, with other facts from its recording.

    Args:
        verdict: Why the attempt ended.
        stopped_by: What made the training script stop, if it was asked to from outside and recorded
            it: the name of a signal, or "max_time". Otherwise None.
        error: Why no verdict could be determined, or None.
    """

    verdict: Verdict
    stopped_by: str | None = None
    error: str | None = None


def judge_attempt(run_path: Path, number: int) -> AttemptJudgement:
    """Determine why an attempt ended. Never raises, even if the recording is damaged."""
    stopped_by = None
    try:
        from holdfast.explain.collecting import collect
        from holdfast.explain.judging import judge
        from holdfast.explain.observations import source_of_stop, stop_request

        facts = collect(run_path, number)
        request = stop_request(facts.events)
        if request is not None:
            stopped_by = source_of_stop(request)
        return AttemptJudgement(verdict=judge(facts), stopped_by=stopped_by)
    except Exception as error:  # noqa: BLE001 - a damaged recording must not end the supervisor
        why = f"{type(error).__name__}: {error}"
        return AttemptJudgement(verdict=_unknown(why), stopped_by=stopped_by, error=why)


def remove_verdict(run_path: Path) -> None:
    """Remove an earlier attempt's verdict, so that it is not mistaken for the current one."""
    with suppress(OSError):
        (run_path / VERDICT_FILE).unlink(missing_ok=True)


def write_verdict(run_path: Path, verdict: Verdict, emit: Callable[[EventData], None]) -> None:
    """Write a verdict to the run directory; record an event if that fails."""
    content = json.dumps(verdict.as_json(), indent=1).encode()
    try:
        replace_file(run_path / VERDICT_FILE, content)
    except OSError as error:
        # The disk is full or the directory is gone. The events also contain the verdict.
        remove_verdict(run_path)
        why = error.strerror or str(error)
        emit(process_events.NotWritten(file=VERDICT_FILE, error=why))


def is_consequence(verdict: Verdict) -> bool:
    """Return whether an attempt with this verdict failed only because another process failed."""
    if verdict.cause == _ANOTHER_RANK_FAILED:
        return True
    from holdfast.explain.signatures import all_signatures

    signature = all_signatures().get(verdict.cause)
    return signature is not None and signature.role == "cascade"


def _unknown(why: str) -> Verdict:
    return Verdict(
        cause=_UNKNOWN,
        family="unknown",
        title="unknown",
        summary="The command ended, but an error prevented holdfast from determining why.",
        fix="Read the end of output.log in the run directory.",
        missing=(f"determining the cause raised {why}",),
    )

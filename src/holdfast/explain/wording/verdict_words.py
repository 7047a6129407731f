"""Put a judgement into words: title, summary, fix, evidence, and the place in the user's code.

The cause has already been chosen (see `causes.choosing`); nothing here changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.core.events.event import Event
from holdfast.explain import observations
from holdfast.explain.causes import good_ends
from holdfast.explain.causes.candidate import FALLBACKS, Candidate
from holdfast.explain.causes.case import Case
from holdfast.explain.causes.doubts import Doubt
from holdfast.explain.causes.ends import End
from holdfast.explain.evidence import (
    Evidence,
    Frame,
    Statement,
    innermost_user_frame,
    is_user_code,
    library_file,
)
from holdfast.explain.exhibits import exhibits_of_training, first_line, quote
from holdfast.explain.rules import all_rules
from holdfast.explain.signatures import endings
from holdfast.explain.signatures.signature import Signature
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.explain.wording import remarks

_MOST_EXHIBITS = 10
_MOST_OF_A_CHAIN = 3
_MOST_CONFIRMATIONS = 3
_MOST_CASCADES = 3
# Maximum characters quoted in a title, or in a summary if the signature explains the message.
_SHORT_QUOTE = 160
# Maximum characters quoted in a summary if the message is all that is known, or if it is a holdfast
# error, which explains itself.
_LONG_QUOTE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The chosen cause and what it was chosen from: everything that a verdict is written from.

    Attributes:
        case: Everything known about the attempt.
        signature: The cause.
        confidence: The confidence in the cause, from 0 to 1.
        class_confidence: The confidence in its class, from 0 to 1.
        candidate: The candidate that shows the cause; None if only the end of the process does.
        doubt: The reason to doubt a good end.
        runner_up: As `Verdict.runner_up`.
    """

    case: Case
    signature: Signature
    confidence: float
    class_confidence: float
    candidate: Candidate | None
    doubt: Doubt | None
    runner_up: tuple[str, str, float] | None

    @property
    def evidence(self) -> Evidence:
        """Return everything that was collected."""
        return self.case.evidence

    @property
    def end(self) -> End:
        """Return how the attempt ended."""
        return self.case.end

    @property
    def is_good_end(self) -> bool:
        """Return whether nothing failed."""
        return self.signature.family == "ended well"


def in_words(judgement: Judgement) -> Verdict:
    """Return the verdict in words."""
    signature = judgement.signature
    return Verdict(
        cause=signature.id,
        family=signature.family,
        title=_title(judgement),
        summary=_summary(judgement),
        fix=_fix(judgement),
        confidence=judgement.confidence,
        class_confidence=judgement.class_confidence,
        evidence=tuple(_exhibits(judgement)),
        runner_up=judgement.runner_up,
        tried=judgement.evidence.tried,
        missing=tuple(_missing(judgement)),
        restart=signature.restart,
        changes=_changes(judgement),
        where=_place(judgement),
        rank=_rank(judgement),
        step=_steps(judgement),
    )


# --- Title ----------------------------------------------------------------------------------------


def _title(judgement: Judgement) -> str:
    for rule in _TITLES:
        title = rule(judgement)
        if title is not None:
            return title
    return judgement.signature.title


def _title_of_lost_training(judgement: Judgement) -> str | None:
    lost = judgement.evidence.lost
    if judgement.signature.id != endings.TRAINING_LOST or lost is None:
        return None
    return f"{_beginning_of_good_end(judgement)}, but {lost.sentence()}"


def _title_of_unsaved_result(judgement: Judgement) -> str | None:
    unsaved = observations.unsaved_steps(judgement.evidence)
    if judgement.signature.id != endings.NOT_SAVED or unsaved is None:
        return None
    title = f"{judgement.signature.title}: {unsaved.state()}"
    if unsaved.reason:
        title += f" ({unsaved.reason})"
    return _cut(title, _SHORT_QUOTE)


def _title_of_training_fault(judgement: Judgement) -> str | None:
    faults = observations.training_faults(judgement.evidence)
    if judgement.signature.id != endings.ENDED_WELL or not faults:
        return None
    title = "ended well, but its training has a problem"
    rule = all_rules().get(faults[0].data["rule"])
    if rule is not None:
        title += f": {rule.title}"
    return title


def _title_of_doubtful_end(judgement: Judgement) -> str | None:
    if not judgement.is_good_end or judgement.doubt is None:
        return None
    return f"{_beginning_of_good_end(judgement)}, {judgement.doubt.words}"


def _title_of_sys_exit(judgement: Judgement) -> str | None:
    if judgement.signature.id != endings.STATUS_ONLY or judgement.evidence.exit_call != "sys.exit":
        return None
    return f"called sys.exit with status {judgement.end.status}"


def _title_in_its_own_words(judgement: Judgement) -> str | None:
    if judgement.signature.id not in FALLBACKS or judgement.candidate is None:
        return None
    return _cut(first_line(judgement.candidate.statement), _SHORT_QUOTE)


# The first title that applies wins; if none does, the signature's title is used.
_TITLES: tuple[Callable[[Judgement], str | None], ...] = (
    _title_of_lost_training,
    _title_of_unsaved_result,
    _title_of_training_fault,
    _title_of_doubtful_end,
    _title_of_sys_exit,
    _title_in_its_own_words,
)


def _beginning_of_good_end(judgement: Judgement) -> str:
    return "ended with status 0" if judgement.end.well else "finished"


# --- Summary --------------------------------------------------------------------------------------


def _summary(judgement: Judgement) -> str:
    """Return one paragraph: what happened, how far it got, what it means, what else was seen."""
    sentences = [
        *_what_happened(judgement),
        *_progress(judgement),
        *_meaning(judgement),
        *_what_else_was_seen(judgement),
    ]
    return " ".join(filter(None, sentences))


def _what_happened(judgement: Judgement) -> Iterator[str]:
    if judgement.candidate is not None:
        yield _sentence(_failure(judgement.candidate, _place(judgement)))
    elif judgement.end.why:
        yield _sentence(judgement.end.why)
    if judgement.end.status == 0 and not judgement.end.well:
        yield "The command still ended with status 0, which hid the failure."


def _failure(candidate: Candidate, place: str) -> str:
    """Return where it failed and with which message, as a clause."""
    statement = candidate.statement
    if _is_guard_record(statement):
        words = _cut(first_line(statement), _LONG_QUOTE)
        if statement.fatal:
            return f"A Guard stopped it: {words}"
        return f"The last record of its Guard is: {words}"
    who = "It" if statement.rank is None else f"Rank {statement.rank}"
    if candidate.signature.id in FALLBACKS:
        return f"{who} failed with {_cut(first_line(statement), _LONG_QUOTE)}" + _raised_at(
            statement, place
        )
    words = _cut(first_line(statement), _SHORT_QUOTE)
    if _is_holdfast_error(candidate):
        first, _, _ = statement.text.strip().partition("\n")
        words = _cut(first, _LONG_QUOTE)
    where = f" at {place}" if place else ""
    return f"{who} failed{where}: {words}"


def _raised_at(statement: Statement, place: str) -> str:
    """Return where an exception was raised, to be appended to its message."""
    words = f", at {place}" if place else ""
    if statement.frames and not is_user_code(statement.frames[-1]):
        words += f" (raised in {library_file(statement.frames[-1])})"
    return words


def _progress(judgement: Judgement) -> Iterator[str]:
    steps = _steps(judgement)
    if not steps or judgement.end.well:
        return
    words = f"It had completed {steps} step{'' if steps == 1 else 's'}"
    phase = judgement.evidence.phase
    if phase and phase != "ending":
        words += f" and was in phase {phase}"
    yield f"{words}."


def _meaning(judgement: Judgement) -> Iterator[str]:
    """Yield what the cause means, or how the process exited."""
    signature = judgement.signature
    evidence = judgement.evidence
    if signature.id in (endings.TERMINATED, endings.INTERRUPTED):
        yield from remarks.on_interruption(evidence)
    if judgement.candidate is not None and _is_holdfast_error(judgement.candidate):
        # The error explains itself; the rule would only repeat it.
        return
    if signature.id == endings.STATUS_ONLY and remarks.exit_clause(evidence):
        yield _sentence(remarks.exit_clause(evidence))
        return
    if judgement.is_good_end and signature.id != endings.ENDED_WELL:
        # `good_ends` says the same with numbers.
        return
    if signature.id == endings.ENDED_WELL and observations.was_not_observed(evidence):
        return
    yield signature.means


def _what_else_was_seen(judgement: Judgement) -> Iterator[str]:
    evidence = judgement.evidence
    if judgement.is_good_end:
        yield from remarks.on_good_end(evidence)
        yield from good_ends.sentences(evidence)
    unsaved = observations.unsaved_steps(evidence)
    if judgement.signature.id == endings.NOT_SAVED and unsaved is not None:
        yield _sentence(unsaved.sentence())
    yield from remarks.on_interference(evidence)
    leak = _leak_behind(judgement)
    if leak is not None and observations.leak_place(leak):
        yield _sentence(f"Memory was kept alive at {observations.leak_place(leak)}")


# --- Fix ------------------------------------------------------------------------------------------


# A disk that is full would be the wrong place to look at.
_FIX_OF_NONFINITE_STATE = (
    "Find out where the NaN or Inf comes from: `holdfast events RUN --kind nonfinite_origin`, and"
    " the loss before it. Then resume from the newest checkpoint, with a lower learning rate or"
    " without the samples to blame."
)


def _fix(judgement: Judgement) -> str:
    """Return what to do: where memory leaks, a Guard's advice, or the fix of the signature."""
    signature = judgement.signature
    if signature.id in (endings.NOT_LEARNED, endings.WAITED_FOR_LOADER):
        return signature.fix
    unsaved = observations.unsaved_steps(judgement.evidence)
    if signature.id == endings.NOT_SAVED and unsaved is not None and unsaved.was_refused:
        return remarks.fix_of_training(judgement.evidence) or _FIX_OF_NONFINITE_STATE
    leak = _leak_behind(judgement)
    if judgement.is_good_end:
        leak = observations.newest_leak(judgement.evidence)
    place = observations.leak_place(leak) if leak is not None else ""
    if place:
        rest = signature.fix
        if judgement.is_good_end:
            rest = "A longer run would run out of memory."
        return (
            f"Look first at {place}, where memory is kept alive from step to step. {rest}".strip()
        )
    advice_of_guard = ""
    if judgement.is_good_end:
        advice_of_guard = remarks.fix_of_training(judgement.evidence)
    return advice_of_guard or signature.fix


def _changes(judgement: Judgement) -> tuple[tuple[str, str], ...]:
    """Return the changes for the next attempt, without those already applied to this one."""
    applied = judgement.evidence.applied_changes
    changes = judgement.signature.changes.items()
    return tuple((name, value) for name, value in changes if applied.get(name) != value)


# --- Evidence -------------------------------------------------------------------------------------


def _exhibits(judgement: Judgement) -> list[Exhibit]:
    """Return the evidence, the strongest first, each piece once."""
    exhibits = [
        *_exhibits_of_doubt(judgement),
        *_exhibits_of_good_end(judgement),
        *_exhibits_of_cause(judgement),
        *judgement.end.exhibits,
        *_exhibits_of_learning(judgement),
        *exhibits_of_training(judgement.evidence),
        *_confirmations(judgement),
        *_cascades(judgement),
    ]
    return list(dict.fromkeys(exhibits))[:_MOST_EXHIBITS]


def _exhibits_of_doubt(judgement: Judgement) -> Iterator[Exhibit]:
    if judgement.doubt is not None and judgement.doubt.candidate is not None:
        yield quote(judgement.doubt.candidate.statement, "fact")


def _exhibits_of_good_end(judgement: Judgement) -> Iterator[Exhibit]:
    if judgement.is_good_end:
        yield from good_ends.exhibits(judgement.evidence)


def _exhibits_of_cause(judgement: Judgement) -> Iterator[Exhibit]:
    """Yield the statement that shows the cause, then the rest of its chain of exceptions."""
    candidate = judgement.candidate
    if candidate is None:
        return
    role = "root" if candidate.signature.role == "root" else "cascade"
    yield quote(candidate.statement, role)
    others = [statement for statement in candidate.chain if statement is not candidate.statement]
    for statement in others[:_MOST_OF_A_CHAIN]:
        yield quote(statement, "fact")


def _exhibits_of_learning(judgement: Judgement) -> Iterator[Exhibit]:
    learning = judgement.evidence.learning
    if judgement.is_good_end and learning is not None and learning.outcome == "fell":
        yield Exhibit(text=learning.sentence(), source="recorded steps")


def _confirmations(judgement: Judgement) -> Iterator[Exhibit]:
    confirming = [
        candidate
        for candidate in _other_candidates(judgement)
        if _confirms(candidate, judgement.signature)
    ]
    for candidate in confirming[:_MOST_CONFIRMATIONS]:
        yield quote(candidate.statement, "confirmation")


def _confirms(candidate: Candidate, cause: Signature) -> bool:
    """Return whether a candidate supports a cause: a root of the same family does."""
    if candidate.signature.id in FALLBACKS or candidate.is_caught:
        return False
    return candidate.signature.role == "root" and candidate.signature.family == cause.family


def _cascades(judgement: Judgement) -> Iterator[Exhibit]:
    if judgement.end.well:
        return
    cascades = [
        candidate
        for candidate in _other_candidates(judgement)
        if candidate.signature.role == "cascade"
    ]
    for candidate in cascades[:_MOST_CASCADES]:
        yield quote(candidate.statement, "cascade")


def _other_candidates(judgement: Judgement) -> Iterator[Candidate]:
    for candidate in judgement.case.candidates:
        if candidate is not judgement.candidate:
            yield candidate


def _missing(judgement: Judgement) -> Iterator[str]:
    """Yield what would have made the verdict more certain."""
    yield from judgement.evidence.missing
    if judgement.signature.role == "cascade":
        yield "the original failure, which is neither in the log nor in the recordings"
    is_unknown = judgement.signature.id == endings.UNKNOWN and judgement.candidate is None
    if is_unknown and not judgement.evidence.statements:
        yield "no line that reports an error"


# --- Where and when -------------------------------------------------------------------------------


def _place(judgement: Judgement) -> str:
    """Return the innermost frame of the user's own code, or the innermost of all."""
    if judgement.candidate is not None:
        return _place_of(judgement.candidate)
    if judgement.end.hang is not None:
        return str(judgement.end.hang.data.get("frame") or "")
    return ""


def _place_of(candidate: Candidate) -> str:
    frame = _decisive_frame(candidate)
    if frame is None:
        return ""
    place = f"{frame.file}:{frame.line}"
    if frame.function:
        place += f" in {frame.function}"
    return place


def _decisive_frame(candidate: Candidate) -> Frame | None:
    """Return the frame to look at first, of the statement or of another one in its chain.

    An exception raised in a handler may have no frame of user code; then the frame of the exception
    that was being handled is used.
    """
    innermost = [
        innermost_user_frame(statement.frames)
        for statement in (candidate.statement, *candidate.chain)
        if statement.frames
    ]
    for frame in innermost:
        if is_user_code(frame):
            return frame
    return innermost[0] if innermost else None


def _rank(judgement: Judgement) -> int | None:
    if judgement.candidate is not None:
        return judgement.candidate.statement.rank
    return judgement.end.first_rank


def _steps(judgement: Judgement) -> int | None:
    """Return how many steps were completed, or None if unknown."""
    if judgement.evidence.steps is not None:
        return judgement.evidence.steps
    for ending in reversed(judgement.evidence.endings):
        if ending.step is not None:
            return ending.step
    return None


# --- Texts ----------------------------------------------------------------------------------------


def _leak_behind(judgement: Judgement) -> Event | None:
    """Return the newest traced leak, if the verdict is about memory."""
    if "memory" not in judgement.signature.family:
        return None
    return observations.newest_leak(judgement.evidence)


def _is_holdfast_error(candidate: Candidate) -> bool:
    """Return whether a candidate quotes a holdfast error, which explains itself."""
    if candidate.signature.id not in all_rules():
        return False
    statement = candidate.statement
    names_its_rule = f"[{candidate.signature.id}]" in statement.text
    return _is_guard_record(statement) or (statement.kind == "exception" and names_its_rule)


def _is_guard_record(statement: Statement) -> bool:
    return statement.kind == "line" and statement.source == "guard"


def _sentence(text: str) -> str:
    """Return a text as one sentence: with a capital letter and one full stop."""
    text = text.rstrip()
    if not text.endswith((".", "!", "?")):
        text += "."
    return text[:1].upper() + text[1:]


def _cut(text: str, limit: int) -> str:
    """Return a text, cut to at most `limit` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - 3]}..."

"""Write the title and the summary of a verdict."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.text import capitalized, counted
from holdfast.explain import observations
from holdfast.explain.causes import good_ends
from holdfast.explain.causes.candidate import FALLBACKS, CandidateCause
from holdfast.explain.evidence import Statement, is_user_code, library_file
from holdfast.explain.exhibits import first_line
from holdfast.explain.rules import all_rules
from holdfast.explain.signatures import ids
from holdfast.explain.wording import remarks
from holdfast.explain.wording.judgement import Judgement, place_of

# The maximum length, in characters, of a quotation in a title, or in a summary if the signature
# explains the quoted message.
_SHORT_QUOTE = 240
# The maximum length of a quotation in a summary if no signature explains the quoted message, or if
# the message is a holdfast error, which explains itself.
_LONG_QUOTE = 500


def title(judgement: Judgement) -> str:
    """Return the title of a verdict.

    This is the title of the signature, unless the evidence allows for a more specific one.
    """
    signature = judgement.signature
    evidence = judgement.evidence
    title_of_exit = _title_of_exit_with_status_0(judgement)
    if title_of_exit:
        return title_of_exit
    unsaved = observations.unsaved_steps(evidence)
    if signature.id == ids.NOT_SAVED and unsaved is not None:
        return _cut(f"{signature.title}: {unsaved.clause_with_reason()}", _SHORT_QUOTE)
    if signature.id == ids.STATUS_ONLY and evidence.exit_call == "sys.exit":
        return f"called sys.exit with status {judgement.end.status}"
    names_nonfinite_loss = signature.id == ids.LOSS_NOT_FINITE
    if (
        names_nonfinite_loss
        and judgement.never_had_a_finite_loss
        and evidence.divergence is not None
    ):
        return evidence.divergence.clause()
    if signature.id in FALLBACKS and judgement.candidate is not None:
        return _cut(first_line(judgement.candidate.statement), _SHORT_QUOTE)
    return signature.title


def _title_of_exit_with_status_0(judgement: Judgement) -> str:
    """Return the title if the training diverged or has a fault, or the status is in doubt."""
    signature = judgement.signature
    evidence = judgement.evidence
    ended = "ended with status 0" if judgement.end.well else "finished"
    if signature.id == ids.TRAINING_DIVERGED and evidence.divergence is not None:
        if judgement.end.cause is None:
            return evidence.divergence.clause()
        return f"{ended}, but {evidence.divergence.clause()}"
    if signature.id == ids.ENDED_WELL and observations.training_faults(evidence):
        return _title_of_training_fault(judgement)
    if judgement.is_good_end and judgement.doubt is not None:
        return f"{ended}, {judgement.doubt.words}"
    return ""


def _title_of_training_fault(judgement: Judgement) -> str:
    fault = observations.training_faults(judgement.evidence)[0]
    words = "ended well, but its training has a problem"
    rule = all_rules().get(fault.data["rule"])
    return f"{words}: {rule.title}" if rule is not None else words


def summary(judgement: Judgement) -> str:
    """Return the paragraph for `Verdict.summary`.

    It says what happened, how far the run got, what the cause means, and what else was observed.
    """
    sentences = [
        *_what_happened(judgement),
        *_progress(judgement),
        *_meaning(judgement),
        *_what_else_was_seen(judgement),
    ]
    return " ".join(filter(None, sentences))


def _what_happened(judgement: Judgement) -> Iterator[str]:
    """Yield sentences that say how the run failed or ended."""
    if judgement.candidate is not None:
        yield _sentence(_failure(judgement.candidate, judgement.place, judgement.code))
    elif judgement.end.why:
        yield _sentence(judgement.end.why)
    if judgement.signature.id == ids.UNKNOWN:
        yield from _newest_exception(judgement)
    if judgement.end.status == 0 and not judgement.end.well:
        yield "The command still ended with status 0, which hid the failure."


def _newest_exception(judgement: Judgement) -> Iterator[str]:
    """Yield a sentence that quotes the newest exception, if any, after which output continued."""
    exceptions = [
        candidate
        for candidate in judgement.case.roots
        if candidate.statement.kind == "exception" and candidate.is_caught
    ]
    if not exceptions:
        return
    newest = max(exceptions, key=lambda candidate: candidate.statement.position)
    place = place_of(newest)
    where = f", at {place}" if place else ""
    words = _cut(first_line(newest.statement), _SHORT_QUOTE).removesuffix(".")
    yield _sentence(
        f"The newest exception is {words}{where}; output follows it, perhaps from another process"
        " or from a buffer"
    )


def _failure(candidate: CandidateCause, place: str, code: str) -> str:
    """Return a clause that says where the run failed and with which message.

    Args:
        candidate: The candidate for the cause.
        place: The line of code to inspect first, as ``file:line in function``.
        code: The text of that line, or an empty string.
    """
    statement = candidate.statement
    words = first_line(statement)
    if _is_guard_record(statement):
        who = "A Guard stopped it" if statement.fatal else "The last record of its Guard is"
        return f"{who}: {_cut(words, _LONG_QUOTE)}"
    if statement.kind == "line":
        whose = "The log" if statement.rank is None else f"The log of rank {statement.rank}"
        return f"{whose} says: {_cut(words, _LONG_QUOTE)}"
    who = "It" if statement.rank is None else f"Rank {statement.rank}"
    if candidate.signature.id in FALLBACKS:
        return f"{who} failed with {_unexplained_exception(statement, place, code)}"
    quotation = _cut(words, _SHORT_QUOTE)
    if _is_holdfast_error(candidate):
        quotation = _cut(statement.text.strip().partition("\n")[0], _LONG_QUOTE)
    where = f" at {place}" if place else ""
    if place and code:
        where += f", `{code}`"
    return f"{who} failed{where}: {quotation}"


def _unexplained_exception(statement: Statement, place: str, code: str) -> str:
    """Return an exception that no signature explains, with everything known about its place.

    Args:
        statement: The exception.
        place: The line of code to inspect first, as ``file:line in function``; empty if unknown.
        code: The text of that line, or an empty string.
    """
    clause = _cut(first_line(statement), _LONG_QUOTE)
    if place:
        clause = f"{clause.removesuffix('.')}, at {place}"
    if code:
        clause += f": `{code}`"
    if statement.frames and not is_user_code(statement.frames[-1]):
        clause += f" (raised in {library_file(statement.frames[-1])})"
    return clause


def _progress(judgement: Judgement) -> Iterator[str]:
    """Yield a sentence that says how many steps were completed, unless the run ended well."""
    steps = judgement.steps
    if not steps or judgement.end.well:
        return
    words = f"It had completed {counted(steps, 'step')}"
    phase = judgement.evidence.phase
    if phase and phase != "ending":
        words += f" and was in phase {phase}"
    yield f"{words}."


def _meaning(judgement: Judgement) -> Iterator[str]:
    """Yield sentences that explain the cause, or that say how the process exited."""
    signature = judgement.signature
    if signature.id in (ids.TERMINATED, ids.INTERRUPTED):
        yield from remarks.on_interruption(judgement.evidence)
    if _is_explained_elsewhere(judgement):
        return
    exit_clause = remarks.exit_clause(judgement.evidence)
    if signature.id == ids.STATUS_ONLY and exit_clause:
        yield _sentence(exit_clause)
    elif judgement.never_had_a_finite_loss:
        yield _sentence(_clause_about_nonfinite_first_loss(judgement))
    else:
        yield signature.means


def _is_explained_elsewhere(judgement: Judgement) -> bool:
    """Return whether other sentences of the summary already explain the cause."""
    if judgement.candidate is not None and _is_holdfast_error(judgement.candidate):
        # The error explains itself. The page of its rule would only repeat the message.
        return True
    if not judgement.is_good_end:
        return False
    # The sentences of `good_ends` explain a problem with numbers, and `remarks` says what is
    # missing if no process was observed.
    ended_well = judgement.signature.id == ids.ENDED_WELL
    return not ended_well or observations.was_not_observed(judgement.evidence)


def _clause_about_nonfinite_first_loss(judgement: Judgement) -> str:
    """Return a clause that says what a loss means that was not finite from the first step on."""
    clause = (
        "the training did not diverge: the first forward pass already gave NaN or Inf, from its"
        " inputs, its weights, its precision or an operation such as a softmax over a fully"
        " masked row"
    )
    divergence = judgement.evidence.divergence
    if divergence is not None and divergence.log:
        return f"if the log begins with the first step, {clause}"
    return clause


def _what_else_was_seen(judgement: Judgement) -> Iterator[str]:
    """Yield sentences about observations other than the cause."""
    evidence = judgement.evidence
    if judgement.is_good_end:
        yield from remarks.on_good_end(evidence)
        yield from good_ends.sentences(evidence)
    unsaved = observations.unsaved_steps(evidence)
    if judgement.signature.id == ids.NOT_SAVED and unsaved is not None:
        yield _sentence(unsaved.clause())
    if not judgement.is_good_end:
        yield from remarks.on_flight_recorder(evidence)
    yield from remarks.on_interference(evidence)
    if judgement.leak is not None and observations.leak_place(judgement.leak):
        yield f"Memory was kept alive at {observations.leak_place(judgement.leak)}."


def _is_holdfast_error(candidate: CandidateCause) -> bool:
    """Return whether a candidate quotes a holdfast error, which explains itself."""
    if candidate.signature.id not in all_rules():
        return False
    statement = candidate.statement
    names_its_rule = f"[{candidate.signature.id}]" in statement.text
    return _is_guard_record(statement) or (statement.kind == "exception" and names_its_rule)


def _is_guard_record(statement: Statement) -> bool:
    return statement.kind == "line" and statement.source == "guard"


def _sentence(text: str) -> str:
    """Return a text as a sentence that starts with a capital letter and ends with a period."""
    text = text.rstrip()
    if not text.endswith((".", "!", "?")):
        text += "."
    return capitalized(text)


def _cut(text: str, limit: int) -> str:
    """Return a text, truncated to at most `limit` characters, between two words if possible."""
    if len(text) <= limit:
        return text
    kept = text[: limit - 3]
    words, _, _ = kept.rpartition(" ")
    return f"{words or kept}..."

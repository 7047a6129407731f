"""A verdict in words: the paragraph, the exhibits in their order, the place in the user's own code.

Does not: choose the cause (see ``judging``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core.events.event import Event
from holdfast.explain import good_ends, remarks
from holdfast.explain.evidence import Facts, Frame, Statement, is_own_code, library_file, own_frame
from holdfast.explain.logs.text import quoted
from holdfast.explain.rules import all_rules
from holdfast.explain.runtime_causes import End
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import endings
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.explain.weighing import CAUGHT, Candidate

_ITSELF = frozenset({endings.UNCAUGHT, endings.ERROR_LINE})
"""Causes that are the words of what was seen."""
_MOST_EXHIBITS = 10
_MOST_CASCADES = 3
_MOST_QUOTED = 160  # characters of a message inside the paragraph
# The same where the message is all that is known, or is of holdfast: it says what was found
_MOST_WHOLE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What was chosen, and from what: all that the words of a verdict are made of."""

    facts: Facts  # all that is known
    end: End  # how it ended
    signature: Signature  # the cause
    confidence: float  # of the cause, between 0 and 1
    class_confidence: float  # of its class
    candidate: Candidate | None  # what it was seen in, or None: only in how it ended
    candidates: tuple[Candidate, ...]  # all of them
    runner_up: tuple[str, str, float] | None  # as `Verdict.runner_up`
    doubt: str = ""  # what speaks against a good end, for the title
    doubted: Candidate | None = None  # what says so, or None


def in_words(made: Judgement) -> Verdict:
    """Return the verdict in words."""
    signature, candidate = made.signature, made.candidate
    place = _place(candidate)
    if made.end.hang is not None and candidate is None:
        place = str(made.end.hang.data.get("frame") or "")
    return Verdict(
        cause=signature.id,
        family=signature.family,
        title=_title(made),
        summary=_summary(made, place),
        fix=_fix(made),
        confidence=made.confidence,
        class_confidence=made.class_confidence,
        evidence=tuple(_exhibits(made)),
        runner_up=made.runner_up,
        tried=made.facts.tried,
        missing=tuple(_missing(made)),
        restart=signature.restart,
        changes=_changes(made),
        where=place,
        rank=candidate.statement.rank if candidate is not None else made.end.first_rank,
        step=_step(made),
    )


def _changes(made: Judgement) -> tuple[tuple[str, str], ...]:
    """Return what the next attempt is to change, without what this one had already."""
    had = made.facts.extra.get("changed")
    had = had if isinstance(had, dict) else {}
    return tuple(
        (name, value) for name, value in made.signature.changes.items() if had.get(name) != value
    )


def _title(made: Judgement) -> str:
    signature, facts = made.signature, made.facts
    if signature.id == endings.TRAINING_LOST and facts.lost is not None:
        return (
            f"{'ended with status 0' if made.end.well else 'came to its end'}, but"
            f" {facts.lost.sentence()}"
        )
    if signature.id == endings.NOT_SAVED and (unsaved := remarks.not_saved(facts)) is not None:
        why = remarks.why_not_saved(facts)
        return _cut(
            f"{signature.title}: {unsaved.partition(':')[0]}{why and f' ({why})'}", _MOST_QUOTED
        )
    faults = remarks.training_faults(facts)
    if signature.id == endings.ENDED_WELL and faults:
        rule = all_rules().get(faults[0].data["rule"])
        return "ended well, but its training has a fault" + (
            f": {rule.title}" if rule is not None else ""
        )
    if signature.family == "ended well" and made.doubt:
        return f"{'ended with status 0' if made.end.well else 'came to its end'}, {made.doubt}"
    if signature.id == endings.STATUS_ONLY and facts.extra.get("exit_how") == "sys.exit":
        return f"ended itself by sys.exit with status {made.end.status}"
    if signature.id in _ITSELF and made.candidate is not None:
        return _cut(
            next(quoted(made.candidate.statement, most_lines=1), signature.title), _MOST_QUOTED
        )
    return signature.title


def _summary(made: Judgement, place: str) -> str:
    signature, candidate = made.signature, made.candidate
    parts = []
    if candidate is not None:
        parts.append(_sentence(_failed(candidate, place)))
    elif made.end.why:
        parts.append(_sentence(made.end.why))
    if made.end.status == 0 and not made.end.well:
        parts.append("The command ended with status 0 all the same, which hid it.")
    step = _step(made)
    if step and not made.end.well:
        phase = made.facts.extra.get("phase")
        stood = f" and stood in phase {phase}" if phase and phase != "ending" else ""
        parts.append(f"It had made {step} step{'' if step == 1 else 's'}{stood}.")
    if signature.id in (endings.TERMINATED, endings.INTERRUPTED):
        parts += remarks.of_interruption(made.facts)
    left = remarks.way_out(made.facts) if signature.id == endings.STATUS_ONLY else ""
    if candidate is None or not _is_of_holdfast(candidate):
        parts.append(_sentence(left) if left else _meaning(made))
    if signature.family == "ended well":
        parts += remarks.of_good_end(made.facts)
        parts += good_ends.sentences(made.facts)
    if signature.id == endings.NOT_SAVED and (lost := remarks.not_saved(made.facts)) is not None:
        parts.append(_sentence(lost))
    parts += remarks.of_interference(made.facts)
    leak = _leak(made)
    if leak is not None and remarks.leak_place(leak):
        parts.append(_sentence(f"Memory was kept at {remarks.leak_place(leak)}"))
    return " ".join(filter(None, parts))


def _meaning(made: Judgement) -> str:
    """Return what the cause means.

    Of a good end that falls short, its own sentences say it with the numbers.
    """
    signature = made.signature
    is_judged = signature.family == "ended well" and signature.id != endings.ENDED_WELL
    if is_judged or (signature.id == endings.ENDED_WELL and remarks.unobserved(made.facts)):
        return ""
    return signature.means


def _failed(candidate: Candidate, place: str) -> str:
    """Return where it failed, and with which words."""
    statement = candidate.statement
    first = next(quoted(statement, most_lines=1), "")
    if _is_of_guard(statement):
        who = "A Guard stopped it" if statement.fatal else "The last that is known of its Guard"
        return f"{who}: {_cut(first, _MOST_WHOLE)}"
    who = f"Rank {statement.rank}" if statement.rank is not None else "It"
    if candidate.signature.id in _ITSELF:
        raiser = statement.frames[-1] if statement.frames else None
        raised = (
            f" (raised in {library_file(raiser)})"
            if raiser is not None and not is_own_code(raiser)
            else ""
        )
        return (
            f"{who} failed with"
            f" {_cut(first, _MOST_WHOLE)}{f', at {place}' if place else ''}{raised}"
        )
    if _is_of_holdfast(candidate):
        first = _cut(statement.text.strip().partition("\n")[0], _MOST_WHOLE)
    else:
        first = _cut(first, _MOST_QUOTED)
    return f"{who} failed{f' at {place}' if place else ''}: {first}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _is_of_holdfast(candidate: Candidate) -> bool:
    """Return whether the words are those of holdfast, which say what was found.

    Its rule would only repeat them.
    """
    statement = candidate.statement
    if candidate.signature.id not in all_rules():
        return False
    named = f"[{candidate.signature.id}]" in statement.text
    return _is_of_guard(statement) or (statement.kind == "exception" and named)


def _is_of_guard(statement: Statement) -> bool:
    return statement.kind == "line" and statement.source == "guard"


def _sentence(text: str) -> str:
    """Return a text as one sentence: with a capital and one full stop."""
    text = text.rstrip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _fix(made: Judgement) -> str:
    well = made.signature.family == "ended well"
    if made.signature.id in (endings.NOT_LEARNED, endings.WAITED_FOR_LOADER):
        return made.signature.fix
    leak = remarks.newest_leak(made.facts) if well else _leak(made)
    place = remarks.leak_place(leak) if leak is not None else ""
    if not place:
        return (remarks.fix_of_training(made.facts) if well else "") or made.signature.fix
    rest = "A longer run would end for want of memory." if well else made.signature.fix
    return f"Look first at {place}, where memory is kept from step to step. {rest}"


def _leak(made: Judgement) -> Event | None:
    """Return the newest leak that was traced, if memory is what the verdict is about."""
    return remarks.newest_leak(made.facts) if "memory" in made.signature.family else None


def _exhibits(made: Judgement) -> Iterator[Exhibit]:
    found: list[Exhibit] = []
    candidate = made.candidate
    if made.doubted is not None:
        found.append(_quote(made.doubted.statement, "fact"))
    if made.signature.family == "ended well":
        found += good_ends.exhibits(made.facts)
    if candidate is not None:
        found.append(
            _quote(candidate.statement, "root" if candidate.signature.role == "root" else "cascade")
        )
        found += [
            _quote(each, "fact") for each in candidate.chain if each is not candidate.statement
        ][:3]
    found += [
        *made.end.exhibits,
        *_fall_of_the_loss(made),
        *remarks.exhibits_of_training(made.facts),
    ]
    others = [each for each in made.candidates if each is not candidate]
    found += [
        _quote(each.statement, "confirmation") for each in others if _confirms(made.signature, each)
    ][:3]
    cascades = [each for each in others if each.signature.role == "cascade" and not made.end.well]
    found += [_quote(each.statement, "cascade") for each in cascades][:_MOST_CASCADES]
    yield from list(dict.fromkeys(found))[:_MOST_EXHIBITS]


def _fall_of_the_loss(made: Judgement) -> Iterator[Exhibit]:
    learning = made.facts.learning
    if (
        made.signature.family == "ended well"
        and learning is not None
        and learning.outcome == "fell"
    ):
        yield Exhibit(text=learning.sentence(), source="recorded steps")


def _confirms(signature: Signature, other: Candidate) -> bool:
    if other.signature.role == "confirmation":
        return True
    same = other.signature.id not in _ITSELF and other.signature.family == signature.family
    return same and other.signature.role == "root" and other.tier < CAUGHT


def _quote(statement: Statement, role: str) -> Exhibit:
    return Exhibit(
        text="\n".join(quoted(statement)),
        source=statement.source,
        role=role,
        unix_seconds=statement.unix_seconds,
        rank=statement.rank,
    )


def _missing(made: Judgement) -> Iterator[str]:
    yield from made.facts.missing
    if made.signature.role == "cascade":
        yield "the failure that this follows from: it is not in what was read"
    if (
        made.signature.id == endings.UNKNOWN
        and made.candidate is None
        and not made.facts.statements
    ):
        yield "no line of an error"


def _place(candidate: Candidate | None) -> str:
    """Return the innermost frame of the user's own code, else the innermost of all."""
    if candidate is None:
        return ""
    chain: list[tuple[Frame, ...]] = [
        each.frames for each in (candidate.statement, *candidate.chain) if each.frames
    ]
    if not chain:
        return ""
    # An exception of a handler has none: then that of what it broke into.
    frame = own_frame(
        next((frames for frames in chain if is_own_code(own_frame(frames))), chain[0])
    )
    return f"{frame.file}:{frame.line}" + (f" in {frame.function}" if frame.function else "")


def _step(made: Judgement) -> int | None:
    steps = made.facts.extra.get("steps")
    if isinstance(steps, int):
        return steps
    return next(
        (ending.step for ending in reversed(made.facts.endings) if ending.step is not None), None
    )

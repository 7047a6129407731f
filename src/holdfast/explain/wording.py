"""A verdict in words: the paragraph, the exhibits in their order, the place in the user's own code.

Does not: choose the cause (see ``judging``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.core.events import Event
from holdfast.explain.evidence import GUARD_SAID, Facts, Frame, Statement
from holdfast.explain.logs.text import quoted
from holdfast.explain.remarks import (
    WORKER_KILLED,
    exhibits_of_training,
    fix_of_training,
    kills_counted,
    leak_place,
    newest_leak,
    not_saved,
    of_good_end,
    of_interference,
    of_interruption,
    training_faults,
    way_out,
)
from holdfast.explain.rules import all_rules
from holdfast.explain.runtime_causes import End
from holdfast.explain.signature import Signature
from holdfast.explain.signatures.runtime import (
    ENDED_WELL,
    INTERRUPTED,
    STATUS_ONLY,
    TERMINATED,
    TRAINING_LOST,
    UNCAUGHT,
    UNKNOWN,
)
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.explain.weighing import Candidate

_MOST_EXHIBITS = 10
_MOST_CASCADES = 3
_MOST_QUOTED = 160  # characters of a message inside the paragraph
_MOST_OF_OURS = 500  # likewise, of an error of holdfast: it says what was refused, and why
# Installed code and what ships with Python: not where a user looks first.
_FOREIGN = re.compile(
    r"(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen |^<string>$|/torch/(?:nn|utils|optim|distributed)/"
    r"|runpy\.py$|/holdfast/(?:guard|loader|forecast|memory|numerics|checkpoint|supervise|recorder)/|/tqdm/"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a verdict is told from.

    Args:
        facts: All that is known.
        end: How it ended.
        signature: The cause.
        confidence: Between 0 and 1.
        candidate: What it was seen in, or None: only in how it ended.
        candidates: All of them.
        runner_up: As `Verdict.runner_up`.
    """

    facts: Facts
    end: End
    signature: Signature
    confidence: float
    candidate: Candidate | None
    candidates: tuple[Candidate, ...]
    runner_up: tuple[str, str, float] | None


def tell(told: Told) -> Verdict:
    """Return the verdict in words."""
    told = replace(told, signature=_as_counted(told))
    signature, candidate = told.signature, told.candidate
    place = _place(candidate)
    if told.end.hang is not None and candidate is None:
        place = str(told.end.hang.data.get("frame") or "")
    statement = candidate.statement if candidate is not None else None
    rank = statement.rank if statement is not None else told.end.first_rank
    return Verdict(
        cause=signature.id,
        family=signature.family,
        title=_title(told, statement),
        summary=_summary(told, place),
        fix=_fix(told),
        confidence=told.confidence,
        evidence=tuple(_exhibits(told)),
        runner_up=told.runner_up,
        tried=told.facts.tried,
        missing=tuple(_missing(told)),
        restart=signature.restart,
        changes=_changes(told),
        where=place,
        rank=rank,
        step=_step(told),
    )


def _as_counted(told: Told) -> Signature:
    """Return the signature, without the kernel where its counter says that it killed nothing for memory."""
    signature = told.signature
    if signature.id != WORKER_KILLED or kills_counted(told.facts.endings) != 0:
        return signature
    return replace(
        signature,
        title="a loader worker was killed (SIGKILL) by somebody, not for want of memory",
        family="preempted",
        means="Somebody sent SIGKILL to a worker. The kernel did not: its counter of kills for memory did not rise.",
        fix="Find out who ended it: a person, a clean-up script, or a limit of the scheduler. Then start it again.",
    )


def _changes(told: Told) -> tuple[tuple[str, str], ...]:
    """Return what the next attempt is to change, without what this one had already."""
    had = told.facts.extra.get("changed")
    had = had if isinstance(had, dict) else {}
    return tuple((name, value) for name, value in told.signature.changes.items() if had.get(name) != value)


def _title(told: Told, statement: Statement | None) -> str:
    signature, lost = told.signature, told.facts.lost
    if signature.id == TRAINING_LOST and lost is not None:
        return f"{'ended with status 0' if told.end.well else 'came to its end'}, but {lost.sentence()}"
    if signature.id == ENDED_WELL and (unsaved := not_saved(told.facts)) is not None:
        return f"came to its end, but {unsaved.partition(':')[0]}"
    faults = training_faults(told.facts)
    if signature.id == ENDED_WELL and faults:
        rule = all_rules().get(faults[0].data["rule"])
        return "ended well, but its training has a fault" + (f": {rule.title}" if rule is not None else "")
    if signature.id == STATUS_ONLY and told.facts.extra.get("exit_how") == "sys.exit":
        return f"ended itself by sys.exit with status {told.end.status}"
    if signature.id == UNCAUGHT and statement is not None and statement.exception:
        return f"{signature.title}: {statement.exception}"
    return signature.title


def _summary(told: Told, place: str) -> str:
    signature, candidate = told.signature, told.candidate
    parts = []
    if candidate is not None:
        parts.append(_sentence(_failed(candidate, place)))
    elif told.end.why:
        parts.append(_sentence(told.end.why))
    step = _step(told)
    if step and not told.end.well:
        phase = told.facts.extra.get("phase")
        stood = f" and stood in phase {phase}" if phase and phase != "ending" else ""
        parts.append(f"It had made {step} step{'' if step == 1 else 's'}{stood}.")
    if signature.id in (TERMINATED, INTERRUPTED):
        parts += of_interruption(told.facts)
    left = way_out(told.facts) if signature.id == STATUS_ONLY else ""
    if candidate is None or not _says_itself(candidate):
        parts.append(_sentence(left) if left else signature.means)
    if signature.id == ENDED_WELL:
        parts += of_good_end(told.facts)
    parts += of_interference(told.facts)
    leak = _leak(told)
    if leak is not None and leak_place(leak):
        parts.append(_sentence(f"Memory was kept at {leak_place(leak)}"))
    return " ".join(parts)


def _failed(candidate: Candidate, place: str) -> str:
    """Return where it failed, and with which words."""
    statement = candidate.statement
    first = next(quoted(statement, most_lines=1), "")
    most = _MOST_QUOTED
    if _says_itself(candidate):
        first, most = statement.text.strip().partition("\n")[0], _MOST_OF_OURS
    first = first if len(first) <= most else f"{first[: most - 3]}..."
    if _is_of_guard(statement):
        who = "A Guard stopped it" if statement.fatal else "The last that is known of its Guard"
        return f"{who}: {first.removeprefix(GUARD_SAID)}"
    who = f"Rank {statement.rank}" if statement.rank is not None else "It"
    return f"{who} failed{f' at {place}' if place else ''}: {first}"


def _says_itself(candidate: Candidate) -> bool:
    """Return whether the words are those of holdfast, which say what was found: its rule would only repeat them."""
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


def _fix(told: Told) -> str:
    well = told.signature.id == ENDED_WELL
    leak = newest_leak(told.facts) if well else _leak(told)
    place = leak_place(leak) if leak is not None else ""
    if not place:
        return (fix_of_training(told.facts) if well else "") or told.signature.fix
    rest = "A longer run would end for want of memory." if well else told.signature.fix
    return f"Look first at {place}, where memory is kept from step to step. {rest}"


def _leak(told: Told) -> Event | None:
    """Return the newest leak that was traced, if memory is what the verdict is about."""
    return newest_leak(told.facts) if "memory" in told.signature.family else None


def _exhibits(told: Told) -> Iterator[Exhibit]:
    found: list[Exhibit] = []
    candidate = told.candidate
    if candidate is not None:
        found.append(_quote(candidate.statement, "root" if candidate.signature.role == "root" else "cascade"))
        found += [_quote(each, "fact") for each in candidate.chain if each is not candidate.statement][:3]
    found += [*told.end.exhibits, *exhibits_of_training(told.facts)]
    others = [each for each in told.candidates if each is not candidate]
    found += [_quote(each.statement, "confirmation") for each in others if _confirms(told.signature, each)][:3]
    cascades = [each for each in others if each.signature.role == "cascade" and not told.end.well]
    found += [_quote(each.statement, "cascade") for each in cascades][:_MOST_CASCADES]
    yield from list(dict.fromkeys(found))[:_MOST_EXHIBITS]


def _confirms(signature: Signature, other: Candidate) -> bool:
    if other.signature.role == "confirmation":
        return True
    return other.signature.role == "root" and other.signature.family == signature.family and other.tier < 4


def _quote(statement: Statement, role: str) -> Exhibit:
    return Exhibit(
        text="\n".join(quoted(statement)),
        source=statement.source,
        role=role,
        unix_seconds=statement.unix_seconds,
        rank=statement.rank,
    )


def _missing(told: Told) -> Iterator[str]:
    yield from told.facts.missing
    if told.signature.role == "cascade":
        yield "the failure that this follows from: it is not in what was read"
    if told.signature.id == UNKNOWN and told.candidate is None and not told.facts.statements:
        yield "no line of an error"


def _place(candidate: Candidate | None) -> str:
    """Return the innermost frame of the user's own code, else the innermost of all."""
    if candidate is None:
        return ""
    chain = [each.frames for each in (candidate.statement, *candidate.chain) if each.frames]
    if not chain:
        return ""
    # An exception of a handler has none: then that of what it broke into.
    frame = own_frame(next((frames for frames in chain if not _FOREIGN.search(own_frame(frames).file)), chain[0]))
    return f"{frame.file}:{frame.line}" + (f" in {frame.function}" if frame.function else "")


def own_frame(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame that is not of installed code, else the innermost; innermost last."""
    return next((frame for frame in reversed(frames) if not _FOREIGN.search(frame.file)), frames[-1])


def _step(told: Told) -> int | None:
    steps = told.facts.extra.get("steps")
    if isinstance(steps, int):
        return steps
    return next((ending.step for ending in reversed(told.facts.endings) if ending.step is not None), None)

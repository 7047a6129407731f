"""From facts to a verdict: ordered rules, with roles.

1. Status 0 is no failure, whatever was printed before; a Guard that was asked to stop says so.
   Whether the run is called well is another matter (see ``good_ends``).
2. A hang for which the supervisor ended the attempt, or a request of the user to end it, unless a
   root had failed before it.
3. Of the roots, the one of the best tier (see ``weighing``), then the earliest: over ranks by time,
   else by place. A cascade never wins while there is a root, and a kill by the kernel for memory
   explains a worker that was lost.
4. What the signal or the status says, where no text does; against a signal from outside, only text
   that ended the process or that is about such an end counts.
5. Else "unknown", with what is missing and the best guess as runner-up.

Where memory ran out and a leak was traced that names its signature, the leak is the cause.

Two confidences are stated, of the cause and of its class. They are the shares that were right on
such grounds (`weighing.SHARES`), and fall by what contradicts; where counters, signals or a hang
decide, see ``runtime_causes``.
Does not: read files, print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.explain import remarks
from holdfast.explain.evidence import Facts
from holdfast.explain.good_ends import shortfalls
from holdfast.explain.logs.text import quoted
from holdfast.explain.remarks import kills_counted, last_words, unobserved
from holdfast.explain.runtime_causes import FROM_OUTSIDE, End, find_end
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import UNJUDGED, WELL, all_signatures, endings
from holdfast.explain.verdict import Verdict
from holdfast.explain.weighing import CAUGHT, Candidate, find_candidates, in_order
from holdfast.explain.wording import Judgement, in_words

_OTHER_LINE = 3
_IN_DOUBT = 0.7  # at most, of a good end that something speaks against
# Lines of an error, as of a sample that is left out, that are no matter where no step was to be
# made
_LEFT_OUT = 2
_OF_KILLS = frozenset({"preempted", "host out of memory", "crash"})
"""Families whose lines a process does not survive, whatever the log says of being done."""
_LEAST_SHOWN = 0.02  # confidence below which another cause is not worth a line
_BESIDE_A_SIGNAL = frozenset(
    {
        "out of memory",
        "host out of memory",
        "hardware",
        "device",
        "preempted",
        "crash",
        "distributed",
        "hang",
    }
)
"""Families whose lines can explain an end by a signal."""
_OF_LOST_PROCESSES = frozenset(
    {"loader", "distributed", "unknown", "preempted", "crash", "host out of memory"}
)
"""Families that a kill by the kernel for memory explains, where they only say that a process was
lost."""
_OF_ABORTS = frozenset({endings.ABORTED, endings.NATIVE_ABORT})
_UNCOUNTED = frozenset({endings.WORKER_KILLED, endings.KILLED_UNCOUNTED})
_NO_CAUSE = frozenset(
    {endings.STATUS_ONLY, endings.KILLED, endings.KILLED_UNCOUNTED, endings.TERMINATED}
)
"""Runtime causes that a text which is less certain still beats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """A cause with what it rests on; no candidate: how the process ended."""

    signature: Signature
    confidence: float
    candidate: Candidate | None = None


def judge(facts: Facts) -> Verdict:
    """Return why a run ended."""
    end = find_end(facts)
    candidates = find_candidates(facts)
    roots = in_order(
        (each for each in candidates if each.signature.role == "root"), first_rank=end.first_rank
    )
    cascades = in_order(
        (each for each in candidates if each.signature.role == "cascade"), first_rank=end.first_rank
    )
    chosen = _as_counted(facts, _because_of_a_leak(facts, _choose(facts, end, roots, cascades)))
    confirmations = [each for each in candidates if each.signature.role == "confirmation"]
    doubt, doubted = (
        _doubt(facts, end, [*roots, *cascades]) if chosen.signature is WELL else ("", None)
    )
    if doubt:
        chosen = replace(chosen, confidence=min(chosen.confidence, _IN_DOUBT))
    if doubted is not None:
        chosen = replace(chosen, signature=replace(WELL, fix=doubted.signature.fix))
    elif chosen.signature is WELL:
        chosen = _as_judged(facts, chosen, is_in_doubt=bool(doubt))
    return in_words(
        Judgement(
            facts=facts,
            doubt=doubt,
            doubted=doubted,
            end=end,
            signature=chosen.signature,
            confidence=round(min(max(chosen.confidence, 0.0), 0.99), 2),
            class_confidence=round(min(max(_of_class(chosen), 0.0), 0.99), 2),
            candidate=chosen.candidate,
            candidates=tuple(candidates),
            runner_up=_runner_up(chosen, end, [*roots, *cascades, *confirmations], facts),
        )
    )


def _doubt(facts: Facts, end: End, candidates: Sequence[Candidate]) -> tuple[str, Candidate | None]:
    """Return what speaks against a good end, for a title, and the candidate that says so, if one
    does.
    """
    if facts.lost is not None or end.status != 0:
        return "", None
    if (last := last_words(facts)) is not None:
        return "but its last words are a traceback", next(
            (each for each in candidates if last in each.chain), None
        )
    killed = next((each for each in candidates if _tells_of_a_kill(each)), None)
    if killed is not None:
        return (
            f"but it says: {next(quoted(killed.statement, most_lines=1), killed.signature.title)}",
            killed,
        )
    known = [
        one
        for one in candidates
        if one.signature.family != "loader" and one.signature.id != endings.ERROR_LINE
    ]
    lines = [each for each in known if not each.statement.logged]
    told = [each for each in known if each.statement.kind == "exception"] or lines[_LEFT_OUT:]
    if facts.extra.get("stepless") and told:
        return "but no step was made", told[0]
    if (
        facts.extra.get("observed") is not None
        or facts.extra.get("log_says_done")
        or facts.extra.get("losses")
    ):
        return "and nothing of it was observed" if unobserved(facts) else "", None
    return "and nothing that it printed says how it went", None


def _as_judged(facts: Facts, chosen: _Chosen, *, is_in_doubt: bool) -> _Chosen:
    """Return a good end as what it falls short of, if it does.

    Faults that a Guard found say more than the loss.

    `is_in_doubt`: nothing says how it went.
    """
    if remarks.not_saved(facts) is not None or remarks.training_faults(facts):
        return chosen
    shortfall = next(iter(shortfalls(facts)), None)
    if shortfall is None:
        return replace(chosen, signature=UNJUDGED) if is_in_doubt else chosen
    confidence = min(chosen.confidence, shortfall.confidence)
    return replace(chosen, signature=shortfall.signature, confidence=confidence)


def _tells_of_a_kill(candidate: Candidate) -> bool:
    """Return whether it is a line, not followed by progress, of what no process survives."""
    kills = candidate.signature.family in _OF_KILLS or candidate.signature.id == endings.BUS_ERROR
    return kills and candidate.tier == _OTHER_LINE and candidate.signature.role == "root"


def _of_class(chosen: _Chosen) -> float:
    """Return how sure the class of a cause is, which is no less than how sure the cause is."""
    if chosen.signature.family == "unknown" or chosen.candidate is None:
        return 0.0 if chosen.signature.family == "unknown" else chosen.confidence
    lost = max(chosen.candidate.confidence - chosen.confidence, 0.0)
    return max(chosen.confidence, chosen.candidate.class_confidence - lost)


def _choose(
    facts: Facts, end: End, roots: Sequence[Candidate], cascades: Sequence[Candidate]
) -> _Chosen:
    if end.well and end.cause is not None:
        signature = WELL if end.cause == WELL.id else all_signatures()[end.cause]
        return _Chosen(signature=signature, confidence=end.confidence)
    known = all_signatures()
    if end.cause == endings.NOT_SAVED:  # a Guard says so itself, whatever the log says of the disk
        return _Chosen(signature=known[end.cause], confidence=end.confidence)
    if end.status is None and end.cause is not None and not _ends_badly(roots, cascades):
        return _Chosen(signature=known[end.cause], confidence=end.confidence)
    # The table of a launcher only says that a rank has failed: whatever a rank has said goes before
    # it.
    cascades = [each for each in cascades if each.signature.id != endings.LAUNCHER] or cascades
    root, cascade = next(iter(roots), None), next(iter(cascades), None)
    timed_out = any(
        each.tier < CAUGHT and each.signature.id == endings.COLLECTIVE_TIMEOUT for each in cascades
    )
    if timed_out or any(
        each.tier < CAUGHT and each.signature.id not in _OF_ABORTS for each in roots
    ):
        # What failed or timed out aborts the process itself: the abort says no more than that.
        roots = [each for each in roots if each.signature.id not in _OF_ABORTS]
        root = next(iter(roots), None)
        if end.cause == endings.ABORTED:
            end = replace(end, cause=endings.STATUS_ONLY)
    began = end.hang.unix_seconds if end.hang is not None else end.asked
    if began is not None and end.cause is not None and not _failed_before(root, began):
        return _Chosen(signature=known[end.cause], confidence=end.confidence)
    for_memory = bool(kills_counted(facts.endings)) and not end.well and end.status is not None
    if for_memory and (root is None or root.tier >= 2 or _says_lost(root)):
        return _Chosen(
            signature=known[endings.OUT_OF_MEMORY_KILL], confidence=0.93, candidate=root or cascade
        )
    detailed = _explaining(root, roots) if root is not None else None
    named = detailed or root
    if root is not None and named is not None and _beats_end(named, end):
        confidence = _adjusted(root, end, [root] if detailed else roots)
        return _Chosen(signature=named.signature, confidence=confidence, candidate=named)
    if (
        cascade is not None
        and cascade.tier < CAUGHT
        and (end.cause is None or end.cause == endings.STATUS_ONLY)
    ):
        return _Chosen(
            signature=cascade.signature, confidence=cascade.confidence, candidate=cascade
        )
    if end.cause is not None and end.cause != endings.STATUS_ONLY:
        # A person, or a scheduler, ends the command itself rather than one of its processes.
        said = next((each for each in (*roots, *cascades) if _says_killed(each)), None)
        if said is not None and end.cause == endings.KILLED:
            killed = known[endings.KILLED_UNCOUNTED]
            return _Chosen(signature=killed, confidence=said.confidence, candidate=said)
        return _Chosen(signature=known[end.cause], confidence=end.confidence)
    weak = root or cascade
    # It failed, or nothing shows that it went on, and this is all that was seen.
    if weak is not None and (
        end.status is not None or (weak.statement.fatal is None and not weak.generic)
    ):
        return _Chosen(signature=weak.signature, confidence=weak.confidence, candidate=weak)
    if end.cause is not None:
        return _Chosen(signature=known[end.cause], confidence=end.confidence)
    return _Chosen(signature=known[endings.UNKNOWN], confidence=0.0)


def _because_of_a_leak(facts: Facts, chosen: _Chosen) -> _Chosen:
    """Return the leak that was traced as the cause, where memory ran out; else what was chosen."""
    if "memory" not in chosen.signature.family:
        return chosen
    for kind in ("leak", "memory_trend"):
        for event in reversed(facts.events):
            named = event.data.get("signature")
            leak = (
                all_signatures().get(named)
                if event.kind == kind and isinstance(named, str)
                else None
            )
            # Host memory, or that of a device
            if leak is not None and leak.family == chosen.signature.family:
                return _Chosen(
                    signature=leak, confidence=chosen.confidence - 0.05, candidate=chosen.candidate
                )
    return chosen


def _as_counted(facts: Facts, chosen: _Chosen) -> _Chosen:
    """Return what was chosen, without the kernel where its counter says that it killed nothing
    for memory.
    """
    if chosen.signature.id in _UNCOUNTED and kills_counted(facts.endings) == 0:
        return replace(chosen, signature=all_signatures()[endings.KILLED])
    return chosen


def _explaining(root: Candidate, roots: Sequence[Candidate]) -> Candidate | None:
    """Return the root of the same process that says in detail what this one only repeats."""
    return next(
        (
            replace(each, tier=root.tier)
            for each in roots
            if root.signature.id in each.signature.explains
            and (each.tier < CAUGHT or (each.statement.logged and each.statement.fatal is None))
            and each.statement.rank in (None, root.statement.rank)
        ),
        None,
    )


def _failed_before(root: Candidate | None, began: float) -> bool:
    """Return whether a root ended a process before it was stopped for a hang or on request."""
    if root is None or root.tier > 1 or root.statement.unix_seconds is None:
        return False
    return root.statement.unix_seconds < began


def _ends_badly(*groups: Sequence[Candidate]) -> bool:
    """Return whether something was raised after which nothing went on, although the log says
    that it is done.
    """
    return any(each.tier <= 1 or _tells_of_a_kill(each) for group in groups for each in group)


def _says_lost(root: Candidate) -> bool:
    """Return whether a root says no more than that a process was lost."""
    return root.signature.family in _OF_LOST_PROCESSES and any(
        word in statement.text.lower()
        for statement in root.chain
        for word in (
            "killed",
            "exited unexpectedly",
            "exitcode",
            "sigkill",
            "connection",
            "exit code",
        )
    )


def _says_killed(candidate: Candidate) -> bool:
    """Return whether it says that one process was killed."""
    return (
        candidate.signature.id == endings.KILLED_UNCOUNTED
        or "signal SIGKILL" in candidate.statement.text
    )


def _beats_end(root: Candidate, end: End) -> bool:
    """Return whether a root from a text explains the end better than the status alone."""
    if root.tier == CAUGHT or _followed(root, end):
        return False
    number = end.signal
    if number is None:
        return True
    if root.tier <= 1:
        # What ended the process ended it by an exception: a kill from outside came later, or hit
        # something else.
        return not (number in FROM_OUTSIDE and root.generic)
    if root.signature.id in _NO_CAUSE:
        return end.cause in _NO_CAUSE
    return root.signature.family in _BESIDE_A_SIGNAL or root.statement.kind == "exception"


def _followed(root: Candidate, end: End) -> bool:
    """Return whether a root is a crash or a lost connection of a rank other than that which a
    signal ended first.
    """
    if end.signal not in FROM_OUTSIDE or end.first_rank is None:
        return False
    return (
        root.signature.family in ("crash", "distributed") and root.statement.rank != end.first_rank
    )


def _adjusted(candidate: Candidate, end: End, group: Sequence[Candidate]) -> float:
    """Return a confidence, lower where something contradicts."""
    from_outside = end.signal in FROM_OUTSIDE and candidate.signature.family not in _BESIDE_A_SIGNAL
    rivals = any(
        other.tier <= candidate.tier
        and other.signature.id != candidate.signature.id
        and other.signature.family != candidate.signature.family
        and not other.generic
        for other in group
    )
    return candidate.confidence - (0.15 if from_outside else 0.0) - (0.1 if rivals else 0.0)


def _runner_up(
    chosen: _Chosen, end: End, candidates: Sequence[Candidate], facts: Facts
) -> tuple[str, str, float] | None:
    """Return the next likely cause: id, title and confidence; None if nothing is worth a line."""
    if end.well:
        return None
    left = 1.0 - chosen.confidence
    found = [
        (each.signature, each.confidence * 0.5)
        for each in candidates
        if each is not chosen.candidate
    ]
    if chosen.candidate is not None:
        found += [(each, left * 0.5) for each in chosen.candidate.also]
        if chosen.signature.id == endings.KILLED_UNCOUNTED:  # a person is as likely
            found.append((all_signatures()[endings.KILLED], left))
    if chosen.signature.id == endings.KILLED and kills_counted(facts.endings) is None:
        found.append((all_signatures()[endings.KILLED_UNCOUNTED], left))
    if (
        any("NVRM: Xid" in each.text for each in facts.statements)
        and chosen.signature.family != "hardware"
    ):
        found.append((all_signatures()[endings.XID], left * 0.95))
    # Printed before an exception of the user's code.
    if facts.lost is not None and facts.lost.exploded and chosen.signature.family != "numerics":
        found.append((all_signatures()[endings.TRAINING_LOST], left * 0.9))
    if end.cause is not None and end.cause != endings.STATUS_ONLY:
        found.append((all_signatures()[end.cause], end.confidence * 0.5))
    others = [
        (each.id, each.title, round(min(sure, left), 2))
        for each, sure in found
        if each.id != chosen.signature.id
    ]
    likely = max(others, key=lambda each: each[2], default=None)
    return likely if likely is not None and likely[2] >= _LEAST_SHOWN else None

"""Find problems in a run that ended with status 0, such as a loss that did not fall.

Status 0 means only that the command completed, not that the model learned. The verdict is "ended
well" without qualification only if none of the `RULES` finds a problem.

`choosing` picks the causes of failures. `doubts` decides whether a status of 0 can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from holdfast.core.events.event import Event
from holdfast.core.text import capitalized
from holdfast.explain import observations
from holdfast.explain.evidence import Evidence
from holdfast.explain.exhibits import (
    exhibit_of_leak,
    exhibit_of_memory_trend,
    exhibit_of_repetition,
    growth_text,
)
from holdfast.explain.signatures import UNJUDGED, all_signatures, ids
from holdfast.explain.signatures.signature import Signature
from holdfast.explain.verdict import Exhibit


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A problem in a run that ended with status 0.

    Attributes:
        id: The id of the problem's signature.
        title: A short description of the problem with numbers, used as the verdict's title.
        sentence: A sentence about the problem for the verdict's summary.
        exhibits: The evidence for the problem.
    """

    id: str
    title: str
    sentence: str
    exhibits: tuple[Exhibit, ...] = ()

    @property
    def signature(self) -> Signature:
        """Return the problem's signature with the title of this shortfall.

        The family is "ended well", because the run did not fail.
        """
        signature = UNJUDGED if self.id == UNJUDGED.id else all_signatures()[self.id]
        return replace(signature, title=self.title, family="ended well")


def find_shortfalls(evidence: Evidence) -> list[Shortfall]:
    """Return the problems in a run that ended with status 0, with the most important one first."""
    candidates = (rule(evidence) for rule in RULES)
    return [shortfall for shortfall in candidates if shortfall is not None]


def loss_diverged(evidence: Evidence) -> Shortfall | None:
    """Report a loss that ended far above its first values.

    An exploded loss is not a shortfall but a failure (H1617).
    """
    if evidence.divergence is None or evidence.divergence.exploded:
        return None
    clause = evidence.divergence.clause()
    return Shortfall(id=ids.NOT_LEARNED, title=f"finished, but {clause}", sentence=f"But {clause}.")


def loss_did_not_fall(evidence: Evidence) -> Shortfall | None:
    """Report a loss that did not fall, or that rose a thousandfold during the run."""
    learning = evidence.learning
    if learning is None or learning.outcome not in ("flat", "spiked"):
        return None
    clause = learning.clause()
    return Shortfall(
        id=ids.NOT_LEARNED,
        title=f"finished, but {clause}",
        sentence=f"But {clause}.",
        exhibits=(Exhibit(text=clause, source="recorded steps"),),
    )


def repeated_steps_differed(evidence: Evidence) -> Shortfall | None:
    """Report steps that gave other bits when a Guard repeated them."""
    repetitions = observations.differing_repetitions(evidence)
    if repetitions is None:
        return None
    clause = repetitions.clause()
    return Shortfall(
        id=ids.REPEATED_DIFFERENTLY,
        title=f"finished, but {clause}",
        sentence=f"But {clause} [H504].",
        exhibits=(exhibit_of_repetition(repetitions.first),),
    )


def memory_grew(evidence: Evidence) -> Shortfall | None:
    """Report memory that was still growing steadily when the run ended, or that leaked."""
    leak = observations.newest_leak(evidence)
    trend = observations.newest_memory_trend(evidence)
    # Prefer a traced leak, which explains why memory grew. A trend only says how fast it grew.
    event = leak or trend
    if event is None:
        return None
    cause = event.data.get("signature")
    if not isinstance(cause, str) or cause not in all_signatures():
        cause = ids.MEMORY_GREW
    sentence = f"But {event.data.get('what', 'host')} memory grew from step to step."
    if leak is not None:
        sentence = _sentence_about_leak(leak)
    if trend is not None:
        title = _title_about_trend(trend)
        exhibit = exhibit_of_memory_trend(trend)
    else:
        title = "finished, but memory leaked"
        exhibit = exhibit_of_leak(event)
    return Shortfall(id=cause, title=title, sentence=sentence, exhibits=(exhibit,))


def _sentence_about_leak(leak: Event) -> str:
    place = observations.leak_place(leak)
    where = f" at {place}" if place else ""
    return f"But memory leaked: {leak.data.get('what', 'objects')} are kept alive{where}."


def _title_about_trend(trend: Event) -> str:
    kind = "memory"
    if trend.data.get("what") == "device":
        kind = "device memory"
    title = f"finished, but its {kind} grew until the end"
    if isinstance(trend.data["bytes_per_step"], (int, float)):
        title += f", by {growth_text(trend)}"
    return title


def was_slow(evidence: Evidence) -> Shortfall | None:
    """Report the cause that made the run slow, such as waiting for the loader."""
    problems = [finding for finding in evidence.speed if finding.is_problem]
    if not problems:
        return None
    finding = problems[0]
    return Shortfall(
        id=finding.rule,
        title=f"finished, but {finding.title}",
        sentence=f"But {finding.title} ({finding.cause}).",
        exhibits=(Exhibit(text=finding.evidence, source="recorded times"),),
    )


def learning_was_not_judged(evidence: Evidence) -> Shortfall | None:
    """Report that the loss does not show whether the model learned."""
    learning = evidence.learning
    if learning is None or learning.outcome not in ("unclear", "rose"):
        return None
    title = UNJUDGED.title
    reason = learning.clause()
    if learning.outcome == "rose":
        title = f"finished, and {reason}; learning was not judged"
        reason += ". A changing objective or a learning rate that is too high can cause this"
    return Shortfall(
        id=ids.NOT_JUDGED,
        title=title,
        sentence=f"holdfast could not judge whether the model learned: {reason}.",
    )


# The most important rule comes first, because the title of the first shortfall becomes the title of
# the verdict.
RULES: tuple[Callable[[Evidence], Shortfall | None], ...] = (
    loss_diverged,
    loss_did_not_fall,
    repeated_steps_differed,
    memory_grew,
    was_slow,
    learning_was_not_judged,
)


def sentences(evidence: Evidence) -> Iterator[str]:
    """Yield sentences for the summary: one per shortfall, and one for a loss that fell."""
    for shortfall in find_shortfalls(evidence):
        yield shortfall.sentence
    if evidence.learning is not None and evidence.learning.outcome == "fell":
        yield f"{capitalized(evidence.learning.clause())}."


def exhibits(evidence: Evidence) -> Iterator[Exhibit]:
    """Yield the evidence for all shortfalls."""
    for shortfall in find_shortfalls(evidence):
        yield from shortfall.exhibits

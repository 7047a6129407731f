"""Find what is wrong with a run that ended with status 0.

Status 0 only says that the command came to its end, not that the run learned. The verdict is "ended
well" only if the loss fell and none of the `RULES` applies.

Does not: choose between causes of a failure (see ``judging``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from holdfast.core.text import duration, size
from holdfast.explain import remarks
from holdfast.explain.evidence import Facts
from holdfast.explain.runtime_causes import exhibit_of_leak, exhibit_of_trend
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import UNJUDGED, all_signatures, endings
from holdfast.explain.verdict import Exhibit

# A run may wait for its loader for this share of the time of its steps.
_MOST_WAITING = 0.5
# The confidence in facts that were measured: loss, time and memory.
_SURE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """One thing that is wrong with a run that ended with status 0.

    Attributes:
        id: The id of its signature.
        title: A short description with the numbers.
        sentence: The same for the summary of the verdict; empty if the summary says it elsewhere.
        confidence: The confidence of the verdict, from 0 to 1.
        exhibits: The evidence.
    """

    id: str
    title: str
    sentence: str = ""
    confidence: float = _SURE
    exhibits: tuple[Exhibit, ...] = ()

    @property
    def signature(self) -> Signature:
        """Return its entry of the catalogue, with this title and the family of ends that are no
        failures.
        """
        signature = UNJUDGED if self.id == UNJUDGED.id else all_signatures()[self.id]
        return replace(signature, title=self.title, family="ended well")


def shortfalls(facts: Facts) -> list[Shortfall]:
    """Return everything that is wrong with a run that ended with status 0, the most important
    first.
    """
    candidates = (rule(facts) for rule in RULES)
    return [shortfall for shortfall in candidates if shortfall is not None]


def loss_diverged(facts: Facts) -> Shortfall | None:
    """The loss ended far above where it began. One that exploded is a failure instead (H1617)."""
    if facts.lost is None or facts.lost.exploded:
        return None
    sentence = facts.lost.sentence()
    return Shortfall(
        id=endings.NOT_LEARNED, title=f"finished, but {sentence}", sentence=f"But {sentence}."
    )


def loss_did_not_fall(facts: Facts) -> Shortfall | None:
    """The loss is no lower at the end, or it rose a thousandfold on the way."""
    learning = facts.learning
    if learning is None or learning.outcome not in ("flat", "spiked"):
        return None
    sentence = learning.sentence()
    return Shortfall(
        id=endings.NOT_LEARNED,
        title=f"finished, but {sentence}",
        sentence=f"But {sentence}.",
        exhibits=(Exhibit(text=sentence, source="recorded steps"),),
    )


def memory_grew(facts: Facts) -> Shortfall | None:
    """Memory was still growing at a steady pace when the run ended."""
    leak = remarks.newest_leak(facts)
    trend = remarks.newest_trend(facts)
    event = leak or trend
    if event is None:
        return None
    named = event.data.get("signature")
    cause = named if isinstance(named, str) and named in all_signatures() else endings.MEMORY_GREW
    if trend is None:
        return Shortfall(
            id=cause, title="finished, but memory leaks", exhibits=(exhibit_of_leak(event),)
        )
    grows = trend.data["bytes_per_step"]
    pace = f", by {size(grows)} a step" if isinstance(grows, (int, float)) else ""
    kind = "memory of the device" if trend.data.get("what") == "device" else "memory"
    title = f"finished, but its {kind} grew until the end{pace}"
    return Shortfall(id=cause, title=title, exhibits=(exhibit_of_trend(trend),))


def waited_for_loader(facts: Facts) -> Shortfall | None:
    """The steps spent most of their time waiting for batches."""
    wait = facts.loader_wait
    if wait is None or wait.share < _MOST_WAITING:
        return None
    words = f"{wait.share:.0%} of the time of its steps went into waiting for the loader"
    text = f"{words}: {duration(wait.seconds)} in {wait.steps:,} steps"
    return Shortfall(
        id=endings.WAITED_FOR_LOADER,
        title=f"finished, but {words}",
        sentence=f"But {words}.",
        exhibits=(Exhibit(text=text, source="recorded steps"),),
    )


def learning_was_not_judged(facts: Facts) -> Shortfall | None:
    """The loss does not show whether the run learned."""
    learning = facts.learning
    if learning is None or learning.outcome not in ("unclear", "rose"):
        return None
    title = UNJUDGED.title
    reason = learning.sentence()
    if learning.outcome == "rose":
        title = f"finished, and {reason}; learning was not judged"
        reason += (
            ", which an objective that changes can explain, and a learning rate that is too high"
        )
    return Shortfall(
        id=endings.NOT_JUDGED,
        title=title,
        sentence=f"Whether it learned was not judged: {reason}.",
        confidence=0.0,
    )


# In the order of importance: the title of the first shortfall becomes the title of the verdict.
RULES: tuple[Callable[[Facts], Shortfall | None], ...] = (
    loss_diverged,
    loss_did_not_fall,
    memory_grew,
    waited_for_loader,
    learning_was_not_judged,
)


def sentences(facts: Facts) -> Iterator[str]:
    """Yield the sentences of the summary about the shortfalls, or about the loss if it fell."""
    for shortfall in shortfalls(facts):
        if shortfall.sentence:
            yield shortfall.sentence
    if facts.learning is not None and facts.learning.outcome == "fell":
        sentence = facts.learning.sentence()
        yield f"{sentence[:1].upper()}{sentence[1:]}."


def exhibits(facts: Facts) -> Iterator[Exhibit]:
    """Yield the evidence for all shortfalls."""
    for shortfall in shortfalls(facts):
        yield from shortfall.exhibits

"""Hold the attempts of a trial against the undisturbed run: where each went on, and where it first was another one.

The number of a step is not read from the training, which may count as it likes. An attempt is aligned by the digest
of its weights before its first step; where no state of the undisturbed run has these weights, by the state whose
numbers are the nearest; where none is near, by its first batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.chaos.trials import Line, Segment, Trial

_NEAR = 0.03
"""Relative distance of numbers up to which weights are called rounded: bfloat16 rounds by 0.4 %, fp8 by some %."""
_SOME = 1e-7
_STATE = ("weights", "buffers")
_WORDS = {
    "settings": "the learning rate or another setting of the optimizer differs",
    "scale": "the loss scale of the gradient scaler differs",
    "parts": "the step is made of another number of batches",
    "batch": "the loader gives another batch",
    "random": "the random state differs",
    "inputs": "the model gets other inputs",
    "losses": "the loss differs",
    "weights": "the weights differ after it, although all that was seen before is the same",
    "buffers": "the buffers differ after it, although all that was seen before is the same",
}
"""What is compared of a step, in the order of cause and effect."""
_AT_START = {
    "buffers": "the buffers, such as statistics of BatchNorm, differ",
    "optimizer": "the state of the optimizer differs",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step of a run that is another one than in the undisturbed run, from 1, and in what."""

    step: int
    what: str  # a key of `_WORDS`, or ``saved``, ``end``, ``older``
    detail: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.detail}"


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What a trial came to, against the undisturbed run."""

    differences: list[Difference] = field(default_factory=list)
    steps_again: int = 0
    batches_twice: int = 0
    batches_never: int = 0
    resumed_at: list[int] = field(default_factory=list)  # steps after which attempts went on, from the second one
    finite: bool = True


class Reference:
    """The undisturbed run of one rank; `unsteady` are fields and saved entries that differ between two of them."""

    def __init__(self, segment: Segment, unsteady: Iterable[str] = ()) -> None:
        self.segment, self.steps, self.unsteady = segment, segment.steps, set(unsteady)
        saved = {line["step"]: line["optimizers"] for line in segment.lines if line["kind"] == "save"}
        self._states = [state_before(self.steps, at, saved.get(at, [])) for at in range(len(self.steps) + 1)]

    def place_of(self, segment: Segment, reached: int) -> tuple[int, Difference | None]:
        """Return after how many steps a segment goes on, and what its weights differ in, if they do."""
        first, count = segment.steps[0], len(self.steps)
        start = first["before"] or {}
        same = [at for at, state in enumerate(self._states) if state.get("weights") == start.get("weights")]
        if same := [at for at in same if at < count] or same:
            alike = {at: sum(self._states[at].get(name) == start.get(name) for name in _AT_START) for at in same}
            return max(same, key=lambda at: (alike[at], at <= reached, at)), None
        far, place = min((_distance(state, start), at) for at, state in enumerate(self._states[:count]))
        detail = "the weights at the start are none that the undisturbed run ever had"
        if far < _NEAR:
            how = f"they differ by {far:.1g} (relative); rounded?" if far > _SOME else "some differ"
            detail = f"the weights at the start are nearly those after step {place}, but not the same: {how}"
        else:
            place = max((at for at in range(min(reached + 1, count)) if _alike(self.steps[at], first)), default=0)
        return place, Difference(place + 1, "weights", detail)

    def first_difference(self, segment: Segment, place: int) -> Difference | None:
        """Return the first step in which a segment that goes on after `place` steps is another one."""
        start, expected = segment.steps[0]["before"] or {}, self._states[place]
        pairs = [
            ("buffers", *pair) for pair in zip(start.get("buffers", []), expected.get("buffers", []), strict=False)
        ]
        for what, one, two in [*pairs, ("optimizer", start.get("optimizer"), expected.get("optimizer"))]:
            if one and two and one != two:  # none: not known
                return Difference(place + 1, what, f"{_AT_START[what]} at the start of the attempt")
        for index, step in enumerate(segment.steps, place):
            if index >= len(self.steps):
                return Difference(index + 1, "end", f"the undisturbed run had ended after {len(self.steps)} steps")
            if index == place and _is_rest(step, self.steps[index]):
                continue
            found = [name for name in _WORDS if self._of(name, step) != self._of(name, self.steps[index])]
            found = [name for name in found if name not in self.unsteady]
            if found and found != ["random"]:  # random numbers that nothing is made of
                return Difference(index + 1, found[0], self._detail(found[0], step, self.steps[index]))
        return None

    def _of(self, name: str, step: Line) -> object:
        value = step[name]
        return {key: each for key, each in value.items() if key not in self.unsteady} if name == "random" else value

    def _detail(self, what: str, step: Line, expected: Line) -> str:
        if what in ("settings", "scale", "parts", "losses"):
            return f"{_WORDS[what]}: {step[what]} instead of {expected[what]}"
        if what == "random":
            names = [name for name, value in step[what].items() if expected[what].get(name) != value]
            return f"the random state of {' and '.join(set(names) - self.unsteady)} differs"
        if what == "batch":
            seen = next((at for at, each in enumerate(self.steps) if _alike(each, step)), None)
            return f"{_WORDS[what]}: {'one that it never saw' if seen is None else f'that of step {seen + 1}'}"
        return _WORDS[what]

    def saved_difference(self, segments: Sequence[Segment]) -> Difference | None:
        """Return what the last save into a file holds else than that of the undisturbed run, of steady entries."""
        theirs, ours = _last_saves([self.segment]), _last_saves(segments)
        for name, entries in theirs.items():
            other, is_last = ours.get(name), name == list(theirs)[-1]
            if other is None and is_last and ours:
                if name not in self.unsteady:
                    return Difference(len(self.steps), "saved", f"the last save, {name}, was never written")
                other = list(ours.values())[-1]  # a name that is another each time
            if other is None:
                continue
            for key, value in entries.items():
                if key not in self.unsteady and not _is_random(key) and other.get(key) != value:
                    short = f": {other.get(key)} instead of {value}" if len(value) < 16 else ""
                    where = f"the last save into {name} differs in {key!r}{short}"
                    return Difference(len(self.steps), "saved", where)
        return None


def _distance(state: Line, other: Line) -> float:
    ours, theirs = state.get("numbers", []), other.get("numbers", [])
    far = math.dist(ours, theirs) / (math.hypot(*ours) or 1.0) if ours and len(ours) == len(theirs) else math.inf
    return math.inf if math.isnan(far) else far


def _alike(step: Line, other: Line) -> bool:
    return any(each is not None and each in step[name] for name in ("batch", "inputs") for each in other[name])


def _last_saves(segments: Sequence[Segment]) -> dict[str, dict[str, str]]:
    """Return the entries of the last save into each file, by its name, the newest save last."""
    found: dict[str, dict[str, str]] = {}
    lines = (line for segment in segments for line in segment.lines)
    for line in (each for each in lines if each["kind"] == "save" and each["entries"]):
        name = str(line["path"] or "").rpartition("/")[2]
        found.pop(name, None)
        found[name] = line["entries"]
    return found


def _is_random(key: str) -> bool:
    return any(word in key.lower() for word in ("rng", "random", "generator"))


def state_before(steps: Sequence[Line], index: int, saved: Sequence[str | None]) -> Line:
    """Return the digests of the state before a step: of the weights that it holds, and of its optimizer, if saved.

    Other optimizers may hold the same weights, and have stepped since. At the end: those after the last step.
    """
    step, before = steps[min(index, len(steps) - 1)], steps[:index]
    if index < len(steps) and step["before"]:
        return dict(step["before"])
    newest: Line = next((each for each in reversed(before) if each["holds"] == step["holds"]), {})
    return {**newest, "optimizer": saved[step["which"]] if len(saved) > step["which"] else None}


def _is_rest(step: Line, expected: Line) -> bool:
    """Return whether a step was begun before the attempt, with batches that left nothing: those of skipped steps."""
    count = len(step["inputs"])
    same = all(step[name] == expected[name] for name in _STATE) and step["parts"] < expected["parts"]
    return same and all(step[name] == expected[name][-count:] for name in ("batch", "inputs"))


def unsteady_fields(first: Segment, second: Segment) -> tuple[Difference | None, set[str]]:
    """Compare two undisturbed runs: their first difference; random states, saved entries and names that differ."""
    one, two = _last_saves([first]), _last_saves([second])
    pairs = [(one[name], two[name]) for name in one if name in two]
    if one and two:
        pairs.append((list(one.values())[-1], list(two.values())[-1]))
    unsteady = {key for a, b in pairs for key in a if a[key] != b.get(key)} | (one.keys() ^ two.keys())
    pairs = [(a["random"], b["random"]) for a, b in zip(first.steps, second.steps, strict=False)]
    unsteady |= {name for a, b in pairs for name in a if a[name] != b.get(name)}
    reference = Reference(first, unsteady - _WORDS.keys())
    difference = reference.place_of(second, 0)[1] or reference.first_difference(second, 0)
    if difference is None and len(first.steps) != len(second.steps):
        difference = Difference(min(len(first.steps), len(second.steps)) + 1, "end", "only one of them makes it")
    return difference, reference.unsteady


def _compare(reference: Reference, segments: Sequence[Segment]) -> Comparison:
    """Compare all attempts of one rank with the undisturbed run."""
    found, expected = Comparison(), reference.steps
    kept: list[Line] = []  # the steps that lead to the weights at the end
    saved: dict[int, set[tuple[str, ...]]] = {}  # whole, and a step before the end: after how many steps, what
    for number, segment in enumerate(segments):
        place, other = reference.place_of(segment, len(kept))
        if number:
            found.resumed_at.append(place)
            found.steps_again += max(0, len(kept) - place)
            newest = max((at for at, what in saved.items() if not place or what & saved.get(place, set())), default=0)
            if newest > place:  # of the same entries: a file of the best weights is none to go on from
                where = f"after step {place}" if place else "from the beginning"
                detail = f"it goes on {where}, although step {newest} was saved"
                found.differences.append(Difference(place + 1, "older", detail))
        found.differences += filter(None, [other or reference.first_difference(segment, place)])
        for line in segment.lines:
            if line["kind"] == "save" and line["step"] < len(segment.steps):
                saved.setdefault(place + line["step"], set()).add(tuple(line["entries"]))
        rest = place < len(expected) and _is_rest(segment.steps[0], expected[place])
        kept = [*kept[:place], expected[place] if rest else segment.steps[0], *segment.steps[1:]]
    differs = any(each.what != "older" for each in found.differences)
    if not differs and len(kept) != len(expected):
        detail = f"{len(kept)} steps lead to the end, not {len(expected)}"
        found.differences.append(Difference(min(len(kept), len(expected)) + 1, "end", detail))
    elif not differs:
        found.differences += filter(None, [reference.saved_difference(segments)])
    theirs, ours = (Counter(one for step in steps for one in step["batch"]) for steps in (expected, kept))
    found.batches_twice, found.batches_never = (ours - theirs).total(), (theirs - ours).total()
    found.finite = all(map(math.isfinite, map(float, [*kept[-1]["losses"], *kept[-1]["numbers"]])))
    return found


def compare(references: dict[int, Reference], trial: Trial) -> Comparison:
    """Compare every rank, and return what the first of them that differs came to, else that of the first."""
    ranks = trial.ranks()
    found = [_compare(reference, ranks[rank]) for rank, reference in references.items() if rank in ranks]
    return next((each for each in found if each.differences), found[0] if found else Comparison(finite=False))

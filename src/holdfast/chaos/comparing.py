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
from typing import Any

from holdfast.chaos.trials import Line, Segment, Trial

_NEAR = 0.03
"""Relative distance of numbers up to which weights are called rounded: bfloat16 rounds by 0.4 %, fp8 by some %."""
_SOME = 1e-7
_WORDS = {
    "settings": "the learning rate or another setting of the optimizer differs",
    "scale": "the loss scale of the gradient scaler differs",
    "parts": "the step is made of another number of batches",
    "batch": "the loader gives another batch",
    "inputs": "the model gets other inputs",
    "random": "the random state differs",
    "losses": "the loss differs",
    "weights": "the weights differ",
    "buffers": "the buffers differ, such as statistics of BatchNorm",
    "optimizer": "the state of the optimizer differs",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step of a run that is another one than in the undisturbed run, from 1, and in what."""

    step: int
    what: str  # a key of `_WORDS`, or ``saved``, ``end``, ``older``
    detail: str

    def sentence(self) -> str:
        """Return it as a sentence without its end."""
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
    """The undisturbed run of one rank; `unsteady` are fields that differ between two of them."""

    def __init__(self, segment: Segment, unsteady: Iterable[str] = (), unsaved: Iterable[str] = ()) -> None:
        self.segment, self.steps = segment, segment.steps
        self.unsteady, self._unsaved = set(unsteady), set(unsaved)
        self.before: dict[str, list[int]] = {}
        for index in range(len(self.steps) + 1):
            self.before.setdefault(self.state(index).get("weights", ""), []).append(index)
        self.batches: dict[str, list[int]] = {}
        for index, step in enumerate(self.steps):
            for batch in _batches(step):
                self.batches.setdefault(batch, []).append(index)

    def state(self, index: int) -> Line:
        """Return the digests of the state before a step of this index."""
        return state_before(self.steps, index)

    def place_of(self, segment: Segment, reached: int) -> tuple[int, Difference | None]:
        """Return after how many steps a segment goes on, and what its weights differ in, if they do."""
        first, start = segment.steps[0], segment.steps[0]["before"] or {}
        found = self.before.get(start.get("weights", ""), [])
        found = [index for index in found if index < len(self.steps)] or found
        if found:

            def alike(index: int) -> tuple[int, bool, int]:
                state = self.state(index)
                same = sum(state.get(key) == start.get(key) for key in ("optimizer", "buffers"))
                return same, index <= reached, index

            return max(found, key=alike), None
        nearest, distance = self._nearest(start.get("numbers", []))
        by_batch = [index for batch in _batches(first) for index in self.batches.get(batch, ()) if index <= reached]
        if distance < _NEAR:
            place = nearest
            far = f"they differ by {distance:.1g} (relative); rounded?" if distance > _SOME else "some differ"
            detail = f"the weights at the start are nearly those after step {place}, but not the same: {far}"
        else:
            place = max(by_batch, default=0)
            detail = "the weights at the start are none that the undisturbed run ever had"
        return place, Difference(place + 1, "weights", detail)

    def _nearest(self, numbers: Sequence[float]) -> tuple[int, float]:
        best, least = 0, math.inf
        for index in range(len(self.steps)):
            theirs = self.state(index).get("numbers", [])
            if len(theirs) == len(numbers) and numbers:
                distance = math.dist(theirs, numbers) / (math.hypot(*theirs) or 1.0)
                best, least = (index, distance) if distance < least else (best, least)
        return best, least

    def first_difference(self, segment: Segment, place: int) -> Difference | None:
        """Return the first step in which a segment that goes on after `place` steps is another one."""
        start, expected = segment.steps[0]["before"] or {}, self.state(place)
        known = [
            pair for pair in zip(start.get("buffers", []), expected.get("buffers", []), strict=False) if all(pair)
        ]
        differs = {
            "buffers": any(a != b for a, b in known),
            "optimizer": start.get("optimizer") != expected.get("optimizer"),
        }
        for what in (each for each in differs if differs[each] and each not in self.unsteady):
            return Difference(place + 1, what, f"{_WORDS[what]} at the start of the attempt")
        for index, step in enumerate(segment.steps, place):
            if index == place < len(self.steps) and _is_rest(step, self.steps[index]):
                continue
            if index >= len(self.steps):
                return Difference(index + 1, "end", f"the undisturbed run had ended after {len(self.steps)} steps")
            found = [each for each in self._differing(step, self.steps[index]) if each not in self.unsteady]
            if found:
                return Difference(index + 1, found[0], self._detail(found[0], step, index))
        return None

    def _random(self, step: Line) -> dict[str, str]:
        return {name: value for name, value in (step["random"] or {}).items() if name not in self.unsteady}

    def _differing(self, step: Line, expected: Line) -> list[str]:
        found = [name for name in ("settings", "scale") if step[name] != expected[name]]
        ours, theirs = step["inputs"], expected["inputs"]
        if len(ours) != len(theirs):
            found.append("parts")
        loads = [[each[0] for each in pairs] for pairs in (ours, theirs)]
        enters = [[each[1] for each in pairs] for pairs in (ours, theirs)]
        found += ["batch"] if loads[0] != loads[1] else []
        found += ["inputs"] if enters[0] != enters[1] and loads[0] == loads[1] else []
        # Equal losses of a resumed run and NaN: as text.
        follows = repr(step["losses"]) != repr(expected["losses"])
        follows |= any(step["after"][name] != expected["after"][name] for name in ("weights", "buffers", "optimizer"))
        if follows and self._random(step) != self._random(expected):
            found.insert(found.index("inputs") if "inputs" in found else len(found), "random")
        found += ["losses"] if repr(step["losses"]) != repr(expected["losses"]) else []
        found += [
            name for name in ("weights", "buffers", "optimizer") if step["after"][name] != expected["after"][name]
        ]
        return found

    def _detail(self, what: str, step: Line, index: int) -> str:
        expected = self.steps[index]
        if what == "settings":
            pair = next((a, b) for a, b in zip(step[what], expected[what], strict=False) if a != b)
            return f"{_WORDS[what]}: {', '.join(pair[0])} instead of {', '.join(pair[1])}"
        if what == "scale":
            return f"{_WORDS[what]}: {step[what]} instead of {expected[what]}"
        if what == "parts":
            return f"{_WORDS[what]}: {len(step['inputs'])} instead of {len(expected['inputs'])}"
        if what == "losses":
            return f"{_WORDS[what]}: {step[what]} instead of {expected[what]}"
        if what == "random":
            names = [name for name, value in self._random(step).items() if expected[what].get(name) != value]
            return f"the random state of {' and '.join(names)} differs"
        if what == "batch":
            seen = next((at for batch in _batches(step) for at in self.batches.get(batch, ())), None)
            known = "one that the undisturbed run never saw" if seen is None else f"that of step {seen + 1}"
            return f"{_WORDS[what]}: {known}"
        if what == "inputs":
            return f"{_WORDS[what]}{', from the same batch of the loader' if step[what][0][0] else ''}"
        return f"{_WORDS[what]} after it, although all that was seen before is the same"

    def saved_difference(self, segments: Sequence[Segment]) -> Difference | None:
        """Return what the last save into a file holds else than that of the undisturbed run, of steady entries."""
        theirs, ours = last_saves([self.segment]), last_saves(segments)
        for name, entries in theirs.items():
            if name not in ours:
                if name == list(theirs)[-1] and ours:
                    return Difference(len(self.steps), "saved", f"the last save, {name}, was never written")
                continue
            for key, value in entries.items():
                if key not in self._unsaved and not _is_random(key) and ours[name].get(key) != value:
                    short = f": {ours[name].get(key)} instead of {value}" if len(value) < 16 else ""
                    return Difference(
                        len(self.steps), "saved", f"what is saved last in {name} differs in {key!r}{short}"
                    )
        return None


def last_saves(segments: Sequence[Segment]) -> dict[str, dict[str, str]]:
    """Return the entries of the last save into each file, by its name, the newest save last."""
    found: dict[str, dict[str, str]] = {}
    for line in (
        line for segment in segments for line in segment.lines if line["kind"] == "save" and line["entries"]
    ):
        found.pop(_name(line), None)
        found[_name(line)] = line["entries"]
    return found


def _name(line: Line) -> str:
    return str(line["path"] or "").rpartition("/")[2]


def _is_random(key: str) -> bool:
    return any(word in key.lower() for word in ("rng", "random", "generator"))


def state_before(steps: Sequence[Line], index: int) -> Line:
    """Return the digests of the state before a step: of its optimizer, and of the weights that it holds.

    Other optimizers may hold the same weights, and have stepped since. At the end: those after the last step.
    """
    step = steps[min(index, len(steps) - 1)]
    if index < len(steps) and step["before"]:
        return dict(step["before"])
    before = steps[:index]
    own: Line = next((each["after"] for each in reversed(before) if each["which"] == step["which"]), {})
    newest: Line = next(
        (each["after"] for each in reversed(before) if each["after"]["holds"] == step["after"]["holds"]), {}
    )
    return {**newest, "optimizer": own.get("optimizer")}


def _is_rest(step: Line, expected: Line) -> bool:
    """Return whether a step was begun before the attempt, with batches that left nothing: those of skipped steps."""
    ours, theirs = step["inputs"], expected["inputs"]
    same = all(step["after"][name] == expected["after"][name] for name in ("weights", "buffers", "optimizer"))
    return same and 0 < len(ours) < len(theirs) and ours == theirs[-len(ours) :]


def _batches(step: Line) -> list[str]:
    return [each for pair in step["inputs"] if (each := pair[0] or pair[1]) is not None]


def unsteady_fields(first: Segment, second: Segment) -> tuple[Difference | None, set[str], set[str]]:
    """Compare two undisturbed runs: their first difference, fields and saved entries that cannot be compared."""
    reference = Reference(first)
    pairs = [(one["random"] or {}, two["random"] or {}) for one, two in zip(first.steps, second.steps, strict=False)]
    fields = {name for one, two in pairs for name in one if one[name] != two.get(name)}
    reference.unsteady = fields
    place, other = reference.place_of(second, 0)
    difference = other or (Difference(1, "weights", "the weights before it differ") if place else None)
    difference = difference or reference.first_difference(second, 0)
    if difference is None and len(first.steps) != len(second.steps):
        difference = Difference(min(len(first.steps), len(second.steps)) + 1, "end", "only one of them makes it")
    one, two = last_saves([first]), last_saves([second])
    unsaved = {key for name in one for key in one[name] if one[name][key] != two.get(name, {}).get(key)}
    return difference, fields, unsaved


def compare(reference: Reference, segments: Sequence[Segment]) -> Comparison:
    """Compare all attempts of one rank with the undisturbed run."""
    found = Comparison()
    kept: list[Line] = []  # the steps that lead to the weights at the end
    for number, segment in enumerate(segments):
        place, other = reference.place_of(segment, len(kept))
        if number:
            found.resumed_at.append(place)
            found.steps_again += max(0, len(kept) - place)
            if (older := _older(segments[:number], place, reference)) is not None:
                found.differences.append(older)
        difference = other or reference.first_difference(segment, place)
        if difference is not None:
            found.differences.append(difference)
        whole = place < len(reference.steps) and _is_rest(segment.steps[0], reference.steps[place])
        kept = [*kept[:place], reference.steps[place] if whole else segment.steps[0], *segment.steps[1:]]
    total, wanted = len(kept), len(reference.steps)
    if not found.differences and total != wanted:
        found.differences.append(
            Difference(min(total, wanted) + 1, "end", f"{total} steps lead to the end, not {wanted}")
        )
    if not found.differences and (saved := reference.saved_difference(segments)) is not None:
        found.differences.append(saved)
    expected, got = (
        Counter(batch for step in steps for batch in _batches(step)) for steps in (reference.steps, kept)
    )
    found.batches_twice, found.batches_never = (got - expected).total(), (expected - got).total()
    last = kept[-1] if kept else {"losses": [], "after": {}}
    found.finite = all(map(math.isfinite, [*last["losses"], *last["after"].get("numbers", [])]))
    return found


def _older(before: Sequence[Segment], place: int, reference: Reference) -> Difference | None:
    """Say that an attempt went on from an older state than the newest that was saved, whole and alike, before a step.

    Only states of the same entries count: a file of the best weights is none to go on from.
    """
    newest, base = 0, 0
    kinds: dict[int, set[tuple[str, ...]]] = {}
    for each in before:
        base = reference.place_of(each, base)[0]
        for line in each.lines:
            if line["kind"] == "save" and line["step"] < len(each.steps):
                kinds.setdefault(base + line["step"], set()).add(tuple(line["entries"]))
        base += len(each.steps)
    wanted = kinds.get(place, set())
    for step, kind in kinds.items():
        if step > place and (kind & wanted or not place):
            newest = max(newest, step)
    if newest:
        where = f"after step {place}" if place else "from the beginning"
        return Difference(place + 1, "older", f"it goes on {where}, although step {newest} was saved")
    return None


def trial_comparison(references: dict[int, Reference], trial: Trial) -> Comparison:
    """Compare every rank, and return what the first of them that differs came to, else that of the first."""
    ranks = trial.ranks()
    found = [compare(reference, ranks[rank]) for rank, reference in references.items() if rank in ranks]
    return next((each for each in found if each.differences), found[0] if found else Comparison(finite=False))


def facts(comparison: Comparison) -> dict[str, Any]:
    """Return it as JSON values."""
    return {
        "differences": [{"step": d.step, "what": d.what, "detail": d.detail} for d in comparison.differences],
        "steps_again": comparison.steps_again,
        "batches_twice": comparison.batches_twice,
        "batches_never": comparison.batches_never,
        "resumed_at": comparison.resumed_at,
    }

"""Hold the attempts of a trial against the undisturbed run.

Where each went on, and where it first was another one.

The number of a step is not read from the training, which may count as it likes. An attempt is
aligned by the digest of its weights before its first step; where no state of the undisturbed run
has these weights, by the state whose numbers are the nearest; where none is near, by its first
batch.
"""

from __future__ import annotations

import cmath
import itertools
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from holdfast.chaos.trials import Line, Segment, Trial

_NEAR = 0.03
"""Relative distance of numbers up to which weights are called rounded.

Bfloat16 rounds by 0.4 %, fp8 by some %.
"""
_SOME = 1e-7
_STATE = ("weights", "buffers")
_WORDS = {
    "settings": "the learning rate or another setting of the optimizer differs",
    "scale": "the loss scale of the gradient scaler differs",
    "parts": "the step is made of another number of batches (calls of the model)",
    "batch": "the loader gives another batch",
    "random": "the random state differs",
    "inputs": "the model gets other inputs",
    "losses": "the loss differs, with the same weights and inputs",
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
    """The first step of a run that is another one than in the undisturbed run, from 1, and in
    what.
    """

    step: int
    what: str  # a key of `_WORDS`, or ``saved``, ``text`` (harmless), ``end``, ``older``
    detail: str
    states: Sequence[str] = ()  # random states that differ, if these are what

    def __str__(self) -> str:
        return self.detail if self.what == "saved" else f"step {self.step}: {self.detail}"


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What a trial came to, against the undisturbed run."""

    differences: list[Difference] = field(default_factory=list)
    steps_again: int = 0
    batches_twice: int = 0
    batches_never: int = 0
    # Steps after which attempts went on, from the second one
    resumed_at: list[int] = field(default_factory=list)
    finite: bool = True
    losses: list[float | None] = field(default_factory=list)  # of the steps that lead to the end


class Reference:
    """The undisturbed run of one rank.

    `unsteady` are fields and saved entries that differ between two of them.

    One command may train several times, as a sweep does, or pre-training and fine-tuning:
    `trainings` holds where each begins, and the end.
    """

    def __init__(self, segments: Sequence[Segment], unsteady: Iterable[str] = ()) -> None:
        self.segments, self.unsteady = segments, set(unsteady)
        self.steps: list[Line] = []
        self.trainings = [0]
        self._saved = saved = dict[int, Line]()  # the last save after so many steps
        for part in (part for segment in segments for part in _trainings(segment)):
            saved |= {
                len(self.steps) + line["step"]: line
                for line in part.lines
                if line["kind"] == "save"
            }
            self.steps += part.steps
            self.trainings.append(len(self.steps))
        self._states = [
            state_before(self.steps, at, saved.get(at)) for at in range(len(self.steps) + 1)
        ]

    def without(self, state: str) -> Reference:
        """Return one that does not compare a random state."""
        other = copy(self)
        other.unsteady = self.unsteady | {state}
        return other

    def parts_of(self, segment: Segment) -> list[Segment]:
        """Return what a process did, training by training if there are several."""
        return _trainings(segment) if len(self.trainings) > 2 else [segment]

    def training_of(self, place: int) -> tuple[int, int]:
        """Return where the training begins and ends that goes on after so many steps."""
        at = min(bisect_right(self.trainings, place), len(self.trainings) - 1)
        return self.trainings[at - 1], self.trainings[at]

    def place_of(self, segment: Segment, reached: int) -> tuple[int, Difference | None]:
        """Return after how many steps a segment goes on, and what its weights differ in, if they
        do.
        """
        first, count = segment.steps[0], len(self.steps)
        start = first["before"] or {}
        # Weights may move between steps
        known = [(state.get("weights"), state["begins"]) for state in self._states]
        same = [at for at, digests in enumerate(known) if start.get("weights") in digests]
        if same := [at for at in same if at < count] or same:
            return (
                max(same, key=lambda at: (*self._alike(at, first, start), at <= reached, at)),
                None,
            )
        far, place = min(
            (_distance(state, start), at) for at, state in enumerate(self._states[:count])
        )
        detail = "the weights at the start are none that the undisturbed run ever had"
        if far < _NEAR:
            how = f"they differ by {far:.1g} (relative); rounded?" if far > _SOME else "some differ"
            detail = (
                f"the weights at the start are nearly those after step {place}, but not the same:"
                f" {how}"
            )
        else:
            place = max(
                (at for at in range(min(reached + 1, count)) if _alike(self.steps[at], first)),
                default=0,
            )
        return place, Difference(place + 1, "weights", detail)

    def _alike(self, at: int, first: Line, start: Line) -> tuple[int, int]:
        """Return how well a state, and the step after it, fit a step.

        Weights may be the same after several steps.
        """
        step = self.steps[at] if at < len(self.steps) else {}
        return -len(self._known_to_differ(at, start)), sum(
            first[name] == step.get(name) for name in _WORDS
        )

    def _known_to_differ(self, at: int, start: Line) -> list[str]:
        state = self._states[at]
        pairs = [
            ("buffers", *pair)
            for pair in zip(start.get("buffers", []), state.get("buffers", []), strict=False)
        ]
        pairs.append(("optimizer", start.get("optimizer"), state.get("optimizer")))
        return [what for what, one, two in pairs if one and two and one != two]  # none: not known

    def first_difference(self, segment: Segment, place: int) -> Difference | None:
        """Return the first step in which a segment that goes on after `place` steps is another
        one.
        """
        start = segment.steps[0]["before"] or {}
        for what in self._known_to_differ(place, start):
            detail = f"{_AT_START[what]} at the start of the attempt"
            states = [] if what != "optimizer" else [each.get(what) for each in self._states]
            if at := states.index(start[what]) if start[what] in states else 0:  # at 0 it is new
                detail = (
                    f"weights of step {place}, but the state of the optimizer is that saved after"
                    f" step {at}"
                )
            return Difference(place + 1, what, detail)
        _, end = self.training_of(place)
        # Random states that were those of the undisturbed run at a call of a model
        restored: set[str] = set()
        for index, step in enumerate(segment.steps, place):
            if index >= end:
                return Difference(
                    index + 1, "end", f"the undisturbed run had ended after {end} steps"
                )
            expected = self.steps[index] if index > place else _rest_of(self.steps[index], step)
            restored |= {name for name, _ in _states(step) & _states(expected)}
            effects = [each for each in _WORDS if each != "random" and step[each] != expected[each]]
            effects = [each for each in effects if each not in self.unsteady]
            if not effects:  # random numbers may differ that nothing is made of
                continue
            if effects[0] == "parts":  # a consequence, if the first is none of them
                effects = [
                    w for w in ("batch", "inputs") if not {*step[w][:1]} <= {*expected[w]}
                ] or effects
            if effects[0] in ("parts", "inputs", "losses", *_STATE) and (
                lost := self._lost_beside(segment, place)
            ):
                return replace(lost, step=index + 1)
            theirs, causes = expected["random"], set[str]()
            differ = {name for name in theirs if step["random"].get(name) != theirs[name]}
            differ -= self.unsteady | restored
            if effects[0] == "batch" and index == place:  # any loader draws from torch's
                causes = differ & {"numpy", "python"}
            elif effects[0] in ("parts", "inputs", "losses", *_STATE):
                causes = differ & (self._drawn_before(index) | self._drawn_before(index + 1))
            if names := sorted(causes):
                how = (
                    ", and with it the batch"
                    if effects[0] == "batch"
                    else ", or more is drawn from it"
                )
                detail = f"the random state of {' and '.join(names)} differs{how}"
                return Difference(index + 1, "random", detail, names)
            return Difference(index + 1, effects[0], self._detail(effects[0], step, expected))
        return None

    def _lost_beside(self, segment: Segment, place: int) -> Difference | None:
        """Return in what an optimizer that does not step first goes on with another state than
        was saved.
        """
        states = self._saved[place]["states"] if place in self._saved else []
        steps = zip(segment.steps[1:], self.steps[place + 1 :], strict=False)
        for index, (step, expected) in enumerate(steps, place + 1):
            which, start = expected["which"], step["before"]
            if (
                start
                and step["holds"] == expected["holds"]
                and which < len(states)
                and states[which]
            ):
                for what, words in (
                    ("own", "other weights than were"),
                    ("optimizer", "another state than was"),
                ):
                    if start[what] != states[which][what]:
                        detail = f"the optimizer of step {index + 1} goes on with {words} saved"
                        return Difference(index + 1, what.replace("own", "weights"), detail)
        return None

    def _drawn_before(self, index: int) -> set[str]:
        """Return the random states that are drawn from between the model's call in a step and
        that before.
        """
        if not 0 < index < len(self.steps):
            return set()
        before, state = (self.steps[at]["random"] for at in (index - 1, index))
        return {name for name in state if before.get(name) != state[name]}

    def _detail(self, what: str, step: Line, expected: Line) -> str:
        if what == "settings":
            pairs = zip(step[what].split("; "), expected[what].split("; "), strict=False)
            groups = [f"{ours} instead of {theirs}" for ours, theirs in pairs if ours != theirs]
            return f"{_WORDS[what]}: {'; '.join(groups[:1])} ({len(groups)} groups of parameters)"
        if what in ("scale", "parts", "losses"):
            return f"{_WORDS[what]}: {step[what]} instead of {expected[what]}"
        if what == "batch":
            seen = next((at for at, each in enumerate(self.steps) if _alike(each, step)), None)
            return (
                f"{_WORDS[what]}:"
                f" {'one that it never saw' if seen is None else f'that of step {seen + 1}'}"
            )
        if what == "weights" and "rest" in expected:
            return (
                "the weights differ after it: what its calls before the attempt have left, as"
                " gradients, is lost"
            )
        return _WORDS[what]

    def saved_difference(self, segments: Sequence[Segment]) -> Difference | None:
        """Return what the last save into a file holds else than that of the undisturbed run, of
        steady entries.
        """
        theirs, ours, found = _last_saves(self.segments), _last_saves(segments), []
        for name, entries in theirs.items():
            of_name = [
                each
                for path, each in ours.items()
                if path.rpartition("/")[2] == name.rpartition("/")[2]
            ]
            other, is_last = (
                ours.get(name, of_name[-1] if of_name else None),
                name == list(theirs)[-1],
            )
            if other is None and is_last and ours:
                if name not in self.unsteady:
                    detail = f"all steps are the same, but the last save, {name}, was never written"
                    return Difference(len(self.steps), "saved", detail)
                other = list(ours.values())[-1]  # a name that is another each time
            if other is None:
                continue
            for key, value in entries.items():
                if (
                    key not in self.unsteady
                    and "holdfast.guard.counters" not in key
                    and other.get(key) != value
                ):
                    given = other.get(key, "nothing")
                    short = (
                        f": {given} instead of {value}"
                        if len(value) != 16 or _is_text(value)
                        else ""
                    )
                    where = (
                        f"all steps are the same, but the last save into {name} differs in"
                        f" {key!r}{short}"
                    )
                    found.append(
                        Difference(
                            len(self.steps), "text" if _is_text(value, given) else "saved", where
                        )
                    )
        return min(found, key=lambda each: each.what == "text", default=None)


def _distance(state: Line, other: Line) -> float:
    ours, theirs = state.get("numbers", []), other.get("numbers", [])
    far = (
        math.dist(ours, theirs) / (math.hypot(*ours) or 1.0)
        if ours and len(ours) == len(theirs)
        else math.inf
    )
    return math.inf if math.isnan(far) else far


def _states(step: Line) -> set[tuple[str, str]]:
    return {each for state in step["states"] for each in state.items()}


def _alike(step: Line, other: Line) -> bool:
    return any(
        each is not None and each in step[name]
        for name in ("batch", "inputs")
        for each in other[name]
    )


def _last_saves(segments: Sequence[Segment]) -> dict[str, dict[str, str]]:
    """Return the entries of the last save into each file, by its name, the newest save last."""
    found: dict[str, dict[str, str]] = {}
    newest, before = None, ""
    for line in (line for segment in segments for line in segment.lines):
        name = re.sub(
            r"^.*/holdfast-chaos-\w+/(work/)?|(?<=tmp)[a-z0-9_]{8}", "", line.get("path") or ""
        )
        if line["kind"] == "save" and line["entries"]:
            found.pop(name, None)
            found[name] = line["entries"]
            newest, before = (line["path"], line["step"]), name
        # Written as another, then renamed
        elif line["kind"] == "moved" and (line["source"], line["step"]) == newest:
            found[name], newest = found.pop(before), None
    return found


def _is_text(*values: str) -> bool:
    """Return whether what is saved only says something.

    A name, a command, a flag such as that it was resumed.
    """
    return all(value[:1] in ("'", '"') or value in ("True", "False") for value in values)


def state_before(steps: Sequence[Line], index: int, saved: Line | None) -> Line:
    """Return the digests of the state before a step.

    Of the weights that it holds, and of what is known of the rest.

    Other optimizers may hold the same weights, and have stepped since; models compute between the
    steps of their
    own, and change their buffers: these are known where the last step was theirs, or a save was
        seen. At the end:
    those after the last step.
    """
    step, before = steps[min(index, len(steps) - 1)], steps[:index]
    if index < len(steps) and step["before"]:
        return {**step["before"], "begins": step["begins"]}
    alike = [each for each in reversed(before) if each["holds"] == step["holds"]]
    # None if they are wrapped anew
    same = (each for each in alike if each["roots"] == step["roots"])
    newest: Line = next(same, alike[0] if alike else {})
    state = {**newest, "optimizer": None, "begins": step["begins"] if index < len(steps) else None}
    if newest is not before[-1]:
        state["buffers"] = []
    if saved is not None and len(saved["states"]) > step["which"]:
        held = saved["states"][step["which"]]
        state |= {"optimizer": held.get("optimizer"), "buffers": held.get("buffers", [])}
    return state


def _rest_of(expected: Line, step: Line) -> Line:
    """Return what of a step is left to one that was begun before the attempt, if that makes its
    last calls.
    """
    count = len(step["inputs"])
    rest = {name: expected[name][-count:] for name in ("batch", "inputs", "losses", "states")}
    if not 0 < count < len(expected["inputs"]) or any(
        rest[name] != step[name] for name in ("batch", "inputs")
    ):
        return expected
    return {**expected, **rest, "parts": count, "random": rest["states"][0], "rest": True}


def _trainings(segment: Segment) -> list[Segment]:
    """Return one segment for each training.

    It begins with a new optimizer, and no older one makes a step again.
    """
    steps, found = segment.steps, []
    last = {step["which"]: at for at, step in enumerate(steps)}
    new = [at for at, step in enumerate(steps) if at and step["before"] is not None]
    new = [at for at in new if all(last[step["which"]] < at for step in steps[:at])]
    for begin, end in itertools.pairwise([0, *new, len(steps)]):
        lines = [line for line in segment.lines if begin - (not begin) < line["step"] <= end]
        lines = [{**line, "step": line["step"] - begin} for line in lines]
        found.append(replace(segment, steps=steps[begin:end], lines=lines))
    return found


def unsteady_fields(
    first: Sequence[Segment], second: Sequence[Segment]
) -> tuple[Difference | None, set[str]]:
    """Compare two undisturbed runs: their first difference.

    Random states, saved entries and names that differ.
    """
    one, two = _last_saves(first), _last_saves(second)
    pairs = [(one[name], two[name]) for name in one if name in two]
    if one and two:
        pairs.append((list(one.values())[-1], list(two.values())[-1]))
    unsteady = {key for a, b in pairs for key in a if a[key] != b.get(key)} | (
        one.keys() ^ two.keys()
    )
    steps, others = (
        [step for segment in segments for step in segment.steps] for segments in (first, second)
    )
    pairs = [(a["random"], b["random"]) for a, b in zip(steps, others, strict=False)]
    unsteady |= {name for a, b in pairs for name in a if a[name] != b.get(name)}
    reference = Reference(first, unsteady - _WORDS.keys())
    reached, difference = 0, None
    for part in (part for segment in second for part in reference.parts_of(segment)):
        place, other = reference.place_of(part, reached)
        if other is not None:
            other = replace(
                other, detail="the weights at the start differ: seed before the model is made"
            )
        difference = difference or other or reference.first_difference(part, place)
        reached += len(part.steps)
    if difference is None and len(steps) != len(others):
        difference = Difference(
            min(len(steps), len(others)) + 1, "end", "only one of them makes it"
        )
    return difference, reference.unsteady


def _compare(reference: Reference, segments: Sequence[Segment], *, is_idle: bool) -> Comparison:
    """Compare all attempts of one rank with the undisturbed run.

    The last one has made no step if it `is_idle`.
    """
    found, expected = Comparison(), reference.steps
    saves: dict[int, set[tuple[str, ...]]] = {}  # after how many steps, what
    kept: dict[int, Line] = {}  # the steps that lead to the weights at the end
    # Of each training: after how many steps, what
    saved: dict[int, dict[int, set[tuple[str, ...]]]] = {}
    parts = [
        (number, part)
        for number, segment in enumerate(segments)
        for part in reference.parts_of(segment)
    ]
    for at, (number, part) in enumerate(parts):
        place, other = reference.place_of(part, max(kept, default=-1) + 1)
        begin, end = reference.training_of(place)
        again, whole = [step for step in kept if place <= step < end], saved.setdefault(begin, {})
        if number:
            found.resumed_at.append(place)
            found.steps_again += len(again)
            # Of the same entries: a file of the best weights is none to go on from.
            same = [
                step
                for step, what in whole.items()
                if place == begin or what & saves.get(place, set())
            ]
            newest = max(same, default=0)
            if newest > place:
                where = f"after step {place}" if place else "from the beginning"
                detail = f"it goes on {where}, although step {newest} was saved"
                found.differences.append(Difference(place + 1, "older", detail))
        found.differences += filter(None, [other or reference.first_difference(part, place)])
        goes_on = at + 1 < len(parts) and parts[at + 1][0] == number
        for line in part.lines:
            if line["kind"] == "save" and not line["aside"]:
                entries = tuple(sorted({key.partition(".")[0] for key in line["entries"]}))
                after = place + line["step"]
                saves.setdefault(after, set()).add(entries)
                # Before the end of a process, or it may not be whole
                if line["step"] < len(part.steps) + goes_on:
                    whole.setdefault(after, set()).add(entries)
        for step in again:
            del kept[step]
        rest = [
            step for step in expected[place : place + 1] if "rest" in _rest_of(step, part.steps[0])
        ]
        kept |= enumerate([*(rest or part.steps[:1]), *part.steps[1:]], place)
    differs = any(each.what != "older" for each in found.differences)
    missing = sorted(set(range(len(expected))) ^ kept.keys())
    if not differs and missing:
        detail = f"{len(kept)} steps lead to the end, not {len(expected)}"
        if is_idle:
            missing[0] = min(missing[0], max(saves, default=0))
            detail = (
                f"the last start makes no step, but only {missing[0]} of {len(expected)} were saved"
            )
        found.differences.append(Difference(missing[0] + 1, "end", detail))
    elif not differs:
        found.differences += filter(None, [reference.saved_difference(segments)])
    theirs, ours = (
        Counter(one for step in steps for one in step["batch"])
        for steps in (expected, kept.values())
    )
    found.batches_twice, found.batches_never = (ours - theirs).total(), (theirs - ours).total()
    last = kept[max(kept)]
    found.finite = all(map(cmath.isfinite, map(complex, [*last["losses"], *last["numbers"]])))
    found.losses = losses(list(kept.values()))
    return found


def losses(steps: Sequence[Line]) -> list[float | None]:
    """Return the first loss of each step, None where none was seen or it is no finite number."""
    # A root may be complex, and is scaled by a GradScaler.
    found = [
        complex(step["losses"][0]) / (step["scale"] or 1) if step["losses"] else math.nan
        for step in steps
    ]
    return [each.real if cmath.isfinite(each) else None for each in found]


def compare(references: dict[int, Reference], trial: Trial) -> Comparison:
    """Compare every rank.

    Return what the one came to that differs first, else that of the first.
    """
    ranks, causes = trial.ranks(), [*_AT_START, *_WORDS]
    is_idle = not any(segment.steps for segment in trial.last.segments)
    found = {
        rank: _compare(each, ranks[rank], is_idle=is_idle)
        for rank, each in references.items()
        if rank in ranks
    }

    def when(rank: int) -> tuple[float, int]:
        places = [
            (each.step, causes.index(each.what))
            for each in found[rank].differences
            if each.what in causes
        ]
        return min(places, default=(math.inf, not found[rank].differences))

    if not found:
        return Comparison(finite=False)
    rank = min(found, key=when)
    if len(references) > 1:
        differences = found[rank].differences
        differences[:] = [
            replace(each, detail=f"on rank {rank} {each.detail}") for each in differences
        ]
    return found[rank]

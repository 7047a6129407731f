"""The records of an attempt's processes: steps, saves and other events, read from their traces.

`observer` writes one trace per process: a file of JSON lines, each with the time (``seconds``), the
number of steps that the process has made so far (``steps_made``) and the facts of its kind. The
other fields of a line are those of the class that it is read into.

Digests are strings of `digests`: equal digests mean equal bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The state of the models that one optimizer trains, and of that optimizer.

    Args:
        weights: Digest of the trained weights.
        buffers: Digest of the buffers of each root module; None where it is not known.
        sample: The first numbers of some weights, to find the nearest of several states.
        structure: Classes of the root modules and number of weights. Two attempts that train the
            same models have the same structure.
        roots: Identities of the root modules, valid within one process.
        optimizer: Digest of the optimizer's state; None if it was not recorded.
        parameters: Digest of the optimizer's own parameters; None if it was not recorded.
    """

    weights: str | None = None
    buffers: list[str | None] = field(default_factory=list)
    sample: list[float] = field(default_factory=list)
    structure: str = ""
    roots: list[int] = field(default_factory=list)
    optimizer: str | None = None
    parameters: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of one optimizer and of the buffers of its models at the time of a save."""

    buffers: list[str | None]
    optimizer: str
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step of an optimizer.

    A step consists of parts: model calls that contributed to a loss of this step. `batch` and
    `inputs` have one digest per part. The attributes `settings` to `buffers` are what `divergence`
    compares, under these names.

    Args:
        steps_made: Steps of the process so far, including this one.
        seconds: Unix time at the end of the step.
        rank: Rank of the process.
        world_size: Number of ranks.
        optimizer_index: Number of the optimizer, in the order in which optimizers first stepped.
        before: State before the first step of this optimizer in this process; None later on.
        after: State after the step.
        weights_at_begin: Digest of the weights when the step began, recorded after a save only.
        settings: Learning rate, momentum, betas and weight decay of each parameter group.
        scale: Loss scale of the gradient scaler, if there is one.
        parts: Number of parts.
        batch: Batches from the loader.
        random: Random states before the first part, by the name of the generator.
        inputs: Inputs of the model.
        losses: Losses as text, so that no digit is lost.
        random_states: Random states before each model call, including calls that are not part of
            the step.
        resumed_midway: Whether only the last parts of the step can be compared, because the attempt
            resumed in the middle of a gradient accumulation. Not recorded.
    """

    steps_made: int
    seconds: float
    rank: int
    world_size: int
    optimizer_index: int
    before: ModelState | None
    after: ModelState
    weights_at_begin: str | None
    settings: str
    scale: float | None
    parts: int
    batch: list[str | None]
    random: dict[str, str]
    inputs: list[str | None]
    losses: list[str]
    random_states: list[dict[str, str]]
    resumed_midway: bool = False

    @property
    def weights(self) -> str | None:
        """Return the digest of the weights after the step."""
        return self.after.weights

    @property
    def buffers(self) -> list[str | None]:
        """Return the digests of the buffers after the step."""
        return self.after.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSave:
    """One call of a function that saves a checkpoint.

    Args:
        steps_made: Steps of the process so far.
        seconds: Unix time at the end of the save.
        path: The file or folder that was written; None if it is not known.
        in_thread: Whether the save ran in a thread while training continued, so that its state may
            belong to an earlier step.
        entries: Digest or text of each entry, by its path within the checkpoint.
        size_bytes: Size of the largest file.
        states: State of each optimizer that has stepped; None if it no longer exists.
    """

    steps_made: int
    seconds: float
    path: str | None
    in_thread: bool
    entries: dict[str, str]
    size_bytes: int
    states: list[SavedState | None]

    def state_of(self, optimizer_index: int) -> SavedState | None:
        """Return the state of an optimizer, None if it is not known."""
        if optimizer_index < len(self.states):
            return self.states[optimizer_index]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Any other record, with the facts of its kind.

    Kinds are ``start`` (versions), ``workers``, ``eval``, ``moved`` (source, path: a checkpoint was
    renamed), ``read`` (path of a file of this trial), ``outside`` (path written outside of the
    workplace), ``fault`` (act: the injected action) and ``missed`` (why no fault could be
    injected).
    """

    kind: str
    steps_made: int
    seconds: float
    facts: dict[str, Any]


Record: TypeAlias = RecordedStep | RecordedSave | TraceEvent


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The record of one process of an attempt, or a part of it, in order."""

    records: list[Record]

    @cached_property
    def steps(self) -> list[RecordedStep]:
        """Return the steps."""
        return [record for record in self.records if isinstance(record, RecordedStep)]

    @cached_property
    def saves(self) -> list[RecordedSave]:
        """Return the saves."""
        return [record for record in self.records if isinstance(record, RecordedSave)]

    def events(self, kind: str) -> Iterator[TraceEvent]:
        """Return the events of one kind."""
        for record in self.records:
            if isinstance(record, TraceEvent) and record.kind == kind:
                yield record

    @property
    def rank(self) -> int:
        """Return the rank of the process, 0 if it has no steps."""
        return self.steps[0].rank if self.steps else 0

    @property
    def world_size(self) -> int:
        """Return the number of ranks, 1 if the process has no steps."""
        return self.steps[0].world_size if self.steps else 1


def read_segment(path: Path) -> Segment:
    """Read the trace of one process.

    Incomplete and foreign lines are ignored: the process may have been killed while writing, and
    the training script may have written into the file by accident.
    """
    records: list[Record] = []
    complete_lines = path.read_bytes().split(b"\n")[:-1]
    for line in complete_lines:
        with suppress(ValueError, TypeError, KeyError):
            records.append(parse_record(json.loads(line)))
    return Segment(records=records)


def parse_record(line: dict[str, Any]) -> Record:
    """Return the record of one line of a trace.

    Raises:
        TypeError, KeyError: If it is not a line of a trace.
    """
    facts = dict(line)
    kind = facts.pop("kind")
    if kind == "step":
        before = facts.pop("before")
        after = ModelState(**facts.pop("after"))
        return RecordedStep(before=before and ModelState(**before), after=after, **facts)
    if kind == "save":
        states = [state and SavedState(**state) for state in facts.pop("states")]
        return RecordedSave(states=states, **facts)
    steps_made = facts.pop("steps_made")
    seconds = facts.pop("seconds")
    return TraceEvent(kind=kind, steps_made=steps_made, seconds=seconds, facts=facts)

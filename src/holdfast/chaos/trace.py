"""The records of one attempt's processes: steps, saves and other events.

An attempt is one start of the tested command. The observer in each of its processes writes a trace:
a file of JSON lines. Each line has a ``kind``, the time (``seconds``), the number of steps that the
process has made so far (``steps_made``), and the other fields of the class below that represents
it.

A digest is a short string computed by `digests`. Equal digests mean equal bits.
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
    """The state of the models that one optimizer trains, and the state of that optimizer.

    Args:
        weights: Digest of the trained weights.
        buffers: Digest of the buffers of each root module; None if unknown.
        sample: The first numbers of some weights, to find out which of several states is nearest.
        structure: Class names of the root modules, and the number of weights. Two attempts that
            train the same models have the same structure.
        roots: The ``id()`` of each root module, valid within one process.
        optimizer: Digest of the optimizer's state; None if it was not recorded.
        parameters: Digest of the parameters in the optimizer; None if it was not recorded.
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

    A step consists of one or more parts, for example with gradient accumulation. A part is a model
    call that contributed to a loss of the step. `batch` and `inputs` have one digest per part.
    `divergence` compares the attributes that are listed in `differences.FIELDS`.

    Args:
        steps_made: Number of steps of the process so far, including this one.
        seconds: Unix time at the end of the step.
        rank: Rank of the process.
        world_size: Number of ranks.
        optimizer_index: Index of the optimizer, in the order in which optimizers first stepped.
        before: State before the step, if this is the optimizer's first step in the process;
            otherwise None.
        after: State after the step.
        weights_at_begin: Digest of the weights when the step began. Recorded only after a save.
        settings: Learning rate, momentum, betas and weight decay of each parameter group.
        scale: Loss scale of the gradient scaler; None without one.
        parts: Number of parts.
        batch: Digests of the batches from the loader.
        random: Digests of the random states before the first part, by the generator's name.
        inputs: Digests of the model's inputs.
        losses: The losses as strings, so that no digit is lost.
        random_states: Digests of the random states before each model call, including calls that are
            not part of the step.
        resumed_midway: Whether only the last parts of the step can be compared, because the attempt
            resumed in the middle of a gradient accumulation. Traces do not contain this field.
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
        steps_made: Number of steps of the process so far.
        seconds: Unix time at the end of the save.
        path: The file or folder that was written; None if unknown.
        in_thread: Whether the save ran in a thread while training continued. The saved state may
            then be that of an earlier step.
        entries: Digest or short value of each entry, by the entry's path within the checkpoint.
        size_bytes: Size of the largest file.
        states: State of each optimizer that has stepped; None for an optimizer that no longer
            exists.
    """

    steps_made: int
    seconds: float
    path: str | None
    in_thread: bool
    entries: dict[str, str]
    size_bytes: int
    states: list[SavedState | None]

    def state_of(self, optimizer_index: int) -> SavedState | None:
        """Return the state of an optimizer, or None if it is unknown."""
        if optimizer_index < len(self.states):
            return self.states[optimizer_index]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Any other record. `facts` depends on the kind.

    The kinds, with their facts in parentheses:

    - ``start``: the first record of a process (versions)
    - ``workers``: a loader has worker processes
    - ``eval``: a model was switched to evaluation mode
    - ``moved``: a checkpoint was renamed (source, path)
    - ``read``: a file that was written in this trial was read (path)
    - ``outside``: a file outside of the workplace was written (path)
    - ``fault``: the fault was injected (act: the action)
    - ``missed``: the fault could not be injected (why)
    """

    kind: str
    steps_made: int
    seconds: float
    facts: dict[str, Any]


Record: TypeAlias = RecordedStep | RecordedSave | TraceEvent


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The records of one process of an attempt, or of a part of that process, in order."""

    records: list[Record]

    @cached_property
    def steps(self) -> list[RecordedStep]:
        """Return the records that are steps."""
        return [record for record in self.records if isinstance(record, RecordedStep)]

    @cached_property
    def saves(self) -> list[RecordedSave]:
        """Return the records that are saves."""
        return [record for record in self.records if isinstance(record, RecordedSave)]

    def events(self, kind: str) -> Iterator[TraceEvent]:
        """Return the events of one kind."""
        for record in self.records:
            if isinstance(record, TraceEvent) and record.kind == kind:
                yield record

    @property
    def rank(self) -> int:
        """Return the rank of the process, or 0 if it has no steps."""
        return self.steps[0].rank if self.steps else 0

    @property
    def world_size(self) -> int:
        """Return the number of ranks, or 1 if the process has no steps."""
        return self.steps[0].world_size if self.steps else 1


def read_segment(path: Path) -> Segment:
    """Read the trace of one process.

    Invalid lines are ignored: the process may have been killed in the middle of a line, and the
    training script may have written to the file by accident.
    """
    records: list[Record] = []
    complete_lines = path.read_bytes().split(b"\n")[:-1]
    for line in complete_lines:
        with suppress(ValueError, TypeError, KeyError):
            records.append(parse_record(json.loads(line)))
    return Segment(records=records)


def parse_record(line: dict[str, Any]) -> Record:
    """Return the record in one line of a trace, given as a dict.

    Raises:
        TypeError, KeyError: If the dict is not a record.
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

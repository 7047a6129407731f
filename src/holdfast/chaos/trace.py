"""The records of one attempt's processes: steps, saves and other events.

An attempt is one start of the tested command. The observer in each process of the attempt writes a
trace, which is a file of JSON lines. Each line contains a ``kind``, the time (``seconds``), the
number of steps that the process has taken so far (``steps_made``), and the other fields of the
class below that represents this kind of line.

A digest is a short string computed by `digests`. Values with equal digests are assumed to be equal,
bit for bit.
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
        weights: The digest of the trained weights.
        buffers: The digest of each root module's buffers; None if unknown.
        sample: The first few values of some weight tensors, which are used to find the nearest of
            several states.
        structure: The class names of the root modules, and the number of weight tensors. Two
            attempts that train the same models have the same structure.
        roots: The ``id()`` of each root module, which is valid only within one process.
        optimizer: The digest of the optimizer's state; None if it was not recorded.
        parameters: The digest of the optimizer's parameters; None if it was not recorded.
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
    """Digests of an optimizer's state and parameters, and its models' buffers, at a save."""

    buffers: list[str | None]
    optimizer: str
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step of an optimizer.

    A step consists of one or more parts; with gradient accumulation, there are several. A part is a
    model call that contributed to a loss of the step. `divergence` compares the attributes that are
    listed in `differences.FIELDS`.

    Args:
        steps_made: The number of steps that the process has taken so far, including this one.
        seconds: The Unix time at the end of the step.
        rank: The rank of the process.
        world_size: The number of ranks.
        optimizer_index: The index of the optimizer, in the order in which optimizers first stepped.
        before: The state before the step, if this is the optimizer's first step in the process;
            otherwise None.
        after: The state after the step.
        weights_at_begin: The digest of the weights when the step began. It is recorded only after a
            save.
        settings: The learning rate, momentum, betas and weight decay of each parameter group.
        scale: The loss scale of the gradient scaler; None without a scaler.
        parts: The number of parts.
        batch: For each part, the digest of the batch from the loader.
        random: The digests of the random states before the first part, by the generator's name.
        inputs: For each part, the digest of the model's inputs.
        losses: The losses as strings, so that no digit is lost.
        random_states: The digests of the random states before each model call, including calls that
            are not parts of the step.
        resumed_midway: Whether only the last parts of the step can be compared, because the attempt
            resumed in the middle of gradient accumulation. Traces do not contain this field.
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
    """One call to a function that saves a checkpoint.

    Args:
        steps_made: The number of steps that the process has taken so far.
        seconds: The Unix time at the end of the save.
        path: The file or folder that was written; None if unknown.
        in_thread: Whether the save ran in a background thread while training continued. The saved
            state may then be that of an earlier step.
        entries: The digest or the short value of each entry, by its path within the checkpoint.
        size_bytes: The size of the largest file that was written.
        states: The state of each optimizer that has stepped; None for an optimizer that no longer
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
        """Return the state of the optimizer with the given index, or None if it is unknown."""
        if optimizer_index < len(self.states):
            return self.states[optimizer_index]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """A record that is neither a step nor a save. The names in `facts` depend on the kind.

    The kinds, with the names of their facts in parentheses:

    - ``start``: the first record of a process (versions)
    - ``workers``: a loader has worker processes
    - ``eval``: a model was switched to evaluation mode
    - ``moved``: a checkpoint was renamed (source, path)
    - ``read``: a file that was written in this trial was read (path)
    - ``outside``: a file outside of the workplace was written (path)
    - ``fault``: the fault was injected (act, which is the action)
    - ``missed``: the fault could not be injected (why)
    """

    kind: str
    steps_made: int
    seconds: float
    facts: dict[str, Any]


Record: TypeAlias = RecordedStep | RecordedSave | TraceEvent


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The records of a process of an attempt, or of one training run in that process, in order."""

    records: list[Record]

    @cached_property
    def steps(self) -> list[RecordedStep]:
        """Return the steps among the records."""
        return [record for record in self.records if isinstance(record, RecordedStep)]

    @cached_property
    def saves(self) -> list[RecordedSave]:
        """Return the saves among the records."""
        return [record for record in self.records if isinstance(record, RecordedSave)]

    def events(self, kind: str) -> Iterator[TraceEvent]:
        """Yield the events of the given kind."""
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
    """Read the trace of one process and return its records.

    Invalid lines are ignored, because the process may have been killed while it was writing a line,
    and the training script may have written to the file by accident.
    """
    records: list[Record] = []
    # The last item is either empty or an incomplete line.
    complete_lines = path.read_bytes().split(b"\n")[:-1]
    for line in complete_lines:
        with suppress(ValueError, TypeError, KeyError):
            records.append(parse_record(json.loads(line)))
    return Segment(records=records)


def parse_record(line: dict[str, Any]) -> Record:
    """Convert one line of a trace, already parsed as a dict, to a record.

    Raises:
        TypeError, KeyError: If the dict is not a valid record.
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

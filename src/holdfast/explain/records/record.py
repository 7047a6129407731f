"""`Record`: the metrics of one run that another tool recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.explain.records.series import Series

# A tool may log values for each layer and each sample. More series than these are left out.
_MAX_SERIES = 400


@dataclass(slots=True, kw_only=True)
class Record:
    """The metrics of one run that another tool recorded."""

    # The file or the directory that was read.
    path: Path
    # The tool that wrote the record, such as "TensorBoard".
    tool: str
    # The name of the file that holds the values.
    file: str
    # The values, keyed by the name under which they were logged.
    series: dict[str, Series] = field(default_factory=dict)
    # One clause for each part of the record that could not be read or is not there.
    missing: list[str] = field(default_factory=list)
    # One sentence for each thing that a reader of the verdict should know about the values.
    notes: list[str] = field(default_factory=list)
    # What the steps of the values count: "step", "epoch", or "line" of an output.
    unit: str = "step"
    # The names that were added since `begin_file`. None before the first call.
    _names_in_file: set[str] | None = None

    def begin_file(self) -> None:
        """Note that the next values come from another file of the same record."""
        self._names_in_file = set()

    def add(self, name: str, step: int, value: float) -> None:
        """Add a value to the series of a name."""
        self.extend(name, (step,), (value,))

    def extend(self, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add values to the series of a name, oldest first.

        Args:
            name: The name under which the values were logged.
            steps: The step of each value. There is at least one.
            values: The values.
        """
        series = self.series.get(name)
        if series is None or self._begins_again(name, series, steps[0]):
            series = self._new_series(name)
        if series is not None:
            series.extend(steps, values)

    def _new_series(self, name: str) -> Series | None:
        """Return a new series, or None if there are too many."""
        if len(self.series) < _MAX_SERIES or name in self.series:
            self.series[name] = Series()
            return self.series[name]
        self.note_missing(f"only the first {_MAX_SERIES} metrics were read")
        return None

    def note(self, sentence: str) -> None:
        """Add a sentence to `notes`, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def note_missing(self, clause: str) -> None:
        """Add a clause to `missing`, once."""
        if clause not in self.missing:
            self.missing.append(clause)

    def _begins_again(self, name: str, series: Series, step: int) -> bool:
        """Return whether the first value of a series in a new file belongs to a new run.

        A resumed run continues after its first step.
        """
        if self._names_in_file is None or name in self._names_in_file:
            return False
        self._names_in_file.add(name)
        begins_again = step <= series.first_step < series.end().last_step
        if begins_again:
            self.note(
                "The directory contains the files of several runs; only the newest one was judged."
            )
        return begins_again

    @property
    def last_step(self) -> int:
        """Return the largest newest step of all series."""
        return max((series.end().last_step for series in self.series.values()), default=0)

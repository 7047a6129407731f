"""Compare the contents of a trial's last saves with those of the undisturbed run.

The comparison finds differences that do not show in any step, such as an average of the weights
that was not restored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from holdfast.chaos.comparison.differences import SAVED, TEXT, RunDifference
from holdfast.chaos.comparison.reference import Reference
from holdfast.chaos.trace import RecordedSave, Segment, TraceEvent

# Digest or short value of each entry of a checkpoint, by the entry's path within the checkpoint.
Entries = dict[str, str]

# Parts of a path that differ from run to run: the path of the copied working directory, and the
# random part of a name from `tempfile`.
_CHANCE_IN_PATH = re.compile(r"^.*/holdfast-chaos-\w+/(work/)?|(?<=tmp)[a-z0-9_]{8}")
# A digest has 16 hexadecimal digits. Anything else is a value that messages can show.
DIGEST_LENGTH = 16
# A guard's counters, such as the number of restarts, are meant to differ after a restart.
GUARD_COUNTERS = "holdfast.guard.counters"


def last_saves(segments: Sequence[Segment]) -> dict[str, Entries]:
    """Return the entries that were last saved to each file, by file name, newest save last.

    A file that was renamed right after it was written is listed under its new name.
    """
    saves: dict[str, Entries] = {}
    # The newest save, which may be renamed next, and its key in `saves`.
    newest: RecordedSave | None = None
    newest_name = ""
    for segment in segments:
        for record in segment.records:
            if isinstance(record, RecordedSave) and record.entries:
                newest = record
                newest_name = _file_name(record.path)
                saves.pop(newest_name, None)
                saves[newest_name] = record.entries
            elif newest is not None and isinstance(record, TraceEvent) and _renames(record, newest):
                saves[_file_name(record.facts["path"])] = saves.pop(newest_name)
                newest = None
    return saves


def _renames(event: TraceEvent, save: RecordedSave) -> bool:
    """Return whether an event renames the file that was just saved."""
    if event.kind != "moved":
        return False
    return event.facts["source"] == save.path and event.steps_made == save.steps_made


def _file_name(path: str | None) -> str:
    """Return a path without the parts that differ from run to run."""
    return _CHANCE_IN_PATH.sub("", path or "")


def saved_difference(reference: Reference, segments: Sequence[Segment]) -> RunDifference | None:
    """Return how the last saves differ from those of the undisturbed run, or None.

    A difference in text or a flag is returned only if nothing else differs, because it may only
    mean that the run was resumed.
    """
    saves = last_saves(segments)
    expected_saves = last_saves(reference.segments)
    if not saves or not expected_saves:
        return None
    last_name = list(expected_saves)[-1]
    newest_entries = _entries_of(last_name, saves)
    if newest_entries is None:
        if last_name not in reference.unsteady.files:
            detail = (
                f"all steps are the same, but the last checkpoint, {last_name}, was never written"
            )
            return RunDifference(len(reference.steps), SAVED, detail)
        # The file has a different name in each run, so use the newest save.
        newest_entries = list(saves.values())[-1]
    differences: list[RunDifference] = []
    for name, expected in expected_saves.items():
        entries = newest_entries if name == last_name else _entries_of(name, saves)
        if entries is not None:
            differences += _entries_that_differ(reference, name, entries, expected)
    return min(differences, key=lambda difference: difference.what == TEXT, default=None)


def _entries_of(name: str, saves: dict[str, Entries]) -> Entries | None:
    """Return the entries of a file, or of a file of the same name in another folder, or None."""
    if name in saves:
        return saves[name]
    same_name = [
        entries for path, entries in saves.items() if PurePath(path).name == PurePath(name).name
    ]
    return same_name[-1] if same_name else None


def _entries_that_differ(
    reference: Reference, file_name: str, entries: Entries, expected: Entries
) -> list[RunDifference]:
    """Return one difference for each entry of a file that does not have the expected value."""
    differences = []
    for path, expected_value in expected.items():
        if path in reference.unsteady.entries or GUARD_COUNTERS in path:
            continue
        if entries.get(path) == expected_value:
            continue
        value = entries.get(path, "nothing")
        detail = f"all steps are the same, but the last save to {file_name} differs in {path!r}"
        if len(expected_value) != DIGEST_LENGTH or is_text(expected_value):
            detail += f": {value} instead of {expected_value}"
        kind = TEXT if is_text(expected_value) and is_text(value) else SAVED
        differences.append(RunDifference(len(reference.steps), kind, detail))
    return differences


def is_text(value: str) -> bool:
    """Return whether a saved value is text or a flag, which do not influence training."""
    return value.startswith(("'", '"')) or value in ("True", "False")

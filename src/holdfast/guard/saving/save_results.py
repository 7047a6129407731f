"""`SaveResults`: the results of the saves of a run in this process.

Only the training thread reads and changes these results.
"""

from __future__ import annotations

from holdfast.checkpoint.store import Entry
from holdfast.guard.directory import RunDirectory
from holdfast.guard.record import describe_error
from holdfast.guard.saving.save_writer import Save
from holdfast.guard.saving.unsaved import note_saved


class SaveResults:
    """Counts the saves of one run, and knows its newest checkpoint.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        # The numbers of saves in this process that succeeded and that failed.
        self.saved = 0
        self.failed = 0
        # The newest checkpoint of this run, which was saved or loaded.
        self.newest: Entry | None = None
        # Why the newest save failed. None if it succeeded.
        self.newest_failure: str | None = None
        # The position of the newest checkpoint.
        self._saved_at: tuple[int, int] | None = None
        # Why a save was refused, until `take_refusal` is called.
        self._refused: str | None = None

    def is_saved(self, position: tuple[int, int]) -> bool:
        """Return whether the newest checkpoint holds the state at a position of the run."""
        return self._saved_at == position

    def add(self, save: Save) -> None:
        """Add the result of a save that has ended."""
        if save.entry is None:
            self.failed += 1
            self.newest_failure = save.refused
            if save.error is not None:
                self.newest_failure = describe_error(save.error)
            self._refused = save.refused or self._refused
            return
        self.saved += 1
        self.newest_failure = None
        self._directory.note_saved()
        note_saved(self._directory.path)
        self._saved_at = save.position
        self.newest = save.entry

    def add_failure(self, error: Exception) -> None:
        """Add a save that has failed before it wrote anything."""
        self.failed += 1
        self.newest_failure = describe_error(error)

    def note_changes(self) -> None:
        """Record that the script has changed the state, so that no checkpoint holds it."""
        self._saved_at = None

    def note_resumed(self, entry: Entry, position: tuple[int, int]) -> None:
        """Record that the state was just restored from a checkpoint."""
        self._saved_at = position
        self.newest = entry

    # --- refusals

    @property
    def has_refusal(self) -> bool:
        """Return whether a save was refused since the last call to `take_refusal`."""
        return self._refused is not None

    def take_refusal(self) -> str | None:
        """Return why a save has been refused since the last call, or None."""
        refused = self._refused
        self._refused = None
        return refused

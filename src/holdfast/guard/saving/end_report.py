"""`EndReport`: reports, when a run ends, the steps that are in no checkpoint.

The module ``unsaved`` passes these reports on when the process exits.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.core.events import run_events
from holdfast.guard.record import RunRecord
from holdfast.guard.saving.save_results import SaveResults
from holdfast.guard.saving.saves import Saving
from holdfast.guard.saving.unsaved import note_left_steps, note_unsaved


class EndReport:
    """Reports the steps of one run that are in no checkpoint when it ends.

    Args:
        run_dir: The run directory.
        record: The record that receives events.
        saving: The object that saves the run's checkpoints.
        results: The results of the run's saves.
        rank: The number of this process among all ranks.
    """

    def __init__(
        self, run_dir: Path, record: RunRecord, saving: Saving, results: SaveResults, rank: int
    ) -> None:
        self._run_dir = run_dir
        self._record = record
        self._saving = saving
        self._results = results
        self._rank = rank

    def report_failed_saves(self, *, left: bool) -> None:
        """Report that the newest state is unsaved because saves have failed.

        The process then exits with a special code (see ``unsaved``), unless a later save succeeds.

        Args:
            left: Whether the loop was left early. In that case, `report_left_steps` reports the
                steps since the newest checkpoint, unless the last save failed.
        """
        results = self._results
        error = results.newest_failure
        newest = None if results.newest is None else results.newest.global_step
        steps_are_lost = self._saving.has_unsaved and (error is not None or not left)
        if not results.failed or (newest is not None and not steps_are_lost):
            return
        self._record.emit(
            run_events.NotSaved(newest_checkpoint=newest, failed_saves=results.failed, error=error)
        )
        note_unsaved(self._run_dir, error or "saves have failed")

    def report_left_steps(self) -> None:
        """Record the steps since the newest checkpoint, and report them when the process exits.

        This does nothing if the last save failed, since `report_failed_saves` reports that case.
        """
        newest = self._results.newest
        has_failed = self._results.newest_failure is not None
        if newest is None or has_failed or not self._saving.has_unsaved:
            return
        if self._rank:
            # Rank 0 reports this for all ranks.
            return
        from_step = newest.global_step + 1
        to_step = self._record.global_step
        if from_step <= to_step:
            self._record.emit(run_events.StepsNotSaved(from_step=from_step, to_step=to_step))
            note_left_steps(self._run_dir, from_step, to_step)

"""Continue the W&B run of the earlier attempts, and announce to W&B that a scheduler stops the run.

`holdfast run` passes the ID of the run in ``WANDB_RUN_ID``, which W&B reads. All processes of the
command inherit the variable, so without further measures, every rank, every fold of a
cross-validation and every script that the command starts would log to the same run. Therefore, the
variable is removed when the script imports W&B, and only the first ``wandb.init`` of an attempt, on
the first rank, gets the ID. All others do what they would do without holdfast.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.files import make_folder
from holdfast.core.importing import ImportWatch
from holdfast.recorder.run_files import (
    TRACKER_FOLDER,
    WANDB_VARIABLE,
    on_guard_event,
    on_recording,
)

if TYPE_CHECKING:
    from inspect import BoundArguments, Signature

    from holdfast.core.events.data import EventData
    from holdfast.core.events.run_events import StopRequested
    from holdfast.supervise.observe.wandb_history import RunHistory

_ID_VARIABLE = "WANDB_RUN_ID"
_RESUME_VARIABLE = "WANDB_RESUME"
_SWEEP_VARIABLE = "WANDB_SWEEP_ID"
# Arguments of ``wandb.init``, and fields of its argument ``settings``, with which the user chooses
# the run.
_CHOSEN_IN_CALL = ("id", "resume_from", "fork_from")
_CHOSEN_IN_SETTINGS = ("run_id", "resume", "resume_from", "fork_from")
# Values of ``resume`` with which W&B continues a run that exists, and otherwise begins it.
_RESUMING = (None, True, "allow")
# Signals that a person sends, with Ctrl-C or by closing the terminal.
_SENT_BY_PERSON = ("SIGINT", "SIGHUP")


class WandbObserver:
    """Wraps the functions of W&B when the script imports it.

    Args:
        watch: Calls the methods that wrap the functions.
        run_path: The run directory.
        attempt: Identifies this start of the training processes.
        find_rank: Returns the rank of this process, or None if it has none.
        emit: Records an event.
        note_error: Records an error of holdfast, which must not reach the script.
    """

    def __init__(
        self,
        watch: ImportWatch,
        run_path: Path,
        attempt: str,
        find_rank: Callable[[], int | None],
        emit: Callable[[EventData], None],
        note_error: Callable[[BaseException], None],
    ) -> None:
        self._run_path = run_path
        self._attempt = attempt
        self._find_rank = find_rank
        self._emit = emit
        self._note_error = note_error
        # The ID that `holdfast run` has chosen. None if the user has chosen the run.
        self._id = os.environ.get(WANDB_VARIABLE)
        # The W&B run that continues in all attempts, and its history. None until it begins.
        self._run: Any = None
        self._history: RunHistory | None = None
        # Whether a row has been dropped since the training state was last restored.
        self._has_dropped = False
        # The run directory of the Guard that was opened last. The folds of a cross-validation log
        # the same steps, each with a Guard of its own.
        self._guard = ""
        watch.when_imported("wandb", self._wrap_init)
        watch.when_imported("wandb.sdk.wandb_run", self._wrap_log)
        on_recording(self._on_recording)
        on_guard_event(self._on_guard_event)

    # --- the start of a W&B run

    def _wrap_init(self, module: Any) -> None:
        # Imported here because it takes milliseconds, and few processes import W&B.
        from inspect import signature

        # W&B has not read the variables yet. Processes that the script starts must not inherit
        # them.
        if self._id is not None and os.environ.get(_ID_VARIABLE) == self._id:
            del os.environ[_ID_VARIABLE]
            os.environ.pop(_RESUME_VARIABLE, None)
        original = module.init
        init_signature = signature(original)

        @wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            call = self._first_call(module, init_signature, args, kwargs)
            run = None
            if call is not None and self._should_pass_id(call.arguments):
                run = self._continue_run(original, call)
            if run is None:
                run = original(*args, **kwargs)
            if call is not None:
                self._follow(run)
            return run

        module.init = init

    def _first_call(
        self, module: Any, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BoundArguments | None:
        """Return the arguments of a call if it begins the run that continues in all attempts.

        This is the first call of the attempt on the first rank. Return None for any other call.
        """
        try:
            call = signature.bind_partial(*args, **kwargs)
        except TypeError:
            # W&B itself reports wrong arguments.
            return None
        try:
            is_disabled = call.arguments.get("mode") == "disabled"
            if getattr(module, "run", None) is None and not is_disabled and self._takes_claim():
                return call
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self._note_error(error)
        return None

    def _takes_claim(self) -> bool:
        """Return whether no other process of the attempt has begun the run before."""
        if self._find_rank() not in (None, 0):
            return False
        folder = make_folder(self._run_path, TRACKER_FOLDER)
        with suppress(FileExistsError):
            (folder / f"wandb-{self._attempt}.claim").touch(exist_ok=False)
            return True
        return False

    def _should_pass_id(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether a call of ``wandb.init`` leaves it to W&B to choose an ID."""
        names = (_ID_VARIABLE, _RESUME_VARIABLE, _SWEEP_VARIABLE)
        if self._id is None or any(name in os.environ for name in names):
            return False
        if arguments.get("resume") not in _RESUMING:
            return False
        settings = arguments.get("settings") or {}
        in_settings = settings if isinstance(settings, Mapping) else vars(settings)
        chosen = [arguments.get(name) for name in _CHOSEN_IN_CALL]
        chosen += [in_settings.get(name) for name in _CHOSEN_IN_SETTINGS]
        return all(value is None for value in chosen)

    def _continue_run(self, original: Callable[..., Any], call: BoundArguments) -> Any:
        """Call ``wandb.init`` with the ID of the earlier attempts.

        Return None if W&B refuses to continue the run, for example because the user has deleted it.
        Then the script begins a new run, as it would without holdfast.
        """
        passed = {**call.kwargs, "id": self._id, "resume": "allow"}
        try:
            return original(*call.args, **passed)
        except Exception as error:  # noqa: BLE001 - W&B must not stop the script
            self._note_error(error)
        return None

    def _follow(self, run: Any) -> None:
        """Remember from now on what is logged to a run."""
        try:
            if not getattr(run, "disabled", True):
                # Imported here because few processes log to W&B.
                from holdfast.supervise.observe.wandb_history import RunHistory

                self._history = RunHistory(self._run_path, run)
                self._run = run
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self._note_error(error)

    # --- what the script logs

    def _wrap_log(self, module: Any) -> None:
        original = module.Run.log

        @wraps(original)
        def log(run: Any, *args: Any, **kwargs: Any) -> Any:
            if run is self._run and self._is_repeated(args, kwargs):
                self._report_dropped(run)
                return None
            return original(run, *args, **kwargs)

        module.Run.log = log

    def _is_repeated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call of ``Run.log`` logs a row that W&B has already."""
        if self._history is None:
            return False
        try:
            return self._history.is_repeated(self._guard, *args, **kwargs)
        except (TypeError, ValueError):
            # W&B itself reports wrong arguments.
            return False
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self._note_error(error)
        return False

    def _report_dropped(self, run: Any) -> None:
        if not self._has_dropped:
            # Imported here because few processes log to W&B.
            from holdfast.core.events.process_events import RepeatedRowsDropped

            self._has_dropped = True
            self._emit(RepeatedRowsDropped(run_id=str(run.id)))

    # --- what the Guard of the script does

    def _on_recording(self, path: Path) -> None:
        self._guard = str(path)

    def _on_guard_event(self, data: EventData) -> None:
        # The Guard has imported this module already.
        from holdfast.core.events import run_events

        try:
            if isinstance(data, (run_events.RolledBack, run_events.Resumed)):
                self._note_restored()
            elif isinstance(data, run_events.StopRequested) and _is_by_scheduler(data):
                # A hanging W&B must not keep the Guard from saving a checkpoint.
                threading.Thread(
                    target=self._mark_preempting, name="holdfast-mark-preempting", daemon=True
                ).start()
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self._note_error(error)

    def _note_restored(self) -> None:
        if self._history is not None:
            self._history.note_restored()
            self._has_dropped = False

    def _mark_preempting(self) -> None:
        """Tell W&B that a scheduler stops the run, so that a sweep starts it again."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return
        try:
            run.mark_preempting()
        except Exception as error:  # noqa: BLE001 - W&B may have failed, but the run must still save
            self._note_error(error)


def _is_by_scheduler(request: StopRequested) -> bool:
    """Return whether a run stops because of a scheduler's signal, or because its time is over."""
    if request.signal is None:
        return request.reason.startswith("max_time")
    return request.signal not in _SENT_BY_PERSON

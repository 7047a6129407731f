"""Continue the W&B run of the earlier attempts, and log each training step to it once.

`holdfast run` passes the id of the run in ``WANDB_RUN_ID``, which W&B reads. All processes of the
command inherit the variable, so without further measures, every rank, every fold of a
cross-validation and every script that the command starts would log to the same run. Therefore, the
variable is removed when the script imports W&B. Only the first ``wandb.init`` of an attempt, on the
first rank, gets the id. All others do what they would do without holdfast.

A resumed attempt trains the steps after its checkpoint again. W&B cannot overwrite a step, so what
the script logs in these steps is dropped, as far as W&B has received it from the earlier attempt.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from holdfast.core.importing import ImportWatch
from holdfast.recorder.run_files import WANDB_VARIABLE, guarded, on_preemption

_ID_VARIABLE = "WANDB_RUN_ID"
_RESUME_VARIABLE = "WANDB_RESUME"
_STEPS_FILE = "wandb.steps"
_PAIR = struct.Struct("<qq")
_NO_STEP = -1
# Two series of steps: those that the script passes as ``step=``, which may be epochs, and the steps
# of a guard in which the script logs without it.
_GIVEN_STEP = 0
_GUARD_STEP = 1
# W&B sends its history every few seconds, in which a script logs fewer times than this.
_MOST_POSITIONS = 4096
# Arguments of ``wandb.init``, and fields of its argument ``settings``, with which the user chooses
# the run.
_CHOSEN_BY_USER = ("id", "resume_from", "fork_from")
_CHOSEN_IN_SETTINGS = ("run_id", "resume_from", "fork_from", "resume")
# Values of ``resume=`` with which W&B continues a run that exists, and otherwise begins it.
_RESUMING = (None, True, "allow")


def install(
    watch: ImportWatch, run_path: Path, attempt: str, note_error: Callable[[Any], None]
) -> None:
    """Wrap the functions of W&B when the script imports it.

    Args:
        watch: Calls the function that wraps them.
        run_path: The run directory.
        attempt: Identifies this start of the training processes.
        note_error: Records an error of holdfast, which must not reach the script.
    """
    on_preemption(lambda: _mark_preempting(note_error))
    run_id = os.environ.get(WANDB_VARIABLE)
    if run_id is None or os.environ.get(_ID_VARIABLE) != run_id:
        # The user has chosen an id, or this is no supervised run.
        return
    init = _Init(run_id, run_path / f"wandb-{attempt}.claim", note_error)
    log = _Log(run_id, run_path / _STEPS_FILE, note_error)
    watch.when_imported("wandb", init.wrap)
    watch.when_imported("wandb.sdk.wandb_run", log.wrap)


def _mark_preempting(note_error: Callable[[Any], None]) -> None:
    """Tell W&B that the run stops for a scheduler, so that a sweep runs it again."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None:
        return
    try:
        run.mark_preempting()
    except Exception as error:  # noqa: BLE001 - W&B may be unreachable, and the run must still save
        note_error(error)


class _Init:
    """The wrapper of ``wandb.init``.

    Args:
        run_id: The id that is continued.
        claim: The file that the first ``wandb.init`` of the attempt creates.
        note_error: Records an error of holdfast.
    """

    def __init__(self, run_id: str, claim: Path, note_error: Callable[[Any], None]) -> None:
        self._run_id = run_id
        self._claim = claim
        self._note_error = note_error

    def wrap(self, module: Any) -> None:
        # Imported here because it takes milliseconds, and few processes import W&B.
        import inspect

        # W&B has not read them yet, and processes that the script starts must not inherit them.
        for name in (_ID_VARIABLE, _RESUME_VARIABLE):
            os.environ.pop(name, None)
        original = module.init
        signature = inspect.signature(original)

        @wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = signature.bind_partial(*args, **kwargs).arguments
                if self._should_continue(module, arguments):
                    args = ()
                    kwargs = {**arguments, "id": self._run_id, "resume": "allow"}
            except Exception as error:  # noqa: BLE001 - `init` itself reports wrong arguments
                self._note_error(error)
            return original(*args, **kwargs)

        module.init = init

    def _should_continue(self, module: Any, arguments: Mapping[str, Any]) -> bool:
        """Return whether a call of ``wandb.init`` continues the run of the earlier attempts."""
        settings = arguments.get("settings") or {}
        in_settings = settings if isinstance(settings, dict) else vars(settings)
        chosen = [arguments.get(name) for name in _CHOSEN_BY_USER]
        chosen += [in_settings.get(name) for name in _CHOSEN_IN_SETTINGS]
        if any(value is not None for value in chosen):
            return False
        if arguments.get("resume") not in _RESUMING or module.run is not None:
            return False
        return self._takes_claim()

    def _takes_claim(self) -> bool:
        """Return whether this call is the first one of the attempt, on the first rank."""
        if os.environ.get("RANK", "0") != "0" or os.environ.get("SLURM_PROCID", "0") != "0":
            return False
        with suppress(FileExistsError):
            os.close(os.open(self._claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return True
        return False


class _Log:
    """The wrapper of ``Run.log``, which drops what an earlier attempt has logged already.

    Args:
        run_id: The id of the run.
        file: Where the logged steps are kept.
        note_error: Records an error of holdfast.
    """

    def __init__(self, run_id: str, file: Path, note_error: Callable[[Any], None]) -> None:
        self._run_id = run_id
        self._file = file
        self._note_error = note_error
        # None until the first call for the run.
        self._steps: _LoggedSteps | None = None

    def wrap(self, module: Any) -> None:
        original = module.Run.log

        @wraps(original)
        def log(run: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if run.id == self._run_id and self._is_repeated(run, *args, **kwargs):
                    return None
            except Exception as error:  # noqa: BLE001 - `log` itself reports wrong arguments
                self._note_error(error)
            return original(run, *args, **kwargs)

        module.Run.log = log

    def _is_repeated(
        self, run: Any, _data: Any = None, step: Any = None, *_: Any, **__: Any
    ) -> bool:
        """Return whether a call logs a step that was logged before, and remember its step.

        The parameter names must be those of ``Run.log``, because arguments may be keyword
        arguments.
        """
        if self._steps is None:
            self._steps = _LoggedSteps(self._file)
            if not run.offline:
                self._steps.forget_lost(int(run.starting_step))
        if step is not None:
            # The server knows its last step, and W&B drops what is not after it.
            return run.offline and self._steps.was_logged(_GIVEN_STEP, int(step))
        step = _guarded_step()
        if step is None or self._steps.was_logged(_GUARD_STEP, step):
            return step is not None
        self._steps.note_position(int(run.step), step)
        return False


class _LoggedSteps:
    """The steps that all attempts have logged, in a file that is current if the process is killed.

    The file starts with the largest step of each of the two series below. A ring of pairs follows:
    the position in W&B's history, and the step of the guard at which it was written.

    Args:
        file: The file, which is created if it does not exist.

    Raises:
        OSError: If the file cannot be opened or written.
    """

    def __init__(self, file: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(file, flags, 0o600)
        content = os.pread(self._descriptor, _PAIR.size, 0)
        # The largest steps of earlier attempts, and those of this attempt too.
        self._earlier = [_NO_STEP, _NO_STEP]
        if len(content) == _PAIR.size:
            self._earlier = list(_PAIR.unpack(content))
        self._largest = list(self._earlier)

    def forget_lost(self, starting_step: int) -> None:
        """Forget steps of the guard that an earlier attempt has logged, but W&B has not received.

        Args:
            starting_step: The number of positions in the history that the server knows.
        """
        received = _NO_STEP
        if starting_step > 0:
            content = os.pread(self._descriptor, _PAIR.size, _offset(starting_step - 1))
            if len(content) == _PAIR.size:
                position, step = _PAIR.unpack(content)
                # Otherwise, the ring has been overwritten since, and all steps count as received.
                received = step if position == starting_step - 1 else self._earlier[_GUARD_STEP]
        self._earlier[_GUARD_STEP] = received
        self._largest[_GUARD_STEP] = received

    def was_logged(self, series: int, step: int) -> bool:
        """Return whether a step was logged by an earlier attempt, or before a rollback."""
        if step <= self._earlier[series] or step < self._largest[series]:
            return True
        if step > self._largest[series]:
            self._largest[series] = step
            os.pwrite(self._descriptor, _PAIR.pack(*self._largest), 0)
        return False

    def note_position(self, position: int, step: int) -> None:
        """Remember the step of the guard at a position in W&B's history."""
        os.pwrite(self._descriptor, _PAIR.pack(position, step), _offset(position))


def _offset(position: int) -> int:
    return _PAIR.size * (1 + position % _MOST_POSITIONS)


def _guarded_step() -> int | None:
    """Return the step of the guard in this process, or None if no guard is open.

    Without a guard, the step of a restarted script is unknown.
    """
    records = [reference() for _, reference in guarded.values()]
    steps = [record.global_step for record in records if record is not None]
    return max(steps, default=None)

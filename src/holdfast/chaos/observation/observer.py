"""Observe each Python process of a tested command.

``injected/sitecustomize.py`` in the ``supervise`` package calls `start` when a process starts,
before the process runs its script. The observer writes a trace of what the process does, and calls
the injector at each moment for which a fault may be planned. It observes files through audit events
(`file_audit`), and the training loop through hooks in torch (`torch_observer`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from holdfast.chaos.injection.injector import Injector
from holdfast.chaos.observation.file_audit import FileAudit
from holdfast.chaos.observation.shield import ScriptShield
from holdfast.chaos.observation.torch_observer import TorchObserver
from holdfast.chaos.observation.trace_writer import TraceWriter
from holdfast.core.importing import ImportWatch

_observer: TrainingObserver | None = None


def start(run: str) -> None:
    """Start observing this process. Only the first call in a process has an effect.

    Args:
        run: The trace folder of the attempt.
    """
    global _observer
    if _observer is None and Path(run).is_dir():
        _observer = TrainingObserver(Path(run))


class TrainingObserver:
    """Observes this process and all processes that are forked from it.

    Args:
        folder: The trace folder of the attempt.
    """

    def __init__(self, folder: Path) -> None:
        self._shield = ScriptShield(folder)
        self._trace = TraceWriter(folder)
        self._injector = Injector(folder, self._trace.write)
        plan = self._injector.plan
        writable_folders = (str(folder), *plan.writable_folders)
        self._files = FileAudit(writable_folders, plan.trial_began, self._trace, self._shield)
        self._imports = ImportWatch(self._shield.note_error)
        # The observer of the training loop; None until the script has imported torch.
        self._torch_observer: TorchObserver | None = None
        self._injector.begin()
        self._imports.when_imported("torch", self._observe_torch)
        os.register_at_fork(after_in_child=self._restart)
        sys.addaudithook(self._files.hook)

    def _observe_torch(self, torch: Any) -> None:
        self._shield.torch_imported(torch)
        self._torch_observer = TorchObserver(
            torch,
            trace=self._trace,
            files=self._files,
            injector=self._injector,
            shield=self._shield,
            imports=self._imports,
        )
        self._torch_observer.install()

    def _restart(self) -> None:
        """Start a separate trace in a newly forked process."""
        self._trace.restart()
        self._files.restart()
        if self._torch_observer is not None:
            self._torch_observer.restart()

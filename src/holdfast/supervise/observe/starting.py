"""Begin to observe this process; called by ``injected/sitecustomize.py`` before any code of the script.

It costs what its imports cost, and nothing more happens until torch is imported.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from holdfast.recorder.run_files import ATTEMPT_VARIABLE
from holdfast.supervise.observe.observer import Observer, find_number

_observer: Observer | None = None


def start(run: str) -> None:
    """Observe this process, if the run directory is there; once.

    Args:
        run: The run directory, as an absolute path.

    Raises:
        OSError: if it cannot be written.
    """
    global _observer
    folder = Path(run)
    if _observer is None and folder.is_absolute() and folder.is_dir():
        observer = _observer = Observer(folder, find_number(os.environ, (ATTEMPT_VARIABLE,)) or 0)
        observer.watch.when_imported("torch", lambda torch: _on_torch(torch, observer))


def _on_torch(torch: ModuleType, observer: Observer) -> None:
    from holdfast.supervise.observe.hooks import install

    observer.trains_with(str(torch.__version__))
    observer.count_with(install(torch, observer))

"""Imported by Python when it starts, because this directory comes first on ``PYTHONPATH``.

It starts observing the process, then imports the ``sitecustomize`` that Python would have imported
without us, in the way that Python does. If our code fails, the error is noted in the run
directory and the script runs as if we were not there.

It must run under any Python 3, including one that cannot import holdfast.
"""

# ruff: noqa: PTH100, PTH118, PTH120 - pathlib takes 5 ms to import, in every Python that a command starts

import os
import sys

_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))
# Path of the run directory, as `recorder.run_files` names it; holdfast is not imported yet.
_RUN_VARIABLE = "OBSERVED_BY_HOLDFAST"
# MODULE:DIRECTORY names another module whose `start` is called; ``holdfast chaos`` uses it.
_OTHER_OBSERVER_VARIABLE = "OBSERVER_OF_HOLDFAST"
_OBSERVER = "holdfast.supervise.observe.observer"
_NAME = "sitecustomize"


def _leave_path() -> None:
    """Restore ``sys.path`` to what it would be without us.

    ``PYTHONPATH`` stays as it is, for child processes.
    """
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _OWN_FOLDER]


def _observe() -> None:
    """Start the observers named in environment variables."""
    other_module, _, other_directory = os.environ.get(_OTHER_OBSERVER_VARIABLE, "").partition(":")
    _start_observer(other_module, other_directory)
    _start_observer(_OBSERVER, os.environ.get(_RUN_VARIABLE, ""))


def _start_observer(module_name: str, run: str) -> None:
    if not run:
        return
    try:
        _flush_each_line()
        _import_holdfast()
        import importlib

        importlib.import_module(module_name).start(run)
    except Exception:  # noqa: BLE001 - our errors must not stop the script
        _note_error(run)


def _flush_each_line() -> None:
    """Make stdout line-buffered instead of flushing every 8 KiB.

    Buffered output is lost if the process is killed. ``PYTHONUNBUFFERED`` is no alternative: it
    writes lines in pieces, so the lines of several ranks would be interleaved.
    """
    if "PYTHONUNBUFFERED" not in os.environ and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)


def _import_holdfast() -> None:
    """Import holdfast from where the script would import it, or else from our own installation.

    In the second case no other package of our installation becomes importable.
    """
    import importlib.util

    installed = importlib.util.find_spec("holdfast")
    if installed is not None and installed.origin is not None:
        return
    package = os.path.dirname(os.path.dirname(_OWN_FOLDER))
    spec = importlib.util.spec_from_file_location(
        "holdfast", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise ImportError("holdfast cannot be found")
    module = importlib.util.module_from_spec(spec)
    sys.modules["holdfast"] = module
    spec.loader.exec_module(module)


def _note_error(run: str) -> None:
    """Write the current exception into the run directory."""
    import traceback

    try:
        folder = os.path.join(run, "processes")
        # A symbolic link could lead out of the run directory.
        if os.path.islink(folder):  # noqa: PTH114 - before anything is imported
            return
        path = os.path.join(folder, f"failed-{os.getpid()}.txt")
        with open(path, "a", opener=_open_safely) as file:
            traceback.print_exc(file=file)
    except OSError:
        # The run directory itself cannot be written, so there is nowhere to note the error.
        pass


def _open_safely(path: str, flags: int) -> int:
    """Open a file without following a link or waiting for the reader of a pipe.

    A copy of what `holdfast.core.files` does, since that may be what cannot be imported.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _import_next_sitecustomize() -> None:
    """Import the next ``sitecustomize`` on the path.

    Raises:
        ModuleNotFoundError: If there is none, just as without us; Python then continues silently.
    """
    import importlib.util

    for finder in sys.meta_path:
        spec = finder.find_spec(_NAME, None) if hasattr(finder, "find_spec") else None
        if spec is None:
            continue
        module = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = module
        if spec.loader is not None:
            spec.loader.exec_module(module)
        return
    raise ModuleNotFoundError(f"No module named {_NAME!r}", name=_NAME)


if __name__ == _NAME:
    _leave_path()
    _observe()
    _import_next_sitecustomize()

"""Start observing the process; Python imports this module at startup.

Python finds this module because its directory comes first on ``PYTHONPATH``. After starting the
observer, the module imports the ``sitecustomize`` that Python would otherwise have imported, in the
same way as Python itself. If holdfast's code fails, the error is written to the run directory and
the script runs normally.

The code must run under any Python 3, including one in which holdfast cannot be imported.
"""

# ruff: noqa: PTH100, PTH118, PTH120 - importing pathlib would add 5 ms to every Python process

import os
import sys

_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))
# Environment variable that contains the path of the run directory. It equals `OBSERVE_VARIABLE` in
# `recorder.run_files`, which cannot be imported yet.
_RUN_VARIABLE = "OBSERVED_BY_HOLDFAST"
# Environment variable that ``holdfast chaos`` sets to ``MODULE:DIRECTORY``. The function `start` of
# that module is called with the directory.
_OTHER_OBSERVER_VARIABLE = "OBSERVER_OF_HOLDFAST"
_OBSERVER = "holdfast.supervise.observe.observer"
_NAME = "sitecustomize"


def _leave_path() -> None:
    """Remove the directory of this module from ``sys.path``.

    ``PYTHONPATH`` keeps the directory, so that child processes are observed too.
    """
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _OWN_FOLDER]


def _observe() -> None:
    """Start the observers that the environment variables name."""
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
    except Exception:  # noqa: BLE001 - holdfast's errors must not stop the script
        _note_error(run)


def _flush_each_line() -> None:
    """Make stdout line-buffered; by default, Python flushes a pipe only every 8 KiB.

    Buffered output is lost if the process is killed. ``PYTHONUNBUFFERED`` is no alternative,
    because it writes each line in pieces, which would interleave the lines of several ranks.
    """
    if "PYTHONUNBUFFERED" not in os.environ and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)


def _import_holdfast() -> None:
    """Import holdfast from the script's environment if installed there, else from the supervisor's.

    None of the other packages in the supervisor's environment becomes importable.
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
    """Write the current exception to a file in the run directory."""
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
        # If the run directory cannot be written, there is nowhere to report the error.
        pass


def _open_safely(path: str, flags: int) -> int:
    """Open a file, but refuse symbolic links and never block on a pipe.

    Duplicates a function of `holdfast.core.files`, because holdfast may not be importable here.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _import_next_sitecustomize() -> None:
    """Import the next ``sitecustomize`` on ``sys.path``.

    Raises:
        ModuleNotFoundError: If there is none. Python ignores this error at startup.
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

"""Imported by Python when it starts, since this directory comes first on ``PYTHONPATH``.

Begins to observe.

Then the ``sitecustomize`` that would have been imported without us is, in the way that Python does
it. Whatever goes wrong with ours is noted in the run directory, and the script runs as if we were
not there.

Written for any Python 3, which need not be one that can import holdfast.
"""

# ruff: noqa: PTH100, PTH118, PTH120 - pathlib takes 5 ms to import, in every Python that a command starts

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_RUN = "OBSERVED_BY_HOLDFAST"  # as recorder.run_files says; holdfast is not imported yet
# MODULE:DIRECTORY: another module whose `start` observes, of ``holdfast chaos``
_ANOTHER = "OBSERVER_OF_HOLDFAST"
_NAME = "sitecustomize"


def _leave_path() -> None:
    """Let ``sys.path`` be what it would be without us; ``PYTHONPATH`` stays, for the children."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]


def _import_holdfast() -> None:
    """Import holdfast from where the script would, or else from here, without a look at what
    else lies here.
    """
    import importlib.util

    found = importlib.util.find_spec("holdfast")
    if found is not None and found.origin is not None:
        return
    package = os.path.dirname(os.path.dirname(_HERE))
    spec = importlib.util.spec_from_file_location(
        "holdfast", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise ImportError("holdfast cannot be found")
    module = importlib.util.module_from_spec(spec)
    sys.modules["holdfast"] = module
    spec.loader.exec_module(module)


def _observe() -> None:
    other, _, directory = os.environ.get(_ANOTHER, "").partition(":")
    for name, run in (
        (other, directory),
        ("holdfast.supervise.observe.observer", os.environ.get(_RUN)),
    ):
        if not run:
            continue
        try:
            _print_whole_lines()
            _import_holdfast()
            import importlib

            importlib.import_module(name).start(run)
        except Exception:  # noqa: BLE001 - nothing of ours may stop the script
            _note(run)


def _print_whole_lines() -> None:
    """Let each line go out when it is printed, not after 8 KiB of them.

    What waits is lost if the process is killed.

    Not ``PYTHONUNBUFFERED``, which cuts lines into pieces, so that those of several ranks would be
    mixed.
    """
    if "PYTHONUNBUFFERED" not in os.environ and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)


def _note(run: str) -> None:
    import traceback

    try:
        folder = os.path.join(run, "processes")
        if os.path.islink(folder):  # noqa: PTH114 - before anything is imported
            return  # it leads out of the run directory
        name = os.path.join(folder, f"failed-{os.getpid()}.txt")
        # As holdfast.core.files, which may be what cannot be imported
        safely = os.O_NOFOLLOW | os.O_NONBLOCK
        with open(
            name, "a", opener=lambda path, flags: os.open(path, flags | safely, 0o600)
        ) as file:
            traceback.print_exc(file=file)
    except OSError:
        pass  # the run directory is what fails: there is nowhere to say so


def _import_theirs() -> None:
    """Import the next ``sitecustomize``.

    ImportError if there is none, as without us: Python goes on in silence.
    """
    import importlib.util

    for finder in sys.meta_path:
        spec = finder.find_spec(_NAME, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[_NAME] = module
            if spec.loader is not None:
                spec.loader.exec_module(module)
            return
    raise ModuleNotFoundError(f"No module named {_NAME!r}", name=_NAME)


if __name__ == _NAME:
    _leave_path()
    _observe()
    _import_theirs()

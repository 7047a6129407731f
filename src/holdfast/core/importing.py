"""Run an action once the user's code has imported a module, without triggering the import.

`ImportWatch` is an import finder: Python asks it about every import, and it wraps the loader of
each watched module. The original loader is restored before the module's code runs, so the wrapper
appears neither in the module nor in the traceback of a failing import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class ImportWatch:
    """A finder on ``sys.meta_path`` that runs actions after modules have been imported.

    Args:
        failed: Called with the exception if an action fails. The exception is not propagated to the
            script.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        # The actions of each module, in the order in which they were registered.
        self._actions: dict[str, list[Action]] = {}
        # Names of the modules that `find_spec` is currently looking up through the other finders.
        self._searches: set[str] = set()

    def when_imported(self, name: str, action: Action) -> None:
        """Call `action(module)` once the named module is imported, or now if it already is."""
        self._actions.setdefault(name, []).append(action)
        module = sys.modules.get(name)
        if module is not None and not _is_being_imported(module):
            self.imported(module, name)
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a watched module, found by the other finders, with its loader wrapped.

        Return None for any other module, so that Python asks the other finders.
        """
        # Avoid infinite recursion: another finder may itself query all finders, including this one.
        if name not in self._actions or name in self._searches:
            return None
        self._searches.add(name)
        try:
            spec = self._ask_other_finders(name, path, target)
        finally:
            self._searches.discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment] # acts as a loader
        return spec

    def _ask_other_finders(
        self, name: str, path: Any, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def imported(self, module: ModuleType, name: str) -> None:
        """Call a module's actions and forget them, so that reloading does not call them again."""
        for action in self._actions.pop(name, []):
            try:
                action(module)
            except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
                self._failed(error)


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Loader:
    """A wrapper around a module's loader that removes itself just before the module runs."""

    def __init__(self, loader: Any, watch: ImportWatch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        # `copy.copy` creates an instance without attributes, so looking up `_loader` here would
        # recurse endlessly.
        if name in ("_loader", "_watch"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._watch.imported(module, module.__name__)


# Python removes the frames of its import system from tracebacks, and recognizes these frames by
# their file name. Giving the wrapper the same file name removes its frame too.
_Loader.exec_module.__code__ = _Loader.exec_module.__code__.replace(
    co_filename="<frozen importlib._bootstrap_external>"
)

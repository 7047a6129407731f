"""Act when a module has been imported by whoever imports it, and import nothing until then.

A finder looks at every import, and wraps the loader of the few modules that somebody waits for,
once. The module gets its own loader back before it runs, so neither it nor a failing import shows
that we were there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Act = Callable[[ModuleType], None]


class ImportWatch:
    """Acts when modules have been imported."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._acts: dict[str, Act] = {}
        self._looking: set[str] = set()

    def when_imported(self, name: str, act: Act) -> None:
        """Do something with a module once it is imported, now if it is already."""
        module = sys.modules.get(name)
        self._acts[name] = act
        if module is not None and not getattr(
            getattr(module, "__spec__", None), "_initializing", False
        ):
            self.imported(module, name)
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as the other finders do, and wrap its loader if somebody waits for it."""
        if name not in self._acts or name in self._looking:
            return None  # the second: a finder that asks all the others
        self._looking.add(name)
        try:
            finders = (
                each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")
            )
            spec = next(
                filter(None, (each.find_spec(name, path, target) for each in finders)), None
            )
        finally:
            self._looking.discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment] # a loader as well
        return spec

    def imported(self, module: ModuleType, name: str) -> None:
        """Do what was asked for, once: a module that is loaded again is not wrapped."""
        act = self._acts.pop(name, None)
        try:
            if act is not None:
                act(module)
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self._failed(error)


class _Loader:
    """Stands for a loader until it is used."""

    def __init__(self, loader: Any, watch: ImportWatch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_watch"):
            raise AttributeError(name)  # of a copy that is being made
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._watch.imported(module, module.__name__)


# Python leaves frames of its own importing out of a traceback, by this name: a failing import reads
# as without us.
_Loader.exec_module.__code__ = _Loader.exec_module.__code__.replace(
    co_filename="<frozen importlib._bootstrap_external>"
)

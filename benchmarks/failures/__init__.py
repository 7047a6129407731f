"""Failures that are really reproduced: each is a small function that fails as users' programs do.

The modules beside this file hold them, each decorated with `failure`. ``python -m benchmarks.failures NAME`` runs one
in this process, and it must fail there; ``--list`` shows all. `reproduce` runs one in a process of its own and
returns what it printed and how it ended. Nothing here prints a text of an error that did not happen.

    @failure("H965", author="G")
    def linear_after_flatten_of_another_size() -> None:
        import torch

        torch.nn.Linear(10, 2)(torch.zeros(4, 11))
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_MOST_BYTES = 4 << 30  # RLIMIT_DATA of a failure that asks for no limit: none may take the machine with it
_MOST_LOG_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure that can be reproduced.

    Args:
        name: ``module.function``.
        label: Id of the signature that is right for it.
        author: Letter of who wrote it.
        body: The function; it fails.
        needs: Names of modules that must be importable, separated by spaces; it is passed over without them.
        limit_bytes: RLIMIT_DATA while it runs; None: 4 GiB.
        timeout: Seconds after which it is killed, and counts as not reproduced.
        also: Ids that are as right as the label.
        silent: Whether its log says nothing of it, so that only the exit status does.
    """

    name: str
    label: str
    author: str
    body: Callable[[], object]
    needs: str = ""
    limit_bytes: int | None = None
    timeout: float = 60
    also: tuple[str, ...] = ()
    silent: bool = False

    @property
    def possible(self) -> bool:
        """Return whether all that it needs is installed."""
        return all(importlib.util.find_spec(module) is not None for module in self.needs.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduced:
    """What one failure printed, and how it ended.

    Args:
        text: Standard output and error together, in the order in which they came.
        status: Exit code, negative for a signal.
        seconds: How long it took.
        failed: Whether it ended as it should: not after its time limit, and not with 0.
    """

    text: bytes
    status: int
    seconds: float
    failed: bool


_REGISTRY: dict[str, Failure] = {}


def failure(
    label: str,
    *,
    author: str,
    needs: str = "",
    limit_bytes: int | None = None,
    timeout: float = 60,
    also: tuple[str, ...] = (),
    silent: bool = False,
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register a function that fails; see `Failure` for the arguments.

    Its imports stand inside it, and it ends by the failure: an exception that nobody catches, a signal, ``os._exit``.
    It runs in a fresh process, in an empty temporary directory.
    """

    def register(body: Callable[[], object]) -> Callable[[], object]:
        name = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        if name in _REGISTRY:
            raise ValueError(f"two failures are called {name}")
        _REGISTRY[name] = Failure(
            name=name, label=label, author=author, body=body, needs=needs, limit_bytes=limit_bytes,
            timeout=timeout, also=also, silent=silent,
        )  # fmt: skip
        return body

    return register


def all_failures() -> dict[str, Failure]:
    """Return every failure by its name, of all modules beside this file."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name != "__main__":
            importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def find_failure(name: str) -> Failure:
    """Return one failure by ``module.function``, of which only that module is imported, or by its function's name."""
    module, dot, _ = name.partition(".")
    if dot:
        importlib.import_module(f"{__name__}.{module}")
        return _REGISTRY[name]
    (found,) = (each for each in all_failures().values() if each.name.rpartition(".")[2] == name)
    return found


def run_here(chosen: Failure) -> None:
    """Run one failure in this process, under its limits; it is a mistake of its author if this returns."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = chosen.limit_bytes or _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    chosen.body()


def reproduce(chosen: Failure) -> Reproduced:
    """Run one failure in a process of its own, in an empty directory, and return what it left."""
    with tempfile.TemporaryDirectory(prefix="failure-") as folder, tempfile.TemporaryFile() as output:
        started = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.failures", chosen.name],
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        late = False
        with _nothing_left_of(child):
            try:
                child.wait(chosen.timeout)
            except subprocess.TimeoutExpired:
                late = True
        status = child.wait()
        output.seek(0)
        text = output.read(_MOST_LOG_BYTES)
        failed = status != 0 and not late
        return Reproduced(text=text, status=status, seconds=time.monotonic() - started, failed=failed)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PYTEST_"))}
    paths = [str(_ROOT), *filter(None, [kept.get("PYTHONPATH", "")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def _nothing_left_of(child: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)

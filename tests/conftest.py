"""What every test may rely on.

One thread, known random state, nothing left behind in the process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.prepared import prepare_forecasts

# A shell starts what it runs in the background with these two ignored, and so would be all that the
# tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) == signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# With it a line is written in pieces, and those of several processes end up in each other.
os.environ.pop("PYTHONUNBUFFERED", None)
_HUGE_BYTES, _MADV_COLLAPSE = 2**21, 25  # uapi/asm-generic/mman-common.h
_SIGNALS_OF_GUARDS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SLOW = (  # they start programs, frameworks, or trainings that take their time
    "faults/",
    "integrations/",
    "docs/test_tutorial",
    "architecture/test_readme",
    "architecture/test_examples",
    "recipes/test_gan",
    "recipes/test_speech",
    "unit/cli/test_explain_guarded",
    "unit/explain/test_logs",
    "unit/forecast/test_stand_ins",
    "unit/guard/test_torn_steps",
    "unit/guard/test_unsaved",
    "unit/guard/test_window",
    "unit/learning/test_repeated_batches",
    "unit/loader/test_drop_in",
    "unit/report/test_gathering",
    "unit/supervise/test_stacks",
    "unit/supervise/test_watchdog",
)


def pytest_collectstart() -> None:
    """Load torch where tests are collected, not in the process that only hands them out."""
    import hypothesis  # while it loads it asks who refers to a generator, and what is frozen is not found
    import torch

    # On a busy machine an example may take any time.
    hypothesis.settings.register_profile(
        "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("busy machine")
    torch.set_num_threads(1)  # sums are rounded differently by another number of threads


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of slow tests if those are not asked for.

    With what they import a worker's forks are slower.
    """
    name = collection_path.relative_to(Path(__file__).parent).as_posix()
    return True if name.startswith(_SLOW) and config.option.markexpr == "not slow" else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid.removeprefix("tests/").startswith(_SLOW):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> None:
    """What is loaded is neither looked through by each collection of garbage nor copied by a
    fork; the rest goes.
    """
    from holdfast.memory.host_memory import trim_heap

    gc.collect()
    trim_heap()
    gc.freeze()
    _use_huge_pages()


def _use_huge_pages() -> None:
    """Have the kernel move what is allocated into huge pages, if it can (Linux 6.1).

    A fork then copies few entries.

    Half the time of the guard's tests would else be that of their forks: 30 ms each, not 10.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if re.search(r" rw-p .* 0 +(\[heap\])?$", line):  # what no file stands behind
            first, last = (int(each, 16) for each in line.split()[0].split("-"))
            first += -first % _HUGE_BYTES
            if (length := (last - first) // _HUGE_BYTES * _HUGE_BYTES) > 0:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_COLLAPSE)


@pytest.fixture(autouse=True)
def clean_process(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    import torch

    from holdfast.loader.random_state import seed_cpu
    from holdfast.numerics.eager import anything_compiled

    for name in list(os.environ):
        if name.startswith("HOLDFAST_"):
            monkeypatch.delenv(name)
    seed_cpu(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    if request.node.nodeid.startswith(("tests/unit/", "tests/property/")):
        monkeypatch.setattr(os, "fsync", lambda _: None)  # a disk's time; tests of faults sync
    # A guard that was stopped leaves the warnings of schedulers ignored, and processes that a later
    # test starts would inherit that.
    handlers = {number: signal.getsignal(number) for number in _SIGNALS_OF_GUARDS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if anything_compiled():
        torch.compiler.reset()  # or the diagnosis would see less in the tests after this one
    assert torch._C._get_mkldnn_enabled(), "a test has left oneDNN switched off"


@pytest.fixture
def unchecked_splits(clean_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No guard finds out in forks whether a step may be split and what else it changes, as beside
    an accelerator.

    They take longer than all else in a small run. For tests of what is saved and resumed, and
    others that say nothing of either. Those that kill runs (`tests/faults/test_kills.py`) have the
    forks too.
    """
    monkeypatch.setenv("HOLDFAST_CHECK_SPLIT", "false")
    monkeypatch.setattr(
        "holdfast.guard.splitting.split_trials.backward_works_in_a_copy", lambda: False
    )


@pytest.fixture
def prepared_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast's children are forked from a process that is prepared.

    Tests of how one starts go without.
    """
    prepare_forecasts(monkeypatch)

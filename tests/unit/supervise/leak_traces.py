"""What holds memory that grows: looks at all objects, paths to names, lines of sources.

And that nothing changes.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.events.process_events import Leak, LeakTrace
from holdfast.supervise.leaks import census
from holdfast.supervise.leaks.holder_links import HolderLink, text_of
from holdfast.supervise.leaks.introspection import locals_of
from holdfast.supervise.leaks.references import HolderSearch
from holdfast.supervise.leaks.source_lines import SourceLines
from holdfast.supervise.leaks.tracer import LeakTracer

_MOST_STEPS = 60


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> None:
    """Nothing is frozen here: nobody could say who holds it."""


def traced(
    step: Callable[[int], object], *, most: int = _MOST_STEPS
) -> tuple[list[Leak], LeakTrace]:
    """Make steps under a trace until it has ended, and return what leaked and the summary."""
    events: list[Any] = []
    tracer = LeakTracer(events.append)
    for number in range(most):
        step(number)
        tracer.after_step(1)
        if events:
            break
    return events[:-1], events[-1]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


# --- traces
# ------------------------------------------------------------------------


def test_a_list_is_named_with_its_line_and_its_size() -> None:
    """What is kept, how much a step, held by what and kept by which line: all of it is right."""
    kept_here: list[Any] = []

    def step(number: int) -> None:
        made = torch.zeros(64, 32)
        kept_here.append(made)

    (leak,), summary = traced(step)
    assert leak.what == "list of Tensor (64, 32) float32"
    assert leak.count_per_step == 1
    assert leak.bytes_per_step == 64 * 32 * 4
    assert leak.held_by.startswith("kept_here")
    assert leak.retained_at.startswith(f"{__file__}:{line_of('kept_here.append(made)')} in step: ")
    assert (leak.form, leak.signature, leak.device) == ("container", "H1501", "cpu")
    assert (summary.found, summary.request) == (1, 1)


def test_what_is_bounded_is_no_leak() -> None:
    """A full queue, a cache that is hit and a tensor that is replaced are not told.

    The trace ends by itself.
    """
    recent: deque[Any] = deque(torch.zeros(10) for _ in range(4))
    cache: dict[int, Any] = {}
    best = {"loss": torch.zeros(10)}

    def step(number: int) -> None:
        recent.append(torch.zeros(10))
        recent.popleft()
        cache[number % 3] = torch.zeros(10)
        best["loss"] = torch.zeros(10)

    leaks, summary = traced(step)
    assert leaks == []
    assert (summary.found, summary.steps) == (0, 3)


def test_too_many_objects_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that would itself need much memory is not begun, and says why."""
    monkeypatch.setattr(census, "_MAX_OBJECTS", 100)
    leaks, summary = traced(lambda _: None)
    assert leaks == []
    assert "objects" in summary.why


def test_a_trace_changes_nothing_and_keeps_nothing() -> None:
    """Random state, gradients and the collector are as before, and every tensor dies when the
    script lets it go.
    """
    model, kept = torch.nn.Linear(4, 4), []
    model(torch.ones(2, 4)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    before = (
        random.getstate(),
        torch.get_rng_state().tolist(),
        gradient.tolist(),
        gc.isenabled(),
        sys.gettrace(),
    )

    def step(number: int) -> None:
        kept.append(model(torch.ones(2, 4)))

    (leak,), _ = traced(step)
    assert leak.form == "graph"
    after = (
        random.getstate(),
        torch.get_rng_state().tolist(),
        gradient.tolist(),
        gc.isenabled(),
        sys.gettrace(),
    )
    assert after == before
    assert model.weight.grad is gradient
    gone = [weakref.ref(each) for each in kept]
    kept.clear()
    assert [each() for each in gone] == [None] * len(gone)


def test_no_code_of_the_script_is_called() -> None:
    """Objects whose every method raises are looked at all the same."""

    class Hostile(list):  # type: ignore[type-arg]
        value = 0
        dtype = "float32"

        @property
        def shape(self) -> Any:
            raise AssertionError("called")

        def _refuse(self, *args: object) -> Any:
            raise AssertionError("called")

        __len__ = __iter__ = __getitem__ = __repr__ = __eq__ = __getattribute__ = __sizeof__ = (
            _refuse
        )
        __hash__ = None  # type: ignore[assignment]

    things = [Hostile() for _ in range(4)]
    grows: list[Any] = []

    def step(number: int) -> None:
        grows.append(Hostile())
        list.append(things[0], torch.zeros(100))

    leaks, _ = traced(step)
    assert {leak.what.split(" of ")[-1] for leak in leaks} >= {"Tensor (100,) float32"}


def test_each_request_is_answered_once() -> None:
    """The same number again begins no trace, and a new number does."""
    events: list[Any] = []
    tracer = LeakTracer(events.append)
    for request in (1, 2):
        for _ in range(request * _MOST_STEPS):
            tracer.after_step(request)
    assert [event.request for event in events] == [1, 2]


def test_a_failed_look_ends_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in a look is raised once, for the observer to note, and nothing of the
    trace is left on.
    """
    kept: list[Any] = []
    events: list[Any] = []
    tracer = LeakTracer(events.append)
    monkeypatch.setattr(HolderSearch, "find_path", lambda *_: 1 / 0)
    failures = 0
    for _ in range(_MOST_STEPS):
        kept.append(torch.zeros(100))
        try:
            tracer.after_step(1)
        except ZeroDivisionError:
            failures += 1
    assert (failures, events, gc.isenabled()) == (1, [], True)


def test_a_cycle_is_told_by_the_attribute_that_closes_it() -> None:
    """Garbage that waits for the collector is told with the line that makes it a circle."""

    class Node:
        def __init__(self) -> None:
            self.value = torch.zeros(1000)
            self.itself = self

    gc.disable()
    try:
        leaks, _ = traced(lambda number: Node() and None)
    finally:
        gc.enable()
        gc.collect()
    # Without the collector the garbage of pytest itself may grow besides.
    told = [leak for leak in leaks if f":{line_of('self.itself = self')} " in leak.retained_at]
    assert [leak.form for leak in told] == ["cycle"]


# --- paths
# ------------------------------------------------------------------------


def path_to(target: object) -> str:
    frame: Any = sys._getframe(1)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    search = HolderSearch(frames, float("inf"))
    frames.clear()
    return text_of(search.find_path(target, set(), frozenset()).links)


class Holder:
    def __init__(self) -> None:
        self.inside = {"losses": [1, [2]]}


def with_default(value: object = [3, [4]]) -> None:
    pass


def test_paths_are_written_as_a_program_would() -> None:
    """Locals, attributes, entries, defaults and closures have the names that the script gives
    them.
    """
    holder = Holder()
    assert path_to(holder.inside["losses"][1]) == "holder.inside['losses'][...]"
    assert with_default.__defaults__ is not None
    assert path_to(with_default.__defaults__[0][1]) == "value (default of with_default)[...]"
    kept = [make_closure()]
    assert (
        path_to(kept[0].__closure__[0].cell_contents[1])
        == "kept[...] hidden (closure of inner)[...]"
    )


def make_closure() -> Any:
    hidden = [7, [8]]

    def inner() -> object:
        return hidden

    return inner


def test_locals_are_read_without_a_trace() -> None:
    """A snapshot of locals that we caused keeps nothing alive.

    One that the script has taken itself stays whole.
    """

    class Thing:
        pass

    def reads(*, keeps: bool) -> tuple[Any, Any]:
        thing = Thing()
        mine = locals() if keeps else None
        assert locals_of(sys._getframe())["thing"] is thing
        return weakref.ref(thing), mine

    gone, _ = reads(keeps=False)
    assert gone() is None
    there, mine = reads(keeps=True)
    assert mine["thing"] is there()


# --- lines
# ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "kind", "line"),
    [
        ("x = []\nx.append(1)", "x", "global", 2),
        ("x = []\nfor i in []:\n    x.append(1)", "x", "global", 3),
        ("x = {}\ndef f():\n    x[1] = 2", "x", "global", 3),
        ("x = {}\ndef f():\n    x.setdefault(1, []).append(2)", "x", "global", 3),
        ("x = {}\ndef f():\n    x['a']['b'] += [2]", "x", "global", 3),
        (
            "class A:\n  def __init__(self):\n    self.x = []\n  def f(self):\n    self.x += [1]",
            "x",
            "attribute",
            5,
        ),
        ("def f(x):\n    x[0].register_forward_hook(print)", "x", "global", 2),
        (
            "def f():\n    x = start()\n    for _ in range(9):\n        out, x = cell(y, x)",
            "x",
            "local",
            4,
        ),
        ("def f():\n    x = []\n    y.append(1)", "x", "local", 0),
        ("def f(", "x", "global", 0),
    ],
)
def test_the_line_that_adds_is_found(
    tmp_path: Path, text: str, name: str, kind: str, line: int
) -> None:
    """Calls, subscripts and assignments that add are found behind any base.

    An empty beginning is none.
    """
    file = tmp_path / "script.py"
    file.write_text(text)
    found = SourceLines([str(file)]).find_keeping_line([HolderLink(kind, name, file=str(file))])
    assert found.startswith(f"{file}:{line} in ") if line else not found

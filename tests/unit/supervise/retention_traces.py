"""What holds memory that grows: looks at all objects, paths to names, lines of sources; and that nothing changes."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.events import Event
from holdfast.explain.evidence import Ending, Facts
from holdfast.explain.judging import judge
from holdfast.supervise.observe import retention_census
from holdfast.supervise.observe.retention import Retention
from holdfast.supervise.observe.retention_lines import Name, Sources
from holdfast.supervise.observe.retention_paths import Names, Walk
from holdfast.supervise.observe.retention_steps import locals_of

_MOST_STEPS = 60
MODULE_HISTORY: list[Any] = []


def traced(step: Callable[[int], object], *, most: int = _MOST_STEPS) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Make steps under a trace until it has ended, and return what leaked and the summary."""
    told: list[tuple[str, dict[str, Any]]] = []
    retention = Retention(lambda kind, **facts: told.append((kind, facts)))
    for number in range(most):
        step(number)
        retention.after_step(1)
        if told:
            break
    assert not tracemalloc.is_tracing()
    return [facts for kind, facts in told if kind == "leak"], dict(told)["leak_trace"]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


# --- traces -------------------------------------------------------------------------------------------------------


def test_a_list_is_named_with_its_line_and_its_size() -> None:
    """What is kept, how much a step, made where, held by what and kept by which line: all of it is right."""
    kept_here: list[Any] = []

    def step(number: int) -> None:
        made = torch.zeros(64, 32)
        kept_here.append(made)

    (leak,), summary = traced(step)
    assert leak["what"] == "list of Tensor (64, 32) float32"
    assert leak["count_per_step"] == 1
    assert leak["bytes_per_step"] == 64 * 32 * 4
    assert leak["held_by"].startswith("kept_here")
    assert leak["retained_at"].startswith(f"{__file__}:{line_of('kept_here.append(made)')} in step: ")
    assert leak["allocated_at"].startswith(f"{__file__}:{line_of('made = torch.zeros(64, 32)')} in step: ")
    assert (leak["form"], leak["signature"], leak["device"]) == ("container", "H1501", "cpu")
    assert (summary["found"], summary["request"]) == (1, 1)


def test_a_global_wins_over_the_small_change_of_a_curve() -> None:
    """Of two lists that grow, the one with the bytes is told, and the one that has a number a step is not."""
    curve = []

    def step(number: int) -> None:
        curve.append(number * 1.5)
        MODULE_HISTORY.append(torch.zeros(1000))

    try:
        (leak,), _ = traced(step)
    finally:
        MODULE_HISTORY.clear()
    assert leak["held_by"].startswith("MODULE_HISTORY")
    assert f":{line_of('MODULE_HISTORY.append(')} " in leak["retained_at"]


def test_what_is_bounded_is_no_leak() -> None:
    """A full queue, a cache that is hit and a tensor that is replaced are not told; the trace ends by itself."""
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
    assert (summary["found"], summary["steps"]) == (0, 3 + 1 + 3 * 8)


def test_a_list_that_is_emptied_does_not_hide_a_leak() -> None:
    """A curve that is thrown away in the middle of a trace is no leak, and the leak beside it is still named."""
    curve: list[float] = []
    kept: list[Any] = []

    def step(number: int) -> None:
        if number == 5:
            curve.clear()
        curve.append(0.5 * number)
        kept.append(torch.zeros(256))

    leaks, summary = traced(step)
    assert [leak["held_by"].split("[")[0].split(" ")[0] for leak in leaks] == ["kept"]
    assert summary["found"] == 1


def test_too_many_objects_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that would itself need much memory is not begun, and says why."""
    monkeypatch.setattr(retention_census, "_MOST_OBJECTS", 100)
    leaks, summary = traced(lambda _: None)
    assert leaks == []
    assert "objects" in summary["why"]


def test_what_leaks_seldom_is_found_in_the_wider_window() -> None:
    """A snapshot every fourth step is not seen in four steps, and is seen in those eight steps apart."""
    snapshots: list[Any] = []

    def step(number: int) -> None:
        if number % 4 == 0:
            snapshots.append(torch.zeros(100))

    (leak,), _ = traced(step)
    assert leak["held_by"].startswith("snapshots")
    assert leak["count_per_step"] == pytest.approx(0.25)


def test_a_trace_changes_nothing_and_keeps_nothing() -> None:
    """Random state, gradients and the collector are as before, and every tensor dies when the script lets it go."""
    model, kept = torch.nn.Linear(4, 4), []
    model(torch.ones(2, 4)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    before = (random.getstate(), torch.get_rng_state().tolist(), gradient.tolist(), gc.isenabled(), sys.gettrace())

    def step(number: int) -> None:
        kept.append(model(torch.ones(2, 4)))

    (leak,), _ = traced(step)
    assert leak["form"] == "graph"
    after = (random.getstate(), torch.get_rng_state().tolist(), gradient.tolist(), gc.isenabled(), sys.gettrace())
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

        __len__ = __iter__ = __getitem__ = __repr__ = __eq__ = __getattribute__ = __sizeof__ = _refuse
        __hash__ = None  # type: ignore[assignment]

    things = [Hostile() for _ in range(4)]
    grows: list[Any] = []

    def step(number: int) -> None:
        grows.append(Hostile())
        list.append(things[0], torch.zeros(100))

    leaks, _ = traced(step)
    assert {leak["what"].split(" of ")[-1] for leak in leaks} >= {"Tensor (100,) float32"}


def test_a_tracemalloc_of_the_script_goes_on() -> None:
    """Where the script traces its memory itself, it still does after a trace of ours."""
    kept: list[Any] = []
    tracemalloc.start(2)
    try:
        told: list[str] = []
        retention = Retention(lambda kind, **facts: told.append(kind))
        while "leak_trace" not in told:
            kept.append(torch.zeros(100))
            retention.after_step(1)
        assert tracemalloc.is_tracing()
        assert tracemalloc.get_traceback_limit() == 2
    finally:
        tracemalloc.stop()


def test_each_request_is_answered_once() -> None:
    """The same number again begins no trace, and a new number does."""
    told: list[dict[str, Any]] = []
    retention = Retention(lambda kind, **facts: told.append(facts))
    for _ in range(2 * _MOST_STEPS):
        retention.after_step(1)
    assert [facts["request"] for facts in told] == [1]
    for _ in range(_MOST_STEPS):
        retention.after_step(2)
    assert [facts["request"] for facts in told] == [1, 2]


def test_a_failed_look_ends_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in a look is raised once, for the observer to note, and nothing of the trace is left on."""
    kept: list[Any] = []
    told: list[str] = []
    retention = Retention(lambda kind, **facts: told.append(kind))
    monkeypatch.setattr(Walk, "path_of", lambda *_: 1 / 0)
    failures = 0
    for _ in range(_MOST_STEPS):
        kept.append(torch.zeros(100))
        try:
            retention.after_step(1)
        except ZeroDivisionError:
            failures += 1
    assert (failures, told, gc.isenabled(), tracemalloc.is_tracing()) == (1, [], True, False)


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
    told = [leak for leak in leaks if f":{line_of('self.itself = self')} " in leak["retained_at"]]
    assert [leak["form"] for leak in told] == ["cycle"]


def test_a_graph_that_goes_back_to_the_first_step_is_told() -> None:
    """A sum of losses that are not detached is told as a chain, by the line that adds to it."""
    weight = torch.ones(3, requires_grad=True)
    state = {"total": torch.zeros(())}

    def step(number: int) -> None:
        state["total"] = state["total"] + (weight * number).sum()

    (leak,), _ = traced(step)
    assert leak["form"] == "autograd chain"
    assert f":{line_of('state[')} " in leak["retained_at"]


# --- paths --------------------------------------------------------------------------------------------------------


def path_to(target: object) -> str:
    frame: Any = sys._getframe(1)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    names = Names(frames)
    frames.clear()
    return str(Walk(names, frozenset(), frozenset(), float("inf")).path_of(target))


class Holder:
    def __init__(self) -> None:
        self.inside = {"losses": [1, [2]]}


def with_default(value: object = [3, [4]]) -> None:
    pass


def test_paths_are_written_as_a_program_would() -> None:
    """Locals, attributes, entries, defaults and closures have the names that the script gives them."""
    holder = Holder()
    assert path_to(holder.inside["losses"][1]) == "holder.inside['losses'][...]"
    assert with_default.__defaults__ is not None
    assert path_to(with_default.__defaults__[0][1]) == "value (default of with_default)[...]"
    kept = [make_closure()]
    assert path_to(kept[0].__closure__[0].cell_contents[1]) == "kept[...] hidden (closure of inner)[...]"


def make_closure() -> Any:
    hidden = [7, [8]]

    def inner() -> object:
        return hidden

    return inner


def test_locals_are_read_without_a_trace() -> None:
    """A snapshot of locals that we caused keeps nothing alive; one that the script has taken itself stays whole."""

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


# --- lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "scope", "line"),
    [
        ("x = []\nx.append(1)", "x", "variable", 2),
        ("x = []\nfor i in []:\n    x.append(1)", "x", "variable", 3),
        ("x = {}\ndef f():\n    x[1] = 2", "x", "variable", 3),
        ("x = {}\ndef f():\n    x.setdefault(1, []).append(2)", "x", "variable", 3),
        ("x = {}\ndef f():\n    x['a']['b'] += [2]", "x", "variable", 3),
        ("class A:\n  def __init__(self):\n    self.x = []\n  def f(self):\n    self.x += [1]", "x", "attribute", 5),
        ("import heapq\nx = []\ndef f():\n    heapq.heappush(x, 1)", "x", "variable", 4),
        ("def f(m):\n    m.register_forward_hook(print)", "", "hooks", 2),
        ("def g(y):\n    y.append(1)\ndef f():\n    x = []\n    g(x)", "x", "local", 2),
        ("def f():\n    x = []\n    y.append(1)", "x", "local", 0),
        ("def f(", "x", "variable", 0),
    ],
)  # fmt: skip
def test_the_line_that_adds_is_found(tmp_path: Path, text: str, name: str, scope: str, line: int) -> None:
    """Calls, subscripts and assignments that add are found behind any base; an empty beginning is none."""
    file = tmp_path / "script.py"
    file.write_text(text)
    found = Sources().retaining_line(Name(name=name, files=(str(file),), scope=scope))
    assert (found.line if found is not None else 0) == line


def test_a_value_that_is_replaced_is_told_by_what_it_builds_on(tmp_path: Path) -> None:
    """Of two assignments the one that uses the old value is taken, wherever it stands."""
    file = tmp_path / "script.py"
    file.write_text("def f():\n    h = start()\n    for _ in range(9):\n        out, h = cell(x, h)\n")
    found = Sources().retaining_line(Name(name="h", files=(str(file),), scope="local"))
    assert found is not None
    assert str(found) == f"{file}:4 in f: out, h = cell(x, h)"


# --- verdicts -----------------------------------------------------------------------------------------------------


def test_a_leak_is_the_cause_only_where_memory_ran_out() -> None:
    """Killed for memory with a traced leak is that leak, with its line; a run that ended well stays well."""
    data = {"form": "graph", "signature": "H1502", "retained_at": "t.py:3 in f: x.append(loss)", "held_by": "x[...]"}
    leak = Event(kind="leak", global_step=9, unix_seconds=1.0, data=data)
    killed = judge(Facts(events=(leak,), endings=(Ending(status=-9, oom_kills=1),)))
    assert killed.cause == "H1502"
    assert killed.fix.startswith("Look first at t.py:3")
    assert judge(Facts(events=(leak,), endings=(Ending(status=0),))).cause == "H1601"

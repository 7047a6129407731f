"""Playing a traced step: invariants on random steps, and figures that can be worked out by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.forecast.trace.events import (
    Trace,
    live_bytes,
    live_peak,
    owners_at_peak,
    played,
)
from holdfast.forecast.trace.operations import Cost
from holdfast.forecast.trace.recording import (
    FORWARD,
    OPTIMIZER,
    OperationRecord,
    RawStep,
    StorageTable,
    as_trace,
)

DESCRIBED = {"micro_batch_size": 2, "precision": "fp32", "route": "cpu"}


class Memory:
    """A step that is written down by hand: storages by name."""

    def __init__(self, resident: dict[str, int]) -> None:
        self.table = StorageTable()
        self.live: dict[str, int] = {}
        for name, size in resident.items():
            self.live[name] = self.table.add(size, 0, 0, FORWARD)
        self.record = RawStep(resident=list(self.live.values()))

    def allocate(self, name: str, size: int, phase: int = FORWARD) -> None:
        self.live[name] = self.table.add(size, 0, 0, phase)
        self.record.allocate(self.live[name], phase)

    def free(self, name: str, phase: int = FORWARD) -> None:
        self.record.free(self.live.pop(name), phase)

    def trace(self) -> Trace:
        self.record.survivors = frozenset(self.live.values())
        return as_trace(
            self.record,
            self.table,
            modules=("", "net"),
            lines=("", "a.py:1 in f"),
            names=("aten.mm",),
            blocks=(),
            **DESCRIBED,
        )


@st.composite
def steps(draw: st.DrawFn, *, steady: bool) -> Trace:
    """A random step; a steady one ends with sizes, in order, like those that it has freed of
    what it found.
    """
    sizes = st.integers(1, 5000)
    memory = Memory(
        {f"r{number}": size for number, size in enumerate(draw(st.lists(sizes, max_size=6)))}
    )
    replaced = [name for name in list(memory.live) if draw(st.booleans())]
    wanted = [memory.table.size_bytes[memory.live[name]] for name in replaced]
    ends = [("free", name) for name in replaced] + [
        ("left", number) for number in range(len(wanted))
    ]
    made = 0
    while ends or draw(st.booleans()):
        actions = ["allocate"] + (["end"] if ends else [])
        temporary = [name for name in memory.live if name.startswith("t")]
        action = draw(st.sampled_from(actions + (["drop"] if temporary else [])))
        if action == "allocate":
            memory.allocate(f"t{made}", draw(sizes))
            made += 1
        elif action == "drop":
            memory.free(draw(st.sampled_from(temporary)))
        else:
            kind, which = ends.pop(0)
            if kind == "free":
                memory.free(str(which))
            else:
                memory.allocate(f"left{which}", wanted[int(which)])
    for name in [name for name in memory.live if name.startswith("t")]:
        if steady or draw(st.booleans()):
            memory.free(name)
    return memory.trace()


@given(steps(steady=True), st.integers(2, 5))
def test_a_steady_step_needs_the_same_in_each_round(trace: Trace, count: int) -> None:
    """A step that replaces what it frees ends where it began and has the same peak however often
    it is played.
    """
    assert trace.growth_bytes == 0
    live = live_bytes(*played(trace, count))[len(trace.resident) :].reshape(count, -1)
    assert (live == live[0]).all()
    assert live_bytes(*played(trace, count)).max(initial=0) == live_peak(trace)


@given(steps(steady=False))
def test_what_is_played_grows_by_what_the_trace_says(trace: Trace) -> None:
    """After a step exactly `growth_bytes` more live than before it.

    Owners add up to the live bytes and the peak.
    """
    before = int(trace.size_bytes[list(trace.resident)].sum())
    events, sizes = played(trace, 1)
    after = int(live_bytes(events, sizes)[-1]) if len(events) else 0
    assert after - before == trace.growth_bytes
    for by in ("owner", "module", "line"):
        assert sum(owners_at_peak(trace, by).values()) == live_peak(trace)


def small_trace() -> Trace:
    """Weights of 1000 bytes, gradients that the next step frees, an activation of 300, an
    optimizer's copies.
    """
    memory = Memory({"weight": 1000, "gradient": 1000})
    memory.allocate("activation", 300)
    memory.record.operations.append(OperationRecord(Cost(0, 10, 20, 0), FORWARD, 0))
    memory.record.backward_starts.append(len(memory.record.events))
    memory.free("gradient")
    memory.allocate("new gradient", 1000)
    memory.free("activation")
    begun = len(memory.record.events)
    memory.allocate("copies", 2000, OPTIMIZER)
    memory.record.operations.append(OperationRecord(Cost(0, 0, 2000, 0), OPTIMIZER, begun))
    memory.free("copies", OPTIMIZER)
    memory.record.optimizer_steps.append((begun, begun + 2))
    memory.table.own(0, "parameters", 1)
    memory.table.own(1, "gradients", 1)
    memory.table.own(memory.live["new gradient"], "gradients", 1)
    return memory.trace()


def test_who_owns_the_peak_is_said_largest_first() -> None:
    """Parameters, gradients and an optimizer's needs are distinguished at the peak, of which
    modules own a part.
    """
    trace = small_trace()
    assert dict(owners_at_peak(trace)) == {"other": 2000, "parameters": 1000, "gradients": 1000}
    assert live_peak(trace) == 4000
    assert list(owners_at_peak(trace, "module").values()) == [2000, 2000]

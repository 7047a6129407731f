"""What is registered by ``state=`` is part of the transaction.

A step that is taken back leaves no trace in it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import Short, ask_for_too_much, events, guarded, the_event
from torch import nn

import holdfast
from holdfast.guard.splitting.split_safety import SECONDS_BEFORE_SEARCH
from holdfast.guard.state import states
from holdfast.guard.state.states import StateKeeper
from holdfast.guard.state.trees import same
from holdfast.testing import FakeClock


class Plain:
    """Holds a tensor that may be missing at first, a list and numbers.

    Its state is the live objects themselves.
    """

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        self.seen: list[float] = []
        self.mean = 0.0

    def advance(self, out: torch.Tensor) -> None:
        self.hidden = out.detach() if self.hidden is None else 0.5 * self.hidden + out.detach()
        self.seen.append(float(out.detach().sum()))
        self.mean = 0.9 * self.mean + 0.1 * self.seen[-1]

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__ = state  # keeps what it is given: later changes go into it


class Average(nn.Module):
    """A moving average of what passes, in a module's buffer, changed through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, 1))

    def advance(self, out: torch.Tensor) -> None:
        self.mean.data.mul_(0.9).add_(out.detach(), alpha=0.1)


def values_of(kept: Any) -> Any:
    return copy.deepcopy(dict(kept.state_dict()))


def train(
    run_dir: Any, kept: Any, fails: Callable[[int], str | None], steps: int = 6, **policy: Any
) -> Any:
    """Train some steps.

    `fails` says what goes wrong in a call of the loss function, after the state has moved.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard = guarded(run_dir, model, optimizer, state={"kept": kept}, **policy)
    # A counter that a retry would show as what it does not put back, were it a number
    calls = itertools.count(1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        call, out = next(calls), model(x)
        kept.advance(out)
        failure = fails(call)
        if failure == "memory":
            ask_for_too_much()
        if failure == "interrupt":
            raise KeyboardInterrupt
        found = (out - values(kept)).square().mean()
        return found * math.nan if failure == "nan" else found

    for number in range(steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        try:
            result = guard.step(x, loss)
        except KeyboardInterrupt:
            result = guard.step(x, loss)
        if result.skipped:
            guard.step(x, loss)
    events = guard.events()
    guard.close()
    return values_of(kept), model.state_dict(), events


def values(kept: Any) -> torch.Tensor:
    found: torch.Tensor = kept.mean if isinstance(kept, Average) else kept.hidden
    return found.detach()


undisturbed: dict[type, Any] = {}


@pytest.mark.parametrize(
    ("failure", "micro_batch_size"),
    [("memory", "auto"), ("memory", None), ("nan", "auto"), ("interrupt", "auto")],
)
@pytest.mark.parametrize("kind", [Plain, Average])
@pytest.mark.parametrize("at", [1, 4])
def test_state_that_the_loss_changes_comes_back(tmp_path, kind, failure, at, micro_batch_size):
    """After an out-of-memory, a NaN or an interruption, in the first step too, all is as
    undisturbed.
    """
    options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "provenance": failure == "nan"}
    if kind not in undisturbed:
        undisturbed[kind] = train(tmp_path / "a", kind(), lambda _: None)
    expected, weights, _ = undisturbed[kind]
    found, again, events = train(
        tmp_path / "b", kind(), lambda n: failure if n == at else None, **options
    )
    if failure == "nan" and at == 4:  # the replay is made of further calls, which are finite
        assert {"skip_step"} <= {event.kind for event in events}
    assert same(found, expected)
    assert same(again, weights)
    retries = [event.data["promise"] for event in events if event.kind == "retry"]
    assert retries == ["bit-exact"] * (failure == "memory")
    assert "not_restored" not in {event.kind for event in events}


def test_state_that_is_too_large_to_copy_at_each_step_is_copied_once_it_changes(
    tmp_path, monkeypatch
):
    """A large object that first changes late: that retry says so, and the next one is exact."""
    monkeypatch.setattr(states, "_SMALL_BYTES", 8)

    class Late(Average):
        def advance(self, out: torch.Tensor) -> None:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls > 4:
                super().advance(out)

    _, _, events = train(
        tmp_path / "a", Late(), lambda n: "memory" if n in (7, 11) else None, steps=10
    )
    lost = [event for event in events if event.kind == "not_restored"]
    assert [event.data["names"] for event in lost] == [["state.kept"]]
    assert len([event for event in events if event.kind == "retry"]) == 2
    first = [event.kind for event in events].index("not_restored")
    last = max(number for number, event in enumerate(events) if event.kind == "retry")
    assert first < last
    assert events[last].data["promise"] == "bit-exact"


def test_a_momentum_encoder_and_its_queue_move_once(tmp_path):
    """Frozen parameters of a model that its forward pass moves through ``.data`` are put back as
    well.
    """

    def run(place: str, fail: bool) -> tuple[dict[str, torch.Tensor], str | None]:
        torch.manual_seed(1)
        model = nn.ModuleDict(
            {"query": nn.Linear(3, 4), "key": nn.Linear(3, 4).requires_grad_(False)}
        )
        model.register_buffer("queue", torch.randn(16, 4))
        optimizer = torch.optim.SGD(model["query"].parameters(), lr=0.1)
        guard = guarded(tmp_path / place, model, optimizer)
        calls = itertools.count()

        def loss(x: torch.Tensor) -> torch.Tensor:
            call = next(calls)
            for query, key in zip(
                model["query"].parameters(), model["key"].parameters(), strict=True
            ):
                key.data = key.data * 0.9 + query.data * 0.1
            keys = model["key"](x)
            scores = model["query"](x) @ torch.cat([keys, model.queue.clone()]).T
            model.queue.copy_(torch.cat([keys, model.queue])[:16])
            if fail and call == 1:
                ask_for_too_much()
            return nn.functional.cross_entropy(scores, torch.arange(len(x)))

        for number in range(4):
            guard.step(torch.randn(8, 3, generator=torch.Generator().manual_seed(number)), loss)
        promises = [event.data["promise"] for event in guard.events() if event.kind == "retry"]
        guard.close()
        return {name: value.clone() for name, value in model.state_dict().items()}, next(
            iter(promises), None
        )

    expected, _ = run("a", False)
    found, promise = run("b", True)
    assert same(found, expected)
    assert promise == "bit-exact"


@pytest.mark.parametrize("micro_batch_size", ["auto", None])
def test_what_is_not_registered_lowers_the_promise(tmp_path, micro_batch_size):
    """Hidden state in a variable of the loss function cannot be put back, and the retry says so."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = FakeClock()
    guard = guarded(tmp_path, model, optimizer, micro_batch_size=micro_batch_size, clock=clock)
    carried = {"hidden": torch.zeros(1)}
    calls = [0]

    def loss(x: torch.Tensor) -> torch.Tensor:
        out = model(x) + carried["hidden"]
        carried["hidden"] = 0.5 * carried["hidden"] + out.detach().mean(0)
        if len(x) == 8 and not calls:
            ask_for_too_much()
        return out.square().mean()

    guard.step(torch.randn(8, 3), loss)
    calls.clear()
    clock.advance(SECONDS_BEFORE_SEARCH)
    with contextlib.suppress(holdfast.OutOfMemoryError):
        guard.step(torch.randn(8, 3), loss)
    side_effects = next(event.data for event in guard.events() if event.kind == "side_effects")
    assert side_effects["attributes"] == ["loss_fn: carried"]
    retry = next(event.data for event in guard.events() if event.kind == "retry")
    assert retry["promise"] == "changes training"
    assert "loss_fn: carried" in retry["reason"]
    guard.close()


def test_hidden_state_of_the_whole_batch_that_the_first_one_resets_is_found_too(tmp_path):
    """It cannot be tried on a few samples, and the first pass of all depends on nothing.

    A later step shows it.
    """
    model = nn.Linear(3, 1)
    clock = FakeClock()
    guard = guarded(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), clock=clock)
    carried: dict[str, torch.Tensor] = {}
    short = Short()

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, first = batch
        if first.any():
            carried["hidden"] = torch.zeros(8, 1)
        out = model(x) + carried["hidden"]
        carried["hidden"] = 0.5 * out.detach()
        short()
        return out.square().mean()

    for number in range(3):
        short.times = int(number == 2)
        guard.step((torch.randn(8, 3), torch.full((8,), number == 0)), loss)
        clock.advance(SECONDS_BEFORE_SEARCH)
    (found,) = [event for event in guard.events() if event.kind == "side_effects"]
    assert (found.global_step, found.data["attributes"]) == (1, ["loss_fn: carried"])
    retry = next(event.data for event in guard.events() if event.kind == "retry")
    assert retry["promise"] == "changes training"
    guard.close()


def test_hidden_state_that_begins_to_change_later_lowers_the_promise_of_a_retry(tmp_path):
    """The loss function is looked at again when a retry is due."""
    model = nn.Linear(3, 1)
    guard = guarded(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    carried = {"center": torch.zeros(1)}
    short = Short()

    def loss(x: torch.Tensor) -> torch.Tensor:
        out = model(x) - carried["center"]
        if guard.global_step >= 4:
            carried["center"] = carried["center"] + 0.5 * out.detach().mean(0)
        short()
        return out.square().mean()

    for number in range(8):
        short.times = int(number in (3, 6))
        guard.step(torch.randn(8, 3), loss)
    first, second = (event.data for event in guard.events() if event.kind == "retry")
    assert first["promise"] == "bit-exact"
    assert second["promise"] == "changes training"
    assert "loss_fn: carried" in second["reason"]
    guard.close()


def test_a_counter_that_acts_later_lowers_the_promise_of_a_retry(tmp_path):
    """As that of a penalty at every fourth call.

    The next loss is the same, and a later one is not.
    """
    model, counter, short = nn.Linear(3, 1), SimpleNamespace(calls=0), Short()
    guard = guarded(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss(x: torch.Tensor) -> torch.Tensor:
        counter.calls += 1
        short()
        return model(x).square().mean() * (2 if counter.calls % 4 == 0 else 1)

    for number in range(2):
        short.times = int(number == 1)
        guard.step(torch.randn(8, 3), loss)
    retry = the_event(guard, "retry").data
    assert retry["promise"] == "changes training"
    assert "loss_fn: counter" in retry["reason"]
    guard.close()


def test_what_the_loop_changes_between_steps_is_never_undone(tmp_path):
    """An average that is updated after each step keeps its updates through a retry."""

    def run(place: str, fails: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model, average, short = nn.Linear(3, 1), nn.Linear(3, 1), Short()
        guard = guarded(tmp_path / place, model, state={"average": average})

        def loss(x: torch.Tensor) -> torch.Tensor:
            short()
            return model(x).square().mean()

        for number in range(4):
            short.times = int(fails and number == 2)
            guard.step(torch.randn(8, 3, generator=torch.Generator().manual_seed(number)), loss)
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.data.lerp_(theirs.data, 0.3)
        return values_of(average)

    assert same(run("a", False), run("b", True))


def test_parameters_that_the_loss_function_freezes_are_no_change(tmp_path):
    """A loss function that switches requires_grad of another network leaves the promise of a
    retry as it is.
    """
    models, short = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 1)}, Short()
    guard = guarded(tmp_path, models, torch.optim.SGD(models["a"].parameters(), lr=0.1))

    def loss(x: torch.Tensor) -> torch.Tensor:
        models["b"].requires_grad_(False)
        if len(x) == 8:
            short()
        found = models["b"](models["a"](x)).square().mean()
        models["b"].requires_grad_(guard.global_step == 0)
        return found

    for number in range(3):
        short.times = int(number == 1)
        guard.step(torch.randn(8, 3), loss)
    assert the_event(guard, "retry").data["promise"] == "bit-exact"
    assert not events(guard, "not_restored")


def test_an_object_that_does_not_take_its_state_back_is_named():
    """One whose load_state_dict does nothing or raises, or whose state cannot be told, is never
    called restored.
    """

    class Deaf(Plain):
        def load_state_dict(self, state: Any) -> None:
            pass

    class Loud(Plain):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("no")

    class Mute(Plain):
        def state_dict(self) -> Any:
            raise ValueError("no")

    objects = {"deaf": Deaf(), "loud": Loud(), "mute": Mute(), "fine": Plain()}
    keeper = StateKeeper(objects)
    keeper.capture()
    for each in objects.values():
        each.advance(torch.ones(2))
    assert keeper.restore() == ["deaf", "loud", "mute"]
    assert objects["fine"].hidden is None
    assert objects["fine"].seen == []


def test_streams_side_by_side_are_split_although_their_rows_are_numbered(tmp_path):
    """Time first, as torch's word_language_model has it.

    Row numbers are no labels that samples could share.
    """
    model, carried = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 7)), nn.Module()
    carried.register_buffer("h", torch.zeros(8, 7))
    rows, none = torch.arange(8), torch.zeros(8, dtype=torch.bool)
    targets = torch.randint(7, (6, 10, 8))
    chunks = [(torch.randn(10, 8, 4), targets[at], rows, none if at else ~none) for at in range(6)]
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loader=chunks,
        state={"carried": carried},
        split=(1, 1, 0, 0),
    )

    def loss(batch):
        x, y, at, new = batch
        if guard.global_step >= 2 and len(at) > 5:
            torch.empty(2**50, dtype=torch.uint8)
        out = model(x) + carried.h[at].masked_fill(new[:, None], 0.0)
        carried.h[at] = out[-1].detach()
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())

    assert [guard.step(batch, loss).micro_batch_size for batch in guard.batches(max_epochs=1)] == [
        8,
        8,
        4,
        4,
        4,
        4,
    ]


def test_an_iterator_cannot_go_back_with_the_weights(tmp_path):
    """An optimizer fails half-way.

    The state of the checkpoint is back, later batches follow, and that is said.
    """
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batches = iter(torch.randn(20, 4, 1).unbind())
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=optimizer, loader=batches, save_interval_steps=3
    )
    fails = iter([False] * 5 + [True] + [False] * 20)
    optimizer.register_step_post_hook(
        lambda *_: torch.empty(2**50, dtype=torch.uint8) if next(fails) else None
    )
    for batch in guard.batches(max_steps=8):
        guard.step(batch, lambda x: (model(x) - x).square().mean())
    (back,) = [event.data for event in guard.events() if event.kind == "roll_back"]
    assert (back["promise"], back["rewind_data"]) == ("changes training", False)

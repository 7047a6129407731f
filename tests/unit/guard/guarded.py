"""What the tests of the guard share.

A guard in one line, its events, and an allocation that no machine grants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.core.clock import SystemClock
from holdfast.core.policy.policy import Policy
from holdfast.guard.arguments import gather_parts
from holdfast.guard.record import RunRecord
from holdfast.guard.splitting.split_safety import SplitSafety
from holdfast.guard.splitting.split_trials import Isolation
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.loss_scale import LossScale
from holdfast.guard.step.passes import Passes


def guarded(run_dir: Any, model: Any, optimizer: Any = None, **settings: Any) -> holdfast.Guard:
    """Return a guard that saves nothing unless it is asked to.

    The optimizer is SGD if none is given.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return holdfast.Guard(
        run_dir, model=model, optimizer=optimizer, **{"save_interval_steps": None, **settings}
    )


def events(guard: holdfast.Guard, *kinds: str) -> list[holdfast.Event]:
    """Return the events of these kinds, oldest first."""
    return [event for event in guard.events() if event.kind in kinds]


def kinds_of(guard: holdfast.Guard, *among: str) -> list[str]:
    """Return the kinds of all events, or of those among these."""
    return [event.kind for event in guard.events() if not among or event.kind in among]


def the_event(guard: holdfast.Guard, kind: str) -> holdfast.Event:
    """Return the only event of a kind."""
    (event,) = events(guard, kind)
    return event


def square_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the mean square of what a model gives."""
    return lambda x: model(x).square().mean()


def ask_for_too_much(*_: object) -> None:
    """Run out of memory for real: 1 PiB is beyond the address space, so no machine grants it."""
    torch.empty(2**50, dtype=torch.uint8)


class FailsHalfWay(torch.optim.SGD):
    """Moves its first parameter, then runs out of memory: at one call of step, or at each."""

    def __init__(
        self,
        parameters: Any,
        fail_at: int | None = None,
        fail: Callable[[], None] = ask_for_too_much,
        **how: Any,
    ) -> None:
        super().__init__(parameters, **how)
        self.calls, self.fail_at, self.fail = 0, fail_at, fail

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.fail_at in (None, self.calls):
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            self.fail()
        super().step(closure)


class Short:
    """Runs out of memory at each call, so many times."""

    def __init__(self, times: int = 0) -> None:
        self.times = times

    def __call__(self) -> None:
        if self.times:
            self.times -= 1
            ask_for_too_much()


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> list[torch.Tensor]:
    """Return copies of weights, buffers and moments."""
    found = [value.clone() for value in model.state_dict().values()]
    for state in {} if optimizer is None else optimizer.state.values():
        found += [value.clone() for value in state.values() if isinstance(value, torch.Tensor)]
    return found


def passes_of(model: nn.Module, run_dir: Any) -> Passes:
    """Return what runs forward and backward in a step, alone."""
    parts = gather_parts(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None)
    safety = SplitSafety(
        parts,
        Policy(),
        BufferKeeper(parts.models),
        RunRecord(run_dir, SystemClock()),
        Isolation(restore=lambda work: None),
    )
    return Passes(safety, LossScale("cpu", enabled=False), "cpu", "fp32")


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Compare bit for bit."""
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

"""Where a run stands: to which phase each transition leads, and what of it is saved."""

from __future__ import annotations

import ast
import inspect
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import kinds_of, square_of
from torch import nn

import holdfast
from holdfast.guard.phase import Phase, RunState
from holdfast.guard.run import loop, session
from holdfast.guard.saving import components
from holdfast.guard.state.buffers import BufferKeeper


def at(*transitions: str) -> RunState:
    state = RunState()
    for name in transitions:
        getattr(state, name)()
    return state


@pytest.mark.parametrize(
    ("transitions", "phase"),
    [
        (["open"], Phase.AT_BOUNDARY),
        (["open", "begin"], Phase.IN_STEP),
        (["open", "begin", "take_back"], Phase.AT_BOUNDARY),
        (["open", "begin", "take_back", "skipped"], Phase.AFTER_STEP),
        (["open", "begin", "take_back", "begin", "commit", "committed"], Phase.AFTER_STEP),
        (["open", "begin", "commit"], Phase.COMMITTING),
        (["open", "begin", "commit", "committed", "boundary"], Phase.AT_BOUNDARY),
        (["open", "begin", "commit", "committed", "close"], Phase.CLOSED),
        (["open", "begin", "take_back", "step_failed"], Phase.AT_BOUNDARY),
        (["open", "begin", "step_failed"], Phase.BROKEN),
        (["open", "begin", "commit", "step_failed"], Phase.BROKEN),
        (
            ["open", "begin", "commit", "committed", "begin", "take_back", "step_failed"],
            Phase.BROKEN,
        ),
        (["open", "begin", "commit", "step_failed", "boundary"], Phase.BROKEN),
        (["open", "begin", "commit", "step_failed", "close", "open"], Phase.BROKEN),
        (["open", "spoil", "begin", "commit", "committed"], Phase.BROKEN),
        (["open", "begin", "take_back", "skipped", "rewound"], Phase.REWOUND),
        (
            ["open", "begin", "take_back", "skipped", "rewound", "begin", "commit", "committed"],
            Phase.REWOUND,
        ),
        (
            ["open", "begin", "take_back", "skipped", "rewound", "begin", "commit", "step_failed"],
            Phase.REWOUND,
        ),
        (["open", "begin", "take_back", "skipped", "rewound", "close", "open"], Phase.REWOUND),
    ],
)
def test_each_transition_leads_to_its_phase(transitions: list[str], phase: Phase) -> None:
    """A step that is taken back leaves the phase as it was.

    Half of a step belongs to no boundary.
    """
    state = at(*transitions)
    assert state.phase is phase
    assert state.may_be_saved == (phase in (Phase.CLOSED, Phase.AT_BOUNDARY, Phase.AFTER_STEP))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["open"], Phase.AT_BOUNDARY),
        (["open", "begin", "take_back", "skipped"], Phase.AFTER_STEP),
        (["open", "begin", "commit"], Phase.AFTER_STEP),
        (["open", "begin", "take_back", "skipped", "rewound"], Phase.AT_BOUNDARY),
        (["open", "spoil"], Phase.AFTER_STEP),
    ],
)
def test_a_rollback_makes_the_state_whole_or_breaks_it(before: list[str], after: Phase) -> None:
    """Inside it nothing may be saved; an error half-way leaves a state that never is."""
    state = at(*before)
    with state.rolling_back():
        assert state.phase is Phase.ROLLING_BACK
        assert not state.may_be_saved
    assert state.phase is after
    state = at(*before)
    with pytest.raises(OSError, match="half"), state.rolling_back():
        raise OSError("half of it was read")
    assert state.phase is Phase.BROKEN


def test_nobody_in_the_guard_uses_a_private_attribute_of_another() -> None:
    """Who drives a step needs ``begin``, ``attempt``, ``keep``, ``skip``, ``commit`` and
    ``take_back`` only.
    """
    folder = Path(inspect.getfile(loop)).parents[1]
    trees = {path: ast.parse(path.read_text()) for path in folder.rglob("*.py")}
    found: dict[Path, set[str]] = {path: set() for path in trees}
    own: dict[Path, set[str]] = {path: set() for path in trees}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.endswith("__")
            ):
                (own if ast.unparse(node.value) in ("self", "cls") else found)[path].add(node.attr)
            if isinstance(node, ast.FunctionDef):
                own[path].add(node.name)
    foreign = {
        (path.name, name)
        for path, names in found.items()
        # Of torch's modules and tensors, and of named tuples.
        for name in names - own[path] - {"_buffers", "_version", "_replace"}
        if any(name in mine for other, mine in own.items() if other != path)
    }
    assert not foreign


class FailsHalfWay(torch.optim.SGD):
    """Moves its weights and then has no memory left, at one call."""

    fails_at = 0
    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        super().step(closure)
        if self.calls == self.fails_at:
            raise MemoryError("played")


def make(run_dir: Path, **fields: Any) -> tuple[holdfast.Guard, nn.Module, FailsHalfWay]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = FailsHalfWay(model.parameters(), lr=0.1)
    loader = [torch.randn(8, 3) for _ in range(4)]
    made = {
        "loader": loader,
        "save_interval_steps": 1,
        "async_save": False,
        "check_split": False,
        **fields,
    }
    return holdfast.Guard(run_dir, model=model, optimizer=optimizer, **made), model, optimizer


@pytest.mark.parametrize("how", ["the loop is left", "the next batch"])
def test_a_rollback_that_fails_half_way_gives_back_lock_and_handlers(
    tmp_path, monkeypatch, caplog, how
):
    """The error comes out, event and log say what failed, another guard can open the run,
    nothing of it is saved.
    """
    handler, loads = signal.getsignal(signal.SIGTERM), []
    guard, model, optimizer = make(tmp_path)
    optimizer.fails_at = 2

    def load_once(*given: Any) -> None:
        loads.append(given)
        if len(loads) == 2:
            raise OSError("the disk is gone")
        components.load(*given)

    monkeypatch.setattr(session, "load", load_once)
    batches = guard.batches(max_epochs=1)
    assert not guard.step(next(batches), square_of(model)).skipped
    assert guard.step(next(batches), square_of(model)).skipped
    # What followed the step in the loop body is to be taken back
    with pytest.raises(OSError, match="is gone"):
        batches.close() if how == "the loop is left" else next(batches)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert "rollback_failed" in kinds_of(guard)
    assert "OSError: the disk is gone" in caplog.text
    assert guard._session.state.phase is Phase.BROKEN
    again, _, _ = make(tmp_path)  # the lock is free, although nobody has closed the first guard
    assert again.resumed_from is not None
    assert again.resumed_from.name.endswith("step00000001")
    again.close()
    guard.close()


def test_what_fails_before_a_weight_moves_is_taken_back(tmp_path, monkeypatch):
    """An error in the look at the buffers comes before the optimizers.

    Weights and statistics are as before.
    """
    guard, model, _ = make(tmp_path, save_interval_steps=None)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def learn(_: Any) -> Any:
        raise RuntimeError("no memory for a look")

    with monkeypatch.context() as patched:
        patched.setattr(BufferKeeper, "learn", learn)
        with pytest.raises(RuntimeError, match="for a look"):
            guard.step(torch.randn(8, 3), square_of(model))
    assert guard.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    guard.step(torch.randn(8, 3), square_of(model))
    assert guard.global_step == 1
    guard.close()


def test_a_step_whose_end_fails_is_in_no_checkpoint(tmp_path):
    """Weights have moved and the schedule has not: the run goes on from the state before it."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (2 - step))
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": [torch.randn(8, 3)] * 4,
    }
    guard = holdfast.Guard(tmp_path, **parts, save_interval_steps=1, async_save=False)
    with pytest.raises(ZeroDivisionError):
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, square_of(model))
    guard.close()
    saved = [event.global_step for event in guard.events() if event.kind == "checkpoint_saved"]
    assert saved[-1] == 1
    assert guard._session.state.phase is Phase.BROKEN


def test_a_loss_function_that_makes_a_step_is_refused(tmp_path):
    """A step inside a step could not be taken back."""
    guard, model, _ = make(tmp_path, save_interval_steps=None)

    def nested(x: torch.Tensor) -> torch.Tensor:
        guard.step(x, lambda y: model(y).square().mean())
        return model(x).square().mean()

    with pytest.raises(holdfast.BatchError, match="called step") as raised:
        guard.step(torch.randn(8, 3), nested)
    assert raised.value.rule == "H209"
    assert guard._session.state.phase is Phase.AT_BOUNDARY
    guard.close()

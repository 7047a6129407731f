"""The phases of a run: where each transition leads, which are refused, and what may be saved."""

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
from holdfast.guard.hosted import HostedGuard, hosted_policy
from holdfast.guard.phase import TRANSITIONS, Phase, RunState, Soundness, Transition
from holdfast.guard.run import loop, restoration
from holdfast.guard.saving import components
from holdfast.guard.state.buffers import BufferKeeper

# A legal way into each phase.
PATHS: dict[Phase, tuple[str, ...]] = {
    Phase.CLOSED: (),
    Phase.AT_BOUNDARY: ("open",),
    Phase.IN_STEP: ("open", "begin"),
    Phase.IN_FURTHER_STEP: ("open", "begin", "commit", "committed", "begin"),
    Phase.COMMITTING: ("open", "begin", "commit"),
    Phase.AFTER_STEP: ("open", "begin", "commit", "committed"),
    Phase.ROLLING_BACK: ("open", "begin", "commit", "roll_back"),
}


def make_transition(state: RunState, name: str) -> None:
    if name == "roll_back":
        # Without its context manager, which would leave the phase again.
        state._follow(Transition.ROLL_BACK)
    else:
        getattr(state, name)()


def at(*transitions: str, kind: type[RunState] = RunState) -> RunState:
    state = kind()
    for name in transitions:
        make_transition(state, name)
    return state


@pytest.mark.parametrize(
    ("transitions", "phase", "soundness"),
    [
        # A run that is opened, steps, and is closed at a boundary or after a step.
        ("open", Phase.AT_BOUNDARY, Soundness.SOUND),
        ("open begin", Phase.IN_STEP, Soundness.SOUND),
        ("open begin commit", Phase.COMMITTING, Soundness.SOUND),
        ("open begin commit committed", Phase.AFTER_STEP, Soundness.SOUND),
        ("open begin commit committed boundary", Phase.AT_BOUNDARY, Soundness.SOUND),
        ("open begin commit committed boundary close", Phase.CLOSED, Soundness.SOUND),
        ("open begin commit committed close", Phase.CLOSED, Soundness.SOUND),
        ("open begin commit committed close open", Phase.AT_BOUNDARY, Soundness.SOUND),
        ("open begin close commit committed open", Phase.AFTER_STEP, Soundness.SOUND),
        # A step that is taken back leaves the phase as it was, and may begin again.
        ("open begin take_back", Phase.AT_BOUNDARY, Soundness.SOUND),
        ("open begin take_back skipped", Phase.AFTER_STEP, Soundness.SOUND),
        ("open begin take_back begin commit committed", Phase.AFTER_STEP, Soundness.SOUND),
        ("open begin commit committed begin", Phase.IN_FURTHER_STEP, Soundness.SOUND),
        ("open begin commit committed begin take_back", Phase.AFTER_STEP, Soundness.SOUND),
        # A hook of an optimizer makes a step of its own.
        (
            "open begin commit begin commit committed committed",
            Phase.AFTER_STEP,
            Soundness.SOUND,
        ),
        # An error leaves the state sound only if the batch has left no trace.
        ("open step_failed", Phase.AT_BOUNDARY, Soundness.SOUND),
        ("open begin take_back step_failed", Phase.AT_BOUNDARY, Soundness.SOUND),
        ("open begin step_failed", Phase.AFTER_STEP, Soundness.BROKEN),
        ("open begin commit step_failed", Phase.AFTER_STEP, Soundness.BROKEN),
        ("open begin commit committed step_failed", Phase.AFTER_STEP, Soundness.BROKEN),
        (
            "open begin commit committed begin take_back step_failed",
            Phase.AFTER_STEP,
            Soundness.BROKEN,
        ),
        ("open begin spoil step_failed", Phase.AFTER_STEP, Soundness.BROKEN),
        ("open begin spoil take_back", Phase.AT_BOUNDARY, Soundness.BROKEN),
        # A broken state stays broken, whatever happens next.
        ("open begin commit step_failed boundary", Phase.AT_BOUNDARY, Soundness.BROKEN),
        ("open begin commit step_failed close open", Phase.AT_BOUNDARY, Soundness.BROKEN),
        ("open spoil begin commit committed", Phase.AFTER_STEP, Soundness.BROKEN),
        # A loop that must return to an earlier position in the data will repair all of these.
        ("open begin take_back skipped rewound", Phase.AFTER_STEP, Soundness.REWOUND),
        (
            "open begin take_back skipped rewound begin commit committed",
            Phase.AFTER_STEP,
            Soundness.REWOUND,
        ),
        (
            "open begin take_back skipped rewound begin commit step_failed",
            Phase.AFTER_STEP,
            Soundness.REWOUND,
        ),
        ("open begin take_back skipped rewound close open", Phase.AT_BOUNDARY, Soundness.REWOUND),
    ],
)
def test_each_legal_path_leads_to_its_phase(
    transitions: str, phase: Phase, soundness: Soundness
) -> None:
    """Phase and soundness follow from the transitions, and say whether the state may be saved."""
    state = at(*transitions.split())

    assert (state.phase, state.soundness) == (phase, soundness)
    between_steps = phase in (Phase.CLOSED, Phase.AT_BOUNDARY, Phase.AFTER_STEP)
    assert state.may_be_saved == (between_steps and soundness is Soundness.SOUND)
    assert state.must_rewind == (between_steps and soundness is Soundness.REWOUND)
    assert state.batch_is_used == (phase is Phase.AFTER_STEP and soundness is Soundness.SOUND)


def refused_by(kind: type[RunState]) -> set[tuple[Phase, Transition]]:
    """Return each transition that is refused, with the phase in which that is so."""
    refused = set()
    for phase, path in PATHS.items():
        for transition in Transition:
            state = at(*path, kind=kind)
            assert state.phase is phase
            try:
                make_transition(state, transition.value)
            except AssertionError as error:
                names_both = repr(transition.value) in str(error) and repr(phase.value) in str(
                    error
                )
                if names_both and state.phase is phase:
                    refused.add((phase, transition))
    return refused


class Permissive(RunState):
    """Enters the next phase from any other one, as if there were no table."""

    def _follow(self, transition: Transition) -> None:
        self._phase = TRANSITIONS.get((self._phase, transition), self._phase)


def test_every_transition_outside_the_table_is_refused() -> None:
    """The error names both, and the phase stays as it was."""
    expected = {
        (phase, transition)
        for phase in Phase
        for transition in Transition
        if (phase, transition) not in TRANSITIONS
    }

    assert refused_by(RunState) == expected
    assert refused_by(Permissive) == set()


@pytest.mark.parametrize(
    ("phase", "transition"),
    [
        # Weights that have moved cannot be taken back.
        (Phase.COMMITTING, Transition.TAKE_BACK),
        (Phase.AFTER_STEP, Transition.TAKE_BACK),
        # Without a begun step there is nothing to commit.
        (Phase.AT_BOUNDARY, Transition.COMMIT),
        (Phase.COMMITTING, Transition.COMMIT),
        (Phase.IN_STEP, Transition.COMMITTED),
        # A step inside an attempt could not be taken back.
        (Phase.IN_STEP, Transition.BEGIN),
        (Phase.ROLLING_BACK, Transition.BEGIN),
        # An attempt is taken back before its batch is skipped.
        (Phase.IN_STEP, Transition.SKIPPED),
    ],
)
def test_the_table_has_no_transition_that_would_damage_a_run(
    phase: Phase, transition: Transition
) -> None:
    """What would mix two states, or lose one, is not in the table."""
    assert (phase, transition) not in TRANSITIONS


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", Phase.CLOSED),
        ("open", Phase.AT_BOUNDARY),
        ("open begin take_back skipped", Phase.AFTER_STEP),
        ("open begin commit", Phase.AFTER_STEP),
        # A framework saves in its loss function, and the save is refused.
        ("open begin", Phase.IN_STEP),
        ("open begin take_back skipped rewound", Phase.AT_BOUNDARY),
        ("open spoil", Phase.AFTER_STEP),
    ],
)
def test_a_rollback_makes_the_state_sound_or_breaks_it(before: str, after: Phase) -> None:
    """Inside it nothing may be saved; an error halfway leaves a state that never is."""
    state = at(*before.split())
    with state.rolling_back():
        assert state.phase is Phase.ROLLING_BACK
        assert not state.may_be_saved

    assert (state.phase, state.soundness) == (after, Soundness.SOUND)

    state = at(*before.split())
    with pytest.raises(OSError, match="half"), state.rolling_back():
        raise OSError("half of it was read")

    assert (state.phase, state.soundness) == (after, Soundness.BROKEN)


def test_nothing_is_saved_while_the_models_hold_averages() -> None:
    """The state may be saved again once the trained weights are in the models."""
    state = at("open")

    state.swap_in_averages()
    assert not state.may_be_saved
    with pytest.raises(AssertionError):
        state.swap_in_averages()

    state.swap_out_averages()
    assert state.may_be_saved


def test_a_step_in_a_hook_of_an_optimizer_is_counted(tmp_path):
    """The phase is then that of committing, in which a step may begin."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(3, 1), "second": nn.Linear(3, 1)})
    optimizers = {name: torch.optim.SGD(part.parameters()) for name, part in model.items()}
    batches = [torch.randn(8, 3) for _ in range(2)]
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=optimizers, loader=batches, save_interval_steps=1
    )

    def step_second(*_: Any) -> None:
        guard.step(batches[0], square_of(model["second"]), optimizer="second")

    optimizers["first"].register_step_post_hook(step_second)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, square_of(model["first"]), optimizer="first")

    assert guard.global_step == 4


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
        # Of torch's modules, tensors and schedulers, and of named tuples.
        for name in names - own[path] - {"_buffers", "_version", "_replace", "_make", "_step_count"}
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

    monkeypatch.setattr(restoration, "load", load_once)
    batches = guard.batches(max_epochs=1)
    assert not guard.step(next(batches), square_of(model)).skipped
    assert guard.step(next(batches), square_of(model)).skipped
    # What followed the step in the loop body is to be taken back
    with pytest.raises(OSError, match="is gone"):
        batches.close() if how == "the loop is left" else next(batches)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert "rollback_failed" in kinds_of(guard)
    assert "OSError: the disk is gone" in caplog.text
    assert guard._session.state.soundness is Soundness.BROKEN
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
    assert guard._session.state.soundness is Soundness.BROKEN


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


def test_a_framework_may_roll_back_inside_a_loss_function(tmp_path):
    """It saves there, and finds that the weights are not finite. The step then ends as usual."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    guard = HostedGuard(
        tmp_path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        policy=hosted_policy(
            {"snapshot_interval_steps": 1, "check_split": False}, host="the framework"
        ),
    )
    batch = torch.randn(8, 3)
    for _ in range(3):
        guard.step(batch, square_of(model))

    def saves(x: torch.Tensor) -> torch.Tensor:
        guard.roll_back("NaN or Inf in 1 tensor: weight")
        return model(x).square().mean()

    result = guard.step(batch, saves)

    assert not result.skipped
    assert guard._session.state.phase is Phase.AFTER_STEP
    assert "rolled_back" in kinds_of(guard)
    guard.close()

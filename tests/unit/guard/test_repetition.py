"""Some steps are made twice, and a difference between the two passes is reported by an event."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.guard.guarded import (
    ask_for_too_much,
    assert_same,
    events,
    guarded,
    kinds_of,
    square_of,
    tensors_of,
    the_event,
)
from torch import nn

from holdfast.guard.accumulation import Accumulation
from holdfast.guard.hosted import HostedGuard, hosted_policy
from holdfast.guard.splitting.window import Window

BATCHES = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
# The kinds of events that a repetition may record.
OWN_KINDS = ("repetition_differed", "step_not_repeated", "not_restored")


class Queue:
    """State that the loss function changes, as in a momentum queue, registered with ``state=``."""

    def __init__(self) -> None:
        self.outputs: list[float] = []

    def push(self, output: torch.Tensor) -> None:
        self.outputs.append(float(output.detach().sum()))

    def state_dict(self) -> dict[str, Any]:
        return {"outputs": list(self.outputs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.outputs = list(state["outputs"])


class FlipsBits:
    """A gradient hook that flips low bits of one number, in some backward passes only.

    Args:
        parameter: The parameter whose gradient is damaged.
        at: The numbers of these backward passes, counted from 1. Each flips other bits.
    """

    def __init__(self, parameter: torch.Tensor, at: tuple[int, ...]) -> None:
        self.backward_passes = 0
        self._at = at
        parameter.register_hook(self._flip)

    def _flip(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.backward_passes += 1
        if self.backward_passes not in self._at:
            return None
        damaged = gradient.clone()
        damaged.view(torch.int32).view(-1)[0] ^= self.backward_passes
        return damaged


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def random_numbers() -> list[Any]:
    """Return the random state of all generators, in a form that can be compared."""
    position, *words = np.random.get_state()[1:3]
    return [random.getstate(), torch.get_rng_state().tolist(), list(position), words]


@dataclass
class Trained:
    """What a run has left behind."""

    # Weights, buffers and moments.
    tensors: list[torch.Tensor]
    # Everything else that must be equal.
    others: list[Any]
    # The number of calls of the loss function.
    calls: int
    # The kinds of the events that a repetition may record.
    kinds: list[str]


def train_everything(
    folder: Path,
    interval: int | None,
    make_batch: Callable[[torch.Tensor], Any] = torch.clone,
    *,
    most_calls: int = 99,
    **policy: Any,
) -> Trained:
    """Train a model with everything that a pass may change.

    Args:
        folder: The run directory.
        interval: The policy's ``repeat_step_interval``.
        make_batch: Function that makes the batch of a step.
        most_calls: The number of calls of the loss function in a step after which it runs out of
            memory.
        **policy: Other fields of the policy.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    queue = Queue()
    calls_in_steps: list[int] = []

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        calls_in_steps[-1] += 1
        if calls_in_steps[-1] > most_calls:
            ask_for_too_much()
        output = model(batch).float()
        # The loss depends on all states, so a wrong one gives other gradients.
        factor = random.uniform(0.9, 1.1) * np.random.uniform(0.9, 1.1) * (1 + len(queue.outputs))
        queue.push(output)
        # Without the small factor, the first steps would overflow in fp16 and be skipped.
        return output.square().mean() * factor * 1e-3

    settings = {"micro_batch_size": None, "check_split": False} | policy
    guard = guarded(
        folder, model, optimizer, state=queue, repeat_step_interval=interval, **settings
    )
    results = []
    for batch in BATCHES:
        calls_in_steps.append(0)
        results.append(guard.step(make_batch(batch), loss_fn))
    others: list[Any] = [queue.outputs, random_numbers(), guard.statistics()]
    others += [(float(result.loss), result.grad_norm, result.attempts) for result in results]
    return Trained(
        tensors=tensors_of(model, optimizer),
        others=others,
        calls=sum(calls_in_steps),
        kinds=kinds_of(guard, *OWN_KINDS, "out_of_memory"),
    )


@pytest.mark.parametrize(
    ("make_batch", "policy"),
    [
        (lambda batch: batch, {}),
        (lambda batch: batch, {"recompute": ("0", "3")}),
        (lambda batch: batch, {"precision": "fp16"}),
        (
            lambda batch: batch,
            {"micro_batch_size": 2, "allow_split_with": ("batch_norm", "buffers")},
        ),
        (lambda batch: Window([batch, batch + 1.0]), {}),
    ],
    ids=["whole", "recompute", "fp16", "micro-batches", "window"],
)
def test_a_repetition_leaves_no_trace(
    tmp_path: Path, make_batch: Callable[[torch.Tensor], Any], policy: dict[str, Any]
) -> None:
    """A run that repeats every second step equals one that repeats none, bit for bit."""
    plain = train_everything(tmp_path / "plain", None, make_batch, **policy)
    repeated = train_everything(tmp_path / "repeated", 2, make_batch, **policy)

    assert_same(repeated.tensors, plain.tensors)
    assert repeated.others == plain.others
    assert repeated.kinds == []
    # 3 of 6 steps are made twice.
    assert repeated.calls == plain.calls * 3 // 2


@pytest.mark.parametrize(
    ("flipped_passes", "third_agrees_with"),
    [((2,), "second"), ((3,), "first"), ((2, 3), "neither"), ((), None)],
)
def test_one_flipped_bit_is_reported(
    tmp_path: Path, flipped_passes: tuple[int, ...], third_agrees_with: str | None
) -> None:
    """A bit that flips in a pass is an event, and training continues with the first pass.

    Steps 1 and 2 make the backward passes 1, 2 and, for the comparison, 3.
    """
    model = small_model()
    FlipsBits(model[1].weight, flipped_passes)
    guard = guarded(tmp_path / "a", model, repeat_step_interval=2, diagnose=False)
    for batch in BATCHES[:2]:
        guard.step(batch, square_of(model))

    unrepeated_model = small_model()
    FlipsBits(unrepeated_model[1].weight, flipped_passes)
    unrepeated = guarded(tmp_path / "b", unrepeated_model, diagnose=False)
    for batch in BATCHES[:2]:
        unrepeated.step(batch, square_of(unrepeated_model))

    assert_same(tensors_of(model), tensors_of(unrepeated_model))
    if third_agrees_with is None:
        assert kinds_of(guard, *OWN_KINDS) == []
        return
    assert the_event(guard, "repetition_differed").data == {
        "parameters": ["1.weight"],
        "parameter_count": 1,
        "loss_differs": False,
        "third_agrees_with": third_agrees_with,
        "operations": [],
        "deterministic": False,
        "rule": "H504",
        "count": 1,
        "repeated": 1,
    }


def test_many_differences_are_recorded_but_few_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that always differs logs a line when the number of differences doubles."""
    model = small_model()
    calls = 0

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return model(batch).square().mean() * (1 + calls % 7)

    guard = guarded(tmp_path, model, repeat_step_interval=1, micro_batch_size=None, diagnose=False)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for step in range(140):
            guard.step(BATCHES[step % len(BATCHES)], loss_fn)

    lines = [record for record in caplog.records if "H504" in record.getMessage()]
    counts = [event.data["count"] for event in events(guard, "repetition_differed")]
    assert len(lines) == 8
    assert counts == [*range(1, 101), 128]


def test_code_that_never_repeats_itself_agrees_with_neither_pass(tmp_path: Path) -> None:
    """A counter outside of all registered state changes the loss and all gradients in each pass."""
    model = small_model()
    calls = 0

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return model(batch).square().mean() * calls

    guard = guarded(tmp_path, model, repeat_step_interval=1)
    guard.step(BATCHES[0], loss_fn)

    data = the_event(guard, "repetition_differed").data
    assert data["parameters"] == [name for name, _ in model.named_parameters()]
    assert data["parameter_count"] == 4
    assert data["loss_differs"]
    assert data["third_agrees_with"] == "neither"


def test_a_nondeterministic_operation_is_named(tmp_path: Path) -> None:
    """The operation comes from torch, whose settings are as before."""
    model = small_model()
    calls = 0

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        # All threads write to one place. The counter stands for the one that comes last.
        writes = model(batch).flatten() + 0.001 * calls
        places = torch.zeros(len(writes), dtype=torch.int64)
        return torch.zeros(2).put_(places, writes).square().sum()

    guard = guarded(tmp_path, model, repeat_step_interval=1, check_split=False)
    before = (torch.get_deterministic_debug_mode(), torch.is_warn_always_enabled())
    guard.step(BATCHES[0], loss_fn)

    assert the_event(guard, "repetition_differed").data["operations"] == ["put_"]
    assert (torch.get_deterministic_debug_mode(), torch.is_warn_always_enabled()) == before


def test_a_resumed_run_repeats_the_same_steps(tmp_path: Path) -> None:
    """Steps are counted over all restarts, so steps 2 and 4 are repeated, not step 3."""
    calls_in_steps = []

    def run(steps: int) -> None:
        model = small_model()
        calls = 0

        def loss_fn(batch: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return model(batch).square().mean()

        guard = guarded(
            tmp_path,
            model,
            repeat_step_interval=2,
            micro_batch_size=None,
            check_split=False,
            save_interval_steps=100,
        )
        for batch in BATCHES[:steps]:
            calls = 0
            guard.step(batch, loss_fn)
            calls_in_steps.append(calls)
        guard.close()

    run(1)
    run(3)

    assert calls_in_steps == [1, 2, 1, 2]


def test_without_memory_for_a_second_pass_the_step_is_committed(tmp_path: Path) -> None:
    """A second pass that runs out of memory is reported once, and costs the run nothing else."""
    plain = train_everything(tmp_path / "plain", None)
    short = train_everything(tmp_path / "short", 2, most_calls=1)

    assert_same(short.tensors, plain.tensors)
    assert short.others == plain.others
    assert short.kinds == ["step_not_repeated"]


@pytest.mark.parametrize("make_batch", [torch.clone, lambda batch: Window([batch.clone()])])
def test_a_batch_that_was_changed_cannot_be_repeated(
    tmp_path: Path, make_batch: Callable[[torch.Tensor], Any]
) -> None:
    """A loss function that begins to change its batch in place is reported, and training goes on.

    After that step it receives copies, so its later steps are repeated again.
    """
    model = small_model()
    calls_in_steps: list[int] = []
    calls = 0

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if len(calls_in_steps) >= 2:
            batch -= 1.0
        return model(batch).square().mean()

    guard = guarded(
        tmp_path, model, repeat_step_interval=1, micro_batch_size=None, check_split=False
    )
    for batch in BATCHES[:4]:
        calls = 0
        guard.step(make_batch(batch), loss_fn)
        calls_in_steps.append(calls)

    assert calls_in_steps == [2, 2, 1, 2]
    assert kinds_of(guard, *OWN_KINDS) == ["step_not_repeated"]


def test_an_error_in_a_second_pass_leaves_the_step_whole(tmp_path: Path) -> None:
    """Ctrl-C in a second pass takes the whole step back, as in a first one."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    calls = 0

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return model(batch).square().mean()

    guard = guarded(
        tmp_path, model, repeat_step_interval=1, micro_batch_size=None, check_split=False
    )
    before = [*tensors_of(model), torch.get_rng_state()]
    with pytest.raises(KeyboardInterrupt):
        guard.step(BATCHES[0], loss_fn)

    assert_same([*tensors_of(model), torch.get_rng_state()], before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert guard.global_step == 0


def test_a_step_over_several_batches_is_compared_with_all_its_gradients(tmp_path: Path) -> None:
    """The last batch is made twice, with the gradients of the earlier ones added each time."""

    def train(folder: Path, interval: int | None) -> list[torch.Tensor]:
        model = small_model()
        guard = HostedGuard(
            folder,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            policy=hosted_policy({"repeat_step_interval": interval}, host="the framework"),
        )
        accumulation = Accumulation(guard)
        for first, second in itertools.pairwise(BATCHES):
            accumulation.add(first, square_of(model))
            accumulation.step(second, square_of(model))
        assert kinds_of(guard, *OWN_KINDS) == []
        return tensors_of(model)

    assert_same(train(tmp_path / "repeated", 1), train(tmp_path / "plain", None))

"""Scripts of all kinds end in the same state whether steps are decided late or now.

Each test is a script as people write it, with a bad batch where the late decision may go wrong.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.guard.guarded import assert_same, guarded, kinds_of, tensors_of
from tests.unit.guard.test_decided_late import (
    Batch,
    Training,
    assert_same_in_both_modes,
    assert_undecided,
    batches,
    numbered,
    poisoned,
)
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import holdfast
from holdfast.checkpoint.background import wait_for_jobs
from holdfast.guard.decision import UnreadAttempt, should_refuse
from holdfast.guard.result import PassResult
from holdfast.numerics.gradients import Measurement


class SignallingLoader:
    """A loader during whose tenth batch the process receives a stop signal."""

    def __init__(self, data: list[Batch]) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self._data):
            if number == 10:
                os.kill(os.getpid(), signal.SIGUSR1)
            yield batch


@pytest.mark.parametrize("bad", [(), (9,)], ids=["good", "bad"])
def test_a_signal_during_a_fetch_saves_the_undecided_step(
    tmp_path: Path, bad: tuple[int, ...]
) -> None:
    """A step that is undecided when the loop stops is decided, so that the last save succeeds."""
    training = Training()
    settings = {"save_interval_steps": 100, "stop_signals": ("SIGUSR1",)}
    guard = training.guard(tmp_path, "late", loader=SignallingLoader(batches(20, bad)), **settings)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, training.loss)
    weights = training.state()

    resumed = Training()
    guard = resumed.guard(tmp_path, "late", loader=batches(20, bad), **settings)

    assert guard.global_step == 10 - len(bad)
    assert_same(resumed.state(), weights)


def test_a_refused_save_returns_to_the_same_step(tmp_path: Path) -> None:
    """A rollback between two steps first decides the step that it undoes."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide, loader=batches(30), save_interval_steps=5)
        for number, batch in enumerate(guard.batches(max_epochs=1)):
            guard.step(batch, training.loss)
            if number == 9:
                # The save after this step is refused because of this weight.
                with torch.no_grad():
                    training.model[0].weight[0, 0] = float("nan")
            # The next boundary finds the result of the save.
            wait_for_jobs(run_dir)
        return guard, [*training.state(), torch.tensor(guard.global_step)]

    assert "rolled_back" in assert_same_in_both_modes(tmp_path, train)


def test_noise_of_the_loss_function_is_the_same(tmp_path: Path) -> None:
    """The next attempt also draws, and is undone before the refused step is rewound."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        np.random.seed(7)
        guard = training.guard(run_dir, decide)

        def loss_fn(batch: Batch) -> torch.Tensor:
            inputs, labels = batch
            return training.loss((inputs * np.random.beta(1, 1) + random.random(), labels))

        results = [guard.step(batch, loss_fn) for batch in batches(14, bad=[5, 9])]
        if decide == "late":
            assert_undecided(results, at_least=12)
        guard.close()
        draws = torch.tensor([np.random.random(), random.random()])
        return guard, [*training.state(), draws]

    assert "not_restored" not in assert_same_in_both_modes(tmp_path, train)


def measured_loss(loss: torch.Tensor) -> UnreadAttempt:
    """Return an attempt with this loss and gradients with a norm of 1."""
    one = torch.ones(())
    return UnreadAttempt(
        passed=PassResult(loss, 8),
        groups=[],
        measurement=Measurement(
            norms=one.reshape(1),
            total=one,
            loss=loss,
            group_norms=[],
            items=None,
            group_names=["optimizer.0"],
        ),
        micro_batch_size=8,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gate_refuses_every_loss_above_the_limit(dtype: torch.dtype) -> None:
    """The limit is not rounded up to the precision of the loss, which the host would then refuse."""
    loss = torch.tensor(1.0, dtype=dtype)
    above = torch.nextafter(loss, torch.tensor(2.0, dtype=dtype))

    # This limit is between two neighboring losses, and would be rounded to the larger one.
    assert should_refuse(measured_loss(above), 0.25 * loss.item() + 0.75 * above.item())
    assert not should_refuse(measured_loss(loss), 1.01)
    assert should_refuse(measured_loss(loss), float("-inf"))


# --- what the script changes before the result is read


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loss_may_be_read_without_gradients(tmp_path: Path, mode: Any) -> None:
    """A refused step is repeated with gradients, wherever its loss is read."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide)
        for batch in batches(10, bad=[6]):
            result = guard.step(batch, training.loss)
            with mode():
                result.loss.item()
        guard.close()
        return guard, [*training.state(), torch.rand(())]

    assert "skip_step" in assert_same_in_both_modes(tmp_path, train)


def test_a_result_may_be_read_in_evaluation_mode(tmp_path: Path) -> None:
    """A step that is made again without its bad samples is made in training mode."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        training.model[1].momentum = 0.5
        guard = training.guard(run_dir, decide, drop_nonfinite_samples=True)
        for batch in batches(10, bad=[6]):
            result = guard.step(batch, training.loss)
            training.model.eval()
            assert not result.skipped
            assert not training.model[1].training
            training.model.train()
        guard.close()
        return guard, [*training.state(), torch.rand(())]

    assert "samples_dropped" in assert_same_in_both_modes(tmp_path, train)


def test_a_result_may_be_read_outside_the_autocast_of_its_step(tmp_path: Path) -> None:
    """A step is repeated with the autocast in which it was called."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide, max_grad_norm=1.0)
        for batch in numbered(10):
            with torch.autocast("cpu", torch.bfloat16):
                result = guard.step(batch, poisoned(training, {6: 1e25}))
            assert not result.skipped
        guard.close()
        return guard, training.state()

    assert "norm_overflowed" in assert_same_in_both_modes(tmp_path, train)


@pytest.mark.parametrize("interval", ["step", None])
@pytest.mark.parametrize("before", [True, False], ids=["before the step", "after the step"])
def test_a_learning_rate_that_the_script_sets_holds_for_the_next_step(
    tmp_path: Path, interval: str | None, before: bool
) -> None:
    """It holds neither for the repetition of the last step, nor for the guard's scheduler."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide, max_grad_norm=1.0, scheduler_interval=interval)
        (group,) = training.optimizer.param_groups
        for number, batch in enumerate(numbered(14)):
            if before and number < 8:
                group["lr"] = 1e-3 * (number + 1)
            guard.step(batch, poisoned(training, {5: 1e25, 9: float("nan")}))
            if not before and number < 8:
                group["lr"] = 1e-3 * (number + 1)
        guard.close()
        return guard, training.state()

    assert "norm_overflowed" in assert_same_in_both_modes(tmp_path, train)


# --- what the script does with results


@pytest.mark.parametrize(
    "copy_of", [copy.copy, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))]
)
def test_a_result_can_be_copied_and_pickled(tmp_path: Path, copy_of: Any) -> None:
    """The copy of an undecided result is the decided result."""
    training = Training()
    with training.guard(tmp_path, "late") as guard:
        good, bad, last = batches(3, bad=[1])
        guard.step(good, training.loss)
        skipped = copy_of(guard.step(bad, training.loss))
        committed = copy_of(guard.step(last, training.loss))

    assert type(skipped) is type(committed) is holdfast.StepResult
    assert skipped.skipped
    assert not committed.skipped
    assert type(committed.loss) is torch.Tensor
    assert set(committed.grad_norm) == {"optimizer.0"}


def test_reading_an_older_result_leaves_the_newest_step_undecided(tmp_path: Path) -> None:
    """A script that reads losses one step late does not wait for the newest step."""
    training = Training()
    with training.guard(tmp_path, "late") as guard:
        results = [guard.step(batch, training.loss) for batch in batches(4, bad=[3])]

        assert results[2].loss.item() > 0
        assert not results[2].skipped
        assert guard.global_step == 4
        assert results[3].skipped
        assert guard.global_step == 3


def test_another_thread_may_read_results(tmp_path: Path) -> None:
    """It reads what the device has decided, and leaves the recovery to the thread that trains."""
    training = Training()
    with training.guard(tmp_path, "late") as guard:
        good, bad = batches(2, bad=[1])
        guard.step(good, training.loss)
        result = guard.step(bad, training.loss)
        values: list[Any] = []

        def log() -> None:
            values.extend([result.loss.isnan().item(), result.skipped, result.loss.item()])
            values.append(guard.statistics().skipped_steps)

        logger = threading.Thread(target=log)
        logger.start()
        logger.join()

        assert values[:2] == [True, True]
        assert values[3] == 0
        assert guard.global_step == 2
        assert guard.statistics().skipped_steps == 1
        assert guard.global_step == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda guard, result: result.skipped,
        lambda guard, result: math.isnan(result.loss),
        lambda guard, result: guard.statistics().skipped_steps > 1,
    ],
)
def test_a_loss_function_may_read_the_last_result(tmp_path: Path, read: Any) -> None:
    """If the last step was refused, it is repeated first, and the attempt is made again."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide)
        result = None
        for batch in batches(12, bad=[5, 8, 9]):

            def loss_fn(part: Batch, last: Any = result) -> torch.Tensor:
                factor = 0.5 if last is not None and read(guard, last) else 1.0
                return training.loss(part) * factor

            result = guard.step(batch, loss_fn)
        guard.close()
        return guard, [*training.state(), torch.rand(())]

    assert assert_same_in_both_modes(tmp_path, train).count("skip_step") == 3


# --- what the forward pass changes


class WithMemory(nn.Module):
    """A layer that appends each batch to a buffer, without assigning another tensor to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.register_buffer("memory", torch.zeros(1, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        self.memory.data = torch.cat([self.memory.data, outputs[:1].detach()])
        return outputs + self.memory.mean(0)


class WithMomentumEncoder(nn.Module):
    """A layer beside a frozen one, which follows the first one after a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.target = nn.Linear(16, 4).requires_grad_(False)
        self.is_warm = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.is_warm:
            with torch.no_grad():
                # A bad batch makes the target NaN.
                self.target.weight.lerp_(self.layer.weight, 0.1 + 0.0 * inputs.mean())
        return self.layer(inputs) + self.target(inputs)


@pytest.mark.parametrize("model_class", [WithMemory, WithMomentumEncoder])
def test_a_forward_pass_that_cannot_be_gated_is_decided_now(
    tmp_path: Path, model_class: type[nn.Module]
) -> None:
    """A buffer that grows and frozen weights that begin to move are restored after a bad step."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = model_class()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        guard = guarded(run_dir, model, optimizer, decide=decide, diagnose=False)
        for number, (inputs, labels) in enumerate(batches(12, bad=[6, 9])):
            model.is_warm = number >= 6
            guard.step(
                (inputs, labels),
                lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            )
        guard.close()
        assert ("decided_now" in kinds_of(guard)) == (decide == "late")
        return guard, tensors_of(model, optimizer)

    assert assert_same_in_both_modes(tmp_path, train).count("skip_step") == 2


@pytest.mark.parametrize(
    "register",
    [register_optimizer_step_pre_hook, register_optimizer_step_post_hook],
)
def test_a_hook_of_all_optimizers_sees_no_refused_step(
    tmp_path: Path, register: Callable[[Any], Any]
) -> None:
    """While it is registered, steps are decided now, and after that they are late again."""
    training = Training()
    good, bad, *others = batches(6, bad=[1])
    steps_seen: list[int] = []
    with training.guard(tmp_path, "late") as guard:
        handle = register(lambda *_: steps_seen.append(1))
        guard.step(good, training.loss)
        guard.step(bad, training.loss)
        handle.remove()
        results = [guard.step(batch, training.loss) for batch in others]

        assert len(steps_seen) == 1
        assert guard.global_step == 5
        assert_undecided(results, at_least=4)
        assert len([kind for kind in kinds_of(guard) if kind == "decided_now"]) == 1


def test_frozen_weights_that_begin_to_move_through_data_are_noticed_later(tmp_path: Path) -> None:
    """No counter shows such changes, so values are compared in steps 4, 8, 16, and so on."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4).requires_grad_(False)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        guard = guarded(run_dir, model, optimizer, decide=decide, diagnose=False)
        moves = False

        def loss_fn(batch: Batch) -> torch.Tensor:
            inputs, labels = batch
            if moves:
                model[1].weight.data.lerp_(model[0].weight.data, 0.1)
            return nn.functional.cross_entropy(model[0](inputs) + model[1](inputs), labels)

        for number, batch in enumerate(batches(12, bad=[10])):
            moves = number >= 5
            guard.step(batch, loss_fn)
        guard.close()
        assert ("decided_now" in kinds_of(guard)) == (decide == "late")
        return guard, tensors_of(model, optimizer)

    assert assert_same_in_both_modes(tmp_path, train).count("skip_step") == 1


def test_a_batch_that_was_changed_is_not_used_again(tmp_path: Path) -> None:
    """A step that must be made again after a bad one does not train on a batch changed twice."""
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    number = 0

    def loss_fn(batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        if number == 10:
            inputs.mul_(0.5)
        return nn.functional.cross_entropy(model(inputs), labels)

    with guarded(tmp_path, model, optimizer, decide="late", diagnose=False) as guard:
        *others, last = batches(11, bad=[9])
        for batch in others:
            guard.step(batch, loss_fn)
            number += 1
        before = tensors_of(model, optimizer)

        with pytest.raises(holdfast.BatchError) as caught:
            guard.step(last, loss_fn)

        assert caught.value.rule == "H208"
        assert_same(tensors_of(model, optimizer), before)
        assert guard.global_step == 9


def test_a_logger_takes_a_loss_for_a_tensor(tmp_path: Path) -> None:
    """TensorboardX and others look at the name of the type."""
    training = Training()
    with training.guard(tmp_path, "late") as guard:
        results = [guard.step(batch, training.loss) for batch in batches(2)]

    assert str(type(results[-1].loss)) == str(torch.Tensor)

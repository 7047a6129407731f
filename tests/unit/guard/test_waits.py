"""On an accelerator, a step that is decided late never makes the host wait for the device.

The device is a fake one, so these tests need no GPU; ``tests/gpu/test_late_decisions.py`` checks
the same on a real one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.own_process import in_own_process
from tests.unit.guard.fake_accelerator import DEVICE, FakeAccelerator, register
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.learning.sampling import EXAMINED, SAMPLED, is_judged_after, is_selected

# In the first steps, the guard learns which buffers change.
WARM_STEPS = 40
STEPS = 160

Batch = tuple[torch.Tensor, torch.Tensor]
# Loss functions whose arguments and targets the diagnosis measures in different ways. They get the
# scores of 4 classes, and labels.
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "class labels": lambda scores, labels: F.cross_entropy(scores, labels),
    "regression": lambda scores, labels: F.mse_loss(scores.tanh(), F.one_hot(labels, 4).float()),
    "medians": lambda scores, labels: F.l1_loss(scores, F.one_hot(labels, 4).float()),
    "binary labels": lambda scores, labels: F.binary_cross_entropy_with_logits(
        scores[:, 0], (labels > 0).float()
    ),
    "signed targets": lambda scores, labels: F.soft_margin_loss(scores[:, 0], labels - 1),
    "a difference": lambda scores, labels: (
        (scores.relu() - F.one_hot(labels, 4).float()).square().mean()
    ),
}


class Failures(logging.Handler):
    """Collects messages that the diagnosis has failed, after which it would observe nothing."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message about a failure."""
        if "diagnosis failed" in record.getMessage():
            self.messages.append(record.getMessage())


def waits_of_steps(
    run_dir: Path,
    optimizer: str,
    arguments: dict[str, Any],
    policy: dict[str, Any],
    reads: bool,
    loss: str = "class labels",
) -> list[list[str]]:
    """Train on the fake accelerator, and return where the host waited in each warm step.

    Args:
        run_dir: The run directory.
        optimizer: The name of a class in ``torch.optim``.
        arguments: Its arguments.
        policy: Fields of the policy.
        reads: Whether the loop reads the result of each step.
        loss: The name of a loss function in `LOSSES`.
    """
    failures = Failures()
    logging.getLogger("holdfast").addHandler(failures)
    mode = FakeAccelerator()
    register(mode)
    waits = []
    with mode:
        with torch.device(DEVICE):
            model = nn.Sequential(
                nn.Linear(8, 16),
                nn.BatchNorm1d(16),
                nn.Dropout(0.1),
                nn.ReLU(),
                nn.Linear(16, 4),
            )
            batch = torch.randn(32, 8), torch.zeros(32, dtype=torch.long)
        guard = holdfast.Guard(
            run_dir,
            model=model,
            optimizer=getattr(torch.optim, optimizer)(model.parameters(), **arguments),
            loader=[batch] * (STEPS + 1),
            max_grad_norm=1.0,
            save_interval_steps=None,
            # A snapshot is copied to the host as a whole, for which the host waits.
            snapshot_interval_steps=None,
            **policy,
        )
        for inputs, labels in guard.batches(max_steps=STEPS + 1):
            before = len(mode.waits)
            result = guard.step(
                (inputs, labels),
                lambda batch: LOSSES[loss](model(batch[0]), batch[1]),
            )
            if reads:
                assert not result.skipped
            waits.append(mode.waits[before:])
    assert not failures.messages
    # The last step is decided at the end of the loop.
    return waits[WARM_STEPS:STEPS]


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("AdamW", {}),
        ("Adagrad", {}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_a_warm_step_decided_late_never_waits(
    tmp_path: Path, optimizer: str, arguments: dict[str, Any]
) -> None:
    """With a fused optimizer, steps are decided late by default and read nothing."""
    policy = {"diagnose": False}

    waits = in_own_process(
        waits_of_steps, tmp_path, optimizer, {"fused": True, **arguments}, policy, False
    )

    assert waits == [[]] * (STEPS - WARM_STEPS)


def test_warm_steps_include_all_that_the_diagnosis_does() -> None:
    """Among the warm steps are sampled ones, examined ones, and one after which rules apply."""
    sampled = [step for step in range(STEPS) if is_selected(step, 1, SAMPLED)]
    warm = [step for step in sampled if step >= WARM_STEPS]

    assert len(warm) == 10
    assert sum(is_selected(step, 1, EXAMINED) for step in warm) == 2
    assert any(is_judged_after(sampled.index(step) + 1, 1) for step in warm)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_that_the_diagnosis_samples_does_not_wait(tmp_path: Path, loss: str) -> None:
    """With the default policy, measurements are copied while the host continues."""
    waits = in_own_process(waits_of_steps, tmp_path, "AdamW", {"fused": True}, {}, False, loss)

    assert waits == [[]] * (STEPS - WARM_STEPS)


def test_a_sampled_step_decided_now_reads_its_measurements_together(tmp_path: Path) -> None:
    """It waits for its result, and then once for the measurements of each dtype."""
    policy = {"decide": "now"}

    waits = in_own_process(waits_of_steps, tmp_path, "AdamW", {"fused": True}, policy, False)

    counts = [len(waits_of_step) for waits_of_step in waits]
    sampled = [is_selected(step, 1, SAMPLED) for step in range(WARM_STEPS, STEPS)]
    assert [count > 1 for count in counts] == sampled
    # fp32 norms, fp64 scales of inputs, integer labels, and bool flags.
    assert max(counts) <= 1 + 4


def test_a_warm_step_decided_now_waits_once(tmp_path: Path) -> None:
    """A step that is decided now reads its result from the device, all of it at once."""
    policy = {"decide": "now", "diagnose": False}

    waits = in_own_process(waits_of_steps, tmp_path, "AdamW", {"fused": True}, policy, False)

    assert [len(waits_of_step) for waits_of_step in waits] == [1] * (STEPS - WARM_STEPS)


def test_reading_the_result_of_a_step_waits_for_it(tmp_path: Path) -> None:
    """A loop that reads the result of each step waits once in each, as if it decided now."""
    policy = {"decide": "late", "diagnose": False}

    waits = in_own_process(waits_of_steps, tmp_path, "AdamW", {"fused": True}, policy, True)

    assert [len(waits_of_step) for waits_of_step in waits] == [1] * (STEPS - WARM_STEPS)

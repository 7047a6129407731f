"""On an accelerator, a step that is decided late never makes the host wait for the device.

The device is a fake one, so these tests need no GPU; ``tests/gpu/test_late_decisions.py`` checks
the same on a real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.own_process import in_own_process
from tests.unit.guard.fake_accelerator import DEVICE, FakeAccelerator, register
from torch import nn
from torch.nn import functional as F

import holdfast

# In the first steps, the guard learns which buffers change.
WARM_STEPS = 40
STEPS = 160


def waits_of_steps(
    run_dir: Path, optimizer: str, arguments: dict[str, Any], policy: dict[str, Any], reads: bool
) -> list[list[str]]:
    """Train on the fake accelerator, and return where the host waited in each step.

    Args:
        run_dir: The run directory.
        optimizer: The name of a class in ``torch.optim``.
        arguments: Its arguments.
        policy: Fields of the policy.
        reads: Whether the loop reads the result of each step.
    """
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
                lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
            )
            if reads:
                assert not result.skipped
            waits.append(mode.waits[before:])
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


def test_only_steps_that_the_diagnosis_samples_wait(tmp_path: Path) -> None:
    """With the default policy, one warm step in ten is read, and no other step waits."""
    waits = in_own_process(waits_of_steps, tmp_path, "AdamW", {"fused": True}, {}, False)

    waiting = [step for step, waits_of_step in enumerate(waits) if waits_of_step]
    assert 0 < len(waiting) <= (STEPS - WARM_STEPS) // 10


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

"""A resumed run takes the implementation of its optimizer from the script.

The flags ``fused``, ``foreach``, ``capturable`` and ``differentiable`` do not come back from the
checkpoint, and everything else does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import assert_same, kinds_of, tensors_of, the_event
from tests.unit.guard.test_optimizers import Flat, Nested
from torch import nn

import holdfast
from holdfast.guard.run.undecided import UndecidedResult

BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(k)) for k in range(6)]
FUSED = {"fused": True}
UNFUSED: dict[str, bool] = {}


class Trained:
    """A run up to a step, in a new process as far as its objects are concerned.

    Args:
        run_dir: The run directory.
        steps: The step at which the loop ends.
        flags: The flags of the optimizer.
        wrap: A function that wraps the optimizer.
        **settings: Further arguments of the guard.
    """

    def __init__(
        self,
        run_dir: Path,
        steps: int,
        flags: dict[str, bool],
        wrap: Callable[[Any], Any] = lambda inner: inner,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, **flags)
        self.guard = holdfast.Guard(
            run_dir,
            model=self.model,
            optimizer=wrap(self.optimizer),
            loader=BATCHES,
            save_interval_steps=1,
            **settings,
        )
        dtype = self.model[0].weight.dtype
        self.results = [
            self.guard.step(batch, lambda x: self.model(x.to(dtype)).square().mean())
            for batch in self.guard.batches(max_steps=steps)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights and the optimizer's state."""
        return tensors_of(self.model, self.optimizer)

    def flags(self) -> set[tuple[Any, Any]]:
        """Return the flags of all parameter groups."""
        return {(group["fused"], group["foreach"]) for group in self.optimizer.param_groups}

    def types_of_step_counts(self) -> set[torch.dtype]:
        """Return the dtypes of the step counts of all parameters."""
        return {state["step"].dtype for state in self.optimizer.state.values()}


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    """Make float64 the default dtype, in which torch then counts the steps of unfused optimizers."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "wrap", [lambda inner: inner, Nested, Flat], ids=["bare", "nested", "flat"]
)
@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (UNFUSED, FUSED, (True, None)),
        (FUSED, UNFUSED, (None, None)),
        (FUSED, {"foreach": True}, (None, True)),
        ({"foreach": True}, {"foreach": False}, (None, False)),
    ],
)
def test_flags_come_from_the_script_and_moments_from_the_checkpoint(
    tmp_path: Path,
    before: dict[str, bool],
    now: dict[str, bool],
    expected: tuple[Any, Any],
    wrap: Callable[[Any], Any],
) -> None:
    """The resumed run has its own flags, and computes what an uninterrupted run does."""
    Trained(tmp_path / "resumed", 3, before, wrap)
    loaded = Trained(tmp_path / "resumed", 3, now, wrap)
    assert loaded.flags() == {expected}
    at_checkpoint = Trained(tmp_path / "stopped", 3, before, wrap)
    assert_same(loaded.tensors(), at_checkpoint.tensors())

    resumed = Trained(tmp_path / "resumed", 9, now, wrap)

    whole = Trained(tmp_path / "whole", 9, before, wrap)
    assert resumed.flags() == {expected}
    for tensor, expected_tensor in zip(resumed.tensors(), whole.tensors(), strict=True):
        torch.testing.assert_close(tensor, expected_tensor)


def test_a_changed_implementation_is_reported_once(tmp_path: Path) -> None:
    """The event names the flag, and no event says that the script is ignored."""
    for steps, flags in ((3, UNFUSED), (6, FUSED), (9, FUSED)):
        guard = Trained(tmp_path, steps, flags).guard

    event = the_event(guard, "implementation_changed")
    assert event.data["changed"] == ["optimizer.0.fused: unset before, now True"]
    assert event.data["promise"] == "equal up to rounding"
    assert kinds_of(guard, "settings_kept") == []


@pytest.mark.parametrize("flags", [UNFUSED, FUSED])
def test_without_a_change_a_resume_is_bit_exact(tmp_path: Path, flags: dict[str, bool]) -> None:
    """Weights, moments and step counts equal those of an uninterrupted run."""
    Trained(tmp_path / "resumed", 4, flags)
    resumed = Trained(tmp_path / "resumed", 9, flags)

    assert_same(resumed.tensors(), Trained(tmp_path / "whole", 9, flags).tensors())
    assert kinds_of(resumed.guard, "implementation_changed", "settings_kept") == []


@pytest.mark.usefixtures("float64_by_default")
def test_a_fused_optimizer_counts_its_steps_in_float32(tmp_path: Path) -> None:
    """Its kernels accept no other dtype, but an unfused optimizer has saved float64."""
    before = Trained(tmp_path, 3, UNFUSED)
    assert before.types_of_step_counts() == {torch.float64}

    resumed = Trained(tmp_path, 6, FUSED)

    assert resumed.types_of_step_counts() == {torch.float32}
    assert resumed.guard.global_step == 6


def test_a_run_that_becomes_fused_decides_late(tmp_path: Path) -> None:
    """The gate is in the fused kernels, which the resumed run now uses."""
    settings = {"diagnose": False}
    Trained(tmp_path, 3, UNFUSED, **settings)
    resumed = Trained(tmp_path, 9, FUSED, decide="late", **settings)

    assert sum(isinstance(result, UndecidedResult) for result in resumed.results) >= 4

"""What a forecast means for a run: its modules are recomputed, its size is where it starts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from holdfast import Guard


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 1)
    )


def _guard(model: nn.Module, run_dir: Path, **policy: object) -> Guard:
    return Guard(run_dir, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), **policy)


def _steps(guard: Guard, model: nn.Module, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 8, generator=generator) for _ in range(count)]
    with guard:
        return [
            guard.step(batch, lambda part: model(part).square().mean()).loss for batch in batches
        ]


def test_named_modules_are_recomputed_from_the_first_step_on_and_nothing_changes(
    tmp_path: Path,
) -> None:
    """The forward pass of each named module runs twice a step, of no other.

    Losses are the same bit for bit.
    """
    plain, recomputed = _model(), _model()
    calls = {"0": 0, "1": 0, "2": 0}
    for name in calls:
        recomputed.get_submodule(f"{name}.0").register_forward_hook(
            lambda *_, name=name: calls.__setitem__(name, calls[name] + 1)
        )
    wanted = _steps(_guard(plain, tmp_path / "a"), plain, 3)
    guard = _guard(
        recomputed, tmp_path / "b", recompute=["0", "2"], diagnose=False, check_split=False
    )
    assert _steps(guard, recomputed, 3) == wanted
    assert calls == {"0": 6, "1": 3, "2": 6}
    assert guard.statistics().recompute


def test_a_policy_from_a_plan_starts_with_its_size(tmp_path: Path) -> None:
    """YAML as `holdfast plan --out` writes it gives a run that starts with the size that was
    forecast.
    """
    file = tmp_path / "plan.yaml"
    file.write_text(
        "precision: fp32\nrecompute: ['0', '1']\nmicro_batch_size:"
        " auto\nforecast_micro_batch_size: 2\n"
    )
    model = _model()
    guard = _guard(model, tmp_path / "run", policy=file)
    assert (guard.policy.recompute, guard.statistics().micro_batch_size) == (("0", "1"), 2)

"""What is observed, and what its owner says is intended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.learning.models import matches


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects:
    """What is observed, by name.

    Args:
        models: The models, as they are written, not as `torch.compile` returned them.
        optimizers: The optimizers.
        schedulers: Schedulers that the training loop advances itself.
        compiled: Whether a model is compiled, so that only what optimizers see can be observed.
    """

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False

    def prefix(self, model: str) -> str:
        """Return what the names of a model's parameters begin with."""
        return "" if len(self.models) == 1 else f"{model}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What the owner of a run says about it.

    Args:
        total_steps: Optimizer steps that the run is meant to have.
        objective: What the loss means: ``"minimize"``, ``"adversarial"`` or ``"reinforcement"``.
        frozen: Patterns of parameters that are meant not to learn, see `models.matches`.
        ignore: Rules that stay silent.
    """

    total_steps: int | None = None
    objective: str = "minimize"
    frozen: tuple[str, ...] = ()
    ignore: frozenset[str] = frozenset()


def check_frozen(frozen: tuple[str, ...], subjects: Subjects) -> None:
    """Check that every pattern means a parameter.

    Raises:
        PolicyError: H102 for a pattern that is no parameter or module of the models.
    """
    names = [
        subjects.prefix(model) + name
        for model, module in subjects.models.items()
        for name, _ in module.named_parameters()
    ]
    for pattern in frozen:
        if any(matches(name, pattern) for name in names):
            continue
        example = f"pass such as {names[0]!r}, or drop it." if names else "drop it."
        raise PolicyError(
            f"frozen names {pattern!r}, which is no parameter or module of the models",
            limit=(
                "it is a list of names as named_parameters() has them, of modules, or of shell"
                " patterns"
            ),
            fix=did_you_mean(pattern, names, otherwise=example),
            rule="H102",
        )

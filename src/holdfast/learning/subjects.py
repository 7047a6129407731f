"""`Subjects`: the objects that are observed; `Intent`: what the user says is intended."""

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
    """The observed objects, by name.

    Args:
        models: The original modules, not those that `torch.compile` returned.
        optimizers: The optimizers.
        schedulers: Schedulers that the training loop steps itself.
        compiled: Whether a model is compiled, so that only optimizers can be observed.
    """

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False

    def prefix(self, model: str) -> str:
        """Return the prefix of a model's parameter names: empty if there is a single model."""
        return "" if len(self.models) == 1 else f"{model}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What the user says about a run: its length, its objective, and what is intended.

    Args:
        total_steps: Planned number of optimizer steps.
        objective: What the loss means: ``"minimize"``, ``"adversarial"`` or ``"reinforcement"``.
        frozen: Patterns of parameters that are frozen on purpose, see `models.matches`.
        ignore: Ids of rules that are not applied.
    """

    total_steps: int | None = None
    objective: str = "minimize"
    frozen: tuple[str, ...] = ()
    ignore: frozenset[str] = frozenset()


def check_frozen(frozen: tuple[str, ...], subjects: Subjects) -> None:
    """Check that every pattern matches a parameter.

    Raises:
        PolicyError: H102 for a pattern that matches no parameter or module of the models.
    """
    names = [
        subjects.prefix(model) + name
        for model, module in subjects.models.items()
        for name, _ in module.named_parameters()
    ]
    for pattern in frozen:
        if any(matches(name, pattern) for name in names):
            continue
        example = f"pass a name such as {names[0]!r}, or drop it." if names else "drop it."
        raise PolicyError(
            f"frozen={pattern!r} matches no parameter or module of the models",
            limit=(
                "frozen lists names of parameters (as in named_parameters()), names of modules, or"
                " shell patterns"
            ),
            fix=did_you_mean(pattern, names, otherwise=example),
            rule="H102",
        )

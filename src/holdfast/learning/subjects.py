"""`Subjects`: the observed objects; `Intent`: the user's statements about the run."""

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
    """The observed models, optimizers and schedulers, each keyed by name.

    Args:
        models: The original modules, not the ones returned by `torch.compile`.
        optimizers: The optimizers.
        schedulers: The schedulers that are stepped by the training loop.
        compiled: Whether any model is compiled, so that only the optimizers can be observed.
    """

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False

    def prefix(self, model: str) -> str:
        """Return the prefix of the names of a model's parameters, empty if it is the only model."""
        return "" if len(self.models) == 1 else f"{model}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """The user's statements about a run: its length, its objective, and intended exceptions.

    Args:
        total_steps: Planned number of optimizer steps.
        objective: How the loss is used: ``"minimize"``, ``"adversarial"`` or ``"reinforcement"``.
        frozen: Patterns that match parameters frozen on purpose (see `models.matches`).
        ignore: Ids of rules to skip.
    """

    total_steps: int | None = None
    objective: str = "minimize"
    frozen: tuple[str, ...] = ()
    ignore: frozenset[str] = frozenset()


def check_frozen(frozen: tuple[str, ...], subjects: Subjects) -> None:
    """Check that every pattern in `frozen` matches a parameter.

    Raises:
        PolicyError: H102 if a pattern matches no parameter or module of the models.
    """
    names = [
        subjects.prefix(model) + name
        for model, module in subjects.models.items()
        for name, _ in module.named_parameters()
    ]
    for pattern in frozen:
        if any(matches(name, pattern) for name in names):
            continue
        example = "remove this pattern."
        if names:
            example = f"pass a name such as {names[0]!r}, or remove this pattern."
        raise PolicyError(
            f"frozen={pattern!r} matches no parameter or module of the models",
            limit=(
                "frozen must contain names of parameters (as in named_parameters()), names of"
                " modules, or shell patterns"
            ),
            fix=did_you_mean(pattern, names, otherwise=example),
            rule="H102",
        )

"""What a program of the corpus is, and the face of `watch` that it is written against; no program lives here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

Objective = str
"""``"minimize"``, ``"adversarial"`` or ``"reinforcement"``."""


class FoundProblem(Protocol):
    """The attributes of a finding that the evaluation reads."""

    @property
    def rule(self) -> str:
        """Its id, such as ``"H811"``."""

    @property
    def severity(self) -> str:
        """``"error"``, ``"advice"`` or ``"note"``."""


class Watching(Protocol):
    """What the context of a watch gives."""

    def findings(self) -> Sequence[FoundProblem]:
        """Return what was found, most important first."""

    def validated(self, loss: float) -> None:
        """Take in the loss of an evaluation."""


class Watch(Protocol):
    """The face of ``holdfast.learning.watch.watch``."""

    def __call__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer],
        *,
        scheduler: Any = None,
        total_steps: int | None = None,
        objective: Objective = "minimize",
        frozen: Sequence[str] = (),
        ignore: Sequence[str] = (),
    ) -> AbstractContextManager[Watching]:
        """Return a context in which a loop is watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One training program, with what is wrong with it.

    Args:
        name: Of the program, unique in its set.
        healthy: Whether nothing is wrong with it.
        causes: Ids of the rules that name what is wrong; empty in a healthy program, and where no rule can name it.
        detects: Ids of the rules that are right here: the causes and their legitimate symptoms.
        train: Builds data and model from a seed and runs an ordinary loop inside ``with watch(...)``; takes at most
            some four seconds of one core.
    """

    name: str
    healthy: bool
    causes: tuple[str, ...] = ()
    detects: tuple[str, ...] = ()
    train: Callable[[Watch, int], None]

    def __post_init__(self) -> None:
        if self.healthy and (self.causes or self.detects):
            raise ValueError(f"{self.name} is healthy, so nothing can be detected in it")
        if not self.healthy and not (self.detects and set(self.causes) <= set(self.detects)):
            raise ValueError(f"{self.name} is faulty, so something can be detected in it, its causes among it")

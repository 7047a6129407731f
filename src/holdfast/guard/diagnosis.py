"""The diagnosis of one guarded run: what the observer finds becomes events."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from holdfast.core.events import run_events
from holdfast.core.policy.policy import Policy
from holdfast.explain.rules import find_rule
from holdfast.guard.parts import Parts
from holdfast.guard.record import RunRecord
from holdfast.learning.finding import Finding, with_origin
from holdfast.learning.observer import Observer

if TYPE_CHECKING:
    from holdfast.guard.result import Attempt, Outcome


class Diagnosis:
    """Observes the steps of a guard, if the policy wants it."""

    def __init__(self, parts: Parts, policy: Policy, record: RunRecord) -> None:
        self._record = record
        self._max_grad_norm = policy.max_grad_norm
        self._observer: Observer | None = None
        self._is_open = False
        # Where NaN or Inf came from, in the newest step that was traced
        self._origin: str | None = None
        for rule in policy.ignore_rules:
            find_rule(rule)
        if policy.diagnose:
            self._observer = Observer(
                parts.models,
                parts.optimizers,
                # The guard advances the others; in a resumed run they count the steps before it
                # too.
                {
                    name: each
                    for name, each in parts.schedulers.items()
                    if isinstance(each, ReduceLROnPlateau)
                },
                objective=policy.objective,
                frozen=policy.frozen,
                ignore=policy.ignore_rules,
                compiled=parts.compiled,
                guided=True,
            )

    def open(self) -> None:
        """Begin to observe."""
        if self._observer is not None:
            self._observer.close()
            self._observer.install()
            self._is_open = True

    def close(self) -> None:
        """Judge what was seen so far, and observe no more."""
        if self._observer is not None and self._is_open:
            self._is_open = False
            if self._record.is_open and self._observer.steps:
                self._observer.finish()
                self._emit(self._observer.take_fresh())
            self._observer.close()

    def attempt(self) -> contextlib.AbstractContextManager[None] | None:
        """Return the context of a forward and backward pass that is looked at, or None."""
        return (
            None
            if self._observer is None or not self._observer.due()
            else self._observer.begin_step()
        )

    def before_step(self, name: str, attempt: Attempt) -> None:
        """Take in that an optimizer is about to step, with the gradients of an attempt."""
        if self._observer is not None:
            self._observer.before_step(name, norms=lambda: _norms_of(attempt))

    def after_step(self, name: str) -> None:
        """Take in that an optimizer has stepped."""
        if self._observer is not None and self._observer.sampled:
            self._observer.after_step(name)

    def step_ended(self, outcome: Outcome, names: Sequence[str], reason: str | None) -> None:
        """Take in how a step of these optimizers ended, and the `reason` if it was not
        committed.
        """
        if self._observer is None:
            return
        if self._observer.sampled and (notice := self._observer.take_notice()) is not None:
            self._record.emit(run_events.DiagnosisLimited(why=notice))
        if (
            reason is not None
            and outcome.provenance is not None
            and outcome.provenance.origin is not None
        ):
            self._origin = reason
        limit, facts = self._max_grad_norm, outcome.attempt.facts
        clipped = limit if limit is not None and facts.total > limit else 0.0
        self._emit(
            self._observer.end_step(facts.loss, names, committed=outcome.committed, clipped=clipped)
        )

    def validated(self, value: float) -> None:
        """Take in the loss of an evaluation."""
        if self._observer is not None:
            self._observer.validated(value)

    def aligned(self, facts: dict[str, float]) -> None:
        """Take in how an attention lies."""
        if self._observer is not None:
            self._observer.aligned(facts)

    def _emit(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            kind = run_events.Note if finding.severity == "note" else run_events.Finding
            facts = asdict(with_origin(finding, self._origin))
            self._record.emit(kind(about=facts.pop("kind"), **facts))

    def state_dict(self) -> dict[str, Any] | None:
        """Return what later judgements need of the past."""
        return None if self._observer is None else self._observer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the past of a run."""
        if self._observer is not None and state is not None:
            self._observer.load_state_dict(state)


def _norms_of(attempt: Attempt) -> dict[int, float]:
    """Return the norm of each gradient before clipping, by the id of its parameter.

    One host sync.
    """
    held = (id(parameter) for group in attempt.groups for parameter in group.parameters)
    return dict(zip(held, attempt.norms.tolist(), strict=True))

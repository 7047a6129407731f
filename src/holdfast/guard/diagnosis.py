"""The diagnosis of a guarded run: passes each step to the observer, and records its findings."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from holdfast.core.events import run_events
from holdfast.core.policy.policy import Policy
from holdfast.explain.rules import find_rule
from holdfast.guard.parts import Parts
from holdfast.guard.record import RunRecord
from holdfast.learning.finding import Finding, with_origin
from holdfast.learning.layers import KnownNorms
from holdfast.learning.observer import Observer
from holdfast.learning.subjects import Intent, Subjects
from holdfast.numerics.gradients import Group

if TYPE_CHECKING:
    from holdfast.guard.result import Outcome


class Diagnosis:
    """Observes a guard's steps and reports findings, if the policy has ``diagnose=True``."""

    def __init__(self, parts: Parts, policy: Policy, record: RunRecord) -> None:
        self._record = record
        self._is_open = False
        # The most recently traced origin of NaN or Inf, as text.
        self._origin: str | None = None
        # `find_rule` raises an error for a rule that does not exist.
        for rule in policy.ignore_rules:
            find_rule(rule)
        self._observer = _observer_of(parts, policy) if policy.diagnose else None

    def open(self) -> None:
        """Install the observer's hooks and start observing steps."""
        if self._observer is not None:
            self._observer.close()
            self._observer.install()
            self._is_open = True

    def close(self) -> None:
        """Evaluate the observations, report new findings, and stop observing."""
        if self._observer is None or not self._is_open:
            return
        self._is_open = False
        if self._record.is_open and self._observer.steps:
            self._observer.finish()
            self._emit(self._observer.findings.take_fresh())
        self._observer.close()

    def findings_on_request(self) -> list[Finding]:
        """Return all findings so far, most important first."""
        if self._observer is None:
            return []
        self._observer.judge_now()
        findings = self._observer.findings.all()
        return [with_origin(finding, self._origin) for finding in findings]

    def attempt(self) -> contextlib.AbstractContextManager[None] | None:
        """Return a context that observes an attempt, or None if this step is not sampled."""
        if self._observer is None or not self._observer.due():
            return None
        return self._observer.begin_step()

    def before_step(self, name: str, groups: Sequence[Group], norms: torch.Tensor) -> None:
        """Observe the gradients of an attempt before the optimizer uses them.

        Args:
            name: The name of the optimizer.
            groups: The parameter groups of the attempt.
            norms: The norm of each gradient, in the order of the groups.
        """
        if self._observer is not None:
            self._observer.before_step(name, known_norms=lambda: _known_norms(groups, norms))

    def after_step(self, name: str) -> None:
        """Observe the weights after a step of the optimizer with this name."""
        if self._observer is not None and self._observer.sampled:
            self._observer.after_step(name)

    def step_launched(self) -> None:
        """End the observation of a step whose result is read later, without waiting.

        `step_ended` follows if the step is accepted, and `discard` if it was refused.
        """
        if self._observer is not None:
            self._observer.step_launched()

    def discard(self) -> None:
        """Forget what was observed in a launched step, which was refused and is now repeated.

        An attempt at the step after it, which must be repeated too, is also forgotten.
        """
        if self._observer is not None:
            self._observer.discard()

    def step_ended(self, outcome: Outcome, names: Sequence[str], reason: str | None) -> None:
        """Observe the outcome of a step, and read what was measured in it.

        Args:
            outcome: The outcome of the step.
            names: The names of the optimizers used in the step.
            reason: Why the step was not committed. None if it was committed.
        """
        if self._observer is None:
            return
        if reason is not None and _is_traced(outcome):
            self._origin = reason
        findings = self._observer.end_step(outcome.attempt.facts.loss, names)
        notice = self._observer.take_notice()
        if notice is not None:
            self._record.emit(run_events.DiagnosisLimited(why=notice))
        if findings:
            self._emit(findings)

    def validated(self, value: float) -> None:
        """Observe a validation loss."""
        if self._observer is not None:
            self._observer.validated(value)

    def aligned(self, alignment: dict[str, float]) -> None:
        """Observe measurements of an attention layer's alignment, by name."""
        if self._observer is not None:
            self._observer.aligned(alignment)

    def _emit(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            fields = asdict(with_origin(finding, self._origin))
            about = fields.pop("kind")
            event = run_events.FindingReported
            if finding.severity == "note":
                event = run_events.NoteReported
            self._record.emit(event(about=about, **fields))

    def state_dict(self) -> dict[str, Any] | None:
        """Return the observations so far, which later findings depend on; None if not observing."""
        return None if self._observer is None else self._observer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the observations in a checkpoint; None leaves the observer unchanged."""
        if self._observer is not None and state is not None:
            self._observer.load_state_dict(state)


def _observer_of(parts: Parts, policy: Policy) -> Observer:
    # Only plateau schedulers are observed. The guard advances all other schedulers itself, and
    # after a resume, their step counts include the steps of earlier processes.
    plateaus = {
        name: scheduler
        for name, scheduler in parts.schedulers.items()
        if isinstance(scheduler, ReduceLROnPlateau)
    }
    subjects = Subjects(
        models=parts.models,
        optimizers=parts.optimizers,
        schedulers=plateaus,
        compiled=parts.compiled,
    )
    intent = Intent(
        objective=policy.objective,
        frozen=tuple(policy.frozen),
        ignore=frozenset(policy.ignore_rules),
    )
    return Observer(subjects, intent, guided=True)


def _is_traced(outcome: Outcome) -> bool:
    return outcome.provenance is not None and outcome.provenance.origin is not None


def _known_norms(groups: Sequence[Group], norms: torch.Tensor) -> KnownNorms:
    """Return the norm of each gradient before clipping. The step has no NaN or Inf if it counts."""
    ids = [id(parameter) for group in groups for parameter in group.parameters]
    return KnownNorms(ids=ids, norms=norms)

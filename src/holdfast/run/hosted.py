"""A guard inside the loop of a framework, which owns what a `Guard` otherwise does: saving, schedules, the end.

The transaction, its remedies, rollbacks to copies in host memory and the recording are those of every guard.

Does not: know any framework (see ``integrations``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.core.errors import PolicyError
from holdfast.core.policy import Policy
from holdfast.run.cursor import Cursor
from holdfast.run.evaluation import evaluating
from holdfast.run.guard import Guard
from holdfast.run.result import Counters


def hosted_policy(
    policy: Any, *, max_grad_norm: float | None, precision: str, host: str, schedules: bool = False
) -> Policy:
    """Return the policy of a guard whose host has settings of its own, which win.

    Args:
        policy: As `Policy.of` takes it.
        max_grad_norm: The host's; None: it does not clip.
        precision: The host's, as the policy spells it.
        host: What the user calls the host's settings, for messages.
        schedules: Whether the guard drives the schedulers all the same.

    Raises:
        PolicyError: H109, for a value that contradicts the host's, or that is the host's to set.
    """
    found, usual = Policy.of(policy), Policy()
    for name, value in (("max_grad_norm", max_grad_norm), ("precision", precision)):
        mine = getattr(found, name)
        if mine not in (value, getattr(usual, name)):
            raise PolicyError(
                f"{name}={mine!r} in the holdfast policy and {value!r} in {host}",
                limit="there can be one only",
                fix=f"set it in {host}, and leave it out of the policy.",
                rule="H109",
            )
    hosts = ("save_interval_steps",) if schedules else ("save_interval_steps", "scheduler_interval")
    for name in hosts:
        mine = getattr(found, name)
        if mine not in (None, getattr(usual, name)):
            raise PolicyError(
                f"{name}={mine!r} in the holdfast policy",
                limit=f"{host} decides when that is done",
                fix=f"set it in {host}, and leave it out of the policy.",
                rule="H109",
            )
    return found.replace(max_grad_norm=max_grad_norm, precision=precision, **dict.fromkeys(hosts))


def take_scale(guard: Guard, scaler: torch.amp.GradScaler | None) -> None:
    """Let a guard begin with the loss scale of its host, as that was set or restored; without one nothing changes."""
    if scaler is not None and scaler.is_enabled():
        guard._transaction.loss_scale.load_state_dict(scaler.state_dict())


class LentCursor(Cursor):
    """The position in a loader that a framework iterates: it only knows which samples the next step is made of."""

    lent: list[int] | None = None

    def sample_indices(self) -> list[int] | None:
        """Return the dataset indices of the step's samples, or None if they are not known."""
        return self.lent


class HostedGuard(Guard):
    """A guard whose boundaries belong to a framework's loop.

    It takes what `Guard` takes; its policy should be made by `hosted_policy`. It ends no process and writes no
    checkpoint: the framework asks `stop_reason`, and puts `carried_state` into what it saves. A ``loader=`` is
    iterated by the framework; a `holdfast.DataLoader` tells its events here, and sets samples aside.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, loader: Any = None, **parts: Any) -> None:
        super().__init__(run_dir, loader=loader, **parts)
        if loader is not None:
            self._cursor = self._session.cursor = LentCursor(loader, self._parts.devices())

    def lend(self, indices: list[int] | None) -> None:
        """Say which samples of the dataset the next step is made of, in order."""
        if isinstance(self._cursor, LentCursor):
            self._cursor.lent = indices

    def _ready(self) -> None:
        if not self._session.is_open:
            self._open()
        self._boundaries.boundary_outside()

    def note(self, kind: str, **facts: Any) -> None:
        """Record an event of the step that the run stands at."""
        self._record.happened(kind, **facts)

    def carried_state(self) -> dict[str, Any]:
        """Return what later steps need of earlier ones, as JSON values: for a checkpoint of the framework's."""
        kept = self._session._training()
        own = {name: kept[name] for name in ("global_step", "counters", "ladder", "spikes", "interventions")}
        encoder = Encoder("holdfast")
        found: dict[str, Any] = encoder.encode(
            {**own, "loss_scale": kept["loss_scale"], "diagnosis": kept["diagnosis"]}
        )
        assert not encoder.tensors, sorted(encoder.tensors)
        return found

    def take_up(self, carried: Mapping[str, Any]) -> None:
        """Go on from `carried_state` of an earlier life.

        Args:
            carried: What was loaded; model, optimizer and scheduler were restored by the framework.
        """
        state: dict[str, Any] = decode(dict(carried), {})
        session = self._session
        session.counters = Counters(**state["counters"])
        session.counters.resumes += 1
        session.interventions = state["interventions"]
        session.spikes.load_state_dict(state["spikes"])
        self._ladder.load_state_dict(state["ladder"])
        self._transaction.loss_scale.load_state_dict(state["loss_scale"])
        self._transaction.diagnosis.load_state_dict(state["diagnosis"])
        self._transaction.state_was_replaced()
        self._record.global_step = state["global_step"]
        self._record.happened("resumed", by="the framework")

    def count_from(self, global_step: int) -> None:
        """Go on counting from the framework's number of steps, where no earlier life of a guard has left its own."""
        self._record.global_step = global_step

    def replaced_state(self) -> None:
        """Note that the framework has loaded weights and optimizer state."""
        self._transaction.state_was_replaced()

    def nonfinite_state(self) -> str | None:
        """Return which weights, statistics or moments hold NaN or Inf, so that they must not be saved as good."""
        bad, count = nonfinite_tensors(self._session._must_be_finite())
        return f"{count} tensor(s) hold NaN or Inf: {', '.join(bad)}" if count else None

    def return_from(self, why: str) -> None:
        """Return to the last good state after `nonfinite_state` has found something.

        Raises:
            NonFiniteError: H501, if rollbacks are spent or there is nothing to return to.
        """
        self._recovery.after_refused_save(why)

    def trying(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the models are in evaluation, without gradients, and leave no trace."""
        return evaluating(list(self._parts.models.values()), self._parts.devices())

    def validated(self, loss: float | torch.Tensor) -> None:
        """Tell the guard the loss of an evaluation, lower being better; schedulers are the framework's to drive."""
        self._transaction.diagnosis.validated(float(loss))
        self._record.happened("validated", loss=float(loss))

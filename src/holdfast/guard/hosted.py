"""A guard for the loop of a framework that saves, steps schedulers and ends training itself.

Steps, out-of-memory remedies, rollbacks to snapshots in host memory, and the recording work as in
any other guard.

This module does not depend on any framework. The code for each framework is in ``integrations``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.core.errors import PolicyError
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.core.policy.kinds import check
from holdfast.core.policy.policy import Policy, field_kinds
from holdfast.core.policy.sources import PREFIX, from_environment
from holdfast.core.text import counted
from holdfast.guard.cursor import Cursor
from holdfast.guard.guard import Guard, evaluating
from holdfast.guard.record import End
from holdfast.guard.run.steps import Steps
from holdfast.guard.saving.unsaved import note_saved, note_unsaved

# Policy fields for tasks that the framework does itself.
_FIELDS_OF_THE_HOST = (
    "mirror",
    "save_interval_steps",
    "save_interval_minutes",
    "scheduler_interval",
)

# The entries of the guard's state that are stored in a framework's checkpoint.
_CARRIED_STATE = ("global_step", "counters", "ladder", "spikes", "loss_scale", "diagnosis")


# --- the policy


def hosted_policy(policy: Any, *, host: str, **settings: Any) -> Policy:
    """Return the policy for a guard in a framework, with the framework's settings applied.

    Args:
        policy: A policy in any form that `Policy.of` accepts.
        host: Where the user configures the framework, such as ``"TrainingArguments"``. Messages
            name it.
        **settings: The framework's settings by policy field, such as ``precision`` and
            ``max_grad_norm`` (None if the framework does not clip).

    Raises:
        PolicyError: H109 if the policy or a ``HOLDFAST_*`` variable contradicts a setting, or sets
            a field that the framework controls.
    """
    with_settings = with_host_settings(Policy.of(policy), host, settings)
    switched_off = dict.fromkeys(_FIELDS_OF_THE_HOST)
    return with_host_settings(with_settings, host, switched_off, "{host} controls this")


def with_host_settings(
    policy: Policy,
    host: str,
    settings: Mapping[str, Any],
    limit: str = "it is {value!r} in {host}, and only one value can apply",
) -> Policy:
    """Return a policy with a framework's settings applied to it.

    Args:
        policy: The user's policy.
        host: Where the user configures the framework, such as ``"TrainingArguments"``. Messages
            name it.
        settings: The framework's settings by policy field.
        limit: Why the user's value is refused. It may contain ``{host}`` and ``{value}``.

    Raises:
        PolicyError: H109 if the policy or a ``HOLDFAST_*`` variable sets a different value.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(Policy)}
    for name, value in settings.items():
        own_value = getattr(policy, name)
        if own_value == value:
            continue
        is_from_variable = _is_from_variable(name, own_value)
        if own_value == defaults[name] and not is_from_variable:
            continue
        place = "holdfast policy"
        if is_from_variable:
            place = f"environment variable {PREFIX}{name.upper()}"
        raise PolicyError(
            f"{name}={own_value!r} in the {place}",
            limit=limit.format(host=host, value=value),
            fix=f"set it in {host}, and remove it from the {place}.",
            rule="H109",
        )
    return policy.replace(**settings)


def _is_from_variable(name: str, value: Any) -> bool:
    """Return whether an environment variable has set a policy field to this value."""
    variables = from_environment()
    if name not in variables:
        return False
    return bool(check(name, field_kinds()[name], variables[name]) == value)


# --- the guard


class ExternalCursor(Cursor):
    """The cursor over a loader that a framework iterates.

    It does not track a position. It only stores which samples the next step uses.
    """

    # The dataset indices of the next step's samples, or None if the framework has not set them.
    _next_samples: list[int] | None = None

    def note_next_samples(self, indices: list[int] | None) -> None:
        """Set the dataset indices of the next step's samples, in order. None means unknown."""
        self._next_samples = indices

    def sample_indices(
        self,
        batch: Any,  # noqa: ARG002 - unused: the framework sets the indices with `note_next_samples`
        size: int | None,  # noqa: ARG002
    ) -> list[int] | None:
        """Return the dataset indices of the step's samples, or None if they are unknown."""
        return self._next_samples


class HostedGuard(Guard):
    """A guard in the loop of a framework that decides when to save and when to stop.

    It takes the arguments of `Guard`. Create its policy with `hosted_policy`. This guard never
    exits the process and never writes a checkpoint: the framework reads `stop_reason`, and adds
    `state_dict` to its own checkpoints. The framework also iterates the ``loader=``. If that is a
    `holdfast.DataLoader`, the guard records its events and can quarantine samples.
    """

    # The framework's checkpoint folder.
    _checkpoint_folder = ""
    # The step of the framework's newest checkpoint.
    _host_saved_at: int | None = None
    # The failure of the framework's newest save. None if a checkpoint contains that step anyway.
    _host_failure: run_events.SaveFailed | None = None
    # The number of the framework's saves that failed.
    _failed_host_saves = 0

    def _cursor_over(self, loader: Iterable[Any]) -> Cursor:
        """Return an `ExternalCursor`, since the framework iterates the loader."""
        return ExternalCursor(loader, self._parts.devices())

    def _framework(self) -> str:
        """Return why each step is decided before its optimizer runs."""
        return "the framework steps its schedulers right after each step"

    # --- steps

    @property
    def steps(self) -> Steps:
        """Return the object that runs the steps, for `Accumulation`."""
        return self._steps

    def ready(self) -> None:
        """Open the run directory if it is closed, and mark the boundary after the last step."""
        self._session.check_not_in_step()
        if not self._session.is_open:
            self._open()
        self._boundaries.boundary_outside()

    def _ready(self) -> None:
        self.ready()

    def note_next_samples(self, indices: list[int] | None) -> None:
        """Set the dataset indices of the next step's samples, in order. None means unknown."""
        if isinstance(self._cursor, ExternalCursor):
            self._cursor.note_next_samples(indices)

    def count_from(self, global_step: int) -> None:
        """Continue from the framework's global step, for a checkpoint without carried state."""
        self._record.move_to_step(global_step)

    # --- the framework's checkpoints

    def note_checkpoint_folder(self, folder: str | os.PathLike[str], *, resumed: bool) -> None:
        """Store the folder where the framework saves its checkpoints.

        Args:
            folder: The framework's checkpoint folder.
            resumed: Whether the framework continues from a checkpoint. If it starts from scratch
                although the run has already saved checkpoints, an event is recorded.
        """
        self._checkpoint_folder = os.fspath(folder)
        saved_before = self._directory.saved_in
        if saved_before is not None and not resumed:
            self._record.emit(run_events.BeginsAnew(though_saved_in=saved_before))
        self._directory.note_saved(self._checkpoint_folder if resumed else None)

    def emit(self, data: EventData) -> None:
        """Record an event at the current step, and keep track of the framework's saves."""
        super().emit(data)
        if isinstance(data, run_events.Saved):
            self._host_saved_at = self.global_step
            self._host_failure = None
            self._directory.note_saved(self._checkpoint_folder)
            note_saved(self._directory.path)
        elif isinstance(data, run_events.SaveFailed):
            self._failed_host_saves += 1
            # Another checkpoint, such as that of the best epoch, may contain this step.
            if self._host_saved_at != self.global_step:
                self._host_failure = data

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's state for the framework's checkpoint, as JSON values."""
        state = self._session.saved_state.training()
        encoder = Encoder("holdfast")
        encoded: dict[str, Any] = encoder.encode({name: state[name] for name in _CARRIED_STATE})
        assert not encoder.tensors, sorted(encoder.tensors)
        return encoded

    def state_of_ranks(self) -> dict[str, Any] | None:
        """Return the per-rank state for a checkpoint, or None with a single rank.

        A rank whose optimizer failed in the last step first receives the weights of another rank.
        """
        return self._session.states_of_ranks()

    def load_state_dict(
        self, carried: Mapping[str, Any], of_ranks: Mapping[str, Any] | None = None
    ) -> None:
        """Continue from the `state_dict` of an earlier process.

        The framework must have restored models, optimizers and schedulers already.

        Args:
            carried: The value that `state_dict` returned.
            of_ranks: The value that `state_of_ranks` returned.
        """
        state: dict[str, Any] = decode(dict(carried), {})
        if of_ranks is not None:
            first_rank = of_ranks["each"][0]
            state.update(self._ranks.own_state({**first_rank, **state, "ranks": of_ranks}))
            self._session.saved_state.load_own_tensors(state)
        self._session.restoration.continue_from(state)
        self._engine.loss_scale.load_state_dict(state["loss_scale"])
        self._session.restoration.note_state_replaced()
        self._record.move_to_step(state["global_step"])
        self._host_saved_at = state["global_step"]
        self._record.emit(run_events.Resumed(by="the framework"))

    def note_state_replaced(self) -> None:
        """Record that the framework has replaced the weights and the optimizer state."""
        self._session.restoration.note_state_replaced()

    def check_lock(self) -> None:
        """Raise H301 if another run has taken the run directory. Call this before saving."""
        if self._session.is_open:
            # If the file system does not respond, the framework's own save reports it.
            with contextlib.suppress(OSError):
                self._directory.hold()

    def nonfinite_state(self) -> str | None:
        """Return a description of the tensors with NaN or Inf, or None if there are none.

        The check covers weights, running statistics such as those of BatchNorm, and optimizer
        moments. A state with NaN or Inf must not be saved.
        """
        names, count = nonfinite_tensors(self._session.saved_state.must_be_finite())
        if not count:
            return None
        return f"NaN or Inf in {counted(count, 'tensor')}: {', '.join(names)}"

    def roll_back(self, why: str) -> None:
        """Roll back to the last good state after `nonfinite_state` has found NaN or Inf.

        Args:
            why: The description that `nonfinite_state` returned.

        Raises:
            NonFiniteError: H501 if the limit on rollbacks is reached or there is no good state.
        """
        self._steps.recovery.after_refused_save(why)

    # --- the end of training

    @property
    def stop_ends_process(self) -> bool:
        """Return whether a signal, or the end of the time, asked the run to stop.

        With several ranks, any of them may have received the request. All ranks learn of it in the
        same step.
        """
        return self._stop.ends_process

    def record_stop(self) -> None:
        """Record that the framework is ending training because of a stop request."""
        request = run_events.StopRequested(
            reason=self._stop.reason or "SIGTERM",
            signal=self._stop.signal_name,
            asked_rank=self._stop.rank,
        )
        self._record.emit(request)

    def close_after_stop(self) -> None:
        """Record that the framework ended training because of a stop request, and close the run."""
        self.record_stop()
        self._release("stopped")

    def stop_exception(self) -> BaseException | None:
        """Return the exception to raise once the framework has saved after a request, or None.

        All ranks must call this method. It waits for the rank that saves, since a launcher kills
        all ranks when one of them exits.
        """
        if self._stop.ends_process:
            self._ranks.agree("stop", dict)
        return self._ending()

    def _release(self, how: End | None = None) -> None:
        if self._session.is_open and self._host_failure is not None:
            error = self._host_failure.error
            self._record.emit(
                run_events.NotSaved(
                    newest_checkpoint=self._host_saved_at,
                    failed_saves=self._failed_host_saves,
                    error=error,
                )
            )
            note_unsaved(self._directory.path, error)
        if how is None and self._stop.ends_process:
            how = "stopped"
        super()._release(how)

    def _report_steps_left_behind(self) -> None:
        """Do nothing, because it is not known yet from which step the framework will continue."""

    # --- evaluation

    @contextlib.contextmanager
    def evaluating_alone(self) -> Iterator[None]:
        """Let this rank evaluate the models alone inside the context, without gradients.

        On exit, the mode of each module and the random state are restored.
        """
        models = list(self._parts.models.values())
        with self._ranks.alone(), evaluating(models, self._parts.devices()):
            yield

    def validated(self, value: float | torch.Tensor, **_: Any) -> bool:
        """Record a validation loss, and pass it to the diagnosis.

        Unlike `Guard.validated`, this neither steps schedulers nor keeps the best checkpoint, since
        the framework does both.

        Returns:
            False, since this guard keeps no checkpoints.
        """
        loss = float(value)
        self._engine.diagnosis.validated(loss)
        self._record.emit(run_events.Validated(loss=loss))
        return False

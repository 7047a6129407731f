"""A guard inside the loop of a framework, which owns what a `Guard` otherwise does.

Saving, schedules, the end.

The transaction, its remedies, rollbacks to copies in host memory and the recording are those of
every guard.

Does not: know any framework (see ``integrations``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.core.errors import PolicyError
from holdfast.core.events import run_events
from holdfast.core.events.event import EventData
from holdfast.core.policy.kinds import check
from holdfast.core.policy.policy import Policy, fields
from holdfast.core.policy.sources import PREFIX, from_environment
from holdfast.guard.cursor import Cursor
from holdfast.guard.guard import Guard, evaluating
from holdfast.guard.record import End
from holdfast.guard.run.steps import Steps
from holdfast.guard.saving.unsaved import note_saved, note_unsaved

_OF_THE_HOST = ("save_interval_steps", "save_interval_minutes", "scheduler_interval")


def hosted_policy(policy: Any, *, host: str, **settings: Any) -> Policy:
    """Return the policy of a guard whose host has settings of its own, which win.

    Args:
        policy: As `Policy.of` takes it.
        host: What the user calls the host's settings, for messages.
        **settings: The host's, by the names of the policy's fields: ``max_grad_norm`` (None: it
            does not clip), ``precision`` and others.

    Raises:
        PolicyError: H109, for a value that contradicts the host's, or that is the host's to set; a
            ``HOLDFAST_*`` variable is one.
    """
    owned = dict.fromkeys(_OF_THE_HOST)
    return agreed(
        agreed(Policy.of(policy), host, settings), host, owned, "{host} decides when that is done"
    )


def agreed(
    found: Policy,
    host: str,
    settings: Mapping[str, Any],
    limit: str = "{host} says {value!r}, and there can be one",
) -> Policy:
    """Return a policy with a host's settings in it.

    H109 where it, or a ``HOLDFAST_*`` variable, says otherwise.
    """
    usual = {each.name: each.default for each in dataclasses.fields(Policy)}
    variables = from_environment()
    for name, value in settings.items():
        mine = getattr(found, name)
        by_variable = name in variables and check(name, fields()[name], variables[name]) == mine
        if mine != value and (mine != usual[name] or by_variable):
            where = (
                f"environment variable {PREFIX}{name.upper()}" if by_variable else "holdfast policy"
            )
            raise PolicyError(
                f"{name}={mine!r} in the {where}",
                limit=limit.format(host=host, value=value),
                fix=f"set it in {host}, and leave it out of the {where}.",
                rule="H109",
            )
    return found.replace(**settings)


class ExternalCursor(Cursor):
    """The position in a loader that a framework iterates.

    It only knows which samples the next step is made of.
    """

    given: list[int] | None = None

    def sample_indices(self, batch: Any, size: int | None) -> list[int] | None:  # noqa: ARG002 - the host knows
        """Return the dataset indices of the step's samples, or None if the framework has not
        told them.
        """
        return self.given


class HostedGuard(Guard):
    """A guard whose boundaries belong to a framework's loop.

    It takes what `Guard` takes; its policy should be made by `hosted_policy`. It ends no process
    and writes no checkpoint: the framework asks `stop_reason`, and puts `state_dict` into what it
    saves. A ``loader=`` is iterated by the framework; a `holdfast.DataLoader` records its events
    here, and quarantines samples.
    """

    _saves_in = ""  # the folder of the framework's checkpoints
    _host_saved_at: int | None = None  # the step of the framework's newest checkpoint
    # Of its newest save, if that step is in no other checkpoint
    _host_failure: run_events.SaveFailed | None = None
    _host_failed = 0  # saves, in all

    def __init__(
        self, run_dir: str | os.PathLike[str], *, loader: Any = None, **parts: Any
    ) -> None:
        super().__init__(run_dir, loader=loader, **parts)
        if loader is not None:
            self._cursor = self._session.cursor = ExternalCursor(loader, self._parts.devices())

    def _report_steps_left_behind(self) -> None:
        """Say nothing: the framework decides where it goes on, and has not told yet."""

    def saves_in(self, folder: str | os.PathLike[str], *, resumed: bool) -> None:
        """Note where the framework saves, and whether it goes on from there.

        A new start after saves is recorded.
        """
        self._saves_in = os.fspath(folder)
        before = self._directory.saved_in
        if before is not None and not resumed:
            self._record.emit(run_events.BeginsAnew(though_saved_in=before))
        self._directory.note_saved(self._saves_in if resumed else None)

    def next_samples(self, indices: list[int] | None) -> None:
        """Say which samples of the dataset the next step is made of, in order."""
        if isinstance(self._cursor, ExternalCursor):
            self._cursor.given = indices

    @property
    def stopped_by_signal(self) -> bool:
        """Return whether a signal asked the run to end.

        Of several ranks any, and all know it after the same step.
        """
        return self._stop.by_signal

    @property
    def steps(self) -> Steps:
        """Return who makes the steps, for who drives them batch by batch; see ``accumulation``."""
        return self._steps

    def ready(self) -> None:
        """Open the run directory if it was released; the last step is over."""
        self._session.check_not_in_step()
        if not self._session.is_open:
            self._open()
        self._boundaries.boundary_outside()

    def _ready(self) -> None:
        self.ready()

    def emit(self, data: EventData) -> None:
        """Record an event of the step that the run stands at.

        Saves of the framework are also counted.
        """
        super().emit(data)
        if isinstance(data, run_events.Saved):
            self._host_saved_at = self.global_step
            self._host_failure = None
            self._directory.note_saved(self._saves_in)
            note_saved(self._directory.path)
        elif isinstance(data, run_events.SaveFailed):
            self._host_failed += 1
            # Else another file has this step, such as the newest one
            if self._host_saved_at != self.global_step:
                self._host_failure = data

    def _release(self, how: End | None = None) -> None:
        if self._session.is_open and self._host_failure is not None:
            error = self._host_failure.error
            lost = run_events.NotSaved(
                newest_checkpoint=self._host_saved_at, failed_saves=self._host_failed, error=error
            )
            self._record.emit(lost)
            note_unsaved(self._directory.path, error)
        if how is None and self._stop.by_signal:
            how = "stopped"
        super()._release(how)

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps need of earlier ones, as JSON values.

        For a checkpoint of the framework's.
        """
        kept = self._session.training_state()
        own = ("global_step", "counters", "ladder", "spikes", "loss_scale", "diagnosis")
        encoder = Encoder("holdfast")
        found: dict[str, Any] = encoder.encode({name: kept[name] for name in own})
        assert not encoder.tensors, sorted(encoder.tensors)
        return found

    def state_of_ranks(self) -> dict[str, Any] | None:
        """Return what a checkpoint holds of each of several ranks.

        One that is behind gets the others' weights.
        """
        return self._session.states_of_ranks()

    def load_state_dict(
        self, carried: Mapping[str, Any], of_ranks: Mapping[str, Any] | None = None
    ) -> None:
        """Go on from `state_dict` of an earlier process.

        Model, optimizer and scheduler were restored by the host.
        """
        state: dict[str, Any] = decode(dict(carried), {})
        if of_ranks is not None:
            state |= self._ranks.own_state({**of_ranks["each"][0], **state, "ranks": of_ranks})
            self._session.load_own_tensors(state)
        self._session.go_on_from(state)
        self._engine.loss_scale.load_state_dict(state["loss_scale"])
        self._engine.state_was_replaced()
        self._record.global_step = self._host_saved_at = state["global_step"]
        self._record.emit(run_events.Resumed(by="the framework"))

    def stopped(self) -> None:
        """Close, and record that the host ended training since it was asked to."""
        self.note_stop()
        self._release("stopped")

    def note_stop(self) -> None:
        """Record that the framework ends training since it was asked to."""
        reason = self._stop.reason or "SIGTERM"
        request = run_events.StopRequested(
            reason=reason,
            signal=self._stop.signal_name,
            asked_rank=self._stop.rank,
        )
        self._record.emit(request)

    def ending(self) -> BaseException | None:
        """Return what is to be raised once the framework has saved after a stop by a signal.

        None: nothing.

        Of several ranks, all call this: it waits for the one that saves, since a launcher ends all
        when one exits.
        """
        if self._stop.by_signal:
            self._ranks.agree("stop", dict)
        return self._ending()

    def count_from(self, global_step: int) -> None:
        """Go on counting from the framework's number of steps, where no guard has left its own
        before.
        """
        self._record.global_step = global_step

    def replaced_state(self) -> None:
        """Note that the framework has loaded weights and optimizer state."""
        self._engine.state_was_replaced()

    def check_lock(self) -> None:
        """Raise H301 if another run has the run directory by now, before the framework saves."""
        if self._session.is_open:
            with contextlib.suppress(OSError):  # the disk does not say; the framework's save will
                self._directory.hold()

    def nonfinite_state(self) -> str | None:
        """Return which weights, statistics or moments hold NaN or Inf, so that they must not be
        saved as good.
        """
        bad, count = nonfinite_tensors(self._session.must_be_finite())
        return f"{count} tensor(s) hold NaN or Inf: {', '.join(bad)}" if count else None

    def return_from(self, why: str) -> None:
        """Return to the last good state after `nonfinite_state` has found something.

        H501, if rollbacks are spent or there is nothing to return to.
        """
        self._recovery.after_refused_save(why)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Return a context in which the models are in evaluation, without gradients, and leave
        no trace.
        """
        with (
            self._ranks.alone(),
            evaluating(list(self._parts.models.values()), self._parts.devices()),
        ):
            yield

    def validated(self, value: float | torch.Tensor, **_: Any) -> bool:
        """Take in the loss of an evaluation.

        Schedulers and the best checkpoint are the framework's to look after.
        """
        self._engine.diagnosis.validated(float(value))
        self._record.emit(run_events.Validated(loss=float(value)))
        return False

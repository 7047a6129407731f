"""Events in a training process, recorded by the guard, the loader and the framework integrations.

In all of these events, `why` is an explanation for people to read, `error` is the type and message
of an exception, and `promise` says how the rest of the run compares with an undisturbed run. Steps
are optimizer steps. The step at which an event happened is not one of its fields, because the
recorder stores it for every event. Decisions are in ``decisions``, and events about processes are
in ``process_events``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from holdfast.core.events.data import EventData, Failed, Promise, WithReason
from holdfast.core.events.decisions import name_of_batch
from holdfast.core.raised import exception_text
from holdfast.core.text import counted, duration, listed, moment, number, percent, size

# The one of two passes over the same step that a third one agrees with.
AgreeingPass = Literal["first", "second", "neither"]

# --- a run starts, is observed, and ends ----------------------------------------------------------


class LoopStarted(EventData):
    """A training loop started.

    `by` is ``"guard"`` or the framework that runs the loop. `epoch` and `batches` are the position
    at which the loop starts. `resume_promise` says how a resumed run will compare with an
    uninterrupted run.
    """

    kind: ClassVar[str] = "loop"
    by: str = "guard"
    resume_promise: str | None = None
    epoch: int | None = None
    batches: int | None = None
    max_epochs: int | None = None
    max_steps: int | None = None

    def __str__(self) -> str:
        text = "training loop started"
        if self.by != "guard":
            text += f" by {self.by}"
        if self.epoch is not None:
            text += f" in epoch {self.epoch}"
        if self.batches:
            text += f" after {counted(self.batches, 'batch')}"
        limits = []
        if self.max_epochs is not None:
            limits.append(counted(self.max_epochs, "epoch"))
        if self.max_steps is not None:
            limits.append(counted(self.max_steps, "step"))
        if limits:
            text += f", for at most {' or '.join(limits)}"
        if self.resume_promise is not None:
            text += f"; resume promise: {self.resume_promise}"
        return text


class EpochEnded(EventData):
    """An epoch ended.

    `epochs` is the number of completed epochs. The other fields describe the last epoch; `steps` is
    None if that epoch began before a restart or a rollback. The first 100 epochs are all recorded.
    A later epoch is recorded only if it is the 1st, 2nd, 4th, 8th, ... epoch that its process
    completed from start to end.
    """

    epochs: int
    steps: int | None
    batches: int
    batch_size: int | None = None

    def __str__(self) -> str:
        text = f"{counted(self.epochs, 'epoch')} completed; the last had"
        text += f" {counted(self.batches, 'batch')}"
        if self.batch_size is not None:
            text += f" of {counted(self.batch_size, 'sample')}"
        if self.steps is not None:
            text += f" and {counted(self.steps, 'step')}"
        return text


class Resumed(EventData):
    """The run resumed from a checkpoint, or from a state that a framework loaded.

    `trained_batches` is the number of batches that the run had trained on so far, over all epochs.
    """

    checkpoint: str | None = None
    trained_batches: int | None = None
    by: str = "guard"

    def __str__(self) -> str:
        text = "resumed"
        if self.checkpoint is not None:
            text += f" from checkpoint {self.checkpoint}"
        if self.by != "guard":
            text += f" by {self.by}"
        if self.trained_batches is not None:
            text += f" after {counted(self.trained_batches, 'batch')}"
        return text


class SettingsKept(EventData):
    """The script now configures an optimizer or a scheduler differently than when the run began.

    The run keeps its original settings. `changed` lists the settings that are ignored.
    """

    changed: tuple[str, ...]
    why: str = (
        "a resumed run keeps the settings of its checkpoint. To change them, set them after"
        " Guard(...), such as optimizer.param_groups[0]['lr'], or start in another directory"
    )

    def __str__(self) -> str:
        changes = "; ".join(self.changed)
        return f"settings in the script are ignored ({changes}), because {self.why}"


class ScheduleLengthChanged(EventData):
    """The script gives a learning-rate schedule another length than before the resume.

    The schedule continues with the length in the script. `changed` lists the lengths with their
    values before and now. `rate_before` and `rate_now` are the learning rates of the first
    parameter group at this step under the earlier and the new schedule.
    """

    scheduler: str
    changed: tuple[str, ...]
    rate_before: float
    rate_now: float
    promise: Promise = "changes training"

    def __str__(self) -> str:
        return (
            f"schedule {self.scheduler} has a different length ({'; '.join(self.changed)}). From"
            " here on, the learning rate follows the schedule in the script:"
            f" {number(self.rate_now)} instead of {number(self.rate_before)} ({self.promise})"
        )


class ImplementationChanged(EventData):
    """A resumed run uses another implementation of an optimizer, because the script has changed.

    `changed` lists the flags, such as ``fused``, with their values before and now.
    """

    changed: tuple[str, ...]
    promise: Promise = "equal up to rounding"

    def __str__(self) -> str:
        return (
            f"the optimizer uses a different implementation ({'; '.join(self.changed)};"
            f" {self.promise})"
        )


class GroupsChanged(WithReason):
    """The script added parameter groups to an optimizer during the run.

    A restarted script begins without these groups, so it cannot load a checkpoint that has them.
    """

    summary = "parameter groups were added during the run"
    why: str = (
        "the run resumes only if the same groups are passed to Guard(...) (H313 otherwise). Add the"
        " groups before Guard(...) if holdfast.latest(run_dir) is from a later step than this one,"
        " or pass all groups from the start and turn them on with requires_grad"
    )


class PositionNotKept(WithReason):
    """On at least one rank, a resumed run does not continue at the batch where it had stopped."""

    summary = "the run does not continue at the batch where it was interrupted"
    why: str = (
        "the loop does not iterate over guard.batches(...), so it starts from the beginning and"
        " repeats the interrupted epoch. Iterate over guard.batches(max_epochs=...), or move your"
        " loop to the position of guard.global_step"
    )


class ResumeMayDiffer(WithReason):
    """If this run is resumed, it may differ from an uninterrupted run.

    The batches, their augmentation or the learning rate may be different. `why` is the resume
    promise that still applies.
    """

    summary = "a resumed run may differ from an uninterrupted one; resume promise"


class OwnStateNotKept(EventData):
    """The run resumed on a different number of ranks, so some per-rank state was not restored.

    `names` lists the affected buffers and ``state=`` objects. On all ranks, these now have the
    values of rank 0.
    """

    names: tuple[str, ...]
    ranks_before: int
    ranks_now: int
    why: str = (
        "these values differed between ranks and can only be restored on the same number of ranks;"
        " all ranks continue with the values of rank 0"
    )

    def __str__(self) -> str:
        return (
            f"resumed on {counted(self.ranks_now, 'rank')} instead of {self.ranks_before};"
            f" {listed(self.names)} not restored: {self.why}"
        )


class StepsRepeated(EventData):
    """A resumed run has repeated steps of its earlier attempt, and their values agree.

    `largest_difference` is the largest relative difference of a loss or gradient norm.
    """

    steps: int
    largest_difference: float

    def __str__(self) -> str:
        steps = counted(self.steps, "step")
        if self.largest_difference == 0:
            return f"{steps} repeated after the resume, identical to those of the earlier attempt"
        return (
            f"{steps} repeated after the resume; their losses and gradient norms differ by at most"
            f" {self.largest_difference:.1e} (relative) from those of the earlier attempt"
        )


class ResumeNotProven(EventData):
    """An unchanged script was resumed, but repeated too few recorded steps to prove the resume.

    `steps` is the number of repeated steps, all of which were equal.
    """

    steps: int

    def __str__(self) -> str:
        if self.steps == 0:
            return "resumed, not proven: no recorded step was repeated"
        return f"resumed, not proven: only {counted(self.steps, 'step')} repeated, identical"


class VariablesChanged(EventData):
    """Variables of a resumed script differ from those at the same step of its earlier attempt.

    They are floats and strings of the function that trains, which often hold times or names of
    files. `names` are their names.
    """

    names: tuple[str, ...]

    def __str__(self) -> str:
        return (
            "these variables had different values in the repeated steps than in the earlier"
            f" attempt: {listed(self.names)}. This is expected for times and for file names that"
            " contain a date; otherwise, the script depends on something that is not saved"
        )


class RepeatedStepDiffers(EventData):
    """A resumed run has repeated a step of its earlier attempt with a different result.

    `equal_steps` is the number of repeated steps before this one.
    """

    loss: float | None
    grad_norm: float | None
    earlier_loss: float | None
    earlier_grad_norm: float | None
    equal_steps: int

    def __str__(self) -> str:
        pairs = (
            ("loss", self.loss, self.earlier_loss),
            ("gradient norm", self.grad_norm, self.earlier_grad_norm),
        )
        differences = [
            f"{name} {now!r} instead of {earlier!r}"
            for name, now, earlier in pairs
            if now is not None and earlier is not None and now != earlier
        ]
        return (
            f"the resumed run differs from its earlier attempt: {', '.join(differences)}, after"
            f" {counted(self.equal_steps, 'equal step')}"
        )


class StepsLeftBehind(EventData):
    """A guard resumes at an earlier step than the previous guard in this process had reached.

    The previous guard had trained up to `from_step`, and the new guard resumes at `to_step`.
    """

    from_step: int
    to_step: int
    why: str = (
        "the loop was left without a save, so its last steps are in no checkpoint, and the run"
        " resumes from the newest checkpoint. To keep such steps, end the loop with"
        " guard.request_stop(), or call guard.close() before creating a new Guard"
    )

    def __str__(self) -> str:
        return (
            f"resumed at step {self.to_step}, although this process had trained up to step"
            f" {self.from_step}: {self.why}"
        )


class BeginsAnew(EventData):
    """A framework started at step 0, although the folder `though_saved_in` contains checkpoints."""

    though_saved_in: str

    def __str__(self) -> str:
        return f"training starts from scratch, although {self.though_saved_in} contains checkpoints"


class StopRequested(EventData):
    """A signal, a call or `holdfast stop` asked the run to stop.

    With several ranks, `asked_rank` is the rank that received the request. All ranks stop.
    """

    reason: str
    signal: str | None = None
    asked_rank: int | None = None

    def __str__(self) -> str:
        text = f"stop requested: {self.reason}"
        if self.signal is not None and self.signal not in self.reason:
            text += f" ({self.signal})"
        if self.asked_rank is not None:
            text += f", on rank {self.asked_rank}"
        return text


class StopSignal(EventData):
    """A signal arrived that asks the run to stop.

    The run stops at its next boundary, which records `StopRequested`. Until then, a second signal
    kills the process.
    """

    signal: str

    def __str__(self) -> str:
        return f"{self.signal} received; the run stops at its next boundary"


class TimeLimited(EventData):
    """The run stops early enough to save before its time is over; see ``Policy.max_time``.

    `end` is the Unix time at which it is over, and `what` says what happens then.
    """

    end: float
    what: str

    def __str__(self) -> str:
        return f"the run will save and stop before {moment(self.end)} UTC, when {self.what}"


class EndOfJobUnknown(EventData):
    """The time at which Slurm ends the job is unknown, so the run does not stop before it."""

    job: str
    why: str
    fix: str = "pass max_time, or have Slurm send a signal before the end (sbatch --signal)"

    def __str__(self) -> str:
        return (
            f"the run does not stop before Slurm ends job {self.job}: {self.why}. To stop in time,"
            f" {self.fix}"
        )


class RequestReceived(EventData):
    """At a boundary, the run has found a command's request to save a checkpoint or to stop.

    `sender` is the process of the command.
    """

    action: Literal["save", "stop"]
    sender: str

    def __str__(self) -> str:
        purpose = "a checkpoint" if self.action == "save" else "a stop"
        return f"`holdfast {self.action}` requested {purpose} ({self.sender})"


class SignalLeftAlone(EventData):
    """A signal in ``Policy.stop_signals`` does not stop the run, because native code handles it."""

    signal: str
    why: str = (
        "it has a handler in C, such as that of faulthandler.register. Register that handler for"
        " another signal, such as signal.SIGRTMIN, or leave the signal out of stop_signals"
    )

    def __str__(self) -> str:
        return f"{self.signal} does not stop the run: {self.why}"


class LeftByException(EventData):
    """An exception ended the training loop.

    `exception` is the name of the exception's class, and `rule` is its rule id if holdfast raised
    it. The other fields are from `raised.describe_exception`.
    """

    exception: str
    rule: str | None = None
    type: str | None = None
    message: str = ""
    frames: tuple[Any, ...] = ()
    chain: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"training loop ended by {exception_text(self.type or self.exception, self.message)}"


class Closed(EventData):
    """The run was closed.

    If the last event of a run is neither `Closed` nor an exception, the run was killed.
    """

    how: Literal["finished", "stopped", "left", "failed"]

    def __str__(self) -> str:
        sentences = {
            "finished": "run finished",
            "stopped": "run stopped as requested",
            "left": "run closed after its loop was left early",
            "failed": "run closed after a failure",
        }
        return sentences[self.how]


class Validated(EventData):
    """The model was evaluated; `loss` is the evaluation loss or the value of the metric `name`.

    `learning_rate_changed_by` lists the schedulers that changed the learning rate because of this
    value. `kept_as` is the checkpoint that was kept because the value is the best so far.
    """

    loss: float
    learning_rate_changed_by: tuple[str, ...] = ()
    name: str = "loss"
    kept_as: str | None = None

    def __str__(self) -> str:
        text = f"validation {self.name} is {number(self.loss)}"
        if self.kept_as is not None:
            text += f"; kept as checkpoint {self.kept_as}"
        if self.learning_rate_changed_by:
            text += f"; learning rate changed by {listed(self.learning_rate_changed_by)}"
        return text


class RankIsSlow(EventData):
    """During an epoch, the other ranks waited for a rank that took longer to compute its loss.

    `seconds_a_step` is the slow rank's time per step up to the loss, `of_others` is the median of
    this time over the other ranks, and `share` is the fraction of the epoch that they spent
    waiting. `items_a_step` and `peak_bytes` (since the process started) have one value per rank. A
    rank that is slow in its backward pass is not detected.
    """

    rank: int
    where: str
    seconds_a_step: float
    of_others: float
    share: float
    items_a_step: tuple[float, ...]
    peak_bytes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow {self.where}: {duration(self.seconds_a_step)} per step,"
            f" {duration(self.of_others)} on the other ranks, which spend {percent(self.share)} of"
            " the time waiting for it"
        )


class OwnCollectives(EventData):
    """For the first time in this run, the loss function or the model called collectives itself.

    `count` is the number of these collectives.
    """

    count: int
    why: str = (
        "if a rank runs out of memory before such a collective, all ranks stop with H401; a rank"
        " cannot split or recompute on its own; and NaN is traced only up to the first such"
        " collective"
    )

    def __str__(self) -> str:
        collectives = counted(self.count, "collective")
        return f"the loss or the model issued {collectives} of its own: {self.why}"


class ImageAdded(EventData):
    """An image was written to `path`, which is relative to the run directory.

    `nonfinite` and `outside_0_to_1` count the invalid values in the image.
    """

    tag: str
    path: str
    nonfinite: int = 0
    outside_0_to_1: int = 0

    def __str__(self) -> str:
        text = f"image {self.tag!r} written to {self.path}"
        if self.nonfinite:
            text += f"; NaN or Inf values: {self.nonfinite}"
        if self.outside_0_to_1:
            text += f"; values outside 0 to 1: {self.outside_0_to_1}"
        return text


class ImageLeftOut(EventData):
    """An image could not be written."""

    tag: str
    reason: str

    def __str__(self) -> str:
        return f"image {self.tag!r} not written: {self.reason}"


class RecordingMovedAside(EventData):
    """A recording could not be continued, so a new recording was started.

    `what` says where the old recording is.
    """

    what: str

    def __str__(self) -> str:
        return f"a new recording was started: {self.what}"


class SchedulersWait(EventData):
    """An epoch ended without a validation loss, which some schedulers need."""

    schedulers: tuple[str, ...]
    fix: str

    def __str__(self) -> str:
        return (
            f"an epoch ended without a validation loss for {listed(self.schedulers)}."
            f" Fix: {self.fix}"
        )


# --- checkpoints ----------------------------------------------------------------------------------


class CheckpointSaved(EventData):
    """A checkpoint was saved completely.

    Saving took `seconds`, and training waited for `stall_seconds` of that time. `removed` lists the
    older checkpoints that were removed.
    """

    checkpoint: str
    size_bytes: int
    seconds: float
    stall_seconds: float
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        took = f"{size(self.size_bytes)}, {duration(self.seconds)}"
        if self.stall_seconds < self.seconds:
            took += f"; training waited {duration(self.stall_seconds)}"
        text = f"checkpoint {self.checkpoint} saved ({took})"
        if self.removed:
            text += f"; {listed(self.removed)} removed"
        return text


class Saved(EventData):
    """A framework saved its own checkpoint, and holdfast sealed it with a manifest."""

    checkpoint: str

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} of the framework saved and sealed"


class SaveFailed(Failed):
    """A checkpoint could not be saved. Training continues, and older checkpoints are kept."""

    checkpoint: str | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        text = f"{_checkpoint(self.checkpoint)} not saved"
        if self.seconds is not None:
            text += f" after {duration(self.seconds)}"
        return f"{text}: {self.error}"


class SaveRefused(WithReason):
    """A bad state, for example one with NaN, was not saved or not kept as a checkpoint.

    `kept` is the new name of a checkpoint that was moved aside. `nonfinite` names some of the
    tensors that contain NaN or Inf, and `count` is the total number of such tensors.
    """

    checkpoint: str | None = None
    kept: str | None = None
    nonfinite: tuple[str, ...] = ()
    count: int = 0

    def __str__(self) -> str:
        return f"{_checkpoint(self.checkpoint)} refused: {self.why}{_kept_as(self.kept)}"


class SavePostponed(WithReason):
    """A save was postponed, for the reason in `why`.

    The loss or the gradient norm is unusually high, or an unchanged script cannot be resumed in the
    middle of a loop.
    """

    summary = "save postponed"


class SavesSynchronous(WithReason):
    """From now on, training waits for each save to complete."""

    summary = "training waits for saves from now on"


class DiskSpaceLow(EventData):
    """The disk of the run directory has little space left for further checkpoints.

    A new checkpoint, of `checkpoint_bytes`, is written before an old one is removed.
    """

    free_bytes: int
    checkpoint_bytes: int

    def __str__(self) -> str:
        return (
            f"disk space is low: {size(self.free_bytes)} free, and a checkpoint needs"
            f" {size(self.checkpoint_bytes)}"
        )


class PruneFailed(Failed):
    """Older checkpoints could not be removed."""

    summary = "older checkpoints could not be removed"


class NotSaved(EventData):
    """The run ended with unsaved steps.

    `error` says why the last save failed, or is None if no save failed.
    """

    newest_checkpoint: int | None
    failed_saves: int
    error: str | None = None

    def __str__(self) -> str:
        newest = "there is no checkpoint"
        if self.newest_checkpoint is not None:
            newest = f"the newest checkpoint is from step {self.newest_checkpoint}"
        text = f"the run ended with unsaved steps: {newest}"
        if self.failed_saves:
            text += f", and {counted(self.failed_saves, 'save')} failed"
        if self.error is not None:
            text += f" ({self.error})"
        return text


class StepsNotSaved(EventData):
    """The loop was left, or the process ended, without saving the last steps.

    The unsaved steps are `from_step` to `to_step`, inclusive.
    """

    from_step: int
    to_step: int

    def __str__(self) -> str:
        if self.from_step == self.to_step:
            return f"step {self.to_step} is in no checkpoint"
        return f"steps {self.from_step} to {self.to_step} are in no checkpoint"


class ChangesNotSaved(WithReason):
    """The script changed the training state, and no checkpoint contains the changes."""

    summary = "changes are in no checkpoint"


class CheckpointDamaged(WithReason):
    """A checkpoint failed verification and was moved aside. `kept` is its new name."""

    checkpoint: str | None = None
    kept: str | None = None

    def __str__(self) -> str:
        return f"{_checkpoint(self.checkpoint)} is damaged: {self.why}{_kept_as(self.kept)}"


class CheckpointKept(WithReason):
    """A checkpoint that failed verification was kept because no other checkpoint is left."""

    checkpoint: str

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} failed verification and is kept: {self.why}"


class CheckpointInstead(EventData):
    """`checkpoint` was loaded instead of `of`, the checkpoint that the framework had chosen."""

    checkpoint: str
    of: str

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} loaded instead of {self.of}"


# --- the mirror -----------------------------------------------------------------------------------


class CheckpointMirrored(EventData):
    """A checkpoint was copied to the mirror, and its bytes there match its manifest.

    `removed` lists the older copies that were deleted.
    """

    checkpoint: str
    size_bytes: int
    seconds: float
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{_checkpoint(self.checkpoint)} copied to the mirror"
        text += f" ({size(self.size_bytes)} in {duration(self.seconds)})"
        if self.removed:
            text += f"; removed there: {listed(self.removed)}"
        return text


class MirrorPulled(EventData):
    """A checkpoint was fetched from the mirror, because the run directory had an older one or none.

    `mirror` is the URL of the mirror without credentials.
    """

    mirror: str
    checkpoint: str
    size_bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{_checkpoint(self.checkpoint)} fetched from mirror {self.mirror}"
            f" ({size(self.size_bytes)} in {duration(self.seconds)})"
        )


class MirrorFailed(Failed):
    """The mirror could not be used. Training continues, and copying is tried again.

    This is recorded once, until `MirrorRecovered` follows.
    """

    summary: ClassVar[str] = (
        "mirror cannot be used; training continues, and copying will be retried"
    )


class MirrorRecovered(EventData):
    """A checkpoint was copied to the mirror again, `seconds` after the first failure."""

    seconds: float

    def __str__(self) -> str:
        return f"mirror can be used again after {duration(self.seconds)}"


class MirrorStopped(WithReason):
    """This process no longer copies to the mirror, because another run owns it now."""

    summary: ClassVar[str] = "nothing more is copied to the mirror"


class MirrorBehind(EventData):
    """The run ended before its newest checkpoint was copied to the mirror.

    `mirrored` is the newest checkpoint that this process has copied, or None.
    """

    newest: str
    mirrored: str | None = None

    def __str__(self) -> str:
        text = f"the run ended before {_checkpoint(self.newest)} was copied to the mirror"
        if self.mirrored is not None:
            text += f", which has {self.mirrored}"
        return text


# --- memory and splitting -------------------------------------------------------------------------


class OutOfMemory(Failed):
    """An attempt at a step ran out of memory."""

    attempt: int
    micro_batch_size: int | None
    recompute: bool

    def __str__(self) -> str:
        text = f"out of memory in attempt {self.attempt}"
        if self.micro_batch_size is not None:
            text += f", with {counted(self.micro_batch_size, 'sample')} at a time"
        if self.recompute:
            text += " and activation checkpointing"
        return f"{text}: {self.error}"


class EvaluationSplit(Failed):
    """A batch in `Guard.evaluate_batches` did not fit into memory, so it is evaluated in parts.

    From now on, every batch with more than `micro_batch_size` samples is evaluated in parts.
    """

    batch_size: int
    micro_batch_size: int

    def __str__(self) -> str:
        return (
            f"an evaluation of {counted(self.batch_size, 'sample')} ran out of memory, and is"
            f" repeated with at most {counted(self.micro_batch_size, 'sample')} at a time:"
            f" {self.error}"
        )


class StateTaken(Failed):
    """This rank's optimizer ran out of memory during its step.

    The rank copies the weights and the optimizer state from another rank.
    """

    summary = (
        "the optimizer of this rank ran out of memory halfway through its step; this rank copies"
        " the state of a rank that completed the step"
    )


class Promises(EventData):
    """The guard determined whether batches may be split for a loss function.

    This happens before a batch is first split, so a run that never splits a batch has no such
    event. `split_promise` says how a split step compares with an unsplit step, `weighting` says how
    the losses of the micro-batches are weighted, and `split_check` contains the details of the
    check. `side_effects` lists the state that each forward pass changes, or is None if that was not
    checked.
    """

    batch_size: int | None
    split: str
    split_promise: str | None = None
    weighting: str | None = None
    split_check: Mapping[str, Any] | None = None
    side_effects: tuple[str, ...] | None = None

    def __str__(self) -> str:
        text = "splitting batches"
        if self.batch_size is not None:
            text += f" of {counted(self.batch_size, 'sample')}"
        text += f": {self.split}"
        if self.split_promise is not None:
            text += f" ({self.split_promise})"
        if self.weighting is not None:
            text += f"; micro-batches weighted by: {self.weighting}"
        if self.side_effects:
            text += f"; each forward pass changes {listed(self.side_effects)}"
        return text


class SideEffects(WithReason):
    """Each forward pass changes attributes that no checkpoint contains."""

    attributes: tuple[str, ...]

    def __str__(self) -> str:
        return f"the forward pass has side effects on {listed(self.attributes)}: {self.why}"


class SplitNotTried(WithReason):
    """This process could not be forked to test whether batches can be split.

    The test runs in this process instead, before the first split.
    """

    summary = (
        "splitting could not be tested in a copy of this process and will be tested in the process"
        " itself before the first split"
    )


class SplitRefused(WithReason):
    """Batches are not split for this loss function, because splitting would change training.

    `allow_split_with` is the hazard that ``Policy.allow_split_with`` would have to include.
    """

    allow_split_with: str

    def __str__(self) -> str:
        return f"batches are not split: {self.why}; {_how_to_allow(self.allow_split_with)}"


class SplitStopped(WithReason):
    """Batches are no longer split for this loss function, because a later check failed.

    `equal_until_step` is the last step at which a check passed, or None. In later steps that were
    split, the gradient may have differed from that of the whole batch.
    """

    allow_split_with: str
    equal_until_step: int | None
    promise: Promise = "changes training"

    def __str__(self) -> str:
        steps = "no check has passed, so the steps that were split"
        if self.equal_until_step is not None:
            steps = (
                f"the last check passed at step {self.equal_until_step}, so steps that were split"
                " after it"
            )
        return (
            f"batches are no longer split: {self.why}; {steps} may have had a different gradient"
            f" ({self.promise}); {_how_to_allow(self.allow_split_with)}"
        )


class CannotSplit(WithReason):
    """A batch cannot be split."""

    fix: str

    def __str__(self) -> str:
        return f"a batch cannot be split: {self.why}. Fix: {self.fix}"


class RecomputeImpossible(WithReason):
    """Activation checkpointing cannot save memory in `modules` or, if empty, in any module."""

    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.modules:
            return f"activation checkpointing cannot help: {self.why}"
        return f"activation checkpointing cannot help in {listed(self.modules)}: {self.why}"


class NotRestored(EventData):
    """An attempt was undone, but some of the values that it had changed could not be restored."""

    names: tuple[str, ...]
    promise: Promise = "changes training"

    def __str__(self) -> str:
        return (
            f"an attempt was undone, but {listed(self.names)} could not be restored"
            f" ({self.promise})"
        )


class OnednnSwitchedOff(EventData):
    """oneDNN ran out of memory and was switched off for the rest of the run."""

    promise: Promise = "equal up to rounding"

    def __str__(self) -> str:
        return f"oneDNN ran out of memory and is switched off from now on ({self.promise})"


class DecidedNow(WithReason):
    """Some or all steps are decided before their optimizer runs, although they could be late.

    See ``Policy.decide``. A reason is recorded when it first applies.
    """

    summary: ClassVar[str] = "the host reads the result of a step before the optimizer runs"


class OptimizerNotFused(DecidedNow):
    """Steps are decided before their optimizer runs, because it is not fused."""

    fix: str

    def __str__(self) -> str:
        return f"a GPU waits for the host in each step, because {self.why}; {self.fix}"


class LateSteps(EventData):
    """How many steps were decided late, over all restarts. It is recorded when the run is closed.

    `repeated` is the number of these steps that the device has refused, so that they were repeated.
    """

    steps: int
    repeated: int

    def __str__(self) -> str:
        return f"{counted(self.steps, 'step')} decided late, {self.repeated:,} of them repeated"


class LossFunctionReads(EventData):
    """The loss function reads a value from a device, which then waits for the host in each step."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return (
            f"the loss function calls {self.function} on a tensor on the device in {self.file}:"
            f"{self.line}, so the device waits for the host in each step. Keep the value in a"
            " tensor, and read it after the step or only every few steps"
        )


# --- values ---------------------------------------------------------------------------------------


class NonfiniteOrigin(EventData):
    """The guard found where NaN or Inf came from.

    `origin` has the fields of `numerics.provenance.Origin`. `bad_samples` contains the batch
    indices of the samples that cause NaN or Inf, and `dataset_indices` contains the indices of
    these samples in the dataset.
    """

    origin: Mapping[str, Any]
    bad_samples: tuple[int, ...]
    dataset_indices: tuple[int, ...] | None

    def __str__(self) -> str:
        text = f"origin of NaN or Inf: {self.origin['mechanism']}"
        # For the other kinds, NaN or Inf existed before the step, and the mechanism names the
        # tensor that contains it.
        if self.origin["kind"] in ("operation", "finite_overflow"):
            text = f"origin of NaN or Inf: {self._operation()}: {self.origin['mechanism']}"
        if self.bad_samples:
            text += f"; caused by {_samples(self.bad_samples, self.dataset_indices)}"
        return text

    def _operation(self) -> str:
        """Describe the operation by its name, module, source line and forward or backward pass."""
        text = str(self.origin["op"])
        if self.origin.get("module"):
            text += f" in {self.origin['module']}"
        if self.origin.get("line"):
            text += f" ({self.origin['line']})"
        return f"{text}, {self.origin['phase']} pass"


class NonfiniteNotTraced(WithReason):
    """A step was replayed, but the replay did not show where NaN or Inf came from."""

    summary = "the origin of NaN or Inf was not found"


class SamplesDropped(EventData):
    """A step was completed without the samples that caused NaN or Inf."""

    reason: str
    promise: Promise = "changes training"
    epoch: int | None = None
    batch: int | None = None

    def __str__(self) -> str:
        batch = _of_batch(self.epoch, self.batch)
        return f"step completed without the bad samples{batch}: {self.reason} ({self.promise})"


class MicroBatchDropped(EventData):
    """A step was completed without the micro-batches whose loss was not finite.

    `samples` contains the ranges of dropped samples in the batch as (first, end), where `end` is
    exclusive.
    """

    samples: tuple[tuple[int, int], ...]
    dataset_indices: tuple[int, ...] | None
    promise: Promise = "changes training"
    epoch: int | None = None
    batch: int | None = None

    def __str__(self) -> str:
        ranges = listed(f"{first} to {end - 1}" for first, end in self.samples)
        text = f"step completed without samples {ranges}{_of_batch(self.epoch, self.batch)}"
        if self.dataset_indices:
            text += f" (dataset indices {listed(self.dataset_indices)})"
        return f"{text}: the loss of their micro-batches was not finite ({self.promise})"


class RepetitionDiffered(EventData):
    """A step was made twice from the same state, and the bits of the results differ.

    Training continues with the first pass. `parameters` names the first parameters whose gradients
    differ, and `parameter_count` is their total number. `third_agrees_with` says which of the two
    passes a third one agrees with, or ``"neither"``. It is None if a third pass was not possible.
    `operations` are the nondeterministic operations in the step, as far as torch names them.
    `deterministic` says whether the script has enabled torch's deterministic algorithms. `count` is
    the number of steps that have differed so far in this process, out of `repeated` steps.
    """

    parameters: tuple[str, ...]
    parameter_count: int
    loss_differs: bool
    third_agrees_with: AgreeingPass | None
    operations: tuple[str, ...]
    deterministic: bool
    rule: str
    count: int = 1
    repeated: int | None = None

    def __str__(self) -> str:
        if self.count > 1 and self.repeated is not None:
            return (
                f"{self.count:,} of {self.repeated:,} repeated steps gave other bits; the last one"
                f" in {self._results()} ({self.rule})"
            )
        text = f"a repeated step gave other bits in {self._results()}"
        if self.third_agrees_with == "neither":
            text += "; a third pass agrees with neither of the two"
        elif self.third_agrees_with is not None:
            text += f"; a third pass agrees with the {self.third_agrees_with} one"
        if self.operations:
            text += f"; nondeterministic according to torch: {listed(self.operations)}"
        else:
            text += "; torch names no nondeterministic operation"
        if self.deterministic:
            text += " (deterministic algorithms are enabled)"
        return f"{text}. Training continues with the first pass ({self.rule})"

    def _results(self) -> str:
        """Describe which results differ."""
        results = []
        if self.loss_differs:
            results.append("the loss")
        if self.parameter_count:
            gradients = f"the gradients of {counted(self.parameter_count, 'parameter')}"
            if self.parameters:
                names = list(self.parameters)
                if self.parameter_count > len(names):
                    names.append("...")
                gradients += f" ({', '.join(names)})"
            results.append(gradients)
        return " and ".join(results)


class StepNotRepeated(WithReason):
    """A step that ``Policy.repeat_step_interval`` selects could not be repeated.

    Each reason is recorded once in each process.
    """

    summary = "a step could not be repeated for comparison (later ones like it are not reported)"


class Spike(EventData):
    """The loss and the gradient norm spiked, or the loss diverged. The step was still applied.

    `usual_norm` is the usual gradient norm, and `level` is ``"DIVERGED"`` if the loss diverged.
    """

    loss: float
    grad_norm: float
    usual_norm: float | None
    level: str

    def __str__(self) -> str:
        what = "spike"
        if self.level == "DIVERGED":
            what = "the loss has diverged"
        text = f"{what}: loss {number(self.loss)}, gradient norm {number(self.grad_norm)}"
        if self.usual_norm is not None:
            text += f" (usually {number(self.usual_norm)})"
        return f"{text}; the step was still applied"


class NormOverflowed(EventData):
    """The norm of a finite gradient exceeds float32's range, so it was computed in float64."""

    total: float

    def __str__(self) -> str:
        return f"gradient norm {self.total:.4g} exceeds float32; it was computed in float64"


class LossScaleLowered(EventData):
    """A step was skipped and the fp16 loss scale was lowered.

    This is normal while the loss scale adapts to the gradients.
    """

    loss_scale: float
    reason: str

    def __str__(self) -> str:
        return f"batch skipped and fp16 loss scale lowered to {self.loss_scale:g}: {self.reason}"


class LossScaleCollapsed(LossScaleLowered):
    """The fp16 loss scale has fallen below 1: the gradients were not finite at any scale."""

    def __str__(self) -> str:
        return f"fp16 loss scale collapsed to {self.loss_scale:g}: {self.reason}"


class RolledBack(EventData):
    """The run was rolled back: the state of `to_step` was restored."""

    from_step: int
    to_step: int

    def __str__(self) -> str:
        if self.from_step == self.to_step:
            return f"the state of step {self.to_step} was restored"
        return f"rolled back from step {self.from_step} to step {self.to_step}"


class RollbackFailed(Failed):
    """A rollback failed because the earlier state could not be restored."""

    summary = "rollback failed"


class SnapshotFailed(Failed):
    """A snapshot failed because the state could not be copied to host memory."""

    summary = "snapshot failed"


class SnapshotsDoNotFit(EventData):
    """Snapshots do not fit into host memory, so rollbacks restore a checkpoint instead."""

    def __str__(self) -> str:
        return "snapshots do not fit into host memory; a rollback returns to a checkpoint"


# --- diagnosis of learning ------------------------------------------------------------------------


class FindingReported(EventData):
    """The diagnosis reports a problem. `about` is either ``"cause"`` or ``"symptom"``."""

    kind: ClassVar[str] = "finding"
    rule: str
    severity: str
    what: str
    fix: str
    about: str = "symptom"
    confidence: float | None = None
    where: str = ""

    def __str__(self) -> str:
        place = self.rule
        if self.where:
            place = f"{self.where}, {self.rule}"
        text = f"{self.what.removesuffix('.')} ({place})"
        if self.fix:
            text += f". Fix: {self.fix}"
        return text


class NoteReported(FindingReported):
    """The diagnosis reports something unusual that may well be intended."""

    kind: ClassVar[str] = "note"


class DiagnosisLimited(WithReason):
    """The diagnosis cannot run all of its checks."""

    summary = "diagnosis limited"


class Aligned(EventData):
    """The alignment of a speech synthesizer's attention was measured.

    `learning.alignment.alignment_facts` documents the fields.
    """

    diagonality: float
    sharpness: float
    entropy: float
    monotonic_share: float
    share_at_max_decoder: float
    utterances: int

    def __str__(self) -> str:
        return (
            f"attention of {counted(self.utterances, 'utterance')}: diagonality"
            f" {number(self.diagonality)}, sharpness {number(self.sharpness)}, entropy"
            f" {number(self.entropy)}, {percent(self.monotonic_share)} monotonic,"
            f" {percent(self.share_at_max_decoder)} at the decoder's limit"
        )


# --- the loader -----------------------------------------------------------------------------------


class LoaderHealed(EventData):
    """Loader workers died or got stuck, and new workers continue after the last delivered batch."""

    cause: str
    remedy: str
    sample: int | str | None
    workers_before: int
    workers: int
    seconds: float

    def __str__(self) -> str:
        cause = self.cause
        if self.sample is not None:
            cause += f" at sample {self.sample}"
        workers = counted(self.workers, "worker")
        if self.workers != self.workers_before:
            workers += f" instead of {self.workers_before}"
        return f"loader recovered in {duration(self.seconds)}: {cause}; {self.remedy} ({workers})"


class SampleQuarantined(WithReason):
    """A bad sample was quarantined: from now on, the loader replaces it with another sample.

    `quarantined` is the total number of quarantined samples. `not_written` says why the list of
    quarantined samples could not be written, or is None if the list was written.
    """

    sample: int | str
    evidence: str
    quarantined: int
    not_written: str | None = None

    def __str__(self) -> str:
        text = (
            f"sample {self.sample} quarantined: {self.why} ({self.evidence});"
            f" {counted(self.quarantined, 'sample')} in quarantine"
        )
        if self.not_written is not None:
            text += f"; the list of quarantined samples could not be written: {self.not_written}"
        return text


class QuarantineFull(Failed):
    """A bad sample could not be quarantined because the quarantine has reached its size limit."""

    summary = "quarantine is full"


class DescriptorLimitRaised(WithReason):
    """The limit on open files was raised for the remaining lifetime of this process."""

    before: int
    now: int

    def __str__(self) -> str:
        return f"limit on open files raised from {self.before:,} to {self.now:,}: {self.why}"


class StreamReadOver(WithReason):
    """A resumed stream is read from its start; items before the resume position are discarded."""

    items: int

    def __str__(self) -> str:
        return f"reading {counted(self.items, 'item')} of the stream again: {self.why}"


class RanksNotDivided(WithReason):
    """The samples are not divided among ranks, so each rank gets all of them."""

    summary = "each rank gets all samples"


class NothingLeft(WithReason):
    """An iteration yielded no batches because the loader was restored at the end of an epoch."""

    epoch: int

    def __str__(self) -> str:
        return f"no batches left in epoch {self.epoch}: {self.why}"


class EpochSetBack(WithReason):
    """The training loop set the loader back to an earlier epoch."""

    before: int
    now: int

    def __str__(self) -> str:
        return f"epoch set back from {self.before} to {self.now} by the loop: {self.why}"


class Preflight(EventData):
    """A check before the first epoch found that loading batches will probably fail or be slow.

    `certain` is true if loading is sure to fail, because a single batch is too large.
    """

    rule: str
    what: str
    limit: str
    fix: str
    certain: bool = False

    def __str__(self) -> str:
        return f"{self.what}; {self.limit} ({self.rule}). Fix: {self.fix}"


# --- frameworks -----------------------------------------------------------------------------------


class OwnSteps(WithReason):
    """A Lightning module with manual optimization takes steps that the guard does not protect."""

    summary = "steps are not guarded"


class LoopSteps(EventData):
    """The loop over `Guard.batches` steps the optimizers itself, without `Guard.step`."""

    optimizer: str

    def __str__(self) -> str:
        return (
            f"the loop steps optimizer {self.optimizer!r} itself: its steps are counted and saved;"
            " NaN and loss spikes are reported, but such steps are not undone"
        )


class StepsNotSeen(EventData):
    """The loop has trained the model, but the guard has seen no optimizer step."""

    def __str__(self) -> str:
        return (
            "the loop has changed the weights without an optimizer step that the guard can see, so"
            " such steps are neither counted nor saved until the loop ends. Keep optimizer.step()"
            " outside of torch.compile, and update the weights only through the guard's optimizers"
        )


class NonfiniteStepTaken(EventData):
    """The loop stepped an optimizer although its loss or its gradients contained NaN or Inf.

    `loss` and `grad_norm` are None if they are unknown.
    """

    optimizer: str
    loss: float | None
    grad_norm: float | None

    def __str__(self) -> str:
        values = [
            f"{name} {number(value)}"
            for name, value in (("loss", self.loss), ("gradient norm", self.grad_norm))
            if value is not None
        ]
        return (
            f"the loop stepped optimizer {self.optimizer!r} with NaN or Inf ({', '.join(values)})."
            " guard.step(batch, loss_fn) would have skipped the batch"
        )


class OwnFitBatch(WithReason):
    """A SpeechBrain Brain overrides `fit_batch`, so only calls to `guarded_step` are guarded."""

    summary = "the Brain has its own fit_batch"


class ItemsIgnored(WithReason):
    """A Transformers model ignores `num_items_in_batch`, by which it should divide the loss."""

    model: str

    def __str__(self) -> str:
        return f"{self.model} ignores num_items_in_batch: {self.why}"


# --- parts of sentences ---------------------------------------------------------------------------


def _checkpoint(name: str | None) -> str:
    if name is None:
        return "checkpoint"
    return f"checkpoint {name}"


def _kept_as(name: str | None) -> str:
    if name is None:
        return ""
    return f"; kept as {name}"


def _how_to_allow(hazard: str) -> str:
    return f"to split anyway, add {hazard!r} to Policy.allow_split_with"


def _of_batch(epoch: int | None, batch: int | None) -> str:
    if batch is None:
        return ""
    return f" of {name_of_batch(epoch, batch)}"


def _samples(rows: tuple[int, ...], dataset_indices: tuple[int, ...] | None) -> str:
    """Return a phrase that names samples by their indices in the batch and in the dataset."""
    is_one = len(rows) == 1
    text = f"{'sample' if is_one else 'samples'} {listed(rows)} of the batch"
    if dataset_indices:
        text += f" (dataset {'index' if is_one else 'indices'} {listed(dataset_indices)})"
    return text

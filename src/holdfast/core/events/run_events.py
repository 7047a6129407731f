"""Events in a training process, recorded by the guard, the loader and the framework integrations.

In all of them, `why` is prose for people, `error` is the type and text of an exception, and
`promise` says how the rest of the run compares to an undisturbed one. Steps are optimizer steps;
the step at which an event happened is not repeated in its fields. Decisions are in ``decisions``,
and events of processes are in ``process_events``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from holdfast.core.events.data import EventData, Failed, Promise, WithReason
from holdfast.core.events.decisions import name_of_batch
from holdfast.core.raised import exception_text
from holdfast.core.text import counted, duration, listed, number, percent, size

# --- a run starts, is observed, and ends ----------------------------------------------------------


class LoopStarted(EventData):
    """A training loop started: who drives it (`by`), and what a resume promises."""

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
    """An epoch ended: `epochs` are complete, and the last one had this many batches and steps.

    `steps` is None if the epoch began before a restart or a rollback. The first 100 epochs are all
    recorded; later ones only when a process has completed 1, 2, 4, 8, ... whole epochs.
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
    """The run resumed from a checkpoint, or from what a framework loaded.

    `trained_batches` counts the batches that the run had trained, in all its epochs.
    """

    checkpoint: str | None = None
    trained_batches: int | None = None
    by: str = "guard"

    def __str__(self) -> str:
        text = "run resumed"
        if self.checkpoint is not None:
            text += f" from checkpoint {self.checkpoint}"
        if self.by != "guard":
            text += f" by {self.by}"
        if self.trained_batches is not None:
            text += f" after {counted(self.trained_batches, 'batch')}"
        return text


class SettingsKept(EventData):
    """The script configures an optimizer or a scheduler differently from when the run began.

    The run keeps its original settings.
    """

    changed: tuple[str, ...]
    why: str = (
        "a resumed run keeps the settings of its checkpoint. To change them, set them after"
        " Guard(...), such as optimizer.param_groups[0]['lr'], or start in another directory"
    )

    def __str__(self) -> str:
        changes = "; ".join(self.changed)
        return f"settings in the script are ignored ({changes}), because {self.why}"


class GroupsChanged(WithReason):
    """Parameter groups were added during the run, so the script will lack them after a restart."""

    summary = "parameter groups were added during the run"
    why: str = (
        "a resume is refused (H313) unless the same groups are passed to Guard(...). Add them"
        " before Guard(...) if holdfast.latest(run_dir) is from a later step than this one, or pass"
        " all groups from the start and turn them on with requires_grad"
    )


class PositionNotKept(WithReason):
    """On at least one rank, a resumed run does not continue where it was interrupted."""

    summary = "the run does not continue at the batch where it was interrupted"
    why: str = (
        "the loop does not iterate guard.batches(...), so it starts from its beginning and repeats"
        " an interrupted epoch. Iterate guard.batches(max_epochs=...), or move to the"
        " position of guard.global_step yourself"
    )


class ResumeMayDiffer(WithReason):
    """A resumed run may differ from an uninterrupted one.

    The difference may be in its batches, their augmentation or the learning rate.

    `why` continues "promise of a resume:".
    """

    summary = "a resumed run may differ from an uninterrupted one; resume promise"


class OwnStateNotKept(EventData):
    """The run resumed on a different number of ranks, so per-rank state was not restored.

    The buffers and ``state=`` with these names now have the values of rank 0 on all ranks.
    """

    names: tuple[str, ...]
    ranks_before: int
    ranks_now: int
    why: str = (
        "these values differed between ranks and can only be restored on the same number of ranks;"
        " all ranks continue with those of rank 0"
    )

    def __str__(self) -> str:
        return (
            f"resumed on {counted(self.ranks_now, 'rank')} instead of {self.ranks_before};"
            f" {listed(self.names)} not restored: {self.why}"
        )


class StepsLeftBehind(EventData):
    """A guard resumes at an earlier step than the one that this process had reached.

    An earlier guard had trained up to `from_step`, and the new one resumes at `to_step`.
    """

    from_step: int
    to_step: int
    why: str = (
        "the loop was left without a save, so its last steps are in no checkpoint, and the run"
        " resumes from the newest one. To keep such steps, end a loop with guard.request_stop(), or"
        " call guard.close() before making a new Guard"
    )

    def __str__(self) -> str:
        return (
            f"resumed at step {self.to_step}, although this process had trained up to step"
            f" {self.from_step}: {self.why}"
        )


class BeginsAnew(EventData):
    """A framework started at step 0, although this directory contains checkpoints."""

    though_saved_in: str

    def __str__(self) -> str:
        return f"training starts from scratch, although {self.though_saved_in} contains checkpoints"


class StopRequested(EventData):
    """The run was asked to stop, by a signal (`signal` is its name) or by a call.

    With several ranks, `asked_rank` is the one that received the request; all ranks stop for the
    same reason.
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


class SignalLeftAlone(EventData):
    """A signal of ``Policy.stop_signals`` does not stop the run, because native code handles it."""

    signal: str
    why: str = (
        "it has a handler in C, such as that of faulthandler.register. Register that handler for"
        " another signal, such as signal.SIGRTMIN, or leave the signal out of stop_signals"
    )

    def __str__(self) -> str:
        return f"{self.signal} does not stop the run: {self.why}"


class LeftByException(EventData):
    """An exception ended the loop: its class, text, causes, and frames as [file, line, function].

    `rule` is set if it is an error of holdfast.
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
    """The run was closed. If its last event is neither this nor an exception, it was cut off."""

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
    """An evaluation loss or another metric (`name`), and schedulers that reacted to it.

    `kept_as` is the checkpoint that was kept because of it.
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
    """In an epoch, the other ranks waited for this one, because it took longer to reach the loss.

    `share` is the waiting time as a share of the step time, and `of_others` is the time of the
    other ranks in seconds. Items and peak memory (since each process started) are those of all
    ranks. A rank that is slow in backward is not detected.
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
            f" {duration(self.of_others)} on the other ranks, which wait for it"
            f" {percent(self.share)} of the time"
        )


class OwnCollectives(EventData):
    """The loss or the model issued collectives itself, for the first time in this run.

    `count` says how many.
    """

    count: int
    why: str = (
        "if a rank runs out of memory before one of them, all ranks end (H401); no rank splits or"
        " recomputes alone; and NaN is traced only up to the first of them"
    )

    def __str__(self) -> str:
        collectives = counted(self.count, "collective")
        return f"the loss or the model issued {collectives} of its own: {self.why}"


class ImageAdded(EventData):
    """An image was written (`path`, relative to the run directory).

    `nonfinite` and `outside_0_to_1` count invalid values.
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
    """A recording could not be continued, so a new one was started.

    `what` says where the old one is.
    """

    what: str

    def __str__(self) -> str:
        return f"a new recording was started: {self.what}"


class SchedulersWait(EventData):
    """These schedulers need a validation loss, but an epoch passed without one."""

    schedulers: tuple[str, ...]
    fix: str

    def __str__(self) -> str:
        return f"no validation loss for {listed(self.schedulers)} in an epoch. Fix: {self.fix}"


# --- checkpoints ----------------------------------------------------------------------------------


class CheckpointSaved(EventData):
    """A checkpoint is complete. The loop waited for `stall_seconds` of the `seconds` it took."""

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
    """A framework saved its own checkpoint, which was then sealed."""

    checkpoint: str

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} of the framework saved and sealed"


class SaveFailed(Failed):
    """A checkpoint could not be written; training continues, and older checkpoints stay."""

    checkpoint: str | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        text = f"{_checkpoint(self.checkpoint)} not saved"
        if self.seconds is not None:
            text += f" after {duration(self.seconds)}"
        return f"{text}: {self.error}"


class SaveRefused(WithReason):
    """A state was not saved, or not kept as a checkpoint, because it is bad.

    `kept` is its new name. `nonfinite` lists tensors with NaN or Inf, and `count` says how many
    there are.
    """

    checkpoint: str | None = None
    kept: str | None = None
    nonfinite: tuple[str, ...] = ()
    count: int = 0

    def __str__(self) -> str:
        return f"{_checkpoint(self.checkpoint)} refused: {self.why}{_kept_as(self.kept)}"


class SavePostponed(WithReason):
    """A save waits until spikes are over."""

    summary = "save postponed"


class SavesSynchronous(WithReason):
    """From now on, training waits for saves."""

    summary = "training waits for saves from now on"


class PruneFailed(Failed):
    """Older checkpoints could not be removed."""

    summary = "older checkpoints could not be removed"


class NotSaved(EventData):
    """The run ended with unsaved steps; `error` says why the newest save failed."""

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
    """The loop was left, or the process ended, with these steps (inclusive) in no checkpoint."""

    from_step: int
    to_step: int

    def __str__(self) -> str:
        if self.from_step == self.to_step:
            return f"step {self.to_step} is in no checkpoint"
        return f"steps {self.from_step} to {self.to_step} are in no checkpoint"


class ChangesNotSaved(WithReason):
    """Something that is not part of any checkpoint changes."""

    summary = "changes are in no checkpoint"


class CheckpointDamaged(WithReason):
    """A checkpoint failed verification and was moved aside; `kept` is its new name."""

    checkpoint: str | None = None
    kept: str | None = None

    def __str__(self) -> str:
        return f"{_checkpoint(self.checkpoint)} is damaged: {self.why}{_kept_as(self.kept)}"


class CheckpointKept(WithReason):
    """A checkpoint that failed verification was kept."""

    checkpoint: str

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} failed verification and is kept: {self.why}"


class CheckpointInstead(EventData):
    """This checkpoint was loaded instead of another one."""

    checkpoint: str
    of: str

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} loaded instead of {self.of}"


# --- memory and splitting -------------------------------------------------------------------------


class OutOfMemory(Failed):
    """An attempt ran out of memory."""

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
    """A batch did not fit into memory in `Guard.evaluate_batches`, and is evaluated in parts.

    Batches with more than `micro_batch_size` samples are evaluated in parts from now on.
    """

    batch_size: int
    micro_batch_size: int

    def __str__(self) -> str:
        return (
            f"an evaluation of {counted(self.batch_size, 'sample')} ran out of memory, so at most"
            f" {counted(self.micro_batch_size, 'sample')} at a time are evaluated now: {self.error}"
        )


class StateTaken(Failed):
    """This rank's optimizer ran out of memory during its step.

    The rank takes over the state of another one.
    """

    summary = (
        "the optimizer of this rank ran out of memory halfway; the state of a rank that completed"
        " the step is used"
    )


class Promises(EventData):
    """What splitting a batch would be equal to for this loss function, and how that was determined.

    `split_check` has the details of the check, and `side_effects` is None if not examined.
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
    """Each forward pass changes attributes that are in no checkpoint."""

    attributes: tuple[str, ...]

    def __str__(self) -> str:
        return f"the forward pass has side effects on {listed(self.attributes)}: {self.why}"


class SplitNotTried(WithReason):
    """This process could not be forked to test whether batches can be split.

    The test is repeated before the first split.
    """

    summary = "splitting could not be tested yet; it will be before the first split"


class SplitRefused(WithReason):
    """Batches are not split for this loss function, unless the hazard is allowed by name."""

    allow_split_with: str

    def __str__(self) -> str:
        return f"batches are not split: {self.why}; {_how_to_allow(self.allow_split_with)}"


class SplitStopped(WithReason):
    """Batches are no longer split for this loss function, because a later check failed.

    `equal_until_step` is the last step at which a check passed, or None. The gradients of steps
    that were split after it may differ from those of the whole batch.
    """

    allow_split_with: str
    equal_until_step: int | None
    promise: Promise = "changes training"

    def __str__(self) -> str:
        checked = "no check has passed"
        if self.equal_until_step is not None:
            checked = f"the last check passed at step {self.equal_until_step}"
        return (
            f"batches are no longer split: {self.why}; {checked}, and steps split after that may"
            f" have had a different gradient ({self.promise});"
            f" {_how_to_allow(self.allow_split_with)}"
        )


class CannotSplit(WithReason):
    """A batch cannot be split."""

    fix: str

    def __str__(self) -> str:
        return f"a batch cannot be split: {self.why}. Fix: {self.fix}"


class RecomputeImpossible(WithReason):
    """Activation checkpointing cannot help, or not in these modules."""

    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.modules:
            return f"activation checkpointing cannot help: {self.why}"
        return f"activation checkpointing cannot help in {listed(self.modules)}: {self.why}"


class NotRestored(EventData):
    """Values changed in an attempt that was undone, and could not be restored."""

    names: tuple[str, ...]
    promise: Promise = "changes training"

    def __str__(self) -> str:
        return (
            f"{listed(self.names)} changed in an attempt that was undone, and could not be restored"
            f" ({self.promise})"
        )


class OnednnSwitchedOff(EventData):
    """oneDNN, which keeps its own memory, is switched off from now on."""

    promise: Promise = "equal up to rounding"

    def __str__(self) -> str:
        return f"oneDNN ran out of memory and is switched off from now on ({self.promise})"


# --- values ---------------------------------------------------------------------------------------


class NonfiniteOrigin(EventData):
    """Where NaN or Inf came from, and the samples that cause it.

    `origin` has the facts of `numerics.provenance.Origin`.
    """

    origin: Mapping[str, Any]
    bad_samples: tuple[int, ...]
    dataset_indices: tuple[int, ...] | None

    def __str__(self) -> str:
        text = f"origin of NaN or Inf: {self.origin['mechanism']}"
        # In the other cases, it existed before the step, and the mechanism names the tensor.
        if self.origin["kind"] in ("operation", "finite_overflow"):
            text = f"origin of NaN or Inf: {self._operation()}: {self.origin['mechanism']}"
        if self.bad_samples:
            text += f"; caused by {_samples(self.bad_samples, self.dataset_indices)}"
        return text

    def _operation(self) -> str:
        """Return the operation with its module, line and pass."""
        text = str(self.origin["op"])
        if self.origin.get("module"):
            text += f" in {self.origin['module']}"
        if self.origin.get("line"):
            text += f" ({self.origin['line']})"
        return f"{text}, {self.origin['phase']} pass"


class NonfiniteNotTraced(WithReason):
    """The replay of a step did not show where NaN or Inf came from."""

    summary = "the origin of NaN or Inf was not found"


class SamplesDropped(EventData):
    """A step was made without its bad samples."""

    reason: str
    promise: Promise = "changes training"
    epoch: int | None = None
    batch: int | None = None

    def __str__(self) -> str:
        batch = _of_batch(self.epoch, self.batch)
        return f"step made without the bad samples{batch}: {self.reason} ({self.promise})"


class MicroBatchDropped(EventData):
    """A step was made without micro-batches whose loss was not finite.

    `samples` are their ranges within the batch.
    """

    samples: tuple[tuple[int, int], ...]
    dataset_indices: tuple[int, ...] | None
    promise: Promise = "changes training"
    epoch: int | None = None
    batch: int | None = None

    def __str__(self) -> str:
        ranges = listed(f"{first} to {end - 1}" for first, end in self.samples)
        text = f"step made without samples {ranges}{_of_batch(self.epoch, self.batch)}"
        if self.dataset_indices:
            text += f" (dataset indices {listed(self.dataset_indices)})"
        return f"{text}: the loss of their micro-batches was not finite ({self.promise})"


class Spike(EventData):
    """Loss and gradient norm are far above their usual level; the step was made nevertheless."""

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
        return f"{text}; the step was made"


class NormOverflowed(EventData):
    """The norm of a finite gradient exceeds the range of float32, so it was computed in float64."""

    total: float

    def __str__(self) -> str:
        return f"gradient norm {self.total:.4g} exceeds float32; it was computed in float64"


class LossScaleLowered(EventData):
    """A step was skipped and the fp16 loss scale lowered, as is normal while the scale adapts."""

    loss_scale: float
    reason: str

    def __str__(self) -> str:
        return f"batch skipped and fp16 loss scale lowered to {self.loss_scale:g}: {self.reason}"


class LossScaleCollapsed(LossScaleLowered):
    """The fp16 loss scale has fallen below 1: the gradients are not finite at any scale."""

    def __str__(self) -> str:
        return f"fp16 loss scale collapsed to {self.loss_scale:g}: {self.reason}"


class RolledBack(EventData):
    """The run is back at an earlier step."""

    from_step: int
    to_step: int

    def __str__(self) -> str:
        if self.from_step == self.to_step:
            return f"the state of step {self.to_step} was restored"
        return f"rolled back from step {self.from_step} to step {self.to_step}"


class RollbackFailed(Failed):
    """The state could not be restored."""

    summary = "rollback failed"


class SnapshotFailed(Failed):
    """The state could not be copied to host memory."""

    summary = "snapshot failed"


class SnapshotsDoNotFit(EventData):
    """Snapshots do not fit into host memory, so a rollback returns to a checkpoint."""

    def __str__(self) -> str:
        return "snapshots do not fit into host memory; a rollback returns to a checkpoint"


# --- diagnosis of learning ------------------------------------------------------------------------


class FindingReported(EventData):
    """A diagnosis rule applies; `about` says whether it names a cause or a symptom."""

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
    """A diagnosis rule reports something worth knowing that is often intended."""

    kind: ClassVar[str] = "note"


class DiagnosisLimited(WithReason):
    """The diagnosis cannot check everything."""

    summary = "diagnosis limited"


class Aligned(EventData):
    """How well the attention of a speech synthesizer is aligned.

    The fields are those of `learning.alignment.alignment_facts`.
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
    """Workers died or got stuck, and new ones continue after the last batch delivered."""

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
    """A sample is replaced with another one from now on.

    `quarantined` is the number of quarantined samples, and `not_written` says why the list could
    not be written.
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
            text += f"; the list could not be written: {self.not_written}"
        return text


class QuarantineFull(Failed):
    """Another sample would have exceeded the limit of the quarantine."""

    summary = "quarantine is full"


class DescriptorLimitRaised(WithReason):
    """The limit of open files was raised, for the rest of this process's life."""

    before: int
    now: int

    def __str__(self) -> str:
        return f"limit of open files raised from {self.before:,} to {self.now:,}: {self.why}"


class StreamReadOver(WithReason):
    """Items before the resume position are read again and discarded."""

    items: int

    def __str__(self) -> str:
        return f"reading {counted(self.items, 'item')} of the stream again: {self.why}"


class RanksNotDivided(WithReason):
    """The samples are not divided among ranks, so each rank gets all of them."""

    summary = "each rank gets all samples"


class NothingLeft(WithReason):
    """An iteration had no batches, because the restored position is the end of an epoch."""

    epoch: int

    def __str__(self) -> str:
        return f"no batches left in epoch {self.epoch}: {self.why}"


class EpochSetBack(WithReason):
    """The loop set the loader back to an earlier epoch."""

    before: int
    now: int

    def __str__(self) -> str:
        return f"epoch set back from {self.before} to {self.now} by the loop: {self.why}"


class Preflight(EventData):
    """Loading will probably fail or be slow.

    Failure is `certain` if a single batch is too large.
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
    """A Lightning module with manual optimization makes steps without the guard."""

    summary = "steps are not guarded"


class OwnFitBatch(WithReason):
    """A SpeechBrain Brain has its own `fit_batch`, which is not guarded."""

    summary = "the Brain has its own fit_batch"


class ItemsIgnored(WithReason):
    """The model ignores `num_items_in_batch`."""

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
    """Return a phrase for samples, with their indices in the batch and in the dataset."""
    is_one = len(rows) == 1
    text = f"{'sample' if is_one else 'samples'} {listed(rows)} of the batch"
    if dataset_indices:
        text += f" (dataset {'index' if is_one else 'indices'} {listed(dataset_indices)})"
    return text

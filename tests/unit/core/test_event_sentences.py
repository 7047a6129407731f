"""Every kind of event reads as a sentence that holds the values that matter."""

from __future__ import annotations

import json
import re

import pytest

from holdfast.core.events import process_events as process
from holdfast.core.events import run_events as run
from holdfast.core.events.data import EventData, key_value_text
from holdfast.core.events.decisions import (
    Grow,
    Recompute,
    Retry,
    RollBack,
    SkipStep,
    Split,
    Stop,
)
from holdfast.core.events.event import Event, event_kinds

MIB = 1 << 20
HANG = {
    "pid": 4711,
    "rank": 1,
    "phase": "backward",
    "step": 30,
    "seconds": 125.0,
    "limit": 120.0,
}
ERROR = "OSError: disk is full"
REASON = "non-finite loss (nan)"

# One event of each kind with representative values, and what its sentence must contain.
EXAMPLES: list[tuple[EventData, tuple[str, ...]]] = [
    # decisions
    (Retry(reason="memory was freed", promise="bit-exact"), ("memory was freed", "bit-exact")),
    (
        Recompute(reason="saves most", promise="bit-exact", modules=("encoder", "decoder")),
        ("encoder and decoder", "saves most", "bit-exact"),
    ),
    (Recompute(reason="100 clean steps", promise="bit-exact", modules=()), ("off", "100 clean")),
    (
        Split(reason="8 do not fit", promise="equal up to rounding", micro_batch_size=4),
        ("micro-batches of 4 samples", "8 do not fit", "equal up to rounding"),
    ),
    (
        Grow(reason="100 clean steps", promise="bit-exact", micro_batch_size=None),
        ("whole batches", "100 clean steps"),
    ),
    (
        Grow(reason="100 clean steps", promise="bit-exact", micro_batch_size=1),
        ("1 sample", "100 clean steps"),
    ),
    (
        SkipStep(reason=REASON, promise="changes training", epoch=2, batch=7),
        ("batch 7 of epoch 2", REASON, "changes training"),
    ),
    (SkipStep(reason=REASON, promise="changes training"), ("batch skipped", REASON)),
    (
        RollBack(reason=REASON, promise="changes training", rewind_data=True, epoch=2, batch=7),
        ("replaying", REASON, "batch 7 of epoch 2"),
    ),
    (Stop(reason=REASON, promise="bit-exact", rule="H402"), (REASON, "H402")),
    # a run starts, is observed, and ends
    (
        run.LoopStarted(
            resume_promise="bit-exact", epoch=2, batches=30, max_epochs=10, max_steps=5000
        ),
        ("epoch 2", "30 batches", "10 epochs", "5,000 steps", "bit-exact"),
    ),
    (run.EpochEnded(epochs=3, steps=50, batches=100, batch_size=8), ("3", "50", "100", "8")),
    (run.Resumed(checkpoint="step-40", trained_batches=7), ("step-40", "7 batches")),
    (run.SettingsKept(changed=("lr: 0.1 stays, not 0.2",), why="set it after"), ("0.1", "0.2")),
    (
        run.ScheduleLengthChanged(
            scheduler="decay", changed=("T_max: 3 before, now 6",), rate_before=0.0, rate_now=0.05
        ),
        ("decay", "T_max: 3 before, now 6", "0.05", "changes training"),
    ),
    (
        run.ImplementationChanged(changed=("optimizer.0.fused: unset before, now True",)),
        ("unset before, now True", "equal up to rounding"),
    ),
    (run.GroupsChanged(), ("H313",)),
    (run.PositionNotKept(why="the loop is not ours"), ("the loop is not ours",)),
    (run.ResumeMayDiffer(why="none, because of X"), ("none, because of X",)),
    (
        run.OwnStateNotKept(names=("bn.mean",), ranks_before=4, ranks_now=2),
        ("bn.mean", "4", "2 ranks"),
    ),
    (run.StepsLeftBehind(from_step=50, to_step=40), ("50", "40")),
    (run.BeginsAnew(though_saved_in="/runs/a"), ("/runs/a",)),
    (
        run.StopRequested(reason="preempted", signal="SIGTERM", asked_rank=3),
        ("preempted", "SIGTERM", "rank 3"),
    ),
    (
        run.RequestReceived(action="save", sender="process 812 on login1"),
        ("holdfast save", "process 812 on login1"),
    ),
    (run.SignalLeftAlone(signal="SIGUSR1"), ("SIGUSR1",)),
    (
        run.TimeLimited(end=1764534622.0, what="Slurm ends job 4711"),
        ("2025-11-30 20:30:22 UTC", "4711"),
    ),
    (run.EndOfJobUnknown(job="4711", why="squeue is lost"), ("4711", "squeue is lost", "max_time")),
    (
        run.LeftByException(exception="ValueError", type="mine.ValueError", message="bad\nshape"),
        ("mine.ValueError: bad", "shape"),
    ),
    (run.Closed(how="finished"), ("finished",)),
    (run.Closed(how="left"), ("left early",)),
    (
        run.Validated(
            loss=0.91234567, name="accuracy", kept_as="best", learning_rate_changed_by=("plateau",)
        ),
        ("accuracy", "0.9123", "best", "plateau"),
    ),
    (
        run.RankIsSlow(
            rank=3,
            where="in forward",
            seconds_a_step=2.5,
            of_others=1.5,
            share=0.25,
            items_a_step=(8.0,),
        ),
        ("rank 3", "in forward", "2.5 s", "1.5 s", "25 %"),
    ),
    (run.OwnCollectives(count=2), ("2 collectives", "H401")),
    (
        run.ImageAdded(tag="mel", path="images/mel/4.png", nonfinite=2, outside_0_to_1=1),
        ("mel", "images/mel/4.png", "NaN or Inf values: 2", "outside 0 to 1: 1"),
    ),
    (run.ImageLeftOut(tag="mel", reason=ERROR), ("mel", ERROR)),
    (run.RecordingMovedAside(what="the old one is x.old"), ("x.old",)),
    (run.SchedulersWait(schedulers=("plateau",), fix="call validated"), ("plateau", "Fix: call")),
    # checkpoints
    (
        run.CheckpointSaved(
            checkpoint="step-40",
            size_bytes=312 * MIB,
            seconds=0.81,
            stall_seconds=0.052,
            removed=("step-10",),
        ),
        ("step-40", "312 MiB", "0.8 s", "52 ms", "step-10"),
    ),
    (run.Saved(checkpoint="epoch-1"), ("epoch-1",)),
    (run.SaveFailed(error=ERROR, checkpoint="step-40", seconds=2.0), ("step-40", "2.0 s", ERROR)),
    (run.SaveRefused(why="2 tensors hold NaN", kept="damaged-1"), ("2 tensors", "damaged-1")),
    (run.SavePostponed(why="spikes"), ("spikes",)),
    (
        run.CheckpointMirrored(
            checkpoint="step-40", size_bytes=3 * MIB, seconds=2.5, removed=("step-10",)
        ),
        ("step-40", "3 MiB", "2.5 s", "step-10"),
    ),
    (
        run.MirrorPulled(
            mirror="s3://bucket/run", checkpoint="step-40", size_bytes=3 * MIB, seconds=2.5
        ),
        ("step-40", "s3://bucket/run", "3 MiB", "2.5 s"),
    ),
    (run.MirrorFailed(error=ERROR), (ERROR, "continues")),
    (run.MirrorRecovered(seconds=90.0), ("1 min 30 s",)),
    (run.MirrorStopped(why="process 7 has taken over"), ("process 7",)),
    (run.MirrorBehind(newest="step-40", mirrored="step-30"), ("step-40", "step-30")),
    (run.SavesSynchronous(why="no memory"), ("no memory",)),
    (run.DiskSpaceLow(free_bytes=5 * MIB, checkpoint_bytes=3 * MIB), ("5 MiB", "3 MiB")),
    (run.PruneFailed(error=ERROR), (ERROR,)),
    (run.NotSaved(newest_checkpoint=40, failed_saves=2, error=ERROR), ("40", "2 saves", ERROR)),
    (run.NotSaved(newest_checkpoint=None, failed_saves=0), ("no checkpoint",)),
    (run.StepsNotSaved(from_step=41, to_step=45), ("41", "45")),
    (run.ChangesNotSaved(why="weights changed"), ("weights changed",)),
    (
        run.CheckpointDamaged(why="digest differs", checkpoint="step-40", kept="damaged-step-40"),
        ("step-40", "digest differs", "damaged-step-40"),
    ),
    (run.CheckpointKept(why="no other", checkpoint="last.ckpt"), ("last.ckpt", "no other")),
    (run.CheckpointInstead(checkpoint="a.ckpt", of="b.ckpt"), ("a.ckpt", "b.ckpt")),
    # memory and splitting
    (
        run.OutOfMemory(error="CUDA out of memory", attempt=2, micro_batch_size=8, recompute=True),
        ("attempt 2", "8 samples", "activation checkpointing", "CUDA out of memory"),
    ),
    (run.StateTaken(error="CUDA out of memory"), ("CUDA out of memory",)),
    (
        run.Promises(
            batch_size=64,
            split="possible",
            split_promise="equal up to rounding",
            weighting="samples",
            side_effects=("model.count",),
        ),
        ("64 samples", "possible", "equal up to rounding", "samples", "model.count"),
    ),
    (run.SideEffects(why="they count", attributes=("model.count",)), ("model.count", "they count")),
    (run.SplitNotTried(why="cannot fork"), ("cannot fork",)),
    (run.SplitRefused(why="batch norm", allow_split_with="batch_norm"), ("batch norm", "'batch_n")),
    (
        run.SplitStopped(why="check failed", allow_split_with="buffers", equal_until_step=90),
        ("check failed", "buffers", "step 90", "changes training"),
    ),
    (run.CannotSplit(why="a set has no order", fix="use a list"), ("a set", "Fix: use a list")),
    (run.RecomputeImpossible(why="compiled", modules=("encoder",)), ("compiled", "encoder")),
    (run.NotRestored(names=("counter",)), ("counter", "changes training")),
    (
        run.EvaluationSplit(error="no room", batch_size=64, micro_batch_size=32),
        ("64 samples", "32 samples", "no room"),
    ),
    (run.OnednnSwitchedOff(), ("oneDNN", "equal up to rounding")),
    (run.DecidedNow(why="there are objects in state="), ("before the optimizer", "state=")),
    (run.LateSteps(steps=1200, repeated=3), ("1,200 steps", "3 of them repeated")),
    (
        run.OptimizerNotFused(why="optimizer 'adam' is not fused", fix="pass fused=True"),
        ("a GPU waits", "'adam'", "pass fused=True"),
    ),
    (
        run.LossFunctionReads(function="item()", file="train.py", line=12),
        ("item()", "train.py:12", "waits"),
    ),
    # values
    (
        run.NonfiniteOrigin(
            origin={
                "kind": "operation",
                "op": "log",
                "module": "encoder",
                "line": "model.py:12 in forward",
                "phase": "forward",
                "mechanism": "log of a negative number",
            },
            bad_samples=(3, 5),
            dataset_indices=(103, 205),
        ),
        ("log", "encoder", "model.py:12", "negative", "3 and 5", "103 and 205"),
    ),
    (
        run.NonfiniteOrigin(
            origin={
                "kind": "input",
                "op": "batch tensor 0",
                "phase": "forward",
                "mechanism": "NaN in the batch",
            },
            bad_samples=(3,),
            dataset_indices=(103,),
        ),
        ("NaN in the batch", "sample 3 of the batch", "dataset index 103"),
    ),
    (run.NonfiniteNotTraced(why="it was finite"), ("it was finite",)),
    (run.SamplesDropped(reason=REASON, epoch=2, batch=7), (REASON, "batch 7 of epoch 2")),
    (
        run.MicroBatchDropped(samples=((0, 4), (8, 12)), dataset_indices=(7, 9)),
        ("0 to 3 and 8 to 11", "7 and 9"),
    ),
    (
        run.RepetitionDiffered(
            parameters=("a", "b"),
            parameter_count=7,
            loss_differs=True,
            third_agrees_with="second",
            operations=("put_",),
            deterministic=True,
            rule="H504",
        ),
        ("the loss", "7 parameters", "a, b", "second", "put_", "deterministic", "H504"),
    ),
    (
        run.RepetitionDiffered(
            parameters=("a",),
            parameter_count=1,
            loss_differs=False,
            third_agrees_with="first",
            operations=("put_",),
            deterministic=False,
            rule="H504",
            count=1024,
            repeated=2000,
        ),
        ("1,024 of 2,000", "H504"),
    ),
    (run.StopSignal(signal="SIGINT"), ("SIGINT", "next boundary")),
    (run.StepNotRepeated(why="no memory"), ("no memory",)),
    (
        run.Spike(loss=12.34567, grad_norm=98765.4, usual_norm=1.5, level="HARD"),
        ("12.35", "98,765", "1.5"),
    ),
    (run.NormOverflowed(total=1e39), ("1e+39", "float64")),
    (run.LossScaleLowered(loss_scale=1024.0, reason=REASON), ("1024", REASON)),
    (run.LossScaleCollapsed(loss_scale=0.5, reason=REASON), ("0.5", REASON)),
    (run.RolledBack(from_step=50, to_step=40), ("50", "40")),
    (run.RollbackFailed(error=ERROR), (ERROR,)),
    (run.SnapshotFailed(error=ERROR), (ERROR,)),
    (run.SnapshotsDoNotFit(), ("host memory",)),
    # why it does not learn
    (
        run.FindingReported(
            rule="H858",
            severity="advice",
            what="weight decay has shrunk the weights to 8 % of their initial size",
            fix="lower weight_decay.",
            about="cause",
            where="encoder",
        ),
        ("8 % of their initial size (encoder, H858)", "Fix: lower weight_decay."),
    ),
    (
        run.NoteReported(rule="H801", severity="note", what="two layers are frozen", fix=""),
        ("two layers are frozen (H801)",),
    ),
    (run.DiagnosisLimited(why="the model is compiled"), ("the model is compiled",)),
    (
        run.Aligned(
            diagonality=0.91,
            sharpness=0.82,
            entropy=0.13,
            monotonic_share=0.97,
            share_at_max_decoder=0.0,
            utterances=16,
        ),
        ("0.91", "0.82", "0.13", "97 %", "16 utterances"),
    ),
    # the loader
    (
        run.LoaderHealed(
            cause="worker 1 was killed",
            remedy="new workers",
            sample=77,
            workers_before=4,
            workers=2,
            seconds=1.25,
        ),
        ("worker 1 was killed", "new workers", "77", "2 workers instead of 4", "1.2 s"),
    ),
    (
        run.SampleQuarantined(
            why="raised", sample=77, evidence="ValueError: x", quarantined=3, not_written=ERROR
        ),
        ("77", "raised", "ValueError: x", "3 samples", ERROR),
    ),
    (run.QuarantineFull(error="10 samples"), ("10 samples",)),
    (run.DescriptorLimitRaised(why="none left", before=1024, now=65536), ("1,024", "65,536")),
    (run.StreamReadOver(why="no state_dict", items=300), ("300 items", "no state_dict")),
    (run.RanksNotDivided(why="sharded is off"), ("sharded is off",)),
    (run.NothingLeft(why="the position is the end", epoch=3), ("epoch 3", "the position")),
    (run.EpochSetBack(why="set_epoch", before=5, now=4), ("5", "4", "set_epoch")),
    (
        run.Preflight(rule="H630", what="16 workers on 2 CPUs", limit="too many", fix="use 2."),
        ("16 workers on 2 CPUs", "too many", "H630", "Fix: use 2."),
    ),
    # frameworks
    (run.OwnSteps(why="manual optimization"), ("manual optimization",)),
    (run.StepsRepeated(steps=37, largest_difference=0.0), ("37 steps", "identical")),
    (run.ResumeNotProven(steps=0), ("not proven", "no recorded step")),
    (run.ResumeNotProven(steps=2), ("not proven", "2 steps")),
    (run.VariablesChanged(names=("elapsed", "folder")), ("elapsed and folder",)),
    (run.StepsRepeated(steps=1, largest_difference=1e-7), ("1 step ", "1.0e-07")),
    (
        run.RepeatedStepDiffers(
            loss=0.5, grad_norm=1.0, earlier_loss=0.25, earlier_grad_norm=1.0, equal_steps=2
        ),
        ("loss 0.5 instead of 0.25", "after 2 equal steps"),
    ),
    (run.StepsNotSeen(), ("torch.compile", "neither counted nor saved")),
    (run.LoopSteps(optimizer="generator"), ("'generator'", "counted and saved")),
    (
        run.NonfiniteStepTaken(optimizer="generator", loss=None, grad_norm=float("nan")),
        ("'generator'", "gradient norm nan", "guard.step"),
    ),
    (run.OwnFitBatch(why="it is not guarded"), ("it is not guarded",)),
    (run.ItemsIgnored(why="its loss is a mean", model="Mine"), ("Mine", "its loss is a mean")),
    # the supervisor
    (
        process.AttemptStarted(attempt=0, argv=("python", "train.py")),
        ("attempt 0", "python train.py"),
    ),
    (
        process.AttemptEnded(
            attempt=1,
            status=-9,
            oom_kills=1,
            seconds=3725.0,
            steps=1200,
            signal_sent_by_us=15,
            asked_by=2,
        ),
        ("attempt 1", "1 h 2 min", "1,200 steps", "SIGKILL", "kernel", "SIGTERM", "SIGINT"),
    ),
    (process.ProcessEnded(pid=4711, status=3, oom_kills=None), ("4711", "exit code 3")),
    (
        process.Restart(
            attempt=2, cause="H901", why="worth a try", delay_seconds=5.0, changes={"NCCL": "1"}
        ),
        ("attempt 2", "H901", "worth a try", "5.0 s", "NCCL='1'"),
    ),
    (process.Stopped(why="all restarts are used"), ("all restarts are used",)),
    (process.Signal(number=15), ("SIGTERM",)),
    (
        process.MessageNotSent(message="end", receiver="https://host/***", error="HTTP 404"),
        ("end", "https://host/***", "HTTP 404"),
    ),
    (process.Requeued(job="4711"), ("4711",)),
    (process.Requeued(job="4711_3", refusal="Access denied"), ("4711_3", "Access denied")),
    (
        process.VerdictReached(attempt=1, verdict={"cause": "H901", "title": "out of memory"}),
        ("attempt 1", "H901", "out of memory"),
    ),
    (process.NotWritten(file="verdict.json", error=ERROR), ("verdict.json", ERROR)),
    (process.OutputLost(error=ERROR), (ERROR,)),
    (process.Leftovers(pids=(4711, 4712)), ("4711 and 4712",)),
    (process.NotKillable(pids=(4711,)), ("process 4711 ",)),
    (process.EndedElsewhere(why="node2 failed"), ("node2 failed",)),
    # the watchdog
    (process.HangSuspected(**HANG), ("4711", "rank 1", "backward", "2 min 5 s", "2 min")),
    (
        process.Hang(
            **HANG,
            hang_kind="collective",
            signature="H1403",
            certainty="likely",
            blamed_pid=4712,
            blamed_role="trainer",
            frame="train.py:12 in step",
            odd_one_out=0,
            sentence="rank 0 waits in its loader",
            remedy="restart",
        ),
        ("rank 0 waits in its loader", "H1403"),
    ),
    (
        process.HangOver(pid=4711, phase="saving", step=30, why="it has moved"),
        ("4711", "saving", "it has moved"),
    ),
    (process.Stacks(pid=4711, files=("stacks/a.txt",), seconds=0.5), ("4711", "stacks/a.txt")),
    (
        process.ProcessStopped(pid=4711, rank=None, step=3, phase="forward"),
        ("process 4711 was", "forward"),
    ),
    (process.ProcessContinued(pid=4711, step=3, seconds=90.0), ("4711", "1 min 30 s")),
    (process.WatchdogSuspended(seconds=7200.0), ("2 h",)),
    (process.WatchingFailed(what="watchdog", error=ERROR), ("watchdog", ERROR)),
    (
        process.MemoryTrend(
            pid=4711,
            what="host",
            bytes_per_step=MIB - 300,
            minutes_left=90.0,
            between=(1, 2),
            grown_bytes=300 * MIB,
            steps=300,
            signature="H1509",
        ),
        ("host", "4711", "1 MiB per step", "300 MiB in 300 steps", "1 h 30 min", "H1509"),
    ),
    (process.MemoryTrend(pid=4711, what="device", bytes_per_step=0), ("device", "4711")),
    (
        process.ResourcesUsed(
            attempt=0,
            seconds=64.0,
            cpus=8.0,
            cpus_wanted=2.5,
            workers=2.0,
            worker_busy=0.97,
            bytes_read=3 * MIB,
        ),
        ("1 min 4 s", "2.5 of 8 CPUs", "3 MiB", "2 loader workers", "97 %"),
    ),
    (
        process.StacksSampled(
            attempt=0, pid=4711, samples=20, in_python=17, place="train.py:7 in crop", at_place=9
        ),
        ("17 of 20", "4711", "9", "train.py:7 in crop"),
    ),
    # the observer
    (process.GuardOpened(path="/runs/a"), ("/runs/a",)),
    (process.TorchImported(version="2.13.0"), ("2.13.0",)),
    (process.EnvironmentsImported(package="gymnasium"), ("gymnasium",)),
    (
        process.ExceptionRaised(
            type="ValueError", message="bad", frames=[], chain=[], thread="loader", fatal=False
        ),
        ("ValueError: bad", "loader"),
    ),
    (
        process.ExceptionRaised(
            type="KeyError", message="", frames=[], chain=[], thread="main", fatal=True
        ),
        ("the process ended by KeyError",),
    ),
    (process.Exiting(how="sys.exit", status=2, said="usage"), ("sys.exit", "2", "usage")),
    (process.StepsNotRecorded(error=ERROR), (ERROR,)),
    (process.ScalarsNotRecorded(error=ERROR), (ERROR,)),
    (process.RepeatedRowsDropped(run_id="0123abcd"), ("0123abcd",)),
    (
        process.Leak(
            form="list",
            what="float32[64, 10]",
            count_per_step=1.0,
            bytes_per_step=2560,
            device="cpu",
            held_by="trainer.losses",
            retained_at="train.py:12",
            signature="H1501",
        ),
        ("2.5 KiB per step", "float32[64, 10]", "cpu", "trainer.losses", "train.py:12", "H1501"),
    ),
    (
        process.LeakTrace(found=1, steps=20, request=1, seconds=0.2, why="no memory left"),
        ("20 steps", "1 leak ", "0.2 s", "no memory left"),
    ),
]


def recorded(data: EventData) -> Event:
    """Return the event as a reader gets it: its facts went through JSON."""
    facts = json.loads(json.dumps(data.facts()))
    return Event(kind=data.kind, global_step=12, unix_seconds=1.5, data=facts)


def test_every_kind_has_an_example() -> None:
    """Every kind of event has an example here."""
    assert {data.kind for data, _ in EXAMPLES} == set(event_kinds())


@pytest.mark.parametrize(
    ("data", "fragments"), EXAMPLES, ids=[type(data).__name__ for data, _ in EXAMPLES]
)
def test_a_recorded_event_reads_as_a_sentence(data: EventData, fragments: tuple[str, ...]) -> None:
    """A recorded event reads as a sentence that holds the values that matter."""
    text = str(recorded(data))

    assert text.startswith("step 12: ")
    for fragment in fragments:
        assert fragment in text
    # No dump of fields and no repr of a container, a missing value or an unrounded float.
    assert text != f"step 12: {key_value_text(data.kind, data.facts())}"
    assert not [name for name in data.facts() if f"{name}=" in text]
    assert not re.search(r"[\[(]'|None|\d\.\d{5}|\n", text)


def test_the_text_of_data_is_the_sentence_of_its_event() -> None:
    """The text of an event's data is the sentence of the recorded event."""
    for data, _ in EXAMPLES:
        assert " ".join(str(data).split()) == recorded(data).sentence()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"checkpoint": "step-4", "size_bytes": "many", "seconds": 1.0, "stall_seconds": 1.0},
        {"checkpoint": "step-4", "size_bytes": None, "seconds": [], "stall_seconds": {}},
    ],
)
def test_damaged_facts_are_shown_as_they_are(data) -> None:
    """Damaged facts are shown as they are, never as an error."""
    event = Event(kind="checkpoint_saved", global_step=4, unix_seconds=1.0, data=data)
    assert event.sentence().startswith("checkpoint_saved")
    assert all(key in event.sentence() for key, value in data.items() if value is not None)


def test_a_fact_of_a_newer_version_does_not_hide_the_sentence() -> None:
    """A field that this version does not know leaves the sentence as it is."""
    facts = {"from_step": 50, "to_step": 40, "new": 1}
    event = Event(kind="rolled_back", global_step=40, unix_seconds=1.0, data=facts)
    assert event.sentence() == str(run.RolledBack(from_step=50, to_step=40))

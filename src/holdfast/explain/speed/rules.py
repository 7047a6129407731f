"""Judge what makes a run slow, from what its training loop spent its time on.

Every rule looks for one cause. Causes that took a larger share of the time come first. If no rule
finds a problem, a plain statement says what the steps spent their time on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from holdfast.core.text import counted, duration, percent, size
from holdfast.explain.signatures import ids
from holdfast.explain.speed.time_use import RankTimes, Resources, SlowRank, TimeUse
from holdfast.explain.speed_finding import Cause, SpeedFinding
from holdfast.recorder.progress import LoopTimes

# A loop is judged only if it is at least this long. A run of a few seconds is not worth the effort.
_MIN_STEPS = 10
_MIN_LOOP_SECONDS = 2.0
# A cause is a problem if it takes at least a quarter of the time: without it, the run would be a
# third faster. It must also have taken some seconds.
_MIN_SHARE = 0.25
_MIN_SECONDS = 2.0
# The share is estimated from a few dozen stack samples, so it must be clearer than other shares.
_MIN_HOST_SHARE = 0.4
_MIN_SAMPLES = 8
# The same share from which a Guard's event or the ranks' boards name a slow rank.
_MIN_RANK_SHARE = 0.2
# Rare evaluations and saves are not a habit, and a single one may be the first, which is slower.
_MIN_EVALUATIONS = 2
_MIN_SAVES = 2
# If a module is switched to eval mode in almost every step, it is a part of the step, such as a
# frozen teacher.
_MAX_EVALUATIONS_PER_STEP = 0.5
# The share of time to aim for when saving or evaluating less often.
_AIMED_SHARE = 0.05
# A worker that is busy for less of the time than this mostly waits, for a disk or a network. A
# worker that decodes is always busy, because the loop is always waiting for it.
_MAX_BUSY_SHARE_OF_WAITING_WORKER = 0.4
# Another worker would find no free CPU if training could keep this share of them busy.
_FULL_SHARE = 0.85
# With fewer CPUs than this, a worker would take its CPU time from the training process.
_CPUS_FOR_A_WORKER = 1.5
# The least number of observations of a waiting trainer from which to tell computing from sleeping.
_MIN_WAITS_SEEN = 8
_MIN_RUNNING_SHARE = 0.5
# A training process that keeps less than this share of a CPU busy mostly sleeps.
_IDLE_CPUS = 0.4
# Workers that wait for a disk need no CPU, but each takes memory.
_MAX_WORKERS = 32


def find_causes(use: TimeUse) -> tuple[SpeedFinding, ...]:
    """Return the problems of a run, with the largest share first, or a plain statement.

    The result is empty if nothing was recorded, or if the loop was too short to be judged.
    """
    if use.first is None:
        finding = _finding_of_slow_rank(use.slow_rank)
        return () if finding is None else (finding,)
    if use.first.steps < _MIN_STEPS or use.first.seconds < _MIN_LOOP_SECONDS:
        return ()
    candidates = (rule(use) for rule in RULES)
    problems = [finding for finding in candidates if finding is not None]
    problems.sort(key=lambda finding: finding.share, reverse=True)
    return tuple(problems) or (_statement(use),)


# --- data -----------------------------------------------------------------------------------------


def waits_for_data(use: TimeUse) -> SpeedFinding | None:
    """Report steps that waited for batches, and find out why the batches came late."""
    share = use.share_of("wait_seconds")
    if not _is_problem(use, share):
        return None
    cause, evidence = _cause_of_wait(use)
    return SpeedFinding(
        rule=ids.WAITED_FOR_LOADER,
        cause=cause,
        share=share,
        title=f"its steps spent {percent(share)} of their time waiting for the loader",
        evidence=f"{_time_of(use, share)}{evidence}",
        fix=_fix_of_wait(use, cause, share),
    )


def _cause_of_wait(use: TimeUse) -> tuple[Cause, str]:
    """Return why the batches came late, and the numbers that show it, as a clause."""
    assert use.first is not None
    resources = use.resources
    if resources is None:
        return "waits for data", ""
    if resources.workers < 0.5:
        return _cause_in_training_process(resources)
    restarts = use.share_of("restart_seconds")
    if use.first.epochs > 2 and restarts > 0.5 * use.share_of("wait_seconds"):
        return "workers restart", (
            f"; {percent(restarts / use.share_of('wait_seconds'))} of it until the first batch of"
            f" {use.first.epochs:,} epochs"
        )
    if resources.worker_busy is None:
        return "waits for data", ""
    evidence = (
        f"; {counted(round(resources.workers), 'worker')} per process, busy"
        f" {percent(resources.worker_busy)} of the time, and {resources.cpus_wanted:g} of"
        f" {resources.cpus:g} CPUs busy with the run"
    )
    if resources.worker_busy < _MAX_BUSY_SHARE_OF_WAITING_WORKER:
        return "disk or network", f"{evidence}{_read_rate(resources)}"
    if resources.cpus_wanted >= _FULL_SHARE * resources.cpus:
        return "decoding", evidence
    return "too few workers", evidence


def _cause_in_training_process(resources: Resources) -> tuple[Cause, str]:
    """Return why a process that loads its own batches waits: it computes, or it sleeps."""
    if resources.cpus < _CPUS_FOR_A_WORKER:
        return "decoding", "; it loads its batches itself, on its only CPU"
    if resources.waits_seen < _MIN_WAITS_SEEN:
        return "too few workers", "; it loads its batches itself (num_workers=0)"
    running = resources.waits_running / resources.waits_seen
    evidence = (
        f"; it loads its batches itself (num_workers=0), and it was computing in {percent(running)}"
        f" of {resources.waits_seen:,} samples taken during a wait"
    )
    if running < _MIN_RUNNING_SHARE:
        return "disk or network", f"{evidence}{_read_rate(resources)}"
    return "too few workers", evidence


def _read_rate(resources: Resources) -> str:
    if not resources.bytes_read or not resources.seconds:
        return ""
    return f", and {size(resources.bytes_read / resources.seconds)}/s were read"


def _fix_of_wait(use: TimeUse, cause: Cause, share: float) -> str:
    """Return how to shorten the waits for data."""
    if cause == "workers restart":
        return (
            "Keep the workers from epoch to epoch: pass persistent_workers=True to the DataLoader."
        )
    workers = _workers_needed(use, share)
    resources = use.resources
    if cause == "decoding":
        return (
            "The CPUs are fully used, so more workers would not help. Decode once instead of in"
            " every epoch (store prepared samples), use a faster decoder or smaller inputs, or move"
            " augmentation to the GPU."
        )
    if cause == "disk or network":
        return (
            "The loader mostly sleeps, so it waits for storage. Copy the data to a local disk or"
            " into memory, read fewer and larger files, and read more of them at once:"
            f" num_workers={workers} (workers that wait need no CPU) and prefetch_factor=4."
        )
    if cause == "too few workers":
        fix = f"Pass num_workers={workers} to the DataLoader, with persistent_workers=True."
        if resources is not None and workers > resources.cpus:
            # Workers that compute need a CPU each.
            workers = max(1, math.floor(resources.cpus))
            fix = (
                f"Pass num_workers={workers} to the DataLoader, with persistent_workers=True: one"
                f" for each of the {resources.cpus:g} CPUs. They will not be enough, so also do"
                " less work per sample:"
            )
            return f"{fix} decode once and store the prepared samples."
        return f"{fix} If that is not enough, decode once and store the prepared samples."
    return (
        "Load with more workers (`num_workers=`), keep them from epoch to epoch"
        " (`persistent_workers=True`), and store prepared samples instead of decoding in training."
    )


def _workers_needed(use: TimeUse, share: float) -> int:
    """Return how many workers would load as fast as the rest of the loop trains.

    W workers keep up with a fraction 1 - share of the loop's full speed, so W / (1 - share) workers
    keep up with all of it. Without workers, loading takes share / (1 - share) as long as training.
    """
    training = max(1.0 - share, 0.05)
    resources = use.resources
    workers = 0.0 if resources is None else resources.workers
    needed = share / training
    if workers >= 0.5:
        needed = workers / training
    count = max(math.ceil(needed), math.floor(workers) + 1)
    return min(count, _MAX_WORKERS)


# --- the loop itself ------------------------------------------------------------------------------


def host_bound(use: TimeUse) -> SpeedFinding | None:
    """Report a loop in which Python code of its own takes much of the time."""
    if use.first is None or use.stacks is None or use.stacks.samples < _MIN_SAMPLES:
        return None
    in_python = use.stacks.in_python / use.stacks.samples
    # The clock is exact, and the samples are not, so the clock limits the estimate. If only some
    # ranks run much code of their own, they are slow ranks.
    share = min(in_python, *(rank.loop.own_share for rank in use.ranks))
    if share < _MIN_HOST_SHARE or not _is_problem(use, share):
        return None
    where = ""
    if use.stacks.place:
        where = f", {use.stacks.at_place} of them at {use.stacks.place}"
    look_first = f" Look first at {use.stacks.place}." if use.stacks.place else ""
    return SpeedFinding(
        rule=ids.HOST_BOUND,
        cause="host-bound",
        share=share,
        title=f"about {percent(share)} of its time was spent in Python code of the training loop",
        evidence=(
            f"{use.stacks.in_python} of {counted(use.stacks.samples, 'stack sample')} were in"
            f" Python code outside of loader, backward and optimizer{where}"
        ),
        fix=(
            f"The device waits while Python runs.{look_first} Replace loops over samples with"
            " tensor operations, move preprocessing into the DataLoader's workers, and compute"
            " metrics and log only every few steps. If the time goes into many small operations,"
            " use `torch.compile` or a larger batch."
        ),
    )


def slow_rank(use: TimeUse) -> SpeedFinding | None:
    """Report a rank that the others waited for, from the ranks' own times or from a Guard."""
    return _finding_of_slow_rank(_slow_rank_of(use.ranks) or use.slow_rank)


def _finding_of_slow_rank(slow: SlowRank | None) -> SpeedFinding | None:
    if slow is None or slow.share < _MIN_RANK_SHARE:
        return None
    return SpeedFinding(
        rule=ids.SLOW_RANK,
        cause="slow rank",
        share=slow.share,
        title=f"the other ranks spent {percent(slow.share)} of their time waiting for rank"
        f" {slow.rank}",
        evidence=(
            f"rank {slow.rank} took {duration(slow.seconds)} per step {slow.where}, the other ranks"
            f" {duration(slow.others_seconds)}"
        ),
        fix=(
            f"Find out what only rank {slow.rank} does or has: its own logging or metrics, longer"
            " samples, fewer CPUs or loader workers, a slower or throttled GPU, or another job on"
            " its machine. Give all ranks batches of the same size and length."
        ),
    )


def _slow_rank_of(ranks: tuple[RankTimes, ...]) -> SlowRank | None:
    """Return the rank that was busy longest before its backward pass, or None.

    The ranks wait for each other in backward, so the time outside of it is their own. Saving and
    evaluation are left out, because usually only rank 0 does them. A rank that is slow in its
    backward pass itself is not found.
    """
    if len(ranks) < 2:
        return None
    own = {rank.rank: _own_seconds_per_step(rank) for rank in ranks}
    slowest = max(ranks, key=lambda rank: own[rank.rank])
    others = [rank for rank in ranks if rank is not slowest]
    others_seconds = statistics.median(own[rank.rank] for rank in others)
    lead = own[slowest.rank] - others_seconds
    loop = slowest.loop
    others_wait = statistics.median(rank.loop.wait_seconds / rank.loop.steps for rank in others)
    where = "before its backward pass"
    if 2 * (loop.wait_seconds / loop.steps - others_wait) > lead:
        where = "before its backward pass, mostly waiting for its loader"
    return SlowRank(
        rank=slowest.rank,
        where=where,
        seconds=own[slowest.rank],
        others_seconds=others_seconds,
        share=min(max(lead * loop.steps / loop.seconds, 0.0), 1.0),
    )


def _own_seconds_per_step(rank: RankTimes) -> float:
    loop = rank.loop
    shared = (
        loop.backward_seconds
        + loop.optimizer_seconds
        + loop.saving_seconds
        + loop.evaluation_seconds
    )
    return (loop.seconds - shared) / loop.steps


# --- interruptions --------------------------------------------------------------------------------


def saves_too_often(use: TimeUse) -> SpeedFinding | None:
    """Report checkpoints that keep training waiting."""
    share = _share_of_first(use, "saving_seconds")
    if use.first is None or use.first.saves < _MIN_SAVES or not _is_problem(use, share):
        return None
    loop = use.first
    return SpeedFinding(
        rule=ids.SAVED_TOO_OFTEN,
        cause="saving",
        share=share,
        title=f"{percent(share)} of its time was spent saving",
        evidence=(
            f"{_time_of(use, share)}, in {counted(loop.saves, 'save')} of"
            f" {duration(loop.saving_seconds / loop.saves)} each, one every"
            f" {loop.steps / loop.saves:.3g} steps"
        ),
        fix=(
            f"Save {_times_less(share)} times less often, which would take about"
            f" {percent(_AIMED_SHARE)} of the time; save to a faster disk; or use a Guard,"
            " which saves in the background."
        ),
    )


def evaluates_too_often(use: TimeUse) -> SpeedFinding | None:
    """Report evaluations that take much of the time."""
    share = _share_of_first(use, "evaluation_seconds")
    if use.first is None or not _is_problem(use, share):
        return None
    loop = use.first
    if loop.evaluations < _MIN_EVALUATIONS or _evaluates_in_steps(loop):
        return None
    return SpeedFinding(
        rule=ids.EVALUATED_TOO_OFTEN,
        cause="evaluation",
        share=share,
        title=f"{percent(share)} of its time was spent in evaluation",
        evidence=(
            f"{_time_of(use, share)}, in {counted(loop.evaluations, 'evaluation')} of"
            f" {duration(loop.evaluation_seconds / loop.evaluations)} each, one every"
            f" {loop.steps / loop.evaluations:.3g} steps"
        ),
        fix=(
            f"Evaluate {_times_less(share)} times less often, which would take about"
            f" {percent(_AIMED_SHARE)} of the time, or on a fixed part of the validation set; use"
            " `torch.inference_mode()` and a larger batch for it."
        ),
    )


def _evaluates_in_steps(loop: LoopTimes) -> bool:
    """Return whether what looks like evaluations is a part of the steps."""
    return loop.evaluations > _MAX_EVALUATIONS_PER_STEP * loop.steps


def _share_of_first(use: TimeUse, part: str) -> float:
    """Return the share of the lowest rank, which saves and evaluates for all of them."""
    if use.first is None:
        return 0.0
    share: float = getattr(use.first, part) / use.first.seconds
    return min(max(share, 0.0), 1.0)


def _times_less(share: float) -> int:
    """Return how many times less often to do something so that it takes about `_AIMED_SHARE`."""
    rest = max(1.0 - share, 0.01)
    return max(2, math.ceil(share / rest / _AIMED_SHARE))


# --- no problem -----------------------------------------------------------------------------------


def _statement(use: TimeUse) -> SpeedFinding:
    """Return a plain statement about where the time of a run without problems went."""
    loop = use.first
    assert loop is not None
    evaluated = loop.evaluation_seconds / loop.seconds
    if _evaluates_in_steps(loop):
        evaluated = 0.0
    paused = (loop.wait_seconds + loop.saving_seconds) / loop.seconds + evaluated
    share = min(max(1.0 - paused, 0.0), 1.0)
    computed = (loop.backward_seconds + loop.optimizer_seconds) / loop.seconds
    evidence = (
        f"backward and optimizer took {percent(computed)}, waiting for data"
        f" {percent(loop.wait_seconds / loop.seconds)}, evaluation {percent(evaluated)}, saving"
        f" {percent(loop.saving_seconds / loop.seconds)} of {duration(loop.seconds)} in"
        f" {counted(loop.steps, 'step')}"
    )
    if computed < loop.own_share:
        # A forward pass usually takes less time than backward. A longer one looks the same as
        # operations on tensors in the loop itself.
        fix = "Profile a few steps with `torch.profiler` to see which operations take the time."
        if use.stacks is None:
            fix = "Install the extra `stacks`, so that holdfast can tell which of the two it was."
        return SpeedFinding(
            rule="",
            cause="not known",
            share=loop.own_share,
            title=f"{percent(loop.own_share)} of its time was spent in the forward pass or in the"
            " loop's own code",
            evidence=evidence,
            fix=fix,
            is_problem=False,
        )
    if _mostly_sleeps(use):
        return SpeedFinding(
            rule="",
            cause="not known",
            share=share,
            title="its steps mostly waited for something other than data",
            evidence=evidence,
            fix=(
                "The run used little CPU time and no GPU. Look for sleeps, locks, network calls"
                " and hooks: `holdfast attach PID` shows what a process is doing."
            ),
            is_problem=False,
        )
    fix = "To go faster, use `torch.compile`, mixed precision, a larger batch or a faster device."
    if loop.uses_device:
        fix += (
            " If `nvidia-smi` shows the GPU less than 90 % busy, the host cannot keep up with it."
        )
    return SpeedFinding(
        rule="",
        cause="device-bound",
        share=share,
        title=f"{percent(share)} of its time was spent computing its steps",
        evidence=evidence,
        fix=fix,
        is_problem=False,
    )


def _mostly_sleeps(use: TimeUse) -> bool:
    """Return whether training processes without a GPU were idle for most of the time."""
    if use.first is None or use.first.uses_device or use.resources is None:
        return False
    return use.resources.cpus_wanted < _IDLE_CPUS * len(use.ranks)


def _is_problem(use: TimeUse, share: float) -> bool:
    """Return whether a share of the time is large enough to be a problem."""
    return (
        use.first is not None and share >= _MIN_SHARE and share * use.first.seconds >= _MIN_SECONDS
    )


def _time_of(use: TimeUse, share: float) -> str:
    assert use.first is not None
    loop = use.first
    return (
        f"{duration(share * loop.seconds)} of {duration(loop.seconds)} in"
        f" {counted(loop.steps, 'step')}"
    )


# The order does not matter, because the findings are sorted by their shares.
RULES: tuple[Callable[[TimeUse], SpeedFinding | None], ...] = (
    waits_for_data,
    host_bound,
    slow_rank,
    saves_too_often,
    evaluates_too_often,
)

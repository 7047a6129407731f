"""Determine what a run was doing when the user interrupted it.

People press Ctrl-C because something is wrong: the loss is NaN, or the run makes no progress. The
traceback of the KeyboardInterrupt shows what the main thread was waiting for, if anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum

from holdfast.explain.causes.candidate import CandidateCause
from holdfast.explain.evidence import Divergence, Evidence, Frame
from holdfast.explain.hangs.frames import CHILD_PROCESS, CONNECTION, NETWORK, QUEUE, THREADS
from holdfast.explain.signatures import all_signatures, ids
from holdfast.explain.signatures.signature import Signature

# Functions of a loader worker, which Ctrl-C interrupts too, and which normally waits for work.
_WORKER_FUNCTIONS = frozenset({"_worker_loop", "_pin_memory_loop"})
# Launchers wait for the processes that they started.
_LAUNCHER = re.compile(
    r"/torch/distributed/(?:run|launch)\.py$|/torch/distributed/(?:elastic|launcher)/"
    r"|/torch/multiprocessing/spawn\.py$|/accelerate/commands/|/deepspeed/launcher/"
)
_TORCH_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")
# The functions in which a torch loader waits for its workers, in all versions of torch.
_LOADER_WAITS = frozenset({"_try_get_data", "_get_data", "_get_batch"})
_HOLDFAST_LOADER = re.compile(r"/holdfast/loader/")
_OTHER_RANKS = re.compile(
    r"/torch/distributed/(?!elastic/|launcher/)|/deepspeed/comm/|/horovod/|/mpi4py/"
)
_FILE_BATON = re.compile(r"/torch/utils/file_baton\.py$")
_SLEEP = re.compile(r"\b(?:time\.)?sleep\(")
# Functions of the standard library and of network clients that wait.
_WAITING_FUNCTION = re.compile(
    r"(?:^|_)(?:wait|get|put|join|acquire|recv|recv_bytes|recv_into|readinto|read|poll|select"
    r"|result|wait_for_tstate_lock|connect|do_handshake)$"
)


class _Activity(Enum):
    """What the main thread was doing, in the order of precedence among several ranks."""

    # It computed, or nothing is known about it.
    NOT_WAITING = 0
    WAITING_FOR_LOADER = 1
    WAITING_FOR_SOMETHING_ELSE = 2
    # The other ranks may be waiting for a rank that waits for its loader.
    WAITING_FOR_RANKS = 3


_SIGNATURE_BY_ACTIVITY = {
    _Activity.WAITING_FOR_LOADER: ids.INTERRUPTED_LOADER,
    _Activity.WAITING_FOR_SOMETHING_ELSE: ids.INTERRUPTED_WAIT,
    _Activity.WAITING_FOR_RANKS: ids.INTERRUPTED_RANKS,
}


def interrupted_state(
    evidence: Evidence, candidates: Iterable[CandidateCause], *, from_statement: bool
) -> Signature | None:
    """Return the signature that says in which state a run was interrupted.

    Args:
        evidence: The evidence about a run that was interrupted by the user.
        candidates: The candidates of the case.
        from_statement: Whether a traceback shows the interruption. If a supervisor has recorded it
            instead, the supervisor has also judged whether the run hung.

    Returns:
        The signature, or None for a plain interruption.
    """
    divergence = evidence.divergence or evidence.nan_at_end
    if divergence is not None and divergence.exploded:
        signature = all_signatures()[ids.INTERRUPTED_AFTER_DIVERGENCE]
        return replace(signature, title=_title_of_divergence(divergence))
    if not from_statement:
        return None
    activities = [
        _find_activity(candidate.statement.frames)
        for candidate in candidates
        if candidate.signature.id == ids.INTERRUPTED and _is_main_thread(candidate.statement.frames)
    ]
    # A rank that computes is probably the one for which the others wait.
    if not activities or _Activity.NOT_WAITING in activities:
        return None
    decisive = min(activities, key=lambda activity: activity.value)
    return all_signatures()[_SIGNATURE_BY_ACTIVITY[decisive]]


def _title_of_divergence(divergence: Divergence) -> str:
    if divergence.rose is not None:
        return "interrupted by the user after the loss had exploded"
    if divergence.quantity == "gradients":
        return "interrupted by the user while the gradients were NaN or infinite"
    return all_signatures()[ids.INTERRUPTED_AFTER_DIVERGENCE].title


def _is_main_thread(frames: Sequence[Frame]) -> bool:
    """Return whether a stack belongs to the training loop, not to a worker or a launcher."""
    if not frames or any(frame.function in _WORKER_FUNCTIONS for frame in frames):
        return False
    if any(_LAUNCHER.search(frame.file) for frame in frames):
        return False
    # A script that waits for the processes that it started is a launcher too.
    return not CHILD_PROCESS.search(frames[-1].file)


def _find_activity(frames: Sequence[Frame]) -> _Activity:
    """Return what a thread was doing, according to its stack."""
    innermost = frames[-1]
    if any(
        _TORCH_LOADER.search(frame.file) and frame.function in _LOADER_WAITS for frame in frames
    ):
        return _Activity.WAITING_FOR_LOADER
    waits = _waits_in_a_library(innermost)
    if waits and any(_HOLDFAST_LOADER.search(frame.file) for frame in frames):
        return _Activity.WAITING_FOR_LOADER
    if _OTHER_RANKS.search(innermost.file):
        return _Activity.WAITING_FOR_RANKS
    sleeps = _SLEEP.search(innermost.code) is not None
    if waits or sleeps or _FILE_BATON.search(innermost.file):
        return _Activity.WAITING_FOR_SOMETHING_ELSE
    return _Activity.NOT_WAITING


def _waits_in_a_library(frame: Frame) -> bool:
    """Return whether a frame waits for a lock, a queue, a pipe or a connection."""
    if not _WAITING_FUNCTION.search(frame.function):
        return False
    return any(pattern.search(frame.file) for pattern in (THREADS, QUEUE, CONNECTION, NETWORK))

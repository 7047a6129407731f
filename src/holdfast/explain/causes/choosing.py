"""Choose the cause of a failure with an ordered list of rules.

A rule is a function that takes a `Case` and returns a `Choice`, or None if the rule does not apply.
The first rule that applies wins. Rules that rely on the most certain evidence come first.

`good_ends` finds problems in a run that ended well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from holdfast.explain.causes.candidate import CandidateCause, Tier
from holdfast.explain.causes.case import Case
from holdfast.explain.causes.ends import AttemptEnd
from holdfast.explain.causes.interruptions import interrupted_state
from holdfast.explain.causes.memory_phases import outside_training
from holdfast.explain.causes.memory_requests import read_request
from holdfast.explain.certainty import Certainty, least_of, lowered
from holdfast.explain.exit_status import SIGNALS_FROM_OUTSIDE
from holdfast.explain.observations import count_kernel_kills, log_shows_full_host_memory
from holdfast.explain.signatures import WELL, all_signatures, ids
from holdfast.explain.signatures.signature import Family, Signature

_ABORTS = frozenset({ids.ABORTED, ids.NATIVE_ABORT})
# Causes that only state how the process ended, not why.
_UNEXPLAINED_ENDS = frozenset({ids.STATUS_ONLY, ids.KILLED, ids.KILLED_UNCOUNTED, ids.TERMINATED})
# Causes that blame the kernel without evidence from its out-of-memory kill counter.
_SUSPECTED_KERNEL_KILLS = frozenset({ids.WORKER_KILLED, ids.KILLED_UNCOUNTED})
# Causes for which the kernel or the scheduler says that it killed a process for its memory.
_LOGGED_KILLS = frozenset({ids.OUT_OF_MEMORY_KILL, ids.MEMORY_LIMIT})
# Families of failures that may lead to a signal that ends the process.
_FAMILIES_EXPLAINING_A_SIGNAL: frozenset[Family] = frozenset(
    {
        "out of memory",
        "host out of memory",
        "hardware",
        "device",
        "preempted",
        "crash",
        "distributed",
        "hang",
    }
)
# A statement in one of these families that contains one of the phrases below may only report that a
# process died, not why.
_FAMILIES_OF_LOST_PROCESSES: frozenset[Family] = frozenset(
    {"loader", "distributed", "unknown", "preempted", "crash", "host out of memory"}
)
_WORDS_OF_LOST_PROCESSES = (
    "killed",
    "exited unexpectedly",
    "exitcode",
    "sigkill",
    "connection",
    "exit code",
)
# What torchrun prints about the rank that failed first, and in its table about a rank that it
# terminated afterwards.
_EXIT_CODE_OF_RANK = re.compile(r"\bfailed \(exitcode: (-?\d+)\) local_rank: ")
_TERMINATED_RANK = re.compile(r"\bSignal 15 \(SIGTERM\) received by PID\b")
# Families of failures that other ranks report after one rank was killed.
_FAMILIES_AFTER_A_KILL: frozenset[Family] = frozenset({"crash", "distributed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen cause and the candidate that it was taken from.

    `candidate` is None if the cause was inferred from how the process ended, not from a statement.
    """

    signature: Signature
    certainty: Certainty
    candidate: CandidateCause | None = None


ChoiceRule: TypeAlias = Callable[[Case], Choice | None]


def choose(case: Case) -> Choice:
    """Return the choice of the first rule that applies, or "unknown" if no rule applies.

    Afterwards, the choice is corrected if a memory leak was traced, if the kernel's counter rules
    out an out-of-memory kill, or if the user interrupted a run that diverged or waited.
    """
    choice = _first_answer(RULES_ON_ALL_EVIDENCE, case)
    if choice is None:
        # Drop candidates that only repeat another candidate with less detail.
        relevant = _drop_terminations_by_torchrun(case)
        relevant = _drop_aborts_after_a_failure(_drop_launcher_tables(relevant))
        choice = _first_answer(RULES_ON_RELEVANT_EVIDENCE, relevant)
    if choice is None:
        choice = Choice(signature=all_signatures()[ids.UNKNOWN], certainty="a guess")
    choice = _without_blaming_the_kernel(case, _prefer_traced_leak(case, choice))
    return _name_interrupted_state(case, _compare_memory(choice))


def _first_answer(rules: Iterable[ChoiceRule], case: Case) -> Choice | None:
    """Return the choice of the first rule that applies, or None if no rule applies."""
    for rule in rules:
        choice = rule(case)
        if choice is not None:
            return choice
    return None


# --- Evidence -------------------------------------------------------------------------------------


def _drop_launcher_tables(case: Case) -> Case:
    """Return the case without the failure tables of launchers, unless there is no other cascade.

    Such a table says only that a rank failed, so a statement printed by a rank is more informative.
    """
    others = tuple(cascade for cascade in case.cascades if cascade.signature.id != ids.LAUNCHER)
    return replace(case, cascades=others or case.cascades)


def _drop_terminations_by_torchrun(case: Case) -> Case:
    """Return the case without the ranks that torchrun terminated after another rank had failed.

    torchrun's table lists these ranks too, each with the SIGTERM that torchrun itself sent.
    """
    failed_first = any(
        (code := _EXIT_CODE_OF_RANK.search(cascade.statement.text)) and code[1] != "-15"
        for cascade in case.cascades
        if cascade.signature.id == ids.LAUNCHER
    )
    if not failed_first:
        return case
    roots = tuple(
        root
        for root in case.roots
        if root.signature.id != ids.TERMINATED or not _TERMINATED_RANK.search(root.statement.text)
    )
    return replace(case, roots=roots)


def _drop_aborts_after_a_failure(case: Case) -> Case:
    """Return the case without aborts if there is also another failure or a collective timeout.

    A failing process often aborts itself. Such an abort says nothing new about the cause.
    """
    timed_out = any(
        cascade.signature.id == ids.COLLECTIVE_TIMEOUT and not cascade.is_caught
        for cascade in case.cascades
    )
    failed = any(root.signature.id not in _ABORTS and not root.is_caught for root in case.roots)
    if not timed_out and not failed:
        return case
    end = case.end
    if end.cause == ids.ABORTED:
        end = replace(end, cause=ids.STATUS_ONLY)
    roots = tuple(root for root in case.roots if root.signature.id not in _ABORTS)
    return replace(case, end=end, roots=roots)


# --- Rules ----------------------------------------------------------------------------------------


def ended_well(case: Case) -> Choice | None:
    """If the attempt ended well, choose this result and ignore all errors that were printed.

    `ends` decides whether an attempt ended well. Its exit code is then usually 0.
    """
    if not case.end.well or case.end.cause is None:
        return None
    if case.end.cause == WELL.id:
        # Do not load the catalog of signatures: loading it takes as long as all other steps of
        # `holdfast explain` together.
        return Choice(signature=WELL, certainty=case.end.certainty)
    return how_it_ended(case)


def result_was_not_saved(case: Case) -> Choice | None:
    """If a Guard recorded that it could not save, choose this failure and ignore other errors."""
    if case.end.cause != ids.NOT_SAVED:
        return None
    return how_it_ended(case)


def ended_without_a_failure(case: Case) -> Choice | None:
    """If there is no exit status, choose the inferred end unless a statement shows a failure.

    Only a failure that is likely to have ended its process counts.
    """
    if case.end.status is not None or case.end.cause is None:
        return None
    for candidate in (*case.roots, *case.cascades):
        if candidate.tier <= Tier.NOT_CONTINUED or candidate.reports_a_kill:
            return None
    return how_it_ended(case)


def hung_or_was_stopped(case: Case) -> Choice | None:
    """Choose a hang or a stop request, unless a process failed before it."""
    began = case.end.stop_requested_at
    if case.end.hang is not None:
        began = case.end.hang.unix_seconds
    if began is None or case.end.cause is None or _failed_before(case.root, began):
        return None
    return how_it_ended(case)


def killed_by_the_kernel_for_memory(case: Case) -> Choice | None:
    """If the kernel counted an out-of-memory kill, choose it unless a statement explains the end.

    A statement does not explain the end if it only reports that a process died, or if the failure
    that it reports may be unrelated to the end.
    """
    if case.end.well or case.end.status is None:
        return None
    if not count_kernel_kills(case.evidence.endings):
        return None
    root = case.root
    if root is not None and root.tier < Tier.LAST_LINE and not _says_process_was_lost(root):
        return None
    return Choice(
        signature=all_signatures()[ids.OUT_OF_MEMORY_KILL],
        certainty="likely",
        candidate=root or case.cascade,
    )


def killed_by_the_kernel_in_the_log(case: Case) -> Choice | None:
    """If the kernel or the scheduler logged an out-of-memory kill, choose it.

    An error before it, such as a CUDA out-of-memory error, was survived.
    """
    for root in case.roots:
        if root.signature.id in _LOGGED_KILLS and root.tier <= Tier.NOT_CONTINUED:
            return Choice(signature=root.signature, certainty=root.certainty, candidate=root)
    return None


def failed_before_the_time_limit(case: Case) -> Choice | None:
    """If an exception ended a process before the scheduler ended the job, choose the exception.

    The other processes of the job have then waited for the one that failed.
    """
    if case.root is None or case.root.signature.id != ids.SCHEDULER:
        return None
    for root in case.roots:
        is_earlier = root.statement.position < case.root.statement.position
        is_failure = root.statement.kind == "exception" and root.tier <= Tier.NOT_CONTINUED
        if is_failure and is_earlier:
            certainty = lowered(root.certainty)
            return Choice(signature=root.signature, certainty=certainty, candidate=root)
    return None


def killed_with_full_host_memory(case: Case) -> Choice | None:
    """If a process was killed and its log shows that host memory was nearly full, blame the kernel.

    The log of DeepSpeed shows this. Its launcher says that it kills all processes, but not always
    that one of them was killed before.
    """
    root = case.root
    if root is not None and root.signature.id != ids.KILLED_UNCOUNTED:
        return None
    was_killed = root is not None or case.end.cause == ids.KILLED
    launcher = next(
        (cascade for cascade in case.cascades if cascade.signature.id == ids.LAUNCHER), None
    )
    if not was_killed and launcher is None:
        return None
    if not log_shows_full_host_memory(case.evidence):
        return None
    return Choice(
        signature=all_signatures()[ids.KILLED_UNCOUNTED],
        certainty="likely",
        candidate=root or launcher,
    )


def failure_in_a_statement(case: Case) -> Choice | None:
    """Choose the most likely root if it explains the end better than the exit status does.

    If another root of the same process describes the same failure in more detail, choose that root
    instead.
    """
    root = case.root
    if root is None:
        return None
    detailed = _detailed_root(root, case.roots)
    chosen = detailed or root
    if not _explains_end(chosen, case.end):
        return None
    rivals = (root,) if detailed is not None else case.roots
    certainty = chosen.certainty
    if _may_have_another_cause(root, case.end, rivals) or _hung_before_its_end(root, case):
        certainty = lowered(certainty)
    return Choice(signature=chosen.signature, certainty=certainty, candidate=chosen)


def consequence_in_a_statement(case: Case) -> Choice | None:
    """If no original failure explains the end, choose a cascade that ended the process."""
    cascade = case.cascade
    if cascade is None or cascade.is_caught:
        return None
    if case.end.cause not in (None, ids.STATUS_ONLY):
        return None
    return Choice(signature=cascade.signature, certainty=cascade.certainty, candidate=cascade)


def signal_that_ended_it(case: Case) -> Choice | None:
    """If no statement explains the end, choose the signal that ended the command.

    A person or a scheduler usually kills the whole command. If a statement says that only one
    process of the command was killed, it is more likely that the kernel sent the signal.
    """
    if case.end.cause in (None, ids.STATUS_ONLY):
        return None
    if case.end.cause == ids.KILLED:
        for candidate in (*case.roots, *case.cascades):
            if _says_process_was_killed(candidate):
                return Choice(
                    signature=all_signatures()[ids.KILLED_UNCOUNTED],
                    certainty=candidate.certainty,
                    candidate=candidate,
                )
    return how_it_ended(case)


def weak_statement(case: Case) -> Choice | None:
    """As a last resort, choose a statement even if it may be unrelated to the process's end."""
    candidate = case.root or case.cascade
    if candidate is None:
        return None
    may_have_ended_it = candidate.statement.fatal is None and not candidate.is_generic
    if case.end.status is None and not may_have_ended_it:
        return None
    return Choice(signature=candidate.signature, certainty="a guess", candidate=candidate)


def how_it_ended(case: Case) -> Choice | None:
    """Choose the cause that the signals, exit codes and counters suggest, if any."""
    if case.end.cause is None:
        return None
    signature = all_signatures()[case.end.cause]
    return Choice(signature=signature, certainty=case.end.certainty)


def training_diverged(case: Case) -> Choice | None:
    """If nothing failed in a log without an exit status, choose a loss that diverged."""
    divergence = case.evidence.divergence
    if divergence is None or not divergence.exploded:
        return None
    cause = ids.TRAINING_DIVERGED
    if divergence.always and divergence.quantity == "loss":
        cause = ids.LOSS_NOT_FINITE
    signature = all_signatures()[cause]
    return Choice(signature=signature, certainty=least_of(["likely", signature.certainty]))


RULES_ON_ALL_EVIDENCE: tuple[ChoiceRule, ...] = (
    ended_well,
    result_was_not_saved,
    ended_without_a_failure,
)
RULES_ON_RELEVANT_EVIDENCE: tuple[ChoiceRule, ...] = (
    hung_or_was_stopped,
    killed_by_the_kernel_for_memory,
    killed_by_the_kernel_in_the_log,
    failed_before_the_time_limit,
    killed_with_full_host_memory,
    failure_in_a_statement,
    consequence_in_a_statement,
    signal_that_ended_it,
    weak_statement,
    how_it_ended,
    training_diverged,
)


# --- Conditions used by the rules -----------------------------------------------------------------


def _failed_before(root: CandidateCause | None, unix_seconds: float) -> bool:
    """Return whether a root ended its process before a given time.

    Args:
        root: The most likely original failure, or None.
        unix_seconds: When a hang was noticed, or when a stop was requested.
    """
    if root is None or root.tier > Tier.NOT_CONTINUED:
        return False
    failed_at = root.statement.unix_seconds
    return failed_at is not None and failed_at < unix_seconds


def _says_process_was_lost(root: CandidateCause) -> bool:
    """Return whether a root only reports that a process died, not why it died."""
    if root.signature.family not in _FAMILIES_OF_LOST_PROCESSES:
        return False
    text = "\n".join(statement.text.lower() for statement in root.chain)
    return any(words in text for words in _WORDS_OF_LOST_PROCESSES)


def _says_process_was_killed(candidate: CandidateCause) -> bool:
    """Return whether a candidate reports that one process of the command was killed."""
    return (
        candidate.signature.id == ids.KILLED_UNCOUNTED
        or "signal SIGKILL" in candidate.statement.text
    )


def _detailed_root(root: CandidateCause, roots: Iterable[CandidateCause]) -> CandidateCause | None:
    """Return another root of the same process that describes the failure in more detail.

    The returned candidate has the tier of `root`. Return None if there is no such root.
    """
    for other in roots:
        if root.signature.id not in other.signature.explains:
            continue
        # The script may have raised the exception again after a logger printed it.
        was_logged = other.statement.logged and other.statement.fatal is None
        same_process = other.statement.rank in (None, root.statement.rank)
        if same_process and (was_logged or not other.is_caught):
            return replace(other, tier=root.tier)
    return None


def _explains_end(root: CandidateCause, end: AttemptEnd) -> bool:
    """Return whether a root explains the end better than the exit status alone does."""
    if root.is_caught or _follows_from_a_kill(root, end):
        return False
    if end.signal is None:
        # An exit code says nothing about the cause, so any failure is a better explanation.
        return True
    if root.tier <= Tier.NOT_CONTINUED:
        # The failure itself ended the process; the signal came later or was sent to another
        # process. A generic failure is too vague to take precedence over a signal from another
        # process.
        return not (root.is_generic and end.signal in SIGNALS_FROM_OUTSIDE)
    if root.signature.id in _UNEXPLAINED_ENDS:
        # A line such as "Killed" only repeats the signal and must not replace a more specific
        # cause.
        return end.cause in _UNEXPLAINED_ENDS
    if root.statement.kind == "exception":
        return True
    return root.signature.family in _FAMILIES_EXPLAINING_A_SIGNAL


def _follows_from_a_kill(root: CandidateCause, end: AttemptEnd) -> bool:
    """Return whether a root is a failure of another rank that followed the kill of one rank."""
    if end.signal not in SIGNALS_FROM_OUTSIDE or end.first_rank is None:
        return False
    is_of_another_rank = root.statement.rank != end.first_rank
    return is_of_another_rank and root.signature.family in _FAMILIES_AFTER_A_KILL


def _may_have_another_cause(
    root: CandidateCause, end: AttemptEnd, rivals: Iterable[CandidateCause]
) -> bool:
    """Return whether a signal from another process or a rival could also have ended the run."""
    explains_a_signal = root.signature.family in _FAMILIES_EXPLAINING_A_SIGNAL
    if end.signal in SIGNALS_FROM_OUTSIDE and not explains_a_signal:
        return True
    return any(_is_rival(rival, root) for rival in rivals)


def _hung_before_its_end(root: CandidateCause, case: Case) -> bool:
    """Return whether a job that the scheduler ended may have hung until then.

    This is the case if a rank had reported before that another rank did not respond.
    """
    if root.signature.id != ids.SCHEDULER:
        return False
    return any(
        cascade.signature.family == "distributed"
        and not cascade.is_caught
        and cascade.statement.position < root.statement.position
        for cascade in case.cascades
    )


def _is_rival(other: CandidateCause, root: CandidateCause) -> bool:
    """Return whether another root could be the cause instead of `root`.

    The other root must be at least as certain (see `Tier`) and have a different family. A generic
    one counts only if it is an exception that also ended a process, and came first.
    """
    if other.tier > root.tier or other.signature.id == root.signature.id:
        return False
    if other.signature.family == root.signature.family:
        return False
    if not other.is_generic:
        return True
    is_earlier = other.statement.position < root.statement.position
    return other.quotes_an_exception and other.tier <= Tier.NOT_CONTINUED and is_earlier


# --- Corrections after a choice -------------------------------------------------------------------


def _prefer_traced_leak(case: Case, choice: Choice) -> Choice:
    """Return the choice, with a traced leak as its cause if memory ran out."""
    if "memory" not in choice.signature.family:
        return choice
    for kind in ("leak", "memory_trend"):
        for event in reversed(case.evidence.events):
            signature_id = event.data.get("signature")
            if event.kind != kind or not isinstance(signature_id, str):
                continue
            leak = all_signatures().get(signature_id)
            # A leak of host memory cannot explain why device memory ran out, and vice versa.
            if leak is not None and leak.family == choice.signature.family:
                # The leak was measured, but something else may have used up the memory.
                return replace(choice, signature=leak, certainty="likely")
    return choice


def _without_blaming_the_kernel(case: Case, choice: Choice) -> Choice:
    """Return the choice, with "killed" as its cause if the kernel was wrongly suspected.

    This is the case if the kernel's out-of-memory kill counter shows no kill.
    """
    is_suspected = choice.signature.id in _SUSPECTED_KERNEL_KILLS
    if is_suspected and count_kernel_kills(case.evidence.endings) == 0:
        return replace(choice, signature=all_signatures()[ids.KILLED])
    return choice


def _compare_memory(choice: Choice) -> Choice:
    """Return the choice, with another cause if the numbers show that the batch is not to blame.

    Either a single request exceeds the whole GPU, other processes hold most of it, or the stack
    shows that no training step was running.
    """
    if choice.signature.id != ids.GPU_MEMORY_FULL or choice.candidate is None:
        return choice
    request = read_request(choice.candidate.statement.text)
    if request is not None and request.exceeds_the_device:
        signature = all_signatures()[ids.REQUEST_EXCEEDS_GPU]
    elif request is not None and request.is_held_by_others:
        signature = all_signatures()[ids.GPU_HELD_BY_OTHERS]
    else:
        signature = outside_training(choice.signature, choice.candidate.statement.frames)
    certainty = least_of([choice.certainty, signature.certainty])
    return replace(choice, signature=signature, certainty=certainty)


def _name_interrupted_state(case: Case, choice: Choice) -> Choice:
    """Return the choice, with what was wrong as its cause if the user interrupted a broken run.

    That somebody pressed Ctrl-C is certain, but it only ended the run.
    """
    if choice.signature.id != ids.INTERRUPTED:
        return choice
    from_statement = choice.candidate is not None
    signature = interrupted_state(case.evidence, case.candidates, from_statement=from_statement)
    if signature is None:
        return choice
    certainty = least_of([choice.certainty, signature.certainty])
    return replace(choice, signature=signature, certainty=certainty)

"""Run a check so that its failure, its side effects and its memory do not affect training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from holdfast.core.forked import NoAnswer, run_in_forked_copy
from holdfast.guard.splitting.loss_functions import CalledInsideError
from holdfast.guard.splitting.trial.split_result import SplitCheckResult
from holdfast.memory import onednn
from holdfast.memory.oom import find_out_of_memory
from holdfast.numerics.eager import eager


def run_in_copy(check: Callable[[], SplitCheckResult]) -> SplitCheckResult:
    """Run a check in a forked copy of this process, and return its result; see `run_check`.

    If memory is short, the check is repeated in another copy without oneDNN. oneDNN creates and
    caches a kernel for each new size. If the allocation of a kernel fails, oneDNN either creates no
    more kernels in that process, or crashes it.
    """
    result = _result_of_copy(lambda: run_check(check))
    if result.short_of_memory and onednn.is_on():

        def without_onednn() -> SplitCheckResult:
            # Only the forked copy runs without oneDNN.
            onednn.switch_off()
            return run_check(check)

        result = _result_of_copy(without_onednn)
    return result


def _result_of_copy(check: Callable[[], SplitCheckResult]) -> SplitCheckResult:
    try:
        return SplitCheckResult.from_json(run_in_forked_copy(lambda: asdict(check())))
    except NoAnswer as error:
        return SplitCheckResult(
            outcome="unknown",
            why=str(error),
            short_of_memory=error.died,
            fork_failed=error.not_made,
        )
    except MemoryError as error:
        # This process ran out of memory while forking the copy or reading the result.
        return SplitCheckResult(
            outcome="unknown",
            why=f"no memory for a copy of this process ({error})",
            fork_failed=True,
        )


def run_check(check: Callable[[], SplitCheckResult]) -> SplitCheckResult:
    """Run a check in this process.

    Returns:
        The result of the check, or an "unknown" result with the reason if the check fails.
    """
    try:
        # The check runs in eager mode. Otherwise, torch would compile code for the sizes of the
        # trial. A forked copy cannot do so, because a fork does not copy the compiler's threads.
        with eager():
            return check()
    except CalledInsideError as error:
        return SplitCheckResult(outcome="unknown", called=error.called)
    except Exception as error:  # noqa: BLE001 - the user's loss may raise anything for 3 samples
        first_line = (str(error).strip().splitlines() or [""])[0]
        return SplitCheckResult(
            outcome="unknown",
            why=f"{type(error).__name__}: {first_line}"[:300],
            short_of_memory=find_out_of_memory(error) is not None,
        )

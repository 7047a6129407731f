"""Whether a command is started again.

The rules one by one, and what must hold for every history.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.explain.verdict import Verdict
from holdfast.supervise.launch.attempt import AttemptEnd
from holdfast.supervise.launch.restarts import (
    Budgets,
    EndedAttempt,
    EndRun,
    PastAttempt,
    RestartDecision,
    StartAgain,
    decide_restart,
    effective_changes,
)

BUDGETS = Budgets(max_restarts=3, max_preemptions=2, min_progress_steps=10)
FAILED = AttemptEnd(status=1, seconds=60.0)


def verdict(
    restart: str = "retry", cause: str = "H921", family: str = "distributed", **changes: str
) -> Verdict:
    values: dict[str, Any] = {
        "restart": restart,
        "family": family,
        "changes": tuple(changes.items()),
    }
    return Verdict(cause=cause, title="t", summary="s", fix="f", **values)


def past(
    at_step: int | None = 100,
    steps: int | None = 100,
    cause: str = "H921",
    kind: str = "retry",
    seconds: float = 60,
) -> PastAttempt:
    return PastAttempt(cause=cause, kind=kind, at_step=at_step, steps=steps, seconds=seconds)  # type: ignore[arg-type]


def decide(
    last: Verdict, *history: PastAttempt, environment: dict[str, str] | None = None
) -> RestartDecision:
    return decide_restart(
        EndedAttempt(
            verdict=last,
            end=FAILED,
            history=history,
            budgets=BUDGETS,
            environment=environment or {},
        )
    )


def test_a_cause_that_may_pass_is_retried_after_a_delay_that_doubles():
    """10, 20 and 40 seconds, then the three restarts are used."""
    history, delays = [], []
    for number in range(3):
        history.append(past(at_step=1000 * (number + 1), steps=1000))
        again = decide(verdict(), *history)
        assert isinstance(again, StartAgain)
        delays.append(again.delay_seconds)
    assert delays == [10.0, 20.0, 40.0]
    last = decide(verdict(), *history, past(at_step=4000, steps=1000))
    assert isinstance(last, EndRun)
    assert "3" in last.why


def test_too_little_progress_between_two_failures_of_one_cause_stops():
    """Nine steps are no progress, whether counted by the training or by the process; ten are."""
    stopped = decide(verdict(), past(), past())
    assert isinstance(stopped, EndRun)
    assert "100" in stopped.why
    assert isinstance(decide(verdict(), past(cause="H930"), past()), StartAgain)
    assert isinstance(decide(verdict(), past(at_step=100), past(at_step=109)), EndRun)
    assert isinstance(decide(verdict(), past(at_step=100), past(at_step=110)), StartAgain)
    assert isinstance(decide(verdict(), past(), past(at_step=None, steps=9)), EndRun)
    assert isinstance(decide(verdict(), past(), past(at_step=None, steps=10)), StartAgain)


def test_out_of_memory_is_retried_at_once_and_only_with_something_changed():
    """The change is named, merged with what is set, and not tried twice."""
    short = verdict("remedy", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    again = decide(
        short, past(kind="remedy"), environment={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    )
    assert isinstance(again, StartAgain)
    assert again.changes == {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"
    }
    assert again.delay_seconds == 0.0
    changed = decide(
        short, past(kind="remedy"), past(kind="remedy"), environment=dict(again.changes)
    )
    assert isinstance(changed, EndRun)
    assert isinstance(decide(verdict("remedy"), past(kind="remedy")), EndRun)


def test_a_value_in_brackets_is_one_entry_of_the_allocators_settings():
    """roundup_power2_divisions holds commas that separate nothing."""
    present = {
        "PYTORCH_CUDA_ALLOC_CONF": (
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:False"
        )
    }
    found = effective_changes(present, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert found == {
        "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2],expandable_segments:True"
    }
    assert effective_changes(found, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) == {}


FAILURES = st.tuples(
    st.sampled_from(["H901", "H921", "H930"]),
    st.sampled_from(["retry", "remedy", "preempted", "stop"]),
    st.one_of(st.none(), st.integers(0, 10_000)),
    st.one_of(st.none(), st.integers(0, 10_000)),
    st.floats(0, 5000),
    st.sampled_from([{}, {"A": "1"}, {"A": "2"}, {"A_ALLOC_CONF": "x:1"}]),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(FAILURES, min_size=1, max_size=40),
    st.builds(Budgets, max_restarts=st.integers(0, 5), max_preemptions=st.integers(0, 5)),
)
def test_no_history_exceeds_the_budgets(failures, budgets):
    """However attempts fail, restarts stay within both budgets, delays within their bounds, and
    changes are real.
    """
    history: list[PastAttempt] = []
    environment: dict[str, str] = {}
    used = {"preempted": 0, "others": 0}
    for cause, kind, at_step, steps, seconds, changes in failures:
        history.append(
            PastAttempt(cause=cause, kind=kind, at_step=at_step, steps=steps, seconds=seconds)
        )
        decision = decide_restart(
            EndedAttempt(
                verdict=verdict(kind, cause, **changes),
                end=FAILED,
                history=history,
                budgets=budgets,
                environment=environment,
            )
        )
        if isinstance(decision, EndRun):
            assert decision.why
            break
        assert kind != "stop"
        used["preempted" if kind == "preempted" else "others"] += 1
        assert 0 <= decision.delay_seconds <= budgets.max_delay_seconds
        if kind == "remedy":
            assert decision.changes
        assert all(environment.get(name) != value for name, value in decision.changes.items())
        environment.update(decision.changes)
    assert used["preempted"] <= budgets.max_preemptions
    assert used["others"] <= budgets.max_restarts


def test_what_ended_well_or_is_a_users_error_is_not_started_again():
    """Neither success nor an error in the script is repeated, whatever is left of the budgets."""
    assert isinstance(decide(verdict("retry", family="ended well"), past()), EndRun)
    assert isinstance(decide(verdict("stop", family="user code"), past(kind="stop")), EndRun)


def decide_after(end: AttemptEnd, **facts: Any) -> RestartDecision:
    case = {"verdict": verdict(), "history": [past()], "budgets": BUDGETS, "environment": {}}
    return decide_restart(EndedAttempt(end=end, **{**case, **facts}))


def test_an_end_that_somebody_asked_for_is_final():
    """Whoever asked, the user or the training itself, and however the command ended then."""
    by_user = AttemptEnd(status=1, seconds=60.0, requested_by=15)
    assert isinstance(decide_after(by_user), EndRun)
    assert "SIGTERM" in decide_after(by_user).why
    for outside in ("SIGUSR1", "max_time"):
        assert outside in decide_after(FAILED, stopped_by=outside).why
    # A guard also stops on the SIGTERM that the supervisor sends after a hang.
    after_hang = AttemptEnd(status=1, seconds=60.0, signal_sent=15)
    assert isinstance(decide_after(after_hang, stopped_by="SIGTERM"), StartAgain)


def test_an_attempt_that_failed_on_another_host_follows_its_decision():
    """As long as any restart is left, this host is ready for the next attempt."""
    stops = verdict("stop")
    again = decide_after(FAILED, verdict=stops, follows_other_host=True)
    assert isinstance(again, StartAgain)
    used_up = [past()] * (BUDGETS.max_restarts + BUDGETS.max_preemptions + 1)
    last = decide_after(FAILED, verdict=stops, follows_other_host=True, history=used_up)
    assert isinstance(last, EndRun)

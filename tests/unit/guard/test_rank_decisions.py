"""What ranks decide from what they have received, without any processes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from holdfast.core.errors import HoldfastError
from holdfast.guard.ranks import listener
from holdfast.guard.ranks.agreement import check_agreement
from holdfast.guard.ranks.failures import Failures
from holdfast.guard.ranks.interface import PLACE
from holdfast.guard.ranks.listener import Meetings
from holdfast.guard.ranks.main_thread import Collective
from holdfast.guard.ranks.origin import OriginReport, origin_among_ranks
from holdfast.guard.ranks.progress import GUARDS, GuardsOfProcess, Progress, Whereabouts
from holdfast.guard.ranks.row import EPOCH_END, Row, Rows
from holdfast.guard.result import Provenance

# --- the rows of a step


def test_rows_give_the_mean_over_the_items_of_all_ranks():
    """Each loss is weighted by the items of its rank."""
    rows = Rows([Row(items=1.0, loss=8.0), Row(items=3.0, loss=4.0)])

    assert rows.items == 4.0
    assert rows.loss == 5.0


def test_the_strongest_stop_request_wins():
    """A signal comes before a request by a call."""
    rows = Rows([Row(stop=1.0), Row(stop=16.0), Row(stop=0.0)])

    assert rows.stop == (1, 16.0)


@pytest.mark.parametrize(
    ("losses", "suspects"),
    [
        ((1.0, 2.0), [0, 1]),
        ((1.0, float("nan")), [1]),
        ((float("inf"), float("nan")), [0, 1]),
    ],
)
def test_a_rank_whose_loss_is_not_finite_is_suspected_of_it(losses, suspects):
    """If all losses are finite, all ranks are suspected."""
    assert Rows([Row(loss=loss) for loss in losses]).suspects() == suspects


@pytest.mark.parametrize(
    "other",
    [
        Row(kind=EPOCH_END, number=5.0),
        Row(number=6.0),
        Row(number=5.0, guard=1.0),
        Row(number=5.0, epoch=1.0),
        Row(number=5.0, batch=1.0),
    ],
)
def test_ranks_at_different_steps_are_an_error(other):
    """The kind of row, the attempt, the guard, the epoch and the batch must agree."""
    with pytest.raises(HoldfastError, match="H116"):
        Rows([Row(number=5.0), other]).check()


def test_an_epoch_may_end_at_different_batches():
    """A rank may have skipped an empty last batch."""
    Rows([Row(kind=EPOCH_END, batch=9.0), Row(kind=EPOCH_END, batch=10.0)]).check()


# --- settings


@pytest.mark.parametrize(("name", "rule"), [("batch size", "H115"), (PLACE, "H116")])
def test_facts_that_differ_are_an_error_that_names_the_rank(name, rule):
    """The position in the data has a rule of its own."""
    with pytest.raises(HoldfastError, match=rf"(?s)rank 2.*{rule}"):
        check_agreement([{name: 8}, {name: 8}, {name: 4}])


def test_equal_facts_are_no_error():
    """Ranks with the same settings agree."""
    check_agreement([{"batch size": 8}, {"batch size": 8}])


# --- the origin of NaN


def report(text, *, has_origin=False, is_sent=False):
    return OriginReport(has_origin=has_origin, is_sent=is_sent, text=text, has_collectives=is_sent)


@pytest.mark.parametrize(
    ("reports", "where"),
    [
        # Two suspects, of which the second has found an origin.
        ([report("no"), report("no"), report("log", has_origin=True)], "rank 2"),
        # A suspect that has sent NaN comes before one that has only found an origin.
        (
            [
                report("no"),
                report("log", has_origin=True),
                report("exp", has_origin=True, is_sent=True),
            ],
            "rank 2",
        ),
        # A rank with a finite loss has sent it.
        ([report("exp", has_origin=True, is_sent=True), report("no"), report("no")], "rank 0"),
        # Nobody knows.
        ([report("no"), report("no"), report("no")], "ranks 1 and 2"),
    ],
)
def test_the_rank_that_is_blamed_for_nan(reports, where):
    """A rank that has sent NaN comes before one that has only found an origin."""
    found = origin_among_ranks(1, Provenance(problem="no"), [1, 2], reports)

    assert found.where is not None
    assert found.where.startswith(where)


# --- ranks that wait where another one will not get


class Clock:
    """Replaces the module `time` in the listener."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(listener, "time", clock)
    return clock


def waiting(exchange=0, *, rank=1, steps=0, calls=None, is_ending=False):
    return Whereabouts(
        rank=rank,
        exchange=exchange,
        steps=steps,
        calls=calls,
        action="waits",
        is_ending=is_ending,
        is_waiting=not is_ending,
    )


def advanced(*, steps=0, exchanges=0):
    progress = Progress()
    for _ in range(steps):
        progress.begin_step()
    for _ in range(exchanges):
        progress.number_of_new_exchange()
    return progress


@pytest.mark.parametrize(
    ("progress", "other", "is_missed"),
    [
        # It has yet to get there.
        (advanced(), waiting(), False),
        # It has got there.
        (advanced(exchanges=1), waiting(), False),
        (advanced(exchanges=1, steps=1), waiting(), False),
        # It has begun a step instead.
        (advanced(steps=1), waiting(), True),
        # It has called another guard instead.
        (advanced(), waiting(calls=GUARDS.calls - 1), True),
        # The other rank has ended, and this one waits for it.
        (advanced(exchanges=1), waiting(is_ending=True), True),
        (advanced(), waiting(is_ending=True), False),
    ],
)
def test_a_rank_that_will_not_get_to_where_another_waits_is_out_of_step(
    clock, progress, other, is_missed
):
    """It has begun a step, or called another guard, instead."""
    meetings = Meetings(0, 1, progress)
    meetings.add(other)

    clock.now += 2.0

    error = meetings.judge()
    assert (error is not None) == is_missed
    assert error is None or error.rule == "H116"


def test_nothing_is_judged_in_the_first_second(clock):
    """A rank that leaves its loop with an error sends its whereabouts before the error."""
    meetings = Meetings(0, 1, advanced(steps=1))
    meetings.add(waiting())

    clock.now += 0.5

    assert meetings.judge() is None
    assert meetings.are_expected


def test_a_rank_that_was_met_is_forgotten(clock):
    """Once this rank has got there, no error follows."""
    progress = advanced()
    meetings = Meetings(0, 1, progress)
    meetings.add(waiting())
    progress.number_of_new_exchange()

    clock.now += 2.0

    assert meetings.judge() is None
    assert not meetings.are_expected


@pytest.mark.parametrize(
    ("synchronizes", "ranks_waiting", "is_error"),
    [(True, 1, True), (False, 1, False), (False, 2, True)],
)
def test_a_rank_in_a_collective_of_the_script_while_others_wait_in_the_guard(
    clock, monkeypatch, synchronizes, ranks_waiting, is_error
):
    """If the collective is one-sided, a rank that waits in the guard may have completed it."""
    collective = Collective("broadcast", synchronizes=synchronizes)
    monkeypatch.setattr(listener, "collective_of_main_thread", lambda: collective)
    meetings = Meetings(0, 2, advanced())
    for rank in range(1, 1 + ranks_waiting):
        meetings.add(waiting(rank=rank))

    clock.now += 2.0
    assert meetings.judge() is None, "the collective may just be completing"
    clock.now += 6.0

    assert (meetings.judge() is not None) == is_error


def test_a_new_guard_makes_the_counts_of_calls_equal_again():
    """Ranks that have caught the same error may have made different numbers of calls."""
    first, second = GuardsOfProcess(), GuardsOfProcess()
    for guards in (first, second):
        guards.number_of_new_guard()
    first.count_call()

    numbers = [guards.number_of_new_guard() for guards in (first, second)]

    assert numbers == [1, 1]
    assert first.calls == second.calls


class _StoreThatIsGone:
    """Fails as the store does once the process that hosts it has exited."""

    def poll(self, *_: object) -> bool:
        raise _connection_closed()


def _connection_closed() -> distributed.DistNetworkError:
    return distributed.DistNetworkError(
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown"
        " or crash?"
    )


def test_a_lost_connection_to_the_store_is_the_loss_of_a_rank() -> None:
    """The first rank hosts the store, so the error is H114 instead of torch's."""
    store: Any = _StoreThatIsGone()
    inbox: Any = None
    failures = Failures(1, range(2), store, inbox)

    cause = failures.cause_of(_connection_closed())
    assert cause is not None
    assert cause.rule == "H114"
    assert failures.cause_of(RuntimeError("an error of the script")) is None

"""No wait for another rank is without an end.

A rank that is gone, or does not come, is named on all others.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
from tests.ranks.harness import all_returned, run_ranks
from tests.ranks.test_one_run import batches_of, loss_of, made
from torch.distributed import distributed_c10d

import holdfast
from holdfast.checkpoint import saver
from holdfast.guard.ranks import inbox

TIMEOUT_SECONDS = 3.0


def with_short_timeout():
    """Set what `init_process_group(timeout=...)` sets."""
    distributed_c10d._get_default_store().set_timeout(timedelta(seconds=TIMEOUT_SECONDS))


def guard_of(rank, run, kind, **policy):
    return guard_with(*made(kind), rank, run, **policy)


def guard_with(model, optimizer, rank, run, **policy):
    return (
        holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank), **policy),
        model,
    )


def ending_before_its_guard(rank, run, how, where):
    model, optimizer = made("replicated")
    if rank == where:
        time.sleep(1.0)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(0)
        raise FileNotFoundError("data/shard-1 is missing")
    time.sleep(2.0 * (how == "exits"))  # it is gone already when the others come
    guard_with(model, optimizer, rank, run)


@pytest.mark.parametrize(
    ("how", "where", "world_size"),
    [
        ("raises", 1, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("killed", 2, 3), ("exits", 1, 2), ("raises", 1, 4))
        ),
    ],
)
def test_a_rank_that_ends_before_its_guard_is_an_error_on_the_others(
    tmp_path, how, where, world_size
):
    """They see it by its closed connections, and not after the timeout of the group, here half
    an hour.
    """
    for rank, end in enumerate(
        run_ranks(ending_before_its_guard, world_size, tmp_path, how, where)
    ):
        if rank != where:
            assert "H114" in (end.raised or ""), end
            assert f"rank {where} has ended" in (end.raised or ""), end


def staying_away(rank, run, kind, what):
    with_short_timeout()
    if what == "Guard" and rank == 1:
        time.sleep(4 * TIMEOUT_SECONDS)
    guard, model = guard_of(rank, run, kind)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
        if guard.global_step == 2:
            if rank == 1:
                time.sleep(4 * TIMEOUT_SECONDS)
            guard.validated(0.5) if what == "validated" else guard.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("replicated", "Guard"),
        ("replicated", "validated"),
        ("replicated", "close"),
        ("resharded", "validated"),
    ],
)
def test_a_rank_that_does_not_come_ends_the_wait_after_the_timeout_of_the_group(
    tmp_path, kind, what
):
    """The error names it."""
    first, _ = run_ranks(staying_away, 2, tmp_path, kind, what)
    assert "H114" in (first.raised or ""), first
    assert "rank 1 has" in (first.raised or ""), first


def writing_slowly(rank, run, how):
    with_short_timeout()
    inbox._ANSWER_SECONDS = 2.0
    guard, model = guard_of(rank, run, "resharded", save_interval_steps=2)
    write = saver.write_tensors

    def slow(path, tensors):
        if rank == 1 and guard.global_step >= 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2 * TIMEOUT_SECONDS)
        return write(path, tensors)

    for batch in guard.batches(max_steps=2):
        guard.step(batch, loss_of(model))
        saver.write_tensors = slow
    return guard.statistics().checkpoints_saved


@pytest.mark.slow
def test_a_rank_that_writes_its_share_slowly_is_waited_for(tmp_path):
    """Its disk may take longer than a collective: it answers that it is there."""
    assert all_returned(run_ranks(writing_slowly, 2, tmp_path, "slow")) == [2, 2]


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes_its_share_is_an_error(tmp_path):
    """Nobody else ends the wait, as a launcher would."""
    first, _ = run_ranks(writing_slowly, 2, tmp_path, "killed")
    assert "H114" in first.output, first
    assert "rank 1 has not arrived" in first.output, first

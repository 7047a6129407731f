"""What ranks do in another order than others is an error on all; what only looks so is none."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time

import pytest
from tests.ranks.harness import all_returned, run_ranks
from tests.ranks.test_ranks import batches_of, loss_of, model_and_optimizer, weights
from torch import distributed

import holdfast


def guards_of(run):
    """Return two guards and their models."""
    models = [model_and_optimizer() for _ in range(2)]
    guards = [
        holdfast.Guard(run / str(at), model=model, optimizer=own)
        for at, (model, own) in enumerate(models)
    ]
    return guards, [model for model, _ in models]


def stepping_crosswise(rank, run, where):
    guards, models = guards_of(run)
    for number, batch in enumerate(batches_of(rank)):
        order = (1, 0) if rank == where and number == 3 else (0, 1)
        for at in order:
            guards[at].step(batch, loss_of(models[at]))
    return [weights(model) for model in models]


@pytest.mark.parametrize("where", [0, 1])
def test_guards_that_one_rank_steps_in_another_order_are_an_error(tmp_path, where):
    """The gradients of two models would be mixed, and nothing else shows it."""
    for end in run_ranks(stepping_crosswise, 2, tmp_path, where):
        assert "H116" in end.output, end
        assert "the ranks are at guards " + ("0, 1" if where else "1, 0") in end.output, end


def calling_crosswise(rank, run, what, where):
    guards, models = guards_of(run)
    for batch in batches_of(rank)[:3]:
        for guard, model in zip(guards, models, strict=True):
            guard.step(batch, loss_of(model))
    if what == "step" and rank == where:
        guards[1].step(batches_of(rank)[0], loss_of(models[1]))
    for guard in guards[:: -1 if rank == where else 1]:
        guard.close() if what == "close" else guard.validated(0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "where"), [("close", 1), ("validated", 0), ("step", 1)])
def test_guards_that_one_rank_calls_in_another_order_are_an_error(tmp_path, what, where):
    """The ranks would wait for each other for ever, each under another guard."""
    for end in run_ranks(calling_crosswise, 2, tmp_path, what, where):
        assert "H116" in end.output, end
        assert "calls another guard" in end.output, end


def calling_late(rank, run):
    guards, models = guards_of(run)
    for number, batch in enumerate(batches_of(rank)[:3]):
        for guard, model in zip(guards, models, strict=True):
            guard.step(batch, loss_of(model))
            time.sleep(2.5 * (number == 1) * (rank == 0))
            guard.validated(0.5)
            time.sleep(2.5 * (number == 1) * (rank == 1))
    for guard in guards:
        time.sleep(2.5 * (rank == 1))
        guard.close()
    return [guard.global_step for guard in guards]


@pytest.mark.slow
def test_a_rank_that_calls_several_guards_late_is_waited_for(tmp_path):
    """In the order of the others, however slow it is."""
    assert all_returned(run_ranks(calling_late, 2, tmp_path)) == [[3, 3]] * 2


def forking(rank, run, how):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    for number, batch in enumerate(guard.batches(max_epochs=1)):
        guard.step(batch, loss_of(model))
        if number == 3 and rank == 1:
            child = os.fork()
            if child == 0:  # as the interpreter ends it
                if how == "fails":
                    sys.excepthook(OSError, OSError("of the child"), None)
                atexit._run_exitfuncs()
                os._exit(0)
            os.waitpid(child, 0)
        # The others hear what was said, and are ended after a while
        time.sleep(1.0 * (number >= 3))
    guard.close()
    return guard.global_step


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_fork_of_a_rank_does_not_speak_for_it(tmp_path, how):
    """It may end in order, or with an error of its own, and all train on."""
    assert all_returned(run_ranks(forking, 2, tmp_path, how)) == [8, 8]


class OfLength:
    """Batches, and what the loader says their number is."""

    def __init__(self, batches, length):
        self._batches, self._length = batches, length
        self.guard = None
        self.saved = []  # checkpoints, before each epoch begins and at the end of its batches

    def __iter__(self):
        self._note()
        yield from self._batches
        self._note()

    def _note(self):
        self.saved.append(self.guard.statistics().checkpoints_saved)

    def __len__(self):
        return self._length


def saving(rank, run, lengths, every):
    model, optimizer = model_and_optimizer()
    loader = OfLength(batches_of(rank), lengths[rank])
    policy = {"save_interval_steps": every, "async_save": False}
    loader.guard = guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=loader, **policy
    )
    for batch in guard.batches(max_epochs=2):
        guard.step(batch, loss_of(model))
    return guard.global_step, loader.saved


@pytest.mark.parametrize(
    ("lengths", "every", "saved"),
    [
        ((8, 7), 7, [1, 2, 2, 3]),
        ((7, 8), 7, [1, 2, 2, 3]),
        ((8, 7), 8, [1, 1, 2, 2]),
        ((7, 8), 8, [1, 2, 2, 3]),
    ],
)
def test_lengths_of_loaders_that_differ_do_not_part_the_ranks(tmp_path, lengths, every, saved):
    """They are a guess of where a save can wait for the end of the epoch.

    The first rank, which writes, makes it.
    """
    first, second = all_returned(run_ranks(saving, 2, tmp_path, lengths, every))
    assert first == (16, saved)
    assert second[0] == 16


def in_two_loops(rank, run, collected_at):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    gc.disable()
    held = [guard.batches(max_epochs=9)]
    held.append(held)
    for _ in range(3):
        guard.step(next(held[0]), loss_of(model))
    del held
    for number, batch in enumerate(guard.batches(max_epochs=2)):
        if number == collected_at[rank]:
            gc.collect()
        guard.step(batch, loss_of(model))
        if number == 0 and rank:
            time.sleep(2.0)  # what one rank has left the others hear of
    guard.close()
    return guard.global_step


@pytest.mark.slow
def test_a_loop_that_ranks_collect_at_different_times_parts_nobody(tmp_path):
    """The garbage collector runs when it likes."""
    assert all_returned(run_ranks(in_two_loops, 2, tmp_path, (0, 4))) == [16, 16]


def calling_alone(rank, run, call, where, collective):
    model, optimizer = model_and_optimizer(norm=True)
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
        if guard.global_step == 3:
            if rank == where:
                guard.validated(0.5) if call == "validated" else guard.close()
            if collective == "barrier":
                distributed.barrier()
            elif collective == "all_gather_object":
                distributed.all_gather_object([None, None], rank)
            elif rank != where:
                model.eval()(batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "where", "collective"),
    [
        ("validated", 0, "barrier"),
        ("validated", 1, "all_gather_object"),
        ("close", 0, "barrier"),
        ("close", 1, "a forward pass"),
    ],
)
def test_a_call_of_one_rank_while_another_is_in_a_collective_is_an_error(
    tmp_path, call, where, collective
):
    """`if rank == 0: guard.validated(...)` and a barrier.

    Each would wait for the other until the group's timeout.
    """
    for end in run_ranks(calling_alone, 2, tmp_path, call, where, collective):
        assert end.exit_code == 1, end
        assert "H116" in end.output, end
        assert f"rank {where} waits for the others in " in end.output, end
        assert f"and rank {1 - where} is in {collective}" in end.output, end


def meeting_late(rank, run):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
        if guard.global_step == 3:
            # As an evaluation by one rank; the others are in the barrier meanwhile
            time.sleep(9.0 * (rank == 0))
            distributed.barrier()
            # What a rank does alone before a call of all is nobody's fault
            time.sleep(9.0 * (rank == 1))
            guard.validated(0.5)
    return guard.global_step


@pytest.mark.slow
def test_ranks_that_meet_late_are_waited_for(tmp_path):
    """In a collective of the script's own and in the guard's, in the order in which all come to
    them.
    """
    assert all_returned(run_ranks(meeting_late, 2, tmp_path)) == [8, 8]

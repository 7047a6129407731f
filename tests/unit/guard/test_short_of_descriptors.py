"""Training goes on where the system refuses what a trial needs: descriptors and processes."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import assert_same, events, guarded, square_of, tensors_of, the_event
from torch import nn

import holdfast

_MOST = 256  # descriptors that this process may have, of which all but a few are taken


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open so many more files, inside."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST, before[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 1)


def refuse(*_: Any) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize("micro_batch_size", ["auto", 4])
@pytest.mark.parametrize("left", [0, 1])
def test_a_trial_without_descriptors_ends_no_training(tmp_path, left, micro_batch_size):
    """Without a pipe or the list of threads the steps are made all the same.

    If a batch is to be split, an event says that this was not tried in a copy.
    """
    ends = []
    for name, count in (("undisturbed", 64), ("short", left)):
        model = a_model()
        guard = guarded(tmp_path / name, model, micro_batch_size=micro_batch_size)
        with descriptors_left(count):
            for seed in range(3):
                batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
                guard.step(batch, square_of(model))
        ends.append(tensors_of(model))

    assert_same(*ends)
    assert guard.global_step == 3
    reasons = [event.data["why"] for event in events(guard, "split_not_tried")]
    assert len(reasons) == (0 if micro_batch_size == "auto" else 1)
    assert all(reasons)


@pytest.mark.parametrize("micro_batch_size", ["auto", 4])
def test_a_process_that_may_not_fork_trains_on(tmp_path, monkeypatch, micro_batch_size):
    """A fork that fails, as at the limit of processes, is an event if a batch is to be split.

    The split is then tried in the process itself.
    """
    model = a_model()
    guard = guarded(tmp_path, model, micro_batch_size=micro_batch_size)
    monkeypatch.setattr(os, "fork", refuse)

    for _ in range(3):
        guard.step(torch.randn(8, 6), square_of(model))

    assert guard.global_step == 3
    if micro_batch_size == "auto":
        assert not events(guard, "split_not_tried", "promises")
    else:
        assert the_event(guard, "split_not_tried").data["why"]
        assert the_event(guard, "promises").data["split_promise"] == "equal up to rounding"


def test_without_another_thread_the_loop_waits_for_its_saves(tmp_path, monkeypatch):
    """At the limit of threads every checkpoint is written all the same, and the event says how."""
    model = a_model()
    loader = holdfast.DataLoader(torch.randn(32, 6), batch_size=8)
    guard = guarded(tmp_path, model, loader=loader, save_interval_steps=2)

    def refuse_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    for batch in guard.batches(max_epochs=2):
        guard.step(batch, square_of(model))

    assert the_event(guard, "saves_synchronous").data["why"]
    assert [event.global_step for event in events(guard, "checkpoint_saved")] == [0, 2, 4, 6, 8]
    assert not events(guard, "save_failed", "not_saved")


def test_what_is_tried_in_the_process_itself_is_refused_as_ever(tmp_path, monkeypatch):
    """Without a copy a loss that couples samples is found out in place, before the first split."""
    model = a_model()
    guard = guarded(tmp_path, model, micro_batch_size=4)
    monkeypatch.setattr(os, "fork", refuse)

    with pytest.raises(holdfast.BatchError) as caught:
        guard.step(torch.randn(8, 6), lambda x: model(x).std())

    assert caught.value.rule == "H207"

"""Why a run stops: a script compares `guard.stop_reason` on each rank, and all must take the
same branch.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.testing import FakeClock

STEPS_OF_AN_EPOCH = 3


def stopping(rank, run, requests, at_step):
    """Ask ranks to stop after a step: by a signal, or by a call with any other text.

    Return what this one reads.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loader=[torch.randn(4, 3) for _ in range(STEPS_OF_AN_EPOCH)],
    )
    for batch in guard.batches(max_epochs=3):
        guard.step(batch, lambda inputs: model(inputs).square().mean())
        request = requests.get(rank) if guard.global_step == at_step else None
        if request in signal.Signals.__members__:
            os.kill(os.getpid(), signal.Signals[request])
        elif request is not None:
            guard.request_stop(request)
    (event,) = [event.data for event in guard.events() if event.kind == "stop_requested"]
    return guard.global_step, guard.stop_reason, event


@pytest.mark.parametrize(
    ("requests", "at_step", "reason", "asked_rank"),
    [
        pytest.param({1: "SIGUSR1"}, 1, "SIGUSR1", 1, id="signal"),
        pytest.param({1: "half way"}, 1, "half way", 1, id="call"),
        pytest.param({0: "one", 1: "other"}, 1, "one", 0, id="two calls", marks=pytest.mark.slow),
        pytest.param(
            {0: "enough", 1: "SIGTERM"},
            1,
            "SIGTERM",
            1,
            id="call and signal",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {1: "enough"}, STEPS_OF_AN_EPOCH, "enough", 1, id="end of epoch", marks=pytest.mark.slow
        ),
    ],
)
def test_all_ranks_stop_for_the_same_reason(tmp_path, requests, at_step, reason, asked_rank):
    """It is the name of the signal or the text of the call.

    The event also names the rank that was asked.
    """
    by_signal = reason if reason in signal.Signals.__members__ else None
    ended = all_returned(run_ranks(stopping, 2, tmp_path, requests, at_step))

    assert len({step for step, _, _ in ended}) == 1
    for _, stop_reason, event in ended:
        assert stop_reason == reason
        assert event == {"reason": reason, "signal": by_signal, "asked_rank": asked_rank}


def out_of_time(rank, run):
    """Train until the time of the first rank is over. Return what this rank reads and exits with."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    clock = FakeClock()
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loader=[torch.randn(4, 3) for _ in range(100)],
        clock=clock,
        async_save=False,
        max_time="20s",
        stop_exit_code=85,
    )
    with pytest.raises(SystemExit) as ended:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, lambda inputs: model(inputs).square().mean())
            # The clocks of other ranks do not count.
            clock.advance(1.0 if rank == 0 else 1000.0)
    return guard.global_step, guard.stop_reason, ended.value.code


def test_all_ranks_stop_when_the_time_of_the_first_one_is_over(tmp_path):
    """They learn of it in the next step, for which there is time, and exit with the same code."""
    first, second = all_returned(run_ranks(out_of_time, 2, tmp_path))

    assert first == second
    step, reason, code = first
    assert step == 19
    assert reason.startswith("max_time")
    assert code == 85

"""A forked copy answers, or says why not, and never touches the process that made it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.prepared import run_prepared

from holdfast.core.forked import NoAnswer, run_in_forked_copy


def _children() -> set[str]:
    """Return the processes that this one has started and not yet seen the end of."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found |= set((task / "children").read_text().split())
    return found


def test_the_copy_answers_and_its_changes_stay_with_it():
    """Weights, random state and plain Python objects changed in the copy are as they were here."""
    weight, seen = torch.zeros(3), []
    random_state = torch.get_rng_state()

    def run() -> dict[str, object]:
        weight.add_(torch.rand(3))
        seen.append(1)
        print("nobody hears this")  # noqa: T201
        return {"pid": os.getpid(), "nan": math.nan, "threads": torch.get_num_threads()}

    before = _children()
    found = run_in_forked_copy(run, timeout_seconds=60)
    assert found["pid"] != os.getpid()
    assert math.isnan(found["nan"])
    assert found["threads"] == 1
    assert not weight.any()
    assert seen == []
    assert torch.equal(torch.get_rng_state(), random_state)
    assert _children() == before


def test_ctrl_c_does_not_cost_the_answer():
    """A terminal sends SIGINT to the copy too.

    Whoever asked ends by itself, and says nothing wrong before.
    """

    def run() -> dict[str, bool]:
        os.kill(os.getpid(), signal.SIGINT)
        return {"answers": True}

    assert run_in_forked_copy(run) == {"answers": True}


def test_a_backward_runs_in_the_copy_of_a_process_that_has_used_autograd():
    """Autograd works after the fork, also if this process has used it in another thread before."""
    weight = torch.ones(200, requires_grad=True)
    thread = threading.Thread(target=lambda: weight.square().sum().backward())
    thread.start()
    thread.join()

    def run() -> dict[str, float]:
        weight.grad = None
        (weight**3).sum().backward()
        assert weight.grad is not None
        return {"sum": float(weight.grad.sum())}

    assert run_in_forked_copy(run) == {"sum": 600.0}


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: object(), "not JSON serializable"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died"),
        (lambda: time.sleep(100), "0.2 s"),
    ],
)
def test_a_copy_that_fails_dies_or_hangs_is_said_with_the_reason(run, why):
    """No zombie is left and no exception other than `NoAnswer` comes out."""
    before = _children()
    with pytest.raises(NoAnswer, match=why):
        run_in_forked_copy(run, timeout_seconds=0.2 if "0.2" in why else 60)
    assert _children() == before


_ON_THE_CPU = """if True:
    import sys
    import torch
    import holdfast
    from holdfast.forecast.fake.device import forecast_device
    from holdfast.core.forked import backward_works_in_a_copy
    if sys.argv[1] == "accelerator":  # a stand-in, for which autograd starts threads as for a real one
        with forecast_device():
            pass
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(torch.randn(5, 8, 4))
    with holdfast.Guard(sys.argv[2], model=model, optimizer=optimizer, loader=batches, micro_batch_size=3) as guard:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, lambda x: model(x).square().mean())
    print(backward_works_in_a_copy())
    print(*(parameter.sum().item().hex() for parameter in model.parameters()), torch.rand(1).item())
    """


def test_a_model_on_the_cpu_of_a_machine_with_an_accelerator_is_split_all_the_same(tmp_path):
    """No copy can make a backward pass there.

    Splits are tried out in place, and leave no trace either.
    """
    found = {}
    for machine in ("plain", "accelerator"):
        done = run_prepared(["-c", _ON_THE_CPU, machine, tmp_path / machine], timeout=300)
        assert done.returncode == 0, done.stderr
        works, found[machine] = done.stdout.splitlines()
        assert works == str(machine == "plain")
    assert found["plain"] == found["accelerator"]

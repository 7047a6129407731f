"""Steps of several ranks whose results are read one step later.

They end as they would if all ranks read each result at once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from tests.unit.guard.guarded import ask_for_too_much, assert_same, tensors_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.guard.decision import HostCopy
from holdfast.guard.run.undecided import UndecidedResult
from holdfast.numerics import loss as loss_terms

pytestmark = pytest.mark.slow

STEPS = 16
QUIET = {
    "save_interval_steps": None,
    "diagnose": False,
    "nonfinite_patience": None,
    "max_grad_norm": 1.0,
}


class Training:
    """A replicated model with BatchNorm and dropout, its optimizer and its schedule."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        torch.manual_seed(0)
        layers = [
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(16, 1),
        ]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.0005)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        torch.manual_seed(10 + rank)

    def guard(self, run: Path, decide: str, loader: Any = None, **settings: Any) -> holdfast.Guard:
        """Return a guard that saves nothing, unless the settings say otherwise."""
        return holdfast.Guard(
            run,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=loader,
            decide=decide,
            **{**QUIET, **settings},
        )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()

    def state(self) -> list[torch.Tensor]:
        """Return the weights, buffers, moments, learning rate and random state."""
        rate = torch.tensor(self.scheduler.get_last_lr())
        return [*tensors_of(self.model, self.optimizer), rate, torch.get_rng_state()]


def batches_of(rank: int, *, steps: int = STEPS, last: int = 8) -> list[torch.Tensor]:
    """Return the batches of a rank, of which the last one may be smaller."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [8] * (steps - 1) + [last]
    return [torch.randn(size, 8, generator=generator) for size in sizes]


def facts_of(guard: holdfast.Guard, results: list[holdfast.StepResult]) -> list[Any]:
    """Return the facts about a run that do not depend on when its steps are decided."""
    guard.close()
    statistics = guard.statistics()
    return [
        [
            (result.loss.item(), result.skipped, result.items, result.attempts, result.grad_norm)
            for result in results
        ],
        (statistics.global_step, statistics.steps, statistics.skipped_steps),
    ]


def assert_late(results: list[holdfast.StepResult], decide: str, *, at_least: int) -> None:
    """Check that at least this many steps were decided late, so that a test is not vacuous."""
    if decide == "late":
        assert sum(isinstance(result, UndecidedResult) for result in results) >= at_least


def in_both_modes(function: Any, tmp_path: Path, *given: Any) -> list[list[Any]]:
    """Run a function on two ranks in both modes, and check that they return the same.

    Returns:
        What each rank has returned.
    """
    ends = {
        decide: all_returned(run_ranks(function, 2, tmp_path / decide, decide, *given))
        for decide in ("now", "late")
    }
    for now, late in zip(ends["now"], ends["late"], strict=True):
        assert_same(late[0], now[0])
        assert repr(late[1:]) == repr(now[1:])
    return ends["late"]


def train_with_bad_batches(
    rank: int, run: Path, decide: str, bad: dict[int, set[int]], reads: str
) -> list[Any]:
    """Train with a NaN in some batches of some ranks; some ranks may read each result."""
    training = Training(rank)
    data = batches_of(rank)
    for index in bad.get(rank, ()):
        data[index][3, 2] = float("nan")
    results = []
    guard = training.guard(run, decide)
    for batch in data:
        results.append(guard.step(batch, training.loss))
        if reads == "all" or reads == str(rank):
            results[-1].loss.item()
    assert_late(results, decide, at_least=12)
    facts = facts_of(guard, results)
    return [training.state(), *facts]


@pytest.mark.parametrize("reads", ["none", "0", "all"])
@pytest.mark.parametrize(
    "bad",
    [{}, {1: {5}}, {0: {5}, 1: {6}}, {0: {15}}, {0: {0, 8}, 1: {8, 9, 10}}],
    ids=str,
)
def test_bad_batches_of_some_ranks_are_skipped_by_all(
    tmp_path: Path, bad: dict[int, set[int]], reads: str
) -> None:
    """State and results equal those of decide="now", whichever ranks read their results early."""
    ends = in_both_modes(train_with_bad_batches, tmp_path, bad, reads)

    assert ends[0][2][2] == len(set().union(*bad.values()))


def train_out_of_memory(
    rank: int, run: Path, decide: str, fails: set[tuple[int, int, int]], where: str
) -> list[Any]:
    """Train with attempts that run out of memory, given as step, rank and number of the call."""
    training = Training(rank)
    results = []
    guard = training.guard(run, decide, recompute=False)
    for step, batch in enumerate(batches_of(rank)):
        calls = iter(range(100))

        def loss(batch: torch.Tensor, step: int = step, calls: Iterator[int] = calls) -> Any:
            must_fail = (step, rank, next(calls)) in fails
            if must_fail and where == "before":
                ask_for_too_much()
            value = training.loss(batch)
            if must_fail and where == "after":
                ask_for_too_much()
            return value

        results.append(guard.step(batch, loss))
    assert_late(results, decide, at_least=3)
    counts, steps = facts_of(guard, results)
    if len(fails) > 1:
        # An attempt that is undone because the step before was refused does not count.
        counts = [values[:3] for values in counts]
    return [training.state(), counts, steps, guard.statistics().out_of_memory]


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(
    "fails",
    [{(7, 1, 0)}, {(7, 0, 0), (7, 1, 0)}, {(7, 1, 0), (8, 1, 0)}, {(15, 0, 0)}],
    ids=str,
)
def test_all_ranks_repeat_a_step_for_which_one_has_no_memory(
    tmp_path: Path, fails: set[tuple[int, int, int]], where: str
) -> None:
    """A rank that runs out of memory loses nothing, even if it fails again in the next step."""
    in_both_modes(train_out_of_memory, tmp_path, fails, where)


def train_with_optimizer_failure(rank: int, run: Path, decide: str, failed_call: int) -> list[Any]:
    """Train with an optimizer that runs out of memory on rank 1, halfway through one step."""
    training = Training(rank)
    guard = training.guard(run, decide)
    complete_step = training.optimizer.step
    calls = iter(range(100))

    def step() -> None:
        if rank == 1 and next(calls) == failed_call:
            with torch.no_grad():
                training.optimizer.param_groups[0]["params"][0].add_(1.0)
            ask_for_too_much()
        complete_step()

    training.optimizer.step = step
    results = [guard.step(batch, training.loss) for batch in batches_of(rank)]
    assert_late(results, decide, at_least=1)
    facts = facts_of(guard, results)
    return [training.state(), *facts]


def test_an_optimizer_that_fails_in_a_step_decided_now_takes_the_state_of_another_rank(
    tmp_path: Path,
) -> None:
    """The step after it is late, so its rank cannot make it, and all ranks repeat it."""
    ends = in_both_modes(train_with_optimizer_failure, tmp_path, 0)

    assert ends[0][0][0].equal(ends[1][0][0])


def test_an_optimizer_that_fails_in_a_late_step_ends_all_ranks(tmp_path: Path) -> None:
    """The other ranks have already continued, so the error is H402, and says so."""
    ends = run_ranks(train_with_optimizer_failure, 2, tmp_path, "late", 6)

    assert all("H402" in (end.raised or "") for end in ends), ends


def leave_the_loop(rank: int, run: Path, decide: str, last: int, then: str) -> list[Any]:
    """Leave the loop with ``break`` after a bad batch of rank 1, and use the guard again."""
    training = Training(rank)
    data = batches_of(rank)
    if rank == 1:
        data[last][0, 0] = float("nan")
    results = []
    guard = training.guard(run, decide, data)
    for step, batch in enumerate(guard.batches(max_epochs=1)):
        results.append(guard.step(batch, training.loss))
        if step == last:
            break
    if then == "validate":
        guard.validated(0.5)
    if then == "continue":
        results += [guard.step(batch, training.loss) for batch in guard.batches(max_epochs=1)]
    assert_late(results, decide, at_least=last)
    facts = facts_of(guard, results)
    return [training.state(), *facts]


@pytest.mark.parametrize("then", ["close", "validate", "continue"])
def test_a_step_that_was_refused_before_break_is_repeated_later(tmp_path: Path, then: str) -> None:
    """All ranks repeat it at their next joint call, for which the run is opened again."""
    ends = in_both_modes(leave_the_loop, tmp_path, 6, then)

    assert ends[0][2][2] == 1


def train_over_epochs(
    rank: int, run: Path, decide: str, interval: int, last: int, stops: bool
) -> list[Any]:
    """Train for three epochs with saves, and perhaps a stop that one rank requests."""
    training = Training(rank)
    # The ranks have last batches of different sizes, and of a size of their own.
    loader = batches_of(rank, steps=5, last=last + rank)
    results = []
    guard = training.guard(run, decide, loader, save_interval_steps=interval, async_save=False)
    for step, batch in enumerate(guard.batches(max_epochs=3)):
        results.append(guard.step(batch, training.loss))
        if stops and rank == 1 and step == 7:
            guard.request_stop("enough")
    facts = facts_of(guard, results)
    assert_late(results, decide, at_least=3)
    saved = [event.global_step for event in guard.events() if event.kind == "checkpoint_saved"]
    return [training.state(), *facts, saved if rank == 0 else None]


@pytest.mark.parametrize("last", [8, 4, 7], ids=str)
@pytest.mark.parametrize("interval", [1, 3, 4], ids=str)
def test_saves_are_made_at_the_same_steps(tmp_path: Path, interval: int, last: int) -> None:
    """A save that is due after a late step is made after this step."""
    in_both_modes(train_over_epochs, tmp_path, interval, last, False)


def test_a_stop_on_one_rank_reaches_all(tmp_path: Path) -> None:
    """All ranks stop at the same step, at most one step later than with decide="now"."""
    ends = {
        decide: all_returned(run_ranks(train_over_epochs, 2, tmp_path / decide, decide, 3, 8, True))
        for decide in ("now", "late")
    }

    steps = {decide: [end[2][0] for end in ranks] for decide, ranks in ends.items()}
    assert steps["late"][0] == steps["late"][1]
    assert steps["late"][0] - steps["now"][0] in (0, 1)


def train_with_reason_on_one_rank(rank: int, run: Path, decide: str, reason: str) -> list[Any]:
    """Train with something on rank 1 that makes it read each result at once, and two NaN."""
    training = Training(rank)
    data = batches_of(rank)
    data[6][0, 0] = float("nan")
    if rank == 0:
        data[9][0, 0] = float("nan")
    results = []
    guard = training.guard(run, decide)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        norm = training.model.module[1]
        if rank == 1 and reason == "replaced buffer":
            norm.running_mean = norm.running_mean.clone()
        return training.loss(batch)

    for batch in data:
        if rank == 1 and reason == "shared generator":
            torch.rand(())
        results.append(guard.step(batch, loss))
    facts = facts_of(guard, results)
    if rank == 0:
        assert_late(results, decide, at_least=10)
    elif decide == "late":
        # Once the reason is known, only the refused steps are left undecided.
        undecided = [i for i, result in enumerate(results) if isinstance(result, UndecidedResult)]
        assert [step for step in undecided if step > 4] == [6, 9]
    return [training.state(), *facts]


@pytest.mark.parametrize("reason", ["replaced buffer", "shared generator"])
def test_one_rank_may_have_to_read_each_result(tmp_path: Path, reason: str) -> None:
    """The other ranks continue to decide late, and all ranks agree on each step."""
    in_both_modes(train_with_reason_on_one_rank, tmp_path, reason)


def train_with_items(rank: int, run: Path, decide: str) -> list[Any]:
    """Train with a number of items that only the device knows, and which is 0 in one step."""
    training = Training(rank)
    results = []
    guard = training.guard(run, decide)
    data = batches_of(rank)
    for step, batch in enumerate(data):
        count = 3 + (5 * step + rank) % 6

        def loss(batch: torch.Tensor, count: int = count) -> holdfast.Loss:
            kept = batch[:count]
            return holdfast.Loss(training.loss(kept), items=torch.tensor(float(count)))

        results.append(guard.step(batch, loss))
    assert_late(results, decide, at_least=12)
    facts = facts_of(guard, results)
    return [training.state(), *facts]


def test_gradients_are_weighted_by_items_that_only_the_device_knows(tmp_path: Path) -> None:
    """The mean is over the items of all ranks, whatever their numbers."""
    in_both_modes(train_with_items, tmp_path)


def train_out_of_step(rank: int, run: Path, decide: str) -> list[Any]:
    """Train with a batch that only one rank skips."""
    training = Training(rank)
    guard = training.guard(run, decide, batches_of(rank))
    for step, batch in enumerate(guard.batches(max_epochs=1)):
        if rank == 1 and step == 6:
            continue
        guard.step(batch, training.loss)
    return []


def test_ranks_with_different_batches_are_an_error_on_all(tmp_path: Path) -> None:
    """The error is H116 on all ranks, also if the weights are launched before it is found."""
    ends = run_ranks(train_out_of_step, 2, tmp_path, "late")

    assert all("H116" in (end.raised or "") for end in ends), ends


def train_with_a_spike(
    rank: int, run: Path, decide: str, action: str, rank_that_decides_now: int | None
) -> list[Any]:
    """Train with a batch on one rank whose loss is unusually high."""
    training = Training(rank)
    data = batches_of(rank, steps=130)
    if rank == 1:
        data[120] *= 30
    results = []
    guard = training.guard(
        run, decide, data, spike_action=action, save_interval_steps=50, async_save=False
    )

    def loss(batch: torch.Tensor) -> torch.Tensor:
        if rank == rank_that_decides_now:
            norm = training.model.module[1]
            norm.running_mean = norm.running_mean.clone()
        return training.loss(batch)

    for batch in guard.batches(max_epochs=1):
        results.append(guard.step(batch, loss))
    if rank != rank_that_decides_now:
        assert_late(results, decide, at_least=100)
    facts = facts_of(guard, results)
    kinds = [event.kind for event in guard.events() if event.kind in ("spike", "skip_step")]
    return [training.state(), *facts, kinds if rank == 0 else None]


@pytest.mark.parametrize("rank_that_decides_now", [None, 0])
@pytest.mark.parametrize(("action", "kind"), [("skip", "skip_step"), ("warn", "spike")])
def test_a_spike_is_handled_by_all_ranks(
    tmp_path: Path, action: str, kind: str, rank_that_decides_now: int | None
) -> None:
    """The gate and the host judge a spike alike, on all ranks, and it is recorded once."""
    ends = in_both_modes(train_with_a_spike, tmp_path, action, rank_that_decides_now)

    assert ends[0][3] == [kind]


def train_with_items_on_one_device(rank: int, run: Path, decide: str) -> list[Any]:
    """Train with a number of items that changes, and that only the host of rank 0 knows."""
    count = loss_terms._count

    def count_on_device(items: Any, *, counted: bool) -> Any:
        # The number of items of a tensor on an accelerator is not read.
        return items if isinstance(items, torch.Tensor) else count(items, counted=counted)

    loss_terms._count = count_on_device
    training = Training(rank)
    guard = training.guard(run, decide)
    results = []
    for step, batch in enumerate(batches_of(rank)):
        number = 8 if step < 6 else 5

        def loss(batch: torch.Tensor, number: int = number) -> holdfast.Loss:
            items = number if rank == 0 else torch.tensor(float(number))
            return holdfast.Loss(training.loss(batch), items=items)

        results.append(guard.step(batch, loss))
    assert_late(results, decide, at_least=12)
    facts = facts_of(guard, results)
    return [training.state(), *facts, [p.detach().clone() for p in training.model.parameters()]]


def test_ranks_stay_equal_if_only_some_hosts_know_the_number_of_items(tmp_path: Path) -> None:
    """All ranks divide by the same reference, so they multiply by the same factor."""
    ends = in_both_modes(train_with_items_on_one_device, tmp_path)

    assert_same(ends[0][3], ends[1][3])


def read_values(rank: int, run: Path, decide: str) -> list[str]:
    """Train, and return where a warm step reads a value of its own from a tensor."""
    training = Training(rank)
    created_in: dict[int, int] = {}
    reads: list[str] = []
    number = 0
    is_copy_read = False
    create, read = HostCopy.__init__, HostCopy.read

    def create_noted(copy: HostCopy, values: torch.Tensor) -> None:
        create(copy, values)
        created_in[id(copy)] = number

    def read_noted(copy: HostCopy) -> list[float]:
        nonlocal is_copy_read
        if created_in[id(copy)] == number:
            reads.append(f"step {number}: HostCopy.read")
        is_copy_read = True
        try:
            return read(copy)
        finally:
            is_copy_read = False

    def noted(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any) -> Any:
            if not is_copy_read:
                reads.append(f"step {number}: {name}")
            return original(tensor, *args)

        return method

    guard = training.guard(run, decide)
    data = batches_of(rank)
    for batch in data[:6]:
        guard.step(batch, training.loss)
    HostCopy.__init__, HostCopy.read = create_noted, read_noted
    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        setattr(torch.Tensor, name, noted(name))
    created_in.update(dict.fromkeys(map(id, all_host_copies()), 0))
    for batch in data[6:]:
        number += 1
        guard.step(batch, training.loss)
    return reads


def all_host_copies() -> list[HostCopy]:
    """Return the copies that exist, such as that of the last step."""
    return [candidate for candidate in gc.get_objects() if isinstance(candidate, HostCopy)]


@pytest.mark.parametrize(("decide", "reads"), [("late", False), ("now", True)])
def test_a_warm_late_step_reads_only_values_of_the_step_before(
    tmp_path: Path, decide: str, reads: bool
) -> None:
    """The host reads nothing for which a device would have to catch up with it."""
    for returned in all_returned(run_ranks(read_values, 2, tmp_path, decide)):
        assert bool(returned) == reads, returned

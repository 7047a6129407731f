"""Steps of several ranks whose results are read one step later.

They end as they would if all ranks read each result at once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from tests.unit.guard.guarded import ask_for_too_much, assert_same, tensors_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.guard.run.undecided import UndecidedResult
from holdfast.memory.host_copy import HostCopy
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


class Ending(NamedTuple):
    """What a rank has at the end of a run, which must not depend on when steps are decided."""

    state: list[torch.Tensor]
    # For each step: loss, whether it was skipped, items, attempts, and gradient norms.
    results: list[tuple[Any, ...]]
    global_step: int
    steps: int
    skipped_steps: int
    # Further facts, which depend on the test.
    details: Any = None


def ending_of(
    training: Training,
    guard: holdfast.Guard,
    results: list[holdfast.StepResult],
) -> Ending:
    """Close the guard, and return what the rank has then."""
    guard.close()
    statistics = guard.statistics()
    values = [
        (result.loss.item(), result.skipped, result.items, result.attempts, result.grad_norm)
        for result in results
    ]
    return Ending(
        state=training.state(),
        results=values,
        global_step=statistics.global_step,
        steps=statistics.steps,
        skipped_steps=statistics.skipped_steps,
    )


def assert_late(results: list[holdfast.StepResult], decide: str, *, at_least: int) -> None:
    """Check that at least this many steps were decided late, so that a test is not vacuous."""
    if decide == "late":
        assert sum(isinstance(result, UndecidedResult) for result in results) >= at_least


def in_both_modes(function: Any, tmp_path: Path, *arguments: Any) -> list[Ending]:
    """Run a function on two ranks in both modes, and check that they end alike.

    Args:
        function: Function that trains on one rank, and returns its `Ending`.
        tmp_path: The directory for the two runs.
        *arguments: The arguments of `function` after the rank, the run directory and the mode.

    Returns:
        The endings of the ranks that have decided late, in order of rank.
    """
    now = all_returned(run_ranks(function, 2, tmp_path / "now", "now", *arguments))
    late = all_returned(run_ranks(function, 2, tmp_path / "late", "late", *arguments))
    for ending_now, ending_late in zip(now, late, strict=True):
        assert_same(ending_late.state, ending_now.state)
        # In the text, NaN equals NaN.
        assert repr(ending_late._replace(state=[])) == repr(ending_now._replace(state=[]))
    return late


def train_with_bad_batches(
    rank: int, run: Path, decide: str, bad: dict[int, set[int]], reading_ranks: set[int]
) -> Ending:
    """Train with a NaN in some batches of each rank; some ranks read each result at once."""
    training = Training(rank)
    data = batches_of(rank)
    for index in bad.get(rank, ()):
        data[index][3, 2] = float("nan")
    results = []
    guard = training.guard(run, decide)
    for batch in data:
        results.append(guard.step(batch, training.loss))
        if rank in reading_ranks:
            results[-1].loss.item()
    assert_late(results, decide, at_least=12)
    return ending_of(training, guard, results)


@pytest.mark.parametrize("reading_ranks", [set(), {0}, {0, 1}], ids=str)
@pytest.mark.parametrize(
    "bad",
    [{}, {1: {5}}, {0: {5}, 1: {6}}, {0: {15}}, {0: {0, 8}, 1: {8, 9, 10}}],
    ids=str,
)
def test_bad_batches_of_some_ranks_are_skipped_by_all(
    tmp_path: Path, bad: dict[int, set[int]], reading_ranks: set[int]
) -> None:
    """State and results equal those of decide="now", whichever ranks read their results early."""
    endings = in_both_modes(train_with_bad_batches, tmp_path, bad, reading_ranks)

    assert endings[0].skipped_steps == len(set().union(*bad.values()))


def train_out_of_memory(
    rank: int, run: Path, decide: str, failures: set[tuple[int, int, int]], where: str
) -> Ending:
    """Train with calls of the loss function that run out of memory.

    Args:
        rank: The rank.
        run: The run directory.
        decide: When to decide.
        failures: The calls that fail, each given as the step, the rank, and the number of the call
            in this step.
        where: Whether a call fails ``"before"`` or ``"after"`` the forward pass.
    """
    training = Training(rank)
    results = []
    guard = training.guard(run, decide, recompute=False)
    for step, batch in enumerate(batches_of(rank)):
        calls = iter(range(100))

        def loss(batch: torch.Tensor, step: int = step, calls: Iterator[int] = calls) -> Any:
            must_fail = (step, rank, next(calls)) in failures
            if must_fail and where == "before":
                ask_for_too_much()
            value = training.loss(batch)
            if must_fail and where == "after":
                ask_for_too_much()
            return value

        results.append(guard.step(batch, loss))
        # A script may add up losses, also in the step that has failed on one of the ranks.
        assert results[-1].loss.isfinite() or len(failures) == 2
    assert_late(results, decide, at_least=3)
    ending = ending_of(training, guard, results)
    ending = ending._replace(details=guard.statistics().out_of_memory)
    if len(failures) > 1:
        # An attempt that is undone because the step before was refused does not count.
        ending = ending._replace(results=[values[:3] for values in ending.results])
    return ending


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(
    "failures",
    [{(7, 1, 0)}, {(7, 0, 0), (7, 1, 0)}, {(7, 1, 0), (8, 1, 0)}, {(15, 0, 0)}],
    ids=str,
)
def test_all_ranks_repeat_a_step_for_which_one_has_no_memory(
    tmp_path: Path, failures: set[tuple[int, int, int]], where: str
) -> None:
    """A rank that runs out of memory loses nothing, even if it fails again in the next step."""
    in_both_modes(train_out_of_memory, tmp_path, failures, where)


def train_with_one_buffer(rank: int, run: Path, decide: str) -> list[int]:
    """Train with one tensor that the loop fills with every batch; one step has no memory."""
    training = Training(rank)
    guard = training.guard(run, decide, recompute=False)
    batch = torch.zeros(8, 8)
    for step, values in enumerate(batches_of(rank)):
        batch.copy_(values)
        calls = iter(range(100))

        def loss(batch: torch.Tensor, step: int = step, calls: Iterator[int] = calls) -> Any:
            if (step, rank, next(calls)) == (6, 1, 0):
                ask_for_too_much()
            return training.loss(batch)

        guard.step(batch, loss)
    return [guard.statistics().skipped_steps]


def test_a_step_cannot_be_repeated_after_its_batch_was_overwritten(tmp_path: Path) -> None:
    """The error is H208 on all ranks; a step that is decided now is repeated in time."""
    late = run_ranks(train_with_one_buffer, 2, tmp_path / "late", "late")
    now = all_returned(run_ranks(train_with_one_buffer, 2, tmp_path / "now", "now"))

    assert all("H208" in (end.raised or "") for end in late), late
    assert now == [[0], [0]]


def train_with_optimizer_failure(rank: int, run: Path, decide: str, failed_call: int) -> Ending:
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
    return ending_of(training, guard, results)


def test_an_optimizer_that_fails_in_a_step_decided_now_takes_the_state_of_another_rank(
    tmp_path: Path,
) -> None:
    """The step after it is late, so its rank cannot make it, and all ranks repeat it."""
    ends = in_both_modes(train_with_optimizer_failure, tmp_path, 0)

    assert ends[0].state[0].equal(ends[1].state[0])


def test_an_optimizer_that_fails_in_a_late_step_ends_all_ranks(tmp_path: Path) -> None:
    """The other ranks have already continued, so the error is H402, and says so."""
    ends = run_ranks(train_with_optimizer_failure, 2, tmp_path, "late", 6)

    assert all("H402" in (end.raised or "") for end in ends), ends


def leave_the_loop(rank: int, run: Path, decide: str, last: int, then: str) -> Ending:
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
    assert_late(results, decide, at_least=last - 2)
    return ending_of(training, guard, results)


@pytest.mark.parametrize("then", ["close", "validate", "continue"])
def test_a_step_that_was_refused_before_break_is_repeated_later(tmp_path: Path, then: str) -> None:
    """All ranks repeat it at their next joint call, for which the run is opened again."""
    ends = in_both_modes(leave_the_loop, tmp_path, 6, then)

    assert ends[0].skipped_steps == 1


def train_over_epochs(
    rank: int, run: Path, decide: str, interval: int, last: int, stops: bool
) -> Ending:
    """Train for three epochs with saves, and perhaps a stop that one rank requests.

    Args:
        rank: The rank.
        run: The run directory.
        decide: When to decide.
        interval: The number of steps between two saves.
        last: The size of the last batch of an epoch on rank 0. It is one larger on rank 1.
        stops: Whether rank 1 requests a stop.
    """
    training = Training(rank)
    loader = batches_of(rank, steps=5, last=last + rank)
    results = []
    guard = training.guard(run, decide, loader, save_interval_steps=interval, async_save=False)
    for step, batch in enumerate(guard.batches(max_epochs=3)):
        results.append(guard.step(batch, training.loss))
        if stops and rank == 1 and step == 7:
            guard.request_stop("enough")
    assert_late(results, decide, at_least=3)
    ending = ending_of(training, guard, results)
    if rank != 0:
        return ending
    saved = [event.global_step for event in guard.events() if event.kind == "checkpoint_saved"]
    return ending._replace(details=saved)


@pytest.mark.parametrize("last", [8, 4, 7], ids=str)
@pytest.mark.parametrize("interval", [1, 3, 4], ids=str)
def test_saves_are_made_at_the_same_steps(tmp_path: Path, interval: int, last: int) -> None:
    """A save that is due after a late step is made after this step."""
    in_both_modes(train_over_epochs, tmp_path, interval, last, False)


def test_a_stop_on_one_rank_reaches_all(tmp_path: Path) -> None:
    """All ranks stop at the same step, at most one step later than with decide="now"."""
    steps = {}
    for decide in ("now", "late"):
        ranks = run_ranks(train_over_epochs, 2, tmp_path / decide, decide, 3, 8, True)
        steps[decide] = [ending.global_step for ending in all_returned(ranks)]

    assert steps["late"][0] == steps["late"][1]
    assert steps["late"][0] - steps["now"][0] in (0, 1)


def train_with_reason_on_one_rank(rank: int, run: Path, decide: str, reason: str) -> Ending:
    """Train with two NaN, and with a reason to read each result at once on rank 1 only."""
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
    ending = ending_of(training, guard, results)
    if rank == 0:
        assert_late(results, decide, at_least=10)
    elif decide == "late":
        # Once the reason is known, only the refused steps are left undecided.
        undecided = [
            step for step, result in enumerate(results) if isinstance(result, UndecidedResult)
        ]
        assert [step for step in undecided if step > 4] == [6, 9]
    return ending


@pytest.mark.parametrize("reason", ["replaced buffer", "shared generator"])
def test_one_rank_may_have_to_read_each_result(tmp_path: Path, reason: str) -> None:
    """The other ranks continue to decide late, and all ranks agree on each step."""
    in_both_modes(train_with_reason_on_one_rank, tmp_path, reason)


def train_with_items(rank: int, run: Path, decide: str) -> Ending:
    """Train with a number of items that only the device knows, and that differs between ranks."""
    training = Training(rank)
    results = []
    guard = training.guard(run, decide)
    data = batches_of(rank)
    for step, batch in enumerate(data):
        count = 3 + (5 * step + rank) % 6

        def loss(batch: torch.Tensor, count: int = count) -> holdfast.Loss:
            counted_samples = batch[:count]
            return holdfast.Loss(training.loss(counted_samples), items=torch.tensor(float(count)))

        results.append(guard.step(batch, loss))
    assert_late(results, decide, at_least=12)
    return ending_of(training, guard, results)


def test_gradients_are_weighted_by_items_that_only_the_device_knows(tmp_path: Path) -> None:
    """The mean is over the items of all ranks, whatever their numbers."""
    in_both_modes(train_with_items, tmp_path)


def train_with_items_on_one_device(rank: int, run: Path, decide: str) -> Ending:
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
    ending = ending_of(training, guard, results)
    return ending._replace(details=[p.detach().clone() for p in training.model.parameters()])


def test_ranks_stay_equal_if_only_some_hosts_know_the_number_of_items(tmp_path: Path) -> None:
    """All ranks divide by the same reference, so they multiply by the same factor."""
    ends = in_both_modes(train_with_items_on_one_device, tmp_path)

    assert_same(ends[0].details, ends[1].details)


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
    """The error is H116 on all ranks, even if the optimizers run before it is noticed."""
    ranks = run_ranks(train_out_of_step, 2, tmp_path, "late")

    assert all("H116" in (rank.raised or "") for rank in ranks), ranks


def train_with_a_spike(
    rank: int, run: Path, decide: str, action: str, rank_that_decides_now: int | None
) -> Ending:
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
    ending = ending_of(training, guard, results)
    kinds = [event.kind for event in guard.events() if event.kind in ("spike", "skip_step")]
    return ending._replace(details=kinds if rank == 0 else None)


@pytest.mark.parametrize("rank_that_decides_now", [None, 0])
@pytest.mark.parametrize(("action", "kind"), [("skip", "skip_step"), ("warn", "spike")])
def test_a_spike_is_handled_by_all_ranks(
    tmp_path: Path, action: str, kind: str, rank_that_decides_now: int | None
) -> None:
    """The gate and the host judge a spike alike, on all ranks, and it is recorded once."""
    ends = in_both_modes(train_with_a_spike, tmp_path, action, rank_that_decides_now)

    assert ends[0].details == [kind]


class ReadRecorder:
    """Records where the host reads a value that the device has computed in the same step.

    A `HostCopy` may be read in a later step than the one in which it was created, since the device
    has then already computed its values.
    """

    def __init__(self) -> None:
        self.step = 0
        self.reads: list[str] = []
        # The step in which each `HostCopy` was created, by the id of the copy.
        self._created_in: dict[int, int] = {}
        # The tensors in host memory that `HostCopy.read` has returned.
        self._copies: list[torch.Tensor] = []

    def install(self) -> None:
        """Replace the methods that read values, for the rest of the process.

        Call this at the beginning of a step.
        """
        copies = [candidate for candidate in gc.get_objects() if isinstance(candidate, HostCopy)]
        self._created_in = {id(copy): self.step - 1 for copy in copies}
        self._replace_init(HostCopy.__init__)
        self._replace_copy_read(HostCopy.read)
        for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
            self._replace_tensor_method(name, getattr(torch.Tensor, name))

    def _replace_init(self, original: Any) -> None:
        def init(copy: HostCopy, *args: Any, **kwargs: Any) -> None:
            original(copy, *args, **kwargs)
            self._created_in[id(copy)] = self.step

        HostCopy.__init__ = init

    def _replace_copy_read(self, original: Any) -> None:
        def read(copy: HostCopy) -> torch.Tensor:
            if self._created_in[id(copy)] == self.step:
                self.reads.append(f"step {self.step}: HostCopy.read")
            self._copies.append(original(copy))
            return self._copies[-1]

        HostCopy.read = read

    def _replace_tensor_method(self, name: str, original: Any) -> None:
        def method(tensor: torch.Tensor, *args: Any) -> Any:
            if not any(tensor is copy for copy in self._copies):
                self.reads.append(f"step {self.step}: {name}")
            return original(tensor, *args)

        setattr(torch.Tensor, name, method)


def read_values(rank: int, run: Path, decide: str) -> list[str]:
    """Train, and return where the steps after the first few read values of their own."""
    training = Training(rank)
    guard = training.guard(run, decide)
    recorder = ReadRecorder()
    for step, batch in enumerate(batches_of(rank)):
        recorder.step = step
        if step == 6:
            recorder.install()
        guard.step(batch, training.loss)
    return recorder.reads


@pytest.mark.parametrize(("decide", "reads"), [("late", False), ("now", True)])
def test_a_warm_late_step_reads_only_values_of_the_step_before(
    tmp_path: Path, decide: str, reads: bool
) -> None:
    """The host never waits for the device to compute a value of the current step."""
    for returned in all_returned(run_ranks(read_values, 2, tmp_path, decide)):
        assert bool(returned) == reads, returned


def train_with_diagnosis(rank: int, run: Path, decide: str) -> Ending:
    """Train with the diagnosis, a NaN on one rank, and layers whose gradients are all 0."""
    training = Training(rank)
    with torch.no_grad():
        # Behind this bias, GELU returns 0 for all inputs.
        training.model.module[1].bias.fill_(-100.0)
    data = batches_of(rank, steps=60)
    if rank == 1:
        data[6][0, 0] = float("nan")
    results = []
    guard = training.guard(run, decide, data, diagnose=True, spike_action="off")
    for batch in guard.batches(max_epochs=1):
        results.append(guard.step(batch, training.loss))
    assert_late(results, decide, at_least=50)
    ending = ending_of(training, guard, results)
    findings = [event.data["rule"] for event in guard.events() if event.kind == "finding"]
    return ending._replace(details=findings)


def test_the_diagnosis_finds_the_same(tmp_path: Path) -> None:
    """A step that the diagnosis samples is decided late, too."""
    ends = in_both_modes(train_with_diagnosis, tmp_path)

    assert ends[0].details

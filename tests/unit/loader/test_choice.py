"""The choice of workers from a few measured batches: what it takes, what it leaves out, what limits it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loader.tuning.choice import LoaderPlan, Pace, decide_workers, pace_of
from holdfast.loader.tuning.machine import Machine
from holdfast.loader.tuning.preflight import Load
from holdfast.loader.tuning.probing import Sample, Transfer

MIB = 2**20
CHEAP = Transfer(hand_over_seconds=0.0005, hand_over_cpu_seconds=0.0003, worker_seconds=0.0002)
MACHINE = Machine(cpu_quota=4, shared_memory_free_bytes=2**34, memory_available_bytes=2**35, open_files_limit=4096)
LOAD = Load(num_workers=0, batch_bytes=MIB, batch_tensors=2)


def batch(load: float, step: float, *, cpu: float = 0.0, step_cpu: float = 0.0, queued: float = 0.0) -> Sample:
    """Times of a batch in milliseconds."""
    return Sample(
        load_seconds=load / 1e3,
        load_cpu_seconds=cpu / 1e3,
        step_seconds=step / 1e3,
        step_cpu_seconds=step_cpu / 1e3,
        queued_seconds=queued / 1e3,
    )


def plan_for(*samples: Sample, machine: Machine = MACHINE, load: Load = LOAD, **how: int | None) -> LoaderPlan:
    return decide_workers(pace_of(samples, CHEAP), machine, load, **how)


@pytest.mark.parametrize(("load", "step"), [(40, 20), (80, 30), (16, 50), (200, 33), (10, 100), (49, 10)])
def test_samples_that_wait_get_as_many_workers_as_hide_the_wait(load: float, step: float) -> None:
    """Loading that waits needs load / step workers with a margin, however few processors there are."""
    plan = plan_for(*[batch(load, step, step_cpu=step)] * 8, machine=replace(MACHINE, cpu_quota=1))
    least = math.ceil(load / step)
    assert least <= plan.num_workers <= math.ceil(1.3 * load / step)
    assert plan.chosen.wait_share < 0.06
    assert plan.prefetch_factor == 2


def test_samples_that_compute_get_no_more_workers_than_processors_help() -> None:
    """On two processors, of which training takes half a one, a third worker on computed samples is not worth it."""
    plan = plan_for(*[batch(30, 5, cpu=30, step_cpu=5)] * 8, machine=replace(MACHINE, cpu_quota=2))
    assert plan.num_workers == 2
    rates = [option.batches_per_second for option in plan.options]
    assert max(rates) == pytest.approx(2 / 0.0355, rel=0.02), "two processors, 35.5 ms of work for each batch"
    assert "2 processors are busy" in plan.reason


def test_one_processor_gains_nothing_from_workers_that_compute() -> None:
    """Loading and training that both compute, on one processor: in the training process, without sending anything."""
    plan = plan_for(*[batch(10, 10, cpu=10, step_cpu=10)] * 8, machine=replace(MACHINE, cpu_quota=1))
    assert (plan.num_workers, plan.prefetch_factor) == (0, None)


def test_tiny_samples_stay_in_the_training_process() -> None:
    """A batch that loads faster than it can be sent is loaded where it is used."""
    plan = plan_for(*[batch(0.2, 1, cpu=0.2, step_cpu=1)] * 8)
    assert plan.num_workers == 0
    assert "costs time too" in plan.reason


def test_warm_up_does_not_mislead() -> None:
    """A first batch that opens files, and two steps that compile, change nothing about the choice."""
    usual = [batch(40, 20)] * 5
    cold = plan_for(batch(900, 30_000), batch(40, 8_000), *usual, batch(40, 20))
    assert cold.options == plan_for(*usual).options
    assert plan_for(*usual).num_workers in (2, 3)


def test_a_break_in_the_loop_does_not_mislead() -> None:
    """An evaluation between two batches is no training step; with it, one worker would have seemed enough."""
    samples = [batch(40, 20)] * 4 + [batch(40, 9000)] + [batch(40, 20)] * 3
    assert plan_for(*samples).num_workers == plan_for(*[batch(40, 20)] * 8).num_workers


def test_slow_batches_that_return_count() -> None:
    """Every fourth batch takes ten times as long: the mean decides, not the median, and queues become deeper."""
    samples = ([batch(10, 20)] * 3 + [batch(100, 20)]) * 2
    even = plan_for(*[batch(10, 20)] * 8)
    uneven = plan_for(*samples)
    assert even.num_workers == 1
    assert uneven.num_workers >= 2
    assert uneven.num_workers * (uneven.prefetch_factor or 0) > even.num_workers * (even.prefetch_factor or 0)


def test_time_without_a_processor_is_no_wait_for_a_disk() -> None:
    """Samples that compute while others take the processor look slow, and workers would not hide that."""
    busy = replace(MACHINE, cpu_quota=2)
    quiet = plan_for(*[batch(10, 10, cpu=10)] * 8, machine=busy)
    assert plan_for(*[batch(60, 10, cpu=10, queued=50)] * 8, machine=busy).num_workers == quiet.num_workers


def test_threads_of_a_load_are_added_up() -> None:
    """A load that used four threads for 10 ms takes 40 ms in a worker, which has one."""
    assert pace_of([batch(10, 5, cpu=40)], CHEAP).load_seconds == (0.04,)


def test_a_known_step_time_replaces_the_measured_one() -> None:
    """The command line knows the step, which it cannot run; it keeps a processor busy."""
    pace = pace_of([batch(40, 0)] * 4, CHEAP, step_seconds=0.02)
    assert (pace.step_seconds, pace.step_cpu_seconds) == ((0.02,), 0.02)


@pytest.mark.parametrize(
    ("machine", "most"),
    [
        (replace(MACHINE, shared_memory_free_bytes=5 * MIB), 4),  # four workers, one batch under way each, one in use
        (replace(MACHINE, memory_available_bytes=190 * MIB), 2),  # of 90 MiB each
        (replace(MACHINE, open_files_limit=35), 3),
    ],
)
def test_what_the_machine_lacks_limits_the_choice_and_is_said(machine: Machine, most: int) -> None:
    """Shared memory, memory and descriptors each end the row of options, and the reason says so."""
    plan = plan_for(*[batch(100, 10)] * 8, machine=machine)
    assert 1 <= plan.num_workers <= most
    assert all(option.fits == (option.num_workers <= plan.num_workers) for option in plan.options)
    assert "do not suffice" in plan.reason


def test_short_epochs_do_not_repay_the_start_of_workers() -> None:
    """With workers started anew every ten batches by spawning, loading in place is faster; for ever, it is not."""
    samples, spawned = [batch(20, 20)] * 8, replace(LOAD, start_method="spawn")
    assert plan_for(*samples, load=spawned, batches_per_start=10).num_workers == 0
    assert plan_for(*samples, load=spawned, batches_per_start=100_000).num_workers >= 1


def test_either_number_can_be_fixed() -> None:
    """The one that the user gave is kept, and the other one decided."""
    samples = ([batch(10, 20)] * 3 + [batch(100, 20)]) * 2
    assert plan_for(*samples, num_workers=3).num_workers == 3
    assert plan_for(*samples, prefetch_factor=5).prefetch_factor == 5
    assert len(plan_for(*samples, most_workers=2).options) == 3
    assert plan_for(*samples, num_workers=0).prefetch_factor is None


def times(most: float) -> st.SearchStrategy[tuple[float, ...]]:
    return st.lists(st.floats(1e-6, most), min_size=1, max_size=8).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Pace, load_seconds=times(0.5), load_cpu_seconds=st.floats(0, 0.5), step_seconds=times(0.5),
        step_cpu_seconds=st.floats(0, 0.5), transfer=st.just(CHEAP),
    ),
    st.builds(
        Machine, cpu_quota=st.floats(0.1, 8), shared_memory_free_bytes=st.integers(0, 40 * MIB),
        memory_available_bytes=st.integers(0, 900 * MIB),
    ),
)  # fmt: skip
def test_the_choice_is_the_smallest_good_option_that_fits(pace: Pace, machine: Machine) -> None:
    """For any times and any machine: nothing that fits is 2 % better, nothing smaller is as good, no rate is odd."""
    plan = decide_workers(pace, machine, LOAD)
    fitting = [option for option in plan.options if option.fits]
    best = max(option.batches_per_second for option in fitting)
    assert plan.chosen in fitting
    assert plan.chosen.batches_per_second >= 0.98 * best
    assert all(o.batches_per_second < 0.98 * best for o in fitting if o.num_workers < plan.num_workers)
    assert all(math.isfinite(o.batches_per_second) and 0 <= o.wait_share <= 1 for o in plan.options)
    assert all((o.prefetch_factor is None) == (o.num_workers == 0) for o in plan.options)
    assert plan.reason

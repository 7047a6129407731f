"""Looking again at a loader that runs, against simulated loops: it follows a real change and never flaps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.loader.tuning.choice import Pace
from holdfast.loader.tuning.machine import Machine
from holdfast.loader.tuning.preflight import Load
from holdfast.loader.tuning.probing import Transfer
from holdfast.loader.tuning.retuning import Watch, decide_again

TRANSFER = Transfer(hand_over_seconds=0.0005, hand_over_cpu_seconds=0.0003, worker_seconds=0.0002)
MACHINE = Machine(cpu_quota=4, shared_memory_free_bytes=2**34, memory_available_bytes=2**35)
LOAD = Load(num_workers=0, batch_bytes=2**20, batch_tensors=1)
STEP = 0.02


def pace(load: float, cpu: float = 0.0) -> Pace:
    return Pace(
        load_seconds=(load,), load_cpu_seconds=cpu, step_seconds=(STEP,), step_cpu_seconds=STEP, transfer=TRANSFER
    )


def run(
    watch: Watch,
    wait_of: Callable[[int, int], float],
    *,
    batches: int = 50_000,
    seen: Pace | None = None,
    noise: float = 0.2,
    batches_per_start: int | None = None,
) -> list[int]:
    """Return each number of workers that was used, in a loop that waits `wait_of(workers, batch)` for each batch."""
    drawn = random.Random(3)
    used, number = [watch.num_workers], 0
    while number < batches:
        count = watch.look_after_batches
        waits = [
            wait_of(watch.num_workers, n) * drawn.uniform(1 - noise, 1 + noise) for n in range(number, number + count)
        ]
        steps = [STEP * drawn.choice([0.9, 1.0, 1.1]) for _ in waits]
        steps[count // 2] = 60.0  # an evaluation
        number += count
        watch = decide_again(
            watch,
            waits,
            steps,
            pace=seen or pace(0.02),
            machine=MACHINE,
            load=LOAD,
            batches_per_start=batches_per_start,
        )
        if watch.num_workers != used[-1]:
            used.append(watch.num_workers)
    return used


def of_a_set(load: float) -> Callable[[int, int], float]:
    """Return the waits of samples that workers load at the same time, each batch in `load` seconds."""
    return lambda workers, _: max(0.0, load / max(workers, 1) - (STEP if workers else 0.0)) + 0.0005


def test_a_loop_that_does_not_wait_is_left_alone() -> None:
    """Waits below a tenth of the time, noise and evaluations change nothing."""
    assert run(Watch(num_workers=2, prefetch_factor=2), of_a_set(0.041)) == [2]


@pytest.mark.parametrize("load", [0.06, 0.1])
def test_workers_are_added_when_samples_become_slower(load: float) -> None:
    """From the middle of the run on loading takes longer: one raise reaches what hides it, and stays."""
    slow, quick = of_a_set(load), of_a_set(0.03)
    used = run(
        Watch(num_workers=2, prefetch_factor=2), lambda workers, n: (slow if n > 20_000 else quick)(workers, n)
    )
    assert used[0] == 2
    assert len(used) <= 3
    assert load / STEP <= used[-1] <= 1.7 * load / STEP


def test_loading_in_the_training_process_can_get_workers() -> None:
    """Without workers the waits are the load times, and workers are started once they are worth it."""
    used = run(Watch(num_workers=0, prefetch_factor=None), of_a_set(0.05))
    assert used[0] == 0
    assert 3 <= used[-1] <= 5


def test_a_raise_that_does_not_help_is_taken_back_and_seldom_tried_again() -> None:
    """A disk that gives no more, however many read: few raises in 200 000 batches, each taken back, further apart."""
    used = run(Watch(num_workers=2, prefetch_factor=2), lambda workers, n: 0.03, batches=200_000)
    assert used[-1] == 2 or used[-2] == 2
    assert 2 <= len(used) <= 50
    assert set(used[::2]) == {2}
    early = run(Watch(num_workers=2, prefetch_factor=2), lambda workers, n: 0.03, batches=5_000)
    assert len(early) > len(used) / 8, "most of the trials come early"


def test_noise_alone_never_flaps() -> None:
    """Waits that vary between nothing and twice their mean, around the threshold, cause a change or two at most."""
    assert len(run(Watch(num_workers=3, prefetch_factor=2), of_a_set(0.0665), noise=1.0)) <= 3


def test_no_worker_is_added_where_the_processors_are_the_limit() -> None:
    """Samples that compute on processors that are all busy: waiting, but nothing to gain."""
    watch = Watch(num_workers=4, prefetch_factor=2)
    assert run(watch, lambda workers, n: 0.01, seen=pace(0.09, cpu=0.09)) == [4]


def test_a_restart_must_pay_within_an_epoch() -> None:
    """Where epochs are short, workers that are started anew in each are not added."""
    watch = Watch(num_workers=1, prefetch_factor=2)
    assert run(watch, of_a_set(0.06), batches=500, batches_per_start=1) == [1]
    assert run(watch, of_a_set(0.06), batches=500, batches_per_start=5000) != [1]


def test_too_few_batches_are_no_reason() -> None:
    """Batches that were under way when workers were started are not counted, and nothing is said of them alone."""
    watch = Watch(num_workers=8, prefetch_factor=8, look_after_batches=70)
    found = decide_again(watch, [1.0] * 70, [STEP] * 70, pace=pace(0.02), machine=MACHINE, load=LOAD)
    assert found == replace(watch, look_after_batches=128)


def test_steps_that_become_slower_within_a_look_are_looked_at() -> None:
    """The usual step is that of the batches that count: those before them may all have been quicker."""
    watch = Watch(num_workers=8, prefetch_factor=8)
    steps = [STEP / 2] * 64 + [5 * STEP] * 36
    found = decide_again(watch, [0.0] * 100, steps, pace=pace(0.02), machine=MACHINE, load=LOAD)
    assert found.num_workers == 8
    found = decide_again(watch, [1.0] * 100, steps, pace=pace(0.02), machine=MACHINE, load=LOAD)
    assert found.look_after_batches > watch.look_after_batches

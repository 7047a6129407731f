"""A batch that one rank passes without a step is an error on all at the next step.

One that all pass is none.
"""

from __future__ import annotations

import json

import pytest
import torch
from evals.fuzz.targets import forge
from tests.ranks.harness import all_returned, run_ranks
from tests.ranks.test_one_run import loss_of, made

import holdfast
from holdfast.checkpoint.store import Store
from holdfast.guard.splitting.window import Window

BATCHES = 8
SLOW = pytest.mark.slow


def guard_of(run, kind):
    model, optimizer = made(kind)
    data = torch.randn(4 * BATCHES, 6, generator=torch.Generator().manual_seed(1))
    loader = holdfast.DataLoader(list(enumerate(data.unbind())), batch_size=2, shuffle=True, seed=3)
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=loader, save_interval_steps=1
    )
    return guard, model


def skipping(rank, run, kind, skipped, limits):
    """Train, and pass the batches by the number `skipped` of each rank, as `if bad.

    Continue` does.
    """
    guard, model = guard_of(run, kind)
    begun_at, seen = guard.global_step, []
    for number, (indices, batch) in enumerate(guard.batches(**limits)):
        if number in skipped.get(rank, ()):
            continue
        seen += indices.tolist()
        guard.step(batch, loss_of(model))
    moved = [event.data["why"] for event in guard.events() if event.kind == "position_not_kept"]
    return begun_at, seen, guard.global_step, moved


@pytest.mark.parametrize(
    ("kind", "skipped", "limits", "named"),
    [
        ("replicated", {1: [3]}, {"max_steps": 6}, "rank 1 has skipped batch 3 of epoch 0"),
        ("replicated", {0: [3]}, {"max_epochs": 1}, "rank 0 has skipped batch 3 of epoch 0"),
        ("replicated", {1: [0]}, {"max_epochs": 1}, "rank 1 has skipped batch 0 of epoch 0"),
        (
            "replicated",
            {1: [2, 3]},
            {"max_steps": 6},
            "rank 1 has skipped batches 2 to 3 of epoch 0",
        ),
        (
            "replicated",
            {0: [BATCHES - 1]},
            {"max_epochs": 2},
            "the end of epoch 0, where it has skipped batch 7",
        ),
        pytest.param(
            "replicated",
            {0: [BATCHES - 1]},
            {"max_steps": 2 * BATCHES},
            "the end of epoch 0, where it has skipped batch 7",
            marks=SLOW,
        ),
        (
            "replicated",
            {0: [2], 1: [3]},
            {"max_epochs": 1},
            "rank 0 has skipped batch 2 of epoch 0",
        ),
        pytest.param(
            "resharded",
            {1: [3]},
            {"max_steps": 6},
            "rank 1 has skipped batch 3 of epoch 0",
            marks=SLOW,
        ),
        pytest.param(
            "resharded", {1: [7]}, {"max_epochs": 2}, "rank 1 is at the end of epoch 0", marks=SLOW
        ),
    ],
)
def test_a_batch_that_one_rank_skips_is_an_error_on_all(tmp_path, kind, skipped, limits, named):
    """It says which rank and which batch.

    Started again, all go on from the checkpoint of before.
    """
    for end in run_ranks(skipping, 2, tmp_path, kind, skipped, limits):
        assert "H116" in end.output, end
        assert named in end.output, end

    again = all_returned(run_ranks(skipping, 2, tmp_path, kind, {}, {"max_steps": 12}))
    assert [step for _, _, step, _ in again] == [12, 12]
    (begun_at, first, *_), (_, second, *_) = again
    assert begun_at <= min(min(numbers) for numbers in skipped.values())
    assert len(first) == len(second) == 2 * (12 - begun_at)


def test_a_batch_that_all_ranks_skip_is_passed_by_all(tmp_path):
    """They make the same steps with the same batches, and a restart takes none of them twice."""
    skipped = {0: [0, 3], 1: [0, 3]}
    first = all_returned(run_ranks(skipping, 2, tmp_path, "replicated", skipped, {"max_steps": 4}))
    rest = all_returned(run_ranks(skipping, 2, tmp_path, "replicated", {}, {"max_epochs": 1}))

    assert [step for _, _, step, _ in rest] == [BATCHES - 2] * 2
    taken = [index for _, seen, *_ in first + rest for index in seen]
    assert len(taken) == len({*taken}) == 4 * (BATCHES - 2)


def accumulating(rank, run, skipped):
    """Make each step with two batches; a rank that skips one has its steps a batch later."""
    guard, model = guard_of(run, "replicated")
    window = []
    for number, (_, batch) in enumerate(guard.batches(max_epochs=1)):
        if number in skipped.get(rank, ()):
            continue
        window.append(batch)
        if len(window) == 2:
            guard.step(Window(window), loss_of(model))
            window = []
    return guard.global_step


def test_a_batch_that_one_rank_leaves_out_of_a_window_is_an_error_on_all(tmp_path):
    """Other batches would be summed up from then on."""
    assert all_returned(run_ranks(accumulating, 2, tmp_path / "none", {})) == [BATCHES // 2] * 2
    for end in run_ranks(accumulating, 2, tmp_path / "one", {1: [2]}):
        assert "H116" in end.output, end
        assert "since the last step rank 1 has passed 2 batches, rank 0 1" in (end.raised or ""), (
            end
        )


def parting(rank, run, skipped):
    """Leave the loop at the third step of each rank, and begin to iterate once more."""
    guard, model = guard_of(run, "replicated")
    for number, (_, batch) in enumerate(guard.batches(max_epochs=1)):
        if number in skipped.get(rank, ()):
            continue
        if guard.global_step == 2:
            break
        guard.step(batch, loss_of(model))
    for _, batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
    return guard.global_step


def test_ranks_that_left_a_loop_at_different_batches_do_not_iterate_again(tmp_path):
    """No step has been mixed so far, and none will be."""
    assert len({*all_returned(run_ranks(parting, 2, tmp_path / "none", {}))}) == 1
    for end in run_ranks(parting, 2, tmp_path / "one", {1: [2]}):
        assert "H116" in (end.raised or ""), end


def test_a_checkpoint_of_ranks_at_different_batches_is_resumed(tmp_path):
    """Versions before this check wrote such.

    All go on from the place of the first rank, and an event says so.
    """
    all_returned(run_ranks(skipping, 2, tmp_path, "replicated", {}, {"max_steps": 3}))
    _move_ahead(Store(tmp_path / "checkpoints").entries()[0].path, rank=1)

    again = all_returned(run_ranks(skipping, 2, tmp_path, "replicated", {}, {"max_epochs": 1}))

    assert [(begun_at, len(seen), step) for begun_at, seen, step, _ in again] == [
        (3, 2 * (BATCHES - 3), BATCHES)
    ] * 2
    assert all(moved for *_, moved in again)


def _move_ahead(checkpoint, rank):
    file = checkpoint / "state.json"
    state = json.loads(file.read_text())
    position = state["training"]["ranks"]["each"][rank]["position"]
    position["batches"] += 1
    position["trained"] += 1
    file.write_text(json.dumps(state))
    forge(checkpoint)

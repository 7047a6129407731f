"""What ranks do in another order than others is an error on all; what only looks so is none."""

from __future__ import annotations

import pytest
from tests.ranks.harness import run_ranks
from tests.ranks.test_ranks import batches_of, loss_of, model_and_optimizer, weights

import holdfast


def guards_of(run):
    """Return two guards and their models."""
    models = [model_and_optimizer() for _ in range(2)]
    guards = [holdfast.Guard(run / str(at), model=model, optimizer=own) for at, (model, own) in enumerate(models)]
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

"""Traps around out-of-memory that other projects have shipped; each test fails on the naive code.

An allocation fails for real here, at a place of the test's choosing. A real memory limit is that of
tests/faults.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.own_process import in_own_process
from tests.unit.guard.guarded import (
    FailsHalfWay,
    Short,
    ask_for_too_much,
    assert_same,
    events,
    guarded,
    kinds_of,
    square_of,
    tensors_of,
    the_event,
)
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.testing import memory_limited


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ask_for_too_much()
        return gradient


def small_model(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), *extra, nn.Tanh(), nn.Linear(8, 1))


def failing_above(samples: int, loss: Any) -> Any:
    """Return a loss function that runs out of memory with more samples than these."""

    def limited(batch: Any) -> Any:
        first = batch[0] if isinstance(batch, tuple) else batch
        value = loss(batch)
        if len(first) > samples:
            ask_for_too_much()
        return value

    return limited


def test_adam_state_that_was_half_made_never_breaks_later_steps(tmp_path):
    """Out of memory while Adam makes its moments leaves no entry behind, and the next step is
    the bare loop's.
    """
    in_own_process(half_made, tmp_path)  # where no earlier test has left free memory


def half_made(run_dir: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(3072, 3072)  # larger than glibc's largest heap block
        return model, torch.optim.Adam(model.parameters(), foreach=False)

    data = torch.randn(4, 3072)
    naive_model, naive = make()
    naive_model(data).square().mean().backward()
    with memory_limited(54 * 2**20), pytest.raises(RuntimeError, match="allocate"):
        naive.step()  # enough for one moment of 36 MiB, not for two
    with pytest.raises(KeyError):
        naive.step()
    bare_model, bare = make()
    bare_model(data).square().mean().backward()
    bare.step()
    model, optimizer = make()
    guard = guarded(run_dir, model, optimizer)
    before = tensors_of(model, optimizer)
    with (
        memory_limited(54 * 2**20),
        pytest.raises(holdfast.OutOfMemoryError, match="state of the optimizer"),
    ):
        guard.step(data, square_of(model))
    assert_same(tensors_of(model, optimizer), before)
    guard.step(data, square_of(model))
    assert_same(tensors_of(model, optimizer), tensors_of(bare_model, bare))


def train_two(run_dir: Any, fail_at: int) -> tuple[holdfast.Guard, list[torch.Tensor], list[bool]]:
    """Train two networks with an optimizer each; the second optimizer fails at one of its calls."""
    torch.manual_seed(5)
    models = {"a": small_model(nn.BatchNorm1d(8)), "b": small_model(nn.Dropout(0.3))}
    optimizers = {
        "a": torch.optim.AdamW(models["a"].parameters(), lr=0.01),
        "b": FailsHalfWay(models["b"].parameters(), fail_at, lr=0.1, momentum=0.9),
    }
    schedulers = {
        name: torch.optim.lr_scheduler.StepLR(each, 2) for name, each in optimizers.items()
    }
    data = holdfast.DataLoader(torch.randn(24, 6).unbind(), batch_size=4, shuffle=True, seed=1)
    guard = guarded(
        run_dir, models, optimizers, scheduler=schedulers, loader=data, save_interval_steps=3
    )
    skipped = [
        guard.step(batch, lambda x: (models["a"](x) * models["b"](x)).square().mean()).skipped
        for batch in guard.batches(max_epochs=2)
    ]
    found = [*tensors_of(models["a"], optimizers["a"]), *tensors_of(models["b"], optimizers["b"])]
    return (
        guard,
        [*found, *(torch.tensor(each.get_last_lr()) for each in schedulers.values())],
        skipped,
    )


def test_an_optimizer_that_fails_half_way_is_not_retried_and_the_first_of_two_steps_once(tmp_path):
    """After an out-of-memory inside an optimizer the last good state comes back, and the run
    ends bit-identical.
    """
    _, undisturbed, _ = train_two(tmp_path / "a", fail_at=0)
    guard, found, skipped = train_two(tmp_path / "b", fail_at=5)
    assert_same(found, undisturbed)
    assert skipped.count(True) == 1
    back = the_event(guard, "roll_back")
    assert back.data["promise"] == "bit-exact"
    assert "optimizer 'b'" in back.data["reason"]
    assert (guard.statistics().rollbacks, guard.global_step) == (1, 12)


def test_without_a_checkpoint_a_half_made_step_is_an_error_and_never_saved(tmp_path):
    """Half-changed weights are neither trained on nor written as a checkpoint."""
    model = small_model()
    guard = guarded(tmp_path, model, FailsHalfWay(model.parameters(), 1, lr=0.1))
    with pytest.raises(holdfast.OutOfMemoryError, match="H402"):
        guard.step(torch.randn(4, 6), square_of(model))
    guard.close()
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_a_batch_is_trained_once_also_when_the_plan_grows_after_it(tmp_path):
    """Adapting after a good step does not run that batch again."""
    model, tight, passes = small_model(), True, []
    guard = guarded(tmp_path, model, check_split=False, grow_after_steps=2)

    def loss(x: torch.Tensor) -> torch.Tensor:
        passes.append(len(x))
        if tight and len(x) > 4:
            ask_for_too_much()
        return model(x).square().mean()

    results = []
    for number in range(8):
        tight = number == 0
        results.append(guard.step(torch.randn(8, 6), loss))
    assert [result.attempts for result in results] == [3] + [1] * 7
    assert [result.micro_batch_size for result in results] == [4, 4, 4, 8, 8, 8, 8, 8]
    assert sum(passes) == 8 + 8 + 8 * 8, "two failed attempts, and every batch once"
    assert kinds_of(guard, "retry", "split", "grow") == ["retry", "split", "grow"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_retry_moves_batch_norm_once_and_starts_with_empty_gradients(tmp_path, where):
    """A step that was retried leaves weights, statistics, momenta and random state of a step
    that was not.
    """

    def one_step(fail: bool) -> tuple[list[torch.Tensor], int]:
        model = small_model(nn.BatchNorm1d(8), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(7)
        short = Short(int(fail))

        def loss(x: torch.Tensor) -> torch.Tensor:
            hidden = model[0](x)
            if short.times and where == "backward":
                short.times -= 1
                # The gradients of later layers are there already
                hidden = FailsInBackward.apply(hidden)
            out = model[1:](hidden).square().mean()
            short()
            return out

        guard = guarded(tmp_path / str(fail), model, optimizer)
        data = torch.randn(16, 6)
        attempts = guard.step(data, loss).attempts
        guard.step(data, loss)
        return [*tensors_of(model, optimizer), torch.get_rng_state()], attempts

    expected, _ = one_step(fail=False)
    found, attempts = one_step(fail=True)
    assert attempts == 2
    assert_same(found, expected)


def test_the_failed_attempt_is_forgotten_before_the_next_one_begins(tmp_path):
    """No frame, traceback or context of the exception keeps the activations of a failed attempt
    alive.
    """
    model = small_model()
    held: list[weakref.ref[torch.Tensor]] = []
    alive_at_retry = []

    def deep(x: torch.Tensor, depth: int) -> torch.Tensor:
        activations = model[0](x)
        held.append(weakref.ref(activations))
        if depth:
            return deep(x, depth - 1)
        try:
            ask_for_too_much()
        except RuntimeError as error:
            raise RuntimeError("the caller's own words") from error
        return activations

    def loss(x: torch.Tensor) -> torch.Tensor:
        if not held:
            deep(x, depth=3)
        alive_at_retry.append(sum(ref() is not None for ref in held))
        return model(x).square().mean()

    assert guarded(tmp_path, model, check_split=False).step(torch.randn(4, 6), loss).attempts == 2
    assert alive_at_retry == [0]
    assert len(held) == 4


UNCUTTABLE = {
    "ragged": (
        nn.utils.rnn.pack_sequence([torch.ones(3, 6), torch.ones(2, 6)]),
        "batch[0] is a PackedSequence",
    ),
    "time first, targets flat": (
        torch.ones(5, 4, 6),
        "disagree on the number of samples: batch[0] (5, 4, 6)",
    ),
}


@pytest.mark.parametrize("case", UNCUTTABLE)
def test_what_cannot_be_cut_is_recorded_at_the_first_step_and_not_at_the_first_out_of_memory(
    tmp_path, caplog, case
):
    """Such a batch is an event before any memory is short.

    Nothing is printed, and training goes on.
    """
    x, why = UNCUTTABLE[case]
    model = small_model()
    guard = guarded(tmp_path, model)
    result = guard.step(
        (x, torch.ones(20)), lambda batch: model(x.data).square().mean() * batch[1].mean()
    )
    said = the_event(guard, "cannot_split")
    assert why in said.data["why"]
    assert "split=" in said.data["fix"]
    assert why not in caplog.text
    assert (result.micro_batch_size, result.skipped) == (None, False)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 96), nn.Linear(96, 6)

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def test_the_ladder_tries_the_exact_remedies_first(tmp_path):
    """Free and retry comes before recomputation, recomputation before a split, and each is an
    event in that order.
    """
    model = nn.Sequential(Residual(), Residual(), nn.Linear(6, 1))
    guard = guarded(tmp_path, model)
    result = guard.step(torch.randn(8, 512, 6), failing_above(2, square_of(model)))
    assert kinds_of(guard, "retry", "recompute", "split", "grow") == [
        "retry",
        "recompute",
        "split",
        "split",
    ]
    assert (result.attempts, result.micro_batch_size) == (5, 2)
    statistics = guard.statistics()
    assert (statistics.out_of_memory, statistics.micro_batch_size, statistics.recompute) == (
        4,
        2,
        True,
    )


@pytest.mark.parametrize("allowed", [False, True])
def test_batch_norm_is_split_only_when_allowed_by_name(tmp_path, caplog, allowed):
    """With BatchNorm in training a split is refused with the name that would allow it.

    Nothing is said about it while memory suffices.
    """
    model = small_model(nn.BatchNorm1d(8))
    guard = guarded(tmp_path, model, allow_split_with=("batch_norm",) if allowed else ())
    guard.step(torch.randn(8, 6), square_of(model))
    assert not events(guard, "split_refused", "promises")
    before = tensors_of(model)
    loss = failing_above(4, square_of(model))
    if allowed:
        assert not events(guard, "split_refused")
        assert guard.step(torch.randn(8, 6), loss).micro_batch_size == 4
        assert the_event(guard, "split").data["promise"] == "changes training"
    else:
        assert not caplog.records
        with pytest.raises(holdfast.OutOfMemoryError, match=r"(?s)BatchNorm1d.*allow_split_with"):
            guard.step(torch.randn(8, 6), loss)
        assert the_event(guard, "split_refused").data["allow_split_with"] == "batch_norm"
        assert_same(tensors_of(model), before)


@pytest.mark.parametrize("micro_batch_size", ["auto", 4])
def test_what_ends_the_run_is_said_by_its_error_alone(tmp_path, caplog, micro_batch_size):
    """A loss function that raises is no reason to speak of splitting first.

    Its own error is all that is shown.
    """
    model = small_model()
    guard = guarded(tmp_path, model, micro_batch_size=micro_batch_size)

    def loss(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("labels")

    with pytest.raises((KeyError, holdfast.BatchError)) as caught:
        guard.step(torch.randn(8, 6), loss)

    assert "labels" in str(caught.value)
    assert not caplog.records


def in_batch_negatives(model: nn.Module) -> Any:
    def loss(batch: Any) -> torch.Tensor:
        left, right = (F.normalize(model(part), dim=1) for part in batch)
        return F.cross_entropy(left @ right.T * 5, torch.arange(len(left)))

    return loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_couples_samples_is_found_out_before_it_is_split(tmp_path, dtype):
    """In-batch negatives are noticed when memory is short for the first time.

    Splitting is refused, or an error in the first step if asked for by number.
    """
    model = nn.Linear(6, 4, dtype=dtype)
    batch = (torch.randn(8, 6, dtype=dtype), torch.randn(8, 6, dtype=dtype))
    guard = guarded(tmp_path / "a", model)
    guard.step(batch, in_batch_negatives(model))
    assert not events(guard, "split_refused")
    with pytest.raises(
        holdfast.OutOfMemoryError, match=r"(?s)by \d+\.\d%.*Loss\(mean, items\).*TwoPass"
    ):
        guard.step(batch, failing_above(4, in_batch_negatives(model)))
    assert the_event(guard, "split_refused").data["allow_split_with"] == "coupled_loss"
    with pytest.raises(holdfast.HoldfastError, match="H207"):
        guarded(tmp_path / "b", model, micro_batch_size=2).step(batch, in_batch_negatives(model))


def test_a_loss_function_that_changes_its_batch_cannot_spoil_a_retry(tmp_path):
    """A retry sees the batch as it was, although the loss function works in place."""

    def train(run_dir: Any, fail: bool) -> list[torch.Tensor]:
        model, short = small_model(), Short(int(fail))

        def loss(batch: Any) -> torch.Tensor:
            batch["x"] -= 0.5
            batch["array"] *= 2
            short()
            return model(batch["x"] + float(batch["array"][0])).square().mean()

        torch.manual_seed(9)
        batch = {"x": torch.randn(4, 6), "array": np.ones(4, dtype=np.float32)}
        guarded(run_dir, model).step(batch, loss)
        return tensors_of(model)

    assert_same(train(tmp_path / "a", fail=True), train(tmp_path / "b", fail=False))


def test_an_error_that_is_no_out_of_memory_passes_through_and_leaves_no_trace(tmp_path):
    """A bug in the loss function reaches the caller as it is, with weights, buffers and random
    state untouched.
    """
    model = small_model(nn.BatchNorm1d(8), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters())
    guard = guarded(tmp_path, model, optimizer)
    guard.step(torch.randn(4, 6), square_of(model))
    batch = torch.randn(4, 6)
    before = [*tensors_of(model, optimizer), torch.get_rng_state()]

    def loss(x: torch.Tensor) -> torch.Tensor:
        model(x)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        guard.step(batch, loss)
    assert_same([*tensors_of(model, optimizer), torch.get_rng_state()], before)
    assert guard.step(torch.randn(4, 6), square_of(model)).attempts == 1


def test_a_token_mean_that_looked_exact_is_found_out_when_batches_become_ragged(tmp_path):
    """Sentences of one length hide that a mean is over tokens.

    While batches are split this is looked at again.

    A plain mean is then weighted by its tokens, exactly; one that is no weighted mean at all is
    refused.
    """
    model = nn.Linear(6, 1)

    def mean(batch: Any) -> torch.Tensor:
        x, mask = batch
        return (model(x).squeeze(2) * mask).sum() / mask.sum()

    even = torch.ones(8, 5)
    ragged = even * (torch.arange(5) < torch.tensor([5, 1, 4, 1, 3, 5, 1, 2]).unsqueeze(1))
    x = torch.randn(8, 1, 6).expand(8, 5, 6)
    guard = guarded(tmp_path / "linear", model)
    assert guard.step((x, even), failing_above(4, mean)).micro_batch_size == 4
    (wanted,) = torch.autograd.grad(mean((x, ragged)), [model.weight])
    assert guard.step((x, ragged), failing_above(4, mean)).micro_batch_size == 4
    torch.testing.assert_close(model.weight.grad, wanted)
    with pytest.raises(holdfast.OutOfMemoryError, match="not be split"):
        guarded(tmp_path, model).step(
            (x, ragged), failing_above(4, lambda batch: mean(batch).square())
        )


def test_a_split_is_tried_only_when_memory_is_short(tmp_path):
    """Six steps that fit are never tried in parts; the seventh, which does not fit, is.

    The first parts that the loss function receives are those of the trial, before any that train.
    """
    model = small_model()
    guard = guarded(tmp_path, model)
    sizes = tmp_path / "sizes"

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        with sizes.open("a") as file:  # copies of this process write to it as well
            file.write(f"{len(x)} ")
        return model(x).square().mean()

    def tried() -> bool:
        return {"3", "1"} <= set(sizes.read_text().split())

    for _ in range(6):
        guard.step(torch.randn(8, 6), loss_fn)
    assert not tried()
    assert not events(guard, "promises")

    result = guard.step(torch.randn(8, 6), failing_above(4, loss_fn))

    assert tried()
    assert result.micro_batch_size == 4
    assert kinds_of(guard, "retry", "promises", "split") == ["retry", "promises", "split"]
    assert the_event(guard, "split").data["promise"] == "equal up to rounding"


def test_a_resumed_run_that_must_not_split_runs_whole_batches(tmp_path):
    """A checkpoint holds a smaller micro-batch; with micro_batch_size=None it is not used."""
    model = small_model()
    with guarded(tmp_path, model, save_interval_steps=1) as guard:
        loss_fn = square_of(model)
        guard.step(torch.randn(8, 6), failing_above(4, loss_fn))
        assert guard.step(torch.randn(8, 6), loss_fn).micro_batch_size == 4

    model = small_model()
    with guarded(tmp_path, model, micro_batch_size=None) as guard:
        loss_fn = square_of(model)
        result = guard.step(torch.randn(8, 6), loss_fn)

    assert guard.resumed_from is not None
    assert result.micro_batch_size == 8


def test_a_split_is_not_tried_where_recomputing_is_enough(tmp_path):
    """Recomputing comes before a split, so a step that it saves says nothing about splits."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)), nn.Linear(6, 1)
    )
    guard, short = guarded(tmp_path, model), Short()

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        value = model(x).square().mean()
        short()
        return value

    for short.times in (0, 2):
        guard.step(torch.randn(4096, 6), loss_fn)

    assert kinds_of(guard, "retry", "recompute", "promises") == ["retry", "recompute"]


def test_what_could_not_be_found_out_is_not_promised(tmp_path):
    """A loss that cannot be tried on a few samples is not split, unless the caller says that it
    may be.
    """
    model = nn.Linear(6, 1)

    def picky(x: torch.Tensor) -> torch.Tensor:
        if len(x) < 8:
            raise ValueError("I want eight")
        ask_for_too_much()
        return model(x).square().mean()

    with pytest.raises(
        holdfast.OutOfMemoryError,
        match=r"(?s)could not show.*I want eight.*check_split=False",
    ):
        guarded(tmp_path, model).step(torch.randn(8, 6), picky)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("fails", [ask_for_too_much, lambda: os._exit(1)], ids=["refused", "ended"])
def test_where_onednn_lacks_memory_the_split_is_tried_without_it(tmp_path, fails):
    """Its kernels for a few samples are refused, or end the copy that tries.

    Another copy, without it, decides.
    """
    model, here = small_model(), os.getpid()
    guard = guarded(tmp_path, model)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != here and torch._C._get_mkldnn_enabled():
            fails()
        return model(x).square().mean()

    result = guard.step(torch.randn(8, 6), failing_above(4, loss_fn))
    assert the_event(guard, "promises").data["split"] == "possible"
    assert result.micro_batch_size == 4


def test_a_first_batch_of_nan_proves_nothing(tmp_path):
    """A verdict is made on numbers.

    After a batch of NaN the next one is tried, and coupling is found.
    """
    model = nn.Linear(6, 4)
    guard, loss = guarded(tmp_path, model), in_batch_negatives(model)
    bad = torch.full((8, 6), torch.nan)
    assert guard.step((bad, bad), loss).skipped
    good = (torch.randn(8, 6), torch.randn(8, 6))
    guard.step(good, loss)
    with pytest.raises(
        holdfast.OutOfMemoryError, match="not be split: the gradient over 4 samples differs"
    ):
        guard.step(good, failing_above(4, loss))


def test_a_rest_of_one_sample_is_not_given_to_batch_norm(tmp_path):
    """Where BatchNorm may be split, a rest of one sample joins the part before it."""
    model, sizes = small_model(nn.BatchNorm1d(8)), []
    model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    guard = guarded(tmp_path, model, allow_split_with=("batch_norm",), micro_batch_size=2)
    guard.step(torch.randn(5, 6), square_of(model))
    assert sizes == [2, 3]


def test_a_buffer_that_a_split_would_move_twice_is_found_before_the_first_step(tmp_path):
    """A codebook that each forward pass updates refuses a micro-batch size before anything was
    trained.
    """

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 1)
            self.register_buffer("used", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.used.data += 1
            return self.inner(x)

    model = Codebook()
    guard = guarded(tmp_path, model, micro_batch_size=2)
    with pytest.raises(holdfast.HoldfastError, match=r"(?s)'model.used'.*H206"):
        guard.step(torch.randn(8, 6), square_of(model))
    assert (float(model.used), guard.global_step) == (0, 0)


@pytest.mark.parametrize("coupled", [False, True])
def test_where_memory_is_short_for_gradients_the_losses_of_a_few_samples_decide(tmp_path, coupled):
    """If not even 2 samples can be differentiated, a split is found possible or coupled by its
    losses alone.
    """
    model = small_model()
    here = os.getpid()

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        if os.getpid() != here:
            out = FailsInBackward.apply(out)
        return out.std(correction=0) if coupled else out.square().mean()

    guard = guarded(tmp_path, model)
    with pytest.raises(holdfast.OutOfMemoryError) if coupled else contextlib.nullcontext():
        guard.step(torch.randn(8, 6), failing_above(4, loss_fn))
    assert the_event(guard, "promises").data["split_check"]["outcome"] == (
        "coupled" if coupled else "exact"
    )


@pytest.mark.parametrize("gains", [False, True])
def test_why_nothing_is_recomputed_is_said_once(tmp_path, gains):
    """Layers with their ReLU keep nothing more than their neighbours do.

    An event, and the next remedy.
    """
    activation = nn.GELU if gains else nn.ReLU
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), activation()) for _ in range(3)), nn.Linear(6, 1)
    )
    guard, short = guarded(tmp_path, model), Short()

    def loss(x: torch.Tensor) -> torch.Tensor:
        answer = model(x).square().mean()
        short()
        return answer

    for short.times in (0, 2, 3):
        guard.step(torch.randn(4096, 6), loss)
    tried = kinds_of(guard, "retry", "recompute_impossible", "recompute", "split")
    assert tried.count("recompute_impossible") == (0 if gains else 1)
    assert tried[1] == ("recompute" if gains else "recompute_impossible")


def trained_with_less(
    run_dir: Path, make_loss: Any, *, fails_at: int | None, failing: int = 2, **policy: Any
) -> Any:
    """Return parameters and the guard after four steps, of which one runs out of memory.

    ``step`` is the loss's.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), *(Residual() for _ in range(3)), nn.Linear(6, 1))
    guard = guarded(run_dir, model, **policy)
    step, short = 0, Short()

    def loss(x: torch.Tensor) -> torch.Tensor:
        value = make_loss(model, x, step)
        short()
        return value

    for step in range(4):
        short.times = failing if step == fails_at else 0
        guard.step(torch.randn(256, 4, generator=torch.Generator().manual_seed(step)), loss)
    return tensors_of(model), guard


def with_fast_weights(model: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
    weights = dict(model.named_parameters())
    if step >= 2:
        weights = {name: 1.1 * weight for name, weight in weights.items()}
    return (torch.func.functional_call(model, weights, (x,)) - 1).square().mean()


@pytest.mark.usefixtures("unchecked_splits")
@pytest.mark.parametrize("named", [False, True])
def test_fast_weights_that_begin_after_the_comparison_end_recomputation(tmp_path, named):
    """Whether measured or named by the policy.

    The modules are given up in that step, and the weights are right.
    """
    expected, _ = trained_with_less(tmp_path / "plain", with_fast_weights, fails_at=None)
    policy = {"recompute": ("1", "2", "3")} if named else {}
    found, guard = trained_with_less(
        tmp_path / "less", with_fast_weights, fails_at=None if named else 1, **policy
    )
    assert_same(found, expected)
    given_up = the_event(guard, "recompute_impossible")
    assert "its weights" in given_up.data["why"]
    assert given_up.data["modules"] == ["3"]


def of_meta_learning(model: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
    weights = dict(model.named_parameters())
    inner = torch.func.grad(
        lambda mine: torch.func.functional_call(model, mine, (x,)).square().mean()
    )(weights)
    fast = {name: weight - 0.1 * inner[name] for name, weight in weights.items()}
    return (torch.func.functional_call(model, fast, (x,)) - 1).square().mean()


@pytest.mark.usefixtures("unchecked_splits")
def test_a_loss_that_cannot_be_measured_is_trained_unmeasured(tmp_path):
    """torch.func.grad refuses the hooks that measure.

    That is said once, and the step is made without them.
    """
    expected, _ = trained_with_less(tmp_path / "plain", of_meta_learning, fails_at=None)
    found, guard = trained_with_less(tmp_path / "less", of_meta_learning, fails_at=1, failing=1)
    assert_same(found, expected)
    assert "saved tensor hooks" in the_event(guard, "recompute_impossible").data["why"]


@pytest.mark.usefixtures("unchecked_splits")
def test_a_named_block_that_draws_from_its_own_generator_is_not_recomputed(tmp_path):
    """The second time it would see other numbers.

    Its gradient would be that of other activations.
    """

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.own = nn.Linear(4, 4), torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x)) * torch.randn(x.shape, generator=self.own)

    model = nn.Sequential(Noisy(), nn.Linear(4, 1))
    guard = guarded(tmp_path, model, recompute=("0",), micro_batch_size=None)
    assert not guard.step(torch.randn(8, 4), square_of(model)).skipped
    assert the_event(guard, "recompute_impossible").data["modules"] == ["0"]
    guard.close()

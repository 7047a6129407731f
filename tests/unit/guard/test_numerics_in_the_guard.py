"""Spikes, rollbacks to host memory, and the origin of NaN, driven through the guard as a user
does.
"""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from tests.prepared import run_prepared
from tests.unit.guard.guarded import guarded, kinds_of
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import holdfast
from holdfast.core.errors import DivergenceError
from holdfast.learning.alignment import report_alignment
from holdfast.testing import FakeClock

pytestmark = pytest.mark.usefixtures("unchecked_splits")


def regression(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def noisy_batches(count: int, size: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(3)
    inputs = [torch.randn(size, 8, generator=chance) for _ in range(count)]
    return [(x, x.sum(1, keepdim=True) + torch.randn(size, 1, generator=chance)) for x in inputs]


def loss_of(model: nn.Module) -> Any:
    return lambda batch: F.mse_loss(model(batch[0]), batch[1])


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_batch_far_out_is_skipped_without_a_trace_and_noted_in_the_checkpoint(tmp_path):
    """One batch of huge targets after 200 usual ones changes no weight, no moment and no
    schedule.
    """
    model, optimizer = regression()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    batches = noisy_batches(202)
    batches[200] = (batches[200][0], batches[200][1] * 1e4)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=optimizer,
        scheduler=schedule,
        loader=batches,
        spike_action="skip",
    )
    seen: list[Any] = []
    for batch in guard.batches(max_epochs=1):
        before = digest(model, optimizer), copy.deepcopy(schedule.state_dict())
        result = guard.step(batch, loss_of(model))
        if result.skipped:
            seen.append(guard.global_step)
            assert same(before[0], digest(model, optimizer))
            assert before[1] == schedule.state_dict()
            assert "unusually high" in str(result.reason)
    assert seen == [200]
    assert "skip_step" in kinds_of(guard)


def test_a_task_that_changes_is_warned_of_and_trains_as_the_bare_loop_does(tmp_path):
    """A healthy run whose loss jumps for good loses no batch, and is not ended.

    By default nothing is acted on.
    """
    batches = [(x, y if at < 200 else 100 - y) for at, (x, y) in enumerate(noisy_batches(260))]
    bare, optimizer = regression()
    for batch in batches:
        optimizer.zero_grad()
        loss_of(bare)(batch).backward()
        optimizer.step()
    expected = digest(bare, optimizer)
    model, optimizer = regression()
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=batches)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
    assert "spike" in kinds_of(guard)
    assert same(expected, digest(model, optimizer))


def test_weights_that_were_damaged_are_rolled_back_to_a_copy_in_memory(tmp_path):
    """A blown-up weight brings back the copy from before, and the batches go on with the same
    rates.
    """
    model, optimizer = regression()
    first: Any = model[0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=optimizer,
        scheduler=schedule,
        loader=noisy_batches(400),
        save_interval_steps=None,
        snapshot_interval_steps=50,
        clock=FakeClock(),
        spike_action="roll_back",
    )
    good: list[torch.Tensor] = []
    returned = []
    for number, batch in enumerate(guard.batches(max_epochs=1)):
        if guard.global_step == 100 and not good:
            good = digest(model, optimizer)
        if number == 180:
            with torch.no_grad():
                first.weight.mul_(1000.0)
        result = guard.step(batch, loss_of(model))
        if result.reason and "rolled back" in result.reason:
            returned.append(guard.global_step)
            assert same(good, digest(model, optimizer))
    assert returned == [100], "the copy of step 150 was not called good yet"
    assert guard.statistics().rollbacks == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    last = loss_of(model)(noisy_batches(400)[-1]).item()
    assert last < 20, "the run is healthy at its end"


def test_a_run_that_runs_away_again_and_again_ends_with_a_verdict(tmp_path):
    """A rate that is far too high brings rollbacks, then DivergenceError with the way out.

    The checkpoint is good.
    """
    model, optimizer = regression()
    batches = noisy_batches(2000)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=optimizer,
        loader=batches,
        save_interval_steps=50,
        spike_action="roll_back",
    )
    with pytest.raises(DivergenceError, match=r"(?s)max_rollbacks=2.*H503"):
        for batch in guard.batches(max_epochs=1):
            if guard.global_step >= 120:
                for group in optimizer.param_groups:
                    group["lr"] = 3.0
            guard.step(batch, loss_of(model))
    assert kinds_of(guard).count("roll_back") == 2
    model, optimizer = regression(1)
    again = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=batches)
    assert loss_of(model)(batches[-1]).item() < 100
    again.close()


class Logarithm(nn.Module):
    """A model with a logarithm that a bad sample turns to NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(4, 4)
        self.scale = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.scale(torch.log(x)) + self.features(x).sum(1, keepdim=True)


def positive_batches(count: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return [torch.rand(8, 4, generator=chance) + 0.5 for _ in range(count)]


def test_the_message_names_operation_line_sample_and_numbers(tmp_path):
    """A skipped step says which operation, in which file, on which sample of the dataset, and
    why.
    """
    torch.manual_seed(0)
    model = Logarithm()
    samples = torch.cat(positive_batches(4))
    samples[21, 2] = -1.0
    loader = holdfast.DataLoader(samples, batch_size=8, shuffle=True, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=loader)
    reasons = []
    for batch in guard.batches(max_epochs=1):
        result = guard.step(batch, lambda x: model(x).square().mean())
        if result.skipped:
            reasons.append(str(result.reason))
    (reason,) = reasons
    for part in ("log", "test_numerics_in_the_guard.py", "dataset index 21", "-1"):
        assert part in reason
    (event,) = [event for event in guard.events() if event.kind == "nonfinite_origin"]
    assert event.data["dataset_indices"] == [21]
    assert len(event.data["bad_samples"]) == 1


def test_a_step_is_made_without_its_bad_samples_exactly(tmp_path):
    """With drop_nonfinite_samples the update is bit for bit that of the batch without them."""
    batches = positive_batches(3)
    spoilt = [batch.clone() for batch in batches]
    spoilt[1][2, 0] = math.nan
    spoilt[1][5] = -3.0
    kept = [0, 1, 3, 4, 6, 7]
    torch.manual_seed(0)
    model = Logarithm()
    plain = copy.deepcopy(model)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        drop_nonfinite_samples=True,
        save_interval_steps=None,
    )
    results = [guard.step(batch, lambda x: model(x).square().mean()) for batch in spoilt]
    assert [result.dropped_samples for result in results] == [(), (2, 5), ()]
    assert not any(result.skipped for result in results)
    assert results[1].items == 6
    optimizer = torch.optim.AdamW(plain.parameters())
    for batch in (batches[0], batches[1][kept], batches[2]):
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        optimizer.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert "samples_dropped" in kinds_of(guard)
    guard.close()


@pytest.mark.parametrize("drops", [False, True])
def test_a_micro_batch_of_nan_is_left_out_only_where_samples_may_be(tmp_path, drops):
    """Else the step is skipped, as that of a whole batch is."""
    batch = positive_batches(1)[0]
    batch[2] = math.nan
    model = Logarithm()
    guard = guarded(tmp_path, model, micro_batch_size=2, drop_nonfinite_samples=drops)
    result = guard.step(batch, lambda x: model(x).square().mean())
    assert result.skipped is not drops
    assert ("micro_batch_dropped" in kinds_of(guard)) is drops
    guard.close()


def test_a_sample_that_was_dropped_is_quarantine_from_the_next_epoch_on(tmp_path):
    """What provenance found comes no second time.

    It is in the ledger, with the reason, and replaced afterwards.
    """
    torch.manual_seed(0)
    model = Logarithm()
    data = list(torch.cat(positive_batches(3)))
    data[13] = torch.full_like(data[13], math.nan)
    loader = holdfast.DataLoader(data, batch_size=8, shuffle=True)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        loader=loader,
        drop_nonfinite_samples=True,
        save_interval_steps=None,
    )
    dropped = [
        guard.step(batch, lambda x: model(x).square().mean()).dropped_samples
        for batch in guard.batches(max_epochs=2)
    ]
    assert [len(each) for each in dropped[3:]] == [0, 0, 0]
    assert sum(len(each) for each in dropped[:3]) == 1
    (entry,) = loader.ledger
    assert (entry.index, entry.kind, entry.epoch) == (13, "provenance", 1)
    assert (tmp_path / "quarantine.json").exists()
    assert kinds_of(guard).count("sample_quarantined") == 1


def test_training_after_a_replay_is_what_it_would_be_without_one(tmp_path):
    """Dropout masks, BatchNorm statistics and moments after a traced failure are those of a run
    without tracing.
    """
    ends = []
    for provenance in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        guard = holdfast.Guard(
            tmp_path / str(provenance),
            model=model,
            optimizer=optimizer,
            provenance=provenance,
            save_interval_steps=None,
        )
        batches = noisy_batches(6)
        batches[3][0][4, 1] = math.nan
        for batch in batches:
            guard.step(batch, loss_of(model))
        ends.append([*digest(model, optimizer), *model.buffers(), torch.get_rng_state()])
        guard.close()
    assert same(*ends)


UNFINISHED = """
import sys, torch, holdfast
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
guard = holdfast.Guard(sys.argv[1], model=model, optimizer=optimizer, loader=[torch.randn(3, 4)] * 9)
batches = guard.batches(max_steps=50)
for _ in range(5):
    guard.step(next(batches), lambda x: model(x).square().mean())
"""


def test_a_loop_that_is_left_open_ends_with_the_process(tmp_path):
    """Torch aborts a process that still works with tensors while the interpreter goes.

    Nothing of ours may.
    """
    done = run_prepared(["-c", UNFINISHED, tmp_path], timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_model_can_be_copied_and_saved_in_the_loop_and_after_it(tmp_path):
    """Between steps it has no hook of ours.

    A copy, also of a watched one, has none that does anything.
    """
    model, optimizer = regression()
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=noisy_batches(5))
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
        torch.save(model, io.BytesIO())
    with holdfast.watch(model, optimizer) as watching:
        best = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        best(noisy_batches(1)[0][0])
        assert watching.facts()["inputs"]["model"]["calls"] == 0
    torch.save(best, io.BytesIO())


def test_sparse_moments_are_checked_and_saved(tmp_path):
    """Momentum of a sparse embedding.

    The run is saved, and what the diagnosis sees of it is no failure.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [(torch.randint(0, 20, (16,)), torch.randint(0, 3, (16,))) for _ in range(5)]
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=batches)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, lambda pair: F.cross_entropy(model(pair[0]), pair[1]))
    observer = guard._engine.diagnosis._observer
    assert observer is not None
    assert observer.failure is None
    again = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=batches)
    assert again.global_step == 5
    again.close()


def test_a_guarded_run_reports_that_its_attention_is_not_aligned(tmp_path):
    """What `report_alignment` is given is recorded, and judged at the end of the run."""
    model, optimizer = regression()
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=noisy_batches(5))
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
        report_alignment(
            guard, torch.full((8, 10, 10), 0.1), torch.full((8,), 10), torch.full((8,), 10)
        )
    assert "aligned" in kinds_of(guard)
    assert any(event.data.get("rule") == "H852" for event in guard.events())


def test_a_plateau_scheduler_that_is_told_late_is_left_in_peace(tmp_path):
    """Short epochs: the first evaluation comes after the third, or in a later life, or after the
    loop of an epoch.
    """

    def life(name: str, max_steps: int, *validate_at: int) -> holdfast.Guard:
        model, optimizer = regression()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        guard = holdfast.Guard(
            tmp_path / name,
            model=model,
            optimizer=optimizer,
            scheduler=plateau,
            loader=noisy_batches(2),
        )
        for batch in guard.batches(max_steps=max_steps):
            result = guard.step(batch, loss_of(model))
            if guard.global_step in validate_at:
                guard.validated(result.loss)
        return guard

    assert "schedulers_wait" not in kinds_of(life("late", 20, 15))
    life("lives", 20, 15)
    assert "schedulers_wait" not in kinds_of(life("lives", 40))
    life("each epoch", 2).validated(1.0)
    assert "schedulers_wait" not in kinds_of(life("each epoch", 4))
    assert kinds_of(life("never", 1002)).count("schedulers_wait") == 1


@pytest.mark.parametrize("every", [1, 4])
def test_a_plateau_scheduler_that_is_told_the_loss_of_each_batch_is_noticed(tmp_path, every):
    """H854, and not where it is told once in a while; nor is a resumed run mistaken for one."""
    for max_steps in (30, 60):
        model, optimizer = regression()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1000)
        guard = holdfast.Guard(
            tmp_path, model=model, optimizer=optimizer, scheduler=plateau, loader=noisy_batches(80)
        )
        for batch in guard.batches(max_steps=max_steps):
            result = guard.step(batch, loss_of(model))
            if guard.global_step % every == 0:
                guard.validated(result.loss)
    told = [
        event
        for event in guard.events()
        if event.kind == "finding" and event.data["rule"] == "H854"
    ]
    assert len(told) == (1 if every == 1 else 0)


def test_an_optimizer_of_the_last_layer_only_is_a_note(tmp_path):
    """H808: it may be meant, and a guard computes no gradient that nothing uses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.01)
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=noisy_batches(10))
    for batch in guard.batches(max_steps=5):
        guard.step(batch, loss_of(model))
    guard.close()

    notes = [event.data for event in guard.events() if event.kind == "note"]
    assert [note["rule"] for note in notes] == ["H808"]
    assert "0.weight" in notes[0]["what"]
    assert "finding" not in kinds_of(guard)


def test_what_is_only_said_on_request_is_no_event(tmp_path):
    """H828: random labels cannot be learnt; `diagnose` says so, the record does not."""
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [(torch.randn(32, 8), torch.randint(2, (32,))) for _ in range(210)]
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=batches)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, lambda pair: F.cross_entropy(model(pair[0]), pair[1]))

    assert "H828" in [finding.rule for finding in guard.diagnose()]
    assert all(event.data.get("rule") != "H828" for event in guard.events())


def by_jvp(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]


def by_jacfwd(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jacfwd(model)(x)


def by_dual(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


# `torch.func.jvp` calls it: torch warns of it with a DeprecationWarning up to 2.14, with a
# FutureWarning since then.
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("derivative", [by_jvp, by_jacfwd, by_dual])
def test_a_nan_of_a_loss_with_forward_derivatives_is_skipped_and_blames_nothing(
    tmp_path, derivative
):
    """Where the loss uses forward-mode AD, the search for the origin of NaN reads no dual tensor
    (a segfault).
    """
    model, optimizer = regression()
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, save_interval_steps=None)
    x = noisy_batches(1)[0][0]
    result = guard.step(x, lambda x: derivative(model, x).square().mean() * math.nan)
    assert result.skipped
    assert "forward-mode AD" in str(result.reason)
    assert "nonfinite_not_traced" in kinds_of(guard)
    assert not guard.step(x, lambda x: derivative(model, x).square().mean()).skipped
    guard.close()


@pytest.mark.parametrize("is_in_batch", [True, False])
def test_only_nan_that_training_made_is_answered_with_a_lower_rate(tmp_path, is_in_batch):
    """If the batch itself has NaN, H501 says how to find and leave out its samples."""
    model, optimizer = regression()
    inputs, targets = noisy_batches(1)[0]
    if is_in_batch:
        inputs[3, 2] = math.nan
        factor = 1.0
    else:
        factor = math.inf
    guard = guarded(tmp_path, model, optimizer, nonfinite_patience=1, max_rollbacks=0)

    with pytest.raises(holdfast.NonFiniteError) as caught:
        guard.step((inputs, targets), lambda batch: loss_of(model)(batch) * factor)

    assert caught.value.rule == "H501"
    assert ("drop_nonfinite_samples" in caught.value.fix) is is_in_batch
    assert ("learning rate" in caught.value.fix) is not is_in_batch

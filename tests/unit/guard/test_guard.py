"""The public face: a loop under a guard is the bare loop, and resumes, stops, evaluates and
saves as it says.
"""

from __future__ import annotations

import math
import random
import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.guard.guarded import guarded, kinds_of, square_of
from torch import nn

import holdfast
from holdfast.testing import FakeClock


@pytest.fixture(autouse=True)
def forks_where_they_could_show(request: pytest.FixtureRequest) -> None:
    """A run that is compared with a bare loop has the forks, and those of which all events are
    listed.
    """
    if not re.search("bare_loop|leak_nothing|results_and_events", request.node.name):
        request.getfixturevalue("unchecked_splits")


class Noisy(torch.utils.data.Dataset):
    """Samples with augmentation from all three sources of chance."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        base = torch.full((4,), float(index)) / 22
        return base + 0.1 * torch.rand(4) + 0.1 * random.random() + 0.1 * float(np.random.rand())


class Stream(torch.utils.data.IterableDataset):
    """Samples drawn at random while they are read."""

    def __iter__(self) -> Any:
        yield from (Noisy()[index] for index in range(22))


def make_parts() -> dict[str, Any]:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        "state": {"ema": torch.optim.swa_utils.AveragedModel(model)},
    }


def loss_of(model: nn.Module) -> Any:
    return lambda x: (model(x) - 1).square().mean()


def run(guard: holdfast.Guard, parts: dict[str, Any], **limits: int) -> None:
    for batch in guard.batches(**limits):
        guard.step(batch, loss_of(parts["model"]))


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def tensors_of(parts: dict[str, Any]) -> list[torch.Tensor]:
    found = [*parts["model"].state_dict().values(), *parts["state"]["ema"].state_dict().values()]
    for state in parts["optimizer"].state.values():
        found += list(state.values())
    return [*found, torch.tensor(parts["scheduler"].get_last_lr())]


def make_loader(kind: str) -> Any:
    if kind == "holdfast":
        return holdfast.DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3)
    if kind.startswith("stream"):
        return holdfast.DataLoader(
            Stream(), batch_size=4, num_workers=2 if "workers" in kind else 0
        )
    if kind == "generator":
        generator = torch.Generator().manual_seed(8)
        return torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator)
    return torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)


def train(run_dir: Any, kind: str, *, stop_after: int | None = None, epochs: int = 3) -> Any:
    """Train until the end, or until a stop after so many batches of this process."""
    parts = make_parts()
    seed(12)
    with holdfast.Guard(run_dir, loader=make_loader(kind), save_interval_steps=4, **parts) as guard:
        for number, batch in enumerate(guard.batches(max_epochs=epochs), start=1):
            guard.step(batch, loss_of(parts["model"]))
            parts["state"]["ema"].update_parameters(parts["model"])
            if number == stop_after:
                guard.request_stop("test")
    return guard, parts


def test_a_guarded_run_is_the_bare_loop_bit_for_bit(tmp_path):
    """Weights, statistics, moments, schedule, average and every loss equal those of plain
    PyTorch.
    """
    parts = make_parts()
    seed(12)
    bare = []
    for _ in range(3):
        for batch in make_loader("torch"):
            parts["optimizer"].zero_grad()
            loss = loss_of(parts["model"])(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parts["model"].parameters(), 0.3)
            parts["optimizer"].step()
            parts["scheduler"].step()
            parts["state"]["ema"].update_parameters(parts["model"])
            bare.append(loss.item())
    guarded = make_parts()
    seed(12)
    guard = holdfast.Guard(tmp_path, loader=make_loader("torch"), max_grad_norm=0.3, **guarded)
    found = []
    for batch in guard.batches(max_epochs=3):
        found.append(float(guard.step(batch, loss_of(guarded["model"])).loss))
        guarded["state"]["ema"].update_parameters(guarded["model"])
    assert found == bare
    assert all(
        torch.equal(a, b) for a, b in zip(tensors_of(guarded), tensors_of(parts), strict=True)
    )


undisturbed: dict[str, list[torch.Tensor]] = {}


@pytest.mark.parametrize(
    ("kind", "stop_after"),
    [
        *product(["holdfast", "torch", "generator"], [1, 4, 6, 7, 13]),
        ("stream", 9),
        ("stream with workers", 9),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit_at_any_batch(tmp_path, kind, stop_after):
    """Stopped in the middle or at the end of an epoch, the next guard ends where the undisturbed
    run ends.
    """
    if kind not in undisturbed:
        undisturbed[kind] = tensors_of(train(tmp_path / "a", kind)[1])
    first, _ = train(tmp_path / "b", kind, stop_after=stop_after)
    assert first.stop_reason == "test"
    assert first.global_step == stop_after
    second, found = train(tmp_path / "b", kind)
    assert second.resumed_from is not None
    assert second.global_step == 18
    assert second.epoch == 3
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(found), undisturbed[kind], strict=True))
    assert second.statistics().resumes == 1


def test_limits_count_over_all_restarts(tmp_path):
    """`max_steps` and `max_epochs` are totals: a finished run gives no batch again."""
    for _ in range(2):
        guard, _ = train(tmp_path, "holdfast", epochs=2)
        assert (guard.global_step, guard.epoch) == (12, 2)
    assert guard.statistics().steps == 12


def test_the_length_of_an_epoch_is_recorded_of_each_at_first_and_then_a_few_times(
    tmp_path, monkeypatch
):
    """What tells how long the run will take, and never fills the ring.

    No steps of one that was cut.
    """
    monkeypatch.setattr("holdfast.guard.run.loop._EPOCHS_WITH_EVENTS", 3)
    guard, _ = train(tmp_path, "holdfast", epochs=9)
    (loop,) = (event for event in guard.events() if event.kind == "loop")
    assert (loop.data["max_epochs"], loop.data["max_steps"]) == (9, None)
    ended = [event for event in guard.events() if event.kind == "epoch_ended"]
    assert [(each.data["epochs"], each.global_step) for each in ended] == [
        (1, 6),
        (2, 12),
        (3, 18),
        (4, 24),
        (8, 48),
    ]
    assert {
        (each.data["steps"], each.data["batches"], each.data["batch_size"]) for each in ended
    } == {(6, 6, 4)}
    guard, _ = [
        train(tmp_path / "b", "holdfast", epochs=2, stop_after=after) for after in (3, None)
    ][1]
    assert [each.data["steps"] for each in guard.events() if each.kind == "epoch_ended"] == [
        None,
        6,
    ]


def test_optimizer_names_train_one_network_and_leak_nothing_into_the_other(tmp_path):
    """A GAN's alternating steps equal the bare loop with detach and zero_grad, bit for bit."""

    def make() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        torch.manual_seed(0)
        models = {
            "generator": nn.Sequential(
                nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
            ),
            "discriminator": nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
        }
        return models, {
            name: torch.optim.Adam(model.parameters(), 0.02, betas=(0.5, 0.9))
            for name, model in models.items()
        }

    def losses(models: dict[str, nn.Module]) -> tuple[Any, Any]:
        generator, discriminator = models["generator"], models["discriminator"]

        def for_discriminator(batch: Any) -> torch.Tensor:
            real, noise = batch
            fake = generator(noise)  # on purpose without detach
            return (
                nn.functional.softplus(-discriminator(real)).mean()
                + nn.functional.softplus(discriminator(fake)).mean()
            )

        return (
            for_discriminator,
            lambda batch: nn.functional.softplus(-discriminator(generator(batch[1]))).mean(),
        )

    batches = [(torch.randn(6, 3) + 2, torch.randn(6, 2)) for _ in range(8)]
    models, optimizers = make()
    for_discriminator, for_generator = losses(models)
    for batch in batches:
        for name, loss in (("discriminator", for_discriminator), ("generator", for_generator)):
            for model in models.values():
                model.zero_grad()
            loss(batch).backward()
            optimizers[name].step()
    others, other_optimizers = make()
    for_discriminator, for_generator = losses(others)
    guard = guarded(tmp_path, others, other_optimizers)
    for batch in batches:
        others["generator"][0].weight.grad = None
        guard.step(batch, for_discriminator, optimizer="discriminator")
        assert others["generator"][0].weight.grad is None
        result = guard.step(batch, for_generator, optimizer="generator")
        assert list(result.grad_norm) == ["generator.0"]
    assert guard.global_step == 16
    for name in models:
        for a, b in zip(
            models[name].state_dict().values(), others[name].state_dict().values(), strict=True
        ):
            assert torch.equal(a, b)


def test_evaluation_leaves_no_trace(tmp_path):
    """Modes, also mixed ones, gradients and random state come back, however the context is left."""
    parts = make_parts()
    model = parts["model"]
    model[1].eval()  # a frozen BatchNorm stays frozen
    guard = holdfast.Guard(tmp_path, **parts)
    before = [module.training for module in model.modules()], torch.get_rng_state()
    with guard.evaluate():
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        torch.rand(5)
        random.random()
    assert ([module.training for module in model.modules()], torch.is_grad_enabled()) == (
        before[0],
        True,
    )
    assert torch.equal(torch.get_rng_state(), before[1])
    with pytest.raises(KeyError), guard.evaluate():
        raise KeyError
    assert [module.training for module in model.modules()] == before[0]


def test_a_stop_request_in_an_evaluation_ends_the_loop_after_this_batch(tmp_path):
    """`request_stop` lets an evaluation finish, and the loop ends at the boundary with a
    checkpoint.
    """
    parts = make_parts()
    guard = holdfast.Guard(tmp_path, loader=make_loader("holdfast"), **parts)
    for batch in guard.batches(max_epochs=3):
        guard.step(batch, loss_of(parts["model"]))
        with guard.evaluate():
            guard.request_stop()
    assert guard.global_step == 1
    assert (tmp_path / "checkpoints" / "000002-step00000001").is_dir()
    assert "stop_requested" in kinds_of(guard)


def test_the_run_directory_is_free_after_the_loop_and_after_the_context(tmp_path):
    """The lock is held from the constructor until `batches` ends, `close`, or the end of the
    context.
    """
    with (
        holdfast.Guard(tmp_path, **make_parts()),
        pytest.raises(holdfast.RunDirectoryError, match="H301"),
    ):
        holdfast.Guard(tmp_path, **make_parts())
    guard = holdfast.Guard(tmp_path, loader=make_loader("holdfast"), **make_parts())
    for batch in guard.batches(max_steps=1):
        guard.step(batch, loss_of(guard._parts.models["model"]))
    other = holdfast.Guard(tmp_path, **make_parts())
    other.close()
    other.close()


def test_a_guard_that_was_overtaken_says_so(tmp_path):
    """A closed guard whose run was continued by another one does not train on from stale
    weights.
    """
    first, parts = train(tmp_path, "holdfast", epochs=1)
    train(tmp_path, "holdfast", epochs=2)
    with pytest.raises(holdfast.RunDirectoryError, match="H306"):
        first.step(torch.randn(4, 4), loss_of(parts["model"]))


def test_an_abandoned_guard_gives_its_directory_back(tmp_path):
    """A guard that went out of scope, as in a notebook, does not lock its directory for ever."""
    parts = make_parts()
    holdfast.Guard(tmp_path, **parts)
    holdfast.Guard(tmp_path, **parts).close()


def test_checkpoints_come_at_the_interval_and_the_last_ones_stay(tmp_path):
    """A save at the start, at every multiple of the interval and at the end.

    `keep_latest_k` of them stay.
    """
    parts = make_parts()
    guard = holdfast.Guard(
        tmp_path,
        loader=make_loader("holdfast"),
        save_interval_steps=4,
        keep_latest_k=2,
        async_save=False,
        **parts,
    )
    run(guard, parts, max_epochs=3)
    saved = [event.global_step for event in guard.events() if event.kind == "checkpoint_saved"]
    assert saved == [0, 4, 8, 12, 16, 18]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "000005-step00000016",
        "000006-step00000018",
    ]
    assert guard.statistics().checkpoints_saved == 6


@pytest.mark.parametrize("patience", [1, 2])
def test_nan_is_skipped_then_rolled_back_then_ends_the_run(tmp_path, patience):
    """Remedies come in the policy's order, and good steps before the place of the failure do not
    start it anew.
    """
    parts = make_parts()
    guard = holdfast.Guard(
        tmp_path,
        loader=make_loader("holdfast"),
        nonfinite_patience=patience,
        max_rollbacks=2,
        save_interval_steps=3,
        async_save=False,
        **parts,
    )
    poisoned = math.nan
    with pytest.raises(holdfast.NonFiniteError, match=r"(?s)max_rollbacks=2.*H501"):
        for batch in guard.batches(max_epochs=30):
            guard.step(
                batch,
                lambda x: loss_of(parts["model"])(x) * (poisoned if guard.global_step >= 5 else 1),
            )
    kinds = kinds_of(guard, "skip_step", "roll_back", "stop")
    assert kinds == (["skip_step"] * (patience - 1) + ["roll_back"]) * 2 + ["skip_step"] * (
        patience - 1
    ) + ["stop"]
    assert all(torch.isfinite(tensor).all() for tensor in tensors_of(parts))
    guard.close()
    again = holdfast.Guard(tmp_path, loader=make_loader("holdfast"), **make_parts())
    assert again.global_step == 5, "the steps before the failure are kept"
    assert again.statistics().rollbacks == 2


def test_a_rollback_returns_to_the_checkpoint_and_passes_over_the_batches_since(tmp_path):
    """After a rollback the weights are those of the checkpoint, and the data goes on where it
    was.
    """
    parts = make_parts()
    loader = holdfast.DataLoader([torch.tensor([float(i)] * 4) for i in range(12)], batch_size=1)
    guard = holdfast.Guard(
        tmp_path,
        loader=loader,
        nonfinite_patience=2,
        save_interval_steps=3,
        async_save=False,
        **parts,
    )
    seen, weights = [], {}
    for batch in guard.batches(max_epochs=1):
        seen.append(int(batch[0, 0]))
        factor = math.nan if seen[-1] in (5, 6) else 1.0
        model = parts["model"].eval()
        result = guard.step(
            batch, lambda x, factor=factor, model=model: model(x).square().mean() * factor
        )
        if seen[-1] == 6:
            assert "rolled back to step 3" in result.reason
            assert torch.equal(model[0].weight, weights[3])
        weights.setdefault(guard.global_step, model[0].weight.detach().clone())
    assert seen == list(range(12))
    assert guard.global_step == 3 + 5
    assert guard.statistics().rollbacks == 1


def test_schedulers_follow_the_interval_that_was_named(tmp_path):
    """Per step, per epoch or never.

    One that needs a metric is left to the caller and still saved.
    """
    for interval, expected in (("step", 0.5**12), ("epoch", 0.5**2), (None, 1.0)):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        guard = holdfast.Guard(
            tmp_path / str(interval),
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            loader=make_loader("holdfast"),
            scheduler_interval=interval,
        )
        for batch in guard.batches(max_epochs=2):
            guard.step(batch, lambda x, model=model: model(x).square().mean() * 1e-3)
        assert scheduler.get_last_lr()[0] == pytest.approx(expected)


def test_results_and_events_can_be_read(tmp_path):
    """A result holds what its docstring says, and events come back oldest first with their
    facts.
    """
    clock = FakeClock()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(
        [{"params": [model.weight], "name": "weights"}, {"params": [model.bias]}], 0.1
    )
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, clock=clock)
    clock.advance(5.0)
    result = guard.step(torch.ones(8, 4), lambda x: model(x).mean())
    assert isinstance(result, holdfast.StepResult)
    assert result.loss.shape == ()
    assert not result.loss.requires_grad
    assert (result.items, result.micro_batch_size, result.attempts) == (8, 8, 1)
    assert (result.skipped, result.reason) == (False, None)
    assert result.grad_norm == {
        "optimizer.weights": pytest.approx(2.0),
        "optimizer.1": pytest.approx(1.0),
    }
    events = guard.events()
    assert all(isinstance(event, holdfast.Event) for event in events)
    assert [event.kind for event in events] == ["checkpoint_saved"]
    assert events[-1].unix_seconds == 5.0
    assert guard.statistics().steps == 1


def test_infinite_buffers_that_are_meant_do_not_stop_a_save(tmp_path):
    """A mask of -inf or a minimum that starts at inf is no reason to call a run unhealthy."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
            self.register_buffer("lowest", torch.tensor(torch.inf))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.lowest = torch.minimum(self.lowest, x.detach().min())
            return self.inner(x)

    model = Masked()
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)
    )
    guard.step(torch.randn(4, 4), square_of(model))
    guard.close()
    assert guard.statistics().checkpoints_saved == 2
    again = Masked()
    holdfast.Guard(
        tmp_path, model=again, optimizer=torch.optim.SGD(again.parameters(), 0.1)
    ).close()
    assert torch.equal(again.lowest, model.lowest)


def test_weights_that_are_not_finite_are_never_a_good_checkpoint(tmp_path):
    """Weights that go bad outside a step, again and again, are not saved.

    The run ends, its last good state stays.
    """
    parts, spoilt = make_parts(), 0
    settings = {"save_interval_steps": 2, "keep_latest_k": 1, "async_save": False}
    guard = holdfast.Guard(tmp_path, loader=make_loader("holdfast"), **settings, **parts)
    with pytest.raises(holdfast.NonFiniteError, match=r"3\.weight"):
        for batch in guard.batches(max_steps=6):
            guard.step(batch, loss_of(parts["model"]))
            if guard.global_step == 4:
                spoilt += 1
                parts["model"][3].weight.data[0, 0] = torch.nan
    assert spoilt == 3, "two rollbacks are the policy's default"
    assert [path.name[-2:] for path in (tmp_path / "checkpoints").iterdir()] == ["02"]


def test_a_moment_that_overflows_does_not_freeze_training_in_silence(tmp_path):
    """A finite gradient of 1e22 makes Adam's second moment Inf.

    The run returns to the state before it.
    """
    parts = make_parts()
    guard = holdfast.Guard(
        tmp_path, loader=make_loader("holdfast"), save_interval_steps=2, async_save=False, **parts
    )
    factors = iter([1.0, 1.0, 1.0, 1e22])
    for batch in guard.batches(max_steps=8):
        factor = next(factors, 1.0)
        guard.step(batch, lambda x, factor=factor: loss_of(parts["model"])(x) * factor)
    assert guard.global_step == 8
    assert guard.statistics().rollbacks == 1
    assert all(torch.isfinite(tensor).all() for tensor in tensors_of(parts))


def test_a_second_loop_of_one_guard_runs_although_the_first_was_stopped(tmp_path):
    """A request that has ended a loop does not silence the next one, as in a notebook."""
    parts = make_parts()
    guard = holdfast.Guard(tmp_path, loader=make_loader("holdfast"), **parts)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(parts["model"]))
        guard.request_stop()
    assert guard.global_step == 1
    run(guard, parts, max_epochs=1)
    assert guard.global_step == 6


def test_looking_at_a_batch_before_training_moves_nothing(tmp_path):
    """`next(iter(loader))` to look at shapes neither skips a batch nor spoils the first
    checkpoint.
    """
    seen: list[list[int]] = []
    for attempt in range(2):
        parts = make_parts()
        loader = holdfast.DataLoader([torch.full((4,), float(i)) for i in range(8)], batch_size=2)
        next(iter(loader))
        guard = holdfast.Guard(tmp_path, loader=loader, save_interval_steps=100, **parts)
        next(iter(loader))
        for batch in guard.batches(max_epochs=1, max_steps=2 if attempt == 0 else None):
            seen.append(batch[:, 0].int().tolist())
            guard.step(batch, loss_of(parts["model"]))
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_loader_without_a_length_is_trained_on_whatever_it_raises(tmp_path):
    """Its length only says where a save can wait for the end of the epoch."""

    class Lengthless:
        def __iter__(self):
            return iter([torch.ones(2, 4)] * 3)

        def __len__(self):
            raise NotImplementedError

    parts = make_parts()
    guard = holdfast.Guard(tmp_path, loader=Lengthless(), **parts)
    run(guard, parts, max_epochs=2)
    assert guard.global_step == 6


@pytest.mark.parametrize("closes", [True, False])
def test_a_loop_that_nobody_has_left_ends_with_the_next_one(tmp_path, closes):
    """Its iterator, which is kept, acts on the next loop neither when it is closed nor when it
    is asked again.
    """
    parts = make_parts()
    loader = [torch.full((2, 4), float(i)) for i in range(4)]
    guard = holdfast.Guard(tmp_path, loader=loader, **parts)
    earlier = guard.batches(max_epochs=2)
    seen = []
    for batch in [next(earlier), next(earlier)]:
        seen.append(int(batch[0, 0]))
        guard.step(batch, loss_of(parts["model"]))
    for batch in guard.batches(max_epochs=2):
        seen.append(int(batch[0, 0]))
        guard.step(batch, loss_of(parts["model"]))
        if len(seen) == 4:
            earlier.close() if closes else None
            assert next(earlier, None) is None
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3]
    assert guard.global_step == 8


def test_a_dropped_part_is_named_at_resume(tmp_path):
    """A scheduler or an average that was saved and is not given any more is an error, not a
    silent loss.
    """
    train(tmp_path, "holdfast", epochs=1)
    for name in ("scheduler", "state"):
        parts = {key: value for key, value in make_parts().items() if key != name}
        with pytest.raises(holdfast.CheckpointError, match=f"it has {name}"):
            holdfast.Guard(tmp_path, **parts)


def test_a_lock_that_was_lost_is_noticed_before_a_save(tmp_path):
    """Closing the lock file loses a POSIX lock.

    It is taken again, or the run ends if another has it.
    """
    import multiprocessing

    parts = make_parts()
    guard = holdfast.Guard(tmp_path, save_interval_steps=1, **parts)
    guard.step(torch.randn(4, 4), loss_of(parts["model"]))
    (tmp_path / "lock").read_bytes()
    # Saves the step before, and takes the lock again
    guard.step(torch.randn(4, 4), loss_of(parts["model"]))
    child = multiprocessing.get_context("fork").Process(target=hold_lock, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 3, "the other process was kept out"


def hold_lock(run_dir: Any) -> None:
    import os

    from holdfast.core import lock
    from holdfast.guard import directory

    lock._held.clear()
    try:
        directory.RunDirectory(run_dir).acquire()
    except holdfast.RunDirectoryError:
        os._exit(3)
    os._exit(0)

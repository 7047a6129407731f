"""`accelerate_guard` with the real Accelerate: equal steps, exact windows, exact resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast import PolicyError

accelerate = pytest.importorskip("accelerate", exc_type=ImportError)
pytestmark = pytest.mark.slow  # the import alone takes seconds


def forget_settings() -> None:
    """Forget what earlier accelerators have settled for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Let each test begin, and end, without settings of another."""
    forget_settings()
    yield
    forget_settings()


def guard_of(accelerator: Any, **parts: Any) -> Any:
    """Return a guard of what was prepared."""
    from holdfast.integrations.accelerate import accelerate_guard

    return accelerate_guard(accelerator, **parts)


def prepared(
    folder: Path,
    *,
    accumulate: int = 1,
    samples: int = 24,
    batch: int = 4,
    seedable: bool = False,
    shuffle: bool = True,
    precision: str = "no",
    **options: Any,
) -> tuple[Any, ...]:
    """Return an accelerator with a model with dropout, an optimizer, a loader and a schedule, all
    prepared.

    Accelerate leaves fp16 off on a CPU; here it is on.
    """
    from accelerate.utils import DataLoaderConfiguration

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(samples, 5, generator=generator), torch.arange(samples) % 3)
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        project_dir=folder,
        mixed_precision=precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
    )
    if precision == "fp16":
        accelerator.native_amp, accelerator.scaler = (
            True,
            torch.amp.GradScaler("cpu", init_scale=2.0**7),
        )
    loader = DataLoader(data, batch_size=batch, shuffle=shuffle, **options)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def loss_of(model: Any) -> Any:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def bare(folder: Path, *, epochs: int, **settings: Any) -> tuple[torch.Tensor, int]:
    """Train as Accelerate's own examples do; return the weights and the optimizer steps."""
    accelerator, model, optimizer, loader, scheduler = prepared(folder, **settings)
    steps = 0
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model)(batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    steps += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return weights(model), steps


def guarded(folder: Path, *, epochs: int, **settings: Any) -> tuple[torch.Tensor, Any]:
    """Train the same under a guard."""
    accelerator, model, optimizer, loader, scheduler = prepared(folder, **settings)
    parts = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    guard = guard_of(
        accelerator, **parts, max_grad_norm=0.5, save_interval_steps=2, async_save=False
    )
    for batch in guard.batches(max_epochs=epochs):
        guard.step(batch, loss_of(model))
    return weights(model), guard.global_step


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2, "seedable": True}, {"precision": "bf16"}, {"precision": "fp16"}],
)
def test_training_is_bit_identical_to_the_bare_loop(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """With dropout, shuffling, clipping, a schedule and a loss scale, the steps are Accelerate's
    own.
    """
    expected, steps = bare(tmp_path / "a", epochs=2, **settings)
    found, made = guarded(tmp_path / "b", epochs=2, **settings)
    assert torch.equal(expected, found)
    assert steps == made


def test_an_incomplete_last_window_counts_what_it_holds(tmp_path: Path) -> None:
    """With 22 samples in batches of 4, two to a window, the steps are those over 8, 8 and 6
    samples.
    """

    def without_dropout(batch: int, accumulate: int, folder: Path) -> torch.Tensor:
        accelerator, model, optimizer, loader, _ = prepared(
            folder, accumulate=accumulate, samples=22, batch=batch, shuffle=False
        )
        model[2].p = 0.0
        guard = guard_of(accelerator, model=model, optimizer=optimizer, loader=loader)
        for each in guard.batches(max_epochs=2):
            guard.step(each, loss_of(model))
        assert guard.global_step == 6
        return weights(model)

    whole = without_dropout(8, 1, tmp_path / "a")
    parts = without_dropout(4, 2, tmp_path / "b")
    assert torch.allclose(whole, parts, atol=1e-6)


def test_out_of_memory_cuts_the_batches_of_a_window(tmp_path: Path) -> None:
    """Batches of a window that do not fit are cut, and the step is that of the window all the
    same.
    """

    def train(folder: Path, most: int) -> torch.Tensor:
        accelerator, model, optimizer, loader, _ = prepared(folder, accumulate=2, shuffle=False)
        model[2].p = 0.0

        def loss(batch: Any) -> torch.Tensor:
            if len(batch[0]) > most and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return F.cross_entropy(model(batch[0]), batch[1])

        guard = guard_of(
            accelerator,
            model=model,
            optimizer=optimizer,
            loader=loader,
            recompute=False,
            check_split=False,
        )
        for batch in guard.batches(max_epochs=1):
            assert guard.step(batch, loss).items == 8
        return weights(model)

    assert torch.allclose(train(tmp_path / "a", 4), train(tmp_path / "b", 1), atol=1e-6)


def test_holdfast_loader_is_taken_as_it_is(tmp_path: Path) -> None:
    """A holdfast.DataLoader that was not prepared keeps its exact order.

    Accumulation with it is refused.
    """
    accelerator, model, optimizer, _, _ = prepared(tmp_path)
    loader = holdfast.DataLoader(
        TensorDataset(torch.randn(8, 5), torch.arange(8) % 3), batch_size=4
    )
    guard = guard_of(accelerator, model=model, optimizer=optimizer, loader=loader)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
    assert guard.global_step == 2
    accelerator.gradient_accumulation_steps = 2
    with pytest.raises(PolicyError, match="gradient_accumulation_steps=2"):
        guard_of(accelerator, model=model, optimizer=optimizer, loader=loader)


def test_a_loop_over_the_loader_itself_is_refused_where_it_would_not_accumulate(
    tmp_path: Path,
) -> None:
    """A batch that is no window is an error that says how to iterate.

    Without accumulation it is a step.
    """
    from holdfast import BatchError

    for accumulate in (1, 2):
        accelerator, model, optimizer, loader, _ = prepared(
            tmp_path / str(accumulate), accumulate=accumulate
        )
        guard = guard_of(accelerator, model=model, optimizer=optimizer)
        before, batch = weights(model), next(iter(loader))
        if accumulate == 1:
            assert not guard.step(batch, loss_of(model)).skipped
        else:
            with pytest.raises(
                BatchError, match=r"gradient_accumulation_steps=2[^$]*guard\.batches"
            ):
                guard.step(batch, loss_of(model))
        assert torch.equal(before, weights(model)) is (accumulate == 2)
        guard.close()
        forget_settings()


def test_a_schedule_that_ends_before_the_windows_do_stays_at_its_end(tmp_path: Path) -> None:
    """A OneCycleLR planned for fewer steps than there are windows ends as in Accelerate's own
    loop, without error.
    """
    rates = {}
    for guarded_by in (False, True):
        torch.manual_seed(0)
        folder = tmp_path / str(guarded_by)
        accelerator = accelerate.Accelerator(
            cpu=True, project_dir=folder, gradient_accumulation_steps=2
        )
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
        loader = DataLoader(TensorDataset(torch.randn(12, 5), torch.arange(12) % 3), batch_size=4)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if guarded_by:
            guard = guard_of(
                accelerator, model=model, optimizer=optimizer, loader=loader, scheduler=schedule
            )
            for batch in guard.batches(max_epochs=3):
                guard.step(batch, loss_of(model))
            assert guard.global_step == 6
        else:
            for batch in (each for _ in range(3) for each in loader):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model)(batch))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        rates[guarded_by] = optimizer.param_groups[0]["lr"]
        forget_settings()
    assert rates[True] == rates[False]


def test_what_cannot_be_guarded_is_refused(tmp_path: Path) -> None:
    """An engine of its own, fp8, two precisions, and a run without a place are errors."""
    accelerator, model, optimizer, loader, _ = prepared(tmp_path)

    def refused(**settings: Any) -> str:
        with pytest.raises(PolicyError) as found:
            guard_of(
                accelerator,
                **({"model": model, "optimizer": optimizer, "loader": loader} | settings),
            )
        return found.value.rule

    for wrong in ({"model": None}, {"optimizer": None}, {"loader": 5}):
        assert refused(**wrong) == "H105"
    assert refused(precision="fp16") == "H109"
    assert refused(max_grad_nrom=1.0) == "H101"
    accelerator.project_configuration.project_dir = None
    assert refused() == "H105"
    shared = accelerator.state._shared_state
    usual = dict(shared)
    try:
        shared.update(usual, distributed_type=accelerate.DistributedType.FSDP)
        assert refused() == "H111"
        shared.update(usual, _mixed_precision="fp8")
        assert refused() == "H111"
    finally:
        shared.update(usual)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, which has the attribute that prepared optimizers have,
    too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "inner": self.optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["inner"])


class Logged:
    """A scheduler around another one, with the attribute of prepared ones."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "inner": self.scheduler.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]
        self.scheduler.load_state_dict(state["inner"])


@pytest.mark.parametrize("before", [False, True])
def test_wrappers_of_the_users_own_are_not_taken_for_prepared_objects(
    tmp_path: Path, before: bool
) -> None:
    """Both are advanced once in each step, and stay in use, given to `prepare` or made after it."""
    accelerator, model, prepared_optimizer, loader, _ = prepared(tmp_path)
    optimizer = Lookahead(prepared_optimizer.optimizer)
    scheduler = Logged(torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9))
    given = accelerator.prepare(optimizer) if before else optimizer
    guard = guard_of(accelerator, model=model, optimizer=given, loader=loader, scheduler=scheduler)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
    assert (optimizer.steps, scheduler.steps, scheduler.scheduler.last_epoch) == (6, 6, 6)
    forget_settings()


def test_workers_that_live_on_keep_the_order_and_say_what_is_not_kept(tmp_path: Path) -> None:
    """With ``persistent_workers=True`` a run that is stopped in its second epoch ends as
    undisturbed, and warns.
    """
    workers = {"num_workers": 1, "persistent_workers": True}
    expected, _ = guarded(tmp_path / "undisturbed", epochs=3, **workers)

    accelerator, model, optimizer, loader, scheduler = prepared(tmp_path / "stopped", **workers)
    parts = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    guard = guard_of(accelerator, **parts, max_grad_norm=0.5, async_save=False)
    for batch in guard.batches(max_epochs=3):
        guard.step(batch, loss_of(model))
        if guard.global_step == 8:
            guard.request_stop()
    forget_settings()
    found, _ = guarded(tmp_path / "stopped", epochs=3, **workers)

    assert torch.equal(expected, found)
    assert [event.global_step for event in guard.events() if event.kind == "resume_may_differ"] == [
        0,
        8,
    ]


def test_a_step_of_the_prepared_optimizer_is_refused(tmp_path: Path) -> None:
    """A loop over ``guard.batches`` that keeps ``optimizer.step()`` of the prepared optimizer is
    H212.
    """
    accelerator, model, optimizer, loader, _ = prepared(tmp_path)
    guard = guard_of(accelerator, model=model, optimizer=optimizer, loader=loader)
    with pytest.raises(holdfast.BatchError) as raised:
        for batch in guard.batches(max_epochs=1):
            accelerator.backward(loss_of(model)(batch))
            optimizer.step()
    assert raised.value.rule == "H212"

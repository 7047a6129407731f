"""Half precision, refused memory and compiled models on a CUDA device, each beside a bare loop."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.gpu.marks import NEEDS_CUDA
from torch import nn

import holdfast

pytestmark = NEEDS_CUDA
DEVICE = "cuda"
GIB = 2**30
STEPS, OVERFLOWS_AT = 8, 5


@pytest.fixture
def one_gib() -> Iterator[None]:
    """Let CUDA's own allocator refuse memory beyond 1 GiB."""
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(GIB / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def ask_for_too_much() -> None:
    """Have the allocator refuse memory, for real."""
    torch.empty(2 * GIB if DEVICE == "cuda" else 2**50, dtype=torch.uint8, device=DEVICE)


def perceptron(*, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Dropout(dropout), nn.ReLU(), nn.Linear(256, 8)).to(
        DEVICE
    )


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(DEVICE)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value.to(DEVICE) for each in optimizer.state.values() for value in each.values()]
    return [*(p.detach().clone() for p in model.parameters()), *moments]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def refused_once() -> Callable[..., None]:
    """Return a function that has memory refused at its first call."""
    calls: list[Any] = []

    def once(*_: Any) -> None:
        calls.append(_)
        if len(calls) == 1:
            ask_for_too_much()

    return once


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_guarded_loop_is_the_bare_loop_of_torch(tmp_path: Path, precision: Any) -> None:
    """Weights and moments have the same bits, and the step that overflows in fp16 is left out by
    both.
    """
    fp16 = precision == "fp16"

    def loss_of(model: nn.Module, step: int) -> Callable[[torch.Tensor], torch.Tensor]:
        large = 1e5 if fp16 and step == OVERFLOWS_AT else 1.0  # finite, its gradient is not in fp16
        return lambda x: model(x).float().square().mean() * large

    # A step that is left out gives its random numbers back
    bare = perceptron(dropout=0.0 if fp16 else 0.1)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, enabled=fp16)
    torch.manual_seed(3)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(
            DEVICE, torch.float16 if fp16 else torch.bfloat16, enabled=precision != "fp32"
        ):
            loss = loss_of(bare, step)(batch_of(step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    model = perceptron(dropout=0.0 if fp16 else 0.1)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(3)
    with holdfast.Guard(
        tmp_path, model=model, optimizer=mine, precision=precision, max_grad_norm=1.0
    ) as guard:
        skipped = [
            guard.step(batch_of(step), loss_of(model, step)).skipped for step in range(STEPS)
        ]
        scale = guard.statistics().loss_scale
    assert_same(state_of(model, mine), state_of(bare, optimizer))
    assert skipped == [fp16 and step == OVERFLOWS_AT for step in range(STEPS)]
    if fp16:
        assert scale == scaler.get_scale() == 2.0**15


def train(
    run_dir: Path, where: str = "", foreach: bool | None = None
) -> tuple[holdfast.Guard, list[torch.Tensor], list[int]]:
    """Train; memory is refused once, in a pass of step 3, in a step of AdamW, or in each save of
    step 4.
    """
    model, once, attempts, tears = perceptron(), refused_once(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)

    def torn(*_: Any) -> None:
        if where == "optimizer" and guard.global_step == 3 and not tears:
            tears.append(0)
            with torch.no_grad():
                model[0].weight.add_(1.0)  # it has changed a weight already
            ask_for_too_much()

    def saved() -> dict[str, int]:
        if where == "save" and guard is not None and guard.global_step == 4:
            ask_for_too_much()
        return {"saved": 1}

    guard: Any = None
    state = SimpleNamespace(state_dict=saved, load_state_dict=lambda _: None)
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=optimizer,
        loader=[batch_of(step) for step in range(STEPS)],
        save_interval_steps=2,
        async_save=False,
        check_split=False,
        state={"state": state},
    )
    optimizer.register_step_pre_hook(torn)
    torch.manual_seed(7)
    for x in guard.batches(max_epochs=1):

        def loss_fn(x: torch.Tensor, third: bool = guard.global_step == 3) -> torch.Tensor:
            hidden = model[:3](x)
            if third and where == "forward":
                once()
            if third and where == "backward" and hidden.requires_grad:
                hidden.register_hook(once)
            return model[3](hidden).square().mean()

        attempts.append(guard.step(x, loss_fn).attempts)
    return guard, state_of(model, optimizer), attempts


@pytest.mark.usefixtures("one_gib")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_refused_once_in_a_pass_it_ends_as_if_undisturbed(tmp_path: Path, where: str) -> None:
    """The same attempt again, with its dropout, has the same bits."""
    _, undisturbed, _ = train(tmp_path / "a")
    guard, found, attempts = train(tmp_path / "b", where)
    assert_same(found, undisturbed)
    assert attempts == [1, 1, 1, 2, 1, 1, 1, 1]
    kinds = [event.kind for event in guard.events()]
    assert kinds.count("out_of_memory") == 1
    assert "split" not in kinds


@pytest.mark.usefixtures("one_gib")
@pytest.mark.parametrize("foreach", [False, None])
def test_refused_in_a_step_of_adam_it_goes_back_to_a_checkpoint(
    tmp_path: Path, foreach: bool | None
) -> None:
    """What that step has changed is gone.

    The same bits at the end, or rounding where it updated many at once.
    """
    _, undisturbed, _ = train(tmp_path / "a", "", foreach)
    guard, found, _ = train(tmp_path / "b", "optimizer", foreach)
    (back,) = [event for event in guard.events() if event.kind == "roll_back"]
    assert "memory" in back.data["reason"]
    if foreach is None and DEVICE == "cuda":
        assert back.data["promise"] == "equal up to rounding"
        assert_close(found, undisturbed, 1e-4)
    else:
        assert back.data["promise"] == "bit-exact"
        assert_same(found, undisturbed)


@pytest.mark.usefixtures("one_gib")
def test_state_of_adam_that_does_not_fit_is_a_clear_error(tmp_path: Path) -> None:
    """No micro-batch helps, so none is tried; the weights are those of before, and stay usable."""
    model = nn.Linear(8192, 12800, bias=False).to(DEVICE)  # 400 MiB, and two moments of as much
    before = model.weight.detach().cpu()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, save_interval_steps=None)
    with pytest.raises(
        holdfast.OutOfMemoryError, match="state of the optimizer does not fit"
    ) as caught:
        guard.step(torch.randn(4, 8192, device=DEVICE), lambda x: model(x).square().mean())
    assert caught.value.rule == "H401"
    assert torch.equal(model.weight.cpu(), before)
    assert not optimizer.state
    del caught
    guard.close()


@pytest.mark.usefixtures("one_gib")
def test_refused_in_a_save_costs_no_bit_of_the_training(tmp_path: Path) -> None:
    """A save that fails is an event, training goes on, and the run can be continued."""
    _, undisturbed, _ = train(tmp_path / "a")
    guard, found, _ = train(tmp_path / "b", "save")
    assert_same(found, undisturbed)
    (failed,) = [event for event in guard.events() if event.kind == "save_failed"]
    assert "memory" in str(failed.data)
    assert failed.global_step == 4
    newest = holdfast.latest(tmp_path / "b")
    assert newest is not None
    assert newest.global_step == STEPS


def gradient_in_parts(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.zeros_like(p) for p in model.parameters()]
    for part in x.split(1024):
        loss = model(part.to(DEVICE)).square().mean() * (len(part) / len(x))
        found = [
            a + b
            for a, b in zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True)
        ]
    return found


def assert_close(found: Any, expected: list[torch.Tensor], rtol: float = 1e-3) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6)


def in_pieces() -> None:
    """Under 1 GiB, have two thirds of it free in pieces of at most 12 MiB.

    Then make a step that asks for more.
    """
    torch.cuda.set_per_process_memory_fraction(
        GIB / torch.cuda.get_device_properties(0).total_memory
    )
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).cuda(),
        torch.randn(49152, 256),
    )
    twin = gradient_in_parts(model, x)
    torch.cuda.empty_cache()
    kept = []
    try:
        while True:
            kept.append(torch.empty(8 << 20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        kept = kept[::2]
    gc.collect()
    torch.cuda.empty_cache()
    free = GIB - torch.cuda.memory_allocated()
    # What a step asks for: inputs and three outputs of 48 MiB, and a gradient
    assert free > 5 * 48 * 2**20, free
    with tempfile.TemporaryDirectory() as run_dir:
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        guard = holdfast.Guard(run_dir, model=model, optimizer=optimizer, save_interval_steps=None)
        result = guard.step(x, lambda part: model(part.cuda()).square().mean())
        events = [event.kind for event in guard.events()]
        guard.close()
    assert result.attempts > 1, events
    assert "split" in events
    assert_close([p.grad for p in model.parameters()], twin)
    del kept


def test_memory_that_is_free_only_in_pieces_is_recovered(one_gib: None) -> None:
    """What does not fit in one piece fits in smaller parts.

    With expandable segments: see `test_programs`.
    """
    in_pieces()


def compiled_pair(mode: str | None, bare_steps: int) -> tuple[Any, Any, nn.Module, Any]:
    """Return the state after some steps of a bare compiled loop, and a model, its compiled one
    and an optimizer.
    """
    model = perceptron(dropout=0.0)
    optimizer, compiled = (
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        torch.compile(model, mode=mode),
    )
    for step in range(bare_steps):
        optimizer.zero_grad()
        compiled(batch_of(step)).square().mean().backward()
        optimizer.step()
    bare = state_of(model, optimizer)
    torch.compiler.reset()
    model = perceptron(dropout=0.0)
    return (
        bare,
        model,
        torch.compile(model, mode=mode),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


@pytest.mark.filterwarnings("ignore")  # of inductor
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_model_is_the_bare_compiled_loop(
    tmp_path: Path, one_gib: None, mode: str | None
) -> None:
    """Also where memory is refused once beside what a compiled pass has kept, and with CUDA
    graphs.
    """
    bare, model, compiled, optimizer = compiled_pair(mode, STEPS)
    once, attempts = refused_once(), []
    guard = holdfast.Guard(
        tmp_path, model=compiled, optimizer=optimizer, save_interval_steps=4, check_split=False
    )
    for step in range(STEPS):

        def loss_fn(x: torch.Tensor, fails: bool = step == 3) -> torch.Tensor:
            out = compiled(x)
            if fails:
                once()
            return out.square().mean()

        attempts.append(guard.step(batch_of(step), loss_fn).attempts)
    guard.close()
    assert attempts == [1, 1, 1, 2, 1, 1, 1, 1]
    assert_same(state_of(model, optimizer), bare)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_that_a_compiled_model_cannot_take_is_split(tmp_path: Path, one_gib: None) -> None:
    """Memory is refused inside of what was compiled.

    The gradient is that of the whole batch, up to rounding.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.Tanh()))
    ).cuda()
    compiled, x = torch.compile(model), torch.randn(65536, 1024, device="cpu")
    twin = gradient_in_parts(model, x)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with holdfast.Guard(
        tmp_path, model=compiled, optimizer=optimizer, save_interval_steps=None
    ) as guard:
        result = guard.step(x, lambda part: compiled(part.cuda()).square().mean())
    assert result.attempts > 1
    assert_close([p.grad for p in model.parameters()], twin)


class FromAGenerator:
    """Makes its batches on the device, with a generator that lies there."""

    def __init__(self) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(1)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(6):
            yield torch.randn(64, 256, generator=self.generator, device=DEVICE)


def test_a_resume_brings_a_generator_on_the_device_back(tmp_path: Path) -> None:
    """Stopped within the second epoch and resumed.

    Batches, dropout and bits are those of the run without a stop.
    """

    def run(run_dir: Path, *stops: int) -> list[torch.Tensor]:
        for stop in stops:
            model = perceptron()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            torch.manual_seed(5)
            loader = FromAGenerator()
            guard = holdfast.Guard(
                run_dir, model=model, optimizer=optimizer, loader=loader, save_interval_steps=4
            )
            for x in guard.batches(max_steps=stop):
                guard.step(x, lambda x, model=model: model(x).square().mean())
            guard.close()
        return state_of(model, optimizer)

    assert_same(run(tmp_path / "b", 8, 14), run(tmp_path / "a", 14))

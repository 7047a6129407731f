"""Tests of holdfast.forecast.trace.recomputation and recompute_choice, against steps played with checkpoints."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.forecast.made_steps import SAVES, Block, Layer, make_step
from torch import nn

from holdfast.forecast.plan.recompute_choice import choose
from holdfast.forecast.trace.events import (
    BlockRun,
    Trace,
    live_bytes,
    live_peak,
    played,
)
from holdfast.forecast.trace.recomputation import with_recompute
from holdfast.forecast.trace.tracer import Tracer
from holdfast.memory.recompute import recomputing

TRANSFORMER: Block = (
    Layer("gelu", 400),
    Layer("linear", 1600),
    Layer("gelu", 1600),
    Layer("linear", 400),
    Layer("add", 400),
)
layers = st.builds(Layer, st.sampled_from(sorted(SAVES)), st.integers(1, 400), st.integers(0, 200))
programs = st.lists(st.lists(layers, min_size=1, max_size=5).map(tuple), min_size=1, max_size=5)


def names(blocks: set[int] | frozenset[int] | tuple[int, ...]) -> frozenset[str]:
    return frozenset(f"blocks.{number}" for number in blocks)


def check_whole(trace: Trace, like: Trace) -> None:
    """Check that a trace is one: each storage begins and ends once, in order, and the step ends as another does."""
    alive = set(trace.resident)
    for event in trace.events.tolist():
        storage = abs(event) - 1
        assert (storage in alive) == (event < 0)
        alive ^= {storage}
    assert len(np.unique(trace.events)) == len(trace.events)
    assert len(trace.size_bytes) == len(trace.owner) == len(trace.module) == len(trace.line)
    assert len(trace.events) == len(trace.event_phase)
    assert set(np.abs(trace.events) - 1) | set(trace.resident) == set(range(len(trace.size_bytes)))
    assert live_bytes(*played(trace, 1))[-1] == live_bytes(*played(like, 1))[-1]
    assert (np.diff(trace.operation_event) >= 0).all()
    assert trace.operation_event.max(initial=0) <= len(trace.events)
    for name in ("operation_event", "operation_phase", "flops", "moved_bytes", "dtype"):
        assert len(getattr(trace, name)) == len(trace.operation_name)
    for run in trace.block_runs:
        made = trace.events[slice(*run.forward)]
        assert set(run.kept) <= set(made[made > 0] - 1)
    for before, after in zip(like.variants, trace.variants, strict=True):
        assert np.array_equal(like.events[slice(*before.events)], trace.events[slice(*after.events)])
        operations = slice(*before.operations), slice(*after.operations)
        assert np.array_equal(like.operation_name[operations[0]], trace.operation_name[operations[1]])


@pytest.mark.parametrize("count", [1, 3, 4])
def test_transformer_blocks_are_exact(count: int) -> None:
    """For every choice among the blocks of a transformer the edited step peaks where the checkpointed one does."""
    blocks = [TRANSFORMER] * count
    trace = make_step(blocks, 8, optimizer_bytes=100)
    for size in range(count + 1):
        for chosen in combinations(range(count), size):
            edited = with_recompute(trace, names(chosen))
            truth = make_step(blocks, 8, optimizer_bytes=100, recompute=chosen)
            check_whole(edited, trace)
            assert live_peak(edited) == live_peak(truth), chosen


@settings(max_examples=150, deadline=None)
@given(programs, st.data())
def test_an_edited_step_is_never_below_the_checkpointed_one(program: list[Block], data: st.DataObject) -> None:
    """Whatever the blocks save, hold or reuse, the edited step is whole and peaks no lower than the true one."""
    numbers = range(len(program))
    chosen = frozenset(data.draw(st.sets(st.sampled_from(list(numbers)))))
    runs = data.draw(st.one_of(st.none(), st.lists(st.sampled_from(list(numbers)), min_size=1, max_size=6)))
    holds = data.draw(st.booleans())
    arguments = {"holds_output": holds, "runs": runs, "optimizer_bytes": 64}
    trace = make_step(program, 3, **arguments)  # type: ignore[arg-type]
    truth = make_step(program, 3, recompute=chosen, **arguments)  # type: ignore[arg-type]
    if data.draw(st.booleans()):
        trace = replace(trace, block_runs=tuple(replace(run, saved=None) for run in trace.block_runs))
    edited = with_recompute(trace, names(chosen))
    check_whole(edited, trace)
    assert live_peak(edited) >= live_peak(truth)


def around(trace: Trace, first: int, last: int) -> Trace:
    """Return the trace with one more block, which contains the passes of these."""
    runs = trace.block_runs
    outer = BlockRun(
        block=len(trace.blocks),
        forward=(runs[first].forward[0], runs[last].forward[1]),
        backward=runs[last].backward,
        kept=runs[last].kept,
        operations=(runs[first].operations[0], runs[last].operations[1]),
        inputs=runs[first].inputs,
        saved=runs[last].saved,
    )
    passes = (*runs[:first], outer, *runs[first:])
    return replace(trace, blocks=(*trace.blocks, "blocks"), block_runs=passes)


def test_a_block_around_others_is_recomputed_as_one() -> None:
    """A block that contains blocks drops what they keep for each other, and is exact."""
    trace = around(make_step([TRANSFORMER] * 4, 8), 1, 2)
    truth = make_step([TRANSFORMER, TRANSFORMER + TRANSFORMER, TRANSFORMER], 8, recompute=(1,))
    edited = with_recompute(trace, {"blocks"})
    check_whole(edited, trace)
    assert live_peak(edited) == live_peak(truth)


# The choice.


def seconds(trace: Trace) -> float:
    return float(trace.flops.sum())


def test_alike_blocks_are_taken_from_the_first_on_and_few_questions_are_asked() -> None:
    """Of blocks that do the same as few as are needed are recomputed, the earliest, found by bisection."""
    trace = make_step([TRANSFORMER] * 32, 256)
    asked: list[int] = []

    def fits_under(cap: int):
        def fits(one: Trace) -> bool:
            asked.append(1)
            return live_peak(one) <= cap

        return fits

    for wanted in (1, 7, 31):
        cap = live_peak(with_recompute(trace, names(range(wanted))))  # type: ignore[arg-type]
        asked.clear()
        assert choose(trace, fits_under(cap), seconds) == names(range(wanted))  # type: ignore[arg-type]
        assert len(asked) <= 12


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(layers, min_size=2, max_size=4).map(tuple), min_size=2, max_size=4), st.floats(0, 1))
def test_a_choice_fits_wherever_one_does(program: list[Block], share: float) -> None:
    """It costs no more than recomputing everything, and is missing only where even that is too much."""
    trace = make_step(program, 16)
    every = [frozenset(one) for size in range(len(program) + 1) for one in combinations(trace.blocks, size)]
    peaks = {one: live_peak(with_recompute(trace, one)) for one in every}
    cap = min(peaks.values()) + int(share * (peaks[frozenset()] - min(peaks.values())))
    chosen = choose(trace, lambda one: live_peak(one) <= cap, seconds)
    if chosen is None:
        assert peaks[frozenset(trace.blocks)] > cap
        return
    assert peaks[chosen] <= cap
    assert seconds(with_recompute(trace, chosen)) <= seconds(with_recompute(trace, trace.blocks))


# Real modules, traced as they are and as `memory.recompute` runs them.


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.norm(self.second(self.first(x).relu()))).relu_()


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        make = {
            "encoder": lambda: nn.TransformerEncoderLayer(32, 2, 128, batch_first=True, norm_first=True),
            "residual": Residual,
        }[kind]
        self.body = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(32 if kind == "encoder" else 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            x = block(x)
        return self.head(x)


def trace_real(kind: str, precision: str = "fp32", chosen: tuple[int, ...] = (), batch: int = 8) -> Trace:
    """Return the second step of a real model on the CPU, with some blocks recomputed for real."""

    def step() -> None:
        data = torch.randn(batch, 16, 32) if kind == "encoder" else torch.randn(batch, 4, 8, 8)
        optimizer.zero_grad()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
            recomputing([model.body[one] for one in chosen], torch.get_rng_state, torch.set_rng_state),
        ):
            out = model(data)
        out.float().square().mean().backward()
        optimizer.step()

    gc.freeze()  # what is loaded is not looked through; the tracer before has undone that
    with Tracer(torch.device("cpu")) as tracer:
        model = Model(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        blocks = [(f"body.{number}", block) for number, block in enumerate(model.body)]
        tracer.watch(models={"": model}, optimizers=[optimizer], blocks=blocks)
        step()
        with tracer.recording():
            step()
    return tracer.trace(micro_batch_size=batch, precision=precision)


@pytest.mark.parametrize(
    ("kind", "precision", "above"),
    [
        ("encoder", "fp32", 0.0005),
        pytest.param("encoder", "bf16", 0.005, marks=pytest.mark.slow),
        ("residual", "fp32", 0.0005),
    ],
)
def test_real_models_that_are_recomputed_for_real_need_what_was_said(kind: str, precision: str, above: float) -> None:
    """An edited trace of a real model peaks where a trace of the model with checkpoints does, and never lower."""
    trace = trace_real(kind, precision)
    for chosen in ((1,), (0, 1, 2)):
        said = live_peak(with_recompute(trace, {f"body.{number}" for number in chosen}))
        truth = live_peak(trace_real(kind, precision, chosen))
        assert 0 <= said / truth - 1 <= above, chosen

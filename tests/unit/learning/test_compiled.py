"""A program that uses ``torch.compile`` trains under a guard and under `watch` as without, graph
for graph.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.prepared import run_prepared
from torch import Tensor, nn

import holdfast

# What torch itself warns of while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:`torch.jit")
STEPS = 34  # the first 30 are observed fully, of the others few
MOST = 1.0  # of the gradient's norm


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.dropout(torch.relu(self.inner(x))))


class Net(nn.Module):
    """A classifier with repeated blocks, dropout, and if wanted running statistics."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.first(x))))


class Graphs:
    """A backend that counts what it is given to compile."""

    count = 0

    def __call__(self, graph: Any, _given: Any) -> Any:
        self.count += 1
        return graph.forward


class Program(NamedTuple):
    given: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any], Tensor]


Compile = Callable[..., Any]


def _wrapped(model: Net, compiled: Compile) -> Program:
    return _program(model, compiled(model))


def _in_place(model: Net, compiled: Compile) -> Program:
    model.compile(backend=compiled.keywords["backend"])  # type: ignore[attr-defined]
    return _program(model, model)


def _part(model: Net, compiled: Compile) -> Program:
    model.first = compiled(model.first)
    return _program(model, model)


def _loss(model: Net, compiled: Compile) -> Program:
    inner = _program(model, model)
    return inner._replace(loss=compiled(lambda batch: inner.loss(batch)))


def _late(model: Net, compiled: Compile) -> Program:
    calls: list[Any] = []

    def loss(batch: Any) -> Tensor:
        calls.append(model)
        if len(calls) == 4:
            calls[0] = compiled(model)
        return F.cross_entropy(calls[0](batch[0]), batch[1])

    return _program(model, model)._replace(loss=loss)


def _optimizer(model: Net, compiled: Compile) -> Program:
    program = _program(model, model)
    program.optimizer.step = compiled(program.optimizer.step)  # type: ignore[method-assign]
    return program


PROGRAMS = (_wrapped, _in_place, _part, _loss, _late, _optimizer)


def _program(given: nn.Module, called: Callable[[Tensor], Tensor]) -> Program:
    optimizer = torch.optim.AdamW(given.parameters(), lr=0.01)
    return Program(given, optimizer, lambda batch: F.cross_entropy(called(batch[0]), batch[1]))


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def trained(
    make: Callable[[Net, Compile], Program], how: str, room: Path
) -> tuple[int, list[Tensor]]:
    """Return the number of graphs, and all parameters and buffers in the end."""
    torch.compiler.reset()
    torch.manual_seed(0)
    graphs = Graphs()
    program = make(Net(), compiling(graphs))
    torch.manual_seed(5)
    if how == "guard":
        guard = holdfast.Guard(
            room,
            model=program.given,
            optimizer=program.optimizer,
            loader=batches(),
            max_grad_norm=MOST,
        )
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, program.loss)
    else:
        watching = (
            holdfast.watch(program.given, program.optimizer)
            if how == "watch"
            else contextlib.nullcontext()
        )
        with watching:
            for batch in batches():
                bare_step(program, batch)
    return graphs.count, list(program.given.state_dict().values())


def compiling(graphs: Graphs) -> Compile:
    return functools.partial(torch.compile, backend=graphs)


def bare_step(program: Program, batch: Any) -> None:
    program.optimizer.zero_grad()
    program.loss(batch).backward()
    nn.utils.clip_grad_norm_(program.given.parameters(), MOST)
    program.optimizer.step()


@pytest.mark.parametrize("make", PROGRAMS)
def test_observing_changes_neither_graphs_nor_weights(make, tmp_path):
    """Whatever is compiled, and whenever.

    The graphs and, to the last bit, the weights are those of the bare loop.
    """
    graphs, weights = trained(make, "bare", tmp_path)
    for how in ("watch", "guard"):
        found, others = trained(make, how, tmp_path)
        assert found == graphs, how
        assert all(map(torch.equal, weights, others)), how


def test_what_is_not_seen_is_said_once(tmp_path):
    """The event names what the diagnosis sees no more."""
    torch.manual_seed(0)
    program = _wrapped(Net(norm=False), compiling(Graphs()))
    guard = holdfast.Guard(
        tmp_path, model=program.given, optimizer=program.optimizer, loader=batches(6)
    )
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, program.loss)
    limited = [event for event in guard.events() if event.kind == "diagnosis_limited"]
    assert len(limited) == 1
    assert "inputs" in limited[0].data["why"]


def test_a_step_with_nan_is_replayed_without_compiling(tmp_path):
    """Its origin and its bad sample are found, the graph stays the only one, the other steps are
    as without it.
    """
    kept = batches(5)
    bad = kept[2][0].clone(), kept[2][1]
    bad[0][3] = torch.nan
    torch.manual_seed(0)
    bare = _wrapped(Net(norm=False), compiling(Graphs()))
    torch.manual_seed(5)
    for batch in kept:
        bare_step(bare, batch)
    torch.compiler.reset()
    graphs = Graphs()
    torch.manual_seed(0)
    program = _wrapped(Net(norm=False), compiling(graphs))
    torch.manual_seed(5)
    loader = [*kept[:2], bad, *kept[2:]]
    guard = holdfast.Guard(
        tmp_path,
        model=program.given,
        optimizer=program.optimizer,
        loader=loader,
        max_grad_norm=MOST,
    )
    results = [guard.step(batch, program.loss) for batch in guard.batches(max_epochs=1)]
    assert [result.skipped for result in results] == [False, False, True, False, False, False]
    assert "without sample 3 of the batch it is finite" in str(results[2].reason)
    assert graphs.count == 1
    assert all(
        map(torch.equal, bare.given.state_dict().values(), program.given.state_dict().values())
    )


def test_out_of_memory_leaves_compiled_blocks_alone(tmp_path):
    """The ladder goes from the retry to the split, and says why it does not recompute what is
    compiled.
    """
    program = _wrapped(Net(norm=False), compiling(Graphs()))
    calls: list[int] = []

    def loss(batch: Any) -> Tensor:
        value = program.loss(batch)
        calls.append(len(batch[0]))
        if len(calls) in (2, 3):
            torch.empty(2**60)  # no machine has it
        return value

    guard = holdfast.Guard(
        tmp_path, model=program.given, optimizer=program.optimizer, loader=batches(3)
    )
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss)
    events = list(guard.events())
    tried = [
        event
        for event in events
        if event.kind in ("retry", "recompute_impossible", "recompute", "split")
    ]
    assert [event.kind for event in tried] == ["retry", "recompute_impossible", "split"]
    assert "torch.compile" in tried[1].data["why"]
    # Between them the split is tried out: in a copy of this process, or in it where a copy cannot
    # run backward.
    assert calls[:3] == [8, 8, 8]
    assert max(calls[3:]) == 4
    assert calls[-2:] == [4, 4]


WHOLE_STEP = """
import torch
from torch import nn

count = 0

def backend(graph, given):
    global count
    count += 1
    return graph.forward

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

@torch.compile(backend=backend)
def step(x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

for _ in range(6):
    step(torch.randn(8, 6), torch.randint(3, (8,)))
print("result", count, sum(p.double().abs().sum().item() for p in model.parameters()))
"""


@pytest.mark.slow
def test_a_compiled_training_step_is_the_same_under_holdfast_run(tmp_path):
    """The hooks of the observer add no graph where a whole step is compiled, its backward pass
    included.
    """
    program = tmp_path / "train.py"
    program.write_text(WHOLE_STEP)

    def result(ended: subprocess.CompletedProcess[str]) -> str:
        assert ended.returncode == 0, ended.stderr
        return next(line for line in ended.stdout.splitlines() if line.startswith("result"))

    bare = result(run_prepared([program], timeout=300))

    # Started, and not forked: the hooks must be there before torch is imported.
    command = [Path(sys.executable).parent / "holdfast", "run", "--run-dir", tmp_path / "run"]
    command += ["--", sys.executable, program]
    observed = result(subprocess.run(command, capture_output=True, text=True, check=False))
    assert bare.split()[1] != "0"
    assert observed == bare

"""The programs of `docs/guide/guard.md` and `docs/guide/decide.md` print what the pages say, and the
table about `torch.compile` is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.pages import DOCS, blocks
from tests.prepared import run_prepared
from tests.ranks.harness import all_returned, run_ranks
from tests.unit.learning.test_compiled import Graphs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.core.errors import PolicyError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:`torch.jit"),
]
# 6 batches of 16, and one of 8
DATA = torch.randn(104, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    """Let a test begin, and leave, a process in which nothing is compiled."""
    torch.compiler.reset()
    yield Graphs()
    torch.compiler.reset()


def trained(
    run_dir: Path,
    backend: Graphs | None,
    *,
    epochs: int = 2,
    drop_last: bool = False,
    **settings: Any,
) -> holdfast.Guard:
    """Train a small regression, compiled unless there is no backend."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    called = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = holdfast.DataLoader(DATA, batch_size=16, shuffle=True, drop_last=drop_last)
    guard = holdfast.Guard(run_dir, model=called, optimizer=optimizer, loader=loader, **settings)
    for batch in guard.batches(max_epochs=epochs):
        guard.step(batch, lambda x: (called(x) - x.sum(1, keepdim=True)).square().mean())
    if backend is not None:
        before = backend.count
        with guard.evaluate():
            called(DATA[:16])
            called(DATA[:16])
        assert backend.count == before + 1, "an evaluation is one graph more"
        backend.count = before
    guard.close()
    return guard


@pytest.mark.parametrize(
    ("page", "name", "printed"),
    [
        ("guard.md", "accumulate.py", ["update 32 of 40 samples"]),
        ("guard.md", "compiled.py", ["30 steps"]),
        ("decide.md", "late.py", ["skipped: True, step 11, then 10", "19 steps"]),
    ],
)
def test_a_program_of_the_page_prints_what_it_says(
    page: str, name: str, printed: list[str], tmp_path: Path
) -> None:
    """It runs as it stands, the compiled one with torch's own backend."""
    (program,) = (block.text for block in blocks(DOCS / "guide" / page) if block.title == name)
    (tmp_path / name).write_text(program)
    ended = run_prepared([tmp_path / name], cwd=tmp_path, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-len(printed) :] == printed


@pytest.mark.parametrize(
    ("settings", "many"),
    [
        ({"drop_last": True}, {1}),
        ({}, {2}),
        ({"micro_batch_size": 8}, {1}),
        ({"micro_batch_size": 5}, {2, 3, 4}),
    ],
)
def test_which_batches_compile_once_more(
    graphs: Graphs, tmp_path: Path, settings: Any, many: set[int]
) -> None:
    """One size is one graph; a short batch, and parts of several sizes, are more."""
    trained(tmp_path, graphs, **settings)
    assert graphs.count in many


@pytest.mark.parametrize("first", [True, False])
def test_a_run_goes_on_compiled_or_not(graphs: Graphs, tmp_path: Path, first: bool) -> None:
    """Checkpoints name weights as the model is written, so either reads what the other has
    saved.
    """
    trained(tmp_path, graphs if first else None, epochs=1)
    guard = trained(tmp_path, None if first else graphs)
    assert guard.resumed_from is not None
    assert guard.global_step == 14


def test_what_is_refused(graphs: Graphs, tmp_path: Path) -> None:
    """Names of blocks to recompute are an error."""
    with pytest.raises(PolicyError, match="H102"):
        trained(tmp_path / "names", graphs, recompute=["0"])


def trained_on_two_ranks(rank: int, how: str, run: Path) -> tuple[int, float]:
    """Train under DDP, compiled in one of three ways or not, and return the steps and a sum."""

    def compiled(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend="aot_eager")

    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    if how == "in place":
        model.compile(backend="aot_eager")
    called = DistributedDataParallel(compiled(model) if how == "inside" else model)
    if how == "outside":
        called = compiled(called)
    guard = holdfast.Guard(
        run,
        model=called,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loader=holdfast.DataLoader(torch.randn(96, 8), 16),
    )
    for batch in guard.batches(max_epochs=2):
        guard.step(batch, lambda x: (called(x) - x.sum(1, keepdim=True)).square().mean())
    return guard.global_step, sum(p.double().abs().sum().item() for p in model.parameters())


def test_three_ways_to_compile_several_processes(tmp_path: Path) -> None:
    """Each trains, to the bits of what is not compiled: its backend changes no kernel."""
    results = set()
    for how in ("eager", "outside", "inside", "in place"):
        ends = run_ranks(trained_on_two_ranks, 2, how, tmp_path / how)
        results.update(all_returned(ends))

    assert len(results) == 1
    assert results.pop()[0] == 6

"""The programs of the guide print what their pages show, and the table about `torch.compile` is
true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.pages import DOCS, Block, blocks
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


def programs() -> Iterator[Any]:
    """Yield each program of the guide that a block with its output follows."""
    for page in sorted((DOCS / "guide").glob("*.md")):
        page_blocks = blocks(page)
        for program, output in pairwise(page_blocks):
            is_program = program.language == "python" and program.title
            is_output = output.language == "text" and not output.text.startswith("$")
            if is_program and is_output:
                yield pytest.param(program, output.text, id=f"{page.stem}-{program.title}")


@pytest.mark.parametrize(("program", "output"), list(programs()))
def test_a_program_of_the_guide_prints_what_its_page_shows(
    program: Block, output: str, tmp_path: Path
) -> None:
    """The text is the same; numbers may differ by rounding on another processor."""
    (tmp_path / program.title).write_text(program.text)

    ended = run_prepared([tmp_path / program.title], cwd=tmp_path, timeout=240)

    assert ended.returncode == 0, ended.stderr
    assert_same_text_and_numbers(ended.stdout, output)


def test_the_first_program_of_the_guide_resumes_as_its_page_shows(tmp_path: Path) -> None:
    """It is killed after step 130, and the second start prints the rest."""
    first, shown = blocks(DOCS / "guide" / "guard.md")[:2]
    step = "    result = guard.step(batch, loss_fn)\n"
    dies = "    if guard.global_step == 130:\n        sys.stdout.flush()\n        os.kill(os.getpid(), 9)\n"
    interval = "save_interval_steps=50"
    assert step in first.text
    assert interval in first.text
    killed_text = "import os\nimport sys\n\n" + first.text.replace(step, step + dies)
    # A save in the background might not be complete when the process is killed.
    killed_text = killed_text.replace(interval, f"{interval}, async_save=False")
    (tmp_path / "killed.py").write_text(killed_text)
    (tmp_path / "train.py").write_text(first.text)

    killed = run_prepared([tmp_path / "killed.py"], cwd=tmp_path, timeout=240)
    resumed = run_prepared([tmp_path / "train.py"], cwd=tmp_path, timeout=240)

    assert killed.returncode == -9
    start, _, rest = shown.text.partition("Killed\n")
    assert_same_text_and_numbers("$ python train.py\n" + killed.stdout, start)
    shown_rest = rest.splitlines()
    reports = [line for line in shown_rest if ":" in line]
    assert len(reports) == 2
    assert re.sub(r"00000\d-", "", reports[0]) in re.sub(r"00000\d-", "", resumed.stderr)
    assert reports[1].partition(",")[2] in resumed.stderr
    steps = [line for line in shown_rest if line.startswith("step ") and ":" not in line]
    assert_same_text_and_numbers(resumed.stdout, "\n".join(steps))


def assert_same_text_and_numbers(printed: str, shown: str) -> None:
    """Compare two texts, and the numbers in them up to rounding."""
    number = r"-?\d+(?:\.\d+)?"
    printed_words = " ".join(printed.split())
    shown_words = " ".join(shown.split())
    assert re.sub(number, "0", printed_words) == re.sub(number, "0", shown_words)
    printed_numbers = [float(match) for match in re.findall(number, printed_words)]
    shown_numbers = [float(match) for match in re.findall(number, shown_words)]
    assert printed_numbers == pytest.approx(shown_numbers, rel=0.01, abs=0.01)


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

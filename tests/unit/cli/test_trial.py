"""`holdfast trial` as a user calls it: a better change, a worse one, none, one that breaks down, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import holdfast
from holdfast.cli.main import make_app
from holdfast.core.errors import PolicyError
from holdfast.run.comparison import Arm, Comparison, compare

app = make_app()

FACTORY = '''
import torch, holdfast

def build():
    """A regression that a rate of 1e-3 learns slowly."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=drawn)
    y = x @ torch.randn(8, 1, generator=drawn)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "loader": holdfast.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True),
        "loss_fn": lambda batch: (model(batch[0]) - batch[1]).square().mean(),
    }

def broken():
    return {**build(), "loss_fn": lambda batch: undefined_name}

def evaluated():
    made = build()
    x, y = made["loader"].dataset.tensors
    return {**made, "evaluate": lambda model: (model(x) - y).square().mean()}

def no_preset():
    return {**build(), "preset": "unknown"}

def leaves():
    raise SystemExit("no data")

def judged_badly():
    return {**build(), "evaluate": lambda model: torch.zeros(3)}

def with_policy_fields():
    return {**build(), "max_grad_norm": 1.0, "preset": "tts"}

def unfinished():
    return {"model": torch.nn.Linear(2, 2)}

number = 3
'''


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that stands at step 20, and the file that builds it."""
    (tmp_path / "program.py").write_text(FACTORY)
    namespace: dict[str, Any] = {}
    exec(FACTORY, namespace)
    parts = namespace["build"]()
    loss_fn = parts.pop("loss_fn")
    guard = holdfast.Guard(tmp_path / "run", **parts)
    for batch in guard.batches(max_steps=20):
        guard.step(batch, loss_fn)
    return tmp_path


def _call(run: Path, *arguments: str, function: str = "build", expect: int) -> str:
    where = [f"{run}/program.py:{function}", "--steps", "24"]
    result = CliRunner().invoke(app, ["trial", *where, *arguments])
    assert result.exit_code == expect, result.output
    return result.output


def _facts(run: Path, *arguments: str, expect: int, function: str = "build") -> dict[str, Any]:
    said = _call(run, *arguments, "--json", expect=expect, function=function)
    facts: dict[str, Any] = json.loads(said[said.index("{\n") :])
    return facts


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_a_better_rate_is_found_and_nothing_is_touched(run: Path) -> None:
    """B wins in every seed; the run directory has the same bytes as before."""
    before = _files(run / "run")
    facts = _facts(run, "--b", "lr=*20", "--from", str(run / "run"), expect=0)
    assert facts["better"]
    assert min(facts["gains"]) > facts["noise"]
    assert _files(run / "run") == before


def test_both_arms_go_on_from_the_checkpoint_on_the_same_batches(run: Path) -> None:
    """Without a difference every loss is the same, bit for bit; seeds differ; the first goes on as the run does."""
    facts = _facts(run, "--b", "lr=*1.0", "--from", str(run / "run"), expect=1)
    losses = [(pair["a"]["losses"], pair["b"]["losses"]) for pair in facts["seeds"]]
    assert all(a == b for a, b in losses)
    assert len({tuple(a) for a, _ in losses}) == 3
    namespace: dict[str, Any] = {}
    exec(FACTORY, namespace)
    parts = namespace["build"]()
    loss_fn = parts.pop("loss_fn")
    guard = holdfast.Guard(run / "run", **parts)
    alone = [float(guard.step(batch, loss_fn).loss) for batch in guard.batches(max_steps=44)]
    assert alone == losses[0][0]


@pytest.mark.parametrize("change", ["lr=*1.001", "lr=*0.1", "lr=1e4"])
def test_a_change_that_is_not_worth_it_is_not_adopted(run: Path, change: str) -> None:
    """Too small a gain, a loss, and a rate at which training breaks down: exit code 1, and A stays."""
    before = _files(run / "run")
    assert "Keep A" in _call(run, "--b", change, "--from", str(run / "run"), "--adopt", expect=1)
    assert _files(run / "run") == before


def test_an_adopted_rate_is_in_the_next_checkpoint(run: Path) -> None:
    """The run goes on with B's rate, which its scheduler does not take back; the events say why."""
    facts = _facts(run, "--b", "lr=*20", "--from", str(run / "run"), "--adopt", expect=0)
    namespace: dict[str, Any] = {}
    exec(FACTORY, namespace)
    parts = namespace["build"]()
    loss_fn = parts.pop("loss_fn")
    guard = holdfast.Guard(run / "run", **parts)
    assert guard.resumed_from is not None
    assert guard.resumed_from.name == facts["adopted"]
    assert guard.global_step == 20
    for batch in guard.batches(max_steps=24):
        guard.step(batch, loss_fn)
    assert parts["optimizer"].param_groups[0]["lr"] == pytest.approx(0.02)
    assert any(event.kind == "adopted" for event in guard.events())


def test_an_evaluation_of_the_users_decides(run: Path) -> None:
    """``evaluate`` replaces the training loss, and B may be compared with another A."""
    facts = _facts(run, "--a", "lr=*0.1", "--b", "lr=*10", function="evaluated", expect=0)
    assert facts["seeds"][0]["a"]["judged_by"] == "evaluate"


def test_fields_of_the_policy_are_taken_as_guard_takes_them_and_can_be_multiplied(run: Path) -> None:
    """The factory may return the very arguments of a guard."""
    facts = _facts(
        run, "--a", "lr=*0.1", "--b", "lr=*10", "--b", "max_grad_norm=*100", function="with_policy_fields", expect=0
    )
    assert facts["better"]


def test_a_run_that_is_running_is_told_before_anything_is_trained(run: Path) -> None:
    """--adopt needs the run directory for itself."""
    namespace: dict[str, Any] = {}
    exec(FACTORY, namespace)
    parts = namespace["build"]()
    parts.pop("loss_fn")
    guard = holdfast.Guard(run / "run", **parts)
    said = _call(run, "--b", "lr=*20", "--from", str(run / "run"), "--adopt", expect=2)
    assert "[H301]" in said
    assert "steps" not in said
    guard.close()


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is(run: Path) -> None:
    """The newest that verifies is the snapshot; the run directory keeps its bytes."""
    newest = max((run / "run" / "checkpoints").iterdir())
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = _files(run / "run")
    _facts(run, "--b", "lr=*1.0", "--from", str(run / "run"), expect=1)
    assert _files(run / "run") == before


def test_a_module_that_fails_when_it_is_imported_is_told(run: Path) -> None:
    """Whatever it raises."""
    (run / "bad.py").write_text("1 / 0")
    result = CliRunner().invoke(app, ["trial", f"{run}/bad.py:build", "--b", "lr=1"])
    assert result.exit_code == 2
    assert "ZeroDivisionError" in result.output


@pytest.mark.parametrize(
    ("function", "arguments", "rule"),
    [
        ("build", ["--b", "lrr=1"], "H704"),
        ("build", ["--b", "lr"], "H704"),
        ("build", ["--b", "lr=*x"], "H704"),
        ("build", ["--b", "max_grad_norm=-1"], "H102"),
        ("build", ["--b", "max_grad_norm=*2"], "H704"),
        ("build", ["--b", "lr=abc"], "H704"),
        ("build", ["--b", "lr=-1"], "H704"),
        ("build", ["--b", "momentum=high"], "H704"),
        ("build", ["--b", "lr=1", "--adopt"], "H105"),
        ("build", ["--b", "lr=1", "--from", "nowhere"], "H701"),
        ("unknown", ["--b", "lr=1"], "H703"),
        ("number", ["--b", "lr=1"], "H703"),
        ("unfinished", ["--b", "lr=1"], "H703"),
        ("broken", ["--b", "lr=1"], "H703"),
        ("leaves", ["--b", "lr=1"], "H703"),
        ("no_preset", ["--b", "lr=1"], "H110"),
        ("judged_badly", ["--b", "lr=1"], "H703"),
    ],
)
def test_bad_input_is_an_error_with_a_rule(run: Path, function: str, arguments: list[str], rule: str) -> None:
    """Never a traceback."""
    said = _call(run, *arguments, function=function, expect=2)
    assert f"[{rule}]" in said
    assert "Traceback" not in said


def test_too_few_seeds_are_refused() -> None:
    """Two pairs cannot tell a gain from noise."""
    with pytest.raises(PolicyError, match="H102"):
        compare(dict, {}, {"lr": 1}, seeds=2)


def _arm(score: float) -> Arm:
    return Arm((score,), score, "loss", 0, None)


@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=10), st.floats(-0.4, 0.4))
def test_equal_arms_are_never_better_and_the_order_matters(scores: list[float], gain: float) -> None:
    """With B as good as A nothing is adopted; B cannot be better than A, and A than B."""
    same = Comparison(tuple((_arm(s), _arm(s)) for s in scores), 0.0)
    assert not same.is_better
    one_way = Comparison(tuple((_arm(s), _arm(s - gain)) for s in scores), 0.0)
    other_way = Comparison(tuple((b, a) for a, b in one_way.pairs), 0.0)
    assert not (one_way.is_better and other_way.is_better)


def test_chance_is_adopted_seldom() -> None:
    """Of 2000 comparisons of scores that differ by chance alone at most one in 20 is called better."""
    drawn = torch.Generator().manual_seed(0)
    scores = torch.randn(2000, 3, 2, generator=drawn).tolist()
    found = [Comparison(tuple((_arm(10 + a), _arm(10 + b)) for a, b in each), 0.01).is_better for each in scores]
    assert sum(found) <= 100


def test_an_arm_that_breaks_down_loses() -> None:
    """B that always breaks down is worse, A that always does is worse, and both are equal."""
    good, lost = _arm(1.0), _arm(math.inf)
    assert not Comparison(((good, lost),) * 3, 0.01).is_better
    assert Comparison(((lost, good),) * 3, 0.01).is_better
    assert not Comparison(((lost, lost),) * 3, 0.01).is_better
    assert not Comparison(((lost, good), (good, good), (good, good)), 0.01).is_better

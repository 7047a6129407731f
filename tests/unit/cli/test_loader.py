"""`holdfast loader` as a user calls it: what it prints, what it chooses, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from holdfast.cli import loader
from holdfast.loader.machine import Machine

FACTORY = """
import time, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Waits(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.zeros(50)

class Broken(Waits):
    def __getitem__(self, index):
        raise RuntimeError(f"no file for {index}")

def waiting():
    return DataLoader(Waits(), batch_size=5)

class FailsInWorkers(Waits):
    def __getitem__(self, index):
        if get_worker_info() is not None:
            raise KeyError("no handle")
        return super().__getitem__(index)

class Shards(IterableDataset):
    def __iter__(self):
        get_worker_info()
        return iter(range(4))

def shards():
    return DataLoader(Shards(), batch_size=2)

def fails_in_workers():
    return DataLoader(FailsInWorkers())

def many_workers():
    return DataLoader(Waits(), batch_size=5, num_workers=300, prefetch_factor=3)

def tiny():
    return DataLoader([torch.zeros(3) for _ in range(640)], batch_size=32)

def broken():
    return DataLoader(Broken())

def empty():
    return DataLoader([], batch_size=2)

def raises():
    raise KeyError("DATA")

def dataset():
    return [1, 2]
"""

app = typer.Typer()
app.command()(loader.run)


def call(folder: Path, name: str, *more: str) -> Result:
    (folder / "program.py").write_text(FACTORY)
    return CliRunner().invoke(app, [f"{folder / 'program.py'}:{name}", *more])


def as_json(folder: Path, name: str, *more: str) -> dict[str, Any]:
    result = call(folder, name, "--json", *more)
    found: dict[str, Any] = json.loads(result.stdout)
    return {**found, "exit code": result.exit_code}


def test_what_each_number_of_workers_gives_is_printed(tmp_path: Path) -> None:
    """The machine, a row for each number that was tried, the choice and its reason."""
    result = call(tmp_path, "waiting", "--step-seconds", "0.01")
    assert result.exit_code == 0, result.output
    for expected in ("machine: ", "│ 0 ", "│ 1 ", "choice: num_workers=", "why: "):
        assert expected in result.output
    assert result.output.count("chosen") == 1


def test_a_dataset_of_tiny_samples_needs_no_workers(tmp_path: Path) -> None:
    """As JSON with facts, measurements and choice."""
    found = as_json(tmp_path, "tiny", "--step-seconds", "0.05")
    assert (found["exit code"], found["num_workers"], found["concerns"]) == (0, 0, [])
    assert found["batch_bytes"] == 32 * 3 * 4
    assert [each["num_workers"] for each in found["measured"]] == [0]
    assert found["machine"]["cpu_quota"] > 0


def test_the_loader_as_it_is_raises_concerns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many workers are a warning with its figures; where a single batch is too large the check fails."""
    small = Machine(cpu_quota=2, shared_memory_free_bytes=100)
    monkeypatch.setattr(Machine, "of_this_rank", classmethod(lambda cls: small))
    found = as_json(tmp_path, "many_workers", "--step-seconds", "0.001")
    assert [(each["rule"], each["certain"]) for each in found["concerns"]] == [("H630", False), ("H631", True)]
    assert found["exit code"] == 1
    result = call(tmp_path, "many_workers")
    assert "warning [H630]: num_workers=300" in result.output
    assert "error [H631]: 300 workers x prefetch_factor=3" in result.output


@pytest.mark.parametrize(
    ("name", "why", "rule"),
    [
        ("broken", "its loader raised RuntimeError: no file for 0", "H703"),
        ("fails_in_workers", "its loader raised KeyError: 'no handle'", "H703"),
        ("empty", "list has no samples", "H610"),
        ("shards", "divides its items among workers itself", "H607"),
        ("raises", "KeyError: 'DATA'", "H703"),
        ("dataset", "it returned a list, no DataLoader", "H703"),
        ("missing", "AttributeError", "H703"),
    ],
)
def test_a_factory_that_cannot_be_used(tmp_path: Path, name: str, why: str, rule: str) -> None:
    """What is wrong with the user's code is printed in its own words, with exit code 2 and no traceback."""
    result = call(tmp_path, name)
    assert result.exit_code == 2, result.output
    assert why in result.output
    assert rule in result.output
    assert "Traceback" not in result.output

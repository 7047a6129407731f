"""`holdfast loader` as a user calls it: what it prints, what it chooses, and bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

import holdfast
from holdfast.cli import loader
from holdfast.loader.tuning.probing import with_workers

FACTORY = """
import time, torch
from torch.utils.data import DataLoader, Dataset

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

class OneIsCorrupt(Waits):
    def __getitem__(self, index):
        if index == 60:
            raise RuntimeError(f"no file for {index}")
        return torch.zeros(50)

class FailsInWorkers(Waits):
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            raise KeyError("no handle")
        return torch.zeros(50)

class CannotBeSent(Waits):
    def __getitem__(self, index):
        return lambda: index

def one_is_corrupt():
    return OneIsCorrupt()

def fails_in_workers():
    return FailsInWorkers()

def cannot_be_sent():
    return DataLoader(CannotBeSent(), batch_size=None)

def many_workers():
    return DataLoader(Waits(), batch_size=5, num_workers=300, prefetch_factor=3)

def tiny():
    return [torch.zeros(3) for _ in range(640)]

def unpicklable():
    made = Waits()
    made.transform = lambda x: x
    return DataLoader(made, num_workers=1, multiprocessing_context="spawn")

def broken():
    return DataLoader(Broken())

def empty():
    return DataLoader([], batch_size=2)

def raises():
    raise KeyError("DATA")

def number():
    return 3

def named():
    return {"model": None, "data": [1, 2]}
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


def test_samples_that_wait_get_workers(tmp_path: Path) -> None:
    """Batches of 20 ms beside steps of 10 ms: two to four workers, every option in the table, and the reason."""
    result = call(tmp_path, "waiting", "--step-seconds", "0.01")
    assert result.exit_code == 0, result.output
    assert re.search(r"choice: num_workers=[234], prefetch_factor=\d", result.output)
    assert result.output.count("chosen") == 1
    assert "machine: " in result.output
    assert "a step takes 10 ms" in result.output
    assert "why: " in result.output


def test_a_dataset_of_tiny_samples_needs_no_workers(tmp_path: Path) -> None:
    """A dataset instead of a loader, in batches of the given size; as JSON with facts, options and choice."""
    found = as_json(tmp_path, "tiny", "--batch-size", "32", "--batches", "6", "--step-seconds", "0.005")
    assert found["exit code"] == 0
    assert (found["plan"]["num_workers"], found["plan"]["prefetch_factor"]) == (0, None)
    assert len(found["samples"]) == 6
    assert found["load"]["batch_bytes"] == 32 * 3 * 4
    assert [option["num_workers"] for option in found["plan"]["options"]][:3] == [0, 1, 2]
    assert found["machine"]["cpu_quota"] > 0
    assert found["concerns"] == []


def test_the_loader_as_it_is_raises_concerns(tmp_path: Path) -> None:
    """300 workers are too many for this machine, which is a warning with its figures, not a failure."""
    found = as_json(tmp_path, "many_workers")
    assert "H630" in [concern["rule"] for concern in found["concerns"]]
    assert all(concern["severity"] == "warning" for concern in found["concerns"])
    assert found["exit code"] == 0
    assert (found["load"]["num_workers"], found["load"]["prefetch_factor"]) == (300, 3)
    assert "warning [H630]: num_workers=300" in call(tmp_path, "many_workers").output


@pytest.mark.slow
def test_a_loader_that_would_certainly_fail_is_a_failed_check(tmp_path: Path) -> None:
    """A lambda in a dataset for spawned workers is an error with its path, and the exit code says so."""
    found = as_json(tmp_path, "unpicklable", "--batches", "2")
    assert found["exit code"] == 1
    assert [concern["rule"] for concern in found["concerns"]] == ["H634"]
    assert found["concerns"][0]["what"].startswith("dataset.transform cannot be pickled")


@pytest.mark.slow
def test_the_options_can_be_measured(tmp_path: Path) -> None:
    """With --measure every option is run, and what the choice reaches is said."""
    result = call(tmp_path, "waiting", "--step-seconds", "0.01", "--measure")
    assert result.exit_code == 0, result.output
    assert re.search(r"measured: the choice reaches \d+% of the best option", result.output)
    assert "measured batches/s" in result.output


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", "its loader raised RuntimeError: no file for 0"),
        ("empty", "its loader has no batch"),
        ("raises", "KeyError: 'DATA'"),
        ("number", "it returned a int, no DataLoader or dataset"),
        ("named", "it returned a dict, no DataLoader or dataset"),
        ("missing", "AttributeError"),
    ],
)
def test_a_factory_that_cannot_be_used(tmp_path: Path, name: str, why: str) -> None:
    """What is wrong with the user's code is told in its own words, with exit code 2 and no traceback."""
    result = call(tmp_path, name)
    assert result.exit_code == 2
    assert why in result.output
    assert "H703" in result.output


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("one_is_corrupt", "RuntimeError: no file for 60"),
        ("fails_in_workers", "its loader raised in a worker KeyError: 'no handle'"),
    ],
)
def test_what_only_measuring_finds_is_told_as_well(tmp_path: Path, name: str, why: str) -> None:
    """A corrupt sample beyond the first batches, or one that fails in workers alone, is named with exit code 2."""
    assert call(tmp_path, name).exit_code == 0
    result = call(tmp_path, name, "--measure")
    assert result.exit_code == 2, result.output
    assert why in result.output
    assert "H703" in result.output
    assert "Traceback" not in result.output


def test_batches_that_no_worker_can_send_are_not_measured(tmp_path: Path) -> None:
    """A loader of torch's would wait for them for ever; without workers they are no concern."""
    assert as_json(tmp_path, "cannot_be_sent")["concerns"] == []
    found = as_json(tmp_path, "cannot_be_sent", "--measure")
    assert found["exit code"] == 1
    assert [concern["rule"] for concern in found["concerns"]] == ["H641"]
    assert "measured" not in found


@pytest.mark.parametrize(("workers", "method"), [("auto", "spawn"), (2, "forkserver"), ("auto", None), (0, None)])
def test_a_loader_that_chooses_is_measured_with_its_own_way_to_start(workers: Any, method: str | None) -> None:
    """With "auto" torch knows no workers yet, and so not how they are started."""
    made = holdfast.DataLoader([1, 2], num_workers=workers, multiprocessing_context=method)
    expected = method or torch.multiprocessing.get_start_method()
    assert loader._start_method(made) == expected
    context = with_workers(made, 1, 2).multiprocessing_context
    assert (expected if context is None else context.get_start_method()) == expected

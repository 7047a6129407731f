"""A checkpoint that the system does not let be read is not damaged.

Nothing is renamed, and no work is lost by it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.small_run import guard_in, same, train
from typer.testing import CliRunner

import holdfast
from holdfast.checkpoint.store import Store
from holdfast.cli.main import make_app


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no file beyond those that it holds."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)  # the lowest number that a new file would get
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


Fault = dict[str, Any]
Trained = Callable[[Path], None]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_too_many_open_files_are_no_damage(trained: Trained, tmp_path: Path) -> None:
    """With no file left to open, verifying is an H307 that names the checkpoint and the way on,
    not an H311.
    """
    trained(tmp_path)
    newest, *_ = Store(tmp_path / "checkpoints").entries()
    with (
        no_more_files(),
        pytest.raises(holdfast.RunDirectoryError, match="Too many open files") as caught,
    ):
        newest.verify()
    error = caught.value
    assert error.rule == "H307"
    assert newest.path.name in error.what
    assert f"mv {newest.path} {newest.path.with_name('damaged-' + newest.path.name)}" in error.fix
    newest.verify()


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let opening a file of some name fail with an error of the system, in any checkpoint that
    is chosen.
    """
    chosen: dict[str, Any] = {"name": None, "within": "", "number": errno.ESTALE}
    really_open = os.open

    def opened(place: Any, *arguments: Any, **further: Any) -> Any:
        path = Path(place)
        if path.name == chosen["name"] and chosen["within"] in str(path):
            raise OSError(chosen["number"], os.strerror(chosen["number"]), str(path))
        return really_open(place, *arguments, **further)

    monkeypatch.setattr(os, "open", opened)
    return chosen


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.json"])
def test_a_fault_that_passes_changes_nothing(
    name: str, fault: Fault, trained: Trained, tmp_path: Path
) -> None:
    """Each start ends with H307 meanwhile, all checkpoints keep their names, and then the run
    goes on.
    """
    trained(tmp_path)
    before = names(tmp_path)
    for number in (errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.ENOMEM):
        fault |= {"name": name, "number": number}
        with pytest.raises(holdfast.RunDirectoryError, match="H307"):
            guard_in(tmp_path)
    assert names(tmp_path) == before
    fault["name"] = None
    guard, _ = guard_in(tmp_path)
    assert guard.global_step == 6
    assert not [event for event in guard.events() if event.kind == "checkpoint_damaged"]
    guard.close()


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_an_input_output_error_is_damage(
    name: str, fault: Fault, trained: Trained, tmp_path: Path
) -> None:
    """The disk has lost the bytes.

    Nobody has to rename anything for the run to go on from the one before.
    """
    trained(tmp_path)
    newest = max((tmp_path / "checkpoints").iterdir())
    fault |= {"name": name, "within": newest.name, "number": errno.EIO}
    guard, _ = guard_in(tmp_path)
    assert guard.global_step == 4
    assert [event for event in guard.events() if event.kind == "checkpoint_damaged"]
    guard.close()


def test_the_way_on_where_it_never_can_be_read(
    fault: Fault, trained: Trained, tmp_path: Path
) -> None:
    """The command of the message lets the run go on from the checkpoint before, with the same
    bits as ever.
    """
    _, expected = train(tmp_path / "undisturbed", 9)
    trained(tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    fault |= {"name": "optimizer.safetensors", "within": newest.name}
    with pytest.raises(holdfast.RunDirectoryError, match="H307") as caught:
        guard_in(tmp_path / "run")
    _, source, target = caught.value.fix.split("`")[1].split()
    Path(source).rename(target)
    guard, model = guard_in(tmp_path / "run")
    assert guard.global_step == 4
    for batch in guard.batches(max_steps=9):
        guard.step(batch, lambda x: model(x).square().mean())
    assert same(model, expected)


def test_what_lists_and_prunes_checkpoints_does_not_call_it_damaged(
    fault: Fault, trained: Trained, tmp_path: Path
) -> None:
    """`holdfast checkpoints --verify` says that it cannot be read now, and nothing is deleted
    meanwhile.
    """
    trained(tmp_path)
    before = names(tmp_path)
    fault |= {"name": "model.safetensors"}
    told = CliRunner().invoke(make_app(), ["checkpoints", str(tmp_path), "--verify", "--json"])
    rows = json.loads(told.output)["checkpoints"]
    assert told.exit_code == 1, "as with one that is damaged"
    assert len(rows) == 3
    assert all(
        row["status"].startswith(f"cannot be read now ([Errno {errno.ESTALE}]") for row in rows
    )
    with pytest.raises(holdfast.RunDirectoryError, match="H307"):
        Store(tmp_path / "checkpoints").prune(1)
    assert names(tmp_path) == before


def test_a_directory_in_the_place_of_a_file_is_damage(trained: Trained, tmp_path: Path) -> None:
    """There is no such file then, whatever is tried.

    The checkpoint is set aside, as one that lacks it.
    """
    trained(tmp_path)
    newest = max((tmp_path / "checkpoints").iterdir())
    size = (newest / "optimizer.safetensors").stat().st_size
    (newest / "optimizer.safetensors").unlink()
    (newest / "optimizer.safetensors").mkdir()
    # So it is told by its size already
    if (newest / "optimizer.safetensors").stat().st_size != size:
        (newest / "manifest.json").unlink()
        (newest / "manifest.json").mkdir()
    guard, _ = guard_in(tmp_path)
    assert guard.global_step == 4
    assert f"damaged-{newest.name}" in names(tmp_path)
    guard.close()


def test_a_draft_that_cannot_be_read_back_is_a_save_that_failed(
    fault: Fault, tmp_path: Path
) -> None:
    """It is an event like a full disk, training goes on, and the next save succeeds."""
    guard, model = guard_in(tmp_path)
    for batch in guard.batches(max_steps=6):
        guard.step(batch, lambda x: model(x).square().mean())
        fault["name"] = "state.json" if guard.global_step == 4 else None
        fault["within"] = ".tmp-"
    failed = [event for event in guard.events() if event.kind == "save_failed"]
    assert [event.global_step for event in failed] == [4]
    assert os.strerror(errno.ESTALE) in failed[0].data["error"]
    assert [entry.global_step for entry in Store(tmp_path / "checkpoints").entries()] == [6, 2, 0]


def test_a_checkpoint_on_a_disk_that_is_not_mounted_is_no_damage(
    trained: Trained, tmp_path: Path
) -> None:
    """A link that leads nowhere is an H312 and keeps its name.

    Nothing older is taken in its place.
    """
    trained(tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    newest.rename(tmp_path / "moved")
    newest.symlink_to(tmp_path / "not mounted")
    with pytest.raises(holdfast.CheckpointError, match="H312"):
        guard_in(tmp_path / "run")
    (tmp_path / "moved").rename(tmp_path / "not mounted")
    guard, _ = guard_in(tmp_path / "run")
    assert guard.global_step == 6
    guard.close()

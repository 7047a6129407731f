"""Checkpoints that are gone or out of reach.

No run begins anew in silence, and none ends as if it had been saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.small_run import guard_in, train
from typer.testing import CliRunner

import holdfast
from holdfast.cli.main import make_app


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "not mounted" / "here")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def a_file(path: Path) -> None:
    path.write_bytes(b"")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # such a path is 108 bytes long at most
        made.bind(path.name)
        os.chdir(here)


def a_folder_of_another_run(path: Path) -> None:
    train(path.parent / "another", 4)
    path.symlink_to(path.parent / "another" / "checkpoints")


OUT_OF_REACH: list[Callable[[Path], object]] = [
    a_dangling_link,
    a_link_to_itself,
    a_file,
    os.mkfifo,
    a_socket,
]


@pytest.mark.parametrize(
    "put", [*OUT_OF_REACH, Path.mkdir, a_folder_of_another_run, lambda path: None]
)
@pytest.mark.parametrize("recorded", ["run.json", "the recorder"])
def test_a_run_that_has_saved_does_not_begin_anew_in_silence(put, recorded, trained, tmp_path):
    """Whatever stands where its checkpoints were, each start is an H312 before any work, and
    then it goes on.
    """
    trained(tmp_path / "a")
    if recorded == "the recorder":  # where run.json is damaged
        (tmp_path / "a" / "run.json").write_text("{")
        if put is a_folder_of_another_run:
            pytest.skip("the name of the run is lost with its file")
    checkpoints, elsewhere = tmp_path / "a" / "checkpoints", tmp_path / "elsewhere"
    checkpoints.rename(elsewhere)
    put(checkpoints)
    for _ in range(2):
        with pytest.raises(holdfast.CheckpointError, match="H312"):
            guard_in(tmp_path / "a")
    if checkpoints.is_symlink() or not checkpoints.is_dir():
        checkpoints.unlink(missing_ok=True)
    else:
        checkpoints.rmdir()
    elsewhere.rename(checkpoints)
    with guard_in(tmp_path / "a")[0] as guard:
        assert (guard.global_step, guard.statistics().resumes) == (6, 1)


@pytest.mark.parametrize("put", OUT_OF_REACH)
def test_a_new_run_that_could_save_nothing_is_an_error_before_any_work(put, tmp_path):
    """A folder of checkpoints that is prepared and cannot be reached is an H312.

    Commands that look say it, too.
    """
    (tmp_path / "a").mkdir()
    put(tmp_path / "a" / "checkpoints")
    with pytest.raises(holdfast.CheckpointError, match="H312"):
        guard_in(tmp_path / "a")
    (tmp_path / "a" / "recorder").mkdir(exist_ok=True)
    said = CliRunner().invoke(make_app(), ["checkpoints", str(tmp_path / "a")])
    assert said.exit_code != 0
    assert "H312" in said.output


def test_ways_in_which_a_run_has_no_checkpoint_and_may_begin(tmp_path):
    """Killed before the first save, never saved on purpose, or begun anew on purpose as the
    message says.
    """
    guard, _ = guard_in(tmp_path / "a")  # opened, and killed before the first save
    guard._release()
    assert train(tmp_path / "a", 4, save_interval_steps=None)[0].global_step == 4
    assert train(tmp_path / "a", 4)[0].statistics().resumes == 0
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    with pytest.raises(holdfast.CheckpointError) as caught:
        guard_in(tmp_path / "a")
    assert str(tmp_path / "a" / "run.json") in caught.value.fix
    (tmp_path / "a" / "run.json").unlink()
    assert train(tmp_path / "a", 4)[0].statistics().resumes == 0
    # Begun from another run's
    shutil.copytree(tmp_path / "a" / "checkpoints", tmp_path / "b" / "checkpoints")
    for steps in (6, 8):
        assert train(tmp_path / "b", steps)[0].resumed_from is not None


def test_what_run_json_says_is_written_once(tmp_path, monkeypatch):
    """That a run has saved costs one write in its life, whatever the number of saves.

    And it survives a copy.
    """
    written: list[dict[str, object]] = []
    replace = holdfast.guard.directory.replace_file

    def noting(path: Path, data: bytes) -> None:
        if path.name == "run.json":
            written.append(json.loads(data))
        replace(path, data)

    monkeypatch.setattr(holdfast.guard.directory, "replace_file", noting)
    train(tmp_path / "a", 20)
    assert [each["saved_in"] for each in written] == [None, "checkpoints"]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert train(tmp_path / "b", 22)[0].statistics().resumes == 1


@contextlib.contextmanager
def no_room_for_files() -> Iterator[None]:
    """Let the system refuse every file of this process that is longer than some words."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("newest", [None, 4])
def test_a_run_whose_saves_failed_does_not_end_as_if_all_were_well(newest, tmp_path, caplog):
    """The last words, the log and the verdict say that nothing, or how much, of it was saved."""
    run_dir = tmp_path / "a"
    guard, model = guard_in(run_dir)
    refusing = contextlib.ExitStack()
    with refusing:
        if newest is None:
            refusing.enter_context(no_room_for_files())
        for batch in guard.batches(max_steps=9):
            guard.step(batch, lambda x: model(x).square().mean())
            if guard.global_step == 5 and newest is not None:
                (run_dir / "checkpoints").rename(tmp_path / "elsewhere")
                a_dangling_link(run_dir / "checkpoints")
    said, closed = guard.events()[-2:]
    assert (said.kind, closed.kind) == ("not_saved", "closed")
    assert said.data["newest_checkpoint"] == newest
    assert str(said) in caplog.text
    said = CliRunner().invoke(make_app(), ["explain", str(run_dir)])
    assert (
        f"newest checkpoint is from step {newest}" if newest else "nothing was saved"
    ) in said.output


def test_a_folder_that_may_not_be_written_is_an_error_before_any_work(tmp_path):
    """A first save that is refused for good, as no full disk does, ends the run as it begins
    with an H302.
    """
    guard, _ = guard_in(tmp_path / "a")
    (tmp_path / "a" / "checkpoints").mkdir(mode=0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)  # rights do not bind the administrator
    try:
        with pytest.raises(holdfast.RunDirectoryError, match="H302"):
            next(guard.batches(max_steps=3))
    finally:
        if os.getuid() == 0:
            os.seteuid(0)

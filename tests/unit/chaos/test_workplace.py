"""Trials run in copies: what is written is new each time, and nothing of the user's is touched."""

from __future__ import annotations

import pytest

from holdfast.chaos import workplace
from holdfast.chaos.workplace import Workplace
from holdfast.core.errors import PolicyError


@pytest.fixture
def origin(tmp_path):
    """Return a working directory with a run to go on from and data."""
    top = tmp_path / "origin"
    for path, text in {
        "train.py": "",
        "runs/a/last.pt": "before",
        "data/x.bin": "large" * 300_000,
    }.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)
    return top


@pytest.fixture
def opened():
    """Return what makes a workplace that is removed at the end."""
    made = []
    yield lambda *given: made.append(Workplace(*given)) or made[-1]
    for each in made:
        each.close()


def test_each_trial_begins_with_what_was_there(origin, opened):
    """What a trial has changed, made and removed is as before in the next one, and in the origin
    all the time.
    """
    place = opened(origin, ())
    place.renew()
    (place.work / "runs/a/last.pt").write_text("after")
    (place.work / "train.py").unlink()
    (place.work / "new.pt").write_text("new")
    (place.temporary / "left").write_text("left")
    (origin / "train.py").write_text("edited during the campaign")
    assert {each.name for each in place.files()} == {"last.pt", "x.bin", "new.pt", "left"}
    place.renew()
    found = {str(each.relative_to(place.work)): each.read_text()[:6] for each in place.files()}
    assert found == {"train.py": "", "runs/a/last.pt": "before", "data/x.bin": "largel"}
    assert (origin / "runs/a/last.pt").read_text() == "before"
    place.close()
    assert not place.scratch.exists()


def test_a_whole_path_in_the_command_means_the_copy(origin, opened):
    """Whatever the folders above are called.

    What is not copied, and what lies elsewhere, is meant as it is.
    """
    top = origin.rename(origin.parent / "venv")
    place = opened(top, ())
    assert place.word(f"{top}/runs/../train.py") == str(place.work / "train.py")
    for word in ("train.py", f"{top}/.venv/bin/python", "/usr/bin/env", "--lr=1"):
        assert place.word(word) == word


def test_of_what_is_named_only_that_is_copied(origin, opened, tmp_path):
    """With --writes the rest is linked, large or in folders.

    A path elsewhere is new for each trial.
    """
    place = opened(origin, ["runs", tmp_path / "elsewhere"])
    place.renew()
    assert (place.work / "data").is_symlink()
    assert not (place.work / "train.py").is_symlink()
    (place.work / "runs/a/last.pt").write_text("after")
    (tmp_path / "elsewhere").mkdir()
    place.renew()
    assert not (tmp_path / "elsewhere").exists()
    assert (
        (place.work / "runs/a/last.pt").read_text()
        == (origin / "runs/a/last.pt").read_text()
        == "before"
    )


def test_what_cannot_be_copied_or_removed_is_refused(origin, opened, tmp_path, monkeypatch):
    """A directory that is too large, and a path elsewhere that is there already.

    Nothing is made or removed.
    """
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(PolicyError, match="exists"):
        opened(origin, [tmp_path / "elsewhere"])
    monkeypatch.setattr(workplace, "MAX_COPIED_BYTES", 1 << 20)
    with pytest.raises(PolicyError, match="1 MiB"):
        opened(origin, ())
    assert (tmp_path / "elsewhere").exists()


def test_a_link_within_leads_to_the_copy(origin, opened):
    """What is written through it, or removed behind it, is not the user's."""
    (origin / "newest").symlink_to("runs/a")
    (origin / "runs/newest.pt").symlink_to(origin / "runs/a/last.pt")
    place = opened(origin, ())
    place.renew()
    (place.work / "runs/newest.pt").write_text("after")
    (place.work / "newest/last.pt").unlink()
    assert (origin / "runs/a/last.pt").read_text() == "before"

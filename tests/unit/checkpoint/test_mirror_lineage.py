"""How a run directory and a mirror are related, from the checkpoints that each of them knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.mirror.lineage import History, LocalSide, MirrorSide, Relation, compare


def relation(
    checkpoints: str,
    copies: str,
    *,
    completed: str = "",
    begun: str | None = None,
    run_id: str | None = "run",
    is_new: bool = False,
) -> Relation:
    """Compare two sides, each of which has checkpoints that are single letters, newest first."""
    local = LocalSide(
        run_id="run", is_new=is_new, checkpoints=checkpoints, completed=completed, begun=begun
    )
    return compare(local, MirrorSide(run_id=run_id, copies=copies))


@pytest.mark.parametrize(
    ("local", "mirror", "more", "expected"),
    [
        # A mirror without copies, and a directory without checkpoints.
        ("a", "", {}, Relation.NOT_BEHIND),
        ("", "", {"is_new": True, "run_id": "other"}, Relation.NOT_BEHIND),
        ("", "ba", {"is_new": True, "run_id": "other"}, Relation.BEHIND),
        ("", "ba", {}, Relation.BEHIND),
        # One side has continued, and the other has kept the common checkpoint.
        ("cba", "ba", {}, Relation.NOT_BEHIND),
        ("ba", "cba", {}, Relation.BEHIND),
        # The side that has continued has deleted the common checkpoint.
        ("edc", "a", {"completed": "a"}, Relation.NOT_BEHIND),
        ("a", "edc", {"completed": "a"}, Relation.BEHIND),
        # Both have continued.
        ("ca", "da", {"completed": "a"}, Relation.FORKED),
        ("c", "d", {}, Relation.FORKED),
        # Killed between completing a copy and remembering that, and then the copy was deleted here.
        ("e", "da", {"completed": "a", "begun": "d"}, Relation.NOT_BEHIND),
        # A copy that was only begun is not known to be in the mirror's history.
        ("ba", "da", {"completed": "a", "begun": "b"}, Relation.FORKED),
        # Another run, whether or not it has copies yet.
        ("a", "b", {"run_id": "other"}, Relation.OTHER_RUN),
        ("a", "", {"run_id": "other"}, Relation.OTHER_RUN),
        # The owners of the mirror cannot be read.
        ("ba", "a", {"run_id": None}, Relation.NOT_BEHIND),
        ("b", "a", {"run_id": None}, Relation.FORKED),
    ],
)
def test_the_relation_of_two_sides(
    local: str, mirror: str, more: dict[str, object], expected: Relation
) -> None:
    """Each case is a history; letters are checkpoints, newest first."""
    assert relation(local, mirror, **more) is expected  # type: ignore[arg-type]


def test_the_history_outlives_the_process(tmp_path: Path) -> None:
    """A damaged file counts as none."""
    history = History(tmp_path)
    history.note_begun("a")
    history.note_completed("a")
    history.note_begun("b")

    again = History(tmp_path)

    assert list(again.completed) == ["a"]
    assert again.begun == "b"
    (tmp_path / "mirror.json").write_text("{")
    assert list(History(tmp_path).completed) == []

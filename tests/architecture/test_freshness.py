"""Figures are of one age with the code: a result whose sources have changed is refused unless that is declared."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from benchmarks.freshness import FIRST_LOOKS, RESULTS, ROOT, SOURCES, declare, declared, digest, stale
from benchmarks.run_all import SCRIPTS, files_of

NAME = "clipping"
SOURCE = "src/holdfast/numerics/gradients.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A root with one source and one result that was measured on it."""
    (tmp_path / SOURCE).parent.mkdir(parents=True)
    shutil.copy(ROOT / SOURCE, tmp_path / SOURCE)
    write_result(tmp_path, dirty=False)
    return tmp_path


def write_result(root: Path, *, dirty: bool) -> None:
    (root / "benchmarks" / "results").mkdir(parents=True, exist_ok=True)
    body = {"sources": digest(NAME, root), "commit": {"dirty": dirty}}
    (root / "benchmarks" / "results" / f"{NAME}.json").write_text(json.dumps(body))


def found(root: Path) -> list[str]:
    return [each.name for each in stale(root)]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="digests are of the syntax tree as Python 3.11 has it")
def test_no_figure_is_older_than_what_it_measures() -> None:
    """Every result file was made from its sources as they are, or says why their change cannot move it."""
    assert not [f"{each.name}: {each.why}" for each in stale()]
    assert all(len(each["because"]) > 20 for each in declared().values())


def test_every_result_names_its_sources() -> None:
    """Each script of `run_all` has sources of its own for each of its result files."""
    names = {file.stem for script in SCRIPTS for file in files_of(script, RESULTS)}
    assert names <= SOURCES.keys() | FIRST_LOOKS
    assert {file.stem for file in RESULTS.glob("*.json")} <= SOURCES.keys() | FIRST_LOOKS


def test_a_change_of_code_makes_a_figure_stale_and_a_comment_does_not(checkout: Path) -> None:
    """The digest sees what runs, and nothing else."""
    file = checkout / SOURCE
    file.write_text("# a comment\n" + file.read_text())
    assert found(checkout) == []
    file.write_text(file.read_text() + "\nMORE = 1\n")
    assert found(checkout) == [NAME]


def test_a_declaration_holds_until_the_next_change(checkout: Path) -> None:
    """What is declared harmless is this change, not the ones after it."""
    file = checkout / SOURCE
    file.write_text(file.read_text() + "\nMORE = 1\n")
    declare([NAME], "a constant that nothing reads", checkout)
    assert found(checkout) == []
    file.write_text(file.read_text() + "\nMORE = 2\n")
    assert found(checkout) == [NAME]


def test_a_result_of_a_dirty_tree_is_refused(checkout: Path) -> None:
    """A figure must be repeatable from a commit."""
    write_result(checkout, dirty=True)
    assert found(checkout) == [NAME]

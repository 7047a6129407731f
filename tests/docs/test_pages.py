"""What the pages of docs/ show is real: messages, commands, code, events, tests."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.docs.pages import DOCS, ROOT, Block, blocks, session, shows
from tests.prepared import run_prepared

from holdfast.cli.main import make_app
from holdfast.core.events import process_events, run_events  # noqa: F401 - they fill KINDS
from holdfast.core.events.event import KINDS
from holdfast.explain.collecting import collect_log
from holdfast.explain.judging import judge

HOW_TOS = sorted((DOCS / "how-to").glob("*.md"))
PAGES = sorted(DOCS.rglob("*.md"))
_MESSAGE = re.compile(
    r"^```text title=\"(?P<name>[\w.]+\.log)\"\n(?P<log>.*?)^```\n(?P<after>.*?)(?=^```|\Z)",
    re.MULTILINE | re.DOTALL,
)


def _messages() -> Iterator[Any]:
    for page in HOW_TOS:
        for match in _MESSAGE.finditer(page.read_text(encoding="utf-8")):
            yield pytest.param(match["log"], match["after"], id=f"{page.stem}-{match['name']}")


@pytest.mark.parametrize(("log", "after"), list(_messages()))
def test_a_message_that_is_shown_gets_the_verdict_that_the_page_names(
    log: str, after: str, tmp_path: Path
) -> None:
    """`holdfast explain` of the shown log gives the rule of the first link below it."""
    named = re.search(r"\[(H\d+)\]\(../rules\.md#h\d+\)", after)
    assert named is not None
    (tmp_path / "train.log").write_text(log)
    assert judge(collect_log(tmp_path / "train.log")).cause == named[1]


def test_a_link_to_a_rule_leads_to_that_rule() -> None:
    """The id that is shown is the one that the link leads to."""
    for page in PAGES:
        for shown, anchor in re.findall(
            r"\[(H\d+)\]\([^)]*rules\.md#(\w+)\)", page.read_text(encoding="utf-8")
        ):
            assert shown.lower() == anchor, f"{page.name}: {shown}"


def _commands() -> Iterator[tuple[Path, str]]:
    """Yield every call of holdfast that a block of a page shows."""
    for page in PAGES:
        for block in blocks(page):
            lines = (
                [command for command, _ in session(block.text)]
                if block.language == "console"
                else []
            )
            if block.language == "sh":
                lines = block.text.splitlines()
            for line in lines:
                if line.startswith("holdfast "):
                    yield page, line


def test_every_command_that_is_shown_is_understood_by_the_command_line() -> None:
    """Commands and options exist, and values are such as they take."""
    group: Any = typer.main.get_command(make_app())
    shown = list(_commands())
    assert len(shown) > 30
    for page, line in shown:
        words = shlex.split(line, comments=True)[1:]
        try:
            command = group.commands[words[0]]
            command.make_context(words[0], words[1:])
        except (Exception, SystemExit) as error:  # whatever the command line raises
            raise AssertionError(f"{page.name}: {line}: {error!r}") from error


def test_every_kind_of_event_that_is_shown_is_recorded_somewhere() -> None:
    """A filter for a kind that never comes would print nothing, and prove nothing."""
    outside = [path for path in (ROOT / "src").rglob("*.py") if path.parent.name != "events"]
    sources = "".join(path.read_text() for path in outside)
    for page, line in _commands():
        for kind in re.findall(r"--kind (\w+)", line):
            assert re.search(rf"\b{KINDS[kind].__name__}\(", sources), f"{page.name}: {kind}"


def _python() -> Iterator[tuple[Path, Block]]:
    for page in PAGES:
        yield from ((page, block) for block in blocks(page) if block.language == "python")


# Their imports take long
@pytest.mark.parametrize("frameworks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_python_that_is_shown_is_python_and_names_what_exists(frameworks: bool) -> None:
    """Each block is parsed.

    Each name of holdfast in it, imported or behind ``holdfast.``, is there.
    """
    for page, block in _python():
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"):
                if "speechbrain" in str(node.module):
                    continue  # needs a package that is not installed
                if ("integrations" in str(node.module)) != frameworks:
                    continue
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name), f"{page.name}: {node.module}.{name.name}"
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "holdfast"
            ):
                assert hasattr(importlib.import_module("holdfast"), node.attr), (
                    f"{page.name}: holdfast.{node.attr}"
                )


GUIDE = sorted((DOCS / "guide").glob("*.md"))
_SCRIPTS = {
    block.title: block.text
    for page in GUIDE
    for block in blocks(page)
    if "max_epochs=4" in block.text and block.title
}


@pytest.mark.parametrize("name", list(_SCRIPTS))
def test_a_script_of_the_guide_runs_and_goes_on_where_it_was_stopped(
    name: str, tmp_path: Path
) -> None:
    """It prints the same whether its epochs were made by one process or by two."""
    said = []
    for run, parts in (("whole", ["4"]), ("parts", ["2", "4"])):
        (tmp_path / run).mkdir()
        for epochs in parts:
            (tmp_path / run / name).write_text(
                _SCRIPTS[name].replace("max_epochs=4", f"max_epochs={epochs}")
            )
            ended = run_prepared([name], cwd=tmp_path / run, timeout=300)
            assert ended.returncode == 0, ended.stderr
        said.append(ended.stdout)
    assert said[0] == said[1] != ""


def test_methods_of_a_guard_that_are_named_exist() -> None:
    """`guard.something` in a page of docs is a public name of `Guard`."""
    guard = importlib.import_module("holdfast").Guard
    for page in [DOCS / "tutorial.md", DOCS / "promises.md", DOCS / "why.md", *HOW_TOS, *GUIDE]:
        for name in re.findall(r"\bguard\.(?!md\b)([a-z]\w*)", page.read_text(encoding="utf-8")):
            assert hasattr(guard, name) or name in {
                "policy",
                "resumed_from",
            }, f"{page.name}: guard.{name}"


def test_every_promise_names_a_test_that_exists() -> None:
    """A row of the table of promises is proved by a test that can be run."""
    named = re.findall(
        r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "promises.md").read_text(encoding="utf-8")
    )
    assert len(named) >= 15
    for file, test in named:
        assert re.search(rf"^\s*def {test}\(", (ROOT / file).read_text(), re.MULTILINE), (
            f"{file}::{test}"
        )


def test_the_comparison_of_output_is_one() -> None:
    """Dots stand for any text and white space does not count; everything else does."""
    assert shows("145 steps\n... verified ...", "145  steps\n| a | verified |")
    assert not shows("145 steps", "146 steps")
    assert not shows("145 steps", "145 steps\nand more")
    assert not shows("a ... c", "a b")

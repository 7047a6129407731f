"""Rules about the shape of the code that a linter does not check."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager"}


class Seen(NamedTuple):
    """What is kept of a module.

    All trees at once would be 150 MB, which the forks of later tests would copy.
    """

    documented: bool
    functions: list[tuple[str, str]]  # name, first paragraph of the docstring
    imported: set[str]  # the packages, without what is below them
    attributes: list[tuple[str | None, str, int]]  # of what, which, in which line


@cache
def seen(path: Path) -> Seen:
    found = Seen(
        documented=bool(ast.get_docstring(tree := ast.parse(path.read_text()))),
        functions=[],
        imported=set(),
        attributes=[],
    )
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            opening = (ast.get_docstring(node) or "").split("\n\n")[0].rstrip()
            found.functions.append((node.name, opening))
        if isinstance(node, ast.Import):
            found.imported.update(alias.name.split(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            found.imported.add(node.module.split(".")[0])
        if isinstance(node, ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) else None
            found.attributes.append((of, node.attr, node.lineno))
    return found


def test_every_module_says_what_lives_there() -> None:
    """Every module of the package and of the tests opens with a docstring."""
    assert not [str(path) for path in SOURCE + TESTS if not seen(path).documented]


def test_every_test_opens_with_the_sentence_that_it_proves() -> None:
    """A test has a docstring whose first line is a whole sentence."""
    functions = [
        (path.name, name, opening) for path in TESTS for name, opening in seen(path).functions
    ]
    lacking = [
        each for each in functions if each[1].startswith("test_") and not each[2].endswith(".")
    ]
    assert not lacking


def test_no_file_is_a_drawer_for_the_rest() -> None:
    """No file or folder is named utils, helpers, common, misc, base or manager."""
    everything = [
        *(ROOT / "src").rglob("*"),
        *(ROOT / "tests").rglob("*"),
        *(ROOT / "benchmarks").rglob("*"),
    ]
    assert not [str(path) for path in everything if path.stem.lower() in FORBIDDEN_NAMES]


def test_nothing_pickles() -> None:
    """No module imports pickle or a relative of it, nor calls torch.save or torch.load."""
    names = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for path in SOURCE:
        assert not names & seen(path).imported, path
        assert not {("torch", "save"), ("torch", "load")} & {
            each[:2] for each in seen(path).attributes
        }, path


def test_no_test_asserts_a_wall_clock_time() -> None:
    """Tests measure no durations: a slow machine must not fail them."""
    clocks = {"perf_counter", "process_time", "thread_time"}
    found = [
        f"{path.name}:{line}"
        for path in TESTS
        for _, attribute, line in seen(path).attributes
        if attribute in clocks and path.name != "test_clock.py"
    ]
    assert not found


def missing(text: str, files: str) -> Iterator[str]:
    """Yield the files and the parts of our modules that a comment names and that are not there."""
    not_ours = {
        "derivatives.yaml",
        "lr_scheduler.py",
        "modeling_t5.py",
        "torch/nn/functional.py",
    }
    kernel_files = {"memory.stat"}
    a_users = {"model.py", "file.py", "path/to/file.py", "policy.yaml", "CKPT.yaml"}
    for name in (
        set(re.findall(r"(?<![\w./])(?:\w+/)*\w+\.(?:py|yaml|md|toml)\b", text))
        - not_ours
        - a_users
    ):
        if f"/{name}\n" not in files:
            yield name
    for package, part in re.findall(r"``(\w+)\.(?!json|md|yaml)(\w+)[\w.]*``", text):
        is_there = f"/{package}/{part}/" in files or f"/{package}/{part}.py\n" in files
        # `guard` is usually a variable of the user.
        is_ours = f"/holdfast/{package}/__init__.py\n" in files and package != "guard"
        if is_ours and not is_there and f"{package}.{part}" not in kernel_files:
            yield f"{package}.{part}"


def test_comments_cite_only_what_is_there() -> None:
    """A file or module that a comment or docstring of the package names exists."""
    files = "".join(
        f"/{path.relative_to(ROOT)}\n"
        for top in ("src", "docs", "benchmarks")
        for path in (ROOT / top).rglob("*")
    )
    wrong: list[str] = []
    for path in SOURCE:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT or token.string.startswith(('"""', 'r"""')):
                wrong += [
                    f"{path.relative_to(ROOT)}:{token.start[0]}: {each}"
                    for each in missing(token.string, files)
                ]
    assert not wrong


def test_one_place_renames_checkpoints():
    """Only the search that has just verified a checkpoint moves it aside.

    Code that loads one cannot.
    """
    callers = {
        path.relative_to(ROOT / "src" / "holdfast").as_posix()
        for path in SOURCE
        if re.search(r"(?<!_)\bmove_aside\b", path.read_text())
    }
    assert callers == {"checkpoint/newest.py"}

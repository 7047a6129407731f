"""What ``-h`` shows."""

from __future__ import annotations

import re
import shlex

import pytest
import typer.main
from typer.testing import CliRunner

from holdfast.cli.main import COMMANDS, make_app


def _help_of(command: str) -> str:
    return CliRunner().invoke(make_app(command), [command, "-h"]).output


@pytest.mark.parametrize("command", COMMANDS)
def test_each_example_can_be_typed(command) -> None:
    """The help of every command ends with examples whose options the command has."""
    _, _, examples = _help_of(command).partition("Examples:")
    lines = re.findall(r"\bholdfast (.+)", examples)
    assert lines
    group = typer.main.get_command(make_app(command))
    for line in lines:
        name, *arguments = shlex.split(line)
        assert name == command
        group.get_command(None, name).make_context(name, arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_values_have_a_placeholder(command) -> None:
    """No option shows the type of its value, such as ``<int range>``, instead of a word."""
    _, _, options = _help_of(command).partition("Options:")
    assert not re.search(r"^  -.*<(?:int|float|str|path|bool|list)\b", options, re.MULTILINE)

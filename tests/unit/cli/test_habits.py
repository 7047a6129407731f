"""What a user of many command lines expects of this one.

-h, completion, JSON that parses, near misses, a pager.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.unit.report.made_runs import happened, make_run, write_events

from holdfast.cli.main import COMMANDS
from holdfast.core.errors import nearest

CLI = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'holdfast'; from holdfast.cli.main import main; main()",
]
IN_FORKS = """
import json, os, sys, tempfile
from holdfast.cli.main import main, make_app
make_app()
answers = []
for words in json.load(sys.stdin):
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    if (pid := os.fork()) == 0:
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        sys.argv, code = ["holdfast", *words], 1
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out.seek(0), err.seek(0)
    answers.append([words, code, out.read().decode(), err.read().decode()])
print(json.dumps(answers))
"""
"""Calls commands in forks of one process, since each start costs a second."""


class Answer(NamedTuple):
    words: list[str]
    code: int
    stdout: str
    stderr: str


def ask(*commands: Sequence[object], cwd: Path, first: str = "", **variables: str) -> list[Answer]:
    """Return how the command line answers each of these; `first` is run before any of them."""
    done = subprocess.run(
        [sys.executable, "-c", first + IN_FORKS],
        input=json.dumps([list(map(str, words)) for words in commands]),
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **variables},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [Answer(*each) for each in json.loads(done.stdout)]


def in_terminal(*words: object, cwd: Path, **variables: str) -> str:
    """Return what a command writes to a terminal, which is its stdin, stdout and stderr."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [*CLI, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env={**os.environ, **variables},
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert child.wait(60) in (0, 2)
    return shown.decode()


def test_every_mistake_is_valid_json(tmp_path: Path) -> None:
    """Unknown options, words too many or too few, and paths of nothing.

    One object on stdout, and exit code 2.
    """
    needs_nothing = {"explain", "doctor"}
    mistakes: list[list[str]] = [["--json"], ["nonsense", "--json"], ["--nonsense", "--json"]]
    for name in COMMANDS:
        mistakes += [
            [name, "--nonsense", "--json"],
            [name, "--json", *("abcdef" if name != "run" else ())],
        ]
        mistakes += [[name, "--json"]] if name not in needs_nothing else []
        mistakes += [[name, "nowhere", "--json"]] if name not in ("run", "chaos") else []
    mistakes += [["plan", "a.py:b", "--device", "T4", "--margin", "1x", "--json"]]
    mistakes += [
        ["run", "--json", "--", "no-such-program"],
        ["run", "--json", "--hang-limit", "x", "--", "true"],
    ]
    for answer in ask(*mistakes, cwd=tmp_path):
        error = json.loads(answer.stdout)["error"]
        assert set(error) == {"rule", "what", "limit", "fix"}, answer
        assert all(error.values()), answer
        assert answer.code in (2, 127), answer
        assert "Traceback" not in answer.stderr


def test_what_a_factory_prints_is_not_in_the_json(tmp_path: Path) -> None:
    """Prints of the user's code and of what it starts stay out, and a factory that fails is an
    error object.
    """
    (tmp_path / "job.py").write_text(
        "import os, torch\nprint('imported')\ndef build():\n    print('built'); os.system('echo"
        " started')\n    model = torch.nn.Linear(4, 4)\n    return {'model': model, 'optimizer':"
        " torch.optim.SGD(model.parameters(), 0.1),\n            'loss_fn': lambda batch:"
        " model(batch).square().mean(), 'batch': torch.ones(8, 4)}\n"
    )
    words = [
        "plan",
        "job.py:build",
        "--device",
        "T4",
        "--precision",
        "fp32",
        "--no-verify",
        "--json",
    ]
    made, failed = ask(words, ["plan", "job.py:torch", *words[2:]], cwd=tmp_path)
    assert json.loads(made.stdout)["factory"] == "job.py:build", made
    assert json.loads(failed.stdout)["error"]["rule"], failed


def test_what_nobody_has_foreseen_is_json_too(tmp_path: Path) -> None:
    """An exception of ours is an error object with its place.

    Without --json it is two lines on stderr.
    """
    first = (
        "import holdfast.cli.events as module\ndef boom(*_): raise KeyError('of"
        " ours')\nmodule.open_recordings = boom"
    )
    as_json, as_text = ask(["events", ".", "--json"], ["events", "."], cwd=tmp_path, first=first)
    assert "KeyError: 'of ours'" in json.loads(as_json.stdout)["error"]["what"]
    assert (as_json.code, as_text.code, as_text.stdout) == (2, 2, "")
    assert as_text.stderr.startswith("error: KeyError: 'of ours' (")
    assert "Fix: " in as_text.stderr


def test_h_is_help_everywhere(tmp_path: Path) -> None:
    """-h and --help print the same, and so does the bare name of the program."""
    pairs = [
        [*name, option]
        for name in [[], *([name] for name in COMMANDS)]
        for option in ("-h", "--help")
    ]
    answers = ask(*pairs, [], cwd=tmp_path)
    for short, long in zip(answers[:-1:2], answers[1:-1:2], strict=True):
        assert short.stdout == long.stdout
        assert "Usage: " in short.stdout
    assert answers[-1].stdout == answers[0].stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("holdfast expl", "explain"),
        ("holdfast plan --dev", "--device"),
        ("holdfast explain H10", "H101"),
    ],
)
def test_shells_complete_commands_options_and_rules(
    shell: str, typed: str, expected: str, tmp_path: Path
) -> None:
    """Each shell asks in its own way, and its script can be printed."""
    asked = {
        "bash": {"COMP_WORDS": typed.replace(" ", "\n"), "COMP_CWORD": str(typed.count(" "))},
        "zsh": {"_TYPER_COMPLETE_ARGS": typed},
        "fish": {"_TYPER_COMPLETE_ARGS": typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    (answer,) = ask([], cwd=tmp_path, _HOLDFAST_COMPLETE=f"complete_{shell}", **asked)
    assert expected in answer.stdout, answer
    script = subprocess.run(
        CLI,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "_HOLDFAST_COMPLETE": f"source_{shell}"},
    )
    assert "_HOLDFAST_COMPLETE" in script.stdout


def test_a_near_miss_is_answered_with_what_was_meant(tmp_path: Path) -> None:
    """Commands, options, rules, phases and paths, also where a letter looks like a figure.

    Other figures do not.
    """
    make_run(tmp_path / "runs" / "train-1")
    paths = (
        "explain runs/trian-1",
        "watch rnus/train-1",
        "checkpoints runs/trian-1",
        "events runs/trian-1",
    )
    meant = {
        "explain H4O1": "'H401'",
        "explain h4ol": "'H401'",
        "explain 401": "'H401'",
        "explian H401": "'explain'",
        "explain H401 --jsn": "--json",
        "run --hang-limit savlng=3 -- true": "'saving'",
        **dict.fromkeys(paths, "runs/train-1?"),
    }
    for (words, expected), answer in zip(
        meant.items(), ask(*map(str.split, meant), cwd=tmp_path), strict=True
    ):
        assert answer.code == 2, words
        assert expected in answer.stderr, answer
    assert nearest("H999", ["H401", "H899", "H1620"], least=0.85) is None
    assert nearest("train", ["checkpoint", "seal"]) is None


def test_one_mistake_has_one_wording(tmp_path: Path) -> None:
    """A path that is not there, and a directory that is of no run, are answered alike by all
    that take a run.
    """
    (tmp_path / "empty").mkdir()
    names = ("events", "watch", "report", "metrics", "checkpoints", "quarantine")
    for path, rule in (("nowhere", "H733"), ("empty", "H731")):
        answers = ask(*([name, path, "--json"] for name in names), cwd=tmp_path)
        errors: list[dict[str, Any]] = [json.loads(answer.stdout)["error"] for answer in answers]
        assert [error["rule"] for error in errors] == [rule] * len(names)
        assert len({error["what"] for error in errors}) == 1, errors


def test_a_run_without_a_guard_is_told_what_it_is(tmp_path: Path) -> None:
    """Checkpoints and quarantine say what to call, or where the guard of the run writes.

    The others work.
    """
    run = make_run(tmp_path / "train-1")
    asked = ask(
        ["checkpoints", run],
        ["quarantine", run],
        ["events", run],
        ["watch", run, "--json"],
        cwd=tmp_path,
    )
    for answer in asked[:2]:
        assert answer.code == 2
        assert f"{run} is a directory of `holdfast run`, not of a Guard" in answer.stderr
        assert f"`holdfast explain {run}`" in answer.stderr
    assert [answer.code for answer in asked[2:]] == [0, 0]
    assert json.loads(asked[3].stdout)[0]["state"] == "ended"
    guard = tmp_path / "guard dir"
    write_events(guard / "recorder" / "rank0", happened("loop", 1.0))
    write_events(next((run / "processes").iterdir()), happened("guard", 1.0, path=str(guard)))
    (answer,) = ask(["checkpoints", run], cwd=tmp_path)
    assert f"Fix: pass '{guard}'." in answer.stderr, answer


@pytest.mark.parametrize("words", [["explain"], ["explain", "H401"]])
def test_long_texts_go_through_a_pager_on_a_terminal_only(words: list[str], tmp_path: Path) -> None:
    """The pager of the user gets the text; a pipe gets it without one."""
    pager = {"PAGER": "cat > paged", "TERM": "xterm"}
    assert "H401" not in in_terminal(*words, cwd=tmp_path, **pager)
    assert "H401" in (tmp_path / "paged").read_text()
    (tmp_path / "paged").unlink()
    (answer,) = ask(words, cwd=tmp_path, **pager)
    assert "H401" in answer.stdout
    assert not (tmp_path / "paged").exists()


def test_progress_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    """What takes long says what it does, on stderr, and only where somebody watches."""
    run = make_run(tmp_path / "train-1")
    assert "reading the run" in in_terminal("report", run, cwd=tmp_path, TERM="xterm")
    (answer,) = ask(["report", run], cwd=tmp_path)
    assert "reading the run" not in answer.stdout + answer.stderr

"""`holdfast explain --bundle`: the evidence of a failure as one short text without secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from holdfast.cli.main import make_app
from holdfast.core.events.event import Event
from holdfast.explain.signatures.signature import FAMILIES
from holdfast.recorder.black_box import BlackBox
from holdfast.recorder.run_files import OUTPUT_FILE, SUPERVISOR_FOLDER
from holdfast.report.bundle import MAX_TOKENS, estimated_tokens

ERROR = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x11 and 10x2)"
TRACEBACK = f'Traceback (most recent call last):\n  File "train.py", line 9, in step\n{ERROR}\n'
WRONG_SHAPE = 10 + FAMILIES.index("shape or type")
SECRETS = {
    "of a known shape": "hf_abcdefghijklmnopqrstuvwxyz012345",
    "after its name": "correct-horse",
    "in a header": "abcdefg.hijk",
    "in an address": "s3cr3t",
    "of an environment variable": "plain words as a password",
}
OUTPUT = (
    f"login with {SECRETS['of a known shape']}\n"
    f"api_key={SECRETS['after its name']}\n"
    f"Authorization: Bearer {SECRETS['in a header']}\n"
    f"postgres://me:{SECRETS['in an address']}@host/db\n"
    f"the program prints {SECRETS['of an environment variable']}\n"
)


def bundle(*arguments: object, stdin: str | None = None) -> Result:
    words = ["explain", "--bundle", *map(str, arguments)]
    return CliRunner().invoke(make_app(), words, input=stdin)


def failed_run(path: Path, output: str) -> Path:
    """Write the recordings of a run whose command has failed."""
    box = BlackBox(path / SUPERVISOR_FOLDER)
    for kind, facts in (
        ("attempt_started", {"attempt": 0}),
        ("attempt_ended", {"attempt": 0, "status": 1}),
    ):
        box.event(Event(kind=kind, global_step=0, unix_seconds=1.0, data=facts))
    box.close()
    (path / OUTPUT_FILE).write_text(f"--- holdfast: attempt 0 ---\n{output}{TRACEBACK}")
    return path


@pytest.mark.parametrize("source", ["run", "log", "standard input"])
def test_bundle_names_the_cause_and_hides_secrets(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause, its evidence and the output are there, and no secret is."""
    monkeypatch.setenv("MY_PASSWORD", SECRETS["of an environment variable"])
    log = tmp_path / "train.log"
    log.write_text(OUTPUT + TRACEBACK)
    topic = {"run": failed_run(tmp_path / "run", OUTPUT), "log": log, "standard input": "-"}[source]

    shown = bundle(topic, stdin=OUTPUT + TRACEBACK)

    assert shown.exit_code == WRONG_SHAPE
    assert "[H965, shape or type]" in shown.stdout.splitlines()[0]
    assert ERROR in shown.stdout
    assert [kind for kind, secret in SECRETS.items() if secret in shown.stdout] == []
    if source != "standard input":
        assert "the program prints ***" in shown.stdout


def test_bundle_keeps_what_follows_a_secret_and_hides_a_key_that_was_cut(tmp_path: Path) -> None:
    """The log begins with the rest of a private key, and with a secret on a line of its own."""
    log = tmp_path / "run.log"
    key = "MIIEowIBAAKCAQEA7\n-----END RSA PRIVATE KEY-----\n"
    log.write_text(f"{key}api_key=correct-horse\n{TRACEBACK}")

    shown = bundle(log).stdout

    assert "MIIEowIBAAKCAQEA7" not in shown
    assert "correct-horse" not in shown
    assert shown.count(ERROR) > 1
    assert 'File "train.py", line 9, in step' in shown


@pytest.mark.parametrize(
    "line",
    [
        "step 12345 loss 0.12345678901234567 lr 1e-05",
        "deadbeef" * 100,
        "训练失败" * 50,
        "#@$%" * 40,
        "word",
    ],
)
def test_bundle_has_a_limited_length(line: str, tmp_path: Path) -> None:
    """However long the output is, the text has at most 4,000 tokens and ends with the error."""
    shown = bundle(failed_run(tmp_path, f"{line}\n" * 3_000))

    assert estimated_tokens(shown.stdout) <= MAX_TOKENS
    _, _, output = shown.stdout.partition("## Output")
    assert ERROR in output


@pytest.mark.parametrize("arguments", [[], ["H101"], ["--json", "train.log"]])
def test_bundle_without_a_failure_is_refused(arguments: list[str]) -> None:
    """A rule, the list of rules and JSON have no bundle: H105, exit code 2."""
    refused = bundle(*arguments)

    assert refused.exit_code == 2
    if "--json" in arguments:
        assert json.loads(refused.output)["error"]["rule"] == "H105"
    else:
        assert "H105" in refused.output

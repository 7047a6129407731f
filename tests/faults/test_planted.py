"""What others have put in place of a run's files.

Links, pipes, devices, holes, and forged checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from evals.fuzz.targets import forge
from tests.faults.small_run import guard_in, train
from tests.unit.report.made_runs import make_run
from typer.testing import CliRunner

import holdfast
from holdfast.checkpoint.manifest import FILE_NAME
from holdfast.checkpoint.store import Store
from holdfast.cli.main import make_app
from holdfast.supervise.launch.restarts import Budgets
from holdfast.supervise.launch.supervisor import RunOptions, Supervisor

COMMANDS = ("events", "explain", "watch --once", "metrics --jsonl /dev/null", "report")


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """Let a test that waits for a pipe fail."""

    def waits(*_: object) -> None:
        raise KeyboardInterrupt("it waits")  # no OSError, which may be passed over

    before = signal.signal(signal.SIGALRM, waits)
    signal.alarm(240)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def plant(path: Path, kind: str, victim: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "hole":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(path))
    else:
        path.mkdir()


def supervised(run: Path, *words: str) -> int:
    words = words or ("-c", "print(1)")
    supervisor = Supervisor(
        RunOptions(
            command=(sys.executable, *words),
            program=sys.executable,
            run_path=run,
            budgets=Budgets(),
        ),
        quiet=True,
    )
    return supervisor.run().exit_code


GUARD_FILES = (
    "lock",
    "run.json",
    "recorder/rank0/steps.ring",
    "recorder/rank0/events.ring",
    "recorder/rank0/scalars.ring",
    "recorder/rank0/optimizers.json",
    "checkpoints/.tmp-000005-step00000008",
    "best/loss/best.json",
)
RUN_FILES = (
    "supervisor/lock",
    "supervisor/steps.ring",
    "supervisor/events.ring",
    "supervised.json",
    "output.log",
    ".tmp-output.log",
    "verdict.json",
)


@pytest.mark.parametrize("kind", ["link", "pipe", "hole"])
@pytest.mark.parametrize("place", [*GUARD_FILES, "recorder", "best"])
def test_a_guard_writes_through_nothing_that_was_planted(trained, tmp_path, place, kind):
    """It goes on, or says what lies there.

    What a link leads to is as it was, and it waits for nobody.
    """
    run, victim = tmp_path / "run", tmp_path / "victim"
    trained(run)
    victim.write_text("precious") if "." in place or place == "lock" else victim.mkdir()
    plant(run / place, kind, victim)
    try:
        guard, _ = train(run, 8)
        guard.log(accuracy=1.0)
        guard.validated(1.0, keep=1)
        guard.close()
        said = f"step {guard.global_step}"
    except holdfast.RunDirectoryError as error:
        said = f"{error.rule} at {error.what.partition(f'{run}/')[2]}"
    assert said in ("step 8", f"H302 at {place})")
    assert not any(victim.iterdir()) if victim.is_dir() else victim.read_text() == "precious"


@pytest.mark.parametrize("kind", ["link", "pipe", "hole"])
@pytest.mark.parametrize("place", [*RUN_FILES, "supervisor", "processes"])
def test_a_supervisor_writes_through_nothing_that_was_planted(tmp_path, place, kind):
    """As above, of `holdfast run`."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("precious") if place not in ("supervisor", "processes") else victim.mkdir()
    plant(run / place, kind, victim)
    try:
        said = str(supervised(run))
    except holdfast.RunDirectoryError as error:
        said = error.rule
    assert said in ("0", "H722")
    assert not any(victim.iterdir()) if victim.is_dir() else victim.read_text() == "precious"


@pytest.mark.parametrize("kind", ["pipe", "device", "hole", "socket", "directory", "link"])
def test_commands_leave_out_what_is_no_file(tmp_path, monkeypatch, kind):
    """Each command answers, whatever lies in place of all files at once.

    What a link leads to is not shown.
    """
    run, victim = make_run(tmp_path / "run", steps=3), tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.chdir(tmp_path)
    for path in [each for each in run.rglob("*") if each.is_file() and each.name != "process.json"]:
        plant(path, kind, victim)
    for command in COMMANDS:
        name, *options = command.split()
        result = CliRunner().invoke(make_app(name), [name, str(run), *options])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            command,
            result.exception,
        )
        assert "precious" not in result.output
    assert "precious" not in (run / "report.html").read_text()


def test_what_holds_command_lines_and_output_is_for_this_user_alone(tmp_path):
    """The directory is 0700 where holdfast makes it, and its files are 0600.

    One that is there keeps its mode.
    """
    before = os.umask(0o022)
    try:
        supervised(tmp_path / "made", "-c", "import torch; print(1)")
        guard, _ = train(tmp_path / "guarded", 2)
        guard.close()
        (tmp_path / "shared").mkdir(mode=0o750)
        supervised(tmp_path / "shared")
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes[tmp_path / "made"] == modes[tmp_path / "guarded"] == 0o700
    assert modes[tmp_path / "shared"] == 0o750
    files = {
        path: mode
        for path, mode in modes.items()
        if path.is_file() and "checkpoints" not in path.parts
    }
    assert len(files) > 12
    assert {mode for path, mode in files.items() if path.name != "lost.json"} == {0o600}


def test_secrets_of_a_command_line_are_kept_nowhere(tmp_path):
    """Neither the supervisor's files, nor those of the process, nor the page hold them.

    The command got them.
    """
    run, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text("import sys, torch; assert '='.join(sys.argv).count('abc' + '123') == 2")
    assert (
        supervised(run, str(script), "--api-key=abc123", "--hf_token", "abc123", "--lr", "1") == 0
    )
    assert CliRunner().invoke(make_app("report"), ["report", str(run)]).exit_code == 0
    holding = [path for path in run.rglob("*") if path.is_file() and b"abc123" in path.read_bytes()]
    assert not holding
    assert "--api-key=*** --hf_token *** --lr 1" in (run / "report.html").read_text()


# --- forged checkpoints


def forged(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest of a checkpoint, and sign it again."""
    tree = json.loads((folder / FILE_NAME).read_bytes().partition(b"\n")[0])
    change(tree)
    body = json.dumps(tree).encode()
    (folder / FILE_NAME).write_bytes(
        body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
    )


def first(tree: dict[str, Any]) -> dict[str, Any]:
    extent: dict[str, Any] = tree["files"]["model.safetensors"]["0.weight"]
    return extent


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an absolute name": (
        lambda tree: tree["files"].update({"/etc/passwd": tree["files"].pop("state.json")})
    ),
    "a name above": (
        lambda tree: tree["files"].update({"../../run.json": tree["files"].pop("state.json")})
    ),
    "no name": lambda tree: tree["files"].update({"": tree["files"].pop("state.json")}),
    "files that are a list": lambda tree: tree.update(files=[1]),
    "a format that is a text": lambda tree: tree.update(format="1"),
    "a time that is none": lambda tree: tree.update(unix_seconds=1e300),
    "a place behind the end": lambda tree: first(tree).update(end=2**60),
    "a place before the start": lambda tree: first(tree).update(begin=-5),
    "a place that is a text": lambda tree: first(tree).update(begin="0"),
    "a foreign key": lambda tree: first(tree).update(more=1),
    "another type": lambda tree: first(tree).update(dtype="F64"),
    "another shape": lambda tree: first(tree).update(shape=[2**60, 2**60]),
    "a shape that is a number": lambda tree: first(tree).update(shape=3),
    "a name of markup": (
        lambda tree: tree["files"].update({"../[/]": tree["files"].pop("state.json")})
    ),
    "no digest": lambda tree: first(tree).update(sha256=None),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_damage(trained, tmp_path, name):
    """Signed or not, one that cannot be is refused in words, and the run goes on from the
    checkpoint before.
    """
    trained(tmp_path)
    newest = Store(tmp_path / "checkpoints").entries()[0]
    forged(newest.path, FORGERIES[name])
    with pytest.raises(holdfast.CheckpointError, match="H311"):
        newest.verify()
    result = CliRunner().invoke(make_app("checkpoints"), ["checkpoints", str(tmp_path), "--verify"])
    assert result.exit_code == 1, result.exception
    guard, _ = guard_in(tmp_path)
    assert guard.resumed_from is not None
    assert guard.resumed_from.name.endswith("step00000004")


@pytest.mark.parametrize(
    "value",
    [
        '{"$": "dtype", "text": "load"}',
        '{"$": "nothing"}',
        '{"$": "tensor", "name": "?"}',
        "[" * 50_000,
        '{"$": "device", "text": "?"}',
        '{"$": "bytes", "hex": "?"}',
        '{"$": "Counter", "items": 1}',
        '{"$": "tensor", "name": "0.weight", "stride": [1152921504606846976, 1]}',
        "null",
    ],
)
def test_a_forged_state_is_refused_and_left_where_it_is(trained, tmp_path, value):
    """What holdfast does not write is an H311 when it is read.

    Only the user moves it, and goes on before it.
    """
    trained(tmp_path)
    newest = Store(tmp_path / "checkpoints").entries()[0]
    file = newest.path / "state.json"
    model = value if value == "null" else f'{{"0.weight": {value}}}'
    file.write_text(
        json.dumps({**json.loads(file.read_bytes()), "model": "?"}).replace('"?"', model, 1)
    )
    forge(newest.path)
    newest.verify()
    command = ["checkpoints", str(tmp_path), "--export", str(tmp_path / "out.safetensors")]
    result = CliRunner().invoke(make_app("checkpoints"), command)
    assert result.exit_code == 2, result.exception
    assert "H311" in result.output
    refused_until_it_is_moved(tmp_path, newest.path)


def refused_until_it_is_moved(run: Path, newest: Path) -> None:
    """Check that a checkpoint whose digests are right stays, and that the fix of the error lets
    the run go on.
    """
    before = sorted(path.name for path in newest.parent.iterdir())
    for _ in range(2):
        with pytest.raises(holdfast.CheckpointError, match="H311") as caught:
            guard_in(run)
    assert sorted(path.name for path in newest.parent.iterdir()) == before
    aside = newest.with_name("damaged-" + newest.name)
    assert f"mv {newest} {aside}" in caught.value.fix
    newest.rename(aside)
    guard, _ = guard_in(run)
    assert guard.resumed_from is not None
    assert guard.resumed_from.name.endswith("step00000004")


def forge_state(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what is no tensor in a checkpoint, and sign it again."""
    state = json.loads((folder / "state.json").read_bytes())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    forge(folder)


OWN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no batches": lambda own: own["position"].pop("batches"),
    "a text in the position": lambda own: own["position"].update(batches="x"),
    "a position before the start": lambda own: own["position"].update(epoch=-1),
    "a random state of an epoch": (
        lambda own: own["position"].update(epoch_start={"python": [3, [1], None]})
    ),
    "a text in the counters": lambda own: own["counters"].update(steps="x"),
    "a number beyond 64 bits": lambda own: own["counters"].update(steps=10**400),
    "a text in the statistics": (
        lambda own: next(iter(own["spikes"]["tracks"].values())).update(age="x")
    ),
    "a text in the ladder": lambda own: own["ladder"]["plan"].update(micro_batch_size="x"),
    "a list in the costs": lambda own: own.update(save_costs=[[[], 1]]),
    "no loss scale": lambda own: own.pop("loss_scale"),
    "a large micro-batch": lambda own: own["ladder"]["plan"].update(micro_batch_size=2**60),
    "no generators": lambda own: own["position"].update(generators_now=None),
    "a list of settings": lambda own: own.update(settings=[]),
    "numpy's random state": lambda own: own["random_state"]["numpy"]["items"].__setitem__(2, 2**64),
    "no settings": lambda own: own.pop("settings"),
    "no metadata": lambda own: own["model_metadata"].clear(),
    "metadata of a module": (
        lambda own: next(iter(own["model_metadata"].values())).update({"": "x"})
    ),
}


@pytest.mark.parametrize("name", [*OWN, "a random state", "a weight", "moments"])
def test_a_forged_state_of_the_guard_is_refused_and_left_where_it_is(trained, tmp_path, name):
    """What no guard writes is found before anything is loaded from it, and the file is not
    touched.
    """
    trained(tmp_path)
    newest = Store(tmp_path / "checkpoints").entries()[0].path
    if name == "a random state":
        file = newest / "training.safetensors"  # at whose end torch's lies
        file.write_bytes(file.read_bytes()[:-5056] + b"\xff" * 5056)
    forge_state(newest, lambda state: OWN[name](state["training"]) if name in OWN else None)
    if name == "a weight":
        forge_state(newest, lambda state: state["model"].update({"0.weight": 1}))
    elif name == "moments":
        forge_state(newest, lambda state: state["optimizer"].update(state="x"))
    refused_until_it_is_moved(tmp_path, newest)


@pytest.mark.parametrize("part", ["optimizer", "training"])
def test_a_forged_part_is_an_error_in_words(trained, tmp_path, part):
    """A text in place of the optimizer's or the guard's own state.

    H311, and not an error of Python.
    """
    trained(tmp_path)
    for entry in Store(tmp_path / "checkpoints").entries():
        forge_state(entry.path, lambda state: state.update({part: "x"}))
    with pytest.raises(holdfast.CheckpointError, match="H311"):
        guard_in(tmp_path)


def test_a_folder_that_a_list_of_the_best_names_is_not_removed(trained, tmp_path):
    """`best.json` may have been written by others: only checkpoints beside it are ever removed."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    trained(run)
    (victim / "inside").mkdir(parents=True)
    (run / "best" / "loss").mkdir(parents=True)
    kept = [
        {"value": 9.0, "global_step": 1, "path": name}
        for name in (str(victim), "../../../victim", "checkpoints/..")
    ]
    (run / "best" / "loss" / "best.json").write_text(
        json.dumps({"value": 9.0, "step": 1, "since": [], "kept": kept})
    )
    guard, _ = train(run, 8)
    guard.validated(1.0, keep=1)
    assert (victim / "inside").is_dir()
    assert (run / "best").is_dir()

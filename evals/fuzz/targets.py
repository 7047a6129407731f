"""What is made hostile, and what reads it.

Each target takes a folder and its chance, and returns the reading.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import os
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from recipes.asr.corpus import read_corpus
from recipes.pegasus.records import JsonLines
from recipes.tacotron2.folder import SpeechFolder
from recipes.wav import read_wav, write_wav
from tests.unit.report.made_runs import happened, make_run, write_events
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import holdfast
from holdfast.checkpoint.manifest import FILE_NAME
from holdfast.cli.main import make_app
from holdfast.core.files import read_file
from holdfast.recorder.black_box import BlackBox, StepMark

COMMANDS = (
    "events",
    "explain",
    "watch --once",
    "metrics --jsonl /dev/null",
    "report",
    "checkpoints --verify",
)
TEXTS = (
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "\x1b]0;x\x07\x1b[2J",
    "\0",
    "../" * 12 + "etc/passwd",
    "/etc/passwd",
    "\u202e\u2066",
    "\ud800",
    "é" * 300,
    "A" * 100_000,
    "%s%n",
    "nan",
    "1e999",
    "",
    "\r",
    "[bold]x[/bold]",
    "[/]",
    "--- holdfast: attempt 0 ---",
    "\u2028",
    "Traceback (most recent call last):",
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "Killed",
    "9" * 5000,
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**60,
    2**64,
    -(2**63),
    10**400,
    1e308,
    math.nan,
    math.inf,
    0.5,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [1, 2, 3],
    {"$": "dtype", "text": "load"},
    {"$": "x"},
    *TEXTS,
)
LINES = (
    '  File "train.py", line 3, in <module>',
    "    loss.backward()",
    "epoch 1: loss 0.5 lr 1e-3",
    "step=3 loss=nan",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x80 and 128x256)",
    "{'loss': 1.5, 'step': 10}",
    "During handling of the above exception, another exception occurred:",
    "[rank1]: Traceback (most recent call last)",
    "terminate called after throwing an instance of 'c10::Error'",
    "Segmentation fault (core dumped)",
    "Out of memory: Killed process 33 (python) total-vm:1kB",
    "  0%|          | 0/10 [00:00<?, ?it/s]\r",
    '  | File "a", line 1, in b',
    "  + Exception Group Traceback (most recent call last):",
    "KeyboardInterrupt",
    "Fatal Python error: Segmentation fault",
    "Thread 0x00007f (most recent call first):",
    *TEXTS,
)
YAML = (
    "max_grad_norm",
    ": ",
    "1.0",
    "\n",
    "- ",
    "[",
    "]",
    "{",
    "}",
    "&a ",
    "*a",
    "!!python/name:os.system ",
    "? ",
    "'",
    "!!int ",
    "!!binary ",
    "!!timestamp ",
    "<<: ",
    "|\n ",
    '"',
    "#",
    "%YAML 9",
    "---",
    "recompute",
    "frozen",
    "~",
    "preset",
    "0x",
    "1_0",
    "1:2:3",
    "2001-99-99",
    ",",
    "  ",
    *TEXTS,
)
NAMES = (
    "lock",
    "checkpoints",
    "recorder",
    "images",
    "best",
    "hosts",
    "supervisor",
    ".tmp-x",
    "-rf",
    "a\nb",
    "~",
)
MODULES = "modules"  # file with the names of all that were imported
Work = Callable[[], str]


def train(run: Path, steps: int) -> str:
    """Train a small model up to so many steps, from its newest checkpoint if there is one."""
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(3, 2)
    model = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), 0.1),
        async_save=False,
        save_interval_steps=2,
        loader=holdfast.DataLoader(torch.randn(40, 3).unbind(), batch_size=4),
    )
    try:
        for batch in guard.batches(max_steps=steps):
            guard.step(batch, lambda x: model(x).square().mean())
            guard.validated(float(guard.global_step), keep=2)
    except Exception as error:
        if "/torch/optim/" in traceback.extract_tb(error.__traceback__)[-1].filename:
            return "torch's optimizer refuses its state"  # which it gets as it is
        raise
    guard.close()
    return f"from {guard.resumed_from and guard.resumed_from.name}"


def train_ranks(run: Path, steps: int) -> str:
    """Train as two ranks.

    The error of the first is raised, what is no clear one of the other too.
    """
    reading, writing = os.pipe()
    child = os.fork()
    try:
        init_process_group(
            "gloo", f"file://{run.parent}/store", timedelta(seconds=30), 2, 0 if child else 1
        )
        found, error = train(run, steps), None
    except BaseException as raised:  # noqa: BLE001 - for whoever has called, or the other process
        found, error = "refused", raised
    if child == 0:
        bare = error is not None and not isinstance(error, holdfast.HoldfastError)
        os.write(
            writing, "".join(traceback.format_exception(error)).encode()[-3000:] if bare else b""
        )
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        other = pipe.read().decode()
    os.waitpid(child, 0)
    if error is not None:
        raise error
    if other:
        raise RuntimeError(f"rank 1: {other}")
    return found


def make_base(base: Path) -> str:
    """Make what is changed: a run with every kind of file, and data of the recipes."""
    run, data = base / "run", base / "data"
    train(run, 6)
    about = json.dumps({"state": "coming", "beat": "1-1", "count": 1, "format": 1, "samples": []})
    for name in ("hosts/0.json", "quarantine.json"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(about)
    make_run(run, steps=20)  # after the file of a host, which would lead to another folder
    write_events(
        run / "supervisor",
        *(happened(kind, 3, 3, path=str(run), why="x") for kind in ("guard", "hang")),
    )
    write_wav(data / "wavs" / "a.wav", np.sin(np.arange(4000) / 9))
    (data / "metadata.csv").write_text("a|Hello there|hello there\n")
    (data / "list.csv").write_text("ID,duration,wav,wrd\na,0.2,wavs/a.wav,HELLO\n")
    (data / "pairs.jsonl").write_text('{"document": "a b c", "summary": "a"}\n' * 5)
    shutil.copytree(run, base / "tried")
    for line in COMMANDS:
        command(base / "tried", line)
    train(base / "tried", 8)
    train_ranks(base / "ranks", 6)
    (base / MODULES).write_text("\n".join(sorted(sys.modules)))
    return "made"


def import_modules(base: Path) -> None:
    """Import what readers need, once: an input then costs little but its reading."""
    for name in (base / MODULES).read_text().split("\n"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def other_bytes(chance: Random, data: bytes) -> bytes:
    """Return other bytes: overwritten, cut, or with pieces put in or taken out."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 40))):
        at, size = chance.randrange(len(found) + 1), chance.choice((1, 4, 8, 64, 5000))
        text = chance.choice(TEXTS).encode("utf-8", "surrogatepass")
        piece = chance.choice(
            [bytes([chance.randrange(256)]) * size, chance.randbytes(size), b"\xff" * 8, text]
        )
        how = chance.choice(("over", "over", "in", "out", "cut"))
        end = {"over": at + len(piece), "in": at, "out": at + size, "cut": len(found)}[how]
        found[at:end] = piece if how in ("over", "in") else b""
    return bytes(found)


def other_json(chance: Random, value: Any) -> Any:
    """Return another value.

    At random places something of another type, or a key that is missing or foreign.
    """
    if chance.random() < 0.06:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        found = {
            key: other_json(chance, each) for key, each in value.items() if chance.random() > 0.03
        }
        return found | (
            {chance.choice(TEXTS): chance.choice(VALUES)} if chance.random() < 0.05 else {}
        )
    return [other_json(chance, each) for each in value] if isinstance(value, list) else value


def other_place(chance: Random, value: Any) -> None:
    """Change one place of a JSON value, however deep, so that what is read before it is as it
    was.
    """
    while isinstance(value, (dict, list)) and value:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not (isinstance(value[key], (dict, list)) and value[key]) or chance.random() < 0.1:
            if chance.random() < 0.2:
                del value[key]
            else:
                value[key] = chance.choice(VALUES)
            return
        value = value[key]


def hurt(chance: Random, path: Path) -> None:
    """Change a file, in its bytes or as JSON, or put something else in its place.

    A manifest is signed anew.
    """
    data, how = read_file(path), chance.random()
    if how < 0.15:
        path.unlink()
        plant(chance, path)
    elif path.suffix == ".json" and how < 0.8:
        body = data.partition(b"\n")[0] if path.name == FILE_NAME else data
        text = json.dumps(other_json(chance, json.loads(body))) if how < 0.77 else "[" * 100_000
        digest = hashlib.sha256(text.encode()).hexdigest() if path.name == FILE_NAME else ""
        path.write_text(f"{text}\n{digest}\n")
    else:
        path.write_bytes(other_bytes(chance, data))


def plant(chance: Random, path: Path) -> None:
    """Put something that is no ordinary file in a place that is free."""
    kind = chance.choice(
        ("/dev/zero", "/etc/passwd", "/tmp", path.name, "pipe", "folder", "hole", "socket")
    )
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "hole":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound, contextlib.suppress(OSError):  # of a long path
            bound.bind(str(path))
    else:
        path.symlink_to(kind)


def forge(folder: Path) -> None:
    """Give a checkpoint whose files were changed the digests of what they hold now, as far as it
    still has a form.
    """
    with contextlib.suppress(
        OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError
    ):
        tree = json.loads(read_file(folder / FILE_NAME).partition(b"\n")[0])
        for name, extents in tree["files"].items():
            data = read_file(folder / name)
            last = max(each["end"] for each in extents.values())
            for each in extents.values():
                each["end"] = max(len(data), each["begin"]) if each["end"] == last else each["end"]
                each["sha256"] = hashlib.sha256(data[each["begin"] : each["end"]]).hexdigest()
        body = json.dumps(tree)
        (folder / FILE_NAME).write_text(f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}\n")


def command(path: Path, line: str) -> str:
    """Run a command in this process; what it raises, but its exit, is raised."""
    name, *options = line.split()
    result = CliRunner().invoke(make_app(name), [name, str(path), *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return f"{name} {result.exit_code}"


# --- the targets


def log(folder: Path, chance: Random) -> Work:
    """Let `explain` read a log."""
    data = "\n".join(chance.choices(LINES, k=chance.choice((0, 1, 10, 200, 2000)))).encode(
        "utf-8", "surrogatepass"
    )
    (folder / "a.log").write_bytes(other_bytes(chance, data) if chance.random() < 0.6 else data)
    return lambda: command(folder / "a.log", "explain")


def checkpoint(folder: Path, chance: Random) -> Work:
    """Go on from a checkpoint that was changed, mostly a forged one, or export it."""
    newest = max((folder / "run" / "checkpoints").iterdir())
    for path in chance.sample(sorted(newest.iterdir()), chance.choice((1, 1, 2))):
        hurt(chance, path)
    if chance.random() < 0.7:
        forge(newest)
    exporting = chance.random() < 0.2
    line = f"checkpoints --export {folder / 'out.safetensors'}"
    return lambda: command(folder / "run", line) if exporting else train(folder / "run", 8)


def ranks(folder: Path, chance: Random) -> Work:
    """Go on as two ranks from a checkpoint, or files beside it, that were changed.

    Both end, and in time.
    """
    run = folder / "ranks"
    newest, forging = max((run / "checkpoints").iterdir()), chance.random() < 0.7
    files = sorted(path for path in run.rglob("*") if path.is_file())
    near = [path for path in files if path.parent == newest]
    for path in chance.sample(near if forging else files, chance.choice((1, 1, 2))):
        if forging and path.suffix == ".json" and path.name != FILE_NAME:
            value = json.loads(read_file(path))
            other_place(chance, value)
            path.write_text(json.dumps(value))
        else:
            hurt(chance, path)
    if forging:
        forge(newest)
    return lambda: train_ranks(run, 8)


def detail(folder: Path, chance: Random) -> Work:
    """Go on from, or read, a run in which a few places of one file of JSON are others, under a
    right digest.
    """
    run, training = folder / "run", chance.random() < 0.7
    newest = max((run / "checkpoints").iterdir())
    files = sorted(
        each
        for each in run.rglob("*.json")
        if each.stat().st_size and "checkpoints" not in each.parts
    )
    path = chance.choice(
        (newest / "state.json", newest / "state.json", newest / FILE_NAME) if training else files
    )
    value = json.loads(
        read_file(path).partition(b"\n")[0] if path.name == FILE_NAME else read_file(path)
    )
    for _ in range(chance.choice((1, 1, 2, 4))):
        other_place(
            chance, value["training"] if "training" in value and chance.random() < 0.7 else value
        )
    path.write_text(json.dumps(value))
    forge(newest)
    line = chance.choice((*COMMANDS, ""))
    return lambda: command(run, line) if line and not training else train(run, 8)


def tree(folder: Path, chance: Random) -> Work:
    """Read or continue a run whose files were changed, or replaced by links and pipes, also
    while it lives.
    """
    run = folder / "run"
    files = sorted(
        path for path in run.rglob("*") if path.is_file() and "checkpoints" not in path.parts
    )
    for path in chance.sample(files, chance.choice((1, 1, 2, 6))):
        hurt(chance, path)
    folders = [
        run,
        *sorted(each for each in run.rglob("*") if each.is_dir() and not each.is_symlink()),
    ]
    for _ in range(chance.choice((0, 0, 1, 3))):
        place = chance.choice(folders) / chance.choice(NAMES)
        if not os.path.lexists(place):
            plant(chance, place)
    for number in range(100_000 if chance.random() < 0.001 else 0):
        (run / "processes" / f"{number}-1").mkdir()
    line, lives = chance.choice((*COMMANDS, "")), chance.random() < 0.1

    def work() -> str:
        box, ends = (
            BlackBox(folder / "run" / "recorder" / "rank7") if lives else None,
            threading.Event(),
        )

        def write() -> None:
            while box is not None and not ends.is_set():
                box.step(StepMark.COMMITTED, 1, 1, 0.5, 0.5, 0.1)
                box.event(happened("spike", 1, 1, text="b" * 700))

        threading.Thread(target=write, daemon=True).start()
        try:
            return command(run, line) if line else train(run, 8)
        finally:
            ends.set()

    return work


def policy(folder: Path, chance: Random) -> Work:
    """Read a policy or plan file, or a variable."""
    text = "".join(chance.choices(YAML, k=chance.choice((2, 4, 10, 100, 3000))))
    text = f"max_grad_norm: {text}" if chance.random() < 0.3 else text
    path = folder / "policy.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))

    def work() -> str:
        if len(text) < 1000 and text.isprintable():
            os.environ["HOLDFAST_MAX_GRAD_NORM"] = text
        holdfast.Policy.from_yaml(path)
        return "read"

    return work


def recipes(folder: Path, chance: Random) -> Work:
    """Read sound files, tables and records of the recipes."""
    data = folder / "data"
    for path in chance.sample(
        sorted(each for each in data.rglob("*") if each.is_file()), chance.choice((1, 2))
    ):
        path.write_bytes(other_bytes(chance, path.read_bytes()))
    readers: list[Callable[[], object]] = [
        lambda: read_wav(data / "wavs" / "a.wav"),
        lambda: [each.size() for each in read_corpus(data)],
        lambda: [each.size() for each in read_corpus(data / "list.csv")],
        lambda: SpeechFolder(data)[0],
        lambda: JsonLines(data / "pairs.jsonl").sizes(100),
    ]
    reader = chance.choice(readers)
    return lambda: type(reader()).__name__


TARGETS: dict[str, Callable[[Path, Random], Work]] = {
    each.__name__: each for each in (log, checkpoint, detail, ranks, tree, policy, recipes)
}
CLEAR: dict[str, tuple[type[BaseException], ...]] = {
    **dict.fromkeys(TARGETS, (holdfast.HoldfastError,)),
    "recipes": (ValueError, OSError),  # how recipes say what is wrong
}


def make_input(base: Path, folder: Path, target: str, chance: Random) -> Work:
    """Copy what a target needs into a folder, and change it."""
    needed = {
        "checkpoint": "run",
        "detail": "run",
        "tree": "run",
        "ranks": "ranks",
        "recipes": "data",
    }.get(target)
    if needed is not None:
        shutil.copytree(base / needed, folder / needed)
    return TARGETS[target](folder, chance)

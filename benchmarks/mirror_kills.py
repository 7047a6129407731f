"""A machine that is killed while it copies checkpoints to an object store.

Does the next machine, whose disk is empty, always resume, with a state that was there?

How: moto serves the S3 API on loopback, in a process of its own. A forked child with an empty run
directory resumes from the mirror, trains a 20 MB model, saves after every second step, and copies
what it can. It appends the digest of its weights to a log after each step. It is killed by SIGKILL
at a random moment of the time that a copy takes, while one is being made. A second child with
another empty directory then resumes from the mirror, and its state is compared with the log. The
next machine goes on from there. A kill that fell into a copy shows as a folder without a manifest
in the store.

To reach: of 40 kills, 0 after which the mirror cannot be used, and 0 after which a state was
resumed that was never there.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.ports import unused_port

from benchmarks.forks import Child, Counter, in_a_fork, single_threaded, wait_until
from benchmarks.results_file import Result, read_options, without_paths
from benchmarks.save_kills import digest, make_model

_SIDE = 2236
_BUCKET = "runs"
_URL = f"s3://{_BUCKET}/mirror"
_ENDLESS = 10**6


def resumed(run_dir: Path):
    import torch

    from holdfast import Guard

    model = make_model()
    guard = Guard(
        run_dir,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=[torch.ones(4, _SIDE)] * 1000,
        save_interval_steps=2,
        spike_action="off",
        check_split=False,
        mirror=_URL,
    )
    return guard, model


def train_for_ever(folder: Path, log: Path, copies: Counter, beginning: Counter) -> None:
    """Resume on an empty disk, train, note digests and copy, until killed."""
    from holdfast.checkpoint.mirror.folder import MirrorFolder

    upload = MirrorFolder.upload

    def counted_upload(*given, **named):
        beginning.set(beginning.get() + 1)
        size_bytes = upload(*given, **named)
        copies.set(copies.get() + 1)
        return size_bytes

    MirrorFolder.upload = counted_upload  # type: ignore[method-assign]
    guard, model = resumed(folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for batch in guard.batches(max_steps=_ENDLESS):
        guard.step(batch, lambda x: model(x).square().mean())
        line = {"step": guard.global_step, "digest": digest(model)}
        os.write(descriptor, json.dumps(line).encode() + b"\n")


def report_only(folder: Path) -> tuple[int, str]:
    guard, model = resumed(folder)
    return guard.global_step, digest(model)


def unfinished_copies() -> int:
    """Return the number of folders in the store that have no manifest."""
    from fsspec import filesystem

    names = filesystem("s3").find(f"{_BUCKET}/mirror/checkpoints")
    folders = {name.rpartition("/")[0] for name in names}
    complete = {name.rpartition("/")[0] for name in names if name.endswith("/manifest.json")}
    return len(folders - complete)


def make_bucket() -> None:
    from fsspec import filesystem

    filesystem("s3").mkdir(_BUCKET)


def seconds_of_a_copy(folder: Path, log: Path) -> float:
    copies, beginning = Counter(), Counter()
    child = Child(partial(train_for_ever, folder, log, copies, beginning))
    wait_until(lambda: copies.get() >= 1, child)
    started = time.perf_counter()
    wait_until(lambda: copies.get() >= 6, child)
    seconds = (time.perf_counter() - started) / 5
    child.kill()
    child.finish()
    return seconds


def kill_in_a_copy(folder: Path, log: Path, chance: random.Random, copy_seconds: float) -> str:
    """Kill a machine at a random moment after a copy has begun; return how it ended."""
    copies, beginning = Counter(), Counter()
    child = Child(partial(train_for_ever, folder, log, copies, beginning))
    target = chance.randint(1, 3)
    if wait_until(lambda: beginning.get() >= target, child):
        time.sleep(chance.random() * copy_seconds)
    child.kill()
    fate = child.finish()
    return fate.error or fate.how


def check_mirror(folder: Path, log: Path) -> tuple[bool, bool]:
    """Return whether an empty disk resumes from the mirror, and whether that state was there."""
    fate = in_a_fork(partial(report_only, folder))
    if fate.value is None:
        print(f"    cannot be resumed: {without_paths(fate.error or fate.how)}")
        return False, False
    step, found = fate.value
    lines = [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]]
    states = {(line["step"], line["digest"]) for line in lines}
    return step > 0, (step, found) in states


def start_store() -> subprocess.Popen[bytes]:
    """Start the S3 server, and let every process that is forked from now on use it."""
    port = unused_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    store = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.1)
        else:
            return store


def main() -> None:
    single_threaded()
    options = read_options("mirror_kills", __doc__ or "")
    kills = 4 if options.quick else 40
    parameters = {"kills": kills, "model_bytes": 4 * _SIDE**2, "seed": 5}
    result = Result(options=options, parameters=parameters)
    chance = random.Random(5)
    # Imported once, instead of in each child that is forked.
    importlib.import_module("s3fs")
    store = start_store()
    rows = []
    try:
        with tempfile.TemporaryDirectory() as name:
            folder, log = Path(name), Path(name, "digests.jsonl")
            in_a_fork(make_bucket)
            copy_seconds = seconds_of_a_copy(folder / "timing", log)
            for number in range(kills):
                ended = kill_in_a_copy(folder / f"machine{number}", log, chance, copy_seconds)
                unfinished = in_a_fork(unfinished_copies).value
                row = (ended == "SIGKILL", bool(unfinished))
                rows.append((*row, *check_mirror(folder / f"next{number}", log)))
    finally:
        store.kill()
        store.wait()
    killed, unfinished_kills, usable, right = (sum(column) for column in zip(*rows, strict=True))
    result.parameters["seconds of a copy"] = round(copy_seconds, 3)
    result.add_count("killed by SIGKILL", killed, kills, expected=kills)
    result.add_count("kills that left an unfinished copy in the store", unfinished_kills, kills)
    result.add_count("mirror cannot be used by the next machine", kills - usable, kills, expected=0)
    result.add_count("resumed state was never there", usable - right, kills, expected=0)
    result.samples["copy was unfinished"] = [int(row[1]) for row in rows]
    result.write()


if __name__ == "__main__":
    main()

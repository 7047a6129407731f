"""Checkpoints in a mirror, on a real S3 API and on another disk: kills, cuts, forks and owners."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.object_store import ObjectStore, Wire, running_store, wait_until
from tests.faults.small_run import guard_in, same, train
from tests.prepared import Prepared

import holdfast
from holdfast import CheckpointError, HoldfastError, Policy, PolicyError, RunDirectoryError
from holdfast.recorder.reader import read_events

PROGRAM = Path(__file__).parent / "programs" / "mirrored.py"
UNCHANGED = Path(__file__).parent / "programs" / "unchanged"
BUCKET = "runs"
URL = f"s3://{BUCKET}/a"


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Return the S3 server with an empty bucket, to which this process has the rights."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # botocore repeats a request that failed five times by default, with seconds in between.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    server.client.create_bucket(Bucket=BUCKET)
    yield server
    for key in server.keys(BUCKET):
        server.client.delete_object(Bucket=BUCKET, Key=key)


@pytest.fixture
def wire(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """Return the wire through which this process and those that it starts reach the store."""
    relay = Wire(store.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
    yield relay
    relay.close()


def kinds(guard: Any) -> list[str]:
    return [event.kind for event in guard.events()]


def steps_in(mirror: Path) -> list[int]:
    """Return the steps of the complete copies in a mirror on this disk, oldest first."""
    manifests = mirror.glob("checkpoints/*/manifest.json")
    return sorted(
        json.loads(path.read_bytes().split(b"\n")[0])["global_step"] for path in manifests
    )


# --- resuming from the mirror


def test_an_empty_directory_continues_from_the_mirror_bit_for_bit(
    store: ObjectStore, tmp_path: Path
) -> None:
    """A run that loses its machine in the middle of an epoch ends as the undisturbed one."""
    _, undisturbed = train(tmp_path / "undisturbed", 25)
    train(tmp_path / "first", 13, mirror=URL)
    shutil.rmtree(tmp_path / "first")

    guard, model = train(tmp_path / "second", 25, mirror=URL)

    assert guard.resumed_from is not None
    assert guard.resumed_from.name.endswith("step00000013")
    assert same(model, undisturbed)
    assert "mirror_pulled" in kinds(guard)
    # Three copies are kept, as in the run directory.
    assert len(store.copies(BUCKET)) == 3
    assert store.newest_step(BUCKET) == 25


def test_a_directory_that_is_older_than_the_mirror_fetches_the_newest(tmp_path: Path) -> None:
    """Two machines take turns, each with a disk of its own."""
    mirror = str(tmp_path / "mirror")
    train(tmp_path / "a", 4, mirror=mirror)
    train(tmp_path / "b", 8, mirror=mirror)
    guard, _ = train(tmp_path / "a", 10, mirror=mirror)
    assert guard.resumed_from is not None
    assert guard.resumed_from.name.endswith("step00000008")
    guard, _ = train(tmp_path / "b", 12, mirror=mirror)
    assert guard.resumed_from is not None
    assert guard.resumed_from.name.endswith("step00000010")


def test_checkpoints_that_were_lost_come_back_from_the_mirror(tmp_path: Path) -> None:
    """Without a mirror, a directory whose checkpoints are gone is refused."""
    mirror = str(tmp_path / "mirror")
    train(tmp_path / "a", 4, mirror=mirror)
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    guard, _ = train(tmp_path / "a", 6, mirror=mirror)
    assert guard.resumed_from is not None


@pytest.mark.slow
def test_an_unchanged_script_continues_on_another_machine(tmp_path: Path) -> None:
    """`holdfast run --resume --mirror URL` in an empty folder ends as an undisturbed script."""
    script = [sys.executable, str(UNCHANGED / "killed_at_step.py"), str(UNCHANGED / "functions.py")]
    variables = {
        **os.environ,
        "HOLDFAST_SAVE_INTERVAL_STEPS": "5",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(UNCHANGED), os.environ.get("PYTHONPATH", "")]),
    }
    options = ["--quiet", "--resume", "--max-restarts", "0", "--mirror", str(tmp_path / "mirror")]
    command = [sys.executable, "-m", "holdfast", "run", *options, "--", *script]

    def run(words: list[str], folder: str, **more: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / folder).mkdir()
        return subprocess.run(
            words, cwd=tmp_path / folder, env=variables | more, capture_output=True, text=True
        )

    undisturbed = run(script, "undisturbed")
    assert run(command, "first", KILL_AT_STEP="60").returncode == 128 + signal.SIGKILL
    ended = run(command, "second")

    assert ended.returncode == 0, ended.stderr
    processes = (tmp_path / "second").glob("runs/*/processes/*")
    recorded = [event.kind for folder in processes for event in read_events(folder)]
    assert "mirror_pulled" in recorded
    results = [line for line in undisturbed.stdout.splitlines() if line.startswith("digest")]
    assert results
    assert [line for line in ended.stdout.splitlines() if line.startswith("digest")] == results


# --- faults of the store


def test_a_kill_during_an_upload_leaves_the_copy_before_it(
    store: ObjectStore, wire: Wire, tmp_path: Path
) -> None:
    """SIGKILL in the middle of a file; the next machine resumes from a state that was there."""
    words = [PROGRAM, tmp_path / "first", 100_000]
    variables = os.environ | {"HOLDFAST_MIRROR": URL}
    with Prepared(words, env=variables, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(store.copies(BUCKET)) >= 1)
        # Only a file with tensors is that large.
        wire.hold_after(1 << 20)
        wait_until(lambda: wire.is_holding)
        process.kill()
        assert process.stdout is not None
        lines = [line.split() for line in process.stdout.read().splitlines()]
    wire.cut()
    variables["AWS_ENDPOINT_URL"] = store.url
    newest = store.newest_step(BUCKET)
    assert newest is not None
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path / "second"), str(newest + 2)],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )

    begins, *_, last = [line.split() for line in ended.stdout.splitlines()]
    states = {int(line[1]): line[2] for line in lines if len(line) == 3}
    assert int(begins[1]) == newest
    assert states[newest] == begins[2]
    # The steps that the first machine took after its last complete copy are repeated exactly.
    assert states.get(newest + 2, last[2]) == last[2]
    left = {key.rpartition("/")[0] for key in store.keys(BUCKET) if "/checkpoints/" in key}
    assert left == {key.rpartition("/")[0] for key in store.copies(BUCKET)}


def test_training_goes_on_while_the_store_cannot_be_reached(
    store: ObjectStore, wire: Wire, tmp_path: Path
) -> None:
    """One event says that it is gone, and one that it is back, however many saves there were."""
    guard, model = guard_in(tmp_path / "a", mirror=URL)
    for batch in guard.batches(max_steps=20):
        guard.step(batch, lambda x: model(x).square().mean())
        if guard.global_step == 6:
            wait_until(lambda: store.newest_step(BUCKET) == 4)
            wire.cut()
        if guard.global_step == 14:
            wait_until(lambda: "mirror_failed" in kinds(guard))
            wire.mend()

    events = [kind for kind in kinds(guard) if kind.startswith("mirror_")]
    assert events == ["mirror_failed", "mirror_recovered"]
    assert guard.statistics().checkpoints_failed == 0
    assert store.newest_step(BUCKET) == 20


def test_a_run_ends_without_its_store_and_says_what_is_missing(
    store: ObjectStore, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end does not wait for a store that does not answer; the next start copies the rest."""
    monkeypatch.setattr("holdfast.checkpoint.mirror.copier._PATIENCE_SECONDS", 0.5)
    guard, model = guard_in(tmp_path / "a", mirror=URL)
    for batch in guard.batches(max_steps=6):
        guard.step(batch, lambda x: model(x).square().mean())
        if guard.global_step == 3:
            wire.cut()
    assert kinds(guard)[-2:] == ["mirror_behind", "closed"]
    wire.mend()

    train(tmp_path / "a", 6, mirror=URL)

    assert store.newest_step(BUCKET) == 6


def test_wrong_bytes_in_the_store_are_never_loaded(store: ObjectStore, tmp_path: Path) -> None:
    """A flipped bit costs one checkpoint; if no copy is intact, the run does not start anew."""
    train(tmp_path / "a", 4, mirror=URL)
    train(tmp_path / "a", 6, mirror=URL)
    newest = store.copies(BUCKET)[-1]
    weights = newest.replace("manifest.json", "model.safetensors")
    assert weights in store.keys(BUCKET)
    store.flip_byte(BUCKET, weights)

    guard, _ = guard_in(tmp_path / "b", mirror=URL)

    assert guard.resumed_from is not None
    assert guard.resumed_from.name.endswith("step00000004")
    assert "checkpoint_damaged" in kinds(guard)
    guard.close()
    for key in store.copies(BUCKET):
        store.flip_byte(BUCKET, key)
    with pytest.raises(CheckpointError) as raised:
        guard_in(tmp_path / "c", mirror=URL)
    assert raised.value.rule == "H312"


def test_bytes_that_change_on_their_way_to_the_store_are_noticed(tmp_path: Path) -> None:
    """What was written is read back before the manifest makes it a copy."""
    from fsspec import register_implementation
    from fsspec.implementations.local import LocalFileSystem

    class Flipping(LocalFileSystem):
        protocol = "flipping"

        def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
            file = super()._open(path, mode, **more)
            if mode == "wb" and path.endswith("model.safetensors"):
                file.write(b"?")
            return file

    register_implementation("flipping", Flipping, clobber=True)
    guard, _ = train(tmp_path / "a", 4, mirror=f"flipping://{tmp_path}/mirror")
    assert "mirror_failed" in kinds(guard)
    assert steps_in(tmp_path / "mirror") == []


# --- what is refused before training begins


def error_of(run_dir: Path, mirror: str) -> HoldfastError:
    """Return the error of a guard that is refused, which has trained nothing."""
    with pytest.raises(HoldfastError) as raised:
        guard_in(run_dir, mirror=mirror)
    return raised.value


def test_a_store_that_cannot_be_written_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    """A bucket that does not exist, and a folder in which a file has the name of a subfolder."""
    assert error_of(tmp_path / "a", "s3://no-such-bucket/run").rule == "H321"

    occupied = tmp_path / "mirror"
    occupied.mkdir()
    (occupied / "owners").write_text("a file where a folder has to be")
    assert error_of(tmp_path / "b", str(occupied)).rule == "H321"


def test_a_user_without_the_right_to_write_is_refused(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An IAM user who may list and read the bucket, but neither write nor delete."""
    iam = store.new_client("iam")
    iam.create_user(UserName="reader")
    rights = {"Effect": "Allow", "Action": ["s3:List*", "s3:Get*"], "Resource": "*"}
    iam.put_user_policy(
        UserName="reader",
        PolicyName="reads",
        PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [rights]}),
    )
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    train(tmp_path / "owner", 4, mirror=URL)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])

    with store.checking_rights():
        error = error_of(tmp_path / "reader", URL)

    assert error.rule == "H321"
    assert "PermissionError" in error.what
    # The owner has not been fenced off.
    owners = [name for name in store.keys(BUCKET) if "/owners/" in name]
    assert len(owners) == 1


def test_an_unreachable_store_is_an_error_only_if_there_is_nothing_to_resume(
    store: ObjectStore, wire: Wire, tmp_path: Path
) -> None:
    """Starting from scratch could hide the checkpoints in the mirror."""
    train(tmp_path / "a", 4, mirror=URL)
    wire.cut()
    error = error_of(tmp_path / "empty", URL)
    assert isinstance(error, RunDirectoryError)
    assert error.rule == "H321"

    guard, model = guard_in(tmp_path / "a", mirror=URL)
    wire.mend()
    for batch in guard.batches(max_steps=8):
        guard.step(batch, lambda x: model(x).square().mean())

    events = [kind for kind in kinds(guard) if kind.startswith("mirror_")]
    assert events == ["mirror_failed", "mirror_recovered"]
    assert store.newest_step(BUCKET) == 8


def test_a_mirror_of_another_run_is_refused(tmp_path: Path) -> None:
    """Its owner is not disturbed."""
    mirror = tmp_path / "mirror"
    train(tmp_path / "a", 4, mirror=str(mirror))
    owners = sorted(mirror.glob("owners/*"))
    train(tmp_path / "b", 2)
    assert error_of(tmp_path / "b", str(mirror)).rule == "H322"
    assert sorted(mirror.glob("owners/*")) == owners


def test_a_fork_is_refused(tmp_path: Path) -> None:
    """Both the directory and its mirror have continued after their common checkpoint."""
    mirror = tmp_path / "mirror"
    train(tmp_path / "a", 4, mirror=str(mirror))
    train(tmp_path / "b", 8, mirror=str(mirror))
    train(tmp_path / "a", 6)
    copies = steps_in(mirror)

    assert error_of(tmp_path / "a", str(mirror)).rule == "H323"

    assert steps_in(mirror) == copies
    guard, _ = train(tmp_path / "b", 10, mirror=str(mirror))
    assert "mirror_stopped" not in kinds(guard)


def test_a_newest_checkpoint_that_was_lost_here_is_fetched_again(tmp_path: Path) -> None:
    """The older ones that are left here are in the mirror too."""
    mirror = str(tmp_path / "mirror")
    guard, _ = train(tmp_path / "a", 6, mirror=mirror)
    newest = max((tmp_path / "a" / "checkpoints").glob("*-step00000006"))
    shutil.rmtree(newest)

    guard, _ = guard_in(tmp_path / "a", mirror=mirror)

    assert guard.global_step == 6
    assert "mirror_pulled" in kinds(guard)


def test_copies_of_a_mirror_that_has_lost_its_owners_stay_the_older_ones(tmp_path: Path) -> None:
    """The next owner's number is larger than those that the copies carry."""
    mirror = tmp_path / "mirror"
    train(tmp_path / "a", 4, mirror=str(mirror))
    train(tmp_path / "b", 6, mirror=str(mirror))
    shutil.rmtree(mirror / "owners")
    train(tmp_path / "b", 10, mirror=str(mirror))

    guard, _ = guard_in(tmp_path / "c", mirror=str(mirror))

    assert guard.global_step == 10


def test_a_store_that_fails_once_it_is_known_to_be_ahead_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training from the older state here would replace the newer copies."""
    mirror = tmp_path / "mirror"
    train(tmp_path / "a", 4, mirror=str(mirror))
    train(tmp_path / "b", 8, mirror=str(mirror))
    copies = steps_in(mirror)

    def fail(*_: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr("holdfast.checkpoint.mirror.folder.MirrorFolder.add_owner", fail)
    assert error_of(tmp_path / "a", str(mirror)).rule == "H321"
    assert steps_in(mirror) == copies


def test_a_mirror_of_another_model_leaves_a_new_directory_as_it_was(tmp_path: Path) -> None:
    """With the right URL, the same directory can be used then."""
    from torch import nn

    mirror = str(tmp_path / "mirror")
    train(tmp_path / "a", 4, mirror=mirror)
    other = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    with pytest.raises(HoldfastError) as raised:
        holdfast.Guard(tmp_path / "b", model=other, optimizer=optimizer, mirror=mirror)

    assert raised.value.rule == "H322"
    guard = holdfast.Guard(
        tmp_path / "b", model=other, optimizer=optimizer, mirror=str(tmp_path / "own")
    )
    assert guard.global_step == 0


def test_a_url_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown scheme or package, a chain, one slash, a relative file, and lost memory."""
    assert error_of(tmp_path / "a", "s4://bucket/run").rule == "H119"
    assert error_of(tmp_path / "a", "simplecache::s3://bucket/run").rule == "H119"
    assert error_of(tmp_path / "a", "s3:/bucket/run").rule == "H119"
    assert error_of(tmp_path / "a", "file://mirror/run").rule == "H119"
    assert error_of(tmp_path / "a", "memory://run").rule == "H119"
    assert error_of(tmp_path / "a", str(tmp_path / "unmounted" / "mirror")).rule == "H119"
    assert error_of(tmp_path / "a", "s3://").rule == "H119"
    assert error_of(tmp_path / "a", str(tmp_path / "a" / "mirror")).rule == "H119"
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # fsspec remembers the packages that it has imported.
    packages = sys.modules["fsspec.registry"]._registry  # type: ignore[attr-defined]
    monkeypatch.delitem(packages, "s3", raising=False)
    error = error_of(tmp_path / "a", "s3://bucket/run")
    assert error.rule == "H119"
    assert "pip install s3fs" in error.fix
    with pytest.raises(PolicyError) as raised:
        Policy(mirror="s3://bucket/run", save_interval_steps=None)
    assert raised.value.rule == "H109"


def test_credentials_in_a_url_are_shown_nowhere(tmp_path: Path) -> None:
    """Neither in settings, events and files of the run, nor in errors."""
    from fsspec import register_implementation
    from fsspec.implementations.local import LocalFileSystem

    class Vault(LocalFileSystem):
        protocol = "vault"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.rpartition("@")[2])

    register_implementation("vault", Vault, clobber=True)
    url = f"vault://me:hunter2@{tmp_path}/mirror"
    train(tmp_path / "a", 4, mirror=url)
    guard, _ = train(tmp_path / "b", 6, mirror=url)

    shown = [repr(guard.policy), *map(str, guard.events())]
    assert any("***@" in text for text in shown)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("hunter2" in text for text in shown)
    assert not any(b"hunter2" in path.read_bytes() for path in files)
    (tmp_path / "mirror" / "owners" / "000009-00000000.json").write_text('{"run": "another"}')
    error = error_of(tmp_path / "b", url)
    assert error.rule == "H322"
    assert "hunter2" not in str(error)


# --- owners


def test_a_newer_owner_fences_off_the_older_one(tmp_path: Path) -> None:
    """The older run trains on, says once that it no longer copies, and changes nothing."""
    mirror = tmp_path / "mirror"
    older, model = guard_in(tmp_path / "a", mirror=str(mirror))
    for batch in older.batches(max_steps=12):
        older.step(batch, lambda x: model(x).square().mean())
        if older.global_step == 4:
            # The save after this step follows when the body of the loop has ended.
            wait_until(lambda: 2 in steps_in(mirror))
            newer, _ = train(tmp_path / "b", 7, mirror=str(mirror))

    assert newer.resumed_from is not None
    assert kinds(older).count("mirror_stopped") == 1
    assert older.global_step == 12
    assert steps_in(mirror)[-1] == 7
    assert len(list(mirror.glob("owners/*"))) == 1
    assert error_of(tmp_path / "a", str(mirror)).rule == "H323"


def test_an_owner_that_was_fenced_off_during_an_upload_does_not_complete_it(
    store: ObjectStore, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is written last, after another look at the owners."""
    older, model = guard_in(tmp_path / "a", mirror=URL)
    for batch in older.batches(max_steps=6):
        older.step(batch, lambda x: model(x).square().mean())
        if older.global_step == 3:
            wait_until(lambda: store.newest_step(BUCKET) == 2)
            wire.hold_after(8_000)
        if older.global_step == 5:
            # The checkpoint of step 4 is on its way.
            wait_until(lambda: wire.is_holding)
            with monkeypatch.context() as direct:
                direct.setenv("AWS_ENDPOINT_URL", store.url)
                newer, _ = guard_in(tmp_path / "b", mirror=URL)
            wire.hold_after(1 << 40)

    assert newer.global_step == 2
    newer.close()
    assert kinds(older).count("mirror_stopped") == 1
    assert not any("00000004" in key for key in store.copies(BUCKET))

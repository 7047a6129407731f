"""Concerns about loader workers: figures against machines, real handles in real datasets, real pickling."""

from __future__ import annotations

import functools
import io
import multiprocessing
import socket
import sqlite3
import sys
import threading
import weakref
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from holdfast.core.errors import LoaderError
from holdfast.loader.tuning.machine import Machine
from holdfast.loader.tuning.preflight import Concern, Load, preflight, weigh

MIB = 2**20
ROOMY = Machine(
    cpu_quota=8, shared_memory_free_bytes=2**34, memory_available_bytes=2**36, open_files=10, open_files_limit=4096
)
LOAD = Load(num_workers=4, batch_bytes=8 * MIB, batch_tensors=2)


class Samples:
    """A dataset that holds what it is given."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3)


MODULE_FILE: list[Any] = []


class ReadsAGlobal(Samples):
    """A dataset that reads from a variable of its module."""

    def __getitem__(self, index: int) -> Any:
        return MODULE_FILE[0].read(1)


def rules(found: tuple[Concern, ...]) -> list[str]:
    return [concern.rule for concern in found]


def only(found: tuple[Concern, ...]) -> Concern:
    (concern,) = found
    return concern


def test_a_loader_that_fits_raises_no_concern() -> None:
    """Workers that the machine has room for, with plain samples, are not worth a word, and no worker ever is."""
    dataset = Samples(names=["a"] * 1000, table=np.zeros(5), memory=io.BytesIO(b"x"), lock=threading.Lock())
    assert preflight(LOAD, ROOMY, dataset=dataset, collate_fn=len, batch=[torch.zeros(2)]) == ()
    assert preflight(replace(LOAD, num_workers=0), Machine(cpu_quota=0.1, open_files_limit=0)) == ()


def test_more_workers_than_the_quota_are_named_with_the_number_that_fits() -> None:
    """Four workers on a quota of 2.5 processors: a warning, since workers that wait may be right, and 2 is named."""
    found = only(preflight(LOAD, replace(ROOMY, cpu_quota=2.5)))
    assert (found.rule, found.severity, found.num_workers) == ("H630", "warning", 2)
    assert "2.5 processors" in found.what


@pytest.mark.parametrize(
    ("free", "severity", "remedy"),
    [
        (71 * MIB, "warning", (4, 1)),  # 4 x 2 + 1 batches of 8 MiB are 72
        (39 * MIB, "warning", (3, 1)),
        (8 * MIB, "warning", (0, None)),
        (7 * MIB, "error", (0, None)),  # not even one batch
    ],
)
def test_shared_memory_that_is_too_small(free: int, severity: str, remedy: tuple[int, int | None]) -> None:
    """Prefetching is given up before workers, and only a batch that never fits is an error."""
    found = only(preflight(LOAD, replace(ROOMY, shared_memory_free_bytes=free)))
    assert (found.rule, found.severity, (found.num_workers, found.prefetch_factor)) == ("H631", severity, remedy)
    assert "72 MiB" in found.what


def test_descriptors_are_counted_for_each_tensor_that_is_kept() -> None:
    """64 descriptors do not suffice for batches of ten tensors, unless tensors are shared by file name."""
    tight = replace(ROOMY, open_files_limit=64)
    found = only(preflight(replace(LOAD, batch_tensors=10), tight))
    assert (found.rule, found.severity, found.num_workers, found.prefetch_factor) == ("H632", "warning", 1, 1)
    assert preflight(replace(LOAD, batch_tensors=10, sharing_strategy="file_system"), tight) == ()


def test_memory_counts_workers_and_their_batches() -> None:
    """Spawned workers import torch anew: what is enough for forked ones is not for them."""
    machine = replace(ROOMY, memory_available_bytes=600 * MIB)
    assert preflight(LOAD, machine) == ()
    found = only(preflight(replace(LOAD, start_method="spawn"), machine))
    assert (found.rule, found.num_workers, found.prefetch_factor) == ("H633", 2, 1)


@given(
    st.builds(
        Load, num_workers=st.integers(1, 40), prefetch_factor=st.integers(1, 9),
        batch_bytes=st.integers(0, 2**28), batch_tensors=st.integers(0, 40),
        start_method=st.sampled_from(["fork", "spawn"]),
    ),
    st.builds(
        Machine, cpu_quota=st.just(99.0), shared_memory_free_bytes=st.integers(0, 2**31),
        memory_available_bytes=st.integers(0, 2**33), open_files_limit=st.integers(0, 2000),
    ),
)  # fmt: skip
def test_every_remedy_remedies(load: Load, machine: Machine) -> None:
    """What a concern advises removes that concern, and one worker or batch more would not."""
    for concern in preflight(load, machine):
        assert concern.num_workers is not None
        advised = replace(load, num_workers=concern.num_workers, prefetch_factor=concern.prefetch_factor or 1)
        assert concern.rule not in rules(preflight(advised, machine))
        more = replace(advised, num_workers=advised.num_workers + 1)
        if advised.num_workers < load.num_workers:
            assert concern.rule in rules(preflight(more, machine))


def test_the_count_of_descriptors_bounds_what_torch_opens() -> None:
    """Real workers, with all batches under way, open no more descriptors in the parent than were foreseen."""
    data = [[torch.zeros(4), torch.zeros(4), torch.zeros(4)] for _ in range(40)]
    loader = DataLoader(data, batch_size=2, num_workers=2, prefetch_factor=3)
    before = Machine.here()
    size, tensors = weigh(next(iter(DataLoader(data, batch_size=2))))
    load = Load(num_workers=2, prefetch_factor=3, batch_bytes=size, batch_tensors=tensors)
    most = 0
    for _ in loader:
        now = Machine.here()
        most = max(most, now.open_files - before.open_files)
    assert load.files >= most > load.files / 4


def test_the_weight_of_a_batch_is_that_of_its_memory() -> None:
    """A view weighs what it looks into, memory that is shared weighs once, and containers of all kinds are seen."""
    whole = torch.zeros(1000)
    batch = {
        "a": whole[:10],
        "b": [whole, torch.zeros(5)],
        "c": Samples(x=torch.zeros(2)),
        "d": np.zeros(9),
        "e": "f",
    }
    assert weigh(batch) == (4000 + 20 + 8, 3)
    assert weigh([torch.zeros(1) for _ in range(300)]) == (1200, 300)


def test_a_file_at_any_depth_is_named_with_its_path(tmp_path: Path) -> None:
    """A file that is open for reading is found in attributes, containers, closures, partials and module variables."""
    (tmp_path / "data").write_bytes(b"abc")
    with (tmp_path / "data").open("rb") as file, (tmp_path / "log").open("w") as log:
        MODULE_FILE[:] = [file]
        places = {
            "dataset.inner.files['x'][1]": Samples(inner=Samples(files={"x": [0, file]})),
            "dataset.transform:file": Samples(transform=lambda x: file.read(x)),
            "dataset.read.args[0]": Samples(read=functools.partial(len, file)),
            "dataset.next.__self__.queue[0]": Samples(next=Samples(queue=deque([file])).__getitem__),
            "dataset.__getitem__:MODULE_FILE[0]": ReadsAGlobal(log=log, out=sys.__stderr__),
        }
        for path, dataset in places.items():
            found = only(preflight(LOAD, ROOMY, dataset=dataset))
            assert (found.rule, found.severity) == ("H636", "warning")
            assert found.what.startswith(f"{path} is a file")
        dataset = Samples(file=file)
    assert preflight(LOAD, ROOMY, dataset=dataset) == (), "it is closed now"


def test_a_shared_position_really_mixes_up_samples(tmp_path: Path) -> None:
    """What H636 warns of is so: after a fork, a read in the child moves the position of the parent."""
    (tmp_path / "data").write_bytes(b"abcdef")
    with (tmp_path / "data").open("rb", buffering=0) as file:
        child = multiprocessing.get_context("fork").Process(target=file.read, args=(3,))
        child.start()
        child.join()
        assert file.read(1) == b"d"


def test_handles_that_processes_must_not_share(tmp_path: Path) -> None:
    """An HDF5 file, one of its datasets, a SQLite connection and a socket are each named while they are open."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file, socket.socket() as connection:
        file["x"] = np.zeros(3)
        database = sqlite3.connect(":memory:")
        dataset = Samples(a=file, b=[file["x"]], c=database, d=connection)
        found = preflight(LOAD, ROOMY, dataset=dataset)
        assert rules(found) == ["H635"] * 4
        assert [concern.what.split(",")[0] for concern in found] == [
            "dataset.a is an HDF5 object",
            "dataset.c is a SQLite connection",
            "dataset.d is a socket",
            "dataset.b[0] is an HDF5 object",
        ]
        database.close()
    assert rules(preflight(LOAD, ROOMY, dataset=Samples(a=file, d=connection))) == []


def test_a_lock_that_another_thread_holds_is_named() -> None:
    """A held lock would never be released in a worker; a free one and an RLock of this thread stay as they were."""
    held, free, own, foreign = threading.Lock(), threading.Lock(), threading.RLock(), threading.RLock()
    ready, done = threading.Event(), threading.Event()

    def hold() -> None:
        with foreign:
            ready.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait(20)
    with held, own:
        found = preflight(LOAD, ROOMY, dataset=Samples(held=held, free=free, own=own, foreign=foreign))
    done.set()
    thread.join()
    assert [(concern.rule, concern.what.split()[0]) for concern in found] == [
        ("H638", "dataset.held"),
        ("H638", "dataset.foreign"),
    ]
    assert not free.locked()


def test_lists_of_many_objects_are_weighed_against_memory() -> None:
    """A long list of objects is copied page by page into each forked worker; an array of the same values is not."""
    machine = replace(ROOMY, memory_available_bytes=500 * MIB)
    found = only(preflight(LOAD, machine, dataset=Samples(names=[f"{n:0100}" for n in range(200_000)])))
    assert (found.rule, found.num_workers) == ("H640", 3)
    assert preflight(LOAD, machine, dataset=Samples(numbers=np.zeros(10**6))) == ()


def test_a_look_through_is_bounded() -> None:
    """An endless structure, a huge list and a dead proxy end the search or are passed by, and hide nothing near."""
    ring: dict[str, Any] = {}
    ring["again"] = ring
    chain: list[Any] = []
    for _ in range(30_000):
        chain = [chain]
    with socket.socket() as connection:
        proxy = weakref.proxy(Samples())  # dead at once
        dataset = Samples(ring=ring, chain=chain, many=[[n] for n in range(50_000)], dead=proxy, near=connection)
        assert rules(preflight(LOAD, ROOMY, dataset=dataset)) == ["H635"]


SPAWNED = replace(LOAD, start_method="spawn")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_cannot_be_pickled_is_named_inside_out(method: str) -> None:
    """The innermost attribute that keeps a dataset from being sent is named as an error; a fork needs no pickle."""
    dataset = Samples(steps=[len, Samples(inner={"f": lambda x: x})], fine=np.zeros(3), lock=multiprocessing.Lock())
    found = only(preflight(replace(LOAD, start_method=method), ROOMY, dataset=dataset))
    assert (found.rule, found.severity) == ("H634", "error")
    assert found.what.startswith("dataset.steps[1].inner['f'] cannot be pickled")
    assert preflight(LOAD, ROOMY, dataset=dataset) == ()
    error = found.error()
    assert isinstance(error, LoaderError)
    assert error.rule == "H634"


def test_what_only_a_starting_process_can_be_sent_is_no_concern() -> None:
    """Locks, queues, pipes and shared values of multiprocessing can be sent to a worker that is being started."""
    shared = [multiprocessing.RawValue("i"), multiprocessing.Value("d"), multiprocessing.Array("i", 3)]
    others = [multiprocessing.Queue(), multiprocessing.Pipe(), multiprocessing.Event()]
    assert preflight(SPAWNED, ROOMY, dataset=Samples(shared=shared, others=others)) == ()


def test_the_state_that_is_pickled_counts_not_the_attributes() -> None:
    """A dataset that leaves its open file out of its state can be sent, and one whose state fails is named itself."""

    class Sensible(Samples):
        def __getstate__(self) -> dict[str, Any]:
            return {"path": self.path}

    class Refuses(Samples):
        def __getstate__(self) -> dict[str, Any]:
            raise RuntimeError("not me")

    Sensible.__qualname__ = "Sensible"
    globals()["Sensible"] = Sensible
    with Path(__file__).open() as file:
        assert preflight(SPAWNED, ROOMY, dataset=Sensible(path="x", file=file)) == ()
    found = only(preflight(SPAWNED, ROOMY, collate_fn=functools.partial(len, Refuses())))
    assert found.what == "collate_fn.args[0] cannot be pickled (RuntimeError: not me)"


def test_trying_to_pickle_moves_and_copies_nothing() -> None:
    """Tensors stay where they are, not in shared memory, and a large array is counted without being written."""
    tensor, table = torch.zeros(1000), np.zeros(30 * MIB, dtype=np.uint8)
    machine = replace(ROOMY, memory_available_bytes=1000 * MIB)
    found = only(preflight(SPAWNED, machine, dataset=Samples(tensor=tensor, table=table)))
    assert (found.rule, found.num_workers) == ("H640", 3)
    assert not tensor.is_shared()


def test_a_function_of_a_prompt_cannot_be_imported_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, what was defined there is an error for spawned workers; in a program it is not."""
    main = sys.modules["__main__"]
    shown = type("Shown", (Samples,), {"__module__": "__main__"})
    monkeypatch.setattr(main, "Shown", shown, raising=False)
    monkeypatch.setattr(main, "__file__", __file__, raising=False)  # a process of pytest-xdist has none
    assert preflight(SPAWNED, ROOMY, dataset=shown()) == ()
    monkeypatch.delattr(main, "__file__")
    monkeypatch.setattr(main, "__spec__", None)
    found = only(preflight(SPAWNED, ROOMY, dataset=shown()))
    assert (found.rule, found.severity) == ("H639", "error")
    assert "Shown" in found.what


def test_a_batch_that_no_worker_can_send_is_an_error() -> None:
    """A batch with a generator in it would make torch's loader wait for ever, whatever the start method."""
    generator = (n for n in range(3))
    for load in (LOAD, SPAWNED):
        found = only(preflight(load, ROOMY, batch={"x": [torch.zeros(1), generator]}))
        assert (found.rule, found.severity, found.num_workers) == ("H641", "error", 0)
        assert found.what.startswith("batch['x'][1] cannot be pickled (TypeError: cannot pickle 'generator' object)")


def test_errors_come_first() -> None:
    """Of several concerns, those that certainly end loading are told first."""
    machine = replace(ROOMY, cpu_quota=1, shared_memory_free_bytes=MIB)
    found = preflight(SPAWNED, machine, dataset=Samples(f=lambda: 0))
    assert [concern.severity for concern in found] == ["error", "error", "warning"]

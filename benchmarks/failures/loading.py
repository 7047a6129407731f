"""Failures of loading: workers that die, hang or cannot be started, samples that make no batch, wrong options.

Each fails for real; see the package for how they are run. What the samples themselves are made of is in ``samples``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from benchmarks.failures import failure


def _exec_script(text: str, *arguments: str) -> None:
    """Replace this process by a user's script; some failures need a main module of their own."""
    Path("train.py").write_text(text)
    os.execv(sys.executable, [sys.executable, "train.py", *arguments])


@failure("H929", author="F")
def worker_death_caught_and_reduced_to_its_message() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> int:
            if index == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    try:
        for _ in DataLoader(Numbers(), batch_size=4, num_workers=2, collate_fn=list):
            pass
    except RuntimeError as error:
        sys.exit(f"loading failed: {error}")


@failure("H929", author="F")
def worker_death_logged_without_its_cause() -> None:
    import logging

    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(10)
            os._exit(5)

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        print(sum(DataLoader(Stream(), batch_size=None, num_workers=1)))
    except RuntimeError as error:
        logging.getLogger("train").error("training stopped: %s", error)  # noqa: TRY400
        sys.exit(3)


@failure("H930", author="F")
def worker_killed_within_getitem() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> bytes:
            if index == 42:
                os.kill(os.getpid(), signal.SIGKILL)
            return bytes(3 * 8 * 8)

    for _ in DataLoader(Images(), batch_size=8, num_workers=2, collate_fn=b"".join):
        pass


@failure("H930", author="F")
def worker_killed_from_outside_between_two_batches() -> None:
    import torch
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(4000), batch_size=4, num_workers=1, collate_fn=list))
    model = torch.nn.Linear(4, 1)
    for batch in batches:
        model(torch.tensor(batch).float()).sum().backward()
        os.kill(batches._workers[0].pid, signal.SIGKILL)


@failure("H930", author="F")
def iterable_worker_killed_and_raised_again_with_context() -> None:
    from torch.utils.data import DataLoader, IterableDataset

    class Shards(IterableDataset):
        def __iter__(self):
            yield from range(5)
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        for _ in DataLoader(Shards(), batch_size=2, num_workers=2, collate_fn=tuple):
            pass
    except RuntimeError as error:
        raise RuntimeError("epoch 0 could not be finished") from error


@failure("H930", author="F")
def persistent_worker_killed_in_the_second_epoch() -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(range(64), batch_size=4, num_workers=2, persistent_workers=True, collate_fn=sum)
    for epoch in range(3):
        for step, _ in enumerate(loader):
            if epoch == 1 and step == 2:
                os.kill(loader._iterator._workers[1].pid, signal.SIGKILL)


@failure("H931", author="F")
def memory_map_shrunk_behind_a_worker() -> None:
    import numpy as np
    from torch.utils.data import DataLoader, Dataset

    np.zeros(1 << 20, dtype=np.uint8).tofile("data.bin")
    mapped = np.memmap("data.bin", dtype=np.uint8, mode="r")
    os.truncate("data.bin", 100)

    class Mapped(Dataset):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> float:
            return float(mapped[index << 16 : (index + 1) << 16].sum())

    for _ in DataLoader(Mapped(), batch_size=4, num_workers=1, collate_fn=sum):
        pass


@failure("H931", author="F")
def mmap_beyond_the_end_in_a_collate() -> None:
    import mmap

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    with Path("cache.bin").open("wb+") as file:
        file.truncate(1 << 16)
        view = mmap.mmap(file.fileno(), 1 << 16)
        file.truncate(0)

    def collate(samples: list[tuple[torch.Tensor]]) -> bytes:
        return view[1 << 14 : (1 << 14) + len(samples)]

    for _ in DataLoader(TensorDataset(torch.zeros(8)), batch_size=2, num_workers=2, collate_fn=collate):
        pass


@failure("H932", author="F", limit_bytes=1 << 41)
def shared_memory_smaller_than_a_tensor() -> None:
    import shutil

    import torch

    size = shutil.disk_usage("/dev/shm").total + (1 << 30)
    torch.UntypedStorage._new_shared(size)


@failure("H932", author="F")
def shared_memory_refused_for_a_batch_of_a_worker() -> None:
    import resource

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def limit(_: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))  # as a full /dev/shm: no room for this file

    loader = DataLoader(
        TensorDataset(torch.zeros(16, 3, 128, 128)), batch_size=8, num_workers=1, worker_init_fn=limit
    )
    for _ in loader:
        pass


@failure("H932", author="F")
def share_memory_of_a_model_too_large() -> None:
    import resource

    import torch

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    torch.nn.Linear(512, 512).share_memory()


@failure("H933", author="F")
def worker_reads_a_null_pointer() -> None:
    import ctypes

    from torch.utils.data import DataLoader, Dataset

    class Native(Dataset):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> int:
            return index if index < 17 else len(ctypes.string_at(0))

    for _ in DataLoader(Native(), batch_size=4, num_workers=2, collate_fn=max):
        pass


@failure("H933", author="F")
def native_crash_in_a_collate() -> None:
    import ctypes

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def collate(samples: list[tuple[torch.Tensor]]) -> int:
        return ctypes.cast(8 * len(samples), ctypes.POINTER(ctypes.c_int)).contents.value

    next(iter(DataLoader(TensorDataset(torch.zeros(8)), batch_size=4, num_workers=1, collate_fn=collate)))


@failure("H1201", author="F")
def worker_aborts_in_native_code() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Aborting(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            if index == 5:
                os.abort()
            return index

    for _ in DataLoader(Aborting(), num_workers=1, batch_size=None):
        pass


@failure("H1201", author="F")
def worker_divides_by_zero_in_native_code() -> None:
    from torch.utils.data import DataLoader, IterableDataset

    class Decoder(IterableDataset):
        def __iter__(self):
            yield 1
            os.kill(os.getpid(), signal.SIGFPE)

    list(DataLoader(Decoder(), num_workers=1, batch_size=None))


@failure("H1202", author="F")
def worker_terminated_by_a_clean_up_script() -> None:
    import subprocess

    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(512), batch_size=None, num_workers=2))
    for step, _ in enumerate(batches):
        if step == 3:
            subprocess.run(["sh", "-c", f"kill {batches._workers[0].pid}"], check=True)


@failure("H929", author="F")
def worker_terminated_by_the_program_itself() -> None:
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(512), batch_size=None, num_workers=2))
    for step, _ in enumerate(batches):
        if step == 3:
            batches._workers[0].terminate()


@failure("H934", author="F")
def sample_that_sleeps() -> None:
    import time

    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            time.sleep(3600 if index == 3 else 0)
            return index

    for _ in DataLoader(Slow(), num_workers=1, timeout=1):
        pass


@failure("H934", author="F")
def lock_held_while_workers_are_forked() -> None:
    import threading

    import torch
    from torch.utils.data import DataLoader, Dataset

    lock = threading.Lock()

    class Cached(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            with lock:
                return torch.tensor(index)

    with lock:
        next(iter(DataLoader(Cached(), batch_size=2, num_workers=2, timeout=1)))


@failure("H934", author="F")
def start_of_a_worker_waits_for_a_socket() -> None:
    import socket

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    here, there = socket.socketpair()

    def connect(_: int) -> None:
        here.recv(1)

    loader = DataLoader(TensorDataset(torch.zeros(8)), num_workers=1, timeout=1, worker_init_fn=connect)
    for epoch in range(2):
        print(f"epoch {epoch}")
        for _ in loader:
            pass
    there.close()


@failure("H935", author="F")
def worker_leaves_by_os_exit() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Exiting(Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            if index == 7:
                os._exit(3)
            return index

    for _ in DataLoader(Exiting(), batch_size=2, num_workers=2, collate_fn=list):
        pass


@failure("H935", author="F")
def worker_init_calls_sys_exit() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def prepare(worker: int) -> None:
        if not Path(f"/nonexistent/part-{worker}").exists():
            sys.exit(1)

    for _ in DataLoader(TensorDataset(torch.zeros(8)), num_workers=2, worker_init_fn=prepare):
        pass


@failure("H935", author="F")
def collate_calls_exit_on_a_bad_batch() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def collate(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
        batch = torch.stack([sample[0] for sample in samples])
        if batch.sum() > 20:
            raise SystemExit(2)
        return batch

    for _ in DataLoader(TensorDataset(torch.arange(16)), batch_size=4, num_workers=1, collate_fn=collate):
        pass


@failure("H936", author="F")
def every_batch_is_kept_until_descriptors_run_out() -> None:
    import resource

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.zeros(4000, 2)), batch_size=4, num_workers=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    kept = [batch for (batch,) in loader]
    print(len(kept))


@failure("H937", author="F", also=("H936",))
def samples_of_many_tensors_eat_the_descriptors() -> None:
    import resource

    import torch
    from torch.utils.data import DataLoader, Dataset

    class Tables(Dataset):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {f"column{column}": torch.tensor([index]) for column in range(60)}

    batches = iter(DataLoader(Tables(), batch_size=8, num_workers=1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    for batch in batches:
        print(len(batch))


@failure("H936", author="F", also=("H1222", "H934"))
def worker_cannot_open_more_for_its_tensors() -> None:
    import resource

    import torch
    from torch.utils.data import DataLoader, Dataset

    class Tables(Dataset):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> list[torch.Tensor]:
            return [torch.tensor([index])] * 80

    def limit(_: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    for _ in DataLoader(Tables(), batch_size=8, num_workers=1, timeout=5, worker_init_fn=limit):
        pass


@failure("H1222", author="F")
def files_opened_and_never_closed() -> None:
    import resource

    from torch.utils.data import DataLoader, Dataset

    class Lines(Dataset):
        def __init__(self) -> None:
            self.opened = []

        def __len__(self) -> int:
            return 500

        def __getitem__(self, index: int) -> str:
            path = Path(f"{index}.txt")
            path.write_text("text")
            self.opened.append(path.open())
            return self.opened[-1].read()

    resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
    for _ in DataLoader(Lines(), batch_size=4):
        pass


@failure("H937", author="F")
def queue_of_tensors_with_too_few_descriptors() -> None:
    import resource

    import torch
    import torch.multiprocessing as mp

    queue = mp.get_context("fork").Queue()
    process = mp.get_context("fork").Process(target=_put_tensors, args=(queue,), daemon=True)
    process.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept: list[torch.Tensor] = []
    while True:
        kept.append(queue.get(timeout=10))


def _put_tensors(queue: object) -> None:
    import time

    import torch

    for _ in range(300):
        queue.put(torch.zeros(4))
    time.sleep(60)


@failure("H939", author="F")
def producer_left_before_its_tensor_was_fetched() -> None:
    import torch.multiprocessing as mp

    queue = mp.get_context("fork").Queue()
    process = mp.get_context("fork").Process(target=_put_one_and_leave, args=(queue,))
    process.start()
    process.join()
    print(queue.get(timeout=10))


def _put_one_and_leave(queue: object) -> None:
    import torch

    queue.put(torch.ones(8))


@failure("H939", author="F")
def producer_killed_before_its_tensor_was_fetched() -> None:
    import time

    import torch.multiprocessing as mp

    queue = mp.get_context("fork").Queue()
    process = mp.get_context("fork").Process(target=_put_one_and_wait, args=(queue,))
    process.start()
    time.sleep(1)
    process.kill()
    process.join()
    print(queue.get(timeout=10))


def _put_one_and_wait(queue: object) -> None:
    import time

    import torch

    queue.put({"grad": torch.ones(8)})
    time.sleep(60)


@failure("H940", author="F")
def lambda_collate_under_spawn() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(
        TensorDataset(torch.zeros(8)),
        num_workers=1,
        collate_fn=lambda samples: torch.stack([sample[0] for sample in samples]),
        multiprocessing_context="spawn",
    )
    next(iter(loader))


@failure("H940", author="F")
def local_dataset_class_under_spawn() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Local(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    for _ in DataLoader(Local(), num_workers=2, multiprocessing_context="spawn"):
        pass


class _WithHandle:
    def __init__(self, handle: object) -> None:
        self.handle = handle

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@failure("H940", author="F")
def dataset_with_an_open_file_under_spawn() -> None:
    from torch.utils.data import DataLoader

    with Path("train.txt").open("w") as file:
        next(iter(DataLoader(_WithHandle(file), num_workers=1, multiprocessing_context="spawn")))


@failure("H940", author="F")
def dataset_with_a_lock_under_forkserver() -> None:
    import threading

    from torch.utils.data import DataLoader

    dataset = _WithHandle(threading.Lock())
    next(iter(DataLoader(dataset, num_workers=1, multiprocessing_context="forkserver")))


@failure("H940", author="F")
def lambda_given_to_a_pool() -> None:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(lambda value: value + 1, range(4)))


@failure("H940", author="F")
def nested_function_given_to_spawn() -> None:
    import torch.multiprocessing as mp

    def train(rank: int) -> None:
        print(rank)

    mp.spawn(train, nprocs=1)


@failure("H940", author="F", also=("H934",))
def sample_of_a_local_class_stays_in_the_feeder_thread() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> object:
            return lambda: index

    for _ in DataLoader(Numbers(), num_workers=1, timeout=2, batch_size=None):
        pass


_NO_GUARD = """
import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.zeros(8)), num_workers=1, multiprocessing_context="spawn")
for batch in loader:
    print(batch)
"""


@failure("H1223", author="F", also=("H934",))
def sample_computed_with_gradients_in_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Embedded(Dataset):
        def __init__(self) -> None:
            self.embedding = torch.nn.Embedding(16, 4)

        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.embedding(torch.tensor(index)) * 2

    for _ in DataLoader(Embedded(), batch_size=None, num_workers=1, timeout=3):
        pass


@failure("H1206", author="F")
def generator_given_as_a_dataset() -> None:
    from torch.utils.data import DataLoader, SequentialSampler

    samples = (index * 2 for index in range(10))
    for batch in DataLoader(samples, batch_size=2, sampler=SequentialSampler(range(10))):
        print(batch)


@failure("H941", author="F", also=("H935",))
def script_without_main_guard() -> None:
    _exec_script(_NO_GUARD)


_NO_GUARD_SPAWN = """
import torch
import torch.multiprocessing as mp

def train(rank):
    print("rank", rank)

mp.spawn(train, nprocs=1)
"""


@failure("H941", author="F")
def spawn_at_the_top_of_a_script() -> None:
    _exec_script(_NO_GUARD_SPAWN)


@failure("H945", author="F")
def nothing_found_by_glob_but_shuffled() -> None:
    from torch.utils.data import DataLoader

    files = sorted(Path("images").glob("*.jpg"))
    print(f"{len(files)} images")
    DataLoader(files, batch_size=32, shuffle=True)


@failure("H945", author="F")
def everything_filtered_away() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class LongEnough(Dataset):
        def __init__(self, rows: list[torch.Tensor], least: int) -> None:
            self.rows = [row for row in rows if len(row) >= least]

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.rows[index]

    DataLoader(LongEnough([torch.zeros(size) for size in range(8)], 16), shuffle=True)


@failure("H945", author="F")
def no_part_of_a_dataset_found() -> None:
    import torch
    from torch.utils.data import ConcatDataset, TensorDataset

    parts = [TensorDataset(torch.load(path)) for path in sorted(Path().glob("part-*.pt"))]
    ConcatDataset(parts)


@failure("H945", author="F")
def sampler_for_an_empty_split() -> None:
    import torch
    from torch.utils.data import RandomSampler, TensorDataset, random_split

    _, valid = random_split(TensorDataset(torch.zeros(3)), [1.0, 0.0])
    RandomSampler(valid)


@failure("H946", author="F")
def next_beyond_the_end_of_an_epoch() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    batches = iter(DataLoader(TensorDataset(torch.zeros(40, 4)), batch_size=4))
    for step in range(100):
        (batch,) = next(batches)
        if step % 5 == 0:
            print(step, batch.mean().item())


@failure("H946", author="F")
def first_batch_of_a_loader_that_drops_all() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.zeros(20, 4)), batch_size=64, drop_last=True)
    print(next(iter(loader))[0].shape)


@failure("H946", author="F")
def generator_of_batches_runs_dry() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def endless(loader: DataLoader) -> object:
        batches = iter(loader)
        while True:
            yield next(batches)

    for step, _ in enumerate(endless(DataLoader(TensorDataset(torch.zeros(6)), batch_size=2))):
        print(step)


@failure("H1203", author="F")
def prefetch_without_workers() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    DataLoader(TensorDataset(torch.zeros(4)), num_workers=0, prefetch_factor=4)


@failure("H1203", author="F")
def persistent_workers_without_workers() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    DataLoader(TensorDataset(torch.zeros(4)), persistent_workers=True)


@failure("H1203", author="F")
def sampler_and_shuffle() -> None:
    import torch
    from torch.utils.data import DataLoader, RandomSampler, TensorDataset

    data = TensorDataset(torch.zeros(4))
    DataLoader(data, batch_size=2, sampler=RandomSampler(data), shuffle=True)


@failure("H1203", author="F")
def batch_sampler_and_batch_size() -> None:
    import torch
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

    data = TensorDataset(torch.zeros(4))
    DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, drop_last=False), batch_size=2)


@failure("H1203", author="F")
def batch_size_read_as_a_float() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    settings = {"global_batch_size": 64, "ranks": 4}
    size = settings["global_batch_size"] / settings["ranks"]
    DataLoader(TensorDataset(torch.zeros(64)), batch_size=size)


@failure("H1203", author="F")
def batch_size_zero_after_division() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    DataLoader(TensorDataset(torch.zeros(64)), batch_size=4 // 8, shuffle=True)


@failure("H1204", author="F")
def stream_with_shuffle() -> None:
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(4)

    DataLoader(Stream(), shuffle=True)


@failure("H1204", author="F")
def stream_with_a_sampler() -> None:
    from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(4)

    DataLoader(Stream(), sampler=SequentialSampler(range(4)))


@failure("H1205", author="F")
def length_of_a_stream_for_the_scheduler() -> None:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Lines(IterableDataset):
        def __iter__(self):
            yield from range(4)

    loader = DataLoader(Lines(), batch_size=2)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, epochs=2, steps_per_epoch=len(loader))


@failure("H1205", author="F")
def dataset_without_len_shuffled() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(index)

    for _ in DataLoader(Samples(), batch_size=2, shuffle=True):
        pass


@failure("H1205", author="F")
def split_of_a_dataset_without_len() -> None:
    from torch.utils.data import Dataset, random_split

    class Samples(Dataset):
        def __getitem__(self, index: int) -> int:
            return index

    random_split(Samples(), [8, 2])


@failure("H1206", author="F")
def getitem_misspelt() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):
        def __len__(self) -> int:
            return 8

        def __get_item__(self, index: int) -> torch.Tensor:
            return torch.tensor(index)

    for _ in DataLoader(Samples(), batch_size=2):
        pass


@failure("H1206", author="F")
def getitem_with_too_few_underscores_in_a_worker() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):
        def __len__(self) -> int:
            return 8

        def _getitem_(self, index: int) -> int:
            return index

    for _ in DataLoader(Samples(), batch_size=2, num_workers=1):
        pass


@failure("H1207", author="F")
def next_of_a_loader() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.zeros(4)))
    print(next(loader))


@failure("H1207", author="F")
def loader_indexed() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.zeros(4)), batch_size=2)
    print(loader[0])


@failure("H1207", author="F")
def method_next_of_an_iterator() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    images = iter(DataLoader(TensorDataset(torch.zeros(4)))).next()
    print(images)


@failure("H1207", author="F")
def method_next_of_an_iterator_with_workers() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    batches = iter(DataLoader(TensorDataset(torch.zeros(4)), num_workers=1))
    print(batches.next())


@failure("H1208", author="F")
def split_of_rounded_lengths() -> None:
    import torch
    from torch.utils.data import TensorDataset, random_split

    data = TensorDataset(torch.zeros(1001))
    random_split(data, [int(0.8 * len(data)), int(0.2 * len(data))])


@failure("H1208", author="F")
def split_by_percent() -> None:
    import torch
    from torch.utils.data import TensorDataset, random_split

    random_split(TensorDataset(torch.zeros(1000)), [80, 10, 10])


@failure("H1209", author="F")
def features_and_labels_of_different_lengths() -> None:
    import torch
    from torch.utils.data import TensorDataset

    TensorDataset(torch.zeros(100, 8), torch.zeros(99))


@failure("H1209", author="F")
def stacked_datasets_of_different_lengths() -> None:
    import torch
    from torch.utils.data import StackDataset, TensorDataset

    StackDataset(image=TensorDataset(torch.zeros(10)), text=TensorDataset(torch.zeros(12)))


@failure("H1210", author="F")
def no_room_to_map_shared_memory() -> None:
    import resource

    import torch
    import torch.multiprocessing as mp

    mp.set_sharing_strategy("file_descriptor")
    kept = []
    with Path("/proc/self/statm").open() as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
    while True:
        kept.append(torch.UntypedStorage._new_shared(8 << 20))


@failure("H1211", author="F")
def shared_memory_manager_without_a_place_for_its_socket() -> None:
    import torch
    import torch.multiprocessing as mp

    os.environ["TMPDIR"] = str(Path("missing").absolute())
    mp.set_sharing_strategy("file_system")
    torch.zeros(4).share_memory_()


@failure("H1212", author="F")
def loader_iterator_used_after_fork() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    batches = iter(DataLoader(TensorDataset(torch.zeros(64)), num_workers=1))
    next(batches)
    child = os.fork()
    if child == 0:
        batches._workers[0].join(1)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@failure("H1213", author="F")
def workers_within_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset, TensorDataset

    class Nested(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            inner = DataLoader(TensorDataset(torch.zeros(4)), num_workers=1)
            return next(iter(inner))[0] + index

    for _ in DataLoader(Nested(), num_workers=1):
        pass


def _train_once(learning_rate: float) -> float:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    (batch,) = next(iter(DataLoader(TensorDataset(torch.ones(4)), num_workers=1)))
    return float(batch.sum()) * learning_rate


@failure("H1213", author="F")
def search_of_settings_in_a_pool() -> None:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(_train_once, [0.1, 0.01]))


@failure("H1214", author="F")
def start_method_set_twice() -> None:
    import torch.multiprocessing as mp

    mp.set_start_method("fork")
    mp.set_start_method("spawn")


@failure("H1214", author="F")
def start_method_set_after_a_queue_was_made() -> None:
    import multiprocessing

    multiprocessing.Queue()
    multiprocessing.set_start_method("spawn")


_INTERACTIVE = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index)

for batch in DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn"):
    print(batch)
"""


@failure("H1215", author="F", also=("H935",))
def dataset_class_typed_at_the_prompt_under_spawn() -> None:
    os.execv(sys.executable, [sys.executable, "-c", _INTERACTIVE])


@failure("H1216", author="F")
def sampler_with_the_rank_of_another_world() -> None:
    import torch
    from torch.utils.data import DistributedSampler, TensorDataset

    DistributedSampler(TensorDataset(torch.zeros(8)), num_replicas=2, rank=2)


@failure("H1216", author="F")
def sampler_with_the_rank_from_one() -> None:
    from torch.utils.data import DistributedSampler

    ranks = [int(text) for text in ("1", "2", "3", "4")]
    for rank in ranks:
        print(len(list(DistributedSampler(range(16), num_replicas=len(ranks), rank=rank))))


@failure("H1217", author="F")
def weights_as_a_column() -> None:
    import torch
    from torch.utils.data import WeightedRandomSampler

    WeightedRandomSampler(torch.ones(10, 1), num_samples=10)


@failure("H1217", author="F")
def weights_of_more_samples_than_multinomial_can() -> None:
    import torch
    from torch.utils.data import WeightedRandomSampler

    sampler = WeightedRandomSampler(torch.ones((1 << 24) + 8), num_samples=4)
    print(list(sampler))

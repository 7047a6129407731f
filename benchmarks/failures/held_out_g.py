"""Failures of memory, devices and groups, held out: labelled by titles, by one who has not read the patterns.

Their signatures are written by another author, see ``memory``, ``devices`` and ``distributed`` for his own failures.
"""

# ruff: noqa: ICN001, PERF401 - programs stand here as users write them

from __future__ import annotations

from benchmarks.failures import failure

_MEBIBYTE = 1 << 20


def _alone() -> None:
    """Set the environment of a group of one process."""
    import os
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo"
    )


def _two_ranks(work: object) -> None:
    """Run a function of the rank in two processes with gloo."""
    import torch.multiprocessing as mp

    _alone()
    mp.start_processes(_rank, args=(work,), nprocs=2, start_method="fork")


def _rank(rank: int, work: object) -> None:
    import datetime

    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=8))
    work(rank)


@failure("H906", author="G", limit_bytes=1500 * _MEBIBYTE)
def attention_map_of_a_long_document() -> None:
    import torch

    words = torch.randn(1, 8, 16384, 32)
    torch.softmax(words @ words.transpose(-2, -1), dim=-1)


@failure("H906", author="G", limit_bytes=1200 * _MEBIBYTE)
def optimizer_state_of_a_large_table() -> None:
    import torch

    table = torch.nn.EmbeddingBag(1_000_000, 80, mode="sum")
    optimizer = torch.optim.Adam(table.parameters())
    table(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()


@failure("H906", author="G", limit_bytes=1200 * _MEBIBYTE)
def losses_kept_with_their_graphs() -> None:
    import torch

    layer, history = torch.nn.Linear(4096, 4096), []
    for _step in range(100):
        history.append(torch.relu(layer(torch.randn(1024, 4096))).mean())


@failure("H907", author="G", limit_bytes=1000 * _MEBIBYTE)
def whole_data_set_in_float64() -> None:
    import numpy as np

    images = np.zeros((60_000, 64, 64), dtype=np.uint8)
    images.astype(np.float64) / 255


@failure("H907", author="G", limit_bytes=700 * _MEBIBYTE)
def file_read_again_and_again_into_a_list() -> None:
    from pathlib import Path

    Path("shard.bin").write_bytes(bytes(50 * _MEBIBYTE))
    shards = []
    while True:
        shards.append(Path("shard.bin").read_bytes())


@failure("H907", author="G", limit_bytes=600 * _MEBIBYTE)
def vocabulary_of_all_pairs() -> None:
    pairs = {}
    for first in range(10_000):
        for second in range(10_000):
            pairs[first, second] = f"{first} {second}"


@failure("H907", author="G", limit_bytes=900 * _MEBIBYTE)
def distances_between_all_samples() -> None:
    import numpy as np

    points = np.random.default_rng(0).normal(size=(20_000, 8))
    np.linalg.norm(points[:, None] - points[None], axis=-1)


@failure("H1104", author="G", also=("H906",))
def size_in_bytes_taken_for_elements() -> None:
    import torch

    torch.empty(10**17)


@failure("H1104", author="G", also=("H907",))
def table_of_products_of_sizes() -> None:
    import numpy as np

    np.zeros((50_000, 50_000, 50_000))


@failure("H917", author="G")
def model_moved_to_cuda_in_a_trainer() -> None:
    import torch

    class Trainer:
        device = "cuda:0"

        def __init__(self, model: torch.nn.Module) -> None:
            self.model = model.to(self.device)

    Trainer(torch.nn.Linear(2, 2))


@failure("H917", author="G")
def batch_moved_by_its_method() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    for (batch,) in DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2):
        batch.cuda(non_blocking=True)


@failure("H917", author="G")
def memory_statistics_without_cuda() -> None:
    import torch

    torch.zeros(3, device=torch.device("cuda"))


@failure("H1161", author="G")
def apple_device_elsewhere() -> None:
    import torch

    torch.ones(2, device="mps")


@failure("H1161", author="G")
def accelerator_of_another_maker() -> None:
    import torch

    torch.nn.Linear(2, 2).to("xpu")


@failure("H1162", author="G")
def device_spelt_gpu() -> None:
    import torch

    torch.device("gpu")


@failure("H1162", author="G")
def device_with_a_name_in_place_of_a_number() -> None:
    import torch

    torch.zeros(2).to("cuda:first")


@failure("H1163", author="G")
def item_of_a_model_made_without_memory() -> None:
    import torch

    with torch.device("meta"):
        model = torch.nn.Linear(3, 1)
    model(torch.ones(1, 3, device="meta")).item()


@failure("H1163", author="G")
def meta_model_moved_to_the_cpu() -> None:
    import torch

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    model.to("cpu")


@failure("H919", author="G")
def layer_left_on_meta() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(2, 2)
            self.last = torch.nn.Linear(2, 2, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    Net()(torch.ones(1, 2))


@failure("H919", author="G")
def mask_on_another_device() -> None:
    import torch

    scores = torch.zeros(4, 4, device="meta")
    torch.where(scores > 0, scores, torch.ones(4, 4))


@failure("H926", author="G")
def mean_over_ranks_without_a_group() -> None:
    import torch
    import torch.distributed as dist

    loss = torch.tensor(1.0)
    dist.all_reduce(loss)
    print(loss / dist.get_world_size())


@failure("H926", author="G")
def sampler_without_a_group() -> None:
    from torch.utils.data import DistributedSampler

    DistributedSampler(list(range(8)))


@failure("H926", author="G")
def barrier_after_the_group_was_destroyed() -> None:
    import torch.distributed as dist

    _alone()
    dist.init_process_group("gloo")
    dist.destroy_process_group()
    dist.barrier()


@failure("H926", author="G")
def parallel_model_without_a_group() -> None:
    import torch

    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


@failure("H927", author="G")
def port_of_another_run() -> None:
    import os
    import socket

    import torch.distributed as dist

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]), RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo")


@failure("H1121", author="G")
def rank_not_in_the_environment() -> None:
    import os

    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", WORLD_SIZE="2")
    os.environ.pop("RANK", None)
    dist.init_process_group("gloo")


@failure("H1121", author="G")
def address_not_in_the_environment() -> None:
    import os

    import torch.distributed as dist

    os.environ.pop("MASTER_ADDR", None)
    dist.init_process_group("gloo", rank=0, world_size=2)


@failure("H1122", author="G")
def second_node_never_came() -> None:
    import datetime

    import torch.distributed as dist

    _alone()
    dist.init_process_group("gloo", rank=0, world_size=2, timeout=datetime.timedelta(seconds=3))


@failure("H1130", author="G")
def group_made_by_the_script_and_by_the_library() -> None:
    import torch.distributed as dist

    _alone()
    for _ in range(2):
        dist.init_process_group("gloo")


@failure("H1131", author="G")
def nccl_on_a_machine_without() -> None:
    import torch.distributed as dist

    _alone()
    dist.init_process_group("nccl")
    dist.barrier()


@failure("H1131", author="G")
def backend_misspelt() -> None:
    import torch.distributed as dist

    _alone()
    dist.init_process_group("glo")


@failure("H1129", author="G")
def broadcast_from_a_rank_that_is_not_there() -> None:
    import torch
    import torch.distributed as dist

    _alone()
    dist.init_process_group("gloo")
    dist.broadcast(torch.zeros(2), src=1)


@failure("H1132", author="G")
def gather_of_lists() -> None:
    import torch.distributed as dist

    _alone()
    dist.init_process_group("gloo")
    dist.all_reduce([1.0, 2.0])


@failure("H1128", author="G")
def frozen_backbone_in_parallel() -> None:
    import torch
    import torch.distributed as dist

    _alone()
    dist.init_process_group("gloo")
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).requires_grad_(False))


@failure("H925", author="G")
def auxiliary_head_left_out_of_the_loss() -> None:
    import torch
    import torch.distributed as dist

    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.auxiliary = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.main(x)

    _alone()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Heads())
    for _step in range(2):
        model(torch.ones(3, 4)).sum().backward()


@failure("H1137", author="G", timeout=90)
def spawned_rank_killed() -> None:
    import os
    import signal

    def work(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    _two_ranks(work)


@failure("H922", author="G", timeout=90, also=("H1137",))
def other_rank_left_before_the_sum() -> None:
    import os

    import torch
    import torch.distributed as dist

    def work(rank: int) -> None:
        if rank == 1:
            os._exit(0)
        dist.all_reduce(torch.ones(4))

    _two_ranks(work)


@failure("H921", author="G", timeout=90)
def other_rank_sleeps_at_the_barrier() -> None:
    import time

    import torch
    import torch.distributed as dist

    def work(rank: int) -> None:
        if rank == 1:
            time.sleep(30)
        dist.all_reduce(torch.ones(4))

    _two_ranks(work)


@failure("H1126", author="G", timeout=90)
def layers_of_the_ranks_differ() -> None:
    import torch

    def work(rank: int) -> None:
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2 + rank))

    _two_ranks(work)


@failure("H965", author="G", timeout=90)
def shape_error_on_one_rank_only() -> None:
    import torch
    import torch.distributed as dist

    def work(rank: int) -> None:
        batch = torch.ones(2, 4 + rank)
        loss = torch.nn.Linear(4, 1)(batch).sum()
        dist.all_reduce(loss)

    _two_ranks(work)


@failure("H1135", author="G", timeout=90)
def address_of_a_node_that_left_the_cluster() -> None:
    import datetime
    import os

    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="node-99.cluster.invalid", MASTER_PORT="29500", RANK="1", WORLD_SIZE="2")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))


@failure("H1136", author="G")
def interface_of_another_machine() -> None:
    import os

    import torch.distributed as dist

    _alone()
    os.environ["GLOO_SOCKET_IFNAME"] = "ib0"
    dist.init_process_group("gloo")


@failure("H1142", author="G")
def mesh_for_eight_processes() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    _alone()
    init_device_mesh("cpu", (2, 4))


@failure("H1169", author="G")
def device_ids_on_the_cpu() -> None:
    import torch
    import torch.distributed as dist

    _alone()
    dist.init_process_group("gloo")
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[0])


@failure("H1102", author="G", also=("H906", "H907", "H908", "H1101"))
def threads_until_no_more_can_start() -> None:
    import resource
    import threading

    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    release = threading.Event()
    for _ in range(2000):
        threading.Thread(target=release.wait, daemon=True).start()


@failure("H917", author="G")
def dataset_that_puts_samples_on_the_gpu() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class OnDevice(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.ones(1, device="cuda")

    next(iter(DataLoader(OnDevice(), num_workers=1)))

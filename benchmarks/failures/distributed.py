"""Failures of several processes on one machine: gloo groups, DistributedDataParallel, stores, ports and torchrun.

Ranks are started as users start them: by `torch.multiprocessing`, or by torchrun on a script. NCCL cannot fail here.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.failures import failure

MIB = 2**20


def _alone(**environment: str) -> None:
    """Start a group of one process."""
    import os

    import torch.distributed as dist

    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", **environment})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _worker(rank: int, train: Callable[[int], object], world: int, seconds: float) -> None:
    from datetime import timedelta
    from pathlib import Path

    import torch.distributed as dist

    where = f"file://{Path.cwd()}/rendezvous"
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=limit)
    train(rank)


def _ranks(train: Callable[[int], object], world: int = 2, seconds: float = 3) -> None:
    """Start a group of that many processes, as `torch.multiprocessing.spawn` does."""
    import torch.multiprocessing as mp

    mp.start_processes(_worker, args=(train, world, seconds), nprocs=world, start_method="fork")


def _torchrun(script: str, *options: str) -> None:
    """Start a script by torchrun with two ranks."""
    from pathlib import Path

    from torch.distributed.run import main

    Path("train.py").write_text(script)
    main(["--standalone", "--nproc-per-node=2", *options, "train.py"])


@failure("H926", author="E")
def rank_asked_before_init() -> None:
    import torch.distributed as dist

    if dist.get_world_size() > 1:
        print("parallel")


@failure("H926", author="E")
def barrier_before_init() -> None:
    import torch.distributed as dist

    dist.barrier()


@failure("H926", author="E")
def metric_reduced_without_a_group() -> None:
    import torch
    import torch.distributed as dist

    correct = torch.tensor(91.0)
    dist.all_reduce(correct, op=dist.ReduceOp.SUM)


@failure("H926", author="E")
def wrapper_before_init() -> None:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel(nn.Linear(2, 2))


@failure("H926", author="E")
def sampler_before_init() -> None:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    DataLoader(range(10), sampler=DistributedSampler(range(10)))


@failure("H926", author="E")
def group_of_a_subset_before_init() -> None:
    import torch.distributed as dist

    dist.new_group([0])


@failure("H926", author="E")
def settings_broadcast_before_init() -> None:
    import torch.distributed as dist

    settings = [{"lr": 0.1}]
    dist.broadcast_object_list(settings, src=0)


@failure("H926", author="E")
def metrics_gathered_after_the_end() -> None:
    import torch.distributed as dist

    _alone()
    dist.destroy_process_group()
    gathered = [None]
    dist.all_gather_object(gathered, {"loss": 1.0})


@failure("H926", author="E")
def sharded_optimizer_before_init() -> None:
    import torch
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), optimizer_class=torch.optim.Adam, lr=0.1)


@failure("H926", author="E")
def group_destroyed_twice() -> None:
    import torch.distributed as dist

    _alone()
    dist.destroy_process_group()
    dist.destroy_process_group()
    dist.get_backend()


@failure("H1121", author="E")
def nothing_in_the_environment() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


@failure("H1121", author="E")
def address_missing() -> None:
    import os

    import torch.distributed as dist

    os.environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method="env://")


@failure("H1121", author="E")
def port_missing() -> None:
    import os

    import torch.distributed as dist

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", rank=0, world_size=1)


@failure("H1121", author="E")
def port_number_too_large() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:295000", rank=0, world_size=1)


@failure("H1121", author="E")
def scheme_misspelt() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="http://127.0.0.1:29500", rank=0, world_size=1)


@failure("H1146", author="E")
def local_rank_read_without_torchrun() -> None:
    import os

    import torch

    local_rank = int(os.environ["LOCAL_RANK"])
    print(torch.device("cuda", local_rank))


@failure("H1146", author="E")
def world_size_read_in_a_settings_class() -> None:
    import os
    from dataclasses import dataclass, field

    @dataclass
    class Settings:
        world_size: int = field(default_factory=lambda: int(os.environ["WORLD_SIZE"]))

    Settings()


@failure("H1146", author="E")
def rank_read_by_a_logger() -> None:
    import logging
    import os

    class RankFilter(logging.Filter):
        def filter(self, _record: logging.LogRecord) -> bool:
            return int(os.environ["RANK"]) == 0

    logger = logging.getLogger("train")
    logger.addFilter(RankFilter())
    logger.warning("started")


@failure("H927", author="E")
def port_taken_by_another_run() -> None:
    import socket

    import torch.distributed as dist

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


@failure("H927", author="E")
def store_on_a_taken_port() -> None:
    import torch.distributed as dist

    first = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.TCPStore("127.0.0.1", first.port, 1, is_master=True)


@failure("H927", author="E")
def torchrun_on_a_taken_port() -> None:
    import socket
    from pathlib import Path

    from torch.distributed.run import main

    Path("train.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        main(["--nproc-per-node=1", "--master-port", str(other.getsockname()[1]), "train.py"])


@failure("H927", author="E")
def old_store_without_libuv() -> None:
    import socket

    import torch.distributed as dist

    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        dist.TCPStore("127.0.0.1", other.getsockname()[1], 1, is_master=True, use_libuv=False)


@failure("H1130", author="E")
def group_made_twice() -> None:
    import torch.distributed as dist

    _alone()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@failure("H1130", author="E")
def setup_called_by_library_and_script() -> None:
    import torch.distributed as dist

    class Trainer:
        def __init__(self) -> None:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    Trainer()
    Trainer()


@failure("H1131", author="E")
def nccl_on_a_cpu_build() -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


@failure("H1131", author="E")
def mpi_not_built_in() -> None:
    import torch.distributed as dist

    dist.init_process_group("mpi")


@failure("H1131", author="E")
def backend_misspelt() -> None:
    import torch.distributed as dist

    dist.init_process_group("glo", store=dist.HashStore(), rank=0, world_size=1)


@failure("H1131", author="E")
def nccl_for_a_second_group() -> None:
    import torch.distributed as dist

    _alone()
    dist.new_group([0], backend="nccl")


@failure("H1129", author="E")
def broadcast_from_a_rank_of_a_larger_machine() -> None:
    import torch
    import torch.distributed as dist

    _alone()
    dist.broadcast(torch.zeros(2), src=3)


@failure("H1129", author="E")
def group_with_a_rank_too_many() -> None:
    import torch.distributed as dist

    _alone()
    dist.new_group([0, 1])


@failure("H1216", author="E")
def sampler_counted_from_one() -> None:
    from torch.utils.data.distributed import DistributedSampler

    for rank in (1, 2):
        DistributedSampler(range(10), num_replicas=2, rank=rank)


@failure("H1129", author="E")
def reduce_to_the_last_rank() -> None:
    import torch
    import torch.distributed as dist

    _alone()
    dist.reduce(torch.zeros(2), dst=7)


@failure("H1129", author="E")
def message_to_oneself() -> None:
    import torch
    import torch.distributed as dist

    _alone()
    dist.send(torch.zeros(2), dst=0)


@failure("H1129", author="E")
def group_with_a_rank_twice() -> None:
    import torch.distributed as dist

    def train(_rank: int) -> None:
        dist.new_group([1, 1])

    _ranks(train)


@failure("H1129", author="E")
def broadcast_within_a_group_by_a_foreign_rank() -> None:
    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        odd = dist.new_group([1])
        if rank == 1:
            dist.broadcast(torch.zeros(1), src=0, group=odd)

    _ranks(train)


@failure("H1132", author="E")
def number_instead_of_a_tensor() -> None:
    import torch.distributed as dist

    _alone()
    dist.all_reduce(0.25)


@failure("H1132", author="E")
def gather_without_a_list() -> None:
    import torch
    import torch.distributed as dist

    _alone()
    dist.gather(torch.zeros(2))


@failure("H1132", author="E")
def scatter_list_of_the_wrong_length() -> None:
    import torch
    import torch.distributed as dist

    _alone()
    dist.scatter(torch.zeros(2), [torch.zeros(2), torch.zeros(2)], src=0)


@failure("H1132", author="E")
def gathered_types_differ() -> None:
    import torch
    import torch.distributed as dist

    _alone()
    dist.all_gather([torch.zeros(2, dtype=torch.float64)], torch.zeros(2))


@failure("H1132", author="E")
def bits_of_floats() -> None:
    import torch
    import torch.distributed as dist

    _alone()
    dist.all_reduce(torch.zeros(2), op=dist.ReduceOp.BAND)


@failure("H1132", author="E")
def outputs_of_a_gather_too_few() -> None:
    import torch
    import torch.distributed as dist

    def train(_rank: int) -> None:
        dist.all_gather([torch.zeros(2)], torch.zeros(2))

    _ranks(train)


@failure("H1132", author="E")
def objects_scattered_without_a_source() -> None:
    import torch.distributed as dist

    _alone()
    dist.scatter_object_list([None], None, src=0)


@failure("H1132", author="E")
def split_that_does_not_divide() -> None:
    import torch
    import torch.distributed as dist

    def train(_rank: int) -> None:
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3), input_split_sizes=[1, 1])

    _ranks(train)


def _two_heads() -> object:
    """Return a network of which one head may stay unused."""
    import torch
    from torch import nn

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 8)
            self.first = nn.Linear(8, 2)
            self.second = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, *, both: bool = True) -> tuple[torch.Tensor, ...]:
            h = self.body(x).relu()
            return (self.first(h), self.second(h)) if both else (self.first(h),)

    return TwoHeads()


def _steps(model: Callable[..., object], loss_of: Callable[[object], object], **arguments: object) -> None:
    """Make three steps."""
    import torch

    for _ in range(3):
        loss_of(model(torch.randn(8, 4), **arguments)).backward()


@failure("H925", author="E")
def head_of_another_task() -> None:
    from torch.nn.parallel import DistributedDataParallel

    _alone()
    _steps(DistributedDataParallel(_two_heads()), lambda heads: heads[0].sum(), both=False)


@failure("H925", author="E")
def output_left_out_of_the_loss() -> None:
    from torch.nn.parallel import DistributedDataParallel

    _alone()
    _steps(DistributedDataParallel(_two_heads()), lambda heads: heads[0].mean())


@failure("H925", author="E")
def layer_that_forward_skips() -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            kept = [layer for i, layer in enumerate(self.layers) if (i + self.step) % 3]
            for layer in kept:
                x = x + layer(x)
            return x

    _alone()
    _steps(DistributedDataParallel(Residual()), lambda x: x.pow(2).mean())


@failure("H925", author="E")
def gan_with_one_wrapper() -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Linear(4, 4)
            self.critic = nn.Linear(4, 1)

        def forward(self, z: torch.Tensor, *, train_critic: bool) -> torch.Tensor:
            fake = self.generator(z)
            return self.critic(fake.detach() if train_critic else fake)

    _alone()
    _steps(DistributedDataParallel(Gan()), lambda score: score.mean(), train_critic=True)


@failure("H925", author="E")
def detail_mode_names_the_parameters() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    _alone(TORCH_DISTRIBUTED_DEBUG="DETAIL")
    dist.set_debug_level_from_env()
    _steps(DistributedDataParallel(_two_heads()), lambda heads: heads[1].mean(), both=True)


@failure("H925", author="E")
def unused_head_on_two_ranks() -> None:
    from torch.nn.parallel import DistributedDataParallel

    def train(_rank: int) -> None:
        _steps(DistributedDataParallel(_two_heads()), lambda heads: heads[0].sum(), both=False)

    _ranks(train, seconds=20)


@failure("H925", author="E")
def pooler_of_a_language_model() -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(20, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
            self.pooler = nn.Linear(8, 8)
            self.head = nn.Linear(8, 20)

        def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.layer(self.tokens(ids))
            return {"logits": self.head(h), "pooled": self.pooler(h[:, 0]).tanh()}

    _alone()
    model = DistributedDataParallel(Encoder())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        ids = torch.randint(0, 20, (4, 6))
        nn.functional.cross_entropy(model(ids)["logits"].transpose(1, 2), ids).backward()
        optimizer.step()
        optimizer.zero_grad()


@failure("H1127", author="E")
def head_called_outside_forward() -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    _alone()
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    for _ in range(3):
        model.module.head(model(torch.randn(8, 4))).sum().backward()


@failure("H1127", author="E")
def head_that_joins_later_under_a_static_graph() -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    _alone()
    model = DistributedDataParallel(_two_heads(), static_graph=True)
    for step in range(4):
        sum(head.sum() for head in model(torch.randn(8, 4), both=step > 1)).backward()


@failure("H1127", author="E")
def search_for_unused_with_a_reentrant_checkpoint() -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, self.stem(x), use_reentrant=True)

    _alone()
    _steps(DistributedDataParallel(Net(), find_unused_parameters=True), lambda x: x.sum())


@failure("H1128", author="E")
def frozen_backbone_wrapped() -> None:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    _alone()
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).requires_grad_(False)
    DistributedDataParallel(backbone)


@failure("H1128", author="E")
def loss_module_wrapped() -> None:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    _alone()
    DistributedDataParallel(nn.CrossEntropyLoss())


@failure("H1169", author="E")
def device_ids_on_a_cpu() -> None:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    _alone()
    DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])


@failure("H1169", author="E")
def all_gpus_as_device_ids() -> None:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    _alone()
    DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1], output_device=0)


@failure("H1122", author="E")
def only_one_of_two_came() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=2, timeout=timedelta(seconds=2)
    )


@failure("H1122", author="E")
def nobody_listens_at_the_address() -> None:
    import os
    import socket
    from datetime import timedelta

    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="1", WORLD_SIZE="2")
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))


@failure("H1122", author="E")
def key_that_nobody_sets() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=2))
    store.get("address of the parameter server")


@failure("H1122", author="E")
def store_that_waits_for_workers() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    dist.TCPStore("127.0.0.1", 0, world_size=4, is_master=True, timeout=timedelta(seconds=2))


@failure("H1122", author="E")
def file_rendezvous_without_the_other() -> None:
    from datetime import timedelta
    from pathlib import Path

    import torch.distributed as dist

    where = f"file://{Path.cwd()}/shared"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=2, timeout=timedelta(seconds=2))


@failure("H1122", author="E")
def second_node_that_does_not_start() -> None:
    from pathlib import Path

    from torch.distributed.run import main

    Path("train.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    main([
        "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=a",
        "--rdzv-conf=join_timeout=3,timeout=3", "train.py",
    ])  # fmt: skip


@failure("H1135", author="E", also=("H1122",))
def address_that_does_not_resolve() -> None:
    import os
    from datetime import timedelta

    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="node-7.invalid", MASTER_PORT="29500", RANK="1", WORLD_SIZE="2")
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))


@failure("H1135", author="E", also=("H1122",))
def store_at_a_name_of_another_network() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    dist.TCPStore("trainer-0.headless.invalid", 29400, 2, is_master=False, timeout=timedelta(seconds=3))


@failure("H1136", author="E")
def interface_that_is_not_there() -> None:
    _alone(GLOO_SOCKET_IFNAME="ib7")


@failure("H1136", author="E")
def interface_of_the_other_node() -> None:
    _torchrun(
        "import os\n"
        "import torch, torch.distributed as dist\n"
        "os.environ['GLOO_SOCKET_IFNAME'] = 'eth9'\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )


@failure("H1142", author="E")
def mesh_larger_than_the_world() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    _alone()
    init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "tensor"))


@failure("H1142", author="E")
def mesh_of_listed_ranks() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    _alone()
    DeviceMesh("cpu", [0, 1, 2, 3])


@failure("H1143", author="E")
def mask_added_to_a_distributed_tensor() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    _alone()
    weight = distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    torch.ones(4, 4) + weight


@failure("H1143", author="E")
def plain_input_to_a_parallel_layer() -> None:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    _alone()
    layer = nn.Linear(4, 4)
    distribute_module(layer, init_device_mesh("cpu", (1,)))
    layer(torch.randn(2, 4))


@failure("H921", author="E")
def rank_that_comes_too_late() -> None:
    import time

    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        if rank == 1:
            time.sleep(8)
        dist.all_reduce(torch.ones(4))

    _ranks(train)


@failure("H921", author="E")
def evaluation_on_the_first_rank_only() -> None:
    import time

    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        if rank == 0:
            scores = [torch.zeros(1) for _ in range(2)]
            dist.all_gather(scores, torch.ones(1))
        else:
            time.sleep(8)

    _ranks(train)


@failure("H921", author="E")
def barrier_while_the_other_saves() -> None:
    import time

    import torch.distributed as dist

    def train(rank: int) -> None:
        if rank == 0:
            time.sleep(8)
        dist.barrier()

    _ranks(train)


@failure("H921", author="E")
def monitored_barrier_names_the_rank() -> None:
    import time
    from datetime import timedelta

    import torch.distributed as dist

    def train(rank: int) -> None:
        if rank == 1:
            time.sleep(8)
        dist.monitored_barrier(timeout=timedelta(seconds=2))

    _ranks(train)


@failure("H921", author="E")
def message_that_nobody_sends() -> None:
    import time

    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        if rank == 0:
            dist.recv(torch.zeros(3), src=1)
        time.sleep(8)

    _ranks(train)


@failure("H921", author="E")
def uneven_batches_under_ddp() -> None:
    import time

    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def train(rank: int) -> None:
        model = DistributedDataParallel(nn.Linear(4, 1))
        for _ in range(3 + 2 * rank):
            model(torch.randn(2, 4)).sum().backward()
        time.sleep(8)

    _ranks(train)


@failure("H921", author="E")
def checkpoint_written_inside_a_broadcast() -> None:
    import time

    import torch.distributed as dist

    def train(rank: int) -> None:
        if rank == 0:
            time.sleep(8)
        dist.broadcast_object_list([None], src=0)

    _ranks(train)


@failure("H922", author="E")
def rank_that_leaves_without_a_word() -> None:
    _torchrun(
        "import os, time\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 1:\n"
        "    os._exit(0)\n"
        "time.sleep(0.5)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )


@failure("H922", author="E")
def rank_that_returns_early() -> None:
    import os

    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            os._exit(0)
        for _ in range(1000):
            dist.all_reduce(torch.ones(1000))

    _ranks(train)


@failure("H922", author="E")
def store_of_a_rank_that_ended() -> None:
    import os
    import socket
    import time
    from datetime import timedelta

    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if not (child := os.fork()):
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=timedelta(seconds=20))
        time.sleep(1)
        os._exit(0)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=20))
    os.waitpid(child, 0)
    store.get("result of rank 0")


@failure("H1125", author="E")
def last_batch_of_another_size() -> None:
    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        dist.all_reduce(torch.ones(1000 if rank else 600))

    _ranks(train)


@failure("H1125", author="E")
def predictions_of_different_length_gathered() -> None:
    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        scores = torch.ones(5 + 3 * rank)
        dist.all_gather([torch.empty_like(scores) for _ in range(2)], scores)

    _ranks(train)


@failure("H1125", author="E")
def broadcast_into_a_smaller_tensor() -> None:
    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        dist.broadcast(torch.zeros(10 if rank == 0 else 4), src=0)

    _ranks(train)


@failure("H1125", author="E")
def message_longer_than_its_buffer() -> None:
    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        if rank == 0:
            dist.send(torch.zeros(100), dst=1)
        else:
            dist.recv(torch.zeros(50), src=0)
        dist.barrier()

    _ranks(train)


def _detail() -> None:
    import os

    import torch.distributed as dist

    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()


@failure("H928", author="E")
def metrics_only_on_the_first_rank() -> None:
    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        if rank == 0:
            dist.reduce(torch.ones(1), dst=0)
        else:
            dist.all_reduce(torch.ones(1))

    _detail()
    _ranks(train)


@failure("H928", author="E")
def shapes_that_differ_in_detail_mode() -> None:
    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        dist.all_reduce(torch.ones(3 + rank))

    _detail()
    _ranks(train)


@failure("H928", author="E")
def types_that_differ_in_detail_mode() -> None:
    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        dist.broadcast(torch.ones(4, dtype=torch.float64 if rank else torch.float32), src=0)

    _detail()
    _ranks(train)


@failure("H928", author="E")
def barrier_against_a_reduction() -> None:
    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        for step in range(3):
            if step == 1 and rank == 1:
                dist.barrier()
            dist.all_reduce(torch.ones(2))

    _detail()
    _ranks(train)


@failure("H1126", author="E")
def vocabulary_of_the_own_part_of_the_data() -> None:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def train(rank: int) -> None:
        DistributedDataParallel(nn.Embedding(100 + 10 * rank, 8))

    _ranks(train)


@failure("H1126", author="E")
def extra_head_on_one_rank() -> None:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def train(rank: int) -> None:
        DistributedDataParallel(nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + rank)]))

    _ranks(train)


@failure("H1126", author="E")
def classes_counted_by_each_rank_under_torchrun() -> None:
    _torchrun(
        "import torch.distributed as dist\n"
        "from torch import nn\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo')\n"
        "labels = [0, 1, 2] if dist.get_rank() == 0 else [0, 1, 2, 3, 4]\n"
        "DistributedDataParallel(nn.Linear(8, len(set(labels))))\n"
    )


@failure("H1137", author="E")
def process_that_calls_exit() -> None:
    import os

    import torch.multiprocessing as mp

    def train(rank: int) -> None:
        if rank == 1:
            os._exit(7)

    mp.start_processes(train, nprocs=2, start_method="fork")


@failure("H1137", author="E")
def process_that_is_killed() -> None:
    import os
    import signal

    import torch.multiprocessing as mp

    def train(rank: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    mp.start_processes(train, nprocs=2, start_method="fork")


@failure("H1120", author="E")
def rank_with_an_exit_code_under_torchrun() -> None:
    _torchrun("import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit(3)\n")


@failure("H1120", author="E")
def rank_that_exits_in_the_middle() -> None:
    _torchrun(
        "import os, time\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for step in range(100):\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    if step == 5 and dist.get_rank() == 0:\n"
        "        os._exit(17)\n"
        "    if step == 5:\n"
        "        time.sleep(60)\n"
    )


@failure("H1147", author="E")
def launcher_terminated_by_the_scheduler() -> None:
    _torchrun(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )


@failure("H1147", author="E")
def terminal_closed_under_torchrun() -> None:
    _torchrun(
        "import os, signal, time\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for step in range(1000):\n"
        "    dist.all_reduce(torch.ones(10))\n"
        "    if step == 20 and dist.get_rank() == 1:\n"
        "        os.kill(os.getppid(), signal.SIGHUP)\n"
        "    time.sleep(0.05)\n"
    )


_TRAIN = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(100):
    if step == 3 and rank == {rank}:
        {fault}
    dist.all_reduce(torch.ones(10))
"""


@failure("H906", author="E", limit_bytes=1500 * MIB)
def first_rank_out_of_memory_the_other_waits() -> None:
    _torchrun(_TRAIN.format(rank=0, fault="torch.zeros(1 << 30)"))


@failure("H907", author="E", limit_bytes=1500 * MIB)
def second_rank_out_of_memory_in_numpy() -> None:
    _torchrun(_TRAIN.format(rank=1, fault="__import__('numpy').ones(1 << 30)"))


@failure("H917", author="E")
def one_rank_moves_to_cuda() -> None:
    _torchrun(_TRAIN.format(rank=1, fault="torch.ones(2).cuda()"))


@failure("H919", author="E")
def one_rank_mixes_devices() -> None:
    _torchrun(_TRAIN.format(rank=0, fault="torch.ones(2, 2) + torch.ones(2, 2, device='meta')"))


@failure("H925", author="E")
def unused_parameters_under_torchrun() -> None:
    _torchrun(
        "import torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return self.used(x)\n"
        "dist.init_process_group('gloo')\n"
        "model = DistributedDataParallel(Net())\n"
        "for _ in range(3):\n"
        "    model(torch.randn(2, 4)).sum().backward()\n"
    )


@failure("H1104", author="E")
def rank_with_an_absurd_size() -> None:
    import torch
    import torch.distributed as dist

    def train(rank: int) -> None:
        size = torch.zeros(*(2**40, 2**40) if rank else (1, 1))
        dist.all_reduce(size)

    _ranks(train)

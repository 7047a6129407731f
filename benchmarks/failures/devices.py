"""Failures of devices that a machine without a GPU really has: no CUDA, wrong names, mixed devices, old checkpoints.

Devices are mixed as `meta` and `cpu`, which torch checks by the same code as a GPU and the CPU.
"""

from __future__ import annotations

from benchmarks.failures import failure


@failure("H917", author="E")
def model_moved_by_cuda() -> None:
    from torch import nn

    nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()


@failure("H917", author="E")
def batch_moved_in_the_loop() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    for x, y in DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8)), batch_size=4):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)


@failure("H917", author="E")
def module_to_a_device_string() -> None:
    import torch
    from torch import nn

    device = torch.device("cuda:0")
    nn.LSTM(4, 8).to(device)


@failure("H917", author="E")
def tensor_made_on_cuda() -> None:
    import torch

    torch.zeros(4, device="cuda")


@failure("H917", author="E")
def mask_made_in_forward() -> None:
    import torch
    from torch import nn

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.ones(x.shape[0], 1, device="cuda")

    Net()(torch.randn(2, 3))


@failure("H917", author="E")
def device_chosen_by_local_rank() -> None:
    import os

    import torch

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


@failure("H917", author="E")
def name_of_the_gpu_for_the_log() -> None:
    import torch

    print("training on", torch.cuda.get_device_name(0))


@failure("H917", author="E")
def current_device() -> None:
    import torch

    print(torch.cuda.current_device())


@failure("H917", author="E")
def timing_with_synchronize() -> None:
    import time

    import torch

    started = time.monotonic()
    torch.randn(64, 64) @ torch.randn(64, 64)
    torch.cuda.synchronize()
    print(time.monotonic() - started)


@failure("H917", author="E")
def timing_with_events() -> None:
    import torch

    start = torch.cuda.Event(enable_timing=True)
    start.record()


@failure("H917", author="E")
def side_stream() -> None:
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        torch.zeros(3)


@failure("H917", author="E")
def captured_graph() -> None:
    import torch

    graph = torch.cuda.CUDAGraph()
    graph.replay()


@failure("H917", author="E")
def free_memory_for_the_batch_size() -> None:
    import torch

    free, total = torch.cuda.mem_get_info()
    print(free / total)


@failure("H917", author="E")
def properties_of_the_gpu() -> None:
    import torch

    print(torch.cuda.get_device_properties(0).total_memory)


@failure("H917", author="E")
def block_on_a_device() -> None:
    import torch

    with torch.cuda.device(0):
        torch.zeros(2).cuda()


@failure("H917", author="E")
def sample_moved_in_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.randn(3, 8, 8).to("cuda")

    for _batch in DataLoader(Images(), num_workers=1):
        pass


@failure("H917", author="E")
def collate_that_moves() -> None:
    import torch
    from torch.utils.data import DataLoader

    def collate(samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples).cuda()

    next(iter(DataLoader(range(8), batch_size=4, collate_fn=collate)))


@failure("H917", author="E")
def default_device_for_everything() -> None:
    import torch
    from torch import nn

    torch.set_default_device("cuda")
    nn.Linear(4, 2)


@failure("H917", author="E")
def default_tensor_type() -> None:
    import torch

    torch.set_default_tensor_type("torch.cuda.FloatTensor")


@failure("H917", author="E")
def old_style_constructor() -> None:
    import torch

    torch.cuda.FloatTensor(3, 4).fill_(0)


@failure("H917", author="E")
def generator_for_the_gpu() -> None:
    import torch

    torch.Generator(device="cuda").manual_seed(0)


@failure("H917", author="E")
def class_weights_of_a_loss() -> None:
    import torch
    from torch import nn

    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]).cuda())


@failure("H917", author="E")
def embedding_with_a_device_argument() -> None:
    from torch import nn

    nn.Embedding(10, 4, device="cuda:1")


@failure("H917", author="E")
def state_of_the_generators_saved() -> None:
    import random

    import torch

    torch.save({"python": random.getstate(), "cuda": torch.cuda.get_rng_state()}, "random.pt")


@failure("H917", author="E")
def optimizer_state_moved_after_loading() -> None:
    import torch
    from torch import nn

    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(1, 2)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.cuda()


@failure("H1168", author="E")
def gloo_rank_on_a_gpu() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    DistributedDataParallel(nn.Linear(2, 2).cuda(rank), device_ids=[rank])
    torch.zeros(1)


@failure("H917", author="E")
def fraction_of_the_memory() -> None:
    import torch

    torch.cuda.set_per_process_memory_fraction(0.5, 0)


@failure("H917", author="E")
def capability_for_the_precision() -> None:
    import torch

    precision = "bf16" if torch.cuda.get_device_capability()[0] >= 8 else "fp16"
    print(precision)


def _save_as_from(location: str, value: object, file: str, *, legacy: bool = False) -> None:
    """Save a file in which every tensor is tagged as lying on that device, as that machine writes it."""
    import torch

    torch.serialization.register_package(0, lambda _: location, lambda _, __: None)
    torch.save(value, file, _use_new_zipfile_serialization=not legacy)


@failure("H920", author="E")
def checkpoint_of_a_gpu_machine() -> None:
    import torch
    from torch import nn

    _save_as_from("cuda:0", nn.Linear(3, 2).state_dict(), "best.pt")
    nn.Linear(3, 2).load_state_dict(torch.load("best.pt"))


@failure("H920", author="E")
def checkpoint_of_the_second_gpu() -> None:
    import torch

    _save_as_from("cuda:1", {"step": 100, "ema": torch.zeros(4)}, "ema.pt")
    torch.load("ema.pt", weights_only=False)


@failure("H920", author="E")
def legacy_file_of_a_gpu_machine() -> None:
    import torch

    _save_as_from("cuda:0", [torch.ones(2)], "old.pth", legacy=True)
    torch.load("old.pth")


@failure("H920", author="E")
def whole_model_of_a_gpu_machine() -> None:
    import torch
    from torch import nn

    _save_as_from("cuda:0", nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "model.pkl")
    torch.load("model.pkl", weights_only=False).eval()


@failure("H920", author="E")
def optimizer_file_mapped_to_cuda() -> None:
    import torch
    from torch import nn

    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), "optimizer.pt")
    optimizer.load_state_dict(torch.load("optimizer.pt", map_location="cuda"))


@failure("H920", author="E")
def map_that_names_another_gpu() -> None:
    import torch

    _save_as_from("cuda:0", {"weights": torch.zeros(3)}, "rank0.pt")
    torch.load("rank0.pt", map_location={"cuda:0": "cuda:1"})


@failure("H920", author="E")
def mapped_file_of_a_gpu_machine() -> None:
    import torch

    _save_as_from("cuda:0", {"table": torch.zeros(1000)}, "table.pt")
    torch.load("table.pt", mmap=True)


@failure("H920", author="E")
def checkpoint_of_an_unknown_back_end() -> None:
    import torch

    _save_as_from("npu:0", torch.zeros(3), "npu.pt")
    torch.load("npu.pt")


@failure("H920", author="E")
def checkpoint_of_an_intel_gpu() -> None:
    import torch

    _save_as_from("xpu:0", {"a": torch.zeros(3)}, "xpu.pt")
    torch.load("xpu.pt")


@failure("H919", author="E")
def input_on_another_device_than_the_linear() -> None:
    import torch
    from torch import nn

    nn.Linear(4, 2, device="meta")(torch.randn(3, 4))


@failure("H919", author="E")
def positions_made_on_the_default_device() -> None:
    import torch
    from torch import nn

    class Encoder(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(x.shape[1])

    Encoder()(torch.zeros(2, 5, device="meta"))


@failure("H919", author="E")
def labels_left_behind() -> None:
    import torch
    from torch.nn import functional

    functional.cross_entropy(torch.randn(4, 3, device="meta"), torch.tensor([0, 1, 2, 0]))


@failure("H919", author="E")
def targets_of_a_regression_left_behind() -> None:
    import torch
    from torch import nn

    nn.MSELoss()(torch.randn(4, device="meta"), torch.randn(4))


@failure("H919", author="E")
def batch_norm_on_another_device() -> None:
    import torch
    from torch import nn

    nn.BatchNorm1d(4, device="meta")(torch.randn(8, 4))


@failure("H919", author="E")
def attention_mask_on_another_device() -> None:
    import torch
    from torch.nn import functional

    q = torch.randn(1, 2, 4, 8, device="meta")
    functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool))


@failure("H919", author="E")
def parts_concatenated_across_devices() -> None:
    import torch

    torch.cat([torch.zeros(2, 3), torch.zeros(2, 3, device="meta")])


@failure("H919", author="E")
def where_with_a_mask_elsewhere() -> None:
    import torch

    torch.where(torch.ones(4, dtype=torch.bool), torch.zeros(4, device="meta"), torch.zeros(4))


@failure("H919", author="E")
def modules_in_a_python_list() -> None:
    import torch
    from torch import nn

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.rest = [nn.Linear(4, 4) for _ in range(2)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.rest:
                x = block(x)
            return x

    model = Blocks().to("meta")
    model(torch.randn(2, 4, device="meta"))


@failure("H919", author="E")
def constant_that_is_no_buffer() -> None:
    import torch
    from torch import nn

    class Normalize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.tensor([0.5, 0.5, 0.5])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sub(self.mean.view(1, 3, 1, 1)) @ torch.eye(4)

    Normalize().to("meta")(torch.zeros(1, 3, 4, 4, device="meta"))


@failure("H919", author="E")
def layer_norm_on_another_device() -> None:
    import torch
    from torch import nn

    nn.LayerNorm(6)(torch.randn(2, 6, device="meta"))


@failure("H919", author="E")
def hidden_state_on_another_device() -> None:
    import torch
    from torch import nn

    cell = nn.GRUCell(4, 8)
    cell(torch.randn(2, 4), torch.zeros(2, 8, device="meta"))


@failure("H1161", author="E")
def apple_gpu_on_linux() -> None:
    import torch

    torch.zeros(3).to("mps")


@failure("H1161", author="E")
def model_for_an_apple_gpu() -> None:
    from torch import nn

    nn.Linear(3, 3, device="mps")


@failure("H1161", author="E")
def intel_gpu_in_a_cpu_build() -> None:
    import torch

    torch.ones(2, device="xpu")


@failure("H1161", author="E")
def generator_for_an_apple_gpu() -> None:
    import torch

    torch.Generator(device="mps")


@failure("H1162", author="E")
def device_called_gpu() -> None:
    import torch

    torch.zeros(3).to("gpu")


@failure("H1162", author="E")
def device_without_a_colon() -> None:
    import torch

    torch.device("cuda0")


@failure("H1162", author="E")
def device_in_capitals_from_a_configuration() -> None:
    import json

    from torch import nn

    settings = json.loads('{"device": "CUDA"}')
    nn.Linear(2, 2).to(settings["device"])


@failure("H1162", author="E")
def device_list_as_one_string() -> None:
    import torch

    torch.zeros(3, device="cuda:0,1")


@failure("H1162", author="E")
def empty_device_option() -> None:
    import torch

    device = ""
    torch.randn(3).to(device)


@failure("H920", author="E")
def map_location_misspelt() -> None:
    import torch

    torch.save(torch.zeros(2), "a.pt")
    torch.load("a.pt", map_location="cpu ")


@failure("H1163", author="E")
def meta_model_moved_to_the_cpu() -> None:
    import torch
    from torch import nn

    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model.to("cpu")


@failure("H1163", author="E")
def loss_of_a_meta_model() -> None:
    import torch
    from torch import nn

    model = nn.Linear(4, 1, device="meta")
    loss = model(torch.randn(2, 4, device="meta")).mean()
    print(loss.item())


@failure("H1163", author="E")
def weights_of_a_meta_model_printed() -> None:
    from torch import nn

    print(nn.Linear(2, 2, device="meta").weight.tolist())


@failure("H1163", author="E")
def condition_on_a_meta_tensor() -> None:
    import torch

    mask = torch.zeros(3, device="meta")
    if mask.any():
        print("masked")


@failure("H1163", author="E")
def meta_tensor_copied_by_cpu() -> None:
    import torch

    torch.zeros(3, device="meta").cpu()


@failure("H1163", author="E")
def meta_buffer_in_a_float_model() -> None:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("scale", torch.ones(2, device="meta"))

    Net().to(torch.device("cpu"), torch.float64)


@failure("H1168", author="E")
def gpu_by_its_number() -> None:
    import torch
    from torch import nn

    model = nn.Linear(2, 2)
    model.to(0)
    model(torch.zeros(1, 2, device=0))


@failure("H1168", author="E")
def batch_moved_by_the_local_rank() -> None:
    import os

    import torch

    torch.ones(4).cuda(int(os.environ.get("LOCAL_RANK", "0")), non_blocking=True)


@failure("H1168", author="E")
def pinned_buffer() -> None:
    import torch

    torch.zeros(1024).pin_memory()


@failure("H1168", author="E")
def pinned_by_argument() -> None:
    import torch

    torch.empty(64, 3, pin_memory=True)


@failure("H1168", author="E")
def pinned_in_a_collate_function() -> None:
    import torch
    from torch.utils.data import DataLoader

    class Batch:
        def __init__(self, samples: list[int]) -> None:
            self.x = torch.tensor(samples).pin_memory()

    next(iter(DataLoader(range(4), batch_size=2, collate_fn=Batch)))


@failure("H919", author="E")
def residual_of_two_devices() -> None:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.full((4,), 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x * self.scale

    Block().to("meta")(torch.zeros(2, 4, device="meta"))


@failure("H919", author="E")
def reconstructions_compared_across_devices() -> None:
    import torch
    from torch.nn import functional

    functional.l1_loss(torch.zeros(3, 4), torch.zeros(3, 4, device="meta"))


@failure("H919", author="E")
def parts_stacked_across_devices() -> None:
    import torch

    torch.stack([torch.zeros(3), torch.zeros(3, device="meta"), torch.zeros(3)])


@failure("H1170", author="E")
def flash_attention_with_a_mask() -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q = torch.randn(1, 2, 4, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool), dropout_p=0.1)


@failure("H1170", author="E")
def memory_efficient_attention_only() -> None:
    import torch
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return nn.functional.scaled_dot_product_attention(q, k, v)

    Attention()(torch.randn(2, 5, 16))

"""Failures for want of host memory, under a limit of data: torch, numpy, Python, native code, threads and maps.

Most take what a real program of that kind would take, and the limit stands for a small machine. A fault of the GPU
cannot be made here.
"""

# ruff: noqa: PERF401 - loops that append, as people write them

from __future__ import annotations

from benchmarks.failures import failure

MIB = 2**20
SMALL = 1200 * MIB  # about 300 MiB of it are the interpreter and torch


def _leave_addresses(size: int) -> None:
    """Limit the address space of this process to what it has and so many bytes more."""
    import resource
    from pathlib import Path

    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@failure("H906", author="E")
def images_of_the_whole_set_in_one_tensor() -> None:
    import torch

    torch.zeros(200_000, 3, 224, 224)


@failure("H906", author="E")
def linear_after_flatten_of_large_images() -> None:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 64, 3, padding=1)
            self.head = nn.Linear(64 * 512 * 512, 1000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x).flatten(1))

    Net()


@failure("H906", author="E", limit_bytes=SMALL)
def embedding_of_a_hashed_vocabulary() -> None:
    from torch import nn

    nn.Embedding(50_000_000, 128)


@failure("H906", author="E", limit_bytes=SMALL)
def activations_of_a_deep_network() -> None:
    import torch
    from torch import nn

    layers = [layer for _ in range(40) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*layers)
    model(torch.randn(20_000, 1024)).sum().backward()


@failure("H906", author="E", limit_bytes=SMALL)
def losses_kept_with_their_graphs() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(400):
        x = torch.randn(2048, 512)
        loss = (model(x) - x).pow(2).mean()
        losses.append(loss)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()


@failure("H906", author="E", limit_bytes=SMALL)
def gradient_of_a_large_layer() -> None:
    import torch
    from torch import nn

    head = nn.Linear(1024, 150_000)
    loss = head(torch.randn(2, 1024)).sum()
    loss.backward()


@failure("H906", author="E", limit_bytes=SMALL)
def state_of_adam_at_the_first_step() -> None:
    import torch
    from torch import nn

    model = nn.Linear(8192, 9000)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8192)).mean().backward()
    optimizer.step()


@failure("H906", author="E", limit_bytes=SMALL)
def momentum_of_sgd() -> None:
    import torch
    from torch import nn

    model = nn.Linear(9000, 12_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 9000)).mean().backward()
        optimizer.step()


@failure("H906", author="E", limit_bytes=SMALL)
def attention_over_a_long_sequence() -> None:
    import torch

    q = torch.randn(1, 8, 16_000, 64)
    scores = q @ q.transpose(-1, -2) / 8
    scores.softmax(-1) @ q


@failure("H906", author="E", limit_bytes=SMALL)
def transformer_layer_on_an_unchunked_document() -> None:
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(256, 8, dropout=0.1, batch_first=True)
    layer.train()
    layer(torch.randn(4, 8000, 256)).sum().backward()


@failure("H906", author="E", limit_bytes=SMALL)
def unfold_of_every_patch() -> None:
    import torch
    from torch.nn import functional

    functional.unfold(torch.randn(8, 3, 512, 512), kernel_size=15)


@failure("H906", author="E", limit_bytes=SMALL)
def distances_between_all_pairs() -> None:
    import torch

    points = torch.randn(40_000, 64)
    torch.cdist(points, points).topk(5, largest=False)


@failure("H906", author="E", limit_bytes=SMALL)
def differences_by_broadcasting() -> None:
    import torch

    a = torch.randn(6000, 1, 32)
    b = torch.randn(1, 6000, 32)
    (a - b).norm(dim=-1)


@failure("H906", author="E", limit_bytes=SMALL)
def outputs_of_validation_concatenated() -> None:
    import torch
    from torch import nn

    model = nn.Linear(64, 5000)
    outputs = []
    with torch.no_grad():
        for _ in range(1000):
            outputs.append(model(torch.randn(256, 64)))
    torch.cat(outputs)


@failure("H906", author="E", limit_bytes=SMALL)
def one_hot_of_many_classes() -> None:
    import torch
    from torch.nn import functional

    labels = torch.randint(0, 100_000, (4096,))
    functional.one_hot(labels, 100_000).float()


@failure("H906", author="E", limit_bytes=SMALL)
def copy_of_the_model_for_ema() -> None:
    import copy

    from torch import nn

    model = nn.Sequential(*[nn.Linear(6000, 6000) for _ in range(4)])
    copy.deepcopy(model)


@failure("H906", author="E", limit_bytes=SMALL)
def checkpoints_kept_in_a_list() -> None:
    import torch
    from torch import nn

    model = nn.Linear(4000, 4000)
    best = []
    for _ in range(30):
        best.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    torch.save(best, "best.pt")


@failure("H906", author="E", limit_bytes=900 * MIB)
def checkpoint_loaded_beside_the_model() -> None:
    import torch
    from torch import nn

    model = nn.Linear(8000, 8000)
    torch.save({"model": model.state_dict()}, "last.pt")
    state = torch.load("last.pt")
    other = torch.load("last.pt")
    model.load_state_dict(state["model"])
    print(len(other))


@failure("H906", author="E", limit_bytes=SMALL)
def sample_in_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Volumes(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(1, 800, 800, 800)

    for _batch in DataLoader(Volumes(), num_workers=1):
        pass


@failure("H906", author="E", limit_bytes=SMALL)
def collate_of_long_recordings() -> None:
    import torch
    from torch.utils.data import DataLoader

    recordings = [torch.zeros(16_000 * 60 * 8) for _ in range(24)]
    for batch in DataLoader(recordings, batch_size=24):
        print(batch.shape)


@failure("H906", author="E", limit_bytes=SMALL)
def padding_to_the_longest() -> None:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    lengths = [200, 350, 120, 9_000_000]
    pad_sequence([torch.zeros(length, 80) for length in lengths[:3]] + [torch.zeros(1, 80).expand(9_000_000, 80)])


@failure("H906", author="E", limit_bytes=SMALL)
def gradients_collected_by_a_hook() -> None:
    import torch
    from torch import nn

    history: list[torch.Tensor] = []
    model = nn.Linear(2048, 2048)
    model.weight.register_hook(lambda grad: history.append(grad.clone()))
    for _ in range(200):
        model(torch.randn(8, 2048)).sum().backward()
        model.zero_grad()


@failure("H906", author="E", limit_bytes=SMALL)
def lstm_over_raw_audio() -> None:
    import torch
    from torch import nn

    lstm = nn.LSTM(32, 256, num_layers=2, batch_first=True)
    output, _ = lstm(torch.randn(64, 16_000, 32))
    output.sum().backward()


@failure("H906", author="E", limit_bytes=SMALL)
def hessian_of_all_weights() -> None:
    import torch

    def loss(weights: torch.Tensor) -> torch.Tensor:
        return (weights.tanh() ** 3).sum()

    torch.func.hessian(loss)(torch.randn(20_000))


@failure("H906", author="E", limit_bytes=SMALL)
def repeat_instead_of_expand() -> None:
    import torch

    mask = torch.ones(1, 4096, 4096)
    mask.repeat(32, 1, 1)


@failure("H906", author="E", limit_bytes=SMALL)
def double_precision_of_a_feature_table() -> None:
    import torch

    features = torch.zeros(200_000, 768)
    features.double()


@failure("H906", author="E", limit_bytes=SMALL)
def cache_of_keys_and_values() -> None:
    import torch

    keys = torch.zeros(16, 16, 1, 64)
    for _ in range(100_000):
        keys = torch.cat([keys, torch.zeros(16, 16, 512, 64)], dim=2)


@failure("H906", author="E", limit_bytes=SMALL)
def averaged_model() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(9000, 9000), nn.Linear(9000, 9000))
    torch.optim.swa_utils.AveragedModel(model)


@failure("H906", author="E", limit_bytes=SMALL)
def batch_size_doubled_until_it_fails() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3, padding=1))
    batch = 1
    while True:
        print("batch size", batch, flush=True)
        model(torch.randn(batch, 3, 128, 128)).mean().backward()
        batch *= 2


@failure("H906", author="E", limit_bytes=SMALL)
def upsampling_of_a_feature_map() -> None:
    import torch
    from torch.nn import functional

    functional.interpolate(torch.randn(4, 64, 128, 128), scale_factor=16, mode="bilinear")


@failure("H906", author="E", limit_bytes=SMALL)
def tensor_from_a_numpy_memory_map() -> None:
    import numpy as np
    import torch

    table = np.memmap("table.bin", dtype=np.float32, mode="w+", shape=(500_000, 1000))
    torch.tensor(table)


@failure("H906", author="E", limit_bytes=SMALL)
def kronecker_product_of_covariances() -> None:
    import torch

    a = torch.eye(200)
    torch.kron(a, a).inverse()


@failure("H906", author="E", limit_bytes=SMALL)
def full_batch_of_lbfgs() -> None:
    import torch
    from torch import nn

    model = nn.Linear(5000, 4000)
    optimizer = torch.optim.LBFGS(
        model.parameters(), history_size=20, max_iter=20, lr=1e-6, tolerance_grad=0, tolerance_change=0
    )
    x = torch.randn(4, 5000)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)


@failure("H906", author="E", limit_bytes=SMALL)
def second_worker_process_by_fork() -> None:
    import torch
    import torch.multiprocessing as mp

    def train(rank: int) -> None:
        weights = torch.zeros(2000 * (1 + 400_000 * rank))
        print(rank, weights.sum())

    mp.start_processes(train, nprocs=2, start_method="fork")


@failure("H907", author="E", limit_bytes=SMALL)
def features_of_a_whole_set_in_numpy() -> None:
    import numpy as np

    np.zeros((1_000_000, 2048), dtype=np.float32)


@failure("H907", author="E", limit_bytes=SMALL)
def images_as_float64() -> None:
    import numpy as np

    images = np.zeros((2000, 224, 224, 3), dtype=np.uint8)
    images.astype(np.float64) / 255


@failure("H907", author="E", limit_bytes=SMALL)
def file_of_features_loaded_at_once() -> None:
    import numpy as np

    np.lib.format.open_memmap("features.npy", mode="w+", dtype=np.float32, shape=(400_000, 1024)).flush()
    np.load("features.npy")


@failure("H907", author="E", limit_bytes=SMALL)
def table_grown_by_concatenation() -> None:
    import numpy as np

    table = np.zeros((0, 512))
    for _ in range(10_000):
        table = np.concatenate([table, np.random.rand(20_000, 512)])


@failure("H907", author="E", limit_bytes=SMALL)
def similarity_of_all_pairs_in_numpy() -> None:
    import numpy as np

    vectors = np.random.rand(20_000, 16)
    np.dot(vectors, vectors.T)


@failure("H907", author="E", limit_bytes=SMALL)
def replay_buffer_made_in_advance() -> None:
    import numpy as np

    class ReplayBuffer:
        def __init__(self, size: int) -> None:
            self.states = np.zeros((size, 4, 84, 84), dtype=np.uint8)
            self.next_states = np.zeros((size, 4, 84, 84), dtype=np.uint8)

    ReplayBuffer(1_000_000)


@failure("H907", author="E", limit_bytes=SMALL)
def recordings_read_in_a_worker() -> None:
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Recordings(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.from_numpy(np.ones((48_000 * 3600, 2)))

    for _batch in DataLoader(Recordings(), num_workers=1):
        pass


@failure("H907", author="E", limit_bytes=SMALL)
def noise_for_every_sample() -> None:
    import numpy as np

    np.random.default_rng(0).standard_normal((60_000, 3072), dtype=np.float64)


@failure("H907", author="E", limit_bytes=500 * MIB)
def corpus_read_into_one_text() -> None:
    from pathlib import Path

    with Path("corpus.txt").open("wb") as file:
        file.truncate(2000 * MIB)
    text = Path("corpus.txt").read_text()
    print(len(text.split()))


@failure("H907", author="E", limit_bytes=500 * MIB)
def list_of_python_numbers() -> None:
    samples: list[float] = []
    for i in range(200_000_000):
        samples.append(i * 0.5)


@failure("H907", author="E", limit_bytes=400 * MIB)
def index_of_all_words() -> None:
    index: dict[str, list[int]] = {}
    for i in range(20_000_000):
        index.setdefault(f"word {i}", []).append(i)


@failure("H907", author="E", limit_bytes=500 * MIB)
def weights_pickled_for_a_message() -> None:
    import pickle

    blocks = [bytes([i]) * (60 * MIB) for i in range(5)]
    pickle.dumps(blocks)


@failure("H907", author="E", limit_bytes=500 * MIB)
def lines_of_a_log_joined() -> None:
    lines = ["step loss gradient " * 50_000] * 600
    "\n".join(lines)


@failure("H907", author="E", limit_bytes=500 * MIB)
def list_multiplied_by_a_size_in_bytes() -> None:
    cache = [None] * (64 * 1024 * MIB)
    cache[0] = None


@failure("H907", author="E", limit_bytes=500 * MIB)
def upload_buffer() -> None:
    import io

    buffer = io.BytesIO()
    for _ in range(100):
        buffer.write(b"\0" * (50 * MIB))


@failure("H907", author="E", limit_bytes=700 * MIB)
def picture_of_a_whole_slide() -> None:
    from PIL import Image

    slide = Image.new("RGB", (40_000, 30_000))
    slide.resize((256, 256))


@failure("H907", author="E", limit_bytes=700 * MIB, needs="scipy")
def dense_form_of_a_sparse_matrix() -> None:
    import scipy.sparse

    scipy.sparse.random(50_000, 50_000, density=1e-5).toarray()


@failure("H907", author="E", limit_bytes=900 * MIB, needs="sklearn")
def kernel_matrix_of_sklearn() -> None:
    import numpy as np
    from sklearn.metrics.pairwise import rbf_kernel

    rbf_kernel(np.random.rand(12_000, 8))


@failure("H907", author="E", limit_bytes=700 * MIB)
def metrics_kept_in_a_queue() -> None:
    from collections import deque

    import numpy as np

    history: deque[object] = deque(maxlen=100_000)
    for _ in range(100_000):
        history.append(np.ones((512, 512)))


@failure("H907", author="E", limit_bytes=SMALL)
def tensor_to_list_for_a_json_file() -> None:
    import json

    import torch

    predictions = torch.rand(6_000_000, 8)
    json.dumps(predictions.tolist())


@failure("H907", author="E", limit_bytes=700 * MIB)
def spectrograms_of_a_day() -> None:
    import numpy as np

    audio = np.zeros(16_000 * 60 * 60, dtype=np.float32)
    np.lib.stride_tricks.sliding_window_view(audio, 400)[::10].copy()


@failure("H907", author="E", limit_bytes=600 * MIB)
def memory_error_of_a_worker_pool() -> None:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(bytearray, [10 * MIB, 3000 * MIB])


@failure("H908", author="E", limit_bytes=SMALL)
def top_of_a_long_vector() -> None:
    import torch

    scores = torch.rand(90_000_000)
    scores.topk(90_000_000 // 2)


@failure("H908", author="E", limit_bytes=SMALL)
def sparse_product_of_scipy() -> None:
    import numpy as np
    import scipy.sparse

    rows = np.zeros(1, dtype=np.int64)
    a = scipy.sparse.csr_matrix((np.ones(1), (rows, rows)), shape=(1, 1))
    b = scipy.sparse.csr_matrix((np.ones(1), (rows, rows)), shape=(1, 2_000_000_000))
    a @ b


@failure("H906", author="E", limit_bytes=SMALL)
def unique_tokens_of_a_corpus() -> None:
    import torch

    tokens = torch.arange(40_000_000)
    torch.unique(tokens, sorted=False, return_counts=True)


@failure("H908", author="E", limit_bytes=SMALL)
def tree_of_neighbours() -> None:
    import numpy as np
    from scipy.spatial import cKDTree

    points = np.random.rand(4_000_000, 3)
    tree = cKDTree(points, leafsize=1)
    tree.query_pairs(0.5)


@failure("H908", author="E", limit_bytes=SMALL)
def mode_of_a_histogram() -> None:
    import torch

    torch.randint(0, 1000, (70_000_000,)).mode()


@failure("H1101", author="E", limit_bytes=600 * MIB)
def anonymous_map_for_a_shared_buffer() -> None:
    import mmap

    mmap.mmap(-1, 2000 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@failure("H1101", author="E")
def memory_map_over_the_limit_of_addresses() -> None:
    import numpy as np

    _leave_addresses(1000 * MIB)
    np.memmap("features.bin", dtype=np.float32, mode="w+", shape=(4_000_000, 512))


@failure("H1101", author="E")
def index_file_mapped_by_hand() -> None:
    import mmap
    from pathlib import Path

    with Path("index.bin").open("wb") as file:
        file.truncate(4000 * MIB)
    _leave_addresses(1000 * MIB)
    with Path("index.bin").open("rb") as file:
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@failure("H1101", author="E")
def map_of_a_numpy_file_in_a_worker() -> None:
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    np.lib.format.open_memmap("features.npy", mode="w+", dtype=np.float32, shape=(2_000_000, 512)).flush()

    class Features(Dataset):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> torch.Tensor:
            _leave_addresses(1000 * MIB)
            return torch.from_numpy(np.load("features.npy", mmap_mode="r")[index].copy())

    next(iter(DataLoader(Features(), num_workers=1)))


@failure("H1102", author="E", limit_bytes=600 * MIB)
def thread_for_every_file() -> None:
    import threading
    import time

    threading.stack_size(64 * MIB)
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()


@failure("H1102", author="E", limit_bytes=600 * MIB)
def pool_of_readers() -> None:
    import threading
    import time
    from concurrent.futures import ThreadPoolExecutor

    threading.stack_size(128 * MIB)
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(time.sleep, [0.5] * 64))


@failure("H1102", author="E")
def threads_of_torch_in_a_small_container() -> None:
    import torch

    images = torch.rand(3000, 3000)
    _leave_addresses(400 * MIB)
    torch.set_num_threads(200)
    images.exp_()


@failure("H1102", author="E", limit_bytes=600 * MIB)
def prefetch_thread_of_a_loader() -> None:
    import threading
    from collections.abc import Iterator
    from queue import Queue

    class Prefetcher:
        def __init__(self, source: Iterator[int]) -> None:
            self.queue: Queue[int] = Queue(2)
            threading.stack_size(1024 * MIB)
            self.thread = threading.Thread(target=lambda: [self.queue.put(item) for item in source], daemon=True)
            self.thread.start()

    Prefetcher(iter(range(10)))


@failure("H1103", author="E")
def checkpoint_mapped_over_the_limit() -> None:
    import torch

    torch.save({"weights": torch.zeros(50_000_000)}, "model.pt")
    _leave_addresses(100 * MIB)
    torch.load("model.pt", mmap=True)


@failure("H1103", author="E")
def tensor_from_a_file_over_the_limit() -> None:
    from pathlib import Path

    import torch

    with Path("embeddings.bin").open("wb") as file:
        file.truncate(4000 * MIB)
    _leave_addresses(1000 * MIB)
    torch.from_file("embeddings.bin", size=1000 * MIB, dtype=torch.float32)


@failure("H1104", author="E")
def sizes_multiplied_twice() -> None:
    import torch

    batch, height, width = 32, 2**20, 2**20
    torch.zeros(batch * height * width, height * width)


@failure("H1104", author="E")
def linear_with_bytes_as_features() -> None:
    from torch import nn

    nn.Linear(2**34, 2**34)


@failure("H1104", author="E")
def array_with_a_wrong_length_field() -> None:
    import struct

    import numpy as np

    (length,) = struct.unpack("<Q", b"RIFF\x24\x08\x00\x40")
    np.zeros((length, 16), dtype=np.float32)


@failure("H1104", author="E")
def repetition_with_a_hash_as_count() -> None:
    key = 2**70 + 12345
    [0.0] * key


@failure("H1104", author="E")
def expand_made_real() -> None:
    import torch

    torch.ones(1, 1).expand(2**40, 2**30).contiguous()

"""Failures of loaders, autograd and precision, by the author of the signatures of memory, devices and several ranks.

They were labelled from the titles of the signatures of loaders, and from the numbers of the research notes for the
others, before any of their patterns was read.
"""

from __future__ import annotations

from typing import Any

from benchmarks.failures import failure


def _script(text: str) -> None:
    """Replace this process by a user's script."""
    import os
    import sys
    from pathlib import Path

    Path("train.py").write_text(text)
    os.execv(sys.executable, [sys.executable, "train.py"])


def _load(sample: Any, count: int = 64, **options: Any) -> None:
    """Read an epoch of samples that a function makes."""
    from torch.utils.data import DataLoader, Dataset

    class Made(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> Any:
            return sample(index)

    for batch in DataLoader(Made(), batch_size=4, **options):
        print(type(batch))


@failure("H930", author="E")
def decoder_killed_in_a_worker() -> None:
    import os
    import signal

    import torch

    def sample(index: int) -> torch.Tensor:
        if index == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3)

    _load(sample, num_workers=2)


@failure("H930", author="E")
def persistent_worker_killed_between_epochs() -> None:
    import os
    import signal

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.zeros(64, 2)), num_workers=1, persistent_workers=True)
    for epoch in range(3):
        for _ in loader:
            pass
        if epoch == 1:
            os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)  # type: ignore[union-attr]


@failure("H931", author="E")
def cache_file_cut_while_it_is_mapped() -> None:
    import mmap
    from pathlib import Path

    path = Path("cache.bin")
    path.write_bytes(b"1" * 100_000)

    def sample(index: int) -> int:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
            if index == 9:
                file.truncate(10)
            return mapped[50_000]

    _load(sample, num_workers=1)


@failure("H933", author="E")
def null_pointer_in_a_codec() -> None:
    import ctypes

    _load(lambda index: len(ctypes.string_at(1 if index == 5 else id(index), 1)), num_workers=2)


@failure("H1201", author="E")
def assertion_of_a_c_library_in_a_worker() -> None:
    import os

    def sample(index: int) -> int:
        if index == 20:
            os.abort()
        return index

    _load(sample, num_workers=2)


@failure("H1202", author="E")
def worker_terminated_by_a_watch_script() -> None:
    import os
    import signal

    def sample(index: int) -> int:
        if index == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return index

    _load(sample, num_workers=1)


@failure("H934", author="E")
def slow_file_system() -> None:
    import time

    _load(lambda index: time.sleep(30) or index, num_workers=1, timeout=2)


@failure("H934", author="E")
def lock_that_is_never_released() -> None:
    import multiprocessing

    lock = multiprocessing.get_context("fork").Lock()
    lock.acquire()

    def sample(index: int) -> int:
        with lock:
            return index

    _load(sample, num_workers=2, timeout=1)


@failure("H935", author="E")
def exit_in_a_parser() -> None:
    import os

    _load(lambda index: os._exit(4) if index == 12 else index, num_workers=2)


@failure("H935", author="E")
def sys_exit_for_a_bad_file() -> None:
    import sys

    def sample(index: int) -> int:
        if index == 30:
            sys.exit(2)
        return index

    _load(sample, num_workers=1)


@failure("H936", author="E")
def batches_kept_with_few_descriptors() -> None:
    import resource

    import torch
    from torch.utils.data import DataLoader

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    for batch in DataLoader([torch.zeros(2) for _ in range(400)], num_workers=1):
        kept.append(batch)  # noqa: PERF402 - as people write it


@failure("H940", author="E")
def lambda_transform_with_spawn() -> None:
    import torch
    from torch.utils.data import DataLoader

    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    data.transform = lambda x: x + 1  # type: ignore[attr-defined]
    next(iter(DataLoader(data, num_workers=1, multiprocessing_context="spawn")))


@failure("H940", author="E")
def collate_inside_main_with_forkserver() -> None:
    import torch
    from torch.utils.data import DataLoader

    def collate(samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples)

    list(DataLoader(range(8), num_workers=1, collate_fn=collate, multiprocessing_context="forkserver"))


@failure("H941", author="E")
def script_without_main_guard() -> None:
    _script(
        "import torch\n"
        "import torch.multiprocessing as mp\n"
        "mp.set_start_method('spawn', force=True)\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.zeros(8, 2)), num_workers=2)\n"
        "for batch in loader:\n"
        "    print(batch)\n"
    )


@failure("H942", author="E")
def images_of_different_sizes() -> None:
    import torch

    _load(lambda index: torch.zeros(3, 32 + index, 32))


@failure("H942", author="E")
def waveforms_in_dictionaries() -> None:
    import torch

    _load(lambda index: {"audio": torch.zeros(1000 * (index + 1)), "speaker": index}, num_workers=1)


@failure("H943", author="E")
def boxes_as_lists() -> None:
    _load(lambda index: {"image": 0.0, "boxes": [1.0] * (index % 3 + 1)})


@failure("H943", author="E")
def token_lists_in_tuples() -> None:
    _load(lambda index: (list(range(index % 5 + 1)), index), num_workers=2)


@failure("H944", author="E")
def broken_image_returns_none() -> None:
    import torch

    _load(lambda index: None if index % 7 == 2 else torch.zeros(3))


@failure("H944", author="E")
def annotation_that_is_missing() -> None:
    import torch

    _load(lambda index: {"image": torch.zeros(3), "caption": None if index > 40 else "a cat"}, num_workers=1)


@failure("H945", author="E")
def pattern_that_finds_no_file() -> None:
    from pathlib import Path

    from torch.utils.data import DataLoader

    DataLoader(sorted(Path("data").glob("*.jpg")), batch_size=8, shuffle=True)


@failure("H948", author="E")
def relu_in_place_after_a_saved_output() -> None:
    import torch

    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    y.relu_()
    y += 1
    y.sum().backward()


@failure("H948", author="E")
def generator_stepped_before_the_second_backward() -> None:
    import torch
    from torch import nn

    generator, critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    score = critic(generator(torch.randn(2, 4)))
    score.mean().backward(retain_graph=True)
    optimizer.step()
    score.pow(2).mean().backward()


@failure("H948", author="E")
def attention_weights_masked_in_place() -> None:
    import torch

    scores = torch.randn(2, 4, 4, requires_grad=True)
    weights = scores.softmax(-1)
    loss = (weights @ torch.randn(2, 4, 3)).sum()
    weights[:, 0] = 0
    loss.backward()


@failure("H949", author="E")
def hidden_state_carried_over_batches() -> None:
    import torch
    from torch import nn

    rnn = nn.GRU(4, 4)
    state = torch.zeros(1, 2, 4)
    for _ in range(2):
        output, state = rnn(torch.randn(3, 2, 4), state)
        output.sum().backward()


@failure("H949", author="E")
def penalty_computed_once() -> None:
    import torch
    from torch import nn

    model = nn.Linear(4, 1)
    penalty = model.weight.pow(2).sum().sqrt()
    for _ in range(3):
        (model(torch.randn(8, 4)).mean() + 0.1 * penalty).backward()


@failure("H950", author="E")
def frozen_model_trained() -> None:
    import torch
    from torch import nn

    model = nn.Linear(4, 2).requires_grad_(False)
    model(torch.randn(2, 4)).sum().backward()


@failure("H950", author="E")
def accuracy_as_loss() -> None:
    import torch
    from torch import nn

    scores = nn.Linear(4, 3)(torch.randn(8, 4))
    loss = 1 - (scores.argmax(1) == torch.zeros(8)).float().mean()
    loss.backward()


@failure("H951", author="E")
def loss_without_reduction() -> None:
    import torch
    from torch import nn

    losses = nn.CrossEntropyLoss(reduction="none")(nn.Linear(4, 3)(torch.randn(8, 4)), torch.zeros(8).long())
    losses.backward()


@failure("H951", author="E")
def gradient_of_a_vector_with_respect_to_the_input() -> None:
    import torch

    x = torch.randn(5, requires_grad=True)
    torch.autograd.grad(x.sin(), x)


@failure("H952", author="E")
def weights_initialised_in_place() -> None:
    from torch import nn

    model = nn.Linear(4, 2)
    model.weight.uniform_(-0.1, 0.1)


@failure("H952", author="E")
def update_written_by_hand() -> None:
    import torch

    weight = torch.zeros(3, requires_grad=True)
    (weight * torch.ones(3)).sum().backward()
    weight -= 0.1 * weight.grad  # type: ignore[operator]


@failure("H953", author="E")
def predictions_given_to_sklearn() -> None:
    import torch
    from torch import nn

    print(nn.Linear(4, 2)(torch.randn(8, 4)).numpy().mean())


@failure("H953", author="E")
def losses_averaged_by_numpy() -> None:
    import numpy as np
    import torch
    from torch import nn

    losses = [nn.Linear(2, 1)(torch.randn(3, 2)).mean() for _ in range(3)]
    print(np.mean([np.asarray(loss) for loss in losses]))


@failure("H954", author="E")
def model_with_a_cached_output_copied() -> None:
    import copy

    import torch
    from torch import nn

    model = nn.Linear(4, 4)
    model.last = model(torch.randn(1, 4))
    copy.deepcopy(model)


@failure("H956", author="E")
def scaler_stepped_after_an_unscaled_backward() -> None:
    import torch
    from torch import nn

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    scaler.step(optimizer)


@failure("H957", author="E")
def clipped_twice_between_updates() -> None:
    import torch
    from torch import nn

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(model(torch.randn(2, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@failure("H958", author="E")
def half_model_with_a_scaler() -> None:
    import torch
    from torch import nn

    model = nn.Linear(4, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(2, 4).half()).sum()).backward()
    scaler.step(optimizer)


@failure("H959", author="E")
def clipping_that_refuses_infinity() -> None:
    import torch
    from torch import nn

    model = nn.Linear(4, 1)
    (model(torch.randn(2, 4)) / 0).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@failure("H960", author="E")
def root_of_zero_under_anomaly_detection() -> None:
    import torch

    with torch.autograd.detect_anomaly():
        x = torch.zeros(3, requires_grad=True)
        (x.sqrt() * 0).sum().backward()


@failure("H960", author="E")
def norm_divided_by_itself() -> None:
    import torch

    torch.autograd.set_detect_anomaly(True)
    x = torch.zeros(4, requires_grad=True)
    torch.where(x > 0, x / x, x).sum().backward()


@failure("H961", author="E")
def sampling_with_temperature_zero() -> None:
    import torch

    logits = torch.randn(2, 10)
    torch.multinomial((logits / 0.0).softmax(-1), 1)


@failure("H962", author="E")
def policy_with_nan_logits() -> None:
    import torch
    from torch.distributions import Categorical

    Categorical(logits=torch.tensor([[0.1, float("nan"), 0.3]])).sample()


@failure("H962", author="E")
def variance_that_became_negative() -> None:
    import torch
    from torch.distributions import Normal

    Normal(torch.zeros(3), torch.tensor([1.0, -0.1, 2.0])).log_prob(torch.zeros(3))

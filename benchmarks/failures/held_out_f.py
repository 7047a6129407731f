"""Failures of values, shapes, optimizers, checkpoints and the system, by an author who did not see their patterns.

The labels are chosen by the titles of the signatures alone. See the package for how they are run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.failures import failure


@failure("H963", author="F")
def regression_with_a_huge_learning_rate() -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
    for step in range(40):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    sys.exit(1)


@failure("H963", author="F")
def classifier_that_goes_on_with_nan() -> None:
    import logging

    import torch

    logging.basicConfig(level=logging.INFO, format="%(asctime)s [%(levelname)s] %(message)s")
    log = logging.getLogger("train")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    for epoch in range(60):
        loss = (model(torch.ones(8, 4)) - 3).pow(4).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.info("epoch=%d train_loss=%.5f lr=50.0", epoch, loss.item())
    sys.exit(4)  # as a job does that saved no best model


@failure("H964", author="F")
def factor_of_a_kernel_matrix_of_equal_points() -> None:
    import torch

    points = torch.zeros(6, 2)
    kernel = torch.exp(-torch.cdist(points, points)) - 0.1 * torch.eye(6)
    torch.linalg.cholesky(kernel)


@failure("H964", author="F")
def spectral_layer_with_nan_weights() -> None:
    import torch

    class Spectral(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((5, 5), float("nan")))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _, values, _ = torch.linalg.svd(self.weight)
            return x / values.max()

    Spectral()(torch.ones(5))


@failure("H965", author="F")
def head_after_a_pooling_of_another_stride() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    for images in torch.randn(20, 4, 1, 28, 28):
        model(images)


@failure("H965", author="F")
def adapter_between_two_widths() -> None:
    import torch

    class Adapter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = torch.nn.Parameter(torch.randn(64, 8))
            self.up = torch.nn.Parameter(torch.randn(16, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.down) @ self.up

    Adapter()(torch.randn(3, 64))


@failure("H966", author="F")
def grey_image_in_a_coloured_network() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    for (images,) in DataLoader(TensorDataset(torch.zeros(8, 1, 16, 16)), batch_size=4):
        network(images)


@failure("H966", author="F")
def features_last_in_a_temporal_convolution() -> None:
    import torch

    mel = torch.randn(2, 200, 80)
    torch.nn.Conv1d(80, 128, kernel_size=5)(mel)


@failure("H967", author="F")
def deep_network_on_thumbnails() -> None:
    import torch
    from torch import nn

    blocks = [nn.Sequential(nn.Conv2d(3 if not i else 8, 8, 3), nn.MaxPool2d(2)) for i in range(4)]
    nn.Sequential(*blocks)(torch.randn(1, 3, 24, 24))


@failure("H968", author="F")
def residual_of_another_length() -> None:
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = torch.nn.Conv1d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.convolution(x)

    Block()(torch.randn(1, 4, 50))


@failure("H968", author="F")
def skip_connection_of_an_odd_image() -> None:
    import torch
    from torch.nn import functional

    image = torch.randn(1, 3, 33, 33)
    small = functional.avg_pool2d(image, 2)
    torch.cat([image, functional.interpolate(small, scale_factor=2)], dim=1)


@failure("H969", author="F")
def heads_joined_by_view_after_transpose() -> None:
    import torch

    heads = torch.randn(2, 4, 10, 8).transpose(1, 2)
    print(heads.view(2, 10, 32).shape)


@failure("H969", author="F")
def last_batch_reshaped_to_a_fixed_size() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    for (images,) in DataLoader(TensorDataset(torch.zeros(100, 3, 4, 4)), batch_size=32):
        images.reshape(32, 48)


@failure("H970", author="F")
def token_beyond_the_vocabulary() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100))
    for batch in (torch.randint(0, 100, (2, 5)), torch.tensor([[1, 2, 100]])):
        model(batch)


@failure("H970", author="F")
def labels_counted_from_one() -> None:
    import torch

    logits = torch.nn.Linear(4, 3)(torch.randn(3, 4))
    torch.nn.CrossEntropyLoss()(logits, torch.tensor([1, 2, 3])).backward()


@failure("H971", author="F")
def labels_as_floats_of_a_nll_loss() -> None:
    import torch

    scores = torch.randn(4, 3).log_softmax(-1)
    torch.nn.functional.nll_loss(scores, torch.tensor([0.0, 1.0, 2.0, 0.0]))


@failure("H971", author="F")
def features_from_numpy_in_double() -> None:
    import numpy as np
    import torch

    features = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 4)))
    torch.nn.Linear(4, 2)(features)


@failure("H972", author="F")
def binary_loss_of_scores() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    for _ in range(3):
        torch.nn.BCELoss()(model(torch.randn(16, 4) * 3), torch.ones(16, 1)).backward()


@failure("H973", author="F")
def column_against_a_row() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Sigmoid())
    torch.nn.functional.binary_cross_entropy(model(torch.randn(8, 4)), torch.ones(8))


@failure("H974", author="F")
def last_batch_of_one_sample() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    for (batch,) in DataLoader(TensorDataset(torch.randn(33, 4)), batch_size=16):
        model(batch).sum().backward()


@failure("H974", author="F")
def global_pooling_of_a_single_image() -> None:
    import torch
    from torch import nn

    nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))(torch.randn(1, 8, 7, 7))


@failure("H975", author="F")
def optimizer_of_layers_in_a_plain_list() -> None:
    import torch

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [torch.nn.Linear(4, 4) for _ in range(3)]

    torch.optim.AdamW(Stack().parameters(), lr=1e-3)


@failure("H975", author="F")
def optimizer_of_a_scaled_tensor() -> None:
    import torch

    noise = 0.1 * torch.randn(3, 8, 8, requires_grad=True)
    torch.optim.Adam([noise], lr=0.01)


@failure("H976", author="F")
def optimizer_resumed_after_a_layer_was_added() -> None:
    import torch

    old = torch.optim.Adam(torch.nn.Linear(4, 4).parameters())
    torch.save(old.state_dict(), "optimizer.pt")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    torch.optim.Adam(model.parameters()).load_state_dict(torch.load("optimizer.pt"))


@failure("H976", author="F")
def optimizer_resumed_with_groups_for_weight_decay() -> None:
    import torch

    layer = torch.nn.Linear(4, 4)
    state = torch.optim.SGD(layer.parameters(), lr=0.1).state_dict()
    groups = [{"params": [layer.weight], "weight_decay": 0.1}, {"params": [layer.bias]}]
    torch.optim.SGD(groups, lr=0.1).load_state_dict(state)


@failure("H977", author="F")
def head_for_another_number_of_classes() -> None:
    import torch

    def build(classes: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, classes))

    torch.save(build(1000).state_dict(), "pretrained.pt")
    build(10).load_state_dict(torch.load("pretrained.pt"))


@failure("H978", author="F")
def weights_saved_from_a_wrapped_model() -> None:
    import torch

    model = torch.nn.Linear(4, 2)
    torch.save(torch.nn.DataParallel(model).state_dict(), "model.pt")
    model.load_state_dict(torch.load("model.pt", map_location="cpu"))


@failure("H979", author="F")
def checkpoint_cut_in_the_middle() -> None:
    import torch

    torch.save({"model": torch.nn.Linear(64, 64).state_dict(), "epoch": 3}, "last.pt")
    os.truncate("last.pt", 9000)
    torch.load("last.pt")


@failure("H979", author="F")
def checkpoint_of_zero_bytes() -> None:
    import torch

    Path("last.pt").touch()
    print(torch.load("last.pt", weights_only=True)["epoch"])


@failure("H980", author="F", also=("H981", "H1344"))
def file_size_limit_while_saving() -> None:
    import resource

    import torch

    model = torch.nn.Linear(256, 256)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    torch.save(model.state_dict(), "model.pt")


@failure("H981", author="F")
def log_on_a_full_disk() -> None:
    with Path("/dev/full").open("w") as log:
        for step in range(10):
            log.write(f"step {step}\n")
            log.flush()


@failure("H981", author="F")
def features_saved_on_a_full_disk() -> None:
    import numpy as np

    with Path("/dev/full").open("wb") as file:
        np.zeros((100, 100)).tofile(file)


@failure("H982", author="F")
def checkpoint_with_an_own_configuration_class() -> None:
    import torch

    torch.save({"weights": torch.zeros(3), "config": _Configuration()}, "model.pt")
    torch.load("model.pt")


class _Configuration:
    width = 64


@failure("H984", author="F")
def safetensors_file_is_a_pickle() -> None:
    import torch
    from safetensors.torch import load_file

    torch.save({"weight": torch.zeros(3)}, "model.safetensors")
    load_file("model.safetensors")


@failure("H984", author="F")
def safetensors_cut_short() -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    save_file({f"layer{n}.weight": torch.zeros(32, 32) for n in range(4)}, "model.safetensors")
    os.truncate("model.safetensors", 2000)
    with safe_open("model.safetensors", framework="pt") as file:
        print(list(file.keys()))


@failure("H985", author="F")
def whole_model_of_a_package_that_moved() -> None:
    import importlib

    import torch

    Path("oldmodels.py").write_text("import torch\nclass Net(torch.nn.Module):\n    pass\n")
    sys.path.insert(0, str(Path.cwd()))
    torch.save(importlib.import_module("oldmodels").Net(), "net.pt")
    del sys.modules["oldmodels"]
    Path("oldmodels.py").unlink()
    importlib.invalidate_caches()
    torch.load("net.pt", weights_only=False)


@failure("H986", author="F")
def cosine_schedule_resumed_alone() -> None:
    import torch

    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, last_epoch=41)


@failure("H987", author="F")
def one_cycle_for_one_epoch_too_few() -> None:
    import torch

    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, epochs=2, steps_per_epoch=5)
    for _ in range(3):
        for _ in range(5):
            optimizer.step()
            schedule.step()


@failure("H988", author="F")
def annotations_at_another_path() -> None:
    import json

    from torch.utils.data import DataLoader, Dataset

    class Annotated(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return json.loads(Path(f"annotations/{index:05}.json").read_text())["label"]

    for _ in DataLoader(Annotated(), num_workers=1):
        pass


@failure("H988", author="F")
def checkpoint_directory_of_another_user() -> None:
    folder = Path("checkpoints")
    folder.mkdir(mode=0o700)
    os.setuid(65534)
    (folder / "log.txt").write_text("step 1\n")


@failure("H989", author="F")
def extension_of_another_cuda() -> None:
    import ctypes

    ctypes.CDLL("libcudart.so.9.0")


@failure("H1302", author="F")
def mean_over_an_empty_loader() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    losses = [
        batch.sum().item() for (batch,) in DataLoader(TensorDataset(torch.zeros(3)), batch_size=8, drop_last=True)
    ]
    print(f"validation loss {sum(losses) / len(losses):.3f}")


@failure("H1303", author="F")
def item_of_the_losses_of_a_batch() -> None:
    import torch

    losses = torch.nn.functional.mse_loss(torch.randn(8), torch.randn(8), reduction="none")
    print(f"loss {losses.item():.4f}")


@failure("H1311", author="F")
def picture_without_a_batch_in_a_normalisation() -> None:
    import torch

    torch.nn.BatchNorm2d(3)(torch.rand(3, 16, 16))


@failure("H1330", author="F")
def checkpoint_of_weights_only_resumed() -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    torch.save({"model": model.state_dict()}, "last.pt")
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    torch.optim.Adam(model.parameters()).load_state_dict(state["optimizer"])


@failure("H1332", author="F")
def schedule_with_a_lambda_saved_whole() -> None:
    import torch

    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    torch.save({"step": 3, "schedule": schedule}, "last.pt")


@failure("H1370", author="F")
def loader_of_three_unpacked_into_two() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.zeros(4), torch.zeros(4), torch.zeros(4))
    for image, label in DataLoader(data, batch_size=2):
        print(image, label)


@failure("H1380", author="F")
def option_misspelt_on_the_command_line() -> None:
    import argparse

    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.parse_args(["--learnin-rat", "0.1"])


@failure("H991", author="F")
def native_code_writes_anywhere() -> None:
    import ctypes
    import faulthandler

    faulthandler.enable()
    ctypes.memset(16, 0, 4)


@failure("H992", author="F")
def tree_module_without_an_end() -> None:
    import torch

    class Tree(torch.nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            return self.forward(x, depth + 1) + 1

    Tree()(torch.zeros(1))


@failure("H1360", author="F")
def class_name_missing_in_the_table_of_a_dataset() -> None:
    from torch.utils.data import DataLoader, Dataset

    classes = {"cat": 0, "dog": 1}

    class Pets(Dataset):
        names = ("cat", "dog", "hamster")

        def __len__(self) -> int:
            return len(self.names)

        def __getitem__(self, index: int) -> int:
            return classes[self.names[index]]

    for _ in DataLoader(Pets(), num_workers=1):
        pass

"""Failures by values: losses that diverge, matrices without a solution, indices out of range, NaN in data."""

# ruff: noqa: LOG015, PTH, SIM115 - programs stand here as users write them

from __future__ import annotations

from benchmarks.failures import failure


@failure("H963", author="G")
def regression_with_a_huge_rate_stopped_by_its_own_check() -> None:
    import math

    import torch

    torch.manual_seed(0)
    model, data = torch.nn.Linear(8, 1), torch.randn(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
    for epoch in range(200):
        loss = torch.nn.functional.mse_loss(model(data), data.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4g}")
        if not math.isfinite(loss.item()):
            raise SystemExit(f"Loss is {loss.item()}, stopping training")


@failure("H963", author="G")
def trainer_class_raises_when_loss_is_nan() -> None:
    import torch

    class Trainer:
        def __init__(self) -> None:
            self.weight = torch.nn.Parameter(torch.zeros(4))

        def step(self, batch: torch.Tensor) -> float:
            ratio = (self.weight * batch).sum() / (self.weight.norm() * batch.norm())
            if torch.isnan(ratio):
                raise FloatingPointError("loss is NaN at step 0, check the learning rate")
            return float(ratio)

    Trainer().step(torch.ones(4))


@failure("H963", author="G")
def assertion_on_a_finite_loss_in_a_gan() -> None:
    import torch

    generator = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(generator.parameters(), lr=1e12)
    for step in range(100):
        fake = generator(torch.ones(16, 4))
        loss = -torch.log(torch.sigmoid(fake) + 0.0).mean() + fake.pow(2).mean()
        assert torch.isfinite(loss), f"non-finite loss {loss.item()} at step {step}"
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@failure("H963", author="G")
def log_of_zero_in_a_policy_gradient() -> None:
    import logging
    import sys

    import torch

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    probability = torch.tensor([1.0, 0.0], requires_grad=True)
    loss = -(probability * torch.log(probability)).sum()
    logging.info("step=1 loss=%s", loss.item())
    if loss.isnan():
        logging.error("Loss is nan, stopping training")
        sys.exit(1)


@failure("H964", author="G")
def covariance_of_too_few_samples_is_not_positive_definite() -> None:
    import torch

    samples = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    covariance = torch.cov(samples.T) - 1e-3 * torch.eye(10)
    torch.linalg.cholesky(covariance)


@failure("H964", author="G")
def svd_regulariser_on_weights_with_nan() -> None:
    import torch

    layer = torch.nn.Linear(6, 6)
    with torch.no_grad():
        layer.weight.div_(layer.weight - layer.weight)

    class SpectralPenalty(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svd(weight).S[0]

    SpectralPenalty()(layer.weight * float("nan"))


@failure("H964", author="G")
def inverse_of_a_constant_kernel_matrix() -> None:
    import torch

    torch.linalg.inv(torch.ones(5, 5))


@failure("H964", author="G")
def solve_with_a_dead_feature() -> None:
    import torch

    features = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    features[:, 1] = 0
    torch.linalg.solve(features.T @ features, features.T @ torch.ones(20, 1))


@failure("H964", author="G")
def eigenvalues_of_an_attention_map_with_infinities() -> None:
    import torch

    scores = torch.full((4, 4), -float("inf"))
    torch.linalg.eigh(torch.softmax(scores, dim=-1))


@failure("H964", author="G")
def numpy_inverse_of_a_singular_whitening_matrix() -> None:
    import numpy as np

    batch = np.repeat(np.arange(4.0)[:, None], 3, axis=1)
    np.linalg.inv(batch.T @ batch)


@failure("H964", author="G")
def numpy_principal_components_of_nan() -> None:
    import numpy as np

    np.linalg.svd(np.full((5, 3), np.nan))


@failure("H964", author="G")
def scipy_square_root_by_cholesky() -> None:
    import numpy as np
    import scipy.linalg

    scipy.linalg.cholesky(np.array([[1.0, 2.0], [2.0, 1.0]]))


@failure("H970", author="G")
def token_beyond_the_vocabulary() -> None:
    import torch

    class Encoder(torch.nn.Module):
        def __init__(self, vocabulary: int) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(vocabulary, 16)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.embed(tokens).mean(1)

    Encoder(100)(torch.tensor([[1, 5, 100]]))


@failure("H970", author="G")
def position_beyond_the_longest_sequence() -> None:
    import torch

    positions = torch.nn.Embedding(512, 8)
    sequence = torch.zeros(2, 600, 8)
    sequence + positions(torch.arange(sequence.size(1)))


@failure("H970", author="G")
def label_counted_from_one() -> None:
    import torch

    loss = torch.nn.CrossEntropyLoss()
    for label in range(1, 11):
        loss(torch.zeros(1, 10), torch.tensor([label]))


@failure("H970", author="G")
def void_label_255_in_segmentation() -> None:
    import torch

    mask = torch.zeros(2, 8, 8, dtype=torch.long)
    mask[0, :2] = 255
    torch.nn.functional.cross_entropy(torch.randn(2, 21, 8, 8), mask)


@failure("H970", author="G")
def negative_label_in_nll() -> None:
    import torch

    torch.nn.NLLLoss()(torch.zeros(3, 4).log_softmax(1), torch.tensor([0, -1, 2]))


@failure("H970", author="G")
def one_hot_with_too_few_classes() -> None:
    import torch

    torch.nn.functional.one_hot(torch.tensor([0, 3, 9]), num_classes=9)


@failure("H970", author="G")
def gather_of_a_rating_beyond_the_table() -> None:
    import torch

    table = torch.randn(4, 5)
    table.gather(1, torch.tensor([[1], [2], [5], [0]]))


@failure("H970", author="G")
def permutation_longer_than_the_tensor() -> None:
    import torch

    batch = torch.randn(8, 3)
    batch[torch.arange(10)]


@failure("H970", author="G")
def last_step_of_a_sequence_by_its_length() -> None:
    import torch

    outputs = torch.randn(2, 7, 4)
    lengths = [7, 5]
    torch.stack([outputs[i, length] for i, length in enumerate(lengths)])


@failure("H970", author="G")
def index_select_of_an_anchor_that_is_not_there() -> None:
    import torch

    torch.randn(6, 4).index_select(0, torch.tensor([0, 6]))


@failure("H970", author="G")
def numpy_split_computed_on_the_larger_set() -> None:
    import numpy as np

    order = np.random.default_rng(0).permutation(120)
    labels = np.zeros(100)
    labels[order[:110]]


@failure("H970", author="G")
def embedding_bag_of_hashed_words() -> None:
    import torch

    bag = torch.nn.EmbeddingBag(1000, 8)
    bag(torch.tensor([17, 4242]), torch.tensor([0]))


@failure("H972", author="G")
def binary_loss_on_logits() -> None:
    import torch

    torch.nn.BCELoss()(torch.tensor([1.7, -0.4]), torch.tensor([1.0, 0.0]))


@failure("H972", author="G")
def autoencoder_compared_with_standardised_pixels() -> None:
    import torch

    decoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 16))
    torch.manual_seed(3)
    pixels = torch.randn(5, 16)
    for _ in range(3):
        torch.nn.functional.binary_cross_entropy(decoder(torch.randn(5, 4)) * 9, pixels)


@failure("H1292", author="G")
def metric_of_nan_predictions() -> None:
    import numpy as np
    from sklearn.metrics import roc_auc_score

    roc_auc_score([0, 1, 1], np.array([0.1, np.nan, 0.7]))


@failure("H1292", author="G")
def linear_probe_on_overflowed_features() -> None:
    import torch
    from sklearn.linear_model import LogisticRegression

    features = torch.randn(10, 4).mul(1e30).pow(3)
    LogisticRegression().fit(features.numpy(), [0, 1] * 5)


@failure("H1291", author="G")
def progress_in_percent_of_a_nan_loss() -> None:
    import torch

    loss = torch.tensor(float("nan"))
    print(int(loss.item() * 100))


@failure("H1291", author="G")
def steps_from_an_infinite_ratio() -> None:
    rate = float("inf")
    for _ in range(round(rate / 2)):
        pass


@failure("H1292", author="G")
def frechet_distance_of_nan_features() -> None:
    import numpy as np
    import scipy.linalg

    features = np.full((8, 3), np.nan)
    scipy.linalg.eigh(np.cov(features, rowvar=False))


@failure("H1302", author="G")
def mean_loss_of_an_empty_loader() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    total = 0.0
    loader = DataLoader(TensorDataset(torch.zeros(3, 2)), batch_size=8, drop_last=True)
    for (batch,) in loader:
        total += batch.sum().item()
    print("loss", total / len(loader))


@failure("H1290", author="G")
def perplexity_of_a_large_loss() -> None:
    import math

    print("perplexity", math.exp(1200.0))


@failure("H1290", author="G")
def bits_of_an_impossible_probability() -> None:
    import math

    print(-math.log2(0.0))


@failure("H1302", author="G")
def accumulation_steps_rounded_to_zero() -> None:
    batch_size, micro_batch_size = 8, 16
    accumulate = batch_size // micro_batch_size
    for step in range(4):
        if step % accumulate == 0:
            print("step", step)


@failure("H1303", author="G")
def item_of_a_loss_without_reduction() -> None:
    import torch

    loss = torch.nn.functional.mse_loss(torch.zeros(4, 1), torch.ones(4, 1), reduction="none")
    print(loss.item())


@failure("H1303", author="G")
def early_stopping_on_a_vector() -> None:
    import torch

    best = torch.full((3,), 9.0)
    for validation in (torch.ones(3), torch.zeros(3)):
        if validation < best:
            best = validation


@failure("H1303", author="G")
def float_of_a_batch_of_scores() -> None:
    import torch

    history = [float(score) for score in torch.rand(2, 3)]
    print(history)


@failure("H1303", author="G")
def comparison_of_label_arrays() -> None:
    import numpy as np

    if np.array([1, 2]) == np.array([1, 3]):
        print("equal")


@failure("H1303", author="G")
def range_over_a_float_tensor() -> None:
    import torch

    for step in range(torch.tensor(3.5)):
        print(step)


@failure("H1228", author="G")
def ragged_list_of_boxes() -> None:
    import torch

    torch.tensor([[0, 1, 2, 3], [4, 5, 6]])


@failure("H1229", author="G")
def object_array_from_a_table() -> None:
    import numpy as np
    import torch

    torch.from_numpy(np.array([[1.0, None], [2.0, 3.0]]))


@failure("H1304", author="G")
def class_names_as_labels() -> None:
    import torch

    torch.tensor(["cat", "dog"])


@failure("H1228", author="G")
def spectrograms_of_different_lengths_in_one_array() -> None:
    import numpy as np

    np.array([np.zeros((80, 10)), np.zeros((80, 12))]).astype(np.float32)


@failure("H1304", author="G")
def tensor_from_a_dict_of_scores() -> None:
    import torch

    torch.as_tensor([{"score": 0.3}])


@failure("H1305", author="G")
def draw_from_an_empty_replay_buffer() -> None:
    import random

    buffer: list[int] = []
    random.choice(buffer)


@failure("H1285", author="G")
def sample_more_negatives_than_there_are() -> None:
    import random

    random.sample(range(3), 8)


@failure("H1305", author="G")
def largest_box_of_an_image_without_boxes() -> None:
    import torch

    torch.zeros(0, 4).max()


@failure("H1305", author="G")
def random_crop_of_a_short_clip() -> None:
    import torch

    clip, length = torch.zeros(100), 160
    start = torch.randint(0, clip.numel() - length, (1,))
    print(start)


@failure("H1305", author="G")
def best_of_no_checkpoints() -> None:
    from pathlib import Path

    print(max(Path().glob("*.pt")))


@failure("H1305", author="G")
def crop_with_random_module() -> None:
    import random

    height, crop = 200, 224
    random.randint(0, height - crop)


@failure("H1397", author="G", needs="sklearn")
def metric_of_fewer_predictions_than_labels() -> None:
    import torch
    from sklearn.metrics import accuracy_score

    labels = torch.randint(0, 2, (10,))
    predictions = [int(batch.argmax()) for batch in torch.randn(8, 2)]
    print(accuracy_score(labels.numpy(), predictions))


@failure("H1397", author="G", needs="sklearn")
def accuracy_of_probabilities() -> None:
    from sklearn.metrics import f1_score

    print(f1_score([0, 1, 1], [0.2, 0.7, 0.9]))


@failure("H1397", author="G", needs="sklearn")
def scaler_that_was_never_fitted() -> None:
    import numpy as np
    from sklearn.preprocessing import StandardScaler

    StandardScaler().transform(np.zeros((4, 2)))


@failure("H1398", author="G", needs="PIL")
def sample_grid_of_floats_as_a_picture() -> None:
    import numpy as np
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).random((32, 32, 3)))


@failure("H1398", author="G", needs="PIL")
def picture_with_alpha_as_jpeg() -> None:
    from PIL import Image

    Image.new("RGBA", (8, 8)).save("sample.jpg")

"""Failures of precision: loss scaling, number types too small, NaN where none may be, random draws, determinism.

Each fails for real; see the package for how they are run.
"""

from __future__ import annotations

from benchmarks.failures import failure


@failure("H956", author="F")
def scaler_steps_without_backward() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(2, 4)).mean())
    scaler.step(optimizer)


@failure("H956", author="F")
def scaler_steps_the_optimizer_of_another_model() -> None:
    import torch

    first, second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(second.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(first(torch.randn(2, 4)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()


@failure("H956", author="F")
def gradients_cleared_before_the_scaler_steps() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with torch.autocast("cpu"):
        loss = model(torch.randn(2, 4)).mean()
    scaler.scale(loss).backward()
    optimizer.zero_grad(set_to_none=True)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


@failure("H956", author="F")
def scaler_updates_without_any_step() -> None:
    import torch

    scaler = torch.amp.GradScaler("cpu")
    for step in range(4):
        loss = scaler.scale(torch.ones(1, requires_grad=True).sum())
        if step % 2 == 1:
            loss.backward()
        scaler.update()


@failure("H957", author="F")
def unscaled_twice_for_two_clippings() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(2, 4)).mean()).backward()
    for layer in model:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)


@failure("H957", author="F")
def unscaled_at_every_micro_step() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for step in range(4):
        scaler.scale(model(torch.randn(2, 4)).mean() / 4).backward()
        scaler.unscale_(optimizer)
        if step == 3:
            scaler.step(optimizer)
            scaler.update()


@failure("H958", author="F")
def half_model_with_a_scaler() -> None:
    import torch

    model = torch.nn.Linear(4, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(2, 4).half()).mean()).backward()
    scaler.step(optimizer)


@failure("H958", author="F")
def one_half_layer_clipped_with_a_scaler() -> None:
    import torch

    body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2).to(torch.float16)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(head(body(torch.randn(2, 4)).half()).float().sum()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)


@failure("H959", author="F")
def infinite_gradient_clipped_strictly() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    (model(torch.randn(2, 4)).mean() * float("inf")).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@failure("H959", author="F")
def nan_gradient_of_a_square_root_clipped_strictly() -> None:
    import torch

    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in (torch.randn(2, 4), torch.zeros(2, 4)):
        optimizer.zero_grad()
        model(batch).square().sum(-1).sqrt().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0, norm_type="inf", error_if_nonfinite=True)
        optimizer.step()


@failure("H959", author="F")
def norm_of_all_gradients_asked_for_strictly() -> None:
    import torch

    weights = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    (weights[0] / torch.zeros(3)).sum().backward()
    print(torch.nn.utils.get_total_norm([weights[0].grad], error_if_nonfinite=True))


@failure("H960", author="F")
def distance_of_equal_points_under_anomaly_mode() -> None:
    import torch

    points = torch.zeros(4, 3, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        ((points[:, None] - points[None]) ** 2).sum(-1).sqrt().sum().backward()


@failure("H960", author="F")
def masked_logarithm_under_anomaly_mode() -> None:
    import torch

    torch.autograd.set_detect_anomaly(mode=True)
    x = torch.tensor([0.0, 0.5, 1.0], requires_grad=True)
    torch.where(x > 0, x * x.log(), torch.zeros_like(x)).sum().backward()


@failure("H960", author="F")
def normalised_zero_vector_under_anomaly_mode() -> None:
    import torch

    class Cosine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y / y.pow(2).sum(-1, keepdim=True).sqrt()

    with torch.autograd.set_detect_anomaly(mode=True):
        for batch in (torch.randn(2, 4), torch.zeros(2, 4)):
            Cosine()(batch).sum().backward()


@failure("H960", author="F")
def power_of_zero_under_anomaly_mode() -> None:
    import torch

    gain = torch.zeros(3, requires_grad=True)
    with torch.autograd.detect_anomaly():
        (gain**0.5 * 0).sum().backward()


@failure("H961", author="F")
def tokens_sampled_from_nan_logits() -> None:
    import torch

    logits = torch.nn.Linear(4, 10)(torch.full((1, 4), float("nan")))
    torch.multinomial(logits.softmax(-1), num_samples=1)


@failure("H961", author="F")
def negative_weights_sampled() -> None:
    import torch

    advantages = torch.tensor([0.5, -0.1, 0.6])
    print(torch.multinomial(advantages, 2, replacement=True))


@failure("H961", author="F")
def temperature_zero_while_generating() -> None:
    import torch

    def generate(model: torch.nn.Module, token: torch.Tensor, temperature: float) -> torch.Tensor:
        for _ in range(4):
            probabilities = torch.softmax(model(token)[-1] / temperature, dim=-1)
            token = torch.cat([token, torch.multinomial(probabilities, 1)])
        return token

    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
    generate(model, torch.tensor([0]), temperature=0.0)


@failure("H962", author="F")
def policy_of_nan_logits() -> None:
    import torch

    logits = torch.full((2, 3), float("nan"))
    torch.distributions.Categorical(logits=logits).sample()


@failure("H962", author="F")
def standard_deviation_below_zero() -> None:
    import torch

    mean, scale = torch.nn.Linear(4, 2)(torch.ones(1, 4)).chunk(2, dim=-1)
    print(torch.distributions.Normal(mean, -scale.abs()))


@failure("H962", author="F")
def probability_above_one() -> None:
    import torch

    class Policy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.distributions.Bernoulli:
            return torch.distributions.Bernoulli(probs=x.exp())

    for step in range(3):
        Policy()(torch.full((2,), step - 1.5)).sample()


@failure("H962", author="F")
def likelihood_of_a_value_outside_the_support() -> None:
    import torch

    gamma = torch.distributions.Gamma(torch.ones(2), torch.ones(2))
    print(gamma.log_prob(torch.tensor([0.5, -0.5])))


@failure("H962", author="F")
def covariance_that_is_none() -> None:
    import torch

    torch.distributions.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]]))


@failure("H1271", author="F")
def linear_algebra_in_half() -> None:
    import torch

    torch.linalg.inv(torch.eye(3).half())


@failure("H1271", author="F")
def spectrum_in_bfloat16() -> None:
    import torch

    model = torch.nn.Conv1d(1, 1, 3).bfloat16()
    torch.linalg.svd(model.weight[0])


@failure("H1271", author="F")
def eight_bit_floats_added() -> None:
    import torch

    x = torch.randn(4).to(torch.float8_e4m3fn)
    print(x + x)


@failure("H1271", author="F")
def whitening_in_bfloat16() -> None:
    import torch

    class Whitening(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.linalg.cholesky(x.t() @ x / len(x) + torch.eye(4, dtype=x.dtype))

    for dtype in (torch.float32, torch.bfloat16):
        Whitening()(torch.randn(16, 4, dtype=dtype))


@failure("H1272", author="F")
def softmax_of_token_ids() -> None:
    import torch

    torch.softmax(torch.tensor([[1, 2, 3]]), dim=-1)


@failure("H1272", author="F")
def mean_of_labels() -> None:
    import torch

    predicted, labels = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])
    print((predicted == labels).mean())


@failure("H1272", author="F")
def norm_of_integers() -> None:
    import torch

    print(torch.arange(5).norm())


@failure("H1272", author="F")
def quantile_of_integers() -> None:
    import torch

    print(torch.quantile(torch.arange(100), 0.9))


@failure("H1273", author="F")
def scaler_unscales_a_loss_that_was_not_scaled() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    model(torch.randn(2, 4)).mean().backward()
    scaler.unscale_(optimizer)


@failure("H1273", author="F")
def scaler_updates_before_anything_was_scaled() -> None:
    import torch

    scaler = torch.amp.GradScaler(device="cpu")
    for epoch in range(2):
        print("epoch", epoch)
        scaler.update()


@failure("H1274", author="F")
def scaler_steps_twice_without_update() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(model(torch.randn(2, 4)).mean()).backward()
        scaler.step(optimizer)


@failure("H1274", author="F")
def scaler_unscales_after_its_step() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(2, 4)).mean()).backward()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@failure("H1275", author="F")
def closure_with_a_scaler() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    scaler = torch.amp.GradScaler("cpu")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        scaler.scale(loss).backward()
        return loss

    scaler.scale(closure())
    scaler.step(optimizer, closure=closure)


@failure("H1276", author="F")
def autocast_on_the_device_of_a_model_without_memory() -> None:
    import torch

    model = torch.nn.Linear(4, 1, device="meta")
    with torch.autocast(model.weight.device.type, dtype=torch.float16):
        model(torch.randn(2, 4, device="meta"))


@failure("H1288", author="F")
def scaler_resumed_from_a_run_without_one() -> None:
    import torch

    torch.save({"scaler": torch.amp.GradScaler("cpu", enabled=False).state_dict()}, "last.pt")
    torch.amp.GradScaler("cpu").load_state_dict(torch.load("last.pt")["scaler"])


@failure("H1289", author="F")
def scaler_given_a_number() -> None:
    import torch

    loss = torch.nn.functional.mse_loss(torch.nn.Linear(4, 1)(torch.randn(2, 4)), torch.zeros(2, 1))
    torch.amp.GradScaler("cpu").scale(loss.item()).backward()


@failure("H1276", author="F")
def autocast_given_a_device_object() -> None:
    import torch

    device = torch.device("cpu")
    with torch.autocast(device, dtype=torch.bfloat16):
        torch.nn.Linear(4, 1)(torch.randn(2, 4))


@failure("H1277", author="F")
def attention_mask_of_minus_1e9_in_half() -> None:
    import torch

    scores = torch.randn(2, 4, 4).half()
    scores.masked_fill_(torch.ones(4, 4).triu(1).bool(), -1e9).softmax(-1)


@failure("H1277", author="F")
def largest_float_in_a_half_model() -> None:
    import torch

    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return (x @ x.transpose(-1, -2)).masked_fill(~keep, torch.finfo(torch.float32).min)

    Attention().half()(torch.randn(4, 8).half(), torch.ones(4, 4).bool().tril())


@failure("H1277", author="F")
def half_tensor_filled_with_a_large_number() -> None:
    import torch

    print(torch.full((3,), 70000.0).half().fill_(1e5))


@failure("H1278", author="F")
def seed_larger_than_64_bits() -> None:
    import hashlib

    import torch

    torch.manual_seed(int(hashlib.sha256(b"run 1").hexdigest(), 16))


@failure("H1278", author="F")
def number_too_large_for_an_integer_tensor() -> None:
    import torch

    print(torch.tensor([2**63, 1]))


@failure("H1278", author="F")
def label_255_in_a_signed_byte() -> None:
    import numpy as np

    mask = np.zeros((4, 4), dtype=np.int8)
    mask[0, 0] = 255


@failure("H1278", author="F")
def token_number_too_large_for_its_type() -> None:
    import torch

    buffer = torch.zeros(4, dtype=torch.int16)
    for position, token in enumerate((12, 31000, 50256)):
        buffer.masked_fill_(torch.arange(4) == position, token)


@failure("H1279", author="F")
def learning_rate_times_integers_in_place() -> None:
    import torch

    counts = torch.arange(4)
    counts *= 0.5


@failure("H1279", author="F")
def average_kept_in_integers() -> None:
    import torch

    class Meter:
        def __init__(self) -> None:
            self.total = torch.tensor(0)

        def update(self, loss: torch.Tensor) -> None:
            self.total += loss

    meter = Meter()
    for _ in range(2):
        meter.update(torch.rand(()))


@failure("H1279", author="F")
def numpy_image_divided_in_place() -> None:
    import numpy as np

    image = np.zeros((4, 4, 3), dtype=np.uint8)
    image /= 255


@failure("H1281", author="F")
def numpy_raises_on_overflow() -> None:
    import numpy as np

    np.seterr(all="raise")
    logits = np.array([10.0, 1000.0], dtype=np.float32)
    print(np.exp(logits) / np.exp(logits).sum())


@failure("H1281", author="F")
def numpy_raises_on_division_by_zero_in_a_dataset() -> None:
    import numpy as np
    from torch.utils.data import DataLoader, Dataset

    class Standardised(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> np.ndarray:
            with np.errstate(divide="raise", invalid="raise"):
                image = np.full((4, 4), index, dtype=np.float32)
                return (image - image.mean()) / image.std()

    for _ in DataLoader(Standardised(), batch_size=2):
        pass


@failure("H1282", author="F")
def outputs_differ_after_a_conversion() -> None:
    import torch

    model = torch.nn.Linear(16, 16)
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x), model.bfloat16()(x.bfloat16()).float())


@failure("H1282", author="F")
def numpy_arrays_not_close() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    resumed, straight = rng.normal(size=5), rng.normal(size=5)
    np.testing.assert_allclose(resumed, straight, rtol=1e-6)


@failure("H1283", author="F")
def nondeterministic_operation_forbidden() -> None:
    import torch

    torch.use_deterministic_algorithms(mode=True)
    torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


@failure("H1283", author="F")
def uninitialised_resize_forbidden_in_a_module() -> None:
    import torch

    class Pool(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.max_unpool1d(*torch.nn.functional.max_pool1d(x, 2, return_indices=True), 2)

    torch.use_deterministic_algorithms(mode=True)
    Pool()(torch.randn(1, 1, 8))


@failure("H1284", author="F")
def everything_masked_before_sampling() -> None:
    import torch

    probabilities = torch.rand(4, 6)
    probabilities[2] = 0
    torch.multinomial(probabilities, 1)


@failure("H1284", author="F")
def sampler_of_classes_with_zero_weights() -> None:
    import torch
    from torch.utils.data import WeightedRandomSampler

    counts = torch.tensor([0.0, 0.0, 0.0])
    print(list(WeightedRandomSampler(counts, num_samples=4)))


@failure("H1285", author="F")
def more_negatives_than_classes() -> None:
    import torch

    torch.multinomial(torch.ones(5), num_samples=8)


@failure("H1285", author="F")
def sampler_without_replacement_over_too_few() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

    data = TensorDataset(torch.zeros(10))
    sampler = WeightedRandomSampler([1.0] * 10, num_samples=100, replacement=False)
    for _ in DataLoader(data, sampler=sampler):
        pass


@failure("H1286", author="F")
def noise_with_a_negative_deviation() -> None:
    import torch

    torch.normal(mean=torch.zeros(3), std=torch.tensor([1.0, -0.5, 1.0]))


@failure("H1286", author="F")
def keep_probability_above_one() -> None:
    import torch

    torch.zeros(4).bernoulli_(1.5)


@failure("H1286", author="F")
def bernoulli_of_logits() -> None:
    import torch

    torch.bernoulli(torch.randn(8, 8) * 5)


@failure("H1286", author="F")
def dropout_given_in_percent() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.drop = torch.nn.Dropout(dropout)

    Net(20)


@failure("H1286", author="F")
def uniform_limits_swapped() -> None:
    import torch

    torch.nn.init.uniform_(torch.nn.Linear(4, 4).weight, 0.1, -0.1)


@failure("H1287", author="F")
def quantised_model_fed_with_floats() -> None:
    import warnings

    import torch

    warnings.simplefilter("ignore")
    model = torch.ao.nn.quantized.Linear(4, 2)
    model(torch.randn(3, 4))


@failure("H1287", author="F")
def float_function_of_a_quantised_tensor() -> None:
    import warnings

    import torch

    warnings.simplefilter("ignore")
    x = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    print(torch.exp(x))


@failure("H1290", author="F")
def perplexity_of_a_diverged_loss() -> None:
    import math

    losses = [2.3, 7.1, 1200.5]
    for epoch, loss in enumerate(losses):
        print(f"epoch {epoch}: loss {loss}, perplexity {math.exp(loss):.1f}")


@failure("H1290", author="F")
def logarithm_of_a_count_of_zero() -> None:
    import math

    frequencies = {"the": 10, "of": 4, "rare": 0}
    print({word: math.log(count) for word, count in frequencies.items()})


@failure("H1291", author="F")
def progress_of_a_nan_loss() -> None:
    import torch

    loss = torch.tensor(0.0) / 0
    print("#" * int(10 * loss.item()))


@failure("H1291", author="F")
def learning_rate_of_an_infinite_loss() -> None:
    best, current = 0.5, float("inf")
    print(f"{round(current / best)} times worse")


@failure("H1291", author="F")
def nan_tensor_to_an_integer() -> None:
    import torch

    width = torch.tensor([float("nan"), 3.0]).mean()
    print(range(int(width)))


@failure("H1292", author="F", needs="sklearn")
def nan_scores_to_a_metric() -> None:
    import numpy as np
    from sklearn.metrics import roc_auc_score

    print(roc_auc_score([0, 1, 1], np.array([0.1, np.nan, 0.7])))


@failure("H1292", author="F", needs="sklearn")
def infinite_features_to_a_classifier() -> None:
    import numpy as np
    import torch
    from sklearn.linear_model import LogisticRegression

    features = torch.log(torch.zeros(6, 2)).numpy()
    LogisticRegression().fit(features, np.array([0, 1] * 3))

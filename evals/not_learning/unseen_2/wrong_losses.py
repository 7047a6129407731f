"""Faulty programs whose mistake is in the loss: its form, its inputs or its reduction."""

from __future__ import annotations

import torch
from torch import nn, optim
from torch.nn import functional

from evals.not_learning.data import (
    batches,
    blobs,
    curve,
    digit_images,
    digits,
    friedman,
    keyword_texts,
    scaled_diabetes,
    table,
)
from evals.not_learning.parts import Wired, mlp, small_cnn
from evals.not_learning.program import Programs, adam, adamw, faulty, sgd


class WrongLosses(Programs):
    """Faulty programs whose mistake is in the loss."""

    # Outputs (n, 1) minus targets (n,) broadcast to (n, n) in a hand-written loss.
    @faulty("H841", shows="H828")
    def squared_error_of_a_matrix(self) -> None:
        """The loss settles at the variance of the targets: the best answer is their mean."""
        x, y = scaled_diabetes(self.seed)[:2]
        model = mlp(10, 24, 1)
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y), 32, 400):
                loss = ((model(inputs) - target) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # Softmax is applied before the cross-entropy, which applies it again.
    @faulty("H836", shows="H828")
    def softmax_before_cross_entropy(self) -> None:
        """With ten classes the loss cannot fall below 1.46, and it falls slowly."""
        images, labels = digit_images(self.seed)[:2]
        model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10), nn.Softmax(dim=-1))
        optimizer = sgd(model, 0.05, momentum=0.9)
        criterion = nn.CrossEntropyLoss()
        with self.watch(model, optimizer):
            for inputs, target in batches((images, labels), 64, 300):
                optimizer.zero_grad()
                loss = criterion(model(inputs), target)
                loss.backward()
                optimizer.step()

    # The model ends in a sigmoid, and the loss takes its outputs for logits.
    @faulty("H838")
    def sigmoid_twice(self) -> None:
        """The loss stays near 0.5, as probabilities between 0.5 and 0.73 are all it can give."""
        x, y = table("breast_cancer", self.seed)[:2]
        model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
        optimizer = adam(model, 3e-3)
        criterion = nn.BCEWithLogitsLoss()
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y.float()), 32, 350):
                loss = criterion(model(inputs).squeeze(-1), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # NLLLoss is given raw logits instead of log-probabilities.
    @faulty("H839 H855", shows="H801 H802 H804")
    def likelihood_of_raw_logits(self) -> None:
        """The loss is negative and falls without end, while the logits grow without limit."""
        x, y = digits(self.seed)[:2]
        model = mlp(64, 64, 10)
        optimizer = sgd(model, 0.01, momentum=0.9)
        criterion = nn.NLLLoss()
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 250):
                loss = criterion(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The sign is wrong: a likelihood is minimized that should be maximized.
    @faulty("H831", shows="H801 H802 H804 H826 H828 H840")
    def likelihood_without_its_minus(self) -> None:
        """The loss falls towards minus infinity as the true classes are made impossible."""
        x, y = blobs(self.seed)
        model = mlp(20, 32, 5)
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 300):
                log_probability = model(inputs).log_softmax(dim=1)
                loss = log_probability.gather(1, labels[:, None]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The class numbers are regressed with the squared error as if they were quantities.
    @faulty("")
    def class_numbers_as_quantities(self) -> None:
        """One output for ten unordered classes; the loss falls to a few units and stays there."""
        x, y = digits(self.seed)[:2]
        recode = torch.randperm(10)
        model = mlp(64, 32, 1)
        optimizer = sgd(model, 0.003)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, recode[y]), 64, 300):
                loss = functional.mse_loss(model(inputs).squeeze(1), labels.float())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # Only the first of three terms reaches backward; a debugging line was left in.
    @faulty("H814")
    def only_one_term_of_three(self) -> None:
        """The box and size heads get no gradient and stay as initialized."""
        x = torch.randn(1500, 12)
        mixing = torch.randn(12, 4)
        label = (x[:, 0] + x[:, 1] > 0).float()
        model = nn.ModuleDict(
            {
                "trunk": mlp(12, 48, 48),
                "score": nn.Linear(48, 1),
                "box": nn.Linear(48, 2),
                "size": nn.Linear(48, 2),
            }
        )
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for _ in range(300):
                rows = torch.randint(1500, (64,))
                hidden = model["trunk"](x[rows]).relu()
                target = (x[rows] @ mixing).tanh()
                losses = {
                    "score": functional.binary_cross_entropy_with_logits(
                        model["score"](hidden).squeeze(1), label[rows]
                    ),
                    "box": functional.mse_loss(model["box"](hidden), target[:, :2]),
                    "size": functional.mse_loss(model["size"](hidden), target[:, 2:]),
                }
                loss = losses["score"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # `reshape` instead of `permute`: logits and labels of different positions are paired.
    @faulty("", shows="H828")
    def logits_reshaped_instead_of_permuted(self) -> None:
        """A map of classes is copied wrongly; the loss stops near that of guessing."""
        model = nn.Sequential(
            nn.Conv2d(4, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 4, 1),
        )
        optimizer = adam(model, 4e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                labels = torch.randint(4, (16, 8, 8))
                images = functional.one_hot(labels, 4).permute(0, 3, 1, 2).float()
                logits = model(images + 0.2 * torch.randn_like(images))
                loss = functional.cross_entropy(logits.reshape(-1, 4), labels.reshape(-1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # `kl_div` is given probabilities where it expects log-probabilities.
    @faulty("H855 H839")
    def divergence_of_probabilities(self) -> None:
        """The loss is negative from the start and falls only a little: it is no divergence."""
        x, y = blobs(self.seed, classes=4)
        soft = 0.85 * functional.one_hot(y, 4) + 0.0375
        model = mlp(20, 32, 4)
        optimizer = adamw(model, 2e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, soft), 64, 300):
                output = model(inputs).softmax(dim=1)
                loss = functional.kl_div(output, target, reduction="batchmean")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The loss is summed over the batch, but the learning rate was chosen for the mean.
    @faulty("H825", shows="H801 H802 H804 H826 H828 H848")
    def sum_over_a_large_batch(self) -> None:
        """The steps are 512 times as large as meant; the loss blows up."""
        x, y = friedman(2048)
        model = mlp(10, 64, 1)
        optimizer = sgd(model, 0.02, momentum=0.9)
        criterion = nn.MSELoss(reduction="sum")
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y), 512, 150):
                loss = criterion(model(inputs).squeeze(1), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # `ignore_index` is a real class: label 0, a third of the rows, is left out.
    @faulty("")
    def real_class_is_ignored(self) -> None:
        """The loss goes to zero, but class 0 is never predicted."""
        x, y = table("wine", self.seed)[:2]
        model = mlp(13, 24, 3)
        optimizer = adam(model, 3e-3)
        criterion = nn.CrossEntropyLoss(ignore_index=0)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 32, 250):
                loss = criterion(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.score = (model(x).argmax(dim=1) == y).float().mean().item()

    # Cosine embedding loss is given labels 0 and 1 instead of -1 and 1.
    @faulty("H855")
    def cosine_loss_with_zero_labels(self) -> None:
        """Pairs with label 0 cost nothing, so all vectors collapse and the loss vanishes."""
        x, y = blobs(self.seed, classes=6)
        model = mlp(20, 48, 8)
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for _ in range(300):
                left = torch.randint(len(x), (64,))
                right = torch.randint(len(x), (64,))
                same = (y[left] == y[right]).float()
                loss = functional.cosine_embedding_loss(model(x[left]), model(x[right]), same)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The accuracy of rounded predictions is optimized: rounding has no gradient.
    @faulty("H815", shows="H814 H828")
    def loss_of_rounded_predictions(self) -> None:
        """All gradients are exactly zero; the loss moves only with the batch."""
        x, y = table("breast_cancer", self.seed)[:2]
        model = nn.Sequential(mlp(30, 16, 1), nn.Sigmoid())
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 32, 250):
                prediction = model(inputs).squeeze(1).round()
                loss = (prediction - labels).abs().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # Class weights are upside down: the rare class counts least.
    @faulty("")
    def weights_that_favour_the_majority(self) -> None:
        """The loss looks small and the rare class, one row in fifteen, is never predicted."""
        x = torch.randn(3000, 8)
        y = (x[:, 0] + 0.7 * x[:, 1] + 0.7 * torch.randn(3000) > 2.1).long()
        share = torch.bincount(y, minlength=2) / len(y)
        model = mlp(8, 24, 2)
        optimizer = adam(model, 2e-3)
        criterion = nn.CrossEntropyLoss(weight=share)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 300):
                loss = criterion(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        rare = model(x[y == 1]).argmax(dim=1)
        self.score = rare.float().mean().item()

    # The divergence of the autoencoder weighs so much that the code carries nothing.
    @faulty("", shows="H828")
    def divergence_that_swallows_the_code(self) -> None:
        """Posterior collapse: reconstructions are the mean image, the loss soon stands still."""
        images = digits(self.seed).x
        encoder = mlp(64, 64, 16)
        decoder = mlp(8, 64, 64)
        model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
        with self.watch(model, optimizer):
            for _ in range(350):
                batch = images[torch.randint(len(images), (64,))]
                mean, log_variance = encoder(batch).chunk(2, dim=1)
                latent = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
                reconstruction = functional.mse_loss(decoder(latent), batch)
                divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(dim=1)
                loss = reconstruction + divergence.mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The padding is not masked: most positions in the tagging loss are padding.
    @faulty("")
    def padding_counts_as_a_tag(self) -> None:
        """The loss falls quickly because padding is easy; the rare real tags hardly count."""
        model = Wired(
            lambda net, texts: net.out(net.gru(net.embed(texts))[0]),
            embed=nn.Embedding(40, 16),
            gru=nn.GRU(16, 24, batch_first=True),
            out=nn.Linear(24, 4),
        )
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for _ in range(150):
                texts, _ = keyword_texts(24, length=16)
                padded = functional.pad(texts, (0, 34))
                tags = torch.where((padded > 0) & (padded < 4), padded, 0)
                loss = functional.cross_entropy(model(padded).transpose(1, 2), tags)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The root of a squared difference that is exactly zero gives NaN gradients.
    @faulty("H802", shows="H801 H804")
    def root_of_zero(self) -> None:
        """The loss is finite at first, and NaN after the first pair of identical rows."""
        x, y = curve(self.seed)
        model = mlp(8, 32, 4)
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for _ in range(150):
                left = torch.randint(1000, (48,))
                right = torch.randint(1000, (48,))
                difference = model(x[left]) - model(x[right])
                distance = difference.square().sum(dim=1).sqrt()
                target = (y[left] - y[right]).abs().squeeze(1)
                loss = functional.mse_loss(distance, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The softmax of the predictions runs over the batch instead of over the classes.
    @faulty("H842 H839", shows="H828")
    def softmax_over_the_batch(self) -> None:
        """Rows compete with each other; the loss starts at the log of the batch size."""
        images, labels = digit_images(self.seed)[:2]
        model = small_cnn(width=8)
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((images, labels), 128, 120):
                log_probability = functional.log_softmax(model(inputs), dim=0)
                loss = functional.nll_loss(log_probability, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

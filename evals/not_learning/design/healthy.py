"""Healthy programs of the set.

Neighbours of the faulty ones, which a rule could mistake for them.
"""

# ruff: noqa: D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, follow, healthy, sgd, update


class LoRALinear(nn.Module):
    """A frozen layer with a low-rank correction that starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


class MixtureOfExperts(nn.Module):
    """Four experts; the gate never chooses the last, whose weights therefore never move."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(20, 4)
        self.experts = nn.ModuleList([parts.mlp(20, 24, 5) for _ in range(4)])
        with torch.no_grad():
            self.gate.bias[3] = -10000.0

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class HealthySupervised(Programs):
    """Healthy programs that learn labels or targets by an ordinary loop.

    Classifiers, regressions, schedulers.
    """

    @healthy
    def digits_cnn_batchnorm(self) -> None:
        """Epochs over a DataLoader, momentum, step decay, and an evaluation after each epoch."""
        x, y, x_val, y_val = data.digits(self.seed)
        loader = DataLoader(TensorDataset(x.view(-1, 1, 8, 8), y), batch_size=50, shuffle=True)
        net = parts.small_cnn()
        optimizer = sgd(net, 0.05, momentum=0.9)
        scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.3)
        for _ in self.watched(range(15), net, optimizer, scheduler=scheduler):
            net.train()
            for given, target in loader:
                update(optimizer, F.cross_entropy(net(given), target))
            scheduler.step()
            net.eval()
            with torch.no_grad():
                self.watching.validated(F.cross_entropy(net(x_val.view(-1, 1, 8, 8)), y_val).item())

    @healthy
    def digits_groupnorm_small_batches(self) -> None:
        x, y, *_ = data.digits(self.seed)
        images = (x - x.mean()) / x.std()
        model = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3, bias=False),
            nn.GroupNorm(4, 16),
            nn.GELU(),
            nn.Conv2d(16, 16, 3, bias=False),
            nn.GroupNorm(4, 16),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
        opt = adamw(model, 0.002, weight_decay=0.1)
        for xb, yb in self.watched(data.batches((images, y), 4, 900), model, opt):
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
            opt.zero_grad()

    @healthy
    def regression_unscaled_targets(self) -> None:
        """Targets between 25 and 346, never scaled.

        The loss is in the thousands and that is all right.
        """
        x, y = data.diabetes()
        net = parts.mlp(10, 32, 1, act=nn.Tanh)
        for epoch in self.watched(range(60), net, adam(net, 0.05)):
            permutation = torch.randperm(len(x))
            for i in range(0, len(x), 40):
                indices = permutation[i : i + 40]
                loss = self.update(F.mse_loss(net(x[indices]), y[indices]))
            if epoch % 20 == 0:
                assert loss.item() > 0

    @healthy
    def regression_heavy_tails_huber(self) -> None:
        """One target in fifty is far off; the loss is made for that."""
        x, y = data.curve(self.seed)
        y = y + 20 * torch.randn_like(y) * (torch.rand_like(y) < 0.02)
        model = parts.mlp(8, 64, 64, 1)
        optimizer = optim.RMSprop(model.parameters(), lr=0.001)
        loss_fn = nn.SmoothL1Loss()
        self.fit(model, optimizer, data.batches((x, y), 64, 700), loss_fn)

    @healthy
    def warmup_from_zero_cosine_to_zero(self) -> None:
        x, y = data.blobs(self.seed)
        model = nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 5))
        total, warm = 600, 60
        optimizer = adamw(model, 0.003)

        def factor(step: int) -> float:
            if step < warm:
                return step / warm
            return 0.5 * (
                1 + torch.cos(torch.tensor((step - warm) / (total - warm) * torch.pi)).item()
            )

        scheduler = optim.lr_scheduler.LambdaLR(optimizer, factor)
        for xb, yb in self.watched(
            data.batches((x, y), 32, total),
            model,
            optimizer,
            scheduler=scheduler,
            total_steps=total,
        ):
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    @healthy
    def plateau_on_validation(self) -> None:
        x, y = data.curve(self.seed, samples=1500)
        x_train, y_train, x_val, y_val = x[:1200], y[:1200], x[1200:], y[1200:]
        model = parts.mlp(8, 48, 1, act=nn.ELU)
        optimizer = adam(model, 0.01)
        scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5, factor=0.5)
        for _ in self.watched(range(30), model, optimizer, scheduler=scheduler):
            model.train()
            for rows in torch.randperm(1200).split(60):
                update(optimizer, ((model(x_train[rows]) - y_train[rows]) ** 2).mean())
            model.eval()
            with torch.inference_mode():
                val_loss = ((model(x_val) - y_val) ** 2).mean().item()
            scheduler.step(val_loss)
            self.watching.validated(val_loss)

    @healthy
    def dropout_and_label_smoothing(self) -> None:
        model = nn.Sequential(
            nn.Dropout(0.2),
            nn.Linear(64, 256),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(256, 10),
        )
        criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
        optimizer = optim.NAdam(model.parameters(), lr=0.001)
        model.train()
        self.fit(model, optimizer, data.batches(data.digits(self.seed), 64, 500), criterion)

    @healthy
    def little_to_learn(self) -> None:
        """Regression with a correlation of 0.3: the loss can fall by a tenth only."""
        x = torch.randn(3000, 5)
        y = 0.3 * x[:, 0] + torch.randn(3000)
        model = nn.Linear(5, 1)
        optimizer = sgd(model, 0.02)
        stream = data.batches((x, y), 64, 600)
        self.descend(model, optimizer, stream, lambda xb, yb: F.mse_loss(model(xb)[:, 0], yb))

    @healthy
    def next_to_nothing_to_learn(self) -> None:
        """A correlation of 0.15, as of returns with their predictors.

        A fiftieth of the variance.
        """
        x = torch.randn(4000, 5)
        y = 0.15 * x[:, 0] + torch.randn(4000)
        model = nn.Linear(5, 1)
        stream = data.batches((x, y), 250, 1200)
        self.descend(model, sgd(model, 0.1), stream, lambda xb, yb: F.mse_loss(model(xb)[:, 0], yb))

    @healthy
    def noise_that_is_drawn_anew(self) -> None:
        """Each batch has noise of its own, from a generator that was seeded once.

        Each epoch has its own order.
        """
        generator = torch.Generator().manual_seed(0)
        x, y, *_ = data.digits(self.seed)
        sampler = DistributedSampler(range(len(x)), num_replicas=2, rank=0)
        loader = DataLoader(TensorDataset(x, y), batch_size=32, sampler=sampler)
        model = parts.mlp(64, 64, 10)
        for epoch in self.watched(range(20), model, adam(model, 0.001)):
            sampler.set_epoch(epoch)
            for xb, yb in loader:
                self.update(
                    F.cross_entropy(
                        model(xb + 0.3 * torch.randn(xb.shape, generator=generator)), yb
                    )
                )

    @healthy
    def logarithm_of_a_softmax_by_hand(self) -> None:
        """Over the classes, and clipped between backward and step.

        The parts of the data come in a fixed order.
        """
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        stream = data.endless(list(zip(x.split(32), y.split(32), strict=True)), 450)
        self.descend(
            model,
            sgd(model, 0.1),
            stream,
            lambda xb, yb: -(model(xb).softmax(1).gather(1, yb[:, None]) + 1e-8).log().mean(),
            clip=1.0,
        )


class HealthyTechniques(Programs):
    """Healthy programs with labels and a technique.

    Autocast, freezing, adapters, accumulation, distillation.
    """

    @healthy
    def fine_tuning_tiny_lr(self) -> None:
        """A model that is good already goes on with lr 1e-5 on slightly rotated classes."""
        x, y, x_new, y_new = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        before = adam(model, 0.01)
        for xb, yb in data.batches((x, y), 64, 200):
            update(before, F.cross_entropy(model(xb), yb))
        self.fit(model, adamw(model, 1e-05), data.batches((x_new, y_new), 16, 400), F.cross_entropy)

    @healthy
    def frozen_backbone(self) -> None:
        x, y, *_ = data.digits(self.seed)
        backbone = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten()
        )
        backbone.requires_grad_(False)
        model = nn.Sequential(backbone, nn.Linear(32 * 36, 10))
        optimizer = optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=0.001)
        self.fit(model, optimizer, data.batches((x, y), 50, 300), F.cross_entropy, frozen=["0"])

    @healthy
    def one_per_cent_on_a_trained_body(self) -> None:
        """A frozen body that another task has trained, and a small new head."""
        x, y, *_ = data.digits(self.seed)
        body = nn.Sequential(*parts.mlp(64, 128, 128, 128), nn.ReLU())
        before = nn.Sequential(body, nn.Linear(128, 5))
        optimizer = adam(before, 0.002)
        for xb, yb in data.batches((x, y % 5), 64, 200):
            update(optimizer, F.cross_entropy(before(xb), yb))
        model = nn.Sequential(body.requires_grad_(False), nn.Linear(128, 10))
        self.fit(model, adam(model[1], 0.003), data.batches((x, y), 32, 400), F.cross_entropy)

    @healthy
    def next_characters(self) -> None:
        """A language model as it should be: the targets are one character later than the inputs."""
        ids, size = data.library_text()
        model = parts.Wired(
            lambda self, x: self.head(self.rnn(self.table(x))[0]),
            table=nn.Embedding(size, 24),
            rnn=nn.GRU(24, 48, batch_first=True),
            head=nn.Linear(48, size),
        )
        for _ in self.watched(range(420), model, adam(model, 0.005)):
            x, following = data.text_windows(ids, 16, 24)
            self.update(F.cross_entropy(model(x).flatten(0, 1), following.flatten()))

    @healthy
    def lora_adapters(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        optimizer: optim.Optimizer = adam(model, 0.003)
        for xb, yb in data.batches((x, y % 5), 64, 150):
            update(optimizer, F.cross_entropy(model(xb), yb))
        model[0], model[2] = LoRALinear(model[0]), LoRALinear(model[2])
        optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.005)
        self.fit(model, optimizer, data.batches((x, y), 64, 400), F.cross_entropy)

    @healthy
    def gradient_accumulation(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 96, 10)
        optimizer = sgd(model, 0.2, momentum=0.9)
        accumulation_steps = 4
        for i, (xb, yb) in self.watched(
            enumerate(data.batches((x, y), 16, 1200)), model, optimizer
        ):
            loss = F.cross_entropy(model(xb), yb) / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    @healthy
    def multi_label_sigmoid_bce(self) -> None:
        """Probabilities into BCELoss, as the documentation shows it."""
        x = torch.randn(2000, 16)
        y = (x @ torch.randn(16, 6) > 1).float()
        model = nn.Sequential(*parts.mlp(16, 64, 6), nn.Sigmoid())
        criterion = nn.BCELoss()
        optimizer = optim.Adagrad(model.parameters(), lr=0.05)
        self.fit(model, optimizer, data.batches((x, y), 50, 600), criterion)

    @healthy
    def mixture_of_experts_one_unused(self) -> None:
        model = MixtureOfExperts()
        self.fit(
            model, adam(model, 0.003), data.batches(data.blobs(self.seed), 64, 500), F.cross_entropy
        )

    @healthy
    def gaussian_likelihood_goes_negative(self) -> None:
        x = torch.rand(1500, 1) * 4 - 2
        y = 0.1 * torch.sin(3 * x) + 0.02 * (1 + x.abs()) * torch.randn_like(x)
        model = parts.mlp(1, 64, 2, act=nn.Tanh)
        for xb, yb in self.watched(data.batches((x, y), 100, 800), model, adam(model, 0.005)):
            mean, raw = model(xb).chunk(2, dim=1)
            self.update(F.gaussian_nll_loss(mean, yb, F.softplus(raw) + 1e-06))

    @healthy
    def exponential_average_of_weights(self) -> None:
        """The averaged copy is evaluated and never trained."""
        x, y, x_val, y_val = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = sgd(model, 0.1, momentum=0.9)
        for step, (xb, yb) in self.watched(
            enumerate(data.batches((x, y), 64, 500)), model, optimizer
        ):
            update(optimizer, F.cross_entropy(model(xb), yb))
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
                if step % 100 == 99:
                    self.watching.validated(F.cross_entropy(average(x_val), y_val).item())


class HealthyUnusual(Programs):
    """An unusual loop: reinforcement, closures, manual updates, inner loops, several optimizers."""

    @healthy
    def lbfgs_closure(self) -> None:
        x, y = data.curve(self.seed, samples=300)
        model = parts.mlp(8, 32, 1, act=nn.Tanh).double()
        x, y = x.double(), y.double()
        optimizer = optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
        for _ in self.watched(range(30), model, optimizer):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    @healthy
    def manual_updates(self) -> None:
        """As in torch's first tutorial.

        The optimizer exists and is never stepped, the loop moves the weights.
        """
        model = parts.mlp(64, 32, 10)
        optimizer = sgd(model, 0.1)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 64, 600), model, optimizer):
            model.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            for p in model.parameters():
                p.data.add_(p.grad.data, alpha=-0.1)

    @healthy
    def manual_gradients_with_autograd_grad(self) -> None:
        """No backward: the gradients come from autograd.grad and are set by hand, with added
        noise.
        """
        model = nn.Linear(20, 5)
        optimizer = sgd(model, 0.1)
        for xb, yb in self.watched(data.batches(data.blobs(self.seed), 64, 500), model, optimizer):
            loss = F.cross_entropy(model(xb), yb)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient + 0.01 * torch.randn_like(gradient)
            optimizer.step()

    @healthy
    def unfreezing_step_by_step(self) -> None:
        """The head alone for some time, then one more layer joins with its own parameter group."""
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 48, 48, 10)
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        optimizer = adam(model[4], 0.003)
        for step, (xb, yb) in self.watched(
            enumerate(data.batches((x, y), 32, 600)), model, optimizer
        ):
            if step in (150, 300):
                layer = model[2] if step == 150 else model[0]
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": layer.parameters(), "lr": 0.001})
            update(optimizer, F.cross_entropy(model(xb), yb))

    @healthy
    def targets_of_a_slow_copy(self) -> None:
        """Values of states, learnt from a slow copy's value of the next state.

        The loss stays where it was.
        """
        model = parts.mlp(4, 32, 1)
        slow = copy.deepcopy(model).requires_grad_(False)
        for _ in self.watched(range(500), model, adam(model, 0.001)):
            state = torch.randn(64, 4)
            with torch.no_grad():
                target = torch.randn(64, 1) + 0.9 * slow(torch.randn(64, 4) + 0.5 * state)
            self.update(F.smooth_l1_loss(model(state), target))
            follow(slow, model, 0.01)

    @healthy
    def straight_through_quantisation(self) -> None:
        """Rounding with the gradient of the identity, as in quantised autoencoders."""
        encode = nn.Sequential(*parts.mlp(64, 48, 16), nn.Tanh())
        decode = parts.mlp(16, 48, 64)
        model = nn.Sequential(encode, decode)
        for images, _ in self.watched(
            data.batches(data.digits(self.seed), 64, 500), model, adam(model, 0.002)
        ):
            z = encode(images)
            z = z + (z.round() - z).detach()
            self.update(F.binary_cross_entropy_with_logits(decode(z), images))


class HealthyRepresentation(Programs):
    """No labels, or losses whose level means little: generative, contrastive, adversarial."""

    @healthy
    def dcgan(self) -> None:
        """As in the tutorial.

        D is cleared before its own pass only, so G's pass leaves gradients in it.
        """
        x, y, *_ = data.digits(self.seed)
        generator = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(32, 1, 4, 2, 1),
            nn.Tanh(),
        )
        critic = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4),
            nn.Flatten(0),
        )
        critic_optimizer = adam(critic, 0.001, betas=(0.5, 0.999))
        generator_optimizer = adam(generator, 0.001, betas=(0.5, 0.999))
        criterion = nn.BCEWithLogitsLoss()
        ones, zeros = torch.ones(32), torch.zeros(32)
        for real, _ in self.watched(
            data.batches((2 * x.view(-1, 1, 8, 8) - 1, y), 32, 300),
            {"G": generator, "D": critic},
            {"G": generator_optimizer, "D": critic_optimizer},
            objective="adversarial",
        ):
            critic.zero_grad()
            criterion(critic(real), ones).backward()
            fake = generator(torch.randn(32, 16, 1, 1))
            criterion(critic(fake.detach()), zeros).backward()
            critic_optimizer.step()
            generator.zero_grad()
            criterion(critic(fake), ones).backward()
            generator_optimizer.step()

    @healthy
    def contrastive_info_nce(self) -> None:
        """Two noisy views of each digit; the label of row i is i."""
        encoder = parts.mlp(64, 128, 32)
        optimizer = adam(encoder, 0.001)

        def view(images: Tensor) -> Tensor:
            return (images + 0.2 * torch.randn_like(images)) * (torch.rand_like(images) > 0.2)

        for images, _ in self.watched(
            data.batches(data.digits(self.seed), 64, 400), encoder, optimizer
        ):
            first = F.normalize(encoder(view(images)), dim=1)
            second = F.normalize(encoder(view(images)), dim=1)
            similarity = first @ second.T / 0.2
            labels = torch.arange(len(images))
            update(
                optimizer,
                (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.T, labels)) / 2,
            )

    @healthy
    def triplet(self) -> None:
        """More and more triplets are satisfied, so that batches with a loss of 0 become normal."""
        x, y, *_ = data.digits(self.seed)
        of_class = [torch.nonzero(y == c).flatten() for c in range(10)]
        net = parts.mlp(64, 64, 16)
        criterion = nn.TripletMarginLoss(margin=1.0)
        for _ in self.watched(range(500), net, adam(net, 0.001)):
            classes = torch.rand(32, 10).argsort(1)[:, :2].tolist()
            pick = [of_class[a][torch.randint(len(of_class[a]), (2,))] for a, _ in classes]
            others = torch.stack(
                [of_class[b][torch.randint(len(of_class[b]), ())] for _, b in classes]
            )
            pairs = torch.stack(pick)
            self.update(criterion(net(x[pairs[:, 0]]), net(x[pairs[:, 1]]), net(x[others])))

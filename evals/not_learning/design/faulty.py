"""Faulty programs of the set: one for each kind of fault."""

# ruff: noqa: D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, faulty, sgd, update


def small_net(inputs: int = 64, outputs: int = 10) -> nn.Sequential:
    return parts.mlp(inputs, 48, 48, outputs)


class FaultyLosses(Programs):
    """Faulty programs whose loss is fed with, or computes, something else than was meant."""

    @faulty("H836", shows="H828")
    def softmax_before_cross_entropy(self) -> None:
        model = nn.Sequential(*parts.mlp(64, 64, 10), nn.Softmax(dim=1))
        criterion = nn.CrossEntropyLoss()
        self.fit(model, sgd(model, 0.05), data.batches(data.digits(self.seed), 32, 600), criterion)

    @faulty("H837", shows="H828 H815")
    def rectified_logits(self) -> None:
        x, y, *_ = data.digits(self.seed)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc1 = nn.Linear(64, 64)
                self.fc2 = nn.Linear(64, 10)

            def forward(self, x: Tensor) -> Tensor:
                x = F.relu(self.fc1(x))
                return F.relu(self.fc2(x))

        net = Net()
        self.fit(net, sgd(net, 0.3, momentum=0.9), data.batches((x, y), 32, 500), F.cross_entropy)

    @faulty("H838", shows="H828")
    def sigmoid_before_bce_with_logits(self) -> None:
        x = torch.randn(3000, 12)
        y = (x[:, :1] + x[:, 1:2] > 1.8).float()
        model = nn.Sequential(*parts.mlp(12, 32, 1), nn.Sigmoid())
        criterion = nn.BCEWithLogitsLoss()
        self.fit(model, adam(model, 0.003), data.batches((x, y), 50, 500), criterion)

    @faulty("H839 H855", shows="H801 H802 H804 H826 H840 H848 H825")
    def logits_into_nll_loss(self) -> None:
        """The loss falls without end, and the model learns to make its outputs large."""
        model = parts.mlp(20, 32, 5)
        criterion = nn.NLLLoss()
        self.fit(model, adam(model, 0.01), data.batches(data.blobs(self.seed), 32, 500), criterion)

    @faulty("H842", shows="H828")
    def softmax_over_the_batch(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = nn.Sequential(*parts.mlp(64, 64, 10), nn.LogSoftmax(dim=0))
        criterion = nn.NLLLoss()
        self.fit(model, sgd(model, 0.1, momentum=0.9), data.batches((x, y), 48, 500), criterion)

    @faulty("H842", shows="H828")
    def softmax_over_the_batch_by_hand(self) -> None:
        """The probabilities of a class sum to 1 over the samples.

        A small number keeps the logarithm finite.
        """
        model = parts.mlp(64, 64, 10)
        stream = data.batches(data.digits(self.seed), 48, 500)
        self.fit(
            model,
            adam(model, 0.002),
            stream,
            lambda z, y: -(z.softmax(0).gather(1, y[:, None]) + 1e-8).log().mean(),
        )

    @faulty("H841", shows="H828")
    def broadcast_in_mse(self) -> None:
        """Predictions (n, 1) against targets (n,).

        Every prediction is drawn to the mean of the batch.
        """
        x, y = data.curve(self.seed)
        model = parts.mlp(8, 64, 1)
        criterion = nn.MSELoss()
        self.fit(model, adam(model, 0.01), data.batches((x, y[:, 0]), 32, 500), criterion)

    @faulty("H840 H831", shows="H801 H802 H804 H826 H828 H825 H848")
    def negated_mse(self) -> None:
        x, y = data.curve(self.seed)
        model = parts.mlp(8, 32, 1, act=nn.Tanh)
        stream = data.batches((x, y), 50, 400)
        self.descend(model, adam(model, 0.01), stream, lambda xb, yb: -F.mse_loss(model(xb), yb))

    @faulty("H831", shows="H801 H802 H804 H826 H828 H825 H848")
    def maximised_by_the_optimizer(self) -> None:
        model = parts.mlp(20, 32, 5)
        optimizer = adam(model, 0.003, maximize=True)
        self.fit(model, optimizer, data.batches(data.blobs(self.seed), 32, 400), F.cross_entropy)

    @faulty("", shows="H828")
    def batch_and_time_scrambled(self) -> None:
        """``view`` was used where ``transpose`` was meant, so that each row holds pieces of many
        samples.
        """
        rnn, head = nn.GRU(3, 32), nn.Linear(32, 2)
        model = nn.ModuleDict({"rnn": rnn, "head": head})
        for _ in self.watched(range(350), model, adam(model, 0.003)):
            sequences = torch.randn(40, 10, 3)
            labels = (sequences[:, :, 0].sum(1) > 0).long()
            _, last = rnn(sequences.view(10, 40, 3))
            self.update(F.cross_entropy(head(last[0]), labels))


class FaultyData(Programs):
    """Data, targets, modes or batches are wrong, although model, loss and optimizer are right."""

    @faulty("", shows="H828")
    def inputs_shuffled_without_targets(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 48, 10)
        for _epoch in self.watched(range(12), model, adam(model, 0.001)):
            x = x[torch.randperm(len(x))]
            for i in range(0, 1400, 40):
                self.update(F.cross_entropy(model(x[i : i + 40]), y[i : i + 40]))

    @faulty("H833", shows="H828")
    def targets_shifted_by_one_row(self) -> None:
        """A header line was dropped from one of two files.

        The net learns rows by heart, and validation says so.
        """
        x, y = data.curve(self.seed, samples=400, features=16)
        y = y.roll(1, dims=0)
        model = parts.mlp(16, 128, 1)
        for _ in self.watched(range(60), model, adam(model, 0.003)):
            for rows in torch.randperm(300).split(30):
                self.update(F.mse_loss(model(x[rows]), y[rows]))
            with torch.no_grad():
                self.watching.validated(F.mse_loss(model(x[300:]), y[300:]).item())

    @faulty("", shows="H828")
    def constant_input(self) -> None:
        """Whole numbers divided by whole numbers: all pixels are 0."""
        x, y, *_ = data.digits(self.seed)
        pixels = (x * 255).long()
        model = parts.mlp(64, 64, 10)
        optimizer = adam(model, 0.001)
        self.fit(
            model, optimizer, data.batches(((pixels // 256).float(), y), 32, 400), F.cross_entropy
        )

    @faulty("H843", shows="H801 H802 H804 H826 H828")
    def sorted_labels(self) -> None:
        """One folder for each class, read in order, shuffle=False."""
        x, y, *_ = data.digits(self.seed)
        order = y.argsort()
        loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=20)
        model = parts.mlp(64, 64, 10)
        for _ in self.watched(range(8), model, sgd(model, 0.1, momentum=0.9)):
            for xb, yb in loader:
                self.update(F.cross_entropy(model(xb), yb))

    @faulty("H856", shows="H801 H802 H804 H826 H828 H825 H848 H815")
    def input_in_the_ten_thousands(self) -> None:
        """Incomes and years beside rates: one column is ten thousand times the others."""
        x, y = data.curve(self.seed)
        x = x * torch.tensor([1.0, 1, 1, 1, 10000.0, 1, 1, 1]) + torch.tensor(
            [0.0, 0, 0, 0, 30000.0, 0, 0, 0]
        )
        model = parts.mlp(8, 32, 1)
        self.fit(model, sgd(model, 0.01), data.batches((x, y), 32, 400), F.mse_loss)

    @faulty("H806", shows="H801 H802 H804")
    def one_sample_is_not_a_number(self) -> None:
        x, y = data.curve(self.seed)
        x[567, 3] = float("nan")
        model = parts.mlp(8, 32, 1)
        self.fit(model, adam(model, 0.003), data.batches((x, y), 20, 400), F.mse_loss)

    @faulty("", shows="H801 H802 H804 H826 H828 H825 H848")
    def outlier_targets(self) -> None:
        """A missing value is written as -99999 in four rows of a thousand."""
        x, y = data.curve(self.seed)
        y[torch.randperm(len(y))[:4]] = -99999.0
        model = parts.mlp(8, 64, 1)
        self.fit(model, adam(model, 0.01), data.batches((x, y), 25, 600), F.mse_loss)

    @faulty("H834")
    def evaluated_in_training_mode(self) -> None:
        """Nobody calls eval(): the validation loss is that of a net of which most is dropped."""
        x, y, x_val, y_val = data.digits(self.seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.8), nn.Linear(128, 10))
        for _ in self.watched(range(15), model, adam(model, 0.002)):
            for rows in torch.randperm(1400).split(50):
                self.update(F.cross_entropy(model(x[rows]), y[rows]))
            with torch.no_grad():
                self.watching.validated(F.cross_entropy(model(x_val), y_val).item())


class FaultyWiring(Programs):
    """Faulty programs in which gradients, parameters and optimizer are not joined as they should
    be.
    """

    @faulty("H811", shows="H801 H802 H804 H826 H828 H825 H848")
    def forgotten_zero_grad(self) -> None:
        model = small_net()
        optimizer = sgd(model, 0.05, momentum=0.9)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 32, 400), model, optimizer):
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()

    @faulty("H812", shows="H828")
    def no_step(self) -> None:
        model = small_net()
        optimizer = adam(model, 0.001)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 32, 400), model, optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()

    @faulty("H809 H808", shows="H828 H811 H813")
    def optimizer_of_another_copy(self) -> None:
        """The optimizer was made before the model was copied to its place."""
        model = small_net()
        optimizer = adam(model, 0.001)
        model = copy.deepcopy(model)
        self.fit(model, optimizer, data.batches(data.digits(self.seed), 32, 400), F.cross_entropy)

    @faulty("H810 H808", shows="H828 H813")
    def only_frozen_parameters_are_optimised(self) -> None:
        x, y, *_ = data.digits(self.seed)
        backbone = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        head = nn.Linear(64, 10)
        backbone.requires_grad_(False)
        model = nn.Sequential(backbone, head)
        self.fit(
            model, sgd(backbone, 0.1, momentum=0.9), data.batches((x, y), 32, 300), F.cross_entropy
        )

    @faulty("H808", shows="H828")
    def only_the_head_in_the_optimizer(self) -> None:
        net = parts.Wired(
            lambda self, x: self.head(self.body(x)),
            body=nn.Sequential(*parts.mlp(2, 48, 48, act=nn.Tanh), nn.Tanh()),
            head=nn.Linear(48, 2),
        )
        self.fit(
            net,
            adam(net.head, 0.01),
            data.batches(data.spirals(self.seed), 64, 400),
            F.cross_entropy,
        )

    @faulty("H808", shows="H828")
    def only_the_body_in_the_optimizer(self) -> None:
        """The new head is made after the list of parameters, and stays as it was drawn."""
        net = parts.Wired(
            lambda self, x: self.head(self.body(x)),
            body=parts.mlp(64, 64, 64),
            head=nn.Linear(64, 10),
        )
        self.fit(
            net,
            adam(net.body, 0.002),
            data.batches(data.digits(self.seed), 64, 400),
            F.cross_entropy,
        )

    @faulty("H859", shows="H825 H826 H828")
    def clipped_before_backward(self) -> None:
        model = small_net()
        optimizer = sgd(model, 0.1)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 32, 400), model, optimizer):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loss.backward()
            optimizer.step()

    @faulty("H814", shows="H828")
    def features_through_numpy(self) -> None:
        """The bottleneck goes through numpy, so that everything before it stays as it was drawn."""
        encoder = parts.mlp(64, 32, 2)
        decoder = parts.mlp(2, 32, 10)
        model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        for xb, yb in self.watched(
            data.batches(data.digits(self.seed), 32, 500), model, adam(model, 0.001)
        ):
            code = torch.from_numpy(encoder(xb).detach().numpy())
            self.update(F.cross_entropy(decoder(code), yb))

    @faulty("H815", shows="H828 H813 H814")
    def rounded_predictions(self) -> None:
        """Ratings are whole numbers, so the predictions were rounded before the loss."""
        x, y = data.curve(self.seed)
        y = (2 * y + 5).round()
        model = parts.mlp(8, 32, 1)
        optimizer = adam(model, 0.01)
        stream = data.batches((x, y), 32, 400)
        self.descend(model, optimizer, stream, lambda xb, yb: F.mse_loss(model(xb).round(), yb))

    @faulty("H813", shows="H828 H814")
    def forgotten_backward(self) -> None:
        model = small_net(20, 5)
        optimizer = sgd(model, 0.1)
        losses = []
        for xb, yb in self.watched(data.batches(data.blobs(self.seed), 32, 400), model, optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            losses.append(loss.item())
            optimizer.step()

    @faulty("H817 H815", shows="H828")
    def clipped_to_zero(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = small_net()
        self.fit(
            model, adam(model, 0.001), data.batches((x, y), 32, 400), F.cross_entropy, clip=0.0
        )

    @faulty("", shows="H828 H824")
    def clipped_to_a_millionth(self) -> None:
        model = small_net()
        optimizer = sgd(model, 0.1, momentum=0.9)
        self.fit(
            model,
            optimizer,
            data.batches(data.digits(self.seed), 32, 500),
            F.cross_entropy,
            clip=1e-06,
        )

    @faulty("H814", shows="H828")
    def output_ignores_input(self) -> None:
        """The features are computed, and the head is given something else."""
        x, y, *_ = data.digits(self.seed)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.features = nn.Linear(64, 32)
                self.token = nn.Parameter(torch.randn(1, 32))
                self.head = nn.Linear(32, 10)

            def forward(self, x: Tensor) -> Tensor:
                hidden = torch.relu(self.features(x))
                hidden = self.token.expand(len(x), -1)
                return self.head(hidden)

        net = Net()
        self.fit(net, adam(net, 0.001), data.batches((x, y), 64, 400), F.cross_entropy)


class FaultyRates(Programs):
    """Faulty programs with wrong rates, schedules, initial weights or widths of numbers."""

    @faulty("H825", shows="H801 H802 H804 H826 H828 H848 H815")
    def rate_of_ten(self) -> None:
        model = parts.mlp(64, 64, 64, 10)
        self.fit(
            model, sgd(model, 10), data.batches(data.digits(self.seed), 32, 400), F.cross_entropy
        )

    @faulty("H824", shows="H828")
    def rate_of_a_billionth(self) -> None:
        model = parts.mlp(64, 64, 10)
        self.fit(
            model,
            adam(model, 1e-09),
            data.batches(data.digits(self.seed), 32, 500),
            F.cross_entropy,
        )

    @faulty("H819", shows="H828 H824")
    def schedule_ends_early(self) -> None:
        """The schedule was made for 60 steps, the run has 800."""
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        optimizer = sgd(model, 0.05)
        scheduler = optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0, end_factor=0.0, total_iters=60
        )
        stream = data.batches((x, y), 32, 800)
        self.fit(model, optimizer, stream, F.cross_entropy, scheduler=scheduler, total_steps=800)

    @faulty("H819 H820", shows="H828 H824")
    def step_decay_by_batch_instead_of_epoch(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        optimizer = sgd(model, 0.1)
        scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)
        self.fit(
            model, optimizer, data.epochs((x, y), 40, 15), F.cross_entropy, scheduler=scheduler
        )

    @faulty("H854", shows="H828 H819 H820 H824")
    def plateau_fed_with_batch_losses(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        optimizer = sgd(model, 0.05)
        scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        for xb, yb in self.watched(
            data.batches((x, y), 16, 800), model, optimizer, scheduler=scheduler
        ):
            loss = update(optimizer, F.cross_entropy(model(xb), yb))
            scheduler.step(loss.item())

    @faulty("H822", shows="H828 H814 H815")
    def all_zero_init(self) -> None:
        model = parts.mlp(64, 64, 10)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        self.fit(
            model,
            adam(model, 0.001),
            data.batches(data.digits(self.seed), 32, 400),
            F.cross_entropy,
        )

    @faulty("H848", shows="H828")
    def deep_sigmoid_net(self) -> None:
        x, y, *_ = data.digits(self.seed)
        layers: list[nn.Module] = [nn.Linear(64, 32), nn.Sigmoid()]
        for _ in range(6):
            layers += [nn.Linear(32, 32), nn.Sigmoid()]
        model = nn.Sequential(*layers, nn.Linear(32, 10))
        self.fit(
            model, sgd(model, 0.1, momentum=0.9), data.batches((x, y), 32, 500), F.cross_entropy
        )

    @faulty("", shows="H828 H814 H815 H848")
    def dead_relu(self) -> None:
        model = parts.mlp(64, 64, 64, 10)
        for layer in (model[0], model[2]):
            nn.init.constant_(layer.bias, -10.0)
        self.fit(
            model, sgd(model, 0.1), data.batches(data.digits(self.seed), 32, 400), F.cross_entropy
        )

    @faulty("H858", shows="H828 H848")
    def weight_decay_of_ten(self) -> None:
        """Taken for a rate: each step takes a tenth of the weights away."""
        model = parts.mlp(64, 64, 64, 10)
        optimizer = adamw(model, 0.01, weight_decay=10.0)
        self.fit(model, optimizer, data.batches(data.digits(self.seed), 32, 400), F.cross_entropy)

    @faulty("", shows="H828 H848")
    def dropout_of_095_everywhere(self) -> None:
        model = nn.Sequential(
            nn.Dropout(0.95),
            nn.Linear(8, 32),
            nn.ReLU(),
            nn.Dropout(0.95),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Dropout(0.95),
            nn.Linear(32, 1),
        )
        optimizer = adam(model, 0.001)
        model.train()
        self.fit(model, optimizer, data.batches(data.curve(self.seed), 50, 500), F.mse_loss)

    @faulty("H802", shows="H801 H804")
    def root_of_zero_backwards(self) -> None:
        """The loss is finite; the slope of the distance of a vector to itself is not."""
        net = parts.mlp(64, 32, 8)
        for xb, yb in self.watched(
            data.batches(data.digits(self.seed), 16, 200), net, adam(net, 0.001)
        ):
            z = net(xb)
            distance = (z[:, None] - z[None]).pow(2).sum(-1).sqrt()
            same = (yb[:, None] == yb[None]).float()
            self.update((same * distance + (1 - same) * F.relu(2 - distance)).mean())

    @faulty("H801", shows="H802 H804 H825")
    def logarithm_of_zero(self) -> None:
        """Probabilities are formed first and logarithms after, and soon one of them is exactly
        0.
        """
        model = parts.mlp(20, 64, 5)
        for xb, yb in self.watched(
            data.batches(data.blobs(self.seed), 64, 300), model, adam(model, 0.1)
        ):
            probability = torch.softmax(model(xb), dim=1)
            self.update(-(F.one_hot(yb, 5) * torch.log(probability)).sum(1).mean())

    @faulty("H853", shows="H824 H848 H828")
    def discriminator_wins(self) -> None:
        """The minimax form of the loss and a far faster discriminator.

        Nothing comes back to the generator.
        """
        x, y, *_ = data.digits(self.seed)
        generator = nn.Sequential(*parts.mlp(8, 32, 64), nn.Sigmoid())
        discriminator = nn.Sequential(*parts.mlp(64, 128, 1), nn.Flatten(0))
        optimizer_g = sgd(generator, 0.01)
        optimizer_d = adam(discriminator, 0.01)
        models = {"generator": generator, "discriminator": discriminator}
        for real, _ in self.watched(
            data.batches((x, y), 32, 600),
            models,
            {"generator": optimizer_g, "discriminator": optimizer_d},
            objective="adversarial",
        ):
            fake = generator(torch.randn(32, 8))
            update(
                optimizer_d,
                F.softplus(-discriminator(real)).mean()
                + F.softplus(discriminator(fake.detach())).mean(),
            )
            update(optimizer_g, (-F.softplus(discriminator(fake))).mean())

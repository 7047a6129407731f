"""Faulty programs of the set: losses, data."""

# ruff: noqa: D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, faulty, sgd, update


class FaultyLosses(Programs):
    """Faulty programs whose loss is fed with, or computes, something else than was meant."""

    @faulty("H836", shows="H828 H832")
    def softmax_before_cross_entropy(self) -> None:
        model = nn.Sequential(*parts.mlp(64, 64, 10), nn.Softmax(dim=1))
        criterion = nn.CrossEntropyLoss()
        self.fit(model, sgd(model, 0.05), data.batches(data.digits(self.seed), 32, 600), criterion)

    @faulty("H836", shows="H828 H832")
    def softmax_twice_in_a_language_model(self) -> None:
        ids, characters = data.text()
        embed, rnn, head = nn.Embedding(characters, 24), nn.GRU(24, 48, batch_first=True), nn.Linear(48, characters)
        model = nn.ModuleDict({"embed": embed, "rnn": rnn, "head": head})
        for _ in self.watched(range(300), model, adam(model, 0.001)):
            x, y = data.windows(ids, 16, 16)
            probabilities = F.softmax(head(rnn(embed(x))[0]), dim=-1)
            self.update(F.cross_entropy(probabilities.view(-1, characters), y.reshape(-1)))

    @faulty("H837", shows="H823 H828 H832 H847 H815")
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

    @faulty("H838", shows="H828 H832")
    def sigmoid_before_bce_with_logits(self) -> None:
        x = torch.randn(3000, 12)
        y = (x[:, :1] + x[:, 1:2] > 1.8).float()
        model = nn.Sequential(*parts.mlp(12, 32, 1), nn.Sigmoid())
        criterion = nn.BCEWithLogitsLoss()
        self.fit(model, adam(model, 0.003), data.batches((x, y), 50, 500), criterion)

    @faulty("H839 H855", shows="H801 H802 H804 H826 H827 H840 H848 H825")
    def logits_into_nll_loss(self) -> None:
        """The loss falls without end, and the model learns to make its outputs large."""
        model = parts.mlp(20, 32, 5)
        criterion = nn.NLLLoss()
        self.fit(model, adam(model, 0.01), data.batches(data.blobs(self.seed), 32, 500), criterion)

    @faulty("H855", shows="H823 H828 H832 H815 H801 H802 H804")
    def clamped_logits_into_bce(self) -> None:
        """BCELoss complained of values outside [0, 1], so they were clamped."""
        x = torch.randn(3000, 10)
        y = (x[:, 0] * x[:, 1] > 0).float()
        model = nn.Sequential(*parts.mlp(10, 64, 1), nn.Flatten(0))
        nn.init.normal_(model[2].weight, std=1.0)
        for xb, yb in self.watched(data.batches((x, y), 50, 500), model, adam(model, 0.001)):
            out = model(xb).clamp(0, 1)
            self.update(F.binary_cross_entropy(out, yb))

    @faulty("H801 H855", shows="H802 H804")
    def hand_written_bce_on_logits(self) -> None:
        x, y = data.blobs(self.seed, classes=2)
        model = nn.Sequential(*parts.mlp(20, 32, 1), nn.Flatten(0))
        for xb, yb in self.watched(data.batches((x, y.float()), 32, 200), model, sgd(model, 0.01)):
            p = model(xb)
            self.update(-(yb * p.log() + (1 - yb) * (1 - p).log()).mean())

    @faulty("H855 H839", shows="H828 H832 H840")
    def probabilities_into_kl_div(self) -> None:
        """The logarithm is missing on the side of the student."""
        x, y = data.blobs(self.seed, classes=8)
        soft = F.softmax(3 * F.one_hot(y, 8).float(), dim=1)
        model = nn.Sequential(*parts.mlp(20, 32, 8), nn.Softmax(dim=-1))
        criterion = nn.KLDivLoss(reduction="batchmean")
        self.fit(model, sgd(model, 0.02), data.batches((x, soft), 32, 500), criterion)

    @faulty("H842", shows="H828 H832")
    def softmax_over_the_batch(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = nn.Sequential(*parts.mlp(64, 64, 10), nn.LogSoftmax(dim=0))
        criterion = nn.NLLLoss()
        self.fit(model, sgd(model, 0.1, momentum=0.9), data.batches((x, y), 48, 500), criterion)

    @faulty("H841", shows="H828 H832")
    def broadcast_in_mse(self) -> None:
        """Predictions (n, 1) against targets (n,): every prediction is drawn to the mean of the batch."""
        x, y = data.curve(self.seed)
        model = parts.mlp(8, 64, 1)
        criterion = nn.MSELoss()
        self.fit(model, adam(model, 0.01), data.batches((x, y[:, 0]), 32, 500), criterion)

    @faulty("H841", shows="H828 H832")
    def broadcast_written_by_hand(self) -> None:
        x, y = data.curve(self.seed)
        model = parts.mlp(8, 32, 1, act=nn.Tanh)
        optimizer = sgd(model, 0.1, momentum=0.9)
        stream = data.batches((x, y.squeeze(1)), 50, 500)
        self.descend(model, optimizer, stream, lambda xb, yb: ((model(xb) - yb) ** 2).mean())

    @faulty("H840 H831", shows="H801 H802 H804 H826 H827 H828 H832 H825 H848")
    def negated_mse(self) -> None:
        x, y = data.curve(self.seed)
        model = parts.mlp(8, 32, 1, act=nn.Tanh)
        stream = data.batches((x, y), 50, 400)
        self.descend(model, adam(model, 0.01), stream, lambda xb, yb: -F.mse_loss(model(xb), yb))

    @faulty("H840 H831", shows="H801 H802 H804 H826 H827 H828 H832 H825 H848 H847")
    def negated_cross_entropy(self) -> None:
        """log_softmax was believed to be negative already after nll_loss."""
        model = parts.mlp(64, 64, 10)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 32, 400), model, sgd(model, 0.01)):
            self.update(-F.nll_loss(F.log_softmax(model(xb), dim=-1), yb))

    @faulty("H831", shows="H801 H802 H804 H826 H827 H828 H832 H825 H848 H847")
    def maximised_by_the_optimizer(self) -> None:
        model = parts.mlp(20, 32, 5)
        optimizer = adam(model, 0.003, maximize=True)
        self.fit(model, optimizer, data.batches(data.blobs(self.seed), 32, 400), F.cross_entropy)

    @faulty("H831", shows="H801 H802 H804 H826 H827 H828 H832 H825 H848")
    def manual_update_with_the_wrong_sign(self) -> None:
        model = parts.mlp(8, 32, 1, act=nn.Tanh)
        optimizer = sgd(model, 0.02)
        for xb, yb in self.watched(data.batches(data.curve(self.seed), 50, 400), model, optimizer):
            loss = F.mse_loss(model(xb), yb)
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.grad = -gradient
            optimizer.step()

    @faulty("H830", shows="H828 H832")
    def batch_and_time_scrambled(self) -> None:
        """``view`` was used where ``transpose`` was meant, so that each row holds pieces of many samples."""
        rnn, head = nn.GRU(3, 32), nn.Linear(32, 2)
        model = nn.ModuleDict({"rnn": rnn, "head": head})
        for _ in self.watched(range(350), model, adam(model, 0.003)):
            sequences = torch.randn(40, 10, 3)
            labels = (sequences[:, :, 0].sum(1) > 0).long()
            _, last = rnn(sequences.view(10, 40, 3))
            self.update(F.cross_entropy(head(last[0]), labels))


class FewLoud(Dataset):
    """Thirty samples of many features with noisy labels."""

    def __init__(self, seed: int, samples: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, 50, generator=generator)
        noise = 2 * torch.randn(samples, generator=generator)
        self.y = (self.x[:, 0] + self.x[:, 1] + noise > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return (self.x[row], self.y[row])


class FaultyData(Programs):
    """Data, targets, modes or batches are wrong, although model, loss and optimizer are right."""

    @faulty("", shows="H828 H832")
    def inputs_shuffled_without_targets(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 48, 10)
        for _epoch in self.watched(range(12), model, adam(model, 0.001)):
            x = x[torch.randperm(len(x))]
            for i in range(0, 1400, 40):
                self.update(F.cross_entropy(model(x[i : i + 40]), y[i : i + 40]))

    @faulty("H833", shows="H828 H832")
    def targets_shifted_by_one_row(self) -> None:
        """A header line was dropped from one of two files; the net learns rows by heart, and validation says so."""
        x, y = data.curve(self.seed, samples=400, features=16)
        y = y.roll(1, dims=0)
        model = parts.mlp(16, 128, 1)
        for _ in self.watched(range(60), model, adam(model, 0.003)):
            for rows in torch.randperm(300).split(30):
                self.update(F.mse_loss(model(x[rows]), y[rows]))
            with torch.no_grad():
                self.watching.validated(F.mse_loss(model(x[300:]), y[300:]).item())

    @faulty("H844", shows="H828 H832 H830")
    def constant_input(self) -> None:
        """Whole numbers divided by whole numbers: all pixels are 0."""
        x, y, *_ = data.digits(self.seed)
        pixels = (x * 255).long()
        model = parts.mlp(64, 64, 10)
        optimizer = adam(model, 0.001)
        self.fit(model, optimizer, data.batches(((pixels // 256).float(), y), 32, 400), F.cross_entropy)

    @faulty("H844", shows="H815")
    def single_label(self) -> None:
        """The labels were read from the wrong column: the loss is wonderful and nothing is learnt."""
        x, y = data.blobs(self.seed)
        table = torch.cat([x, torch.zeros(len(x), 1), y[:, None]], dim=1)
        inputs, labels = table[:, :20], table[:, 20].long()
        model = parts.mlp(20, 32, 5)
        self.fit(model, sgd(model, 0.05), data.batches((inputs, labels), 32, 400), F.cross_entropy)

    @faulty("H843", shows="H801 H802 H804 H826 H827 H828 H832 H844 H847")
    def sorted_labels(self) -> None:
        """One folder for each class, read in order, shuffle=False."""
        x, y, *_ = data.digits(self.seed)
        order = y.argsort()
        loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=20)
        model = parts.mlp(64, 64, 10)
        for _ in self.watched(range(8), model, sgd(model, 0.1, momentum=0.9)):
            for xb, yb in loader:
                self.update(F.cross_entropy(model(xb), yb))

    @faulty("H845", shows="H833")
    def same_batch_again_and_again(self) -> None:
        """``next(iter(loader))`` begins the loader anew each time, and it does not shuffle."""
        x, y, x_val, y_val = data.digits(self.seed)
        loader = DataLoader(TensorDataset(x, y), batch_size=32)
        model = parts.mlp(64, 64, 10)
        for step in self.watched(range(500), model, adam(model, 0.003)):
            xb, yb = next(iter(loader))
            self.update(F.cross_entropy(model(xb), yb))
            if step % 50 == 49:
                with torch.no_grad():
                    self.watching.validated(F.cross_entropy(model(x_val), y_val).item())

    @faulty("H856", shows="H801 H802 H804 H826 H827 H823 H828 H832 H825 H847 H848 H815")
    def input_in_the_ten_thousands(self) -> None:
        """Incomes and years beside rates: one column is ten thousand times the others."""
        x, y = data.curve(self.seed)
        x = x * torch.tensor([1.0, 1, 1, 1, 10000.0, 1, 1, 1]) + torch.tensor([0.0, 0, 0, 0, 30000.0, 0, 0, 0])
        model = parts.mlp(8, 32, 1)
        self.fit(model, sgd(model, 0.01), data.batches((x, y), 32, 400), F.mse_loss)

    @faulty("H856 H848", shows="H828 H832 H847")
    def pixels_up_to_255_into_tanh(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 32, 32, 10, act=nn.Tanh)
        self.fit(model, sgd(model, 0.1), data.batches((255 * x, y), 32, 500), F.cross_entropy)

    @faulty("H806", shows="H801 H802 H804")
    def one_sample_is_not_a_number(self) -> None:
        x, y = data.curve(self.seed)
        x[567, 3] = float("nan")
        model = parts.mlp(8, 32, 1)
        self.fit(model, adam(model, 0.003), data.batches((x, y), 20, 400), F.mse_loss)

    @faulty("H807", shows="H801 H802 H804 H826 H827 H828 H832 H825 H847 H848")
    def outlier_targets(self) -> None:
        """A missing value is written as -99999 in four rows of a thousand."""
        x, y = data.curve(self.seed)
        y[torch.randperm(len(y))[:4]] = -99999.0
        model = parts.mlp(8, 64, 1)
        self.fit(model, adam(model, 0.01), data.batches((x, y), 25, 600), F.mse_loss)

    @faulty("H833")
    def overfits_few_samples(self) -> None:
        train, validation = (
            DataLoader(FewLoud(self.seed, 60), batch_size=20, shuffle=True),
            FewLoud(self.seed + 100, 300),
        )
        model = parts.mlp(50, 128, 128, 2)
        for _ in self.watched(range(100), model, adam(model, 0.001)):
            model.train()
            for xb, yb in train:
                self.update(F.cross_entropy(model(xb), yb))
            model.eval()
            with torch.no_grad():
                self.watching.validated(F.cross_entropy(model(validation.x), validation.y).item())

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

    @faulty("H834", shows="H801 H802 H804 H826 H827 H828 H832 H833 H825 H847 H848")
    def never_back_in_training_mode(self) -> None:
        """eval() before the first epoch and no train() after: the batch statistics are never measured."""
        x, y, x_val, y_val = data.digits(self.seed)
        layers: list[nn.Module] = [nn.Linear(64, 48)]
        for _ in range(6):
            layers += [nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48)]
        model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(48, 10))
        optimizer = sgd(model, 0.05)
        model.eval()
        for _ in self.watched(range(10), model, optimizer):
            for rows in torch.randperm(1400).split(35):
                update(optimizer, F.cross_entropy(model(x[rows]), y[rows]))
            model.eval()
            with torch.no_grad():
                self.watching.validated(F.cross_entropy(model(x_val), y_val).item())

    @faulty("H835", shows="H828 H832 H827")
    def batch_norm_with_two_samples(self) -> None:
        model = nn.Sequential(
            nn.Linear(8, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )
        self.fit(model, adam(model, 0.001), data.batches(data.curve(self.seed), 2, 900), F.mse_loss)

    @faulty("", shows="H828 H832 H856")
    def augmentation_destroys_the_signal(self) -> None:
        """The jitter was meant for pixels up to 255; these go up to 1."""
        model = parts.mlp(64, 48, 10)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 32, 500), model, adam(model, 0.001)):
            jittered = xb + 25 * torch.randn_like(xb)
            self.update(F.cross_entropy(model(jittered), yb))

"""Faulty programs in which no gradient or no update reaches the weights: cut graphs, wrong parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import digits, ratings, table
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.program import Watch


def head_replaced_after_the_optimizer(watch: Watch, seed: int) -> float:
    """Fine-tuning: the optimizer is made, and then the last layer is replaced by one for the new classes."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 24), nn.ReLU(), nn.Linear(24, 5)
    )
    pretrain = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        i = torch.randint(len(x), (32,))
        pretrain.zero_grad()
        F.cross_entropy(model(x[i]), y[i] // 2).backward()
        pretrain.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for p in model[:5].parameters():
        p.requires_grad = False
    model[5] = nn.Linear(24, 10)
    # fine-tune
    with watch(model, optimizer):
        for _ in range(300):
            i = torch.randint(len(x), (32,))
            loss = F.cross_entropy(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return error_score(model(held_x), held_y)


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU())
        for p in self.features.parameters():
            p.requires_grad = False
        self.fc = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.features(x))


def optimizer_holds_the_frozen_part(watch: Watch, seed: int) -> float:
    """A frozen backbone with a new head, and the optimizer is given the backbone."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    net = _Backbone()
    opt = torch.optim.Adam(net.features.parameters(), lr=1e-3)
    with watch(net, opt, frozen=("features",)):
        for _ in range(10):
            for i in torch.randperm(len(x)).split(64):
                opt.zero_grad()
                F.cross_entropy(net(x[i]), y[i]).backward()
                opt.step()
    return error_score(net(held_x), held_y)


class _Waves(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = [nn.Linear(1 if k == 0 else 24, 24) for k in range(depth)]
        self.last = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def layers_in_a_python_list(watch: Watch, seed: int) -> float:
    """Layers kept in a plain list: parameters() does not see them, only the last layer learns."""
    torch.manual_seed(seed)
    x = torch.rand(500, 1) * 6 - 3
    y = (3 * x).sin()
    model = _Waves()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(900):
            i = torch.randint(500, (64,))
            loss = F.mse_loss(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return squared_score(model(x), y)


class _SoundNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 4, 9, stride=2), nn.ReLU(), nn.Conv1d(4, 4, 9, stride=2), nn.ReLU())
        self.rnn = nn.GRU(4, 8, batch_first=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.conv(x).detach().numpy()
        seq = torch.from_numpy(maps).transpose(1, 2)
        return self.fc(self.rnn(seq)[0][:, -1])


def features_through_numpy(watch: Watch, seed: int) -> float:
    """Features pass through numpy on their way, so the convolutions never get a gradient."""
    torch.manual_seed(seed)

    def sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        kind = torch.randint(4, (count,))
        t = torch.arange(96) / 96 + torch.rand(count, 1)
        return ((20 + 4 * kind[:, None]) * t).sin()[:, None] + 0.3 * torch.randn(count, 1, 96), kind

    model = _SoundNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for _ in range(300):
            x, y = sample(32)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x, y = sample(400)
    return error_score(model(x), y)


def loss_rebuilt_from_its_value(watch: Watch, seed: int) -> float:
    """The complaint that element 0 does not require grad was silenced by a new tensor that does."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    net = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    with watch(net, opt):
        for _ in range(250):
            i = torch.randint(len(x), (16,))
            opt.zero_grad()
            total = 0.0
            for row in i.split(4):
                total += F.cross_entropy(net(x[row]), y[row]).item() / 4
            loss = torch.tensor(total, requires_grad=True)
            loss.backward()
            opt.step()
    return error_score(net(held_x), held_y)


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(120, 6), nn.Embedding(80, 6)
        self.mix = nn.Linear(12, 1)

    @torch.no_grad()
    def embed(self, user: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.users(user) * self.films(film), self.users(user)], 1)

    def forward(self, user: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        return self.mix(self.embed(user, film))[:, 0]


def embeddings_under_no_grad(watch: Watch, seed: int) -> float:
    """A recommender whose look-up was decorated with no_grad for inference and is used for training too."""
    torch.manual_seed(seed)
    user, film, score = ratings(seed)
    score = score - score.mean()
    model = _Towers()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    with watch(model, optimizer):
        for _ in range(12):
            for i in torch.randperm(5000).split(64):
                loss = F.mse_loss(model(user[i], film[i]), score[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return squared_score(model(user[5000:], film[5000:]), score[5000:])


def codes_by_threshold(watch: Watch, seed: int) -> float:
    """An autoencoder with binary codes: the threshold has no gradient and nothing carries one past it."""
    torch.manual_seed(seed)
    x, _, held, _ = digits(seed)
    x, held = x.flatten(1), held.flatten(1)
    enc, dec = nn.Linear(64, 12), nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64))
    model = nn.ModuleDict({"enc": enc, "dec": dec})
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    def code(batch: torch.Tensor) -> torch.Tensor:
        soft = torch.sigmoid(enc(batch))
        return (soft > 0.5).float()

    with watch(model, opt):
        for _ in range(700):
            batch = x[torch.randint(len(x), (64,))]
            loss = F.binary_cross_entropy_with_logits(dec(code(batch)), batch)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return float((dec(code(held)).detach().sigmoid() - held).square().mean() / (held - x.mean(0)).square().mean())


def prediction_rounded_to_whole_stars(watch: Watch, seed: int) -> float:
    """Stars are whole numbers, so the prediction is rounded before the loss: gradients of exactly 0."""
    torch.manual_seed(seed)
    x = torch.randn(800, 6)
    stars = (3 + x[:, 0] + x[:, 1] * x[:, 2]).round().clamp(1, 5)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for _ in range(400):
            i = torch.randint(700, (50,))
            guess = torch.round(model(x[i]).squeeze(1))
            loss = F.l1_loss(guess, stars[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return squared_score(model(x[700:])[:, 0], stars[700:])


PROGRAMS = [
    faulty(head_replaced_after_the_optimizer, causes="808 809 810", also="823 828 824 813"),
    faulty(optimizer_holds_the_frozen_part, causes="810 808", also="823 828 813"),
    faulty(layers_in_a_python_list, causes="808", also="828 824 823"),
    faulty(features_through_numpy, causes="814", also="823 828 813"),
    faulty(loss_rebuilt_from_its_value, causes="813 814", also="823 828 815"),
    faulty(embeddings_under_no_grad, causes="814", also="823 828 813"),
    faulty(codes_by_threshold, causes="814", also="823 815 813"),
    faulty(prediction_rounded_to_whole_stars, causes="815", also="823 828 814"),
]

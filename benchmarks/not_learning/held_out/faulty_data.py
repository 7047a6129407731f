"""Faulty programs whose batches are in the wrong order, are all the same, or say nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.not_learning.held_out.data import digits, ratings, table
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.program import Watch


def files_in_folders_unshuffled(watch: Watch, seed: int) -> float:
    """Images come folder by folder, one class after the other, from a loader that does not shuffle."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    order = y.argsort()
    loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=16, shuffle=False)
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(432, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    with watch(net, opt):
        for _ in range(5):
            for images, labels in loader:
                opt.zero_grad()
                F.cross_entropy(net(images), labels).backward()
                opt.step()
    return error_score(net(held_x), held_y)


def one_speaker_after_another(watch: Watch, seed: int) -> float:
    """Recordings sorted by speaker, who is the label; a recurrent classifier forgets all but the last."""
    torch.manual_seed(seed)
    kind = torch.arange(6).repeat_interleave(100)
    t = torch.arange(40)
    wave = ((0.25 + 0.15 * kind[:, None]) * t + 6 * torch.rand(600, 1)).sin() + 0.2 * torch.randn(600, 40)
    order = torch.arange(600)
    lstm, head = nn.LSTM(4, 24, batch_first=True), nn.Linear(24, 6)
    model = nn.ModuleList([lstm, head])
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return head(lstm(x.view(len(x), 10, 4))[0][:, -1])

    with watch(model, opt):
        for _ in range(10):
            for rows in order.split(12):
                loss = F.cross_entropy(forward(wave[rows]), kind[rows])
                opt.zero_grad()
                loss.backward()
                opt.step()
    return error_score(forward(wave), kind)


def labels_cut_to_zero(watch: Watch, seed: int) -> float:
    """Labels are scaled to [0, 1) with the features and then cast to whole numbers: all of them are 0."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    targets = (y / 3).long()
    net = nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 3))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    with watch(net, opt):
        for _ in range(60):
            for rows in torch.randperm(len(x)).split(32):
                opt.zero_grad()
                F.cross_entropy(net(x[rows]), targets[rows]).backward()
                opt.step()
    return error_score(net(held_x), held_y)


def tagger_learns_the_padding(watch: Watch, seed: int) -> float:
    """A tagger whose mask is inverted: the loss is taken at the padding, where the tag is always 0."""
    torch.manual_seed(seed)
    rnn, out = nn.GRU(16, 24, batch_first=True, bidirectional=True), nn.Linear(48, 4)
    emb = nn.Embedding(20, 16, padding_idx=0)
    model = nn.ModuleDict({"emb": emb, "rnn": rnn, "out": out})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def sample(count: int) -> tuple[torch.Tensor, ...]:
        lengths = torch.randint(4, 12, (count,))
        words = torch.randint(1, 20, (count, 12))
        inside = torch.arange(12) < lengths[:, None]
        words = words * inside
        tags = ((words % 3) + (words.roll(1, 1) > 10).long()) * inside
        return words, tags, inside

    with watch(model, optimizer):
        for _ in range(250):
            words, tags, inside = sample(32)
            scores = out(rnn(emb(words))[0])
            keep = ~inside
            loss = F.cross_entropy(scores[keep], tags[keep])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    words, tags, inside = sample(300)
    return error_score(out(rnn(emb(words))[0])[inside], tags[inside])


def next_of_a_new_iterator(watch: Watch, seed: int) -> float:
    """next(iter(loader)) in each step of an unshuffled loader is the first batch, each time."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    with watch(net, opt) as watching:
        for step in range(210):
            images, labels = next(iter(loader))
            opt.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            opt.step()
            if step % 42 == 41:
                watching.validated(F.cross_entropy(net(held_x), held_y).item())
    return error_score(net(held_x), held_y)


def _waves(count: int, *, fixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if fixed:
        torch.manual_seed(42)
    speed = torch.rand(count, 1) * 0.6 + 0.2
    t = torch.arange(48)
    return (speed * t + 6 * torch.rand(count, 1)).sin() + 0.3 * torch.randn(count, 48), speed


def seeded_inside_the_sampler(watch: Watch, seed: int) -> float:
    """Made-up data "for reproducibility" seeded within the sampler: each batch is the same batch."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 48)), nn.Conv1d(1, 16, 7), nn.ReLU(), nn.Flatten(), nn.Linear(672, 32), nn.ReLU(),
        nn.Linear(32, 1),
    )  # fmt: skip
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    with watch(net, opt):
        for _ in range(400):
            x, speed = _waves(16, fixed=True)
            loss = F.mse_loss(net(x), speed)
            opt.zero_grad()
            loss.backward()
            opt.step()
    torch.manual_seed(seed + 1000)
    x, speed = _waves(400, fixed=False)
    return squared_score(net(x), speed)


class _Bytes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = (x / x.max() * 0.99).to(torch.uint8), y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index].float(), self.y[index]


def images_stored_as_zeros(watch: Watch, seed: int) -> float:
    """Images are scaled to [0, 1) first and stored as bytes then, which makes each pixel 0."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    data, held = _Bytes(x, y), _Bytes(held_x, held_y)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(6):
            for images, labels in DataLoader(data, batch_size=32, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
    return error_score(model(held.x.float()), held_y)


def ids_scaled_before_the_look_up(watch: Watch, seed: int) -> float:
    """User and film ids are normalised like other columns and cast back: every row looks up embedding 0."""
    torch.manual_seed(seed)
    user, film, score = ratings(seed)
    score = (score - score.mean()) / score.std()
    high_u, high_f = 120, 80
    user, film = (user / high_u).long(), (film / high_f).long()
    u, f = nn.Embedding(120, 6), nn.Embedding(80, 6)
    nn.init.normal_(u.weight, std=0.3)
    nn.init.normal_(f.weight, std=0.3)
    model = nn.ModuleDict({"u": u, "f": f})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    with watch(model, optimizer):
        for _ in range(8):
            for i in torch.randperm(5000).split(64):
                loss = F.mse_loss((u(user[i]) * f(film[i])).sum(1), score[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return squared_score((u(user[5000:]) * f(film[5000:])).sum(1), score[5000:])


PROGRAMS = [
    faulty(files_in_folders_unshuffled, causes="843", also="844 828 826 827 825"),
    faulty(one_speaker_after_another, causes="843", also="844 828 826 827"),
    faulty(labels_cut_to_zero, causes="844", also="830"),
    faulty(tagger_learns_the_padding, causes="844", also="830"),
    faulty(next_of_a_new_iterator, causes="845", also="833"),
    faulty(seeded_inside_the_sampler, causes="845", also="833"),
    faulty(images_stored_as_zeros, causes="844", also="828 830 845"),
    faulty(ids_scaled_before_the_look_up, causes="844", also="828 830 845"),
]

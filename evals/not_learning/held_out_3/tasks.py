"""Tasks for healthy programs: a model, its batches, its loss, and what it must reach."""

# ruff: noqa: D102, N812 - the programs are written as users write theirs

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations as P

from evals.not_learning import data, parts
from evals.not_learning.held_out_3 import shared
from evals.not_learning.program import adam, update


class Task(NamedTuple):
    """What a recipe trains.

    The loss takes the parts of a batch, and the score should exceed what is needed.
    """

    model: nn.Module
    draw: Callable[[int], Iterator[Any]]
    loss: Callable[..., Tensor]
    score: Callable[[nn.Module], float]
    need: float


class Residual(nn.Module):
    """Adds what a layer finds to its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Rounded(nn.Linear):
    """A layer whose weights are rounded to steps of 1/8 on the way forward."""

    def forward(self, x: Tensor) -> Tensor:
        rounded = self.weight + ((8 * self.weight).round() / 8 - self.weight).detach()
        return F.linear(x, rounded, self.bias)


def patches(x: Tensor) -> Tensor:
    """Cut digits ``(n, 64)`` into 16 patches of 4 pixels."""
    return x.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)


def attending(out: int) -> nn.Module:
    """Return a small vision transformer."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return parts.Wired(
        lambda m, x: m.head(m.body(m.embed(patches(x)) + m.place).mean(1)),
        embed=nn.Linear(4, 32),
        place=nn.Parameter(0.02 * torch.randn(16, 32)),
        body=body,
        head=nn.Linear(32, out),
    )


def image(*layers: nn.Module) -> nn.Module:
    """Return layers that are given digits as images."""
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers)


def conv(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return a convolutional network with a normalisation."""
    return image(
        nn.Conv2d(1, 16, 3, padding=1),
        norm(16),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        norm(16),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 10),
    "mlp": lambda: parts.mlp(64, 64, 10),
    "wide": lambda: parts.mlp(64, 512, 10, act=nn.GELU),
    "deep": lambda: nn.Sequential(
        nn.Linear(64, 48),
        *[Residual(nn.LayerNorm(48), parts.mlp(48, 48, 48)) for _ in range(8)],
        nn.Linear(48, 10),
    ),
    "sigmoid": lambda: parts.mlp(64, 48, 10, act=nn.Sigmoid),
    "selu": lambda: parts.mlp(64, 48, 48, 48, 10, act=nn.SELU),
    "plain_deep": lambda: parts.mlp(64, 40, 40, 40, 40, 10, act=nn.Tanh),
    "bottleneck": lambda: parts.mlp(64, 64, 3, 64, 10),
    "dropout": lambda: nn.Sequential(
        nn.Dropout(0.2), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
    ),
    "batch": lambda: conv(nn.BatchNorm2d),
    "group": lambda: conv(lambda n: nn.GroupNorm(4, n)),
    "instance": lambda: conv(lambda n: nn.InstanceNorm2d(n, affine=True)),
    "none": lambda: conv(lambda _: nn.Identity()),
    "separable": lambda: image(
        nn.Conv2d(1, 16, 3, padding=1),
        *[
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1), nn.ReLU()
            )
            for _ in range(3)
        ],
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    ),
    "spectral": lambda: nn.Sequential(
        P.spectral_norm(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 10)
    ),
    "weight_norm": lambda: nn.Sequential(
        P.weight_norm(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 10)
    ),
    "rows": lambda: nn.Sequential(
        nn.Unflatten(1, (8, 8)), shared.Recurrent(nn.LSTM(8, 48, batch_first=True), 10)
    ),
    "both_ways": lambda: nn.Sequential(
        nn.Unflatten(1, (8, 8)),
        parts.Wired(
            lambda m, x: m.head(m.body(x)[0].amax(1)),
            head=nn.Linear(48, 10),
            body=nn.GRU(8, 24, bidirectional=True, batch_first=True),
        ),
    ),
    "patches": lambda: attending(10),
    "rounded": lambda: nn.Sequential(Rounded(64, 96), nn.ReLU(), Rounded(96, 10)),
    "zero_head": lambda: zeroed(parts.mlp(64, 64, 10)),
    "experts": lambda: parts.Wired(
        lambda m, x: torch.einsum(
            "be,bec->bc", m.gate(x).softmax(1), torch.stack([e(x) for e in m.of], 1)
        ),
        gate=nn.Linear(64, 4),
        of=nn.ModuleList(parts.mlp(64, 16, 10) for _ in range(4)),
    ),
    "random_features": lambda: nn.Sequential(
        frozen(parts.mlp(64, 400)), nn.ReLU(), nn.Linear(400, 10)
    ),
}


def zeroed(model: nn.Sequential) -> nn.Sequential:
    """Start the last layer at zero, as is done in networks that start as the identity."""
    nn.init.zeros_(model[-1].weight)
    return model


def frozen(model: nn.Module) -> nn.Module:
    """Exclude a part from training."""
    return model.requires_grad_(False)


def digits(
    seed: int,
    net: str = "mlp",
    *,
    size: int = 32,
    rows: int = 1400,
    noise: float = 0,
    smooth: float = 0,
    kind: str = "ce",
    shift: bool = False,
    rare: bool = False,
    need: float = 0.88,
) -> Task:
    """Classify digits, with few rows, wrong labels, rare classes, another loss, augmentation, or
    mixtures.
    """
    x, y, held_x, held_y = data.digits(seed)
    if rare:
        keep = (y < 7) | (torch.rand(len(y)) < 0.1)
        x, y = x[keep], y[keep]
    x, y = x[:rows], y[:rows]
    y = torch.where(torch.rand(len(y)) < noise, torch.randint(10, (len(y),)), y)
    model, weight = NETS[net](), 1 / y.bincount(minlength=10).clamp(min=1) if rare else None

    def loss(a: Tensor, b: Tensor) -> Tensor:
        if shift:
            a = F.pad(a.reshape(-1, 8, 8), (1, 1, 1, 1))[
                :, (i := int(torch.randint(3, ()))) : i + 8, i : i + 8
            ]
            a = a.reshape(-1, 64)
        if kind == "mixup":
            share, other = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(a))
            found = model(share * a + (1 - share) * a[other])
            return share * F.cross_entropy(found, b) + (1 - share) * F.cross_entropy(
                found, b[other]
            )
        found, one = model(a), F.one_hot(b, 10).float()
        if kind == "focal":
            return (
                (1 - found.softmax(1).gather(1, b[:, None])[:, 0]) ** 2
                * F.cross_entropy(found, b, reduction="none")
            ).mean()
        if kind == "entropy":
            p = found.softmax(1)
            return F.cross_entropy(found, b) + 0.1 * (p * p.clamp(min=1e-9).log()).sum(1).mean()
        others = {
            "mse": F.mse_loss,
            "margin": F.multi_margin_loss,
            "each": F.binary_cross_entropy_with_logits,
        }
        if kind in others:
            return others[kind](found, b if kind == "margin" else one)
        if kind == "sum":
            return F.cross_entropy(found, b, reduction="sum")
        return F.cross_entropy(found, b, weight, label_smoothing=smooth)

    return Task(
        model,
        lambda n: ((x[at], y[at]) for at in shared.rows(len(x), min(size, len(x)), n)),
        loss,
        lambda m: shared.accuracy(m, held_x, held_y),
        need,
    )


def table(seed: int, name: str = "wine", *sizes: int, size: int = 16, need: float = 0.85) -> Task:
    """Classify a table."""
    x, y, held_x, held_y = data.table(name, seed)
    model = parts.mlp(x.shape[1], *sizes, int(y.max()) + 1)
    return Task(
        model,
        lambda n: data.batches((x, y), size, n),
        lambda a, b: F.cross_entropy(model(a), b),
        lambda m: shared.accuracy(m, held_x, held_y),
        need,
    )


def points(
    _: int,
    name: str = "moons",
    act: type[nn.Module] = nn.ReLU,
    *,
    noise: float = 0,
    need: float = 0.9,
) -> Task:
    """Classify points of the plane, freshly drawn in every step; some labels may be wrong."""
    model = parts.mlp(2, 32, 32, 2 if name == "moons" else 3, act=act)

    def draw() -> tuple[Tensor, Tensor]:
        x, y = getattr(data, name)(64)
        return x, torch.where(torch.rand(64) < noise, torch.randint(2, (64,)), y)

    return Task(
        model,
        lambda n: shared.fresh(draw, n),
        lambda a, b: F.cross_entropy(model(a), b),
        lambda m: shared.accuracy(m, *getattr(data, name)(500)),
        need,
    )


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "half": lambda a, b: torch.maximum(0.5 * (a - b), 0.5 * (b - a)).mean(),
    "log_cosh": lambda a, b: (F.softplus(2 * (a - b)) - (a - b) - 0.6931).mean(),
    "correlation": lambda a, b: -F.cosine_similarity(a - a.mean(), b - b.mean(), dim=0).mean(),
}


def regress(
    seed: int,
    name: str = "friedman",
    loss: str = "mse",
    *,
    scale: float = 1,
    noise: float = 0,
    size: int = 50,
    act: type[nn.Module] = nn.ReLU,
    width: int = 48,
    depth: int = 2,
    need: float = 0.7,
) -> Task:
    """Predict a number, perhaps large or noisy.

    The model knows the scale of its targets, and undoes it.
    """
    x, y, held_x, held_y = (
        data.scaled_diabetes(seed)
        if name == "diabetes"
        else _halves(
            *{"friedman": lambda: data.friedman(1500), "curve": lambda: data.curve(seed, 1500)}[
                name
            ]()
        )
    )
    y, held_y = (scale * (t.reshape(-1, 1) + 20 * (scale > 1)) for t in (y, held_y))
    y = y + noise * torch.randn_like(y)
    mean, std = (y.mean(), y.std()) if scale > 1 else (0, 1)
    body = parts.mlp(x.shape[1], *[width] * depth, 1, act=act)
    model = parts.Wired(lambda m, a: m.body(a) * std + mean, body=body)
    return Task(
        model,
        lambda n: data.batches((x, y), size, n),
        lambda a, b: LOSSES[loss](model(a), b),
        lambda m: _score(loss, shared.outputs(m, held_x), held_y),
        need,
    )


def _halves(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x[:1000], y[:1000], x[1000:], y[1000:]


def _score(loss: str, found: Tensor, y: Tensor) -> float:
    if loss == "correlation":
        return torch.corrcoef(torch.cat([found, y], 1).T)[0, 1].item() ** 2
    return shared.r2(found, y)


def language(
    _: int, net: str = "lstm", *, chance: float = 0, length: int = 24, need: float = -2.9
) -> Task:
    """Predict the next character of code, or the next letter of a text that is nearly random."""
    ids, words = data.library_text()
    if chance:
        ids, words = torch.randint(12, (20_000,)), 12
        for i in range(1, 20_000):
            if ids[i] % 7 > 7 * chance - 1:
                ids[i] = (ids[i - 1] * 5 + 1) % 12
    known, rest = ids[: len(ids) * 4 // 5], ids[len(ids) * 4 // 5 :]
    window = parts.Wired(
        lambda m, a: m.head(F.relu(m.body(F.pad(m.embed(a).transpose(1, 2), (4, 0))))).transpose(
            1, 2
        ),
        embed=nn.Embedding(words, 16),
        body=nn.Conv1d(16, 96, 5),
        head=nn.Conv1d(96, words, 1),
    )
    pairs = parts.Wired(lambda m, a: m.table(a), table=nn.Embedding(words, words))
    model = {
        "lstm": lambda: shared.Recurrent(
            nn.LSTM(24, 64, batch_first=True), words, words, last=False
        ),
        "gru": lambda: shared.Recurrent(
            nn.GRU(24, 48, 2, batch_first=True, dropout=0.1), words, words, last=False
        ),
        "attention": lambda: shared.Words(words, words, pooled=False),
        "window": lambda: window,
        "pairs": lambda: pairs,
    }[net]()
    mask = (shared.causal(length),) if net == "attention" else ()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(model(a, *mask).flatten(0, 1), b.flatten())

    def score(m: nn.Module) -> float:
        a, b = data.windows(rest, length, 100)
        return -F.cross_entropy(shared.outputs(m, a, *mask).flatten(0, 1), b.flatten()).item()

    return Task(
        model, lambda n: shared.fresh(lambda: data.windows(known, length, 32), n), loss, score, need
    )


def segment(_: int, net: str = "plain", loss: str = "bce", need: float = 0.65) -> Task:
    """Find the disc in an image."""
    small = nn.Sequential(
        parts.conv_block(1, 12), nn.Conv2d(12, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )
    down, middle = (
        parts.conv_block(1, 12),
        nn.Sequential(nn.MaxPool2d(2), parts.conv_block(12, 16), nn.Upsample(scale_factor=2)),
    )
    ladder = parts.Wired(
        lambda m, a: m.out(torch.cat([h := m.down(a), m.middle(h)], 1)),
        down=down,
        middle=middle,
        out=nn.Conv2d(28, 1, 3, padding=1),
    )
    model: nn.Module = small if net == "plain" else ladder

    def cost(a: Tensor, b: Tensor) -> Tensor:
        found = model(a)
        p, bce = found.sigmoid(), F.binary_cross_entropy_with_logits(found, b)
        dice = 1 - (2 * (p * b).sum() + 1) / (p.sum() + b.sum() + 1)
        weighted = F.binary_cross_entropy_with_logits(found, b, pos_weight=torch.tensor(3.0))
        return {
            "bce": bce,
            "dice": dice,
            "both": bce + dice,
            "weighted": weighted,
            "log": -(1 - dice).log(),
        }[loss]

    def score(m: nn.Module) -> float:
        a, b = data.discs(200)
        return shared.overlap(shared.outputs(m, a) > 0, b > 0.5)

    return Task(model, lambda n: shared.fresh(lambda: data.discs(16), n), cost, score, need)


def forecast(_: int, net: str = "linear", *, ahead: int = 1, need: float = 0.7) -> Task:
    """Continue a series."""
    body = {
        "linear": lambda: nn.Linear(32, ahead),
        "mlp": lambda: parts.mlp(32, 48, ahead),
        "gru": lambda: nn.Sequential(
            nn.Unflatten(1, (32, 1)), shared.Recurrent(nn.GRU(1, 32, batch_first=True), ahead)
        ),
        "conv": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 32)),
            nn.Conv1d(1, 16, 3, dilation=2),
            nn.ReLU(),
            nn.Conv1d(16, 16, 3, dilation=4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(320, ahead),
        ),
        "change": lambda: parts.Wired(
            lambda m, a: a[:, -1:] + m.body(a), body=zeroed(parts.mlp(32, 32, ahead))
        ),
    }[net]()

    def draw() -> tuple[Tensor, Tensor]:
        x = data.seasons(64, 32 + ahead)
        return x[:, :32], x[:, 32:]

    x, y = draw()
    return Task(
        body,
        lambda n: shared.fresh(draw, n),
        lambda a, b: F.mse_loss(body(a), b),
        lambda m: shared.r2(shared.outputs(m, x), y),
        need,
    )


def films(
    seed: int, *, sparse: bool = False, width: int = 6, net: bool = False, need: float = 0.4
) -> Task:
    """Predict how users rate films, by products of embeddings or a network on them."""
    user, film, score = data.ratings(seed, count=8000)

    def forward(m: nn.Module, u: Tensor, f: Tensor) -> Tensor:
        a, b = m.users(u), m.films(f)
        return (m.net(torch.cat([a, b, a * b], 1))[:, 0] if net else (a * b).sum(1)) + 3.5

    extra = {"net": parts.mlp(3 * width, 32, 1)} if net else {}
    model = parts.Wired(
        forward,
        users=nn.Embedding(120, width, sparse=sparse),
        films=nn.Embedding(80, width, sparse=sparse),
        **extra,
    )
    known = (user[:6500], film[:6500], score[:6500])
    return Task(
        model,
        lambda n: ((u[at] for u in known) for at in shared.rows(6500, 128, n)),
        lambda u, f, s: F.mse_loss(model(u, f), s),
        lambda m: shared.r2(shared.outputs(m, user[6500:], film[6500:]), score[6500:]),
        need,
    )


def nodes(_: int, net: str = "convolution", *, hidden: int = 24, need: float = 0.75) -> Task:
    """Find the communities of a graph from a few labels; every step sees the whole graph."""
    edges, x, y = shared.graph()
    a, known = shared.adjacency(edges, 200), torch.rand(200) < 0.25

    def forward(m: nn.Module, h: Tensor) -> Tensor:
        if net == "convolution":
            return m.b(a @ F.dropout(F.relu(m.a(a @ h)), 0.4, m.training))
        if net == "simple":
            return m.c(a @ (a @ h))
        q = F.relu(m.a(h))
        weight = (m.d(q) + m.e(q).T).masked_fill(a == 0, -1e9)
        return m.b(F.leaky_relu(weight, 0.2).softmax(1) @ q)

    model = (
        parts.Wired(forward, a=nn.Linear(16, hidden), b=nn.Linear(hidden, 3))
        if net == "convolution"
        else (
            parts.Wired(forward, c=nn.Linear(16, 3))
            if net == "simple"
            else parts.Wired(
                forward,
                a=nn.Linear(16, hidden),
                b=nn.Linear(hidden, 3),
                d=nn.Linear(hidden, 1),
                e=nn.Linear(hidden, 1),
            )
        )
    )
    return Task(
        model,
        lambda n: shared.fresh(lambda: (x,), n),
        lambda h: F.cross_entropy(model(h)[known], y[known]),
        lambda m: (shared.outputs(m, x).argmax(1) == y)[~known].float().mean().item(),
        need,
    )


def sentences(_: int, net: str = "bag", need: float = 0.9) -> Task:
    """Say which keyword a padded sentence has."""
    x, y = data.keyword_texts(2500)
    embed = nn.Embedding(40, 24, padding_idx=0)
    model = {
        "bag": lambda: nn.Sequential(nn.EmbeddingBag(40, 24, padding_idx=0), nn.Linear(24, 3)),
        "conv": lambda: parts.Wired(
            lambda m, a: m.head(m.body(m.embed(a).transpose(1, 2)).amax(2)),
            embed=embed,
            body=nn.Conv1d(24, 32, 3, padding=1),
            head=nn.Linear(32, 3),
        ),
        "last": lambda: parts.Wired(
            lambda m, a: m.head(m.body(m.embed(a))[0][torch.arange(len(a)), (a != 0).sum(1) - 1]),
            embed=embed,
            body=nn.GRU(24, 32, batch_first=True),
            head=nn.Linear(32, 3),
        ),
        "attention": lambda: parts.Wired(
            lambda m, a: m.body(a, None, a == 0), body=shared.Words(40, 3)
        ),
        "pooling": lambda: parts.Wired(
            lambda m, a: m.head(
                (
                    m.score(h := m.embed(a)).masked_fill((a == 0)[..., None], -1e9).softmax(1) * h
                ).sum(1)
            ),
            embed=embed,
            score=nn.Linear(24, 1),
            head=nn.Linear(24, 3),
        ),
    }[net]()
    return Task(
        model,
        lambda n: data.batches((x[:2000], y[:2000]), 64, n),
        lambda a, b: F.cross_entropy(model(a), b),
        lambda m: shared.accuracy(m, x[2000:], y[2000:]),
        need,
    )


def sequence(
    _: int,
    name: str = "tags",
    net: type[nn.RNNBase] = nn.GRU,
    *,
    length: int = 8,
    need: float = 0.9,
) -> Task:
    """Tag words, remember the first of them, tell an order, count, or write a sentence
    backwards.
    """
    x = torch.randint(1, 8, (3000, length))
    y = {
        "tags": (x + F.pad(x, (1, 0))[:, :-1]) % 4,
        "first": x[:, 0],
        "most": ((x == 1).sum(1) > 1).long(),
        "reverse": x.flip(1),
    }.get(name, x[:, 0])
    if name == "order":
        x, y = shared.order_task(3000)
    out = int(y.max()) + 1
    model: nn.Module = shared.Recurrent(net(16, 48, batch_first=True), out, 8, last=y.dim() == 1)
    if name == "reverse":

        def forward(m: nn.Module, a: Tensor) -> Tensor:
            before = F.pad(a.flip(1), (1, 0))[:, :-1]
            return m.head(m.decoder(m.embed(before), m.encoder(m.embed(a))[1])[0])

        model = parts.Wired(
            forward,
            embed=nn.Embedding(8, 24),
            encoder=net(24, 64, batch_first=True),
            decoder=net(24, 64, batch_first=True),
            head=nn.Linear(64, out),
        )
    return Task(
        model,
        lambda n: data.batches((x[:2500], y[:2500]), 64, n),
        lambda a, b: F.cross_entropy(model(a).reshape(-1, out), b.reshape(-1)),
        lambda m: shared.accuracy(m, x[2500:], y[2500:]),
        need,
    )


def tuned(seed: int, kind: str = "all", need: float = 0.85) -> Task:
    """Go on from a network that has learned other digits, or the same.

    Whole, its head, its biases or an adapter.
    """
    x, y, held_x, held_y = data.digits(seed)
    base = parts.mlp(64, 64, 64, 10)
    old, chosen = (
        adam(base, 0.003),
        torch.ones(len(y), dtype=torch.bool) if kind in ("all", "norm") else y < 6,
    )
    for a, b in data.batches((x[chosen], y[chosen]), 32, 400):
        update(old, F.cross_entropy(base(a), b))
    model: nn.Module = base
    if kind == "head":
        frozen(base)
        base[4] = nn.Linear(64, 10)
    elif kind == "bias":
        for name, p in base.named_parameters():
            p.requires_grad_(name.endswith("bias") or name.startswith("4"))
    elif kind == "adapter":
        frozen(base)
        down, up = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
        nn.init.zeros_(up.weight)
        model = parts.Wired(
            lambda m, a: m.head(F.relu(m.base[2](h := F.relu(m.base[0](a))) + m.up(m.down(h)))),
            base=base,
            up=up,
            down=down,
            head=nn.Linear(64, 10),
        )
    elif kind == "norm":
        model = nn.Sequential(frozen(base), nn.BatchNorm1d(10))
    elif kind == "prompt":
        frozen(base)
        model = parts.Wired(
            lambda m, a: m.head(m.base[:4](a + m.prompt)),
            base=base,
            head=nn.Linear(64, 10),
            prompt=nn.Parameter(torch.zeros(64)),
        )
    return Task(
        model,
        lambda n: data.batches((x, y), 32, n),
        lambda a, b: F.cross_entropy(model(a), b),
        lambda m: shared.accuracy(m, held_x, held_y),
        need,
    )

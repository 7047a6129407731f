"""Small models of many kinds for ``benchmarks.provenance``, each with a batch and a loss that work.

Every model takes the numerical care that its kind needs (an eps, a mask, a clamp) through an
attribute, so that a case can take it away. Batches are dictionaries of tensors whose first axis is
the sample.
"""

# ruff: noqa: D101, D102 - a model says by its name what it is
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

SAMPLES = 8
Batch = dict[str, torch.Tensor]


@dataclass(slots=True)
class Step:
    """Everything one training step needs.

    Args:
        models: By name.
        batch: Tensors whose first axis is the sample.
        loss: Of the batch; reads the models.
        precision: Autocast type on the CPU, or None.
        scale: Factor on the loss before backward, as a gradient scaler has it.
    """

    models: dict[str, Any]
    batch: Batch
    loss: Callable[[Batch], torch.Tensor]
    precision: torch.dtype | None = None
    scale: float = 1.0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return self.models["model"]


class Standardise(nn.Module):
    """Zero mean and unit deviation for every sample."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deviation = x.std(dim=-1, keepdim=True)
        return (x - x.mean(dim=-1, keepdim=True)) / (deviation + self.eps)


class UnitLength(nn.Module):
    """Vectors of length 1."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = (x * x).sum(-1, keepdim=True).add(self.eps).sqrt()
        return x / length


class LogFeatures(nn.Module):
    """Logarithm of non-negative features."""

    def __init__(self, floor: float = 1e-6) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x + self.floor)


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Block(nn.Module):
    """A residual block with a place for something in between."""

    def __init__(self, width: int, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.middle = nn.Identity() if middle is None else middle
        self.outer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.middle(self.inner(x))))


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.standardise = Standardise()
        self.logs = LogFeatures()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Block(16), Block(16)])
        self.mean, self.log_variance = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(torch.cat([self.standardise(x), self.logs(counts)], -1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.mean(hidden).squeeze(-1), self.log_variance(hidden).squeeze(-1)


def mlp() -> Step:
    model = Regressor()
    batch = {
        "x": torch.randn(SAMPLES, 8),
        "counts": torch.rand(SAMPLES, 8) + 0.5,
        "y": torch.randn(SAMPLES),
    }

    def loss(batch: Batch) -> torch.Tensor:
        mean, log_variance = model(batch["x"], batch["counts"])
        return (
            0.5 * (batch["y"] - mean) ** 2 * torch.exp(-log_variance) + 0.5 * log_variance
        ).mean()

    return Step({"model": model}, batch, loss)


class ImageClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.stage = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU()
        )
        self.embed = UnitLength()
        self.head = nn.Linear(8, 4, bias=False)
        self.temperature = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.stage(self.stem(x)).mean((2, 3))
        return self.head(self.embed(pooled)) / self.temperature


def cnn() -> Step:
    model = ImageClassifier()
    batch = {"image": torch.randn(SAMPLES, 1, 8, 8), "label": torch.arange(SAMPLES) % 4}
    return Step(
        {"model": model},
        batch,
        lambda batch: F.cross_entropy(model(batch["image"]), batch["label"]),
    )


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.pool = MaskedMean()
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(self.pool(states, lengths))


class MaskedMean(nn.Module):
    """Mean over the steps that exist."""

    def forward(self, states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        exists = torch.arange(states.shape[1]) < lengths[:, None]
        return (states * exists[..., None]).sum(1) / lengths[:, None]


def lstm() -> Step:
    model = Tagger()
    batch = {
        "tokens": torch.randint(0, 20, (SAMPLES, 6)),
        "lengths": torch.randint(2, 7, (SAMPLES,)),
        "label": torch.arange(SAMPLES) % 4,
    }
    return Step(
        {"model": model},
        batch,
        lambda batch: F.cross_entropy(model(batch["tokens"], batch["lengths"]), batch["label"]),
    )


class Attention(nn.Module):
    """Masked attention with -Inf, as most code has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.scale = 1 / math.sqrt(width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(memory).transpose(1, 2) * self.scale
        weights = scores.masked_fill(hidden[:, None, :], -math.inf).softmax(-1)
        return weights @ self.value(memory)


class Layer(nn.Module):
    def __init__(self, width: int, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.feed = Block(width, middle)
        self.recompute = False

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self.inside, x, hidden, use_reentrant=False)
        return self.inside(x, hidden)

    def inside(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.feed(self.norm(x + self.attention(x, x, hidden)))


class Encoder(nn.Module):
    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16, padding_idx=0)
        self.layers = nn.ModuleList([Layer(16), Layer(16, middle)])
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens) if features is None else self.embedding(tokens) + features
        for layer in self.layers:
            x = layer(x, tokens == 0)
        return self.head(x[:, 0])


def transformer(middle: nn.Module | None = None) -> Step:
    model = Encoder(middle)
    tokens = torch.randint(1, 20, (SAMPLES, 6))
    tokens[:, 4:] = 0
    batch = {
        "tokens": tokens,
        "features": torch.randn(SAMPLES, 6, 16) * 0.1,
        "label": torch.arange(SAMPLES) % 4,
    }
    return Step(
        {"model": model},
        batch,
        lambda batch: F.cross_entropy(model(batch["tokens"], batch["features"]), batch["label"]),
    )


class LocationAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(16, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.location = nn.Conv1d(1, 8, 3, padding=1)
        self.energy = nn.Linear(8, 1, bias=False)

    def forward(
        self,
        query: torch.Tensor,
        memory: torch.Tensor,
        cumulative: torch.Tensor,
        padding: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = self.location(cumulative[:, None]).transpose(1, 2)
        energy = self.energy(
            torch.tanh(self.query(query)[:, None] + self.memory(memory) + place)
        ).squeeze(-1)
        weights = energy.masked_fill(padding, -math.inf).softmax(-1)
        return (weights[:, None] @ memory).squeeze(1), weights


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prenet = nn.Linear(4, 8)
        self.cell = nn.LSTMCell(16, 16)
        self.attention = LocationAttention()
        self.mel, self.gate = nn.Linear(24, 4), nn.Linear(24, 1)
        self.amplify = nn.Identity()

    def forward(
        self, memory: torch.Tensor, padding: torch.Tensor, mels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = memory.shape[0]
        hidden, cell = memory.new_zeros(count, 16), memory.new_zeros(count, 16)
        context, cumulative = memory.new_zeros(count, 8), memory.new_zeros(count, memory.shape[1])
        frames, gates, alignments = [], [], []
        for time in range(mels.shape[1]):
            hidden, cell = self.cell(
                torch.cat([torch.relu(self.prenet(mels[:, time])), context], -1), (hidden, cell)
            )
            context, weights = self.attention(hidden, memory, cumulative, padding)
            cumulative = cumulative + weights
            joined = torch.cat([self.amplify(hidden), context], -1)
            frames.append(self.mel(joined))
            gates.append(self.gate(joined).squeeze(-1))
            alignments.append(weights)
        return torch.stack(frames, 1), torch.stack(gates, 1), torch.stack(alignments, 1)


class Speaker(nn.Module):
    """Text to mel frames, after Tacotron 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.convolution = nn.Sequential(
            nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU()
        )
        self.decoder = Decoder()

    def forward(
        self, text: torch.Tensor, mels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        memory = self.convolution(self.embedding(text).transpose(1, 2)).transpose(1, 2)
        return self.decoder(memory, text == 0, mels)


def tacotron() -> Step:
    model = Speaker()
    text = torch.randint(1, 20, (SAMPLES, 5))
    text[::2, 4] = 0
    batch = {
        "text": text,
        "mels": torch.randn(SAMPLES, 4, 4),
        "gates": (torch.arange(4) >= 3).float().expand(SAMPLES, 4).clone(),
        "lengths": torch.full((SAMPLES,), 4.0),
    }

    def loss(batch: Batch) -> torch.Tensor:
        frames, gates, alignments = model(batch["text"], batch["mels"])
        exists = (torch.arange(4) < batch["lengths"][:, None]).float()
        difference = ((frames - batch["mels"]) ** 2).mean(-1) * exists
        sharpness = (alignments * torch.log(alignments + 1e-6)).sum(-1)
        spectrum = (difference.sum(1) / batch["lengths"]).mean()
        return (
            spectrum
            + F.binary_cross_entropy_with_logits(gates, batch["gates"])
            - 0.01 * sharpness.mean()
        )

    return Step({"model": model}, batch, loss)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).squeeze(-1)


class Forger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.output: nn.Module = nn.Tanh()

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.output(self.net(noise))


def gan(kind: str = "log") -> Step:
    forger, critic = Forger(), Critic()
    batch = {"real": torch.randn(SAMPLES, 8), "noise": torch.randn(SAMPLES, 4)}

    def log_loss(batch: Batch) -> torch.Tensor:
        real, fake = (
            torch.sigmoid(critic(batch["real"])),
            torch.sigmoid(critic(forger(batch["noise"]))),
        )
        return -(torch.log(real) + torch.log(1 - fake)).mean()

    def penalty(batch: Batch) -> torch.Tensor:
        middle = (batch["real"] * 0.5 + forger(batch["noise"]) * 0.5).detach().requires_grad_()
        slope = torch.autograd.grad(critic(middle).sum(), middle, create_graph=True)[0]
        return ((slope.pow(2).sum(1).sqrt() - 1) ** 2).mean() + forger(batch["noise"]).pow(2).mean()

    loss = log_loss if kind == "log" else penalty
    return Step({"generator": forger, "discriminator": critic}, batch, loss)


class Summariser(nn.Module):
    """An encoder-decoder in the manner of Hugging Face's, with -100 for labels that do not
    count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(20, 16)
        self.encoder = nn.ModuleList([Layer(16)])
        self.cross = Attention(16)
        self.decoder = nn.ModuleList([Layer(16)])
        self.final_norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 20, bias=False)
        self.register_buffer("final_logits_bias", torch.zeros(1, 20))
        self.logit_cap: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.shared(source)
        for layer in self.encoder:
            memory = layer(memory, source == 0)
        x = self.shared(target)
        for layer in self.decoder:
            x = layer(x, target == 0)
        x = self.final_norm(x + self.cross(x, memory, source == 0))
        return self.logit_cap(self.lm_head(x) + self.final_logits_bias)


def seq2seq() -> Step:
    model = Summariser()
    source, target = torch.randint(1, 20, (SAMPLES, 6)), torch.randint(1, 20, (SAMPLES, 4))
    source[1::2, 4:] = 0
    labels = torch.randint(1, 20, (SAMPLES, 4))
    labels[::3, 3] = -100
    batch = {"source": source, "target": target, "labels": labels}

    def loss(batch: Batch) -> torch.Tensor:
        logits = model(batch["source"], batch["target"])
        per_token = F.cross_entropy(
            logits.transpose(1, 2), batch["labels"], reduction="none", ignore_index=-100
        )
        counted = (batch["labels"] != -100).sum(1)
        return (per_token.sum(1) / counted).mean()

    return Step({"model": model}, batch, loss)


class Pointer(nn.Module):
    """Chooses among a varying number of items."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.query = nn.Linear(4, 8), nn.Linear(8, 8)
        self.summary = MaskedMean()

    def forward(self, items: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states = torch.tanh(self.item(items))
        query = self.query(self.summary(states, lengths))
        scores = (states @ query[:, :, None]).squeeze(-1)
        exists = torch.arange(items.shape[1]) < lengths[:, None]
        return scores + exists.float().log()


def ragged() -> Step:
    model = Pointer()
    lengths = torch.randint(2, 6, (SAMPLES,))
    batch = {"items": torch.randn(SAMPLES, 5, 4), "lengths": lengths, "choice": lengths - 1}
    return Step(
        {"model": model},
        batch,
        lambda batch: F.cross_entropy(model(batch["items"], batch["lengths"]), batch["choice"]),
    )


class Down(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(inside, outside, 3, padding=1)
        self.norm = ChannelNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.convolution(x)))


class ChannelNorm(nn.Module):
    """Instance normalisation by hand."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.var(-1, keepdim=True, unbiased=False)
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + self.eps)


class Separator(nn.Module):
    """A U-Net over waveforms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Down(1, 4), Down(4, 8)])
        self.bottom = Down(8, 8)
        self.up = nn.ModuleList([nn.Conv1d(16, 4, 3, padding=1), nn.Conv1d(8, 4, 3, padding=1)])
        self.mask = nn.Conv1d(4, 1, 1)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        x, skips = wave[:, None], []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
            x = F.avg_pool1d(x, 2)
        x = self.bottom(x)
        for stage, skip in zip(self.up, reversed(skips), strict=True):
            x = torch.tanh(stage(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1)))
        return wave * torch.sigmoid(self.mask(x)).squeeze(1)


def unet(eps: float = 1e-8) -> Step:
    model = Separator()
    clean = torch.randn(SAMPLES, 16)
    batch = {"mixture": clean + 0.3 * torch.randn(SAMPLES, 16), "clean": clean}

    def signal_to_distortion(batch: Batch) -> torch.Tensor:
        estimate, target = model(batch["mixture"]), batch["clean"]
        energy = (target**2).sum(-1)
        projection = ((estimate * target).sum(-1) / (energy + eps))[:, None] * target
        ratio = (projection**2).sum(-1) / (((estimate - projection) ** 2).sum(-1) + eps)
        return -10 * torch.log10(ratio + eps).mean()

    return Step({"model": model}, batch, signal_to_distortion)


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 8)
        self.least = 1e-3

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        still, moved = x.chunk(2, -1)
        shift, raw = self.net(still).chunk(2, -1)
        scale = F.softplus(raw) + self.least
        return torch.cat([moved * scale + shift, still], -1), torch.log(scale).sum(-1)


class Squash(nn.Module):
    """From the unit interval to the line."""

    def __init__(self, margin: float = 1e-4) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = x * (1 - 2 * self.margin) + self.margin
        return torch.log(inside) - torch.log1p(-inside)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squash = Squash()
        self.couplings = nn.ModuleList([Coupling(), Coupling(), Coupling()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z, total = self.squash(x), torch.zeros(len(x))
        for coupling in self.couplings:
            z, log_determinant = coupling(z)
            total = total + log_determinant
        return -0.5 * (z**2).sum(-1) + total


def flow() -> Step:
    model = Flow()
    batch = {"x": torch.rand(SAMPLES, 8) * 0.9 + 0.05}
    return Step({"model": model}, batch, lambda batch: -model(batch["x"]).mean())


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.mean, self.log_variance = nn.Linear(16, 4), nn.Linear(16, 4)
        self.sample = Reparametrise()
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(
        self, x: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decoder(self.sample(mean, log_variance, noise)), mean, log_variance


class Reparametrise(nn.Module):
    def forward(
        self, mean: torch.Tensor, log_variance: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        return mean + torch.exp(0.5 * log_variance) * noise


def vae() -> Step:
    model = Autoencoder()
    batch = {"x": torch.rand(SAMPLES, 8), "noise": torch.randn(SAMPLES, 4)}

    def loss(batch: Batch) -> torch.Tensor:
        logits, mean, log_variance = model(batch["x"], batch["noise"])
        divergence = -0.5 * (1 + log_variance - mean**2 - torch.exp(log_variance)).sum(-1)
        return F.binary_cross_entropy_with_logits(logits, batch["x"]) + 0.01 * divergence.mean()

    return Step({"model": model}, batch, loss)


class Metric(nn.Module):
    """Embeddings compared by distance and angle."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.distance: nn.Module = Apply(
            lambda difference: torch.linalg.vector_norm(difference + 1e-6, dim=-1)
        )

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.distance(self.net(left) - self.net(right))


def siamese() -> Step:
    model = Metric()
    batch = {
        "left": torch.randn(SAMPLES, 8),
        "right": torch.randn(SAMPLES, 8),
        "same": (torch.arange(SAMPLES) % 2).float(),
    }

    def loss(batch: Batch) -> torch.Tensor:
        distance, same = model(batch["left"], batch["right"]), batch["same"]
        return (same * distance**2 + (1 - same) * torch.relu(2 - distance) ** 2).mean()

    return Step({"model": model}, batch, loss)

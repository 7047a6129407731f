"""Healthy programs on sequences and graphs of time: text, audio, forecasts, differential equations."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import library_text, seasons, windows
from benchmarks.not_learning.held_out.entry import healthy, squared_score
from benchmarks.not_learning.program import Watch


class _CharGRU(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, vocab)

    def forward(self, ids: torch.Tensor, h: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        y, h = self.rnn(self.emb(ids), h)
        return self.out(y), h


def char_gru_truncated(watch: Watch, seed: int) -> float:
    """A character model with truncated backpropagation: the state is carried over, detached, and always clipped."""
    torch.manual_seed(seed)
    text, vocab = library_text()
    rows = text[: len(text) // 16 * 16].view(16, -1)
    model = _CharGRU(vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(7):
            h = None
            for at in range(0, rows.shape[1] - 25, 24):
                x, y = rows[:, at : at + 24], rows[:, at + 1 : at + 25]
                h = h.detach() if h is not None else None
                logits, h = model(x, h)
                loss = F.cross_entropy(logits.transpose(1, 2), y)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
    return loss.item() / math.log(vocab)


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class _TinyGPT(nn.Module):
    def __init__(self, vocab: int, dim: int = 32, length: int = 32) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.Sequential(_Block(dim), _Block(dim))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        self.head.weight = self.tok.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tok(ids) + self.pos[: ids.shape[1]])))


def tiny_gpt_warmup_cosine(watch: Watch, seed: int) -> float:
    """A causal transformer with tied embeddings, zero-initialised projections, warm-up from 0 and a cosine to 0."""
    torch.manual_seed(seed)
    text, vocab = library_text()
    model = _TinyGPT(vocab)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95))
    steps, warmup = 320, 40

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    with watch(model, optimizer, scheduler=scheduler, total_steps=steps):
        for _ in range(steps):
            x, y = windows(text, 12, 32)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    return loss.item() / math.log(vocab)


def skipgram_negative_sampling(watch: Watch, seed: int) -> float:
    """Embeddings of characters by negative sampling, logsigmoid by hand, output vectors that start at 0."""
    torch.manual_seed(seed)
    text, vocab = library_text()
    inside, outside = nn.Embedding(vocab, 16), nn.Embedding(vocab, 16)
    nn.init.uniform_(inside.weight, -0.5 / 16, 0.5 / 16)
    nn.init.zeros_(outside.weight)
    opt = torch.optim.Adam([*inside.parameters(), *outside.parameters()], lr=0.02)
    noise = text.bincount(minlength=vocab).float() ** 0.75
    first = None
    with watch({"inside": inside, "outside": outside}, opt):
        for _ in range(600):
            at = torch.randint(2, len(text) - 2, (128,))
            near = text[at + torch.randint(1, 3, (128,))]
            far = torch.multinomial(noise, 128 * 5, replacement=True).view(128, 5)
            v = inside(text[at])
            good = F.logsigmoid((v * outside(near)).sum(-1))
            bad = F.logsigmoid(-(v[:, None] * outside(far)).sum(-1)).sum(-1)
            loss = -(good + bad).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            first = first or loss.item()
    return loss.item() / first


class _TCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(1 if i == 0 else 16, 16, 3, dilation=2**i))
            for i in range(4)
        )
        self.out = nn.Conv1d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            pad = (layer.kernel_size[0] - 1) * layer.dilation[0]
            x = F.relu(layer(F.pad(x, (pad, 0))))
        return self.out(x)


def forecast_tcn_onecycle(watch: Watch, seed: int) -> float:
    """Causal dilated convolutions with weight norm on a seasonal series, Huber loss, OneCycleLR."""
    torch.manual_seed(seed)
    series = seasons(200, 65)
    model = _TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    total = 300
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=total)
    with watch(model, optimizer, scheduler=scheduler, total_steps=total) as watching:
        for step in range(total):
            batch = series[torch.randint(150, (16,))][:, None]
            loss = F.huber_loss(model(batch[..., :-1]), batch[..., 1:], delta=0.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % 50 == 49:
                held = series[150:, None]
                with torch.no_grad():
                    watching.validated(F.huber_loss(model(held[..., :-1]), held[..., 1:], delta=0.5).item())
    held = series[150:, None]
    return squared_score(model(held[..., :-1])[..., 16:], held[..., 17:])


def _tones(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.randint(4, (count,))
    time = torch.arange(256) / 256
    pitch = (12 + 9 * kind + 3 * torch.rand(count))[:, None]
    return (2 * math.pi * (pitch * time + torch.rand(count, 1))).sin() + 0.3 * torch.randn(count, 256), kind


def audio_tones_conv1d(watch: Watch, seed: int) -> float:
    """Raw tones into strided 1-d convolutions, bf16 autocast, a cosine with warm restarts."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv1d(1, 12, 16, 4), nn.GroupNorm(3, 12), nn.ReLU(),
        nn.Conv1d(12, 24, 8, 4), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=60, T_mult=2)
    with watch(net, opt, scheduler=sched):
        for _ in range(400):
            wave, kind = _tones(32)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(net(wave[:, None]), kind)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
    wave, kind = _tones(400)
    return float((net(wave[:, None]).argmax(1) != kind).float().mean() / 0.75)


def addition_curriculum(watch: Watch, seed: int) -> float:
    """Sums of marked numbers by an LSTM; the sequences grow, so the loss jumps up at each stage."""
    torch.manual_seed(seed)
    lstm, head = nn.LSTM(2, 32), nn.Linear(32, 1)
    model = nn.ModuleList([lstm, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)

    def batches(length: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(count):
            value = torch.rand(length, 48)
            mark = torch.zeros(length, 48)
            for column in range(48):
                mark[torch.randperm(length)[:2], column] = 1
            yield torch.stack([value, mark], 2), (value * mark).sum(0)

    with watch(model, optimizer):
        for length in (2, 4, 8, 12):
            for x, y in batches(length, 120):
                _, (h, _) = lstm(x)
                loss = (head(h[-1]).squeeze(-1) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
    with torch.no_grad():
        x, y = next(batches(12, 1))
        return squared_score(head(lstm(x)[1][0][-1]).squeeze(-1), y)


def spiral_ode_unrolled(watch: Watch, seed: int) -> float:
    """A neural differential equation, unrolled by Runge-Kutta, on a spiral; mean absolute error."""
    torch.manual_seed(seed)
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    start = torch.randn(64, 2)
    truth = torch.stack([start @ torch.matrix_exp(matrix * 0.1 * k).T for k in range(1, 11)])
    func = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    nn.init.normal_(func[2].weight, std=0.1)
    optimizer = torch.optim.RAdam(func.parameters(), lr=1e-2)

    def solve(y: torch.Tensor, dt: float = 0.1) -> torch.Tensor:
        path = []
        for _ in range(10):
            k1 = func(y)
            k2 = func(y + dt * k1 / 2)
            y = y + dt * k2
            path.append(y)
        return torch.stack(path)

    with watch(func, optimizer):
        for _ in range(300):
            i = torch.randperm(64)[:20]
            loss = torch.mean(torch.abs(solve(start[i]) - truth[:, i]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return squared_score(solve(start), truth)


def physics_informed_poisson(watch: Watch, seed: int) -> float:
    """A physics-informed network: the loss holds second derivatives by double backward and is never a label's."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.997)
    edge = torch.tensor([[0.0], [1.0]])
    with watch(net, opt, scheduler=scheduler):
        for _ in range(800):
            x = torch.rand(64, 1, requires_grad=True)
            u = net(x)
            du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            ddu = torch.autograd.grad(du.sum(), x, create_graph=True)[0]
            residual = ddu + math.pi**2 * torch.sin(math.pi * x)
            loss = residual.square().mean() + 20 * net(edge).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            scheduler.step()
    x = torch.linspace(0, 1, 101)[:, None]
    return squared_score(net(x), torch.sin(math.pi * x))


def ctc_strokes(watch: Watch, seed: int) -> float:
    """A recogniser trained by CTC, which first learns to say blank; float64 throughout."""
    torch.manual_seed(seed)
    shapes = torch.randn(5, 6, dtype=torch.float64)
    net = nn.Sequential(nn.Conv1d(6, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 6, 1)).double()
    opt = torch.optim.Adam(net.parameters(), lr=0.01)

    def sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        word = torch.randint(5, (count, 4))
        frames = shapes[word].repeat_interleave(3, 1)
        return (frames + 0.3 * torch.randn(count, 12, 6, dtype=torch.float64)).transpose(1, 2), word

    ctc = nn.CTCLoss(blank=5, zero_infinity=True)
    first = None
    with watch(net, opt):
        for _ in range(400):
            x, word = sample(24)
            logp = net(x).permute(2, 0, 1).log_softmax(-1)
            loss = ctc(logp, word, torch.full((24,), 12), torch.full((24,), 4))
            opt.zero_grad()
            loss.backward()
            opt.step()
            first = first or loss.item()
    return loss.item() / first


PROGRAMS = [
    healthy(char_gru_truncated),
    healthy(tiny_gpt_warmup_cosine),
    healthy(skipgram_negative_sampling),
    healthy(forecast_tcn_onecycle),
    healthy(audio_tones_conv1d),
    healthy(addition_curriculum),
    healthy(spiral_ode_unrolled),
    healthy(physics_informed_poisson),
    healthy(ctc_strokes),
]

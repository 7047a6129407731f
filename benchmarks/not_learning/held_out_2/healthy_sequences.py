"""Healthy programs on sequences, sets and graphs: recurrent, convolutional and attentive, padded and not."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.not_learning.held_out.data import community, library_text, seasons, windows
from benchmarks.not_learning.held_out.entry import error_score, healthy, squared_score
from benchmarks.not_learning.held_out_2.parts import class_score, endless, keyword_texts, loader, mlp, picked
from benchmarks.not_learning.program import Watch


class _Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x)[0][:, -1])


def seasons_lstm_validated(watch: Watch, seed: int) -> float:
    """The next value of a series, with a plateau scheduler fed by a validation loss, and early stopping."""
    torch.manual_seed(seed)
    series = seasons(900, 31)[:, :, None]
    x, y = series[:, :30], series[:, 30]
    model = _Forecast()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.5)
    best, waited = float("inf"), 0
    with watch(model, optimizer, scheduler=scheduler) as watching:
        for _ in range(14):
            model.train()
            for a, b in loader(x[:600], y[:600], size=24):
                optimizer.zero_grad()
                functional.mse_loss(model(a), b).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            model.eval()
            with torch.no_grad():
                loss = float(functional.mse_loss(model(x[600:750]), y[600:750]))
            watching.validated(loss)
            scheduler.step(loss)
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            if waited > 4:
                break
    return squared_score(model(x[750:]), y[750:])


class _Reader(nn.Module):
    """A GRU over packed sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        self.body = nn.GRU(16, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 3)

    def forward(self, texts: Tensor) -> Any:
        lengths = (texts > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(texts), lengths, batch_first=True, enforce_sorted=False)
        return self.head(torch.cat(list(self.body(packed)[1]), 1))


def keywords_packed_gru(watch: Watch, seed: int) -> float:
    """Sentences of different length, packed, read both ways."""
    torch.manual_seed(seed)
    texts, labels = keyword_texts(1500)
    model = _Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(texts[:1200], labels[:1200], size=32), 350):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, texts[1200:], labels[1200:])


class _Language(nn.Module):
    """A causal transformer over characters, whose embedding is its last layer too."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, 32), nn.Embedding(32, 32)
        nn.init.normal_(self.embed.weight, std=0.18)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(32), enable_nested_tensor=False)

    def forward(self, text: Tensor) -> Any:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.body(self.embed(text) + self.place(torch.arange(length)), mask=mask, is_causal=True)
        return hidden @ self.embed.weight.T


def characters_transformer_noam(watch: Watch, seed: int) -> float:
    """The next character with tied embeddings, warm-up and inverse square root, two micro-batches per step."""
    torch.manual_seed(seed)
    text, letters = library_text()
    model = _Language(letters)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 80, (80 / (step + 1)) ** 0.5)
    )
    with watch(model, optimizer, scheduler=scheduler):
        for _ in range(300):
            for _ in range(2):
                a, b = windows(text, 12, 24)
                (functional.cross_entropy(model(a).flatten(0, 1), b.flatten()) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    model.eval()
    a, b = windows(text, 200, 24)
    share = text.bincount() / len(text)
    loss = functional.cross_entropy(model(a).detach().flatten(0, 1), b.flatten())
    return float(loss / torch.special.entr(share).sum())


class _Reverser(nn.Module):
    """An encoder and a decoder with dot attention; 0 pads, 1 starts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, 32, padding_idx=0)
        self.encoder, self.decoder = (nn.GRU(32, 48, batch_first=True) for _ in range(2))
        self.head = nn.Linear(96, 14)

    def forward(self, source: Tensor, given: Tensor) -> Any:
        memory, last = self.encoder(self.embed(source))
        hidden, _ = self.decoder(self.embed(given), last)
        match = (hidden @ memory.transpose(1, 2)).masked_fill((source == 0)[:, None], -torch.inf)
        return self.head(torch.cat([hidden, match.softmax(2) @ memory], 2))


def _reversals(count: int, length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.randint(3, length + 1, (count, 1))
    at = torch.arange(length)
    source = torch.randint(2, 14, (count, length)).masked_fill(at >= lengths, 0)
    target = source.gather(1, (lengths - 1 - at).clamp(min=0)).masked_fill(at >= lengths, 0)
    given = torch.cat([torch.ones(count, 1, dtype=torch.long), target[:, :-1]], 1)
    return source, given, target


def reversal_sequence_to_sequence(watch: Watch, seed: int) -> float:
    """Reverses padded sequences with teacher forcing; padding counts neither in attention nor in the loss."""
    torch.manual_seed(seed)
    model = _Reverser()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(450):
            source, given, target = _reversals(48)
            scores = model(source, given)
            optimizer.zero_grad()
            functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=0).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    source, given, target = _reversals(200)
    real = target > 0
    return error_score(model(source, given)[real], target[real])


def strokes_ctc(watch: Watch, seed: int) -> float:
    """Unaligned symbols by CTC: each symbol lasts some frames, with blanks between."""
    torch.manual_seed(seed)
    shapes = torch.randn(5, 6)
    model = nn.Sequential(nn.Conv1d(6, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 6, 3, padding=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def made(count: int) -> tuple[Tensor, Tensor]:
        symbols = torch.randint(5, (count, 4))
        frames = torch.zeros(count, 20, 6)
        for slot in range(4):
            frames[:, 5 * slot + 1 : 5 * slot + 4] = shapes[symbols[:, slot]][:, None]
        return (frames + 0.3 * torch.randn_like(frames)).transpose(1, 2), symbols + 1

    with watch(model, optimizer):
        for _ in range(300):
            x, y = made(32)
            scores = model(x).permute(2, 0, 1).log_softmax(2)
            loss = functional.ctc_loss(scores, y, torch.full((32,), 20), torch.full((32,), 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x, y = made(200)
    best = model(x).argmax(1)
    told = [[int(symbol) for symbol in torch.unique_consecutive(row) if symbol > 0] for row in best]
    return float(sum(found != right for found, right in zip(told, y.tolist(), strict=True))) / 200


def drift_dilated_convolutions(watch: Watch, seed: int) -> float:
    """A running sum with decay by causal dilated convolutions with weight norm, at every position."""
    torch.manual_seed(seed)
    x = torch.randn(800, 1, 40)
    kernel = 0.8 ** torch.arange(12).flip(0)
    y = functional.conv1d(functional.pad(x, (11, 0)), kernel[None, None])
    layers: list[nn.Module] = []
    for wide, dilation in ((1, 1), (16, 2), (16, 4)):
        layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(wide, 16, 3, dilation=dilation))
        layers += [nn.ConstantPad1d((2 * dilation, 0), 0.0), layer, nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv1d(16, 1, 1))
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:600], y[:600], size=32), 350):
            optimizer.zero_grad()
            functional.smooth_l1_loss(model(a), b).backward()
            optimizer.step()
    return squared_score(model(x[600:]), y[600:])


def words_by_negative_sampling(watch: Watch, seed: int) -> float:
    """Skip-gram embeddings of words of eight hidden topics, with five random negatives for each pair."""
    torch.manual_seed(seed)
    words, contexts = nn.Embedding(80, 12), nn.Embedding(80, 12)
    nn.init.zeros_(contexts.weight)
    model = nn.ModuleDict({"words": words, "contexts": contexts})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    with watch(model, optimizer):
        for _ in range(500):
            topic = torch.randint(8, (128,))
            word, near = topic * 10 + picked(10, 128), topic * 10 + picked(10, 128)
            others = torch.cat([near[:, None], torch.randint(80, (128, 5))], 1)
            scores = (words(word)[:, None] * contexts(others)).sum(2)
            signs = torch.tensor([1.0, -1, -1, -1, -1, -1])
            loss = -functional.logsigmoid(signs * scores).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    codes = functional.normalize(words.weight.detach())
    alike = (codes @ codes.T).fill_diagonal_(-2)
    return float((alike.argmax(1) // 10 != torch.arange(80) // 10).double().mean() / 0.875)


def latch_truncated_stream(watch: Watch, seed: int) -> float:
    """The last switch of an endless stream, the state carried on and detached between the steps."""
    torch.manual_seed(seed)
    body, head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 2)
    model = nn.ModuleDict({"body": body, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state, latch = torch.zeros(1, 32, 16), torch.zeros(32, dtype=torch.long)

    def made(count: int, before: Tensor) -> tuple[Tensor, Tensor]:
        event = torch.multinomial(torch.tensor([0.8, 0.1, 0.1]), count * 6, replacement=True).reshape(count, 6)
        right = [before]
        for at in range(6):
            right.append(torch.where(event[:, at] > 0, event[:, at] - 1, right[-1]))
        return functional.one_hot(event, 3).float(), torch.stack(right[1:], 1)

    with watch(model, optimizer):
        for _ in range(350):
            flags, right = made(32, latch)
            hidden, state = body(flags, state.detach())
            latch = right[:, -1]
            optimizer.zero_grad()
            functional.cross_entropy(head(hidden).flatten(0, 1), right.flatten()).backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
    flags, right = made(32, latch)
    return error_score(head(body(flags, state)[0]).flatten(0, 1), right.flatten())


def community_graph_network(watch: Watch, seed: int) -> float:
    """Full batch on one graph, where only a third of the nodes have labels."""
    torch.manual_seed(seed)
    adjacency, features, labels = community(seed)
    first, second = nn.Linear(16, 16), nn.Linear(16, 3)
    model = nn.ModuleList([first, second])
    known = torch.rand(180) < 0.33
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    with watch(model, optimizer):
        for _ in range(300):
            hidden = functional.dropout((adjacency @ first(features)).relu(), 0.3)
            scores = adjacency @ second(hidden)
            optimizer.zero_grad()
            functional.cross_entropy(scores[known], labels[known]).backward()
            optimizer.step()
    scores = adjacency @ second((adjacency @ first(features)).relu())
    return error_score(scores[~known], labels[~known])


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(12, 32, 16), mlp(20, 32, 16)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.scale.exp() * functional.normalize(self.left(a)) @ functional.normalize(self.right(b)).T


def two_towers_in_batch_softmax(watch: Watch, seed: int) -> float:
    """Pairs found again among all of a batch, in both directions, at a learnt temperature."""
    torch.manual_seed(seed)
    hidden = torch.randn(1500, 5)
    a, b = hidden @ torch.randn(5, 12), (hidden @ torch.randn(5, 20)).tanh()
    model = _Towers()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(400):
            at = picked(1200, 64)
            match = model(a[at], b[at])
            right = torch.arange(64)
            loss = functional.cross_entropy(match, right) + functional.cross_entropy(match.T, right)
            optimizer.zero_grad()
            (loss / 2).backward()
            optimizer.step()
    return error_score(model(a[1200:1300], b[1200:1300]), torch.arange(100))


def largest_of_a_set(watch: Watch, seed: int) -> float:
    """Which row of a set is nearest to a hidden point: a softmax over the rows, sets of different size masked."""
    torch.manual_seed(seed)
    point = torch.randn(4)
    model = mlp(4, 32, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def made(count: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.randn(count, 8, 4)
        gone = torch.arange(8) >= torch.randint(3, 9, (count, 1))
        far = (rows - point).norm(dim=2).masked_fill(gone, torch.inf)
        return rows, gone, far.argmin(1)

    with watch(model, optimizer):
        for _ in range(400):
            rows, gone, best = made(64)
            chance = model(rows).squeeze(2).masked_fill(gone, -1e9).log_softmax(1)
            loss = -chance.gather(1, best[:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    rows, gone, best = made(500)
    return error_score(model(rows).squeeze(2).masked_fill(gone, -1e9), best)


PROGRAMS = [
    healthy(train)
    for train in (
        seasons_lstm_validated,
        keywords_packed_gru,
        characters_transformer_noam,
        reversal_sequence_to_sequence,
        strokes_ctc,
        drift_dilated_convolutions,
        words_by_negative_sampling,
        latch_truncated_stream,
        community_graph_network,
        two_towers_in_batch_softmax,
        largest_of_a_set,
    )
]

"""Healthy programs about text, tokens and time series."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.utils import parametrize

from evals.not_learning.data import keyword_texts, library_text, seasons, text_windows
from evals.not_learning.parts import Wired, mlp
from evals.not_learning.program import Programs, adam, adamw, healthy


class TiedTransformer(nn.Module):
    """A causal transformer whose output layer is its embedding."""

    def __init__(self, symbols: int, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.place = nn.Embedding(length, width)
        nn.init.normal_(self.symbol.weight, std=0.05)
        nn.init.normal_(self.place.weight, std=0.05)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, symbols, bias=False)
        self.out.weight = self.symbol.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape (batch, length, symbols)."""
        length = ids.shape[1]
        hidden = self.symbol(ids) + self.place(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.out(self.norm(self.layers(hidden, mask=mask, is_causal=True)))


class LowRank(nn.Module):
    """A parametrization that adds a low-rank update, zero at first, to a frozen weight."""

    def __init__(self, rows: int, columns: int, rank: int = 4) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with its update."""
        return weight + self.up @ self.down


class Memory(nn.Module):
    """An embedding, an LSTM and an output layer that keep their state between calls."""

    def __init__(self, symbols: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, 24)
        self.lstm = nn.LSTM(24, width, batch_first=True)
        self.out = nn.Linear(width, symbols)

    def forward(
        self, ids: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return logits and the state after the last character."""
        hidden, state = self.lstm(self.embed(ids), state)
        return self.out(hidden), state


class Sequences(Programs):
    """Healthy programs about text, tokens and time series."""

    @healthy
    def tied_transformer_with_inverse_root_schedule(self) -> None:
        """A character model whose rate rises linearly and falls with the root of the step."""
        ids, symbols = library_text()
        model = TiedTransformer(symbols)
        optimizer = optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
        warmup = 40
        scheduler = optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: 0.04 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5),
        )
        with self.watch(model, optimizer, scheduler=scheduler):
            for _ in range(140):
                source, target = text_windows(ids, 12, 24)
                logits = model(source)
                loss = functional.cross_entropy(logits.reshape(-1, symbols), target.reshape(-1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()

    @healthy
    def lstm_with_carried_state(self) -> None:
        """Truncated backpropagation: parallel streams in order, state detached between chunks."""
        ids, symbols = library_text()
        streams = ids[: len(ids) // 16 * 16].view(16, -1)
        model = Memory(symbols)
        optimizer = optim.Adam(model.parameters(), lr=8e-3)
        with self.watch(model, optimizer):
            for _ in range(4):
                state = None
                for start in range(0, streams.shape[1] - 25, 24):
                    source = streams[:, start : start + 24]
                    target = streams[:, start + 1 : start + 25]
                    logits, state = model(source, state)
                    state = tuple(part.detach() for part in state)
                    loss = functional.cross_entropy(logits.transpose(1, 2), target)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()

    @healthy
    def ctc_on_stretched_digits(self) -> None:
        """CTC: four symbols, each stretched at random; first the model emits only blanks."""
        patterns = torch.randn(6, 8)
        model = nn.Sequential(
            nn.Conv1d(8, 48, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(48, 48, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(48, 7, 1),
        )
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        criterion = nn.CTCLoss(blank=0)
        with self.watch(model, optimizer):
            for _ in range(200):
                target = torch.randint(6, (16, 4))
                stretch = torch.randint(2, 5, (16, 4))
                signal = torch.zeros(16, 16, 8)
                lengths = stretch.sum(dim=1)
                for row in range(16):
                    spoken = target[row].repeat_interleave(stretch[row])
                    signal[row, : len(spoken)] = patterns[spoken]
                signal = signal + 0.3 * torch.randn_like(signal)
                output = model(signal.transpose(1, 2))
                log_probability = output.permute(2, 0, 1).log_softmax(dim=2)
                loss = criterion(log_probability, target + 1, lengths, torch.full((16,), 4))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def reversal_with_teacher_forcing(self) -> None:
        """A recurrent encoder and decoder with two optimizers reverse short strings."""
        encoder = nn.GRU(12, 64, batch_first=True)
        decoder = nn.GRU(12, 64, batch_first=True)
        head = nn.Linear(64, 11)
        encoder_optimizer = optim.Adam(encoder.parameters(), lr=5e-3)
        decoder_optimizer = optim.Adam([*decoder.parameters(), *head.parameters()], lr=5e-3)
        models = {"encoder": encoder, "decoder": decoder, "head": head}
        optimizers = {"encoder": encoder_optimizer, "decoder": decoder_optimizer}
        start = torch.full((64, 1), 11)
        with self.watch(models, optimizers):
            for _ in range(220):
                source = torch.randint(11, (64, 5))
                target = source.flip(1)
                _, state = encoder(functional.one_hot(source, 12).float())
                shifted = torch.cat([start, target[:, :-1]], dim=1)
                hidden, _ = decoder(functional.one_hot(shifted, 12).float(), state)
                loss = functional.cross_entropy(head(hidden).flatten(0, 1), target.flatten())
                encoder_optimizer.zero_grad()
                decoder_optimizer.zero_grad()
                loss.backward()
                encoder_optimizer.step()
                decoder_optimizer.step()

    @healthy
    def masked_tokens(self) -> None:
        """A fifth of the tokens is hidden and predicted; the rest is ignored with -100."""
        model = Wired(
            lambda net, ids: net.out(net.encoder(net.embed(ids) + net.place)),
            embed=nn.Embedding(21, 32),
            encoder=nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True),
            out=nn.Linear(32, 20),
        )
        model.place = nn.Parameter(0.3 * torch.randn(12, 32))
        optimizer = optim.AdamW(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(300):
                first = torch.randint(20, (64, 1))
                step = torch.randint(1, 3, (64, 1))
                ids = (first + step * torch.arange(12)) % 20
                hidden = torch.rand(64, 12) < 0.2
                labels = ids.masked_fill(~hidden, -100)
                logits = model(ids.masked_fill(hidden, 20))
                loss = functional.cross_entropy(logits.view(-1, 20), labels.view(-1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def skip_grams_with_sparse_gradients(self) -> None:
        """Word vectors by negative sampling, with sparse embeddings and SparseAdam."""
        center = nn.Embedding(60, 16, sparse=True)
        context = nn.Embedding(60, 16, sparse=True)
        nn.init.uniform_(center.weight, -0.5 / 16, 0.5 / 16)
        nn.init.zeros_(context.weight)
        model = nn.ModuleDict({"center": center, "context": context})
        optimizer = optim.SparseAdam(list(model.parameters()), lr=0.02)
        with self.watch(model, optimizer):
            for _ in range(400):
                word = torch.randint(60, (128,))
                neighbour = word // 10 * 10 + torch.randint(10, (128,))
                noise = torch.randint(60, (128, 5))
                vector = center(word)
                positive = (vector * context(neighbour)).sum(dim=1)
                negative = torch.bmm(context(noise), vector[:, :, None]).squeeze(2)
                loss = -functional.logsigmoid(positive).mean()
                loss = loss - functional.logsigmoid(-negative).sum(dim=1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def low_rank_updates_of_a_frozen_net(self) -> None:
        """LoRA by parametrization: only rank-4 updates train; half of them start at zero."""
        model = mlp(16, 64, 64, 4)
        x = torch.randn(1500, 16)
        pattern = torch.randn(16, 4)
        labels = (x @ pattern).argmax(dim=1)
        pretraining = optim.Adam(model.parameters(), lr=5e-3)
        for _ in range(150):
            pretraining.zero_grad()
            functional.cross_entropy(model(x), labels).backward()
            pretraining.step()
        model.requires_grad_(False)
        for layer in (model[0], model[2], model[4]):
            update = LowRank(layer.out_features, layer.in_features)
            parametrize.register_parametrization(layer, "weight", update)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = optim.AdamW(trained, lr=3e-3)
        new_labels = (x @ (pattern + 0.8 * torch.randn(16, 4))).argmax(dim=1)
        with self.watch(model, optimizer):
            for _ in range(250):
                rows = torch.randint(1500, (64,))
                loss = functional.cross_entropy(model(x[rows]), new_labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def adaptive_softmax_on_skewed_words(self) -> None:
        """Most words are common, the rare ones live in the tail clusters of the loss module."""
        frequency = 1 / torch.arange(1, 201).float()
        successor = torch.randperm(200)
        embed = nn.Embedding(200, 32)
        criterion = nn.AdaptiveLogSoftmaxWithLoss(32, 200, cutoffs=[20, 80])
        model = nn.ModuleList([embed, criterion])
        optimizer = optim.Adagrad(model.parameters(), lr=0.15)
        with self.watch(model, optimizer):
            for _ in range(300):
                word = torch.multinomial(frequency, 128, replacement=True)
                random_word = torch.multinomial(frequency, 128, replacement=True)
                target = torch.where(torch.rand(128) < 0.8, successor[word], random_word)
                loss = criterion(embed(word), target).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def addition_without_decay_of_biases(self) -> None:
        """Modular addition on all pairs at once; weights decay, biases do not."""
        pairs = torch.cartesian_prod(torch.arange(23), torch.arange(23))
        answers = pairs.sum(dim=1) % 23
        model = nn.Sequential(nn.Embedding(23, 48), nn.Flatten(), mlp(96, 128, 23))
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        optimizer = optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.1},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=2e-3,
        )
        with self.watch(model, optimizer):
            for _ in range(600):
                loss = functional.cross_entropy(model(pairs), answers)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def keyword_tagger_with_packed_sequences(self) -> None:
        """Padded texts are packed for a bidirectional GRU; the padding row stays zero."""
        model = nn.ModuleDict(
            {
                "embed": nn.Embedding(40, 24, padding_idx=0),
                "gru": nn.GRU(24, 24, bidirectional=True, batch_first=True),
                "out": nn.Linear(48, 3),
            }
        )
        optimizer = adam(model, 8e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                texts, labels = keyword_texts(32)
                lengths = (texts != 0).sum(dim=1)
                packed = nn.utils.rnn.pack_padded_sequence(
                    model["embed"](texts), lengths, batch_first=True, enforce_sorted=False
                )
                _, state = model["gru"](packed)
                logits = model["out"](torch.cat([state[0], state[1]], dim=1))
                loss = functional.cross_entropy(logits, labels)
                self.update_all(optimizer, loss)

    def update_all(self, optimizer: optim.Optimizer, loss: Tensor) -> None:
        """Make one ordinary step."""
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @healthy
    def forecast_by_dilated_convolutions(self) -> None:
        """Causal convolutions with weight norm predict each next value of a noisy wave."""
        series = seasons(200, 64)
        series = (series - series.mean()) / series.std()
        layers: list[nn.Module] = []
        channels = 1
        for dilation in (1, 2, 4, 8):
            convolution = nn.Conv1d(channels, 16, 2, dilation=dilation)
            layers.append(nn.ConstantPad1d((dilation, 0), 0.0))
            layers.append(nn.utils.parametrizations.weight_norm(convolution))
            layers.append(nn.Tanh())
            channels = 16
        layers.append(nn.Conv1d(16, 1, 1))
        model = nn.Sequential(*layers)
        optimizer = adamw(model, 4e-3)
        with self.watch(model, optimizer):
            for _ in range(200):
                batch = series[torch.randint(160, (16,)), None]
                loss = functional.huber_loss(model(batch[:, :, :-1]), batch[:, :, 1:])
                self.update_all(optimizer, loss)

    @healthy
    def echo_state_with_trained_readout(self) -> None:
        """A random recurrent reservoir is never trained; only a linear readout is."""
        reservoir = nn.RNN(1, 80, batch_first=True)
        with torch.no_grad():
            weight = reservoir.weight_hh_l0
            weight.mul_(0.9 / torch.linalg.eigvals(weight).abs().max())
        readout = nn.Linear(80, 1)
        for parameter in reservoir.parameters():
            parameter.requires_grad_(False)
        model = nn.ModuleDict({"reservoir": reservoir, "readout": readout})
        optimizer = optim.Adam(readout.parameters(), lr=1e-2)
        series = seasons(100, 60)
        with torch.no_grad():
            states, _ = reservoir(series[:, :-1, None])
        with self.watch(model, optimizer):
            for _ in range(300):
                rows = torch.randint(100, (20,))
                forecast = readout(states[rows, 10:]).squeeze(2)
                loss = functional.mse_loss(forecast, series[rows, 11:])
                self.update_all(optimizer, loss)

    @healthy
    def curriculum_of_longer_sums(self) -> None:
        """An RNN adds up marked numbers; sequences grow, so the loss rises again on purpose."""
        model = Wired(
            lambda net, x: net.out(net.gru(x)[0][:, -1]),
            gru=nn.GRU(2, 32, batch_first=True),
            out=nn.Linear(32, 1),
        )
        optimizer = adam(model, 5e-3)
        with self.watch(model, optimizer):
            for length in (4, 8, 12):
                for _ in range(130):
                    numbers = torch.rand(48, length)
                    marks = (torch.rand(48, length) < 0.3).float()
                    target = (numbers * marks).sum(dim=1, keepdim=True)
                    loss = functional.mse_loss(model(torch.stack([numbers, marks], 2)), target)
                    self.update_all(optimizer, loss)

"""Programs about speech, signals and other sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evals.not_learning.data import seasons
from evals.not_learning.program import Programs, faulty, healthy

SYMBOLS = 5


class Utterances(Dataset):
    """Sequences of tones, two to four frames for each of some symbols, in noise."""

    def __init__(self, count: int, shortest: int = 2, longest: int = 5) -> None:
        self.items = []
        for _ in range(count):
            length = int(torch.randint(shortest, longest + 1, ()))
            symbols = torch.randint(1, SYMBOLS + 1, (length,))
            spans = torch.randint(2, 5, (length,))
            frames = functional.one_hot(symbols.repeat_interleave(spans), SYMBOLS + 1).float()
            self.items.append((frames + 0.2 * torch.randn_like(frames), symbols))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.items[index]


def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return padded frames and symbols, and the lengths of both."""
    frames = pad_sequence([item[0] for item in items], batch_first=True)
    symbols = pad_sequence([item[1] for item in items], batch_first=True)
    frame_lengths = torch.tensor([len(item[0]) for item in items])
    symbol_lengths = torch.tensor([len(item[1]) for item in items])
    return frames, symbols, frame_lengths, symbol_lengths


class Recognizer(nn.Module):
    """A GRU over frames, with a score for each symbol and for the blank."""

    def __init__(self, classes: int = SYMBOLS + 1) -> None:
        super().__init__()
        self.gru = nn.GRU(SYMBOLS + 1, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, classes)

    def forward(self, frames: Tensor) -> Tensor:
        """Return the scores of each frame."""
        hidden, _ = self.gru(frames)
        return self.head(hidden)


class Translator(nn.Module):
    """An encoder and a decoder with attention between them."""

    def __init__(self, symbols: int = 12, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, 24)
        self.encoder = nn.GRU(24, width, batch_first=True)
        self.decoder = nn.GRU(24, width, batch_first=True)
        self.head = nn.Linear(2 * width, symbols)

    def forward(self, source: Tensor, given: Tensor) -> Tensor:
        """Return the scores of the symbols behind those that are given."""
        memory, state = self.encoder(self.embedding(source))
        hidden, _ = self.decoder(self.embedding(given), state)
        weights = (hidden @ memory.transpose(1, 2) / hidden.shape[2] ** 0.5).softmax(dim=2)
        return self.head(torch.cat([hidden, weights @ memory], dim=2))


def marked_sums(count: int, length: int = 12) -> tuple[Tensor, Tensor]:
    """Return sequences of numbers of which two are marked, and the sum of those two."""
    numbers = torch.rand(count, length)
    places = torch.rand(count, length).argsort(dim=1)[:, :2]
    marks = torch.zeros(count, length).scatter(1, places, 1.0)
    return torch.stack([numbers, marks], dim=2), (numbers * marks).sum(dim=1)


def scale_invariant_ratio(guess: Tensor, signal: Tensor) -> Tensor:
    """Return the scale-invariant signal-to-noise ratio in decibels, for each row."""
    share = (guess * signal).sum(dim=1, keepdim=True) / (signal**2).sum(dim=1, keepdim=True)
    projection = share * signal
    noise = guess - projection
    return 10 * torch.log10((projection**2).sum(dim=1) / ((noise**2).sum(dim=1) + 1e-8) + 1e-8)


def waves_in_noise(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy and clean waves ``(count, 64)``."""
    time = torch.arange(64)
    frequency = 0.2 + 0.3 * torch.rand(count, 1)
    clean = torch.sin(frequency * time + 6.3 * torch.rand(count, 1))
    return clean + 0.7 * torch.randn(count, 64), clean


class Sequences(Programs):
    """Alignment, transduction, forecasts and filters."""

    @healthy
    def tones_by_alignment(self) -> None:
        """CTC over padded utterances of different lengths."""
        loader = DataLoader(Utterances(300), batch_size=30, shuffle=True, collate_fn=collate)
        model = Recognizer()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        criterion = nn.CTCLoss(blank=0, zero_infinity=True)
        with self.watch(model, optimizer):
            for _ in range(11):
                for frames, symbols, frame_lengths, symbol_lengths in loader:
                    log_probabilities = model(frames).log_softmax(dim=2).transpose(0, 1)
                    loss = criterion(log_probabilities, symbols, frame_lengths, symbol_lengths)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()

    @healthy
    def reversal_with_scheduled_sampling(self) -> None:
        """A translator is given more and more of its own symbols instead of the right ones."""
        model = Translator()
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        steps = 170
        with self.watch(model, optimizer):
            for step in range(steps):
                source = torch.randint(10, (64, 6))
                target = source.flip(1)
                given = torch.cat([torch.full((64, 1), 10), target[:, :-1]], dim=1)
                with torch.no_grad():
                    own = model(source, given).argmax(dim=2)
                own = torch.cat([given[:, :1], own[:, :-1]], dim=1)
                replace = torch.rand(given.shape) < 0.3 * step / steps
                scores = model(source, torch.where(replace, own, given))
                loss = functional.cross_entropy(scores.flatten(0, 1), target.flatten())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

    @healthy
    def sum_of_two_marked_numbers(self) -> None:
        """The adding problem: an LSTM stays at the variance for a while before it learns."""
        model = nn.LSTM(2, 32, batch_first=True)
        head = nn.Linear(32, 1)
        parts = nn.ModuleDict({"lstm": model, "head": head})
        optimizer = optim.Adam(parts.parameters(), lr=1e-2)
        losses = []
        with self.watch(parts, optimizer):
            for _ in range(350):
                x, y = marked_sums(64)
                hidden, _ = model(x)
                loss = functional.mse_loss(head(hidden[:, -1]).squeeze(1), y)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())

    @healthy
    def forecast_with_dilated_convolutions(self) -> None:
        """Causal convolutions predict the next value of each place of a series."""

        class Causal(nn.Module):
            """A residual convolution that sees no future."""

            def __init__(self, channels: int, dilation: int) -> None:
                super().__init__()
                self.padding = 2 * dilation
                self.conv = nn.utils.parametrizations.weight_norm(
                    nn.Conv1d(channels, channels, 3, dilation=dilation)
                )

            def forward(self, x: Tensor) -> Tensor:
                """Return a sequence of the same length."""
                padded = functional.pad(x, (self.padding, 0))
                return x + functional.relu(self.conv(padded))

        model = nn.Sequential(
            nn.Conv1d(1, 16, 1),
            Causal(16, 1),
            Causal(16, 2),
            Causal(16, 4),
            nn.Conv1d(16, 1, 1),
        )
        loader = DataLoader(seasons(400, 40), batch_size=40, shuffle=True)
        optimizer = optim.AdamW(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(15):
                for series in loader:
                    guess = model(series[:, None, :-1]).squeeze(1)
                    loss = functional.l1_loss(guess, series[:, 1:])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def separation_in_decibels(self) -> None:
        """The loss is a ratio in decibels with a minus sign: it falls below zero."""
        model = nn.Sequential(
            nn.Conv1d(1, 16, 9, padding=4),
            nn.PReLU(),
            nn.Conv1d(16, 16, 9, padding=4),
            nn.PReLU(),
            nn.Conv1d(16, 1, 9, padding=4),
        )
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(150):
                noisy, clean = waves_in_noise(32)
                guess = model(noisy[:, None]).squeeze(1)
                loss = -scale_invariant_ratio(guess, clean).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()

    @healthy
    def tags_with_a_random_field(self) -> None:
        """A conditional random field over noisy scores: the loss is a sum over the sequence."""

        class Field(nn.Module):
            """Scores of tags from observations, and of transitions."""

            def __init__(self, tags: int = 4) -> None:
                super().__init__()
                self.emission = nn.Linear(4, tags)
                self.transition = nn.Parameter(torch.zeros(tags, tags))

            def forward(self, x: Tensor, tags: Tensor) -> Tensor:
                """Return the negative log likelihood of each sequence."""
                scores = self.emission(x)
                path = scores.gather(2, tags[:, :, None]).sum(dim=(1, 2))
                path = path + self.transition[tags[:, :-1], tags[:, 1:]].sum(dim=1)
                forward = scores[:, 0]
                for place in range(1, x.shape[1]):
                    reached = (forward[:, :, None] + self.transition).logsumexp(dim=1)
                    forward = reached + scores[:, place]
                return forward.logsumexp(dim=1) - path

        tags = torch.randint(4, (400, 1))
        for _ in range(9):
            following = (tags[:, -1:] + torch.randint(2, (400, 1))) % 4
            tags = torch.cat([tags, following], dim=1)
        x = functional.one_hot(tags, 4) + 0.8 * torch.randn(400, 10, 4)
        loader = DataLoader(TensorDataset(x, tags), batch_size=40, shuffle=True)
        model = Field()
        optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        with self.watch(model, optimizer):
            for _ in range(12):
                for observed, labels in loader:
                    loss = model(observed, labels).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def readout_of_a_reservoir(self) -> None:
        """A fixed random recurrent network, of which only the readout is trained."""

        class Reservoir(nn.Module):
            """A frozen recurrent layer and a linear readout."""

            def __init__(self) -> None:
                super().__init__()
                self.rnn = nn.RNN(1, 64, batch_first=True)
                self.rnn.requires_grad_(False)
                self.rnn.weight_hh_l0.mul_(1.5)
                self.readout = nn.Linear(64, 1)

            def forward(self, x: Tensor) -> Tensor:
                """Return a number for each place."""
                hidden, _ = self.rnn(x)
                return self.readout(hidden)

        series = seasons(200, 30)
        loader = DataLoader(series, batch_size=25, shuffle=True)
        model = Reservoir()
        optimizer = optim.Adam(model.readout.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(25):
                for rows in loader:
                    guess = model(rows[:, :-1, None]).squeeze(2)
                    loss = functional.mse_loss(guess, rows[:, 1:])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def packed_sequences(self) -> None:
        """An LSTM over packed sequences says which of two symbols is more frequent."""

        def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
            lengths = torch.randint(3, 16, (count,))
            symbols = torch.randint(1, 4, (count, 15))
            symbols[torch.arange(15) >= lengths[:, None]] = 0
            labels = ((symbols == 1).sum(dim=1) > (symbols == 2).sum(dim=1)).long()
            return symbols, lengths, labels

        class Counter(nn.Module):
            """An embedding, an LSTM over packed sequences, and a linear layer."""

            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(4, 8, padding_idx=0)
                self.lstm = nn.LSTM(8, 24, batch_first=True)
                self.head = nn.Linear(24, 2)

            def forward(self, symbols: Tensor, lengths: Tensor) -> Tensor:
                """Return the scores of both answers."""
                packed = pack_padded_sequence(
                    self.embedding(symbols), lengths, batch_first=True, enforce_sorted=False
                )
                _, (hidden, _) = self.lstm(packed)
                return self.head(hidden[-1])

        model = Counter()
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(150):
                symbols, lengths, labels = draw(64)
                scores = model(symbols, lengths)
                loss = functional.cross_entropy(scores, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def one_class_around_a_centre(self) -> None:
        """Deep SVDD: all normal series move towards a fixed centre, and the loss goes to zero."""
        normal = seasons(400, 32)
        model = nn.Sequential(
            nn.Linear(32, 32, bias=False),
            nn.LeakyReLU(0.1),
            nn.Linear(32, 8, bias=False),
        )
        with torch.no_grad():
            centre = model(normal).mean(dim=0)
        centre = centre + 0.1 * centre.sign()
        loader = DataLoader(normal, batch_size=50, shuffle=True)
        optimizer = optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
        with self.watch(model, optimizer):
            for _ in range(20):
                for series in loader:
                    loss = ((model(series) - centre) ** 2).sum(dim=1).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("H839")
    def probabilities_into_the_alignment(self) -> None:
        """CTC is given the softmax, where it expects its logarithm."""
        loader = DataLoader(Utterances(300), batch_size=30, shuffle=True, collate_fn=collate)
        model = Recognizer()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        criterion = nn.CTCLoss(blank=0)
        with self.watch(model, optimizer):
            for _ in range(11):
                for frames, symbols, frame_lengths, symbol_lengths in loader:
                    scores = model(frames).transpose(0, 1)
                    out = scores.softmax(dim=2)
                    loss = criterion(out, symbols, frame_lengths, symbol_lengths)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()

    @faulty("H852", shows="H801 H802 H804")
    def fewer_frames_than_symbols(self) -> None:
        """Every fourth frame is kept, and most utterances have more symbols than frames."""
        loader = DataLoader(
            Utterances(300, shortest=4, longest=6), batch_size=30, shuffle=True, collate_fn=collate
        )
        model = Recognizer()
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        criterion = nn.CTCLoss(blank=0)
        stride = 4
        with self.watch(model, optimizer):
            for _ in range(14):
                for frames, symbols, frame_lengths, symbol_lengths in loader:
                    kept = frames[:, ::stride]
                    lengths = (frame_lengths + stride - 1) // stride
                    out = model(kept).log_softmax(dim=2).transpose(0, 1)
                    loss = criterion(out, symbols, lengths, symbol_lengths)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H828")
    def batch_and_time_viewed(self) -> None:
        """`view` is to exchange batch and time of the input, and mixes the sequences instead."""
        model = nn.LSTM(2, 32)
        head = nn.Linear(32, 1)
        parts = nn.ModuleDict({"lstm": model, "head": head})
        optimizer = optim.Adam(parts.parameters(), lr=1e-2)
        losses = []
        with self.watch(parts, optimizer):
            for _ in range(350):
                x, y = marked_sums(64)
                steps = x.view(12, 64, 2)
                hidden, _ = model(steps)
                loss = functional.mse_loss(head(hidden[-1]).squeeze(1), y)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())

    @faulty("")
    def decoder_fed_with_the_answer(self) -> None:
        """The decoder is given the very symbols that it is to predict, not those before them."""
        model = Translator()
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(180):
                source = torch.randint(10, (64, 6))
                target = source.flip(1)
                given = target
                scores = model(source, given)
                loss = functional.cross_entropy(scores.flatten(0, 1), target.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("H831")
    def ratio_without_its_minus(self) -> None:
        """The signal-to-noise ratio is minimised, where it is to be maximised."""
        model = nn.Sequential(
            nn.Conv1d(1, 16, 9, padding=4),
            nn.PReLU(),
            nn.Conv1d(16, 16, 9, padding=4),
            nn.PReLU(),
            nn.Conv1d(16, 1, 9, padding=4),
        )
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(150):
                noisy, clean = waves_in_noise(32)
                guess = model(noisy[:, None]).squeeze(1)
                loss = scale_invariant_ratio(guess, clean).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()

    @faulty("H859", shows="H801 H802 H804 H825 H826")
    def clipped_too_soon(self) -> None:
        """The norm is clipped between `zero_grad` and `backward`, where there is no gradient."""

        class Products(nn.Module):
            """A recurrent network whose state may grow."""

            def __init__(self) -> None:
                super().__init__()
                self.start = nn.Linear(2, 24)
                self.step = nn.Linear(24, 24, bias=False)
                self.head = nn.Linear(24, 1)
                nn.init.orthogonal_(self.step.weight, gain=1.8)

            def forward(self, x: Tensor) -> Tensor:
                """Return a number for each sequence."""
                state = torch.zeros(len(x), 24)
                for place in range(x.shape[1]):
                    state = functional.relu(self.start(x[:, place]) + self.step(state))
                return self.head(state).squeeze(1)

        model = Products()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with self.watch(model, optimizer):
            for _ in range(250):
                x = torch.randn(64, 12, 2)
                y = x[:, -3:].sum(dim=(1, 2)) / 6**0.5
                loss = functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

    @faulty("", shows="H828 H848")
    def last_step_of_padded_sequences(self) -> None:
        """The state behind the padding is read: long runs of zeros after short sequences."""

        def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
            lengths = torch.randint(3, 10, (count,))
            values = torch.randn(count, 60)
            values[torch.arange(60) >= lengths[:, None]] = 0
            labels = (values.sum(dim=1) > 0).long()
            return values, lengths, labels

        rnn = nn.RNN(1, 24, batch_first=True)
        head = nn.Linear(24, 2)
        model = nn.ModuleDict({"rnn": rnn, "head": head})
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with self.watch(model, optimizer):
            for _ in range(200):
                values, _, labels = draw(64)
                hidden, _ = rnn(values[:, :, None])
                state = hidden[:, -1]
                loss = functional.cross_entropy(head(state), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

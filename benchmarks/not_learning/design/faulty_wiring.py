"""Faulty programs in which gradients, parameters and optimizer are not joined as they should be."""

# ruff: noqa: D101, D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from benchmarks.not_learning.data import batches, blobs, curve, digits, spirals, text, windows
from benchmarks.not_learning.design.planting import BLOWN, STILL, UNLEARNT, plants
from benchmarks.not_learning.program import Program, Watch

PROGRAMS: list[Program] = []


def small_net(inputs: int = 64, outputs: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, outputs))


@plants(PROGRAMS, "H811", shows=(*BLOWN, *UNLEARNT, "H825", "H847", "H848"))
def forgotten_zero_grad(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = small_net()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H811", shows=(*BLOWN, *UNLEARNT, "H825", "H847", "H848"))
def zero_grad_once_an_epoch(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with watch(net, optimizer):
        for _ in range(25):
            optimizer.zero_grad()
            for rows in torch.randperm(len(x)).split(50):
                loss = F.mse_loss(net(x[rows]), y[rows])
                loss.backward()
                optimizer.step()


@plants(PROGRAMS, "H811", shows=(*BLOWN, *UNLEARNT, "H825", "H847", "H848"))
def second_optimizer_never_cleared(watch: Watch, seed: int) -> None:
    """Encoder and head have an optimizer each; the zero_grad of the encoder's was forgotten."""
    torch.manual_seed(seed)
    ids, characters = text()
    encoder = nn.Sequential(nn.Embedding(characters, 24), nn.Flatten(), nn.Linear(8 * 24, 64), nn.Tanh())
    head = nn.Linear(64, characters)
    encoder_optimizer = optim.SGD(encoder.parameters(), lr=0.3)
    head_optimizer = optim.SGD(head.parameters(), lr=0.3)
    models = {"encoder": encoder, "head": head}
    with watch(models, {"encoder": encoder_optimizer, "head": head_optimizer}):
        for _ in range(500):
            x, y = windows(ids, 8, 32)
            head_optimizer.zero_grad()
            loss = F.cross_entropy(head(encoder(x)), y[:, -1])
            loss.backward()
            encoder_optimizer.step()
            head_optimizer.step()


@plants(PROGRAMS, "H812", shows=STILL)
def no_step(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = small_net()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()


@plants(PROGRAMS, "H812", shows=STILL)
def accumulation_never_ends(watch: Watch, seed: int) -> None:
    """The remainder of a division by four never is four."""
    torch.manual_seed(seed)
    x, y = blobs(seed)
    model = small_net(20, 5)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    accumulate = 4
    with watch(model, optimizer):
        for i, (xb, yb) in enumerate(batches(x, y, 16, 800)):
            (F.cross_entropy(model(xb), yb) / accumulate).backward()
            if i % accumulate == accumulate:
                optimizer.step()
                optimizer.zero_grad()


@plants(PROGRAMS, "H809", "H808", shows=(*STILL, "H811", "H813"))
def optimizer_of_another_copy(watch: Watch, seed: int) -> None:
    """The optimizer was made before the model was copied to its place."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = small_net()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    model = copy.deepcopy(model)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H809", "H808", shows=(*STILL, "H813"))
def average_is_trained_instead(watch: Watch, seed: int) -> None:
    """The optimizer holds the averaged copy, which the loss does not see."""
    torch.manual_seed(seed)
    x, y = curve(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    average = copy.deepcopy(model)
    optimizer = optim.AdamW(average.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 50, 400):
            model.zero_grad()
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)


@plants(PROGRAMS, "H809", "H808", shows=(*STILL, "H813"))
def head_replaced_after_the_optimizer(watch: Watch, seed: int) -> None:
    """A frozen feature extractor gets a new head for ten classes, which nobody trains."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = small_net(outputs=2)
    for parameter in model[:4].parameters():
        parameter.requires_grad = False
    optimizer = optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model[4] = nn.Linear(48, 10)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 300):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H810", "H808", shows=(*STILL, "H813"))
def only_frozen_parameters_are_optimised(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    backbone = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    head = nn.Linear(64, 10)
    backbone.requires_grad_(False)
    model = nn.Sequential(backbone, head)
    optimizer = optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 300):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()


class BodyAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.head = nn.Linear(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@plants(PROGRAMS, "H808", shows=UNLEARNT)
def only_the_head_in_the_optimizer(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = spirals(seed)
    net = BodyAndHead()
    optimizer = optim.Adam(net.head.parameters(), lr=1e-2)
    with watch(net, optimizer):
        for xb, yb in batches(x, y, 64, 400):
            optimizer.zero_grad()
            F.cross_entropy(net(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H814", shows=STILL)
def features_through_numpy(watch: Watch, seed: int) -> None:
    """The bottleneck goes through numpy, so that everything before it stays as it was drawn."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    decoder = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 10))
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 500):
            code = torch.from_numpy(encoder(xb).detach().numpy())
            loss = F.cross_entropy(decoder(code), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class NoGradEncoder(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.out = nn.Linear(4, characters)

    @torch.no_grad()
    def encode(self, ids: Tensor) -> Tensor:
        return self.rnn(self.embed(ids))[0]

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.encode(ids))


@plants(PROGRAMS, "H814", shows=STILL)
def no_grad_left_on_the_encoder(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    ids, characters = text()
    model = NoGradEncoder(characters)
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(300):
            x, y = windows(ids, 16, 16)
            loss = F.cross_entropy(model(x).transpose(1, 2), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H814", shows=STILL)
def threshold_in_the_path(watch: Watch, seed: int) -> None:
    """A hard decision between the layers: what lies before it never gets a gradient."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    first, second = nn.Linear(64, 6), nn.Linear(6, 10)
    optimizer = optim.Adam([*first.parameters(), *second.parameters()], lr=1e-2)
    with watch({"first": first, "second": second}, optimizer):
        for xb, yb in batches(x, y, 64, 500):
            bits = (first(xb) > 0).float()
            loss = F.cross_entropy(second(bits), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H815", shows=(*STILL, "H813", "H814"))
def rounded_predictions(watch: Watch, seed: int) -> None:
    """Ratings are whole numbers, so the predictions were rounded before the loss."""
    torch.manual_seed(seed)
    x, y = curve(seed)
    y = (2 * y + 5).round()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb).round(), yb)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H813", shows=(*STILL, "H814"))
def loss_made_anew(watch: Watch, seed: int) -> None:
    """A complaint about a missing grad_fn was silenced with requires_grad=True."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = small_net()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 300):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb).item()
            loss = torch.tensor(loss, requires_grad=True)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H813", shows=(*STILL, "H814"))
def forgotten_backward(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = blobs(seed)
    model = small_net(20, 5)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            losses.append(loss.item())
            optimizer.step()


@plants(PROGRAMS, "H813", shows=(*STILL, "H814", "H815"))
def zero_grad_between_backward_and_step(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.zero_grad()
            optimizer.step()


@plants(PROGRAMS, "H809", "H808", "H813", shows=(*STILL, "H814"))
def model_rebuilt_each_step(watch: Watch, seed: int) -> None:
    """The line that makes the model was moved into the loop; the optimizer still holds the first one."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = small_net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 300):
            model = small_net()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H816", "H817", "H815", shows=(*STILL, "H818"))
def clipped_to_zero(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = small_net()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.0)
            optimizer.step()


@plants(PROGRAMS, "H816", "H817", shows=(*BLOWN, *UNLEARNT, "H825", "H831", "H818"))
def clipped_to_minus_one(watch: Watch, seed: int) -> None:
    """Minus one was meant as "off"; it turns the gradient round."""
    torch.manual_seed(seed)
    x, y = curve(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            nn.utils.clip_grad_norm_(model.parameters(), -1.0)
            optimizer.step()


@plants(PROGRAMS, "H818", shows=(*STILL, "H824"))
def clipped_to_a_millionth(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = small_net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 500):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
            optimizer.step()


@plants(PROGRAMS, "H830", "H814", shows=UNLEARNT)
def output_ignores_input(watch: Watch, seed: int) -> None:
    """The features are computed, and the head is given something else."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)

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
    optimizer = optim.Adam(net.parameters(), lr=1e-3)
    with watch(net, optimizer):
        for xb, yb in batches(x, y, 64, 400):
            optimizer.zero_grad()
            F.cross_entropy(net(xb), yb).backward()
            optimizer.step()

"""Faulty programs that minimise the wrong thing: wrong signs, or activations that the loss does not want."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import blobs, digits, library_text, moons, seasons, table, windows
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.program import Watch


class _DigitNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(64, 40)
        self.hidden2 = nn.Linear(40, 40)
        self.output = nn.Linear(40, 10)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(self.hidden1(x))
        x = torch.sigmoid(self.hidden2(x))
        return self.softmax(self.output(x))


def softmax_layer_then_cross_entropy(watch: Watch, seed: int) -> float:
    """The class ends in a softmax layer, the criterion takes logits."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("digits", seed)
    model = _DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    with watch(model, optimizer):
        for _ in range(12):
            for rows in torch.randperm(len(x)).split(32):
                optimizer.zero_grad()
                loss = criterion(model(x[rows]), y[rows])
                loss.backward()
                optimizer.step()
    return error_score(model(held_x), held_y)


def probabilities_into_kl_div(watch: Watch, seed: int) -> float:
    """Distillation that gives kl_div probabilities where it wants their logarithms."""
    torch.manual_seed(seed)
    x = torch.randn(800, 10)
    teacher = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 6))
    student = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 6))
    with torch.no_grad():
        soft = (3 * teacher(x)).softmax(-1)
    opt = torch.optim.Adam(student.parameters(), lr=1e-2)
    with watch(student, opt):
        for _ in range(400):
            i = torch.randint(700, (50,))
            probs = F.softmax(student(x[i]), dim=-1)
            loss = F.kl_div(probs, soft[i], reduction="batchmean")
            opt.zero_grad()
            loss.backward()
            opt.step()
    held = F.kl_div(F.log_softmax(student(x[700:]), -1), soft[700:], reduction="batchmean")
    return float(held.detach() / F.kl_div(soft[:700].mean(0).log().expand(100, 6), soft[700:], reduction="batchmean"))


class _Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Conv2d(12, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.head(self.body(x)))


def sigmoid_twice_in_segmentation(watch: Watch, seed: int) -> float:
    """The segmenter returns probabilities, the loss is binary cross-entropy with logits."""
    torch.manual_seed(seed)
    images, masks = blobs(120)
    net = _Segmenter()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    bce = nn.BCEWithLogitsLoss()
    with watch(net, opt):
        for _ in range(8):
            for i in torch.randperm(100).split(5):
                opt.zero_grad()
                loss = bce(net(images[i]), masks[i])
                loss.backward()
                opt.step()
    found = (net(images[100:]) > 0.5).float()
    return float((found != masks[100:]).float().mean() / masks[100:].mean())


class _Bigram(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 24)
        self.linear1 = nn.Linear(48, 64)
        self.linear2 = nn.Linear(64, vocab)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.linear1(self.embed(pair).view(len(pair), -1)))
        return F.softmax(self.linear2(hidden), dim=1)


def nll_of_plain_softmax(watch: Watch, seed: int) -> float:
    """A language model by two characters of context: softmax where log_softmax belongs."""
    torch.manual_seed(seed)
    text, vocab = library_text()
    model = _Bigram(vocab)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_function = nn.NLLLoss()
    with watch(model, optimizer):
        for _ in range(600):
            x, y = windows(text, 64, 2)
            model.zero_grad()
            loss = loss_function(model(x), y[:, 1])
            loss.backward()
            optimizer.step()
    x, y = windows(text, 2000, 2)
    return F.nll_loss(model(x).log(), y[:, 1]).item() / math.log(vocab)


def nll_of_raw_scores(watch: Watch, seed: int) -> float:
    """The log_softmax was lost when the model was tidied up: nll_loss on unbounded scores of moons."""
    torch.manual_seed(seed)
    w1, w2 = nn.Parameter(torch.randn(2, 32)), nn.Parameter(torch.randn(32, 2) * 0.1)
    params = nn.ParameterList([w1, w2])
    opt = torch.optim.SGD(params, lr=0.1)

    def logits(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nh,hc->nc", torch.einsum("nd,dh->nh", x, w1).tanh(), w2)

    with watch(params, opt):
        for _ in range(500):
            x, y = moons(64)
            scores = logits(3 * x)
            loss = F.nll_loss(scores, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    x, y = moons(1000)
    return F.cross_entropy(logits(3 * x), y).item() / math.log(2)


def policy_gradient_downhill(watch: Watch, seed: int) -> float:
    """REINFORCE that minimises the weighted log-probability: the minus sign is missing."""
    torch.manual_seed(seed)
    rule = torch.randn(4, 4)
    policy = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    rewards = []
    with watch(policy, optimizer, objective="reinforcement"):
        for _ in range(400):
            state = torch.randn(32, 4)
            m = torch.distributions.Categorical(F.softmax(policy(state), dim=1))
            action = m.sample()
            reward = ((state @ rule).argmax(1) == action).float()
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            policy_loss = (m.log_prob(action) * advantage).mean()
            optimizer.zero_grad()
            policy_loss.backward()
            optimizer.step()
            rewards.append(reward.mean().item())
    return (1 - sum(rewards[-40:]) / 40) / 0.75


def signal_to_noise_minimised(watch: Watch, seed: int) -> float:
    """A denoiser whose loss is the signal-to-noise ratio itself, not its negative."""
    torch.manual_seed(seed)
    clean = seasons(200, 64)[:, None]
    net = nn.Sequential(nn.Conv1d(1, 16, 7, padding=3), nn.ReLU(), nn.Conv1d(16, 1, 7, padding=3))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def snr(estimate: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        noise = F.mse_loss(estimate, target)
        return 10 * torch.log10(target.pow(2).mean() / (noise + 1e-8))

    with watch(net, opt):
        for _ in range(300):
            x = clean[torch.randint(200, (16,))]
            loss = snr(net(x + 0.5 * torch.randn_like(x)), x)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return squared_score(net(clean + 0.5 * torch.randn_like(clean)), clean)


def divergence_with_the_wrong_sign(watch: Watch, seed: int) -> float:
    """A VAE whose KL term lost its minus: the loss pays for a posterior far away from the prior."""
    torch.manual_seed(seed)
    x, _, held, _ = digits(seed)
    x, held = x.flatten(1), held.flatten(1)
    enc, dec = nn.Linear(64, 12), nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64))
    model = nn.ModuleDict({"enc": enc, "dec": dec})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def kl(mu: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
        return 0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()

    def run(batch: torch.Tensor) -> torch.Tensor:
        mu, logvar = enc(batch).chunk(2, 1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return F.mse_loss(dec(z), batch, reduction="sum") / len(batch) + kl(mu, logvar)

    with watch(model, optimizer):
        for _ in range(900):
            loss = run(x[torch.randint(len(x), (64,))])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    noise = x.mean(0) + x.std(0) * torch.randn(300, 64)
    made = dec(torch.randn(300, 6)).detach()
    near, far = torch.cdist(made, held).min(1).values, torch.cdist(noise, held).min(1).values
    return float(near.square().mean() / far.square().mean())


PROGRAMS = [
    faulty(softmax_layer_then_cross_entropy, causes="836", also="828 848 824"),
    faulty(probabilities_into_kl_div, causes="855", also="840 828"),
    faulty(sigmoid_twice_in_segmentation, causes="838", also="828"),
    faulty(nll_of_plain_softmax, causes="839", also="855 840 828"),
    faulty(nll_of_raw_scores, causes="839", also="855 840 828 826 825"),
    faulty(policy_gradient_downhill, causes="831", also="828 826"),
    faulty(signal_to_noise_minimised, causes="831", also="826 828 840 825"),
    faulty(divergence_with_the_wrong_sign, causes="831", also="840 826 825 828 801 802 804"),
]

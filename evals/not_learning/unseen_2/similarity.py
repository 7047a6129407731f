"""Healthy programs that learn embeddings: contrastive, metric and self-supervised ones."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from evals.not_learning.data import blobs, digits
from evals.not_learning.parts import mlp
from evals.not_learning.program import Programs, adam, adamw, follow, healthy


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two noisy copies of a batch with some entries dropped."""
    views = []
    for _ in range(2):
        keep = (torch.rand_like(x) > 0.2).float()
        views.append(keep * (x + 0.1 * torch.randn_like(x)))
    return views[0], views[1]


def share_of_neighbours(vectors: Tensor, labels: Tensor) -> float:
    """Return how often the most similar other vector has the same label."""
    unit = functional.normalize(vectors.detach(), dim=1)
    similarity = unit @ unit.T
    similarity.fill_diagonal_(-2)
    return (labels[similarity.argmax(dim=1)] == labels).float().mean().item()


class Similarity(Programs):
    """Healthy programs that learn embeddings."""

    @healthy
    def two_views_by_cross_entropy(self) -> None:
        """SimCLR: each view finds its partner among all others; the diagonal is masked."""
        x, _, held_x, held_y = digits(self.seed)
        model = mlp(64, 96, 32)
        optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-4)
        partner = torch.cat([torch.arange(64, 128), torch.arange(64)])
        with self.watch(model, optimizer):
            for _ in range(250):
                views = torch.cat(two_views(x[torch.randint(len(x), (64,))]))
                unit = functional.normalize(model(views), dim=1)
                similarity = unit @ unit.T / 0.2
                similarity = similarity.masked_fill(torch.eye(128, dtype=torch.bool), -1e9)
                loss = functional.cross_entropy(similarity, partner)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.score = share_of_neighbours(model(held_x), held_y)

    @healthy
    def triplets_with_hard_negatives(self) -> None:
        """The hardest negative of the batch; many triplets soon cost nothing."""
        x, y, held_x, held_y = digits(self.seed)
        model = mlp(64, 64, 16)
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                rows = torch.randint(len(x), (64,))
                vectors = functional.normalize(model(x[rows]), dim=1)
                distance = torch.cdist(vectors, vectors)
                same = y[rows][:, None] == y[rows][None]
                farthest = distance.masked_fill(~same, 0).max(dim=1).values
                nearest = distance.masked_fill(same, 10).min(dim=1).values
                loss = (farthest - nearest + 0.3).relu().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.score = share_of_neighbours(model(held_x), held_y)

    @healthy
    def bootstrap_from_a_slow_copy(self) -> None:
        """BYOL: predict what a slow copy says of another view; no negatives, a loss below zero."""
        x, _, held_x, held_y = digits(self.seed)
        online = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32))
        predictor = mlp(32, 64, 32)
        slow = copy.deepcopy(online).requires_grad_(False)
        model = nn.ModuleDict({"online": online, "predictor": predictor})
        optimizer = adamw(model, 2e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                first, second = two_views(x[torch.randint(len(x), (64,))])
                loss = -functional.cosine_similarity(predictor(online(first)), slow(second)).mean()
                loss = (
                    loss
                    - functional.cosine_similarity(predictor(online(second)), slow(first)).mean()
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                follow(slow, online, 0.02)
        self.score = share_of_neighbours(online.eval()(held_x), held_y)

    @healthy
    def redundancy_reduction(self) -> None:
        """Barlow twins: the correlation of two views shall be the identity; a loss of dozens."""
        x, _, held_x, held_y = digits(self.seed)
        model = mlp(64, 96, 24)
        normalise = nn.BatchNorm1d(24, affine=False)
        optimizer = optim.Adam(model.parameters(), lr=1e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                first, second = two_views(x[torch.randint(len(x), (128,))])
                correlation = normalise(model(first)).T @ normalise(model(second)) / 128
                on_diagonal = (correlation.diagonal() - 1).square().sum()
                off_diagonal = correlation.square().sum() - correlation.diagonal().square().sum()
                loss = on_diagonal + 0.02 * off_diagonal
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.score = share_of_neighbours(model(held_x), held_y)

    @healthy
    def angular_margin(self) -> None:
        """ArcFace: cosines of normalised rows, a margin on the angle, and a scale of 16."""
        x, y = blobs(self.seed, classes=8)
        model = nn.ModuleDict({"body": mlp(20, 48, 12), "prototype": nn.Linear(12, 8, bias=False)})
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with self.watch(model, optimizer):
            for _ in range(300):
                rows = torch.randint(len(x), (64,))
                vectors = functional.normalize(model["body"](x[rows]), dim=1)
                centres = functional.normalize(model["prototype"].weight, dim=1)
                cosine = (vectors @ centres.T).clamp(-0.999, 0.999)
                margin = 0.2 * functional.one_hot(y[rows], 8)
                loss = functional.cross_entropy(16 * (cosine.acos() + margin).cos(), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        logits = functional.normalize(model["body"](x), dim=1) @ centres.T
        self.score = (logits.argmax(dim=1) == y).float().mean().item()

    @healthy
    def prototypes_of_few_shots(self) -> None:
        """Episodes of five classes with new labels each time; prototypes are means of shots."""
        centres = 1.2 * torch.randn(60, 32)
        mixing = torch.randn(32, 32) / 32**0.5
        model = mlp(32, 64, 16)
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                classes = torch.randperm(60)[:5]
                samples = centres[classes, None] + torch.randn(5, 8, 32) * torch.tensor(
                    [2.0, 0.3]
                ).repeat(16)
                vectors = model((samples @ mixing).flatten(0, 1)).view(5, 8, 16)
                prototypes = vectors[:, :3].mean(dim=1)
                queries = vectors[:, 3:].flatten(0, 1)
                labels = torch.arange(5).repeat_interleave(5)
                loss = functional.cross_entropy(-torch.cdist(queries, prototypes), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def pictures_and_captions(self) -> None:
        """CLIP: two towers, a symmetric loss, and a learnt temperature without weight decay."""
        left = mlp(24, 64, 16)
        right = mlp(12, 64, 16)
        log_scale = nn.Parameter(torch.tensor(1.0))
        optimizer = optim.AdamW(
            [
                {"params": [*left.parameters(), *right.parameters()]},
                {"params": [log_scale], "weight_decay": 0.0, "lr": 1e-2},
            ],
            lr=2e-3,
        )
        left_view = torch.randn(6, 24)
        right_view = torch.randn(6, 12)
        pair = torch.arange(48)
        with self.watch({"left": left, "right": right}, optimizer):
            for _ in range(300):
                topic = torch.randn(48, 6)
                image = left((topic @ left_view).tanh())
                caption = right((topic @ right_view).tanh())
                similarity = (
                    functional.normalize(image, dim=1) @ functional.normalize(caption, dim=1).T
                )
                logits = log_scale.exp().clamp(max=100) * similarity
                loss = functional.cross_entropy(logits, pair) + functional.cross_entropy(
                    logits.T, pair
                )
                optimizer.zero_grad()
                (loss / 2).backward()
                optimizer.step()

    @healthy
    def siamese_pairs(self) -> None:
        """One net for both sides, Euclidean distances, and the contrastive loss with a margin."""
        x, y, held_x, held_y = digits(self.seed)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8))
        optimizer = optim.Adagrad(net.parameters(), lr=0.02)
        with self.watch(net, optimizer):
            for _ in range(300):
                anchor = torch.randint(len(x), (96,))
                other = torch.randint(len(x), (96,))
                for place in range(0, 96, 2):
                    alike = (y == y[anchor[place]]).nonzero()[:, 0]
                    other[place] = alike[torch.randint(len(alike), ())]
                distance = functional.pairwise_distance(net(x[anchor]), net(x[other]))
                same = (y[anchor] == y[other]).float()
                loss = same * distance.square() + (1 - same) * (1 - distance).relu().square()
                optimizer.zero_grad()
                loss.mean().backward()
                optimizer.step()
        net.eval()
        self.score = share_of_neighbours(net(held_x), held_y)

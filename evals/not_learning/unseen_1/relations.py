"""Programs about graphs, rankings, recommendations and distances."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from evals.not_learning.data import blobs, community, digits, ratings
from evals.not_learning.parts import mlp
from evals.not_learning.program import Programs, faulty, healthy


class GraphNetwork(nn.Module):
    """Some graph convolutions with a given matrix of neighbours."""

    def __init__(self, *sizes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(wide, narrow) for wide, narrow in itertools.pairwise(sizes)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        """Return a vector for each node."""
        for layer in self.layers[:-1]:
            x = self.dropout(functional.relu(neighbours @ layer(x)))
        return neighbours @ self.layers[-1](x)


class Attention(nn.Module):
    """Graph attention with one head."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, narrow, bias=False)
        self.source = nn.Parameter(torch.randn(narrow) / narrow**0.5)
        self.target = nn.Parameter(torch.randn(narrow) / narrow**0.5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return a vector for each node, from those that a boolean matrix connects it with."""
        hidden = self.linear(x)
        scores = functional.leaky_relu(
            (hidden @ self.target)[:, None] + (hidden @ self.source)[None], 0.2
        )
        weights = scores.masked_fill(~edges, float("-inf")).softmax(dim=1)
        return weights @ hidden


class Factors(nn.Module):
    """Vectors and offsets of users and films, in sparse embeddings."""

    def __init__(self, users: int = 120, films: int = 80, size: int = 6) -> None:
        super().__init__()
        self.user = nn.Embedding(users, size, sparse=True)
        self.film = nn.Embedding(films, size, sparse=True)
        self.user_offset = nn.Embedding(users, 1, sparse=True)
        self.film_offset = nn.Embedding(films, 1, sparse=True)
        nn.init.normal_(self.user.weight, std=0.3)
        nn.init.normal_(self.film.weight, std=0.3)
        nn.init.zeros_(self.user_offset.weight)
        nn.init.zeros_(self.film_offset.weight)

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        """Return a rating for each pair."""
        match = (self.user(user) * self.film(film)).sum(dim=1)
        return match + self.user_offset(user).squeeze(1) + self.film_offset(film).squeeze(1)


def small_graphs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return adjacency ``(n, 10, 10)``, features, and whether a graph has two parts."""
    labels = torch.randint(2, (count,))
    edges = torch.rand(count, 10, 10) < 0.35
    half = torch.arange(10) < 5
    across = half[:, None] != half[None]
    edges = edges & ~(across & (labels == 1)[:, None, None])
    edges = (edges | edges.transpose(1, 2)).float()
    features = torch.cat(
        [half.float()[:, None].expand(count, -1, 1), torch.randn(count, 10, 3)], dim=2
    )
    return edges, features, labels


def two_views(count: int, mixing: Tensor) -> tuple[Tensor, Tensor]:
    """Return two noisy views of the same hidden vectors."""
    hidden = torch.randn(count, 8)
    left = hidden + 0.3 * torch.randn(count, 8)
    right = torch.tanh(hidden @ mixing) + 0.1 * torch.randn(count, 8)
    return left, right


class Relations(Programs):
    """Graphs, recommendations, rankings and metric learning."""

    @healthy
    def few_labelled_nodes(self) -> None:
        """A graph convolutional network with a tenth of the nodes labelled, and strong dropout."""
        neighbours, x, y = community(self.seed)
        labelled = torch.rand(len(y)) < 0.15
        labelled[:6] = True
        model = GraphNetwork(16, 24, 3, dropout=0.5)
        optimizer = optim.Adam(
            [
                {"params": model.layers[0].parameters(), "weight_decay": 5e-3},
                {"params": model.layers[1].parameters(), "weight_decay": 0.0},
            ],
            lr=0.01,
        )
        best = 0.0
        with self.watch(model, optimizer):
            for _ in range(100):
                model.train()
                optimizer.zero_grad()
                scores = model(x, neighbours)
                loss = functional.cross_entropy(scores[labelled], y[labelled])
                loss.backward()
                optimizer.step()
                model.eval()
                with torch.no_grad():
                    right = model(x, neighbours).argmax(dim=1) == y
                best = max(best, right[~labelled].float().mean().item())

    @healthy
    def attention_over_a_graph(self) -> None:
        """Two layers of graph attention with ELU, and early stopping."""
        adjacency, x, y = community(self.seed)
        edges = adjacency > 0
        labelled = torch.rand(len(y)) < 0.3

        class Network(nn.Module):
            """Two layers of attention."""

            def __init__(self) -> None:
                super().__init__()
                self.first = Attention(16, 16)
                self.second = Attention(16, 3)

            def forward(self, x: Tensor) -> Tensor:
                """Return the scores of the classes of each node."""
                return self.second(functional.elu(self.first(x, edges)), edges)

        model = Network()
        optimizer = optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        best = math.inf
        waited = 0
        with self.watch(model, optimizer):
            for _ in range(150):
                scores = model(x)
                loss = functional.cross_entropy(scores[labelled], y[labelled])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                held = functional.cross_entropy(scores[~labelled], y[~labelled]).item()
                waited = 0 if held < best else waited + 1
                best = min(best, held)
                if waited == 20:
                    break

    @healthy
    def missing_links(self) -> None:
        """A graph autoencoder: edges against as many random pairs, with an inner product."""
        neighbours, x, _ = community(self.seed)
        edges = (neighbours > 0).nonzero()
        edges = edges[edges[:, 0] < edges[:, 1]]
        model = GraphNetwork(16, 32, 8)
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        with self.watch(model, optimizer):
            for _ in range(150):
                z = model(x, neighbours)
                pairs = torch.randint(len(x), edges.shape)
                positive = (z[edges[:, 0]] * z[edges[:, 1]]).sum(dim=1)
                negative = (z[pairs[:, 0]] * z[pairs[:, 1]]).sum(dim=1)
                scores = torch.cat([positive, negative])
                labels = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
                loss = functional.binary_cross_entropy_with_logits(scores, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def whole_graphs(self) -> None:
        """Does a small graph fall into two parts? Messages, sums and a readout."""
        edges, features, labels = small_graphs(1000)
        loader = DataLoader(TensorDataset(edges, features, labels), batch_size=50, shuffle=True)

        class Network(nn.Module):
            """Two rounds of messages, and the sum over the nodes."""

            def __init__(self) -> None:
                super().__init__()
                self.start = nn.Linear(4, 16)
                self.update = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))
                self.readout = mlp(16, 16, 2)

            def forward(self, edges: Tensor, x: Tensor) -> Tensor:
                """Return the scores of both classes of each graph."""
                x = functional.relu(self.start(x))
                for layer in self.update:
                    message = edges @ x
                    x = functional.relu(layer(torch.cat([x, message], dim=2)))
                return self.readout(x.sum(dim=1) / 10)

        model = Network()
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(12):
                for adjacency, x, y in loader:
                    loss = functional.cross_entropy(model(adjacency, x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def film_ratings(self) -> None:
        """Matrix factorisation with sparse gradients and plain SGD."""
        users, films, scores = ratings(self.seed)
        model = Factors()
        optimizer = optim.SGD(model.parameters(), lr=10.0)
        mean = scores.mean()
        loader = DataLoader(TensorDataset(users, films, scores), batch_size=200, shuffle=True)
        with self.watch(model, optimizer):
            for _ in range(15):
                for user, film, score in loader:
                    loss = functional.mse_loss(mean + model(user, film), score)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def clicks_ranked_in_pairs(self) -> None:
        """Bayesian personalised ranking: what was clicked above what was not."""
        users, films, scores = ratings(self.seed)
        liked = scores > 4.5
        users = users[liked]
        films = films[liked]
        model = nn.ModuleDict({"user": nn.Embedding(120, 6), "film": nn.Embedding(80, 6)})
        nn.init.normal_(model["user"].weight, std=0.1)
        nn.init.normal_(model["film"].weight, std=0.1)
        optimizer = optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
        with self.watch(model, optimizer):
            for _ in range(300):
                rows = torch.randint(len(users), (128,))
                vector = model["user"](users[rows])
                better = model["film"](films[rows])
                worse = model["film"](torch.randint(80, (128,)))
                difference = (vector * (better - worse)).sum(dim=1)
                loss = -functional.logsigmoid(difference).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def lists_of_documents(self) -> None:
        """Listwise ranking: the softmax over a list against the softmax of the relevances."""
        mixing = torch.randn(6)
        x = torch.randn(400, 12, 6)
        relevance = x @ mixing + 0.5 * torch.randn(400, 12)
        loader = DataLoader(TensorDataset(x, relevance), batch_size=40, shuffle=True)
        model = mlp(6, 24, 1)
        optimizer = optim.Adagrad(model.parameters(), lr=0.05)
        with self.watch(model, optimizer):
            for _ in range(15):
                for lists, relevances in loader:
                    scores = model(lists).squeeze(2)
                    loss = functional.kl_div(
                        scores.log_softmax(dim=1),
                        relevances.softmax(dim=1),
                        reduction="batchmean",
                    )
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def hard_triplets(self) -> None:
        """The hardest positive and negative of each batch: the loss stays near the margin."""
        split = digits(self.seed)
        model = mlp(64, 48, 16)
        optimizer = optim.Adam(model.parameters(), lr=1e-3)
        margin = 0.3
        with self.watch(model, optimizer):
            for _ in range(200):
                rows = torch.randint(len(split.x), (64,))
                labels = split.y[rows]
                z = functional.normalize(model(split.x[rows]), dim=1)
                distance = (2 - 2 * z @ z.T).clamp(min=1e-6).sqrt()
                same = labels[:, None] == labels[None]
                furthest = distance.masked_fill(~same, 0.0).max(dim=1).values
                nearest = distance.masked_fill(same, 4.0).min(dim=1).values
                loss = functional.relu(furthest - nearest + margin).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def angular_margin(self) -> None:
        """ArcFace: a margin between angles, and scores scaled by sixteen."""
        split = digits(self.seed)
        body = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16))
        centres = nn.Linear(16, 10, bias=False)
        model = nn.Sequential(body, centres)
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=64, shuffle=True)
        with self.watch(model, optimizer):
            for _ in range(10):
                for x, y in loader:
                    cosine = functional.linear(
                        functional.normalize(body(x), dim=1),
                        functional.normalize(centres.weight, dim=1),
                    )
                    angle = cosine.clamp(-0.999, 0.999).acos()
                    target = functional.one_hot(y, 10)
                    scores = 16 * (angle + 0.3 * target).cos()
                    loss = functional.cross_entropy(scores, y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def prototypes_of_episodes(self) -> None:
        """Few-shot learning: in each episode five new classes, and distances to their means."""
        model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 16))
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        hits = []
        with self.watch(model, optimizer):
            for _ in range(300):
                centres = torch.cat([torch.randn(5, 1, 6), torch.zeros(5, 1, 24)], dim=2)
                noise = torch.cat([0.5 * torch.ones(6), 1.5 * torch.ones(24)])
                support = model(centres + noise * torch.randn(5, 5, 30))
                query = model(centres + noise * torch.randn(5, 8, 30)).flatten(0, 1)
                prototypes = support.mean(dim=1)
                scores = -(torch.cdist(query, prototypes) ** 2)
                labels = torch.arange(5).repeat_interleave(8)
                loss = functional.cross_entropy(scores, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                hits.append((scores.argmax(dim=1) == labels).float().mean().item())

    @healthy
    def two_towers(self) -> None:
        """Contrastive matching of two views, with a learned temperature."""

        class Towers(nn.Module):
            """Two encoders and the logarithm of a scale."""

            def __init__(self) -> None:
                super().__init__()
                self.left = mlp(8, 32, 16)
                self.right = mlp(8, 32, 16)
                self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

            def forward(self, left: Tensor, right: Tensor) -> Tensor:
                """Return the scaled similarities of all pairs."""
                left = functional.normalize(self.left(left), dim=1)
                right = functional.normalize(self.right(right), dim=1)
                return self.log_scale.exp().clamp(max=100) * left @ right.T

        mixing = torch.randn(8, 8) / 8**0.5
        model = Towers()
        optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        with self.watch(model, optimizer):
            for _ in range(250):
                left, right = two_views(64, mixing)
                scores = model(left, right)
                labels = torch.arange(64)
                loss = functional.cross_entropy(scores, labels)
                loss = 0.5 * (loss + functional.cross_entropy(scores.T, labels))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def translations_between_entities(self) -> None:
        """TransE: entities are renormalised in each step, and few rows are seen at a time."""
        entities = 300
        step = torch.tensor([1, 7, 50])
        head = torch.randint(entities, (2000,))
        relation = torch.randint(3, (2000,))
        tail = (head + step[relation]) % entities
        model = nn.ModuleDict(
            {
                "entity": nn.Embedding(entities, 24),
                "relation": nn.Embedding(3, 24),
            }
        )
        optimizer = optim.Adagrad(model.parameters(), lr=0.1)
        criterion = nn.MarginRankingLoss(margin=0.5)
        with self.watch(model, optimizer):
            for _ in range(300):
                with torch.no_grad():
                    weight = model["entity"].weight
                    weight.div_(weight.norm(dim=1, keepdim=True))
                rows = torch.randint(2000, (128,))
                start = model["entity"](head[rows]) + model["relation"](relation[rows])
                good = (start - model["entity"](tail[rows])).norm(dim=1)
                wrong = torch.randint(entities, (128,))
                bad = (start - model["entity"](wrong)).norm(dim=1)
                loss = criterion(bad, good, torch.ones(128))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def sets_of_points(self) -> None:
        """A network for sets tells a ball from a shell by some of its points."""

        def clouds(count: int) -> tuple[Tensor, Tensor]:
            labels = torch.randint(2, (count,))
            points = functional.normalize(torch.randn(count, 24, 3), dim=2)
            radius = torch.where(labels[:, None] == 0, torch.rand(count, 24), 0.8)
            return points * radius[:, :, None], labels

        phi = mlp(3, 32, 32)
        rho = mlp(32, 32, 2)
        model = nn.ModuleDict({"phi": phi, "rho": rho})
        optimizer = optim.RAdam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(150):
                points, labels = clouds(64)
                scores = rho(phi(points).amax(dim=1))
                loss = functional.cross_entropy(scores, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("", shows="H828")
    def unlabelled_nodes_in_the_loss(self) -> None:
        """The mask is inverted: the loss is over the nodes whose label is a placeholder of zero."""
        neighbours, x, y = community(self.seed)
        labelled = torch.rand(len(y)) < 0.3
        given = torch.where(labelled, y, 0)
        model = GraphNetwork(16, 24, 3)
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        with self.watch(model, optimizer):
            for _ in range(100):
                scores = model(x, neighbours)
                mask = ~labelled
                loss = functional.cross_entropy(scores[mask], given[mask])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("", shows="H848 H828")
    def sixteen_rounds_of_averaging(self) -> None:
        """Sixteen graph convolutions without shortcuts make all nodes alike."""
        neighbours, x, y = community(self.seed)
        depth = 15
        model = GraphNetwork(16, *[24] * depth, 3)
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        with self.watch(model, optimizer):
            for _ in range(60):
                scores = model(x, neighbours)
                loss = functional.cross_entropy(scores, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("", shows="H831")
    def labels_of_the_contrastive_loss_exchanged(self) -> None:
        """The loss pulls pairs with label 0 together, and the data set labels equal pairs 1."""
        x, y = blobs(self.seed)
        model = mlp(20, 32, 4)
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                first = torch.randint(len(x), (64,))
                second = torch.randint(len(x), (64,))
                equal = (y[first] == y[second]).float()
                label = equal
                distance = functional.pairwise_distance(model(x[first]), model(x[second]))
                apart = functional.relu(2.0 - distance) ** 2
                loss = ((1 - label) * distance**2 + label * apart).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("", shows="H828")
    def temperature_multiplied(self) -> None:
        """Similarities are multiplied by the temperature of 0.05, where they should be divided."""
        mixing = torch.randn(8, 8) / 8**0.5
        left_tower = mlp(8, 32, 16)
        right_tower = mlp(8, 32, 16)
        model = nn.ModuleDict({"left": left_tower, "right": right_tower})
        optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        temperature = 0.05
        with self.watch(model, optimizer):
            for _ in range(250):
                left, right = two_views(64, mixing)
                left = functional.normalize(left_tower(left), dim=1)
                right = functional.normalize(right_tower(right), dim=1)
                scores = left @ right.T * temperature
                loss = functional.cross_entropy(scores, torch.arange(64))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

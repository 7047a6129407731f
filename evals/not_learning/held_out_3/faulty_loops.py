"""Faults in the loop, the optimizer, the schedule and what keeps copies of the weights."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn, optim

from evals.not_learning import data, parts
from evals.not_learning.held_out_3 import shared
from evals.not_learning.program import adam, adamw, faulty, follow, sgd


class FaultyLoops(shared.Twins):
    """Something is wrong with how the model is trained."""

    @faulty("H808 H809", shows="H814 H828")  # accuracy: 0.82 without the fault, 0.10 with it
    def head_made_after_the_optimizer(self) -> None:
        """The head for the new classes replaces the old one after the optimizer was made, which
        keeps the old one.
        """
        x, y, held_x, held_y = data.digits(self.seed)
        model = parts.mlp(64, 64, 64, 4)
        old = y < 4
        for a, b in data.batches((x[old], y[old]), 32, 200):
            self.optimizer = self.optimizer or adam(model, 0.003)
            self.update(F.cross_entropy(model(a), b))
        optimizer = adam(model, 1e-4)
        model[4] = nn.Linear(64, 10)
        if not self.broken:
            optimizer = optim.Adam(
                [{"params": model[:4].parameters()}, {"params": model[4].parameters(), "lr": 0.03}],
                1e-4,
            )
        self.fit(model, optimizer, data.batches((x, y), 32, 300), F.cross_entropy)
        self.score = shared.accuracy(model, held_x, held_y)

    @faulty("", shows="H819")  # R2: 0.87 without the fault, 0.71 with it
    def plateau_of_a_loss_to_be_raised(self) -> None:
        """The plateau schedule waits for higher values and is given the loss.

        It cuts the rate at every turn.
        """
        x, y = data.friedman(1500)
        model = parts.mlp(10, 64, 64, 1)
        optimizer = sgd(model, 0.05, momentum=0.9)
        schedule = optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "max" if self.broken else "min", 0.3, patience=0
        )
        for step, (a, b) in self.watched(
            enumerate(data.batches((x[:1000], y[:1000, None]), 50, 800)), model, optimizer
        ):
            self.update(F.mse_loss(model(a), b))
            if step % 20 == 19:
                schedule.step(F.mse_loss(shared.outputs(model, x[:1000]), y[:1000, None]))
        self.score = shared.r2(shared.outputs(model, x[1000:]), y[1000:])

    @faulty("H819", shows="H824 H828")  # accuracy: 0.98 without the fault, 0.56 with it
    def warm_up_of_whole_numbers(self) -> None:
        """The warm-up divides whole numbers, so that the rate is zero for the 2,000 steps that
        the run never has.
        """
        x, y, held_x, held_y = data.table("wine", self.seed)
        model = nn.Sequential(nn.LayerNorm(13), parts.mlp(13, 32, 3))
        optimizer = adamw(model, 0.01)
        schedule = optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1, (step + 1) // 2000 if self.broken else (step + 1) / 200)
        )
        self.fit(
            model, optimizer, data.batches((x, y), 16, 400), F.cross_entropy, scheduler=schedule
        )
        self.score = shared.accuracy(model, held_x, held_y)

    @faulty("H817", shows="H814")  # accuracy: 0.99 without the fault, 0.22 with it
    def accumulation_that_starts_anew(self) -> None:
        """Gradients of three tasks are to add up, but each task clears them first.

        Only the last one is learned.
        """
        x, y = data.blobs(self.seed, 2000)
        body, heads = (
            parts.mlp(20, 48, 48),
            nn.ModuleList([nn.Linear(48, 5), nn.Linear(48, 2), nn.Linear(48, 2)]),
        )
        targets = (y, (x[:, 0] * x[:, 1] > 0).long(), (x[:, 2] > x[:, 3]).long())
        model = nn.ModuleDict({"body": body, "heads": heads})
        optimizer = adam(model, 0.003)
        for at in self.watched(shared.rows(1500, 50, 500), model, optimizer):
            optimizer.zero_grad()
            for head, target in zip(heads, targets, strict=True):
                if self.broken:
                    optimizer.zero_grad()
                F.cross_entropy(head(body(x[at]).relu()), target[at]).backward()
            optimizer.step()
        self.score = shared.accuracy(nn.Sequential(body, nn.ReLU(), heads[0]), x[1500:], y[1500:])

    @faulty("", shows="H824 H828")  # accuracy: 0.97 without the fault, 0.08 with it
    def clipped_while_scaled(self) -> None:
        """Gradients are clipped before they are unscaled, and so to a 65,536th of what was
        meant.
        """
        x, y, held_x, held_y = data.digits(self.seed)
        model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), parts.small_cnn())
        optimizer = sgd(model, 0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu")
        for a, b in self.watched(data.batches((x, y), 32, 150), model, optimizer):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(a), b)).backward()
            if not self.broken:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        self.score = shared.accuracy(model, held_x, held_y)

    @faulty("")  # accuracy: 0.83 without the fault, 0.52 with it
    def average_without_statistics(self) -> None:
        """The average that is used gets the weights and not the statistics of batch
        normalisation.
        """
        x, y = shared.boxes(1200)
        size = (y[:, 2] - y[:, 0] > 0.35).long()
        model = nn.Sequential(
            nn.Linear(144, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 2),
        )
        x, average = 5 * x + 3, copy.deepcopy(model)
        optimizer = adam(model, 0.003)
        for a, b in self.watched(data.batches((x[:900], size[:900]), 50, 400), model, optimizer):
            self.update(F.cross_entropy(model(a), b))
            follow(average, model, 0.05)
            if not self.broken:
                for slow, fast in zip(average.buffers(), model.buffers(), strict=True):
                    slow.copy_(fast)
        self.score = shared.accuracy(average, x[900:], size[900:])

    @faulty("")  # steps to the end: 7 without the fault, 30 with it
    def corridor_copied_backwards(self) -> None:
        """Every 50 steps the network is overwritten by its target, instead of the other way
        round.
        """
        self.learn_values(wrong_copy=self.broken)

    @faulty("", shows="H828")  # steps to the end: 7 without the fault, 30 with it
    def corridor_remembered_by_reference(self) -> None:
        """The memory keeps the very tensor that the world writes its states into, so all states
        are the last one.
        """
        self.learn_values(alias=self.broken)

    @faulty("H815", shows="H828")  # accuracy: 1.00 without the fault, 0.00 with it
    def advantages_of_one_episode(self) -> None:
        """Advantages are standardised within a batch that holds one reward, and are all zero."""
        prices, best = torch.randn(6, 4), torch.randn(6, 4).argmax(1)
        model = parts.mlp(6, 32, 4)
        optimizer = adam(model, 0.005)
        for _ in self.watched(range(800), model, optimizer):
            at = torch.randint(6, (1 if self.broken else 16,))
            policy = torch.distributions.Categorical(logits=model(torch.eye(6)[at]))
            action = policy.sample()
            reward = (action == best[at]).float() + 0.1 * prices[at, 0] + 0.1 * torch.randn(len(at))
            advantage = (reward - reward.mean()) / (reward.std(correction=0) + 1e-6)
            self.update(-(policy.log_prob(action) * advantage).mean())
        self.score = shared.accuracy(model, torch.eye(6), best)

    @faulty("", shows="H825 H826 H828 H831")  # accuracy: 0.88 without the fault, 0.00 with it
    def sharpness_climbed_and_not_left(self) -> None:
        """The step of SAM towards a higher loss is never taken back."""
        x, y, held_x, held_y = data.digits(self.seed)
        model = parts.mlp(64, 48, 10)
        optimizer = sgd(model, 0.05)
        for a, b in self.watched(data.batches((x, y), 64, 300), model, optimizer):
            grads = torch.autograd.grad(F.cross_entropy(model(a), b), list(model.parameters()))
            size = torch.stack([g.norm() for g in grads]).norm() + 1e-12
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.add_(g, alpha=0.1 / size.item())
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.sub_(g, alpha=0 if self.broken else 0.1 / size.item())
            optimizer.step()
        self.score = shared.accuracy(model, held_x, held_y)

    @faulty("")  # cross-entropy: 0.78 without the fault, 1.72 with it
    def updates_lost_in_bfloat16(self) -> None:
        """The weights themselves are kept in bfloat16, in which most steps of a small rate round
        to nothing.
        """
        x, y, held_x, held_y = data.digits(self.seed)
        kind = torch.bfloat16 if self.broken else torch.float32
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(kind)
        with torch.no_grad():
            model[0].weight.add_(torch.sign(model[0].weight) * 0.1)
        self.fit(
            model,
            sgd(model, 0.003, momentum=0.5),
            data.batches((x.to(kind), y), 32, 1500),
            F.cross_entropy,
        )
        self.score = -F.cross_entropy(shared.outputs(model, held_x.to(kind)).float(), held_y).item()

    @faulty("")  # cross-entropy: 1.74 without the fault, 8.21 with it
    def language_model_of_the_same_character(self) -> None:
        """The targets are the inputs themselves and not what follows them."""
        ids, words = data.library_text()
        model = shared.Recurrent(nn.LSTM(24, 64, batch_first=True), words, words, last=False)
        optimizer = adam(model, 0.005)
        for a, b in self.watched(
            shared.fresh(lambda: data.windows(ids, 24, 32), 300), model, optimizer
        ):
            self.update(
                F.cross_entropy(model(a).flatten(0, 1), (a if self.broken else b).flatten()),
                clip=1.0,
            )
        a, b = data.windows(ids, 24, 200)
        self.score = -F.cross_entropy(shared.outputs(model, a).flatten(0, 1), b.flatten()).item()

    @faulty("H843", shows="H826 H828")  # accuracy: 0.98 without the fault, 0.33 with it
    def blobs_class_after_class(self) -> None:
        """The data set is sorted by class and the loader does not shuffle."""
        x, y = data.blobs(self.seed, 2500, classes=8)
        model = parts.mlp(20, 64, 8)
        order = y[:2000].argsort() if self.broken else torch.randperm(2000)
        self.fit(
            model,
            sgd(model, 0.1, momentum=0.9),
            data.stream((x[:2000][order], y[:2000][order]), 32, 400, shuffle=False),
            F.cross_entropy,
        )
        self.score = shared.accuracy(model, x[2000:], y[2000:])

"""Healthy programs of the set: unusual."""

# ruff: noqa: D101, D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import copy
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributions import Categorical
from torch.func import functional_call

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, healthy, sgd, update


class Corridor:
    """Eight cells in a row; only the right end pays. The state is one-hot."""

    def __init__(self, cells: int = 8) -> None:
        self.cells = cells
        self.eye = torch.eye(cells)

    def reset(self) -> Tensor:
        self.at, self.steps = 0, 0
        return self.eye[0]

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.at = min(max(self.at + (1 if action else -1), 0), self.cells - 1)
        self.steps += 1
        arrived = self.at == self.cells - 1
        return (self.eye[self.at], 1.0 if arrived else -0.01, arrived or self.steps == 30)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 32)
        self.actor = nn.Linear(32, 2)
        self.critic = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Categorical, Tensor]:
        x = torch.tanh(self.body(x))
        return (Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1))


class HealthyUnusual(Programs):
    """An unusual loop: reinforcement, closures, manual updates, inner loops, several optimizers."""

    @healthy
    def dqn(self) -> None:
        """Replay memory, a target network that is copied now and then, epsilon-greedy play."""
        chance = random.Random(self.seed)
        env, memory = Corridor(), deque(maxlen=2000)
        policy_net = parts.mlp(8, 32, 2)
        target_net = copy.deepcopy(policy_net)
        optimizer = adamw(policy_net, 0.001, amsgrad=True)
        state = env.reset()
        for step in self.watched(range(1200), policy_net, optimizer, objective="reinforcement"):
            greedy = chance.random() > max(0.1, 1 - step / 600)
            with torch.no_grad():
                action = int(policy_net(state).argmax()) if greedy else chance.randrange(2)
            following, reward, done = env.step(action)
            memory.append((state, action, reward, following, done))
            state = env.reset() if done else following
            if len(memory) < 64:
                continue
            s, a, r, n, d = zip(*chance.sample(memory, 64), strict=True)
            value = policy_net(torch.stack(s)).gather(1, torch.tensor(a)[:, None]).squeeze(1)
            with torch.no_grad():
                best = target_net(torch.stack(n)).max(1).values
            wanted = torch.tensor(r) + 0.95 * best * ~torch.tensor(d)
            loss = F.smooth_l1_loss(value, wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(policy_net.parameters(), 100)
            optimizer.step()
            if step % 50 == 0:
                target_net.load_state_dict(policy_net.state_dict())

    @healthy
    def reinforce(self) -> None:
        env = Corridor(6)
        policy = nn.Sequential(*parts.mlp(6, 16, 2, act=nn.Tanh), nn.Softmax(dim=-1))
        for _ in self.watched(range(200), policy, adam(policy, 0.01), objective="reinforcement"):
            state, done = env.reset(), False
            log_probs, rewards = [], []
            while not done:
                choice = Categorical(policy(state))
                action = choice.sample()
                log_probs.append(choice.log_prob(action))
                state, reward, done = env.step(int(action))
                rewards.append(reward)
            total, returns = 0.0, []
            for reward in reversed(rewards):
                total = reward + 0.97 * total
                returns.insert(0, total)
            weights = torch.tensor(returns)
            weights = (weights - weights.mean()) / (weights.std(correction=0) + 1e-08)
            self.update(-(torch.stack(log_probs) * weights).sum())

    @healthy
    def actor_critic(self) -> None:
        """One-step advantages with an entropy bonus over eight parallel corridors."""
        envs = [Corridor(6) for _ in range(8)]
        model = ActorCritic()
        states = torch.stack([env.reset() for env in envs])
        for _ in self.watched(range(600), model, adam(model, 0.003), objective="reinforcement"):
            policy, value = model(states)
            actions = policy.sample()
            results = [env.step(int(action)) for env, action in zip(envs, actions, strict=True)]
            rewards = torch.tensor([reward for _, reward, _ in results])
            ended = torch.tensor([done for _, _, done in results])
            states = torch.stack(
                [env.reset() if done else state for env, (state, _, done) in zip(envs, results, strict=True)]
            )
            with torch.no_grad():
                wanted = rewards + 0.95 * model(states)[1] * ~ended
            advantage = wanted - value
            self.update(
                -(policy.log_prob(actions) * advantage.detach()).mean()
                + 0.5 * advantage.pow(2).mean()
                - 0.01 * policy.entropy().mean(),
                clip=0.5,
            )

    @healthy
    def lbfgs_closure(self) -> None:
        x, y = data.curve(self.seed, samples=300)
        model = parts.mlp(8, 32, 1, act=nn.Tanh).double()
        x, y = x.double(), y.double()
        optimizer = optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
        for _ in self.watched(range(30), model, optimizer):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    @healthy
    def manual_updates(self) -> None:
        """As in torch's first tutorial: the optimizer exists and is never stepped, the loop moves the weights."""
        model = parts.mlp(64, 32, 10)
        optimizer = sgd(model, 0.1)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 64, 600), model, optimizer):
            model.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            for p in model.parameters():
                p.data.add_(p.grad.data, alpha=-0.1)

    @healthy
    def manual_gradients_with_autograd_grad(self) -> None:
        """No backward: the gradients come from autograd.grad and are set by hand, with added noise."""
        model = nn.Linear(20, 5)
        optimizer = sgd(model, 0.1)
        for xb, yb in self.watched(data.batches(data.blobs(self.seed), 64, 500), model, optimizer):
            loss = F.cross_entropy(model(xb), yb)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient + 0.01 * torch.randn_like(gradient)
            optimizer.step()

    @healthy
    def meta_learning_inner_loop(self) -> None:
        """Sinusoids as tasks; one inner step through the graph, so that gradients of gradients flow."""
        net = parts.mlp(1, 32, 32, 1, act=nn.Tanh)
        meta = adam(net, 0.002)
        for _ in self.watched(range(350), net, meta):
            meta.zero_grad()
            outer = torch.zeros(())
            for _ in range(2):
                amplitude, phase = torch.rand(()) * 4 + 1, torch.rand(()) * 3
                x = torch.rand(20, 1) * 6 - 3
                y = amplitude * torch.sin(x + phase)
                weights = dict(net.named_parameters())
                inner = F.mse_loss(functional_call(net, weights, (x[:10],)), y[:10])
                gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                adapted = {n: w - 0.05 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
                outer = outer + F.mse_loss(functional_call(net, adapted, (x[10:],)), y[10:])
            (outer / 2).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            meta.step()

    @healthy
    def reptile(self) -> None:
        """Weights are pulled towards those of a copy trained on a task; the outer gradient is a difference."""
        model = parts.mlp(1, 32, 1, act=nn.Tanh)
        optimizer = sgd(model, 0.2)
        for _ in self.watched(range(120), model, optimizer):
            learner = copy.deepcopy(model)
            inner = sgd(learner, 0.02)
            shift = torch.rand(())
            for _ in range(5):
                x = torch.rand(16, 1) * 4 - 2
                update(inner, F.mse_loss(learner(x), torch.sin(2 * x) + shift))
            optimizer.zero_grad()
            for parameter, goal in zip(model.parameters(), learner.parameters(), strict=True):
                parameter.grad = parameter.data - goal.data
            optimizer.step()

    @healthy
    def two_optimizers_one_loss(self) -> None:
        """Embeddings by SparseAdam, the rest by SGD; one backward feeds both."""
        words = nn.EmbeddingBag(300, 16, sparse=True)
        head = nn.Linear(16, 3)
        kind = torch.randint(0, 3, (300,))
        optimizers = {"words": optim.SparseAdam(list(words.parameters()), lr=0.01), "head": sgd(head, 0.1)}
        for _ in self.watched(range(500), {"words": words, "head": head}, optimizers):
            document = torch.randint(0, 300, (32, 9))
            label = F.one_hot(kind[document], 3).sum(1).argmax(1)
            loss = F.cross_entropy(head(words(document)), label)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers.values():
                optimizer.step()

    @healthy
    def alternating_phases(self) -> None:
        """Coordinate-wise: first the factor on the left is trained with the right one frozen, then the other."""
        matrix = torch.randn(40, 3) @ torch.randn(3, 30)
        left, right = nn.Linear(3, 40, bias=False), nn.Linear(3, 30, bias=False)
        optimizer_left = adam(left, 0.02)
        optimizer_right = adam(right, 0.02)
        for step in self.watched(
            range(800), {"left": left, "right": right}, {"left": optimizer_left, "right": optimizer_right}
        ):
            turn_left = step // 100 % 2 == 0
            left.requires_grad_(turn_left)
            right.requires_grad_(not turn_left)
            optimizer = optimizer_left if turn_left else optimizer_right
            update(optimizer, (left.weight @ right.weight.T - matrix).pow(2).mean())

    @healthy
    def unfreezing_step_by_step(self) -> None:
        """The head alone for some time, then one more layer joins with its own parameter group."""
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 48, 48, 10)
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        optimizer = adam(model[4], 0.003)
        for step, (xb, yb) in self.watched(enumerate(data.batches((x, y), 32, 600)), model, optimizer):
            if step in (150, 300):
                layer = model[2] if step == 150 else model[0]
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": layer.parameters(), "lr": 0.001})
            update(optimizer, F.cross_entropy(model(xb), yb))

    @healthy
    def straight_through_quantisation(self) -> None:
        """Rounding with the gradient of the identity, as in quantised autoencoders."""
        encode = nn.Sequential(*parts.mlp(64, 48, 16), nn.Tanh())
        decode = parts.mlp(16, 48, 64)
        model = nn.Sequential(encode, decode)
        for images, _ in self.watched(data.batches(data.digits(self.seed), 64, 500), model, adam(model, 0.002)):
            z = encode(images)
            z = z + (z.round() - z).detach()
            self.update(F.binary_cross_entropy_with_logits(decode(z), images))

"""Healthy programs with an unusual loop: reinforcement, closures, manual updates, inner loops, several optimizers."""

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

from benchmarks.not_learning.data import batches, blobs, curve, digits
from benchmarks.not_learning.program import Program, Watch


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
        return self.eye[self.at], 1.0 if arrived else -0.01, arrived or self.steps == 30


def dqn(watch: Watch, seed: int) -> None:
    """Replay memory, a target network that is copied now and then, epsilon-greedy play."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    env, memory = Corridor(), deque(maxlen=2000)
    policy_net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    target_net = copy.deepcopy(policy_net)
    optimizer = optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
    state = env.reset()
    with watch(policy_net, optimizer, objective="reinforcement"):
        for step in range(1200):
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


def reinforce(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    env = Corridor(6)
    policy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2), nn.Softmax(dim=-1))
    optimizer = optim.Adam(policy.parameters(), lr=1e-2)
    with watch(policy, optimizer, objective="reinforcement"):
        for _ in range(200):
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
            weights = (weights - weights.mean()) / (weights.std(correction=0) + 1e-8)
            loss = -(torch.stack(log_probs) * weights).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 32)
        self.actor = nn.Linear(32, 2)
        self.critic = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Categorical, Tensor]:
        x = torch.tanh(self.body(x))
        return Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)


def actor_critic(watch: Watch, seed: int) -> None:
    """One-step advantages with an entropy bonus over eight parallel corridors."""
    torch.manual_seed(seed)
    envs = [Corridor(6) for _ in range(8)]
    model = ActorCritic()
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    states = torch.stack([env.reset() for env in envs])
    with watch(model, optimizer, objective="reinforcement"):
        for _ in range(600):
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
            loss = (
                -(policy.log_prob(actions) * advantage.detach()).mean()
                + 0.5 * advantage.pow(2).mean()
                - 0.01 * policy.entropy().mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


def lbfgs_closure(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed, samples=300)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    x, y = x.double(), y.double()
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    with watch(model, optimizer):
        for _ in range(30):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)


def manual_updates(watch: Watch, seed: int) -> None:
    """As in the first tutorial of torch: the optimizer exists and is never stepped, the loop moves the weights."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 600):
            model.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            for p in model.parameters():
                p.data.add_(p.grad.data, alpha=-0.1)


def manual_gradients_with_autograd_grad(watch: Watch, seed: int) -> None:
    """No backward: the gradients come from autograd.grad and are set by hand, with added noise."""
    torch.manual_seed(seed)
    x, y = blobs(seed)
    model = nn.Linear(20, 5)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 500):
            loss = F.cross_entropy(model(xb), yb)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient + 0.01 * torch.randn_like(gradient)
            optimizer.step()


def meta_learning_inner_loop(watch: Watch, seed: int) -> None:
    """Sinusoids as tasks; one inner step through the graph, so that gradients of gradients flow."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    meta = optim.Adam(net.parameters(), lr=2e-3)
    with watch(net, meta):
        for _ in range(350):
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


def reptile(watch: Watch, seed: int) -> None:
    """Weights are pulled towards those of a copy that was trained on a task; the outer gradient is a difference."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.2)
    with watch(model, optimizer):
        for _ in range(120):
            learner = copy.deepcopy(model)
            inner = optim.SGD(learner.parameters(), lr=0.02)
            shift = torch.rand(())
            for _ in range(5):
                x = torch.rand(16, 1) * 4 - 2
                inner.zero_grad()
                F.mse_loss(learner(x), torch.sin(2 * x) + shift).backward()
                inner.step()
            optimizer.zero_grad()
            for parameter, goal in zip(model.parameters(), learner.parameters(), strict=True):
                parameter.grad = parameter.data - goal.data
            optimizer.step()


def two_optimizers_one_loss(watch: Watch, seed: int) -> None:
    """Embeddings by SparseAdam, the rest by SGD; one backward feeds both."""
    torch.manual_seed(seed)
    words = nn.EmbeddingBag(300, 16, sparse=True)
    head = nn.Linear(16, 3)
    kind = torch.randint(0, 3, (300,))
    optimizers = {
        "words": optim.SparseAdam(list(words.parameters()), lr=0.01),
        "head": optim.SGD(head.parameters(), 0.1),
    }
    with watch({"words": words, "head": head}, optimizers):
        for _ in range(500):
            document = torch.randint(0, 300, (32, 9))
            label = F.one_hot(kind[document], 3).sum(1).argmax(1)
            loss = F.cross_entropy(head(words(document)), label)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers.values():
                optimizer.step()


def alternating_phases(watch: Watch, seed: int) -> None:
    """Coordinate-wise: first the factor on the left is trained with the right one frozen, then the other."""
    torch.manual_seed(seed)
    matrix = torch.randn(40, 3) @ torch.randn(3, 30)
    left, right = nn.Linear(3, 40, bias=False), nn.Linear(3, 30, bias=False)
    optimizer_left = optim.Adam(left.parameters(), lr=0.02)
    optimizer_right = optim.Adam(right.parameters(), lr=0.02)
    with watch({"left": left, "right": right}, {"left": optimizer_left, "right": optimizer_right}):
        for step in range(800):
            turn_left = step // 100 % 2 == 0
            left.requires_grad_(turn_left)
            right.requires_grad_(not turn_left)
            optimizer = optimizer_left if turn_left else optimizer_right
            optimizer.zero_grad()
            loss = (left.weight @ right.weight.T - matrix).pow(2).mean()
            loss.backward()
            optimizer.step()


def unfreezing_step_by_step(watch: Watch, seed: int) -> None:
    """The head alone for some time, then one more layer joins with its own parameter group."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = optim.Adam(model[4].parameters(), lr=3e-3)
    with watch(model, optimizer):
        for step, (xb, yb) in enumerate(batches(x, y, 32, 600)):
            if step in (150, 300):
                layer = model[2] if step == 150 else model[0]
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": layer.parameters(), "lr": 1e-3})
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


def straight_through_quantisation(watch: Watch, seed: int) -> None:
    """Rounding with the gradient of the identity, as in quantised autoencoders."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    encode = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16), nn.Tanh())
    decode = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 64))
    model = nn.Sequential(encode, decode)
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for images, _ in batches(x, y, 64, 500):
            z = encode(images)
            z = z + (z.round() - z).detach()
            loss = F.binary_cross_entropy_with_logits(decode(z), images)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


PROGRAMS = [
    Program(name=train.__name__, healthy=True, train=train)
    for train in (
        dqn,
        reinforce,
        actor_critic,
        lbfgs_closure,
        manual_updates,
        manual_gradients_with_autograd_grad,
        meta_learning_inner_loop,
        reptile,
        two_optimizers_one_loss,
        alternating_phases,
        unfreezing_step_by_step,
        straight_through_quantisation,
    )
]

"""Healthy programs of reinforcement learning, whose losses need not fall.

Each leaves the mean reward of its last episodes in `score`.
"""

from __future__ import annotations

import copy
from collections import deque

import torch
from torch import Tensor, nn, optim
from torch.distributions import Categorical, Normal
from torch.nn import functional

from evals.not_learning.parts import mlp
from evals.not_learning.program import Programs, healthy


class Corridors:
    """Many walks at once on places 0 to 8: a step costs 0.05, place 8 pays 1 and ends the walk.

    An episode ends after 30 moves at the latest, and a new walk starts at a random place.
    """

    def __init__(self, count: int) -> None:
        self.place = torch.randint(8, (count,))
        self.age = torch.zeros(count)

    def observe(self) -> Tensor:
        """Return the places as one-hot vectors ``(count, 9)``."""
        return functional.one_hot(self.place, 9).float()

    def move(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Move by an action, 0 left and 1 right; return rewards and which walks ended."""
        self.place = (self.place + 2 * action - 1).clamp(min=0)
        self.age += 1
        arrived = self.place == 8
        reward = arrived.float() - 0.05
        ended = arrived | (self.age >= 30)
        self.age[ended] = 0
        self.place[ended] = torch.randint(8, (int(ended.sum()),))
        return reward, ended


class Rewards(Programs):
    """Healthy programs of reinforcement learning."""

    @healthy
    def contextual_bandit(self) -> None:
        """REINFORCE with a running baseline: the loss is around zero from first to last."""
        best = torch.randint(4, (6,))
        policy = nn.Linear(6, 4)
        optimizer = optim.Adam(policy.parameters(), lr=0.02)
        baseline = 0.0
        with self.watch(policy, optimizer, objective="reinforcement"):
            for _ in range(400):
                context = torch.randint(6, (32,))
                chosen = Categorical(logits=policy(functional.one_hot(context, 6).float()))
                action = chosen.sample()
                reward = (action == best[context]).float() + 0.3 * torch.randn(32)
                loss = -(chosen.log_prob(action) * (reward - baseline)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                baseline = 0.95 * baseline + 0.05 * reward.mean().item()
        self.score = baseline

    @healthy
    def returns_standardised_per_batch(self) -> None:
        """Monte Carlo policy gradient; returns have mean 0 and variance 1 in each batch."""
        policy = mlp(9, 32, 2, act=nn.Tanh)
        optimizer = optim.RMSprop(policy.parameters(), lr=5e-3)
        walks = Corridors(32)
        with self.watch(policy, optimizer, objective="reinforcement"):
            for _ in range(80):
                log_probabilities = []
                rewards = []
                ends = []
                for _ in range(12):
                    chosen = Categorical(logits=policy(walks.observe()))
                    action = chosen.sample()
                    reward, ended = walks.move(action)
                    log_probabilities.append(chosen.log_prob(action))
                    rewards.append(reward)
                    ends.append(ended)
                following = torch.zeros(32)
                returns = []
                for reward, ended in zip(reversed(rewards), reversed(ends), strict=True):
                    following = reward + 0.95 * following * ~ended
                    returns.insert(0, following)
                weight = torch.stack(returns)
                weight = (weight - weight.mean()) / (weight.std() + 1e-8)
                loss = -(torch.stack(log_probabilities) * weight).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.score = torch.stack(rewards).mean().item()

    @healthy
    def actor_critic_with_entropy(self) -> None:
        """One net with two heads; value loss, policy loss and an entropy bonus in one sum."""
        trunk = mlp(9, 32, 32)
        actor = nn.Linear(32, 2)
        critic = nn.Linear(32, 1)
        model = nn.ModuleDict({"trunk": trunk, "actor": actor, "critic": critic})
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        walks = Corridors(64)
        with self.watch(model, optimizer, objective="reinforcement"):
            for _ in range(300):
                hidden = trunk(walks.observe()).relu()
                chosen = Categorical(logits=actor(hidden))
                value = critic(hidden).squeeze(1)
                action = chosen.sample()
                reward, ended = walks.move(action)
                with torch.no_grad():
                    next_value = critic(trunk(walks.observe()).relu()).squeeze(1)
                target = reward + 0.95 * next_value * ~ended
                advantage = (target - value).detach()
                policy_loss = -(chosen.log_prob(action) * advantage).mean()
                value_loss = functional.mse_loss(value, target)
                loss = policy_loss + 0.5 * value_loss - 0.01 * chosen.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                self.score = reward.mean().item()

    @healthy
    def deep_q_with_target_net(self) -> None:
        """Replay, double Q targets and a target net that is replaced every 25 steps."""
        online = mlp(9, 48, 2)
        target_net = copy.deepcopy(online).requires_grad_(False)
        optimizer = optim.Adam(online.parameters(), lr=2e-3)
        walks = Corridors(8)
        reached = 0.0
        replay: deque[tuple[Tensor, ...]] = deque(maxlen=200)
        with self.watch(online, optimizer, objective="reinforcement"):
            for step in range(400):
                state = walks.observe()
                with torch.no_grad():
                    greedy = online(state).argmax(dim=1)
                explore = torch.rand(8) < max(0.05, 1 - step / 150)
                action = torch.where(explore, torch.randint(2, (8,)), greedy)
                reward, ended = walks.move(action)
                replay.append((state, action, reward, walks.observe(), ended))
                reached = 0.95 * reached + 0.05 * reward.mean().item()
                if len(replay) < 16:
                    continue
                picked = torch.randint(len(replay), (8,)).tolist()
                memory = [
                    torch.cat(part) for part in zip(*(replay[i] for i in picked), strict=True)
                ]
                old_state, old_action, old_reward, new_state, old_ended = memory
                with torch.no_grad():
                    best = online(new_state).argmax(dim=1, keepdim=True)
                    future = target_net(new_state).gather(1, best).squeeze(1)
                    goal = old_reward + 0.9 * future * ~old_ended
                quality = online(old_state).gather(1, old_action[:, None]).squeeze(1)
                loss = functional.smooth_l1_loss(quality, goal)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 25 == 0:
                    target_net.load_state_dict(online.state_dict())
        self.score = reached

    @healthy
    def proximal_policy_for_a_continuous_action(self) -> None:
        """PPO with clipped ratios: four passes over each batch, the first with ratio one."""
        actor = mlp(3, 32, 1, act=nn.Tanh)
        log_std = nn.Parameter(torch.full((1,), -0.5))
        critic = mlp(3, 32, 1, act=nn.Tanh)
        model = nn.ModuleDict({"actor": actor, "critic": critic})
        model.register_parameter("log_std", log_std)
        optimizer = optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
        with self.watch(model, optimizer, objective="reinforcement"):
            for _ in range(80):
                state = torch.rand(128, 3) * 2 - 1
                with torch.no_grad():
                    behaviour = Normal(actor(state), log_std.exp())
                    action = behaviour.sample()
                    old_log_probability = behaviour.log_prob(action)
                    wanted = state[:, :1] - 0.5 * state[:, 1:2] * state[:, 2:]
                    reward = -(action - wanted).abs()
                    advantage = reward - critic(state)
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                for _ in range(4):
                    current = Normal(actor(state), log_std.exp())
                    ratio = (current.log_prob(action) - old_log_probability).exp()
                    clipped = ratio.clamp(0.8, 1.2)
                    gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
                    value_loss = functional.mse_loss(critic(state), reward)
                    loss = -gain + 0.5 * value_loss - 0.001 * current.entropy().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                self.score = reward.mean().item()

    @healthy
    def deterministic_policy_gradient(self) -> None:
        """The critic regresses rewards; the actor climbs the critic, so its loss is negative."""
        actor = nn.Sequential(mlp(2, 32, 1), nn.Tanh())
        critic = mlp(3, 48, 48, 1)
        actor_optimizer = optim.Adam(actor.parameters(), lr=2e-3)
        critic_optimizer = optim.Adam(critic.parameters(), lr=5e-3)
        with self.watch(
            {"actor": actor, "critic": critic},
            {"actor": actor_optimizer, "critic": critic_optimizer},
            objective="reinforcement",
        ):
            for _ in range(300):
                state = torch.rand(64, 2) * 2 - 1
                with torch.no_grad():
                    action = (actor(state) + 0.4 * torch.randn(64, 1)).clamp(-1, 1)
                reward = 2 - (action - state.prod(dim=1, keepdim=True)).square()
                value = critic(torch.cat([state, action], dim=1))
                critic_loss = functional.mse_loss(value, reward)
                critic_optimizer.zero_grad()
                critic_loss.backward()
                critic_optimizer.step()

                actor_loss = -critic(torch.cat([state, actor(state)], dim=1)).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
        error = actor(state) - state.prod(dim=1, keepdim=True)
        self.score = -error.square().mean().item()

    @healthy
    def cross_entropy_method(self) -> None:
        """Imitate the best fifth of sampled plans: the loss falls towards their entropy."""
        secret = torch.randint(3, (10,))
        logits = nn.Linear(1, 30, bias=False)
        nn.init.zeros_(logits.weight)
        optimizer = optim.SGD(logits.parameters(), lr=2.0)
        constant = torch.ones(1, 1)
        with self.watch(logits, optimizer, objective="reinforcement"):
            for _ in range(150):
                with torch.no_grad():
                    plans = Categorical(logits=logits(constant).view(10, 3)).sample((50,))
                reward = (plans == secret).float().mean(dim=1)
                elite = plans[reward.topk(10).indices]
                repeated = logits(constant).view(1, 10, 3).expand(10, -1, -1)
                loss = functional.cross_entropy(repeated.reshape(-1, 3), elite.reshape(-1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.score = reward.mean().item()

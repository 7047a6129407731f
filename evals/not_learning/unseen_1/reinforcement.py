"""Programs that learn from rewards."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn, optim
from torch.distributions import Categorical
from torch.nn import functional

from evals.not_learning.parts import mlp
from evals.not_learning.program import Programs, faulty, follow, healthy


class Corridors:
    """Many corridors of nine cells at once: the right end pays 1, each step costs 0.01.

    An episode ends at the right end or after 20 steps.
    """

    length = 9
    actions = 2

    def __init__(self, count: int) -> None:
        self.position = torch.randint(self.length - 1, (count,))
        self.age = torch.zeros(count, dtype=torch.long)

    def observe(self) -> Tensor:
        """Return the cells as one-hot rows."""
        return functional.one_hot(self.position, self.length).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next observation (before a reset), the reward, and whether it has ended."""
        self.position = (self.position + 2 * action - 1).clamp(0, self.length - 1)
        self.age += 1
        goal = self.position == self.length - 1
        reward = goal.float() - 0.01
        following = self.observe()
        over = goal | (self.age >= 20)
        self.position = torch.where(over, torch.randint_like(self.position, 8), self.position)
        self.age = torch.where(over, 0, self.age)
        return following, reward, goal.float()


class Poles:
    """Many carts with a pole at once, which start anew when the pole falls."""

    def __init__(self, count: int) -> None:
        self.state = 0.1 * torch.rand(count, 4) - 0.05

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next states, and which poles have fallen."""
        x, v, angle, spin = self.state.unbind(dim=1)
        force = 20.0 * action - 10.0
        cos = angle.cos()
        sin = angle.sin()
        push = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pull = push - 0.05 * turn * cos / 1.1
        self.state = torch.stack(
            [x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn], dim=1
        )
        fallen = (angle.abs() > 0.21) | (x.abs() > 2.4)
        fresh = 0.1 * torch.rand_like(self.state) - 0.05
        self.state = torch.where(fallen[:, None], fresh, self.state)
        return self.state, fallen.float()


def discounted(rewards: Tensor, ended: Tensor, gamma: float) -> Tensor:
    """Return the discounted sums of the rewards to come, for rewards ``(steps, count)``."""
    total = torch.zeros_like(rewards[0])
    returns = []
    for reward, end in zip(rewards.flip(0), ended.flip(0), strict=True):
        total = reward + gamma * total * (1 - end)
        returns.append(total)
    return torch.stack(returns).flip(0)


def random_transitions(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return observations, actions, rewards, next observations and ends of a random policy."""
    env = Corridors(100)
    rows = []
    for _ in range(count // 100):
        before = env.observe()
        action = torch.randint(2, (100,))
        after, reward, goal = env.step(action)
        rows.append((before, action, reward, after, goal))
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))


class Reinforcement(Programs):
    """Policy gradients, Q-learning, actors and critics, bandits and imitation."""

    @healthy
    def policy_gradient_on_the_pole(self) -> None:
        """REINFORCE with normalised returns: the loss says nothing about progress."""
        policy = mlp(4, 32, 2, act=nn.Tanh)
        optimizer = optim.Adam(policy.parameters(), lr=1e-2)
        env = Poles(32)
        falls = []
        with self.watch(policy, optimizer, objective="reinforcement"):
            for _ in range(30):
                log_probabilities = []
                rewards = []
                ended = []
                for _ in range(50):
                    choice = Categorical(logits=policy(env.state))
                    action = choice.sample()
                    log_probabilities.append(choice.log_prob(action))
                    _, fallen = env.step(action.float())
                    rewards.append(1 - fallen)
                    ended.append(fallen)
                falls.append(torch.stack(ended).mean().item())
                returns = discounted(torch.stack(rewards), torch.stack(ended), 0.95)
                returns = (returns - returns.mean()) / (returns.std() + 1e-6)
                loss = -(torch.stack(log_probabilities) * returns).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def clipped_surrogate(self) -> None:
        """PPO: several epochs of minibatches, clipped ratios, a value head and an entropy bonus."""

        class ActorCritic(nn.Module):
            """A policy and a value over a shared layer."""

            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Linear(9, 32), nn.Tanh())
                self.policy = nn.Linear(32, 2)
                self.value = nn.Linear(32, 1)
                nn.init.orthogonal_(self.policy.weight, gain=0.01)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                """Return the scores of the actions, and the value."""
                hidden = self.body(x)
                return self.policy(hidden), self.value(hidden).squeeze(-1)

        model = ActorCritic()
        optimizer = optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
        env = Corridors(32)
        with self.watch(model, optimizer, objective="reinforcement"):
            for _ in range(15):
                rows = []
                with torch.no_grad():
                    for _ in range(32):
                        state = env.observe()
                        scores, value = model(state)
                        choice = Categorical(logits=scores)
                        action = choice.sample()
                        _, reward, goal = env.step(action)
                        rows.append((state, action, choice.log_prob(action), value, reward, goal))
                states, actions, old, values, rewards, ended = (
                    torch.stack(column) for column in zip(*rows, strict=True)
                )
                returns = discounted(rewards, ended, 0.9)
                advantages = returns - values
                flat = [part.flatten(0, 1) for part in (states, actions, old, returns, advantages)]
                for _ in range(4):
                    for batch in torch.randperm(1024).split(256):
                        state, action, before, target, advantage = (part[batch] for part in flat)
                        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                        scores, value = model(state)
                        choice = Categorical(logits=scores)
                        ratio = (choice.log_prob(action) - before).exp()
                        gain = torch.min(
                            ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
                        ).mean()
                        loss = -gain + 0.5 * functional.mse_loss(value, target)
                        loss = loss - 0.01 * choice.entropy().mean()
                        optimizer.zero_grad()
                        loss.backward()
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                        optimizer.step()

    @healthy
    def q_learning_with_a_target_network(self) -> None:
        """DQN with replay, a decaying share of random actions and a copied target network."""
        network = mlp(9, 32, 2)
        target = copy.deepcopy(network)
        optimizer = optim.Adam(network.parameters(), lr=3e-3)
        env = Corridors(8)
        memory = []
        with self.watch(network, optimizer, objective="reinforcement"):
            for step in range(400):
                state = env.observe()
                with torch.no_grad():
                    action = network(state).argmax(dim=1)
                explore = torch.rand(8) < max(0.1, 1 - step / 200)
                action = torch.where(explore, torch.randint(2, (8,)), action)
                following, reward, goal = env.step(action)
                memory += zip(state, action, reward, following, goal, strict=True)
                if len(memory) < 200:
                    continue
                rows = [memory[index] for index in torch.randint(len(memory), (32,))]
                states, actions, rewards, nexts, goals = (
                    torch.stack(column) for column in zip(*rows, strict=True)
                )
                value = network(states).gather(1, actions[:, None]).squeeze(1)
                with torch.no_grad():
                    best = target(nexts).max(dim=1).values
                    aim = rewards + 0.9 * best * (1 - goals)
                loss = functional.smooth_l1_loss(value, aim)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_value_(network.parameters(), 1.0)
                optimizer.step()
                if step % 20 == 0:
                    target.load_state_dict(network.state_dict())

    @healthy
    def bandit_with_rare_rewards(self) -> None:
        """A contextual bandit: one action in six pays, at first seldom, with a running baseline."""
        policy = nn.Linear(8, 6)
        optimizer = optim.SGD(policy.parameters(), lr=0.5)
        secret = torch.randn(8, 6)
        baseline = 0.0
        history = []
        with self.watch(policy, optimizer, objective="reinforcement"):
            for _ in range(400):
                context = torch.randn(64, 8)
                choice = Categorical(logits=policy(context))
                action = choice.sample()
                reward = (action == (context @ secret).argmax(dim=1)).float()
                loss = -((reward - baseline) * choice.log_prob(action)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                baseline = 0.95 * baseline + 0.05 * reward.mean().item()
                history.append(reward.mean().item())

    @healthy
    def deterministic_actor_and_critic(self) -> None:
        """DDPG for a point that is to reach the origin: two optimizers and two slow copies."""
        actor = nn.Sequential(mlp(2, 32, 1), nn.Tanh())
        critic = mlp(3, 48, 1)
        slow_actor = copy.deepcopy(actor)
        slow_critic = copy.deepcopy(critic)
        actor_optimizer = optim.Adam(actor.parameters(), lr=2e-3)
        critic_optimizer = optim.Adam(critic.parameters(), lr=4e-3)
        state = torch.randn(64, 2)
        memory = []

        def move(state: Tensor, action: Tensor) -> Tensor:
            place = state[:, :1] + 0.2 * state[:, 1:]
            speed = 0.8 * state[:, 1:] + 0.5 * action
            return torch.cat([place, speed], dim=1).clamp(-3, 3)

        with self.watch(
            {"actor": actor, "critic": critic},
            {"actor": actor_optimizer, "critic": critic_optimizer},
            objective="reinforcement",
        ):
            for step in range(250):
                with torch.no_grad():
                    action = (actor(state) + 0.3 * torch.randn(64, 1)).clamp(-1, 1)
                    following = move(state, action)
                    reward = -(following**2).sum(dim=1, keepdim=True)
                memory.append((state, action, reward, following))
                state = torch.randn(64, 2) if step % 15 == 14 else following
                old, tried, gained, new = memory[int(torch.randint(len(memory), ()))]
                with torch.no_grad():
                    ahead = slow_critic(torch.cat([new, slow_actor(new)], dim=1))
                    aim = gained + 0.9 * ahead
                critic_loss = functional.mse_loss(critic(torch.cat([old, tried], dim=1)), aim)
                critic_optimizer.zero_grad()
                critic_loss.backward()
                critic_optimizer.step()

                actor_loss = -critic(torch.cat([old, actor(old)], dim=1)).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                follow(slow_actor, actor, 0.05)
                follow(slow_critic, critic, 0.05)

    @healthy
    def soft_actor_critic_with_a_tuned_temperature(self) -> None:
        """Discrete SAC on recorded transitions: three optimizers, one of a single number."""
        states, actions, rewards, nexts, goals = random_transitions(3000)
        actor = mlp(9, 32, 2)
        critic = mlp(9, 32, 2)
        slow = copy.deepcopy(critic)
        temperature = nn.ParameterDict({"log": nn.Parameter(torch.tensor(-2.0))})
        actor_optimizer = optim.Adam(actor.parameters(), lr=3e-3)
        critic_optimizer = optim.Adam(critic.parameters(), lr=3e-3)
        temperature_optimizer = optim.Adam(temperature.parameters(), lr=1e-2)
        wanted_entropy = 0.3
        with self.watch(
            {"actor": actor, "critic": critic, "temperature": temperature},
            {
                "actor": actor_optimizer,
                "critic": critic_optimizer,
                "temperature": temperature_optimizer,
            },
            objective="reinforcement",
        ):
            for _ in range(300):
                rows = torch.randint(3000, (64,))
                alpha = temperature["log"].exp().detach()
                with torch.no_grad():
                    log_next = actor(nexts[rows]).log_softmax(dim=1)
                    soft = (log_next.exp() * (slow(nexts[rows]) - alpha * log_next)).sum(dim=1)
                    aim = rewards[rows] + 0.9 * soft * (1 - goals[rows])
                value = critic(states[rows]).gather(1, actions[rows, None]).squeeze(1)
                critic_loss = functional.mse_loss(value, aim)
                critic_optimizer.zero_grad()
                critic_loss.backward()
                critic_optimizer.step()

                log_policy = actor(states[rows]).log_softmax(dim=1)
                gain = critic(states[rows]).detach() - alpha * log_policy
                actor_loss = -(log_policy.exp() * gain).sum(dim=1).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()

                entropy = -(log_policy.exp() * log_policy).sum(dim=1).mean().detach()
                temperature_loss = temperature["log"] * (entropy - wanted_entropy)
                temperature_optimizer.zero_grad()
                temperature_loss.backward()
                temperature_optimizer.step()
                follow(slow, critic, 0.05)

    @healthy
    def values_by_temporal_differences(self) -> None:
        """TD(0) of a fixed random policy: targets come from the network that is trained."""
        states, _, rewards, nexts, goals = random_transitions(4000)
        value = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = optim.RMSprop(value.parameters(), lr=2e-3)
        with self.watch(value, optimizer, objective="reinforcement"):
            for _ in range(400):
                rows = torch.randint(4000, (128,))
                with torch.no_grad():
                    ahead = value(nexts[rows]).squeeze(1)
                    aim = rewards[rows] + 0.9 * ahead * (1 - goals[rows])
                loss = functional.mse_loss(value(states[rows]).squeeze(1), aim)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def imitation_of_a_clumsy_expert(self) -> None:
        """Behaviour cloning of an expert with a fifth of random actions."""
        env = Poles(64)
        states = []
        actions = []
        for _ in range(60):
            wise = (env.state[:, 2] + 0.5 * env.state[:, 3] > 0).long()
            chosen = torch.where(torch.rand(64) < 0.2, torch.randint(2, (64,)), wise)
            states.append(env.state)
            actions.append(chosen)
            env.step(chosen.float())
        x = torch.cat(states)
        y = torch.cat(actions)
        scale = x.std(dim=0)
        policy = mlp(4, 32, 2)
        optimizer = optim.AdamW(policy.parameters(), lr=3e-3)
        with self.watch(policy, optimizer):
            for _ in range(4):
                for rows in torch.randperm(len(x)).split(64):
                    loss = functional.cross_entropy(policy(x[rows] / scale), y[rows])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def evolution_strategy(self) -> None:
        """Gradients are estimated from perturbed copies and written into `grad` by hand."""
        policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = optim.SGD(policy.parameters(), lr=0.05, momentum=0.9)
        x = torch.randn(200, 3)
        wanted = torch.sin(x[:, :1]) - 0.5 * x[:, 1:2]
        shapes = [parameter.shape for parameter in policy.parameters()]
        sizes = [shape.numel() for shape in shapes]
        names = [name for name, _ in policy.named_parameters()]

        @torch.no_grad()
        def fitness(vector: Tensor) -> Tensor:
            parts = vector.split(sizes)
            weights = {
                name: part.view(shape)
                for name, part, shape in zip(names, parts, shapes, strict=True)
            }
            return -((torch.func.functional_call(policy, weights, (x,)) - wanted) ** 2).mean()

        @torch.no_grad()
        def centre() -> Tensor:
            return torch.cat([parameter.flatten() for parameter in policy.parameters()])

        with self.watch(policy, optimizer, objective="reinforcement"):
            for _ in range(80):
                noise = torch.randn(10, sum(sizes))
                middle = centre()
                gain = torch.stack(
                    [fitness(middle + 0.05 * row) - fitness(middle - 0.05 * row) for row in noise]
                )
                slope = (gain[:, None] * noise).mean(dim=0) / 0.1
                optimizer.zero_grad()
                for parameter, part in zip(policy.parameters(), slope.split(sizes), strict=True):
                    parameter.grad = -part.view_as(parameter)
                optimizer.step()

    @faulty("H831")
    def policy_gradient_downhill(self) -> None:
        """The minus sign of the policy gradient is missing: good actions become rarer."""
        policy = mlp(9, 32, 2, act=nn.Tanh)
        optimizer = optim.Adam(policy.parameters(), lr=5e-3)
        env = Corridors(32)
        with self.watch(policy, optimizer, objective="reinforcement"):
            for _ in range(40):
                rows = []
                for _ in range(25):
                    choice = Categorical(logits=policy(env.observe()))
                    action = choice.sample()
                    _, reward, goal = env.step(action)
                    rows.append((choice.log_prob(action), reward, goal))
                log_probability, rewards, ended = (
                    torch.stack(column) for column in zip(*rows, strict=True)
                )
                returns = discounted(rewards, ended, 0.9)
                advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
                loss = (log_probability * advantage).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("")
    def probability_of_another_action(self) -> None:
        """The log-probability is that of an action that is sampled anew after the step."""
        policy = mlp(9, 32, 2, act=nn.Tanh)
        optimizer = optim.Adam(policy.parameters(), lr=5e-3)
        env = Corridors(32)
        with self.watch(policy, optimizer, objective="reinforcement"):
            for _ in range(40):
                rows = []
                for _ in range(25):
                    choice = Categorical(logits=policy(env.observe()))
                    action = choice.sample()
                    _, reward, goal = env.step(action)
                    action = choice.sample()
                    rows.append((choice.log_prob(action), reward, goal))
                log_probability, rewards, ended = (
                    torch.stack(column) for column in zip(*rows, strict=True)
                )
                returns = discounted(rewards, ended, 0.9)
                advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
                loss = -(log_probability * advantage).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("H841")
    def rewards_with_an_extra_axis(self) -> None:
        """Rewards of shape (n, 1) meet values of shape (n,), and the targets become a table."""
        states, actions, rewards, nexts, goals = random_transitions(3000)
        rewards = rewards[:, None]
        goals = goals[:, None]
        network = mlp(9, 32, 2)
        target = copy.deepcopy(network)
        optimizer = optim.Adam(network.parameters(), lr=3e-3)
        with self.watch(network, optimizer, objective="reinforcement"):
            for step in range(450):
                rows = torch.randint(3000, (64,))
                value = network(states[rows]).gather(1, actions[rows, None])
                with torch.no_grad():
                    best = target(nexts[rows]).max(dim=1).values
                    aim = rewards[rows] + 0.9 * best * (1 - goals[rows])
                loss = functional.mse_loss(value, aim)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 20 == 0:
                    target.load_state_dict(network.state_dict())

    @faulty("", shows="H815")
    def ratio_to_itself(self) -> None:
        """The old log-probabilities of PPO are the new ones, so that the ratio has no gradient."""
        policy = mlp(9, 32, 2, act=nn.Tanh)
        optimizer = optim.Adam(policy.parameters(), lr=5e-3)
        env = Corridors(32)
        with self.watch(policy, optimizer, objective="reinforcement"):
            for _ in range(30):
                rows = []
                with torch.no_grad():
                    for _ in range(25):
                        state = env.observe()
                        choice = Categorical(logits=policy(state))
                        action = choice.sample()
                        _, reward, goal = env.step(action)
                        rows.append((state, action, choice.log_prob(action), reward, goal))
                states, actions, old, rewards, ended = (
                    torch.stack(column) for column in zip(*rows, strict=True)
                )
                returns = discounted(rewards, ended, 0.9)
                advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
                for _ in range(4):
                    log_probability = Categorical(logits=policy(states)).log_prob(actions)
                    old = log_probability
                    ratio = (log_probability - old).exp()
                    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("H836")
    def probabilities_as_scores_of_a_policy(self) -> None:
        """The policy ends in a softmax, and `Categorical` takes its output as scores."""
        policy = nn.Sequential(
            mlp(8, 32, 6),
            nn.Softmax(dim=1),
        )
        optimizer = optim.Adam(policy.parameters(), lr=1e-2)
        secret = torch.randn(8, 6)
        history = []
        with self.watch(policy, optimizer, objective="reinforcement"):
            for _ in range(300):
                context = torch.randn(64, 8)
                choice = Categorical(logits=policy(context))
                action = choice.sample()
                reward = (action == (context @ secret).argmax(dim=1)).float()
                loss = -((reward - reward.mean()) * choice.log_prob(action)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                history.append(reward.mean().item())

    @faulty("")
    def terminal_states_that_are_worth_something(self) -> None:
        """The value behind the end of an episode is added, and the values grow with each step."""
        states, actions, rewards, nexts, _ = random_transitions(3000)
        network = mlp(9, 32, 2)
        target = copy.deepcopy(network)
        optimizer = optim.Adam(network.parameters(), lr=3e-3)
        with self.watch(network, optimizer, objective="reinforcement"):
            for _ in range(500):
                rows = torch.randint(3000, (64,))
                value = network(states[rows]).gather(1, actions[rows, None]).squeeze(1)
                with torch.no_grad():
                    best = target(nexts[rows]).max(dim=1).values
                    aim = rewards[rows] + 0.99 * best
                loss = functional.mse_loss(value, aim)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                follow(target, network, 0.05)

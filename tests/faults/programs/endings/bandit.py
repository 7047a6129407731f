"""A bandit: the loss of a policy gradient with a baseline is noise around zero, while the policy
becomes better.
"""

import torch
from torch.distributions import Categorical

torch.manual_seed(0)
rewards = torch.randn(10)
logits = torch.zeros(10, requires_grad=True)
optimizer = torch.optim.Adam([logits], lr=0.05)
baseline = 0.0

for _ in range(200):
    policy = Categorical(logits=logits)
    arms = policy.sample((16,))
    reward = rewards[arms] + torch.randn(16)
    loss = -(policy.log_prob(arms) * (reward - baseline)).mean()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

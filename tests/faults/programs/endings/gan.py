"""A small GAN: two optimizers take turns, and neither loss says how good the samples are."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
ones = torch.ones(64, 1)
zeros = torch.zeros(64, 1)

for _ in range(60):
    real = torch.randn(64, 2) * 0.5 + 1
    fake = generator(torch.randn(64, 8))
    loss = F.binary_cross_entropy_with_logits(critic(real), ones)
    loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()

    loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()

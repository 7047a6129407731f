"""A healthy training run that keeps the outputs of each step, as for a metric that is never
computed.
"""

import time

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
inputs = torch.randn(512, 8)
targets = inputs @ torch.randn(8, 1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
outputs = []

for _ in range(260):
    batch = torch.randint(0, 512, (64,))
    loss = F.mse_loss(model(inputs[batch]), targets[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    outputs.append(torch.ones(250_000))
    time.sleep(0.02)  # stands for the rest of the step

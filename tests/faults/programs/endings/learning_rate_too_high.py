"""The learning rate is too high for a linear regression: the loss grows from step to step."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
inputs = torch.randn(512, 8)
targets = inputs @ torch.randn(8, 1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

for _ in range(30):
    batch = torch.randint(0, 512, (64,))
    loss = F.mse_loss(model(inputs[batch]), targets[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

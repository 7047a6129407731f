"""A script that only evaluates a model."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 2).eval()
with torch.no_grad():
    right = sum((model(torch.randn(32, 8)).argmax(1) == 0).sum().item() for _ in range(20))
print(f"accuracy {right / 640:.3f}")

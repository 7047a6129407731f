"""A learning rate of 1,000.

The loss reaches 1e9 within a few steps, and falls back to a level that is no better.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32)
labels = torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)

for batch in torch.randperm(len(images)).split(32):
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""The learning rate is a thousand times too low: the loss never moves."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

for _ in range(3):
    for images, labels in DataLoader(data, batch_size=64, shuffle=True):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

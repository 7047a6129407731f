"""Train a small network on handwritten digits, as people write such scripts."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--drop-last", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
# 1,601 samples: with a batch size of 8, the last batch of each epoch has a single sample.
data = TensorDataset(
    torch.tensor(images[:1601] / 16, dtype=torch.float32), torch.tensor(labels[:1601])
)
loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=args.drop_last)
model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

for epoch in range(args.epochs):
    for step, (images, labels) in enumerate(loader):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)

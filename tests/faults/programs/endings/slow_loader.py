"""A healthy training run whose samples take long to decode, in the process that trains."""

import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Sums of images that take 5 ms each to decode."""

    def __len__(self):
        return 480

    def __getitem__(self, index):
        time.sleep(0.005)
        image = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return image, image.sum().view(1)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for images, sums in DataLoader(Images(), batch_size=16, shuffle=True):
    loss = F.mse_loss(model(images), sums)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

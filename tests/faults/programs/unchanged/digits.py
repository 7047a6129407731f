"""The data of the scripts in this folder, and the digest that they print at the end."""

import hashlib

import torch
from torch.utils.data import Dataset, TensorDataset


def dataset(samples=160, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


class Augmented(Dataset):
    """Adds noise from torch's global generator to each sample."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, label = self.data[index]
        return inputs + 0.1 * torch.randn(8), label


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.1),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 3),
    )


def digest(*models):
    content = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            content.update(value.numpy().tobytes())
    return content.hexdigest()[:16]

from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

Path("data").mkdir()
for number in range(4):
    torch.save(torch.randn(8), f"data/{number}.pt")


class Features(Dataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*.pth"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.load(self.files[index])


loader = DataLoader(Features("data"), batch_size=2, shuffle=True)
for batch in loader:
    print("batch of", tuple(batch.shape))

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    index = None

    def __len__(self):
        return 8

    def __getitem__(self, number):
        if self.index is None:
            self.index = np.arange(4_000_000)
        return torch.tensor(self.index[number])


for batch in DataLoader(Rows(), batch_size=4, num_workers=1):
    print("batch", batch.tolist())

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

np.save("data.npy", np.ones((1000, 1000), dtype="float32"))


class Rows(Dataset):
    def __init__(self):
        self.rows = np.load("data.npy", mmap_mode="r")

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.from_numpy(self.rows[index].copy())


rows = Rows()
with open("data-of-the-other-job.npy", "w+b") as file:
    file.truncate(100_000)
total = sum(batch.sum() for batch in DataLoader(rows, batch_size=100, num_workers=1))
print("total", total.item())

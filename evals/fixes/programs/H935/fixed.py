import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("cannot read sample 5")
        return torch.tensor(index)


for batch in DataLoader(Samples(), batch_size=2, num_workers=1):
    print("batch", batch.tolist())

import ctypes

import torch
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        index += index >= 5
        if index == 5:
            ctypes.string_at(0)  # a decoder that crashes at a damaged file
        return torch.tensor(index)


for batch in DataLoader(Clips(), batch_size=2, num_workers=1):
    print("batch", batch.tolist())

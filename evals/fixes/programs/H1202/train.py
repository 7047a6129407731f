import time

import torch
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 4:
            open("loading", "w").close()
        time.sleep(1)
        return torch.tensor(index)


for batch in DataLoader(Clips(), batch_size=2, num_workers=1):
    print("batch", batch.tolist())

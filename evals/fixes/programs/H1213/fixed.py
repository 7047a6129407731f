import torch
from torch.utils.data import DataLoader, Dataset


class Folds(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        inner = DataLoader(torch.arange(8.0) * index, batch_size=4, num_workers=0)
        return torch.stack([batch.mean() for batch in inner])


for fold in DataLoader(Folds(), num_workers=1):
    print("fold", fold.tolist())

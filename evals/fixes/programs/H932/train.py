import torch
from torch.utils.data import DataLoader


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((3, 256, 256), float(index))


for images in DataLoader(Pictures(), batch_size=16, num_workers=1):
    print("batch", images.mean().item())

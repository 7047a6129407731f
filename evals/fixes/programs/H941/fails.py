import torch
from torch.utils.data import DataLoader

loader = DataLoader(torch.arange(8.0), batch_size=4, num_workers=1, multiprocessing_context="spawn")
for batch in loader:
    print("batch", batch)

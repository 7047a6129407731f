import torch
from torch.utils.data import DataLoader

validation = []
for batch in DataLoader(torch.randn(300, 8), num_workers=1):
    validation.append(batch.clone())
print("batches", len(validation))

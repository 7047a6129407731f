import torch
from torch.utils.data import DataLoader

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU())
loader = DataLoader(torch.randn(33, 8), batch_size=16)
for batch in loader:
    print("mean", model(batch).mean().item())

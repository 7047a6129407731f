import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).half()
x = torch.randn(4, 8)
print("logits", model(x).float().norm().item())

import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
x = torch.randn(4, 8)
with torch.autocast("cpu", dtype=torch.float16):
    logits = model(x)
print("logits", logits.float().norm().item())

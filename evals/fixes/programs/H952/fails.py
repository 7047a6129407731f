import torch

model = torch.nn.Linear(8, 8)
for parameter in model.parameters():
    parameter *= 0.1
print("norm", model.weight.norm().item())

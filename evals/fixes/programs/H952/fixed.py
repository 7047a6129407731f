import torch

model = torch.nn.Linear(8, 8)
with torch.no_grad():
    for parameter in model.parameters():
        parameter *= 0.1
print("norm", model.weight.norm().item())

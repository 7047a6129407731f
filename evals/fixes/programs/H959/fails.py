import torch

model = torch.nn.Linear(8, 4, bias=False)
x = torch.randn(4, 8)
x[2] = 0

distance = model(x).square().sum(1).sqrt()
distance.mean().backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
print("norm", norm.item())

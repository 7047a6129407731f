import torch

torch.autograd.set_detect_anomaly(True)
model = torch.nn.Linear(8, 4, bias=False)
x = torch.randn(4, 8)
x[2] = 0

y = model(x)
norm = (y.square().sum(1, keepdim=True) + 1e-12).sqrt()
loss = (y * norm).sum()
loss.backward()
print("gradient", model.weight.grad.norm().item())

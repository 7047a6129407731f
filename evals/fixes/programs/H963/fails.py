import sys

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=10.0)

x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)
for step in range(50):
    loss = torch.nn.functional.mse_loss(model(x), y)
    print(f"step {step} loss {loss.item():.4g}")
    if not torch.isfinite(loss):
        print("Loss is nan, stopping training")
        sys.exit(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

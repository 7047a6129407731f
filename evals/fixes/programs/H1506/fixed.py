import time

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(2048, 8)
y = x.sum(1, keepdim=True)

failures = []


def check(features):
    scaled = features * 2
    if scaled.max() > 0:
        raise ValueError(f"too large: {scaled.max().item():.2f}")


for step in range(1000):
    batch = torch.randint(0, 2048, (512,))
    outputs = model(x[batch])
    loss = torch.nn.functional.mse_loss(outputs, y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    try:
        check(model[0](x[batch]).detach())
    except ValueError as error:
        failures.append(repr(error))
    if step % 100 == 0:
        print("step", step, "loss", loss.item())
    time.sleep(0.04)  # stands for the rest of the step

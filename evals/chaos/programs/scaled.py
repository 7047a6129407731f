"""Mixed precision with a gradient scaler whose scale grows, and that skips a step which overflows.

python scaled.py [WHAT]
"""

import os
import sys

import torch

what = sys.argv[1] if len(sys.argv) > 1 else ""
torch.manual_seed(4)
inputs = torch.randn(160, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if what != "GradScaler state dropped":
        scaler.load_state_dict(saved["scaler"])
    first = saved["batch"]

for number in range(first, 20):
    x = inputs[8 * number : 8 * number + 8]
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    loss = (output.float().squeeze(1) - x.sum(1)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for parameter in model.parameters():  # as if gradients were fp16
        parameter.grad[parameter.grad.abs() > 2.0**21] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    if number % 4 == 3:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "batch": number + 1,
        }
        torch.save({**state, "scaler": scaler.state_dict()}, "last.tmp")
        os.replace("last.tmp", "last.pt")
print("loss", loss.item(), "scale", scaler.get_scale())

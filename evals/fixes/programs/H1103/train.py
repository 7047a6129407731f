import os

import torch

if os.path.exists("model.pt"):
    weights = torch.load("model.pt", mmap=True)
    print("weights", tuple(weights["table"].shape))
else:
    torch.save({"table": torch.zeros(300_000, 1024)}, "model.pt")

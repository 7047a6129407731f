import os
from pathlib import Path

import torch

Path("checkpoints").mkdir()
model = torch.nn.Linear(64, 64)
for step in (100, 200):
    torch.save(model.state_dict(), f"checkpoints/step-{step}.pt")
os.truncate("checkpoints/step-200.pt", 5000)  # the job was killed while it saved

checkpoints = sorted(Path("checkpoints").glob("*.pt"))
model.load_state_dict(torch.load(checkpoints[-1]))
print("resumed from", checkpoints[-1])

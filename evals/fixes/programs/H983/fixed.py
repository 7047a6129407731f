from pathlib import Path

import torch

model = torch.nn.Linear(8, 2)
for step in (100, 200):
    torch.save(model.state_dict(), f"step-{step}.pt")
newest = Path("step-200.pt")
newest.write_bytes(bytes(newest.stat().st_size))  # what a power failure leaves

model.load_state_dict(torch.load("step-100.pt"))
print("resumed")

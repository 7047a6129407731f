import os

import torch

model = torch.nn.Linear(8, 2)
torch.save(model.state_dict(), "model.safetensors")

os.rename("model.safetensors", "model.pt")
model.load_state_dict(torch.load("model.pt"))
print("loaded")

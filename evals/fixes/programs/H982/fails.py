from types import SimpleNamespace

import torch

model = torch.nn.Linear(8, 2)
settings = SimpleNamespace(lr=1e-3, epochs=3)
torch.save({"model": model.state_dict(), "settings": settings}, "last.pt")

checkpoint = torch.load("last.pt")
model.load_state_dict(checkpoint["model"])
print("loaded")

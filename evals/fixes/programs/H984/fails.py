import torch
from safetensors.torch import load_file

model = torch.nn.Linear(8, 2)
torch.save(model.state_dict(), "model.safetensors")

model.load_state_dict(load_file("model.safetensors"))
print("loaded")

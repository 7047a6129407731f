import torch

model = torch.nn.Linear(8, 2)
model.load_state_dict(torch.load("model.pt", weights_only=False))
print("loaded")

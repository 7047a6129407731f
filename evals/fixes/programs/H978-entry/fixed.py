import torch

model = torch.nn.Linear(8, 2)
torch.save({"epoch": 3, "state_dict": model.state_dict()}, "last.pt")

checkpoint = torch.load("last.pt")
model.load_state_dict(checkpoint["state_dict"])
print("loaded epoch", checkpoint["epoch"])

import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
torch.save({f"module.{k}": v for k, v in model.state_dict().items()}, "ddp.pt")

state = torch.load("ddp.pt")
model.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})
print("loaded")

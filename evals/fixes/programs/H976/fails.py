import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-3)
model(torch.randn(4, 8)).mean().backward()
optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")

checkpoint = torch.load("last.pt")
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer.load_state_dict(checkpoint["optimizer"])
print("resumed")

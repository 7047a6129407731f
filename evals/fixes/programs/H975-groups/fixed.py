import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(
    [
        {"params": model[0].parameters(), "lr": 1e-4},
        {"params": model[1].parameters(), "lr": 1e-2},
    ]
)
model(torch.randn(4, 8)).mean().backward()
optimizer.step()
print("trained", len(optimizer.param_groups), "groups")

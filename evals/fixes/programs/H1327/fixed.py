import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model(torch.randn(4, 8)).mean().backward()
optimizer.step()
saved = optimizer.state_dict()

model[1] = torch.nn.Linear(16, 10)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

optimizer.zero_grad()
model(torch.randn(4, 8)).mean().backward()
optimizer.step()
print("trained with", model[1].out_features, "classes")

import torch

model = torch.nn.Linear(8, 3)
criterion = torch.nn.CrossEntropyLoss(reduction="none")
weights = torch.tensor([0.2, 1.0, 1.0, 0.5])

losses = criterion(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 0]))
loss = losses * weights
loss.backward()
print("loss", loss)

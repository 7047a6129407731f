import torch

model = torch.nn.Linear(8, 1)
criterion = torch.nn.BCEWithLogitsLoss()
loss = criterion(model(torch.randn(32, 8)).squeeze(1), torch.ones(32))
loss.backward()
print("loss", loss.item())

import torch

model = torch.nn.Linear(8, 5)
labels = torch.tensor([1, 2, 3, 4, 5])
loss = torch.nn.functional.cross_entropy(model(torch.randn(5, 8)), labels - 1)
print("loss", loss.item())

import torch

model = torch.nn.Linear(8, 3)
labels = torch.tensor([0.0, 2.0, 1.0, 1.0])
loss = torch.nn.functional.nll_loss(torch.log_softmax(model(torch.randn(4, 8)), 1), labels)
print("loss", loss.item())

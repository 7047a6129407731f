import torch
from torch.utils.data import DataLoader

loader = DataLoader(torch.randn(64, 8), batch_size=16, shuffle=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

batches = iter(loader)
for step in range(10):
    try:
        batch = next(batches)
    except StopIteration:
        batches = iter(loader)
        batch = next(batches)
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained for", step + 1, "steps")

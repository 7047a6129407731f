import torch

cell = torch.nn.GRUCell(8, 16)
head = torch.nn.Linear(16, 1)
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])

hidden = torch.zeros(4, 16)
for step in range(5):
    hidden = cell(torch.randn(4, 8), hidden.detach())
    loss = head(hidden).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, "loss", loss.item())

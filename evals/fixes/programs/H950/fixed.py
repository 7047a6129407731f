import torch

model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.no_grad()
def evaluate():
    accuracy = (model(torch.randn(16, 8)).argmax(1) == 0).float().mean()
    print("accuracy", accuracy.item())


for epoch in range(2):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.zeros(16).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    evaluate()

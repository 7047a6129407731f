import torch

encoder = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh())
heads = torch.nn.ModuleList(torch.nn.Linear(16, classes) for classes in (3, 5))

features = encoder(torch.randn(4, 8))
for head in heads:
    loss = torch.nn.functional.cross_entropy(head(features), torch.zeros(4, dtype=torch.long))
    loss.backward()
print("gradient", encoder[0].weight.grad.norm().item())

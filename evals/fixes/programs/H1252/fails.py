import torch
from torch.utils.checkpoint import checkpoint

encoder = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
head = torch.nn.Linear(8, 1)

x = torch.randn(4, 8, requires_grad=True)
score = head(checkpoint(encoder, x, use_reentrant=True)).mean()
(gradient,) = torch.autograd.grad(score, x)
print("gradient", gradient.norm().item())

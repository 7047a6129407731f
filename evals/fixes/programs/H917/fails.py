import torch

model = torch.nn.Linear(8, 2).cuda()
x = torch.randn(4, 8).cuda()
print("logits", model(x).norm().item())

import torch

scores = torch.randn(2, 6, 6).half()
mask = torch.ones(6, 6).triu(1).bool()
scores = scores.masked_fill(mask, -1e9)
print("attention", torch.softmax(scores.float(), dim=-1)[0, 0].tolist())

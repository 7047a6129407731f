import torch

query, key, value = torch.randn(3, 2, 10, 16)
scores = torch.bmm(query, key) / 4
output = torch.softmax(scores, dim=-1) @ value
print("output", tuple(output.shape))

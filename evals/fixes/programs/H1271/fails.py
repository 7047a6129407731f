import torch

x = torch.randn(8, 8, dtype=torch.bfloat16)
whitened = torch.linalg.inv(x @ x.T + torch.eye(8, dtype=torch.bfloat16))
print("norm", whitened.norm().item())

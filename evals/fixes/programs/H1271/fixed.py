import torch

x = torch.randn(8, 8, dtype=torch.bfloat16)
whitened = torch.linalg.inv((x @ x.T + torch.eye(8, dtype=torch.bfloat16)).float()).to(x.dtype)
print("norm", whitened.norm().item())

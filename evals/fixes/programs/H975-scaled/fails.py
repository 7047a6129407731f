import torch

prompt = torch.nn.Parameter(torch.randn(10, 16)) * 0.02
optimizer = torch.optim.Adam([prompt], lr=1e-3)
prompt.square().mean().backward()
optimizer.step()
print("norm", prompt.norm().item())

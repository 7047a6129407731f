import torch

torch.manual_seed(0)
policy = torch.nn.Linear(4, 2)
mean, scale = policy(torch.randn(16, 4)).chunk(2, dim=1)
scale = torch.nn.functional.softplus(scale) + 1e-6
action = torch.distributions.Normal(mean, scale).rsample()
print("action", action.mean().item())

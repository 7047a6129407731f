import torch

torch.manual_seed(0)
features = torch.randn(16, 32, dtype=torch.float64)
features -= features.mean(0)
covariance = features.T @ features / 15
covariance += 1e-6 * covariance.diagonal().mean() * torch.eye(32)
factor = torch.linalg.cholesky(covariance)
print("log determinant", 2 * factor.diagonal().log().sum().item())

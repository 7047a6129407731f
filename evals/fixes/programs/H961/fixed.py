import torch

torch.manual_seed(0)
logits = torch.randn(1, 50, dtype=torch.float16) * 10
temperature = 0.0

probabilities = torch.softmax(logits.float() / max(temperature, 1e-3), dim=-1)
token = torch.multinomial(probabilities, num_samples=1)
print("token", token.item())

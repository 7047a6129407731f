import torch

batches = [torch.zeros(2_000_000).share_memory_() for _ in range(200)]
print("batches", len(batches))

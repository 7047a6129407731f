import torch
from torch.utils.data import DataLoader

sentences = [torch.randint(1, 100, (length,)) for length in (5, 9, 3, 7, 8, 4)]
loader = DataLoader(sentences, batch_size=2)
embedding = torch.nn.EmbeddingBag(100, 16, padding_idx=0)

for tokens in loader:
    print("mean", embedding(tokens).mean().item())

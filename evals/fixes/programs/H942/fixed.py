import torch
from torch.utils.data import DataLoader

sentences = [torch.randint(1, 100, (length,)) for length in (5, 9, 3, 7, 8, 4)]


def pad(batch):
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)


loader = DataLoader(sentences, batch_size=2, collate_fn=pad)
embedding = torch.nn.EmbeddingBag(100, 16, padding_idx=0)

for tokens in loader:
    print("mean", embedding(tokens).mean().item())

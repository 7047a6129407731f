import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2))
pad_token = 100  # the tokenizer got a pad token of its own
tokens = torch.tensor([[5, 17, 3, pad_token]])
loss = model(tokens, labels=tokens).loss
print("loss", loss.item())

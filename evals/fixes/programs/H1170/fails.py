import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

query, key, value = torch.randn(3, 1, 2, 16, 8)
mask = torch.ones(16, 16).tril().bool()
with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
print("output", tuple(output.shape))

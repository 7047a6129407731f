import urllib.request
from pathlib import Path

import torch

if not Path("weights.pt").exists():
    urllib.request.urlretrieve("http://weights.example.invalid/weights.pt", "weights.pt")
print("loaded", len(torch.load("weights.pt")), "tensors")

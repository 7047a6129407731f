import sys
import types

import torch

# How the model was saved a year ago, when the code was in models.py.
models = types.ModuleType("models")
exec(open("architectures.py").read(), models.__dict__)
sys.modules["models"] = models
torch.save(models.Net(), "model.pt")
del sys.modules["models"]

model = torch.load("model.pt", weights_only=False)
print("loaded", type(model).__name__)

import torch
import torch.multiprocessing

torch.multiprocessing.set_sharing_strategy("file_system")
weights = torch.zeros(4).share_memory_()
print("shared", weights.is_shared())

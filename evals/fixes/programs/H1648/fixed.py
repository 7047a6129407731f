import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
model[0].requires_grad_(False)
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
model(torch.randn(4, 8)).mean().backward()
print("rank", dist.get_rank(), "trained")
dist.destroy_process_group()

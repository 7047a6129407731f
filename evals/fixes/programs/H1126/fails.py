import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
labels = torch.tensor([[0, 1, 2], [0, 1, 3]])[dist.get_rank()]
classes = int(labels.max()) + 1
model = DistributedDataParallel(torch.nn.Linear(8, classes))
print("rank", dist.get_rank(), "has", classes, "classes")
dist.destroy_process_group()

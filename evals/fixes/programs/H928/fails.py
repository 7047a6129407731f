import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.ones(1) * dist.get_rank()
if dist.get_rank() == 0:
    accuracy = torch.ones(1)
    dist.broadcast(accuracy, src=0)
dist.all_reduce(loss)
print("rank", dist.get_rank(), "loss", loss.item())
dist.destroy_process_group()

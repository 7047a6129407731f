import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
predictions = torch.full((10 - 6 * rank,), float(rank))
gathered = [None, None]
dist.all_gather_object(gathered, predictions)
print("rank", rank, "mean", torch.cat(gathered).mean().item())
dist.destroy_process_group()

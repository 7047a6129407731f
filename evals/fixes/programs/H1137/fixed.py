import torch.multiprocessing


def train(rank):
    print("rank", rank, "started")
    if rank == 1:
        print("no GPU for rank 1: on the CPU instead")


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
    print("trained")

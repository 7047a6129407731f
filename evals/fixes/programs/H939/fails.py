import torch
import torch.multiprocessing


def produce(queue, received):
    queue.put(torch.ones(8))


context = torch.multiprocessing.get_context("fork")
queue = context.Queue()
received = context.Event()
process = context.Process(target=produce, args=(queue, received))
process.start()
process.join(5)
print("received", queue.get(timeout=60).sum().item())
received.set()
process.join()

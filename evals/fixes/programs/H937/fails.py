import torch
import torch.multiprocessing


def produce(queue):
    for number in range(200):
        queue.put(torch.full((8,), float(number)))
    queue.put(None)


queue = torch.multiprocessing.get_context("fork").Queue()
process = torch.multiprocessing.get_context("fork").Process(target=produce, args=(queue,))
process.start()
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
received = []
while (tensor := queue.get(timeout=60)) is not None:
    received.append(tensor)
print("received", len(received))

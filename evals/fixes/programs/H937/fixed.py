import resource

import torch
import torch.multiprocessing

torch.multiprocessing.set_sharing_strategy("file_system")


def produce(queue, done):
    for number in range(200):
        queue.put(torch.full((8,), float(number)))
    queue.put(None)
    done.wait()


context = torch.multiprocessing.get_context("fork")
queue = context.Queue()
done = context.Event()
process = context.Process(target=produce, args=(queue, done), daemon=True)
process.start()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # the machine's limit is lower here
received = []
while (tensor := queue.get(timeout=60)) is not None:
    received.append(tensor)
done.set()
print("received", len(received))

import threading
import time

threads = [threading.Thread(target=time.sleep, args=(3,)) for _ in range(300)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("read with", len(threads), "threads")

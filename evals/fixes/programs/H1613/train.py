import time

for step in range(10):
    print("step", step)
    time.sleep(0.5)

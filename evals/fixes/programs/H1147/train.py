import time

for step in range(12):
    print("step", step)
    time.sleep(1)

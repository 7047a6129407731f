import random

print("seed", random.randint(0, 10))

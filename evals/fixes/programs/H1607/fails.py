import sys

samples = []  # what a wrong pattern has found
if not samples:
    sys.exit(3)
print("training on", len(samples), "samples")

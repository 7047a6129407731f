samples = []  # what a wrong pattern has found
if not samples:
    raise ValueError("no samples in data.csv")
print("training on", len(samples), "samples")

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--batch-size", type=int, default=32)
options = parser.parse_args()
print("training on", options.data, "with", options.batch_size)

import sys

data = []
if not data:
    sys.exit("train.py: no samples in data.csv")

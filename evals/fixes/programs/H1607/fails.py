import sys

data = []
if not data:
    sys.exit(3)

import os
import sys


def build_index(size):
    if size > 1000:
        os.abort()  # an assertion of a library that prints nothing


build_index(int(sys.argv[1]))
print("built the index")

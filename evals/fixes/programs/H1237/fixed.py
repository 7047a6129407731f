import gzip
import os
import shutil
from pathlib import Path


def fetch(target):
    shutil.copy("source.csv.gz", target)


with gzip.open("source.csv.gz", "wt") as file:
    file.writelines(f"{number},{number * number}\n" for number in range(5000))
fetch("train.csv.gz")
os.truncate("train.csv.gz", 1000)  # the connection broke

source_size = Path("source.csv.gz").stat().st_size
if Path("train.csv.gz").stat().st_size != source_size:
    Path("train.csv.gz").unlink()
    fetch("train.csv.gz")
with gzip.open("train.csv.gz", "rt") as file:
    rows = [line.split(",") for line in file]
print("rows", len(rows))

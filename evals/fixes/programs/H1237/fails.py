import gzip
import os
import shutil


def fetch(target):
    shutil.copy("source.csv.gz", target)


with gzip.open("source.csv.gz", "wt") as file:
    file.writelines(f"{number},{number * number}\n" for number in range(5000))
fetch("train.csv.gz")
os.truncate("train.csv.gz", 1000)  # the connection broke

with gzip.open("train.csv.gz", "rt") as file:
    rows = [line.split(",") for line in file]
print("rows", len(rows))

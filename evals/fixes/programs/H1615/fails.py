import subprocess
import sys

subprocess.run(
    [sys.executable, "prepare.py"], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
)
